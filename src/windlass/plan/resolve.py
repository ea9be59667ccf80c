"""Choose values for settings that are `auto` from the data and the model's family, each with a reason."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from windlass.model import Base, find_base
from windlass.model.saved_adapter import continue_adapter
from windlass.observe.format import format_plural
from windlass.plan.rows import DataSample, sample_data
from windlass.runfile import Loaded, RunFile

FEW_STEPS = 50  # warm-up and decay need some; an adapter hardly moves in fewer
SHORTEST = 512  # limits of data.max_length
LONGEST = 4096
MOST_EPOCHS: Final = 3
UNKNOWN: Final = 1024  # data.max_length for rows of unknown lengths


def resolve_auto(
    loaded: Loaded, base: Base, readers: int, precision: str = "bf16", sample: DataSample | None = None
) -> tuple[RunFile, tuple[str, ...]]:
    """Return the run with a value for each `auto` that the data or the model decide, and the reason for each choice. A
    step trains on the sequences that the user set: packing and epochs are chosen only if no key sets the sequences per
    step. Micro-batches, the layout and recomputation stay `auto`: the plan chooses them by their cost. `precision`: the
    layout's, bf16 or no. `readers`: ranks, or groups of ranks that split rows."""
    run = loaded.run
    sample = sample or sample_data(run.data, base.path, loaded.where)
    data: dict[str, Any] = {}
    train: dict[str, Any] = {}
    reasons: list[str] = []
    if run.data.max_length == "auto":
        data["max_length"], why = choose_length(sample, base.positions, run.objective.covered_percent)
        if why:
            reasons.append(f"data.max_length {data['max_length']}, {', '.join(why)}")
    if run.data.packing == "auto":
        data["packing"] = base.family.isolates is True and not run.train.sets_batch and run.objective.may_pack
        if not run.objective.may_pack:
            reasons.append("data.packing false: the two answers of a pair are padded, one row each")
        if data["packing"]:
            reasons.append(f"data.packing true: {base.family.causal_lm} isolates packed documents")
    run = run.model_copy(update={"data": run.data.model_copy(update=data)})
    if run.train.num_train_epochs == "auto":
        epochs = _choose_epochs(run, sample, readers)
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
    run, reasons = resolve_auto(replace(loaded, run=run), base, run.readers)
    for reason in filter(None, (continued, *reasons)):
        say(f"not set, chosen: {reason}")
    return replace(loaded, run=run)


def choose_length(sample: DataSample, positions: int | None, covered_percent: float) -> tuple[int, list[str]]:
    """Return a length that nearly all sampled rows fit in, and why it was chosen; no reason if nothing is known."""
    length = UNKNOWN
    why: list[str] = []
    lengths = sample.lengths()
    if lengths:
        covered = sorted(tokens for tokens, _ in lengths)[math.ceil(len(lengths) * covered_percent / 100) - 1]
        length = -(-min(LONGEST, max(SHORTEST, covered)) // 256) * 256
    if positions and positions < length:
        length = positions
        why.append("all positions that the model has")
    if lengths:
        share = sum(tokens <= length for tokens, _ in lengths) / len(lengths)
        rows = format_plural(sample.sampled, "row")
        why.append(f"which {share:.1%} of a sample of {rows} fit{'' if sample.tokenized else ', by their bytes'}")
    return length, why


def _choose_epochs(run: RunFile, sample: DataSample, readers: int) -> int:
    """Return the epochs that make FEW_STEPS optimizer steps, at most MOST_EPOCHS; 1 if other keys set the steps."""
    if run.train.sets_batch or run.train.max_steps > 0 or run.data.streaming:
        return 1
    sequences = sample.estimate(run.data).sequences
    if not sequences:
        return 1
    epochs = math.ceil(FEW_STEPS * run.train.micro_batches * readers / sequences)
    return min(MOST_EPOCHS, epochs)
