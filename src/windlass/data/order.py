"""The order in which rows are trained on: from the seed alone, so that any number of ranks sees the same batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]
# Global batches that are sorted by length together: more pads less, fewer shuffles better. Fifty is what
# transformers' own length-grouped sampler uses.
WINDOW_BATCHES = 50


def shuffled(count: int, seed: int, epoch: int) -> Order:
    """A permutation of the rows for this epoch."""
    return np.random.default_rng((seed, epoch)).permutation(count)


def of_epoch(count: int, wanted: int, seed: int, epoch: int) -> Order:
    """Which of a set's rows an epoch has, if it has so many: all of them once before any comes again."""
    first, stop = epoch * wanted, (epoch + 1) * wanted
    passes = [shuffled(count, seed, number) for number in range(first // count, -(-stop // count))]
    return np.concatenate(passes)[first % count :][:wanted] if wanted else np.zeros(0, np.int64)


def length_grouped(lengths: npt.NDArray[np.int64], batch: int, seed: int, epoch: int) -> Order:
    """A permutation whose global batches hold rows of like length; the batch with the longest row comes first.

    Batches are cut by the global batch, which ranks and accumulation share between them, so the order does not
    depend on how many ranks there are. The longest first: what would run out of memory does so at step one.
    """
    order = shuffled(len(lengths), seed, epoch)
    window = max(1, batch * WINDOW_BATCHES)
    full = len(order) - len(order) % batch  # the short last batch stays last: elsewhere it would shift all others
    batches: list[Order] = []
    for start in range(0, full, window):
        part = order[start : min(start + window, full)]
        part = part[np.argsort(-lengths[part], kind="stable")]
        batches += [part[i : i + batch] for i in range(0, len(part), batch)]
    turn = np.random.default_rng((seed, epoch, 1)).permutation(len(batches)).tolist()
    if turn:
        longest = max(turn, key=lambda i: (int(lengths[batches[i]].max()), -i))
        turn.remove(longest)
        turn.insert(0, longest)
    return np.concatenate([*(batches[i] for i in turn), order[full:]]) if len(order) else order
