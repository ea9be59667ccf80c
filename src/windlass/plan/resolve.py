"""Choose values for settings that are `auto` from the data and the model's family, each with a reason."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from windlass.data import mix
from windlass.data.sources import Rows, Where, parse_split, read_rows, resolve_source
from windlass.errors import UserError
from windlass.model import Base, find_base
from windlass.model.saved_adapter import continue_adapter
from windlass.runfile import Data, Loaded, RunFile

# Bytes of English text per token: WikiText-2 has 11.06 MB in 24,200 non-blank rows, 110 tokens each.
BYTES_PER_TOKEN = 4.15
FEW_STEPS = 50  # warm-up and decay need some; an adapter hardly moves in fewer
SAMPLED: Final = 2000  # rows that are read to estimate their length
SHORTEST = 512  # limits of data.max_length
LONGEST = 4096
COVERED: Final = 99.5  # percent of the rows that fit uncut
MARGIN: Final = 1.25  # for text with more tokens per byte than English, and for tokens that a chat template adds
MOST_EPOCHS: Final = 3
UNKNOWN: Final = 1024  # data.max_length for rows of unknown lengths


def resolve_auto(loaded: Loaded, base: Base, ranks: int, precision: str = "bf16") -> tuple[RunFile, tuple[str, ...]]:
    """Return the run with a value for each `auto` that the data or the model decide, and the reason for each choice.

    A step trains on the sequences that the user set: packing and epochs are chosen only if no key sets the sequences
    per step. Micro-batches, the layout and recomputation stay `auto`: the plan chooses them by their cost. `precision`:
    the layout's, bf16 or no.
    """
    run = loaded.run
    data: dict[str, Any] = {}
    train: dict[str, Any] = {}
    reasons: list[str] = []
    if run.data.max_length == "auto":
        data["max_length"], why = _choose_length(run.data, loaded.where, base.positions)
        if why:
            reasons.append(f"data.max_length {data['max_length']}, {', '.join(why)}")
    if run.data.packing == "auto":
        data["packing"] = base.family.isolates is True and not run.train.sets_batch
        if data["packing"]:
            reasons.append(f"data.packing true: {base.family.causal_lm} isolates packed documents")
    run = run.model_copy(update={"data": run.data.model_copy(update=data)})
    if run.train.num_train_epochs == "auto":
        epochs = _choose_epochs(run, loaded.where, ranks)
        train["num_train_epochs"] = float(epochs)
        if epochs > 1:
            reasons.append(f"train.num_train_epochs {epochs}: one makes fewer than {FEW_STEPS} optimizer steps")
    if run.train.per_device_train_batch_size is None:
        train["per_device_train_batch_size"] = "auto" if run.train.plan_cuts_batches else 1
    if run.train.bf16 == "auto":
        train["bf16"] = precision == "bf16"
    return run.model_copy(update={"train": run.train.model_copy(update=train)}), tuple(reasons)


def fill_in_choices(loaded: Loaded, say: Callable[[str], None] = lambda _: None) -> Loaded:
    """Return the run file as `resolve_auto` makes it, without a plan; `say` is called with each choice."""
    base = find_base(loaded.run.model.model_name_or_path, loaded.where("model.model_name_or_path"))
    run, continued = continue_adapter(loaded.run, base, loaded.where)
    run, reasons = resolve_auto(replace(loaded, run=run), base, run.ranks)
    for reason in filter(None, (continued, *reasons)):
        say(f"not set, chosen: {reason}")
    return replace(loaded, run=run)


def _choose_length(data: Data, where: Where, positions: int | None) -> tuple[int, list[str]]:
    """Return a length that nearly all of the first rows fit in, and why it was chosen; no reason if nothing is
    known."""
    length = UNKNOWN
    why: list[str] = []
    lengths = sorted(_sample_lengths(data, where))
    if lengths:
        covered = lengths[math.ceil(len(lengths) * COVERED / 100) - 1] * MARGIN
        length = -(-int(min(LONGEST, max(SHORTEST, covered))) // 256) * 256
    if positions and positions < length:
        length = positions
        why.append("all positions that the model has")
    if lengths:
        share = sum(tokens * MARGIN <= length for tokens in lengths) / len(lengths)
        why.append(f"which {share:.1%} of the first {len(lengths):,} rows fit")
    return length, why


def _choose_epochs(run: RunFile, where: Where, ranks: int) -> int:
    """Return the epochs that make FEW_STEPS optimizer steps, at most MOST_EPOCHS; 1 if other keys set the steps."""
    if run.train.sets_batch or run.train.max_steps > 0 or run.data.streaming:
        return 1
    rows = mix.count_all(run.data, where)
    if not rows.count:
        return 1
    length = run.data.length
    mean = min(length, estimate_row_tokens(rows) or length)
    sequences = rows.count * mean / length if run.data.packs else rows.count
    epochs = math.ceil(FEW_STEPS * run.train.micro_batches * ranks / max(1, sequences))
    return min(MOST_EPOCHS, epochs)


def _sample_lengths(data: Data, where: Where) -> Iterator[int]:
    """Yield about how many tokens the first rows of each set have; stop at a set that can't be read."""
    sets = mix.list_training_sets(data, where)
    for row_set in sets:
        try:
            source = resolve_source(row_set.data, where)
            parts = parse_split(row_set.data.train_split, source, where("data.train_split"))
            yield from map(_estimate_tokens, islice(read_rows(parts), SAMPLED // len(sets)))
        except (UserError, ImportError, OSError):  # reported when the data are prepared
            return


def _estimate_tokens(value: Any) -> int:
    """Estimate the tokens of a row from the bytes of its texts, or from its longest list of token ids."""
    if isinstance(value, str):
        return math.ceil(len(value.encode(errors="replace")) / BYTES_PER_TOKEN)
    if isinstance(value, list) and value and isinstance(value[0], int):
        return math.ceil(len(value) / MARGIN)
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return 0
    ids = [_estimate_tokens(part) for part in value if isinstance(part, list) and part and isinstance(part[0], int)]
    return max(ids) if ids else sum(map(_estimate_tokens, value))


def estimate_row_tokens(rows: Rows) -> int | None:
    """Return the tokens of a usual row before truncation; None if unknown."""
    if not rows.count or not rows.text_bytes:
        return None
    return math.ceil(rows.text_bytes / max(1, rows.count - rows.blank) / BYTES_PER_TOKEN)
