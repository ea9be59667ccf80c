"""Choose settings that the run file leaves open from the data and the model's family, each with a reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from windlass.data import mix
from windlass.data.sources import Rows, Where, parse_split, read_rows, resolve_source
from windlass.errors import UserError
from windlass.model import Base
from windlass.runfile import Data, Loaded

# Bytes of English text per token: WikiText-2 has 11.06 MB in 24,200 non-blank rows, 110 tokens each.
BYTES_PER_TOKEN = 4.15
FEW_STEPS = 50  # warm-up and decay need some; an adapter hardly moves in fewer
SAMPLED: Final = 2000  # rows that are read to estimate their length
SHORTEST, LONGEST = 512, 4096  # limits of data.max_length
COVERED: Final = 99.5  # percent of the rows that fit uncut
MARGIN: Final = 1.25  # for text with more tokens per byte than English, and for tokens that a chat template adds
MOST_EPOCHS: Final = 3
OF_A_STEP: Final = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")


def fill_in_unset(loaded: Loaded, base: Base, ranks: int) -> tuple[Loaded, tuple[str, ...]]:
    """Return the run with open settings filled in, and a description of each choice.

    A step trains on the sequences that the user set: packing and epochs are chosen only if no key sets the sequences
    per step. The plan chooses the micro-batch only if no key is counted in micro-batches.
    """
    run, words = loaded.run, list[str]()

    def is_set(section: str, *keys: str) -> bool:
        return any(loaded.is_set(f"{section}.{key}") for key in keys)

    data: dict[str, Any] = {}
    train: dict[str, Any] = {}
    if not is_set("data", "max_length"):
        longest, why = run.data.max_length, list[str]()
        if lengths := sorted(_sample_lengths(run.data, loaded.where)):
            covered = lengths[math.ceil(len(lengths) * COVERED / 100) - 1] * MARGIN
            longest = -(-int(min(LONGEST, max(SHORTEST, covered))) // 256) * 256
        if base.positions and base.positions < longest:
            longest, why = base.positions, ["all positions that the model has"]
        if lengths:
            share = sum(length * MARGIN <= longest for length in lengths) / len(lengths)
            why.append(f"which {share:.1%} of the first {len(lengths):,} rows fit")
        if why:
            data["max_length"] = longest
            words.append(f"data.max_length {longest}, {', '.join(why)}")
    if not is_set("train", *OF_A_STEP[:2]):
        train["per_device_train_batch_size"] = "auto"
    if not is_set("train", *OF_A_STEP):
        if not is_set("data", "packing") and base.family.isolates:
            data["packing"] = True
            words.append(f"data.packing true: {base.family.causal_lm} isolates packed documents")
        rows = mix.count_all(run.data, loaded.where)
        if not is_set("train", "num_train_epochs", "max_steps") and rows.count and not run.data.streaming:
            length = data.get("max_length", run.data.max_length)
            mean = min(length, estimate_row_tokens(rows) or length)
            sequences = rows.count * mean / length if data.get("packing", run.data.packing) else rows.count
            wanted = math.ceil(FEW_STEPS * run.train.gradient_accumulation_steps * ranks / max(1, sequences))
            if (epochs := min(MOST_EPOCHS, wanted)) > 1:
                train["num_train_epochs"] = epochs
                words.append(f"train.num_train_epochs {epochs}: one makes fewer than {FEW_STEPS} optimizer steps")
    sections = {"data": run.data.model_copy(update=data), "train": run.train.model_copy(update=train)}
    return Loaded(loaded.path, loaded.notes, loaded.places, run.model_copy(update=sections)), tuple(words)


def _sample_lengths(data: Data, where: Where) -> Iterator[int]:
    """Yield about how many tokens the first rows of each set have; stop at a set that can't be read."""
    sets = mix.list_training_sets(data, where)
    for each in sets:
        try:
            parts = parse_split(each.data.train_split, resolve_source(each.data, where), where("data.train_split"))
            yield from map(_estimate_tokens, islice(read_rows(parts), SAMPLED // len(sets)))
        except (UserError, ImportError, OSError):  # reported when the data are prepared
            return


def _estimate_tokens(value: Any) -> int:
    """Estimate the tokens of a row from the bytes of its texts, or from its longest list of token ids."""
    if isinstance(value, str):
        return math.ceil(len(value.encode(errors="replace")) / BYTES_PER_TOKEN)
    if isinstance(value, list) and value and isinstance(value[0], int):
        return math.ceil(len(value) / MARGIN)
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    ids = [_estimate_tokens(each) for each in inner if isinstance(each, list) and each and isinstance(each[0], int)]
    return max(ids) if ids else sum(map(_estimate_tokens, inner))


def estimate_row_tokens(rows: Rows) -> int | None:
    """Return the tokens of a usual row before truncation; None if unknown."""
    if not rows.count or not rows.text_bytes:
        return None
    return math.ceil(rows.text_bytes / max(1, rows.count - rows.blank) / BYTES_PER_TOKEN)
