"""Kept sets, which should not get worse: their loss, the base's, and how far predictions are from the base's."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from windlass.train.base_alone import BaseAlone
from windlass.train.batches import Batches, sum_over_batches
from windlass.train.collate import Batch
from windlass.train.head import Head

FIGURES: Final = 4  # of a set: tokens, and summed over them its loss, the base's, and the divergence


def measure_kept_sets(
    batches: Batches,
    causal_lm: Any,
    base: BaseAlone,
    *,
    autocast: AbstractContextManager[Any],
    begin_batch: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Return each set's loss per supervised token, how much worse than the base's it is, and the divergence KL(adapted
    || base) in nats; None if `begin_batch` says on any rank that a stop signal came. A collective.

    Both are measured in the same batch, with the adapter and without it.
    """
    head = Head(causal_lm)
    count = len(batches.names)

    def measure(batch: Batch) -> Tensor:
        with autocast:
            adapted = head.capture(causal_lm(**batch.inputs).last_hidden_state)
        with base.active(), autocast:  # its own: autocast remembers weights
            of_tokens = head.compare(adapted, causal_lm(**batch.inputs).last_hidden_state, batch.targets)
        figures = torch.cat([torch.ones_like(of_tokens[:1]), of_tokens]).double()
        sources = torch.zeros_like(batch.targets) if batch.sources is None else batch.sources
        return figures.new_zeros(count, FIGURES).index_add_(0, sources, figures.t()).flatten()

    values = sum_over_batches(batches, measure, begin_batch)
    if values is None:
        return None
    means: dict[str, float] = {}
    for number, name in enumerate(batches.names):
        tokens, *summed = values[number * FIGURES : (number + 1) * FIGURES]
        loss, of_base, divergence = (value / max(tokens, 1) for value in summed)
        means |= {f"{name}/loss": loss, f"{name}/worse": loss - of_base, f"{name}/kl": divergence}
    return means


def list_worse(figures: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each kept set got worse."""
    return {name.removesuffix("/worse"): value for name, value in figures.items() if name.endswith("/worse")}
