"""`windlass init --model --data`: the shortest run file that trains fast, with the reason beside each choice."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from windlass import hardware
from windlass import plan as planning
from windlass.data.sources import count_rows
from windlass.errors import UserError
from windlass.model import find_base
from windlass.runfile import Loaded, read
from windlass.runfile.write import text_of

SAMPLED: Final = 2000  # rows that are tokenized to see how long they are
SHORTEST, LONGEST = 512, 16_384  # of data.max_length
COVERED: Final = 99.5  # percent of the rows that fit uncut
FEW_STEPS: Final = 50  # optimizer steps that a run should have at least
MANY_STEPS: Final = 150  # from which an optimizer step takes more rows
UNKNOWN: Final = 2048  # data.max_length for rows of unknown lengths
MOST_SEQUENCES: Final = 128  # of an optimizer step
MOST_EPOCHS: Final = 3


@dataclass(frozen=True, slots=True)
class Draft:
    """The settings by section, each with its reason, and warnings."""

    settings: dict[str, tuple[Any, str]]
    warnings: tuple[str, ...] = ()

    def with_settings(self, **changes: tuple[Any, str]) -> Draft:
        return replace(self, settings={**self.settings, **{key.replace("__", "."): v for key, v in changes.items()}})

    @property
    def text(self) -> str:
        settings = {key: value for key, (value, _) in self.settings.items()}
        return text_of(
            settings, {key: why for key, (_, why) in self.settings.items()}, "Next step: windlass plan run.yaml"
        )


def draft(model: str, data: str, gpus: str | None, say: Callable[[str], None]) -> Draft:
    """Choose what fits the data, the model and the machines."""
    try:
        return _draft(model, data, gpus, say)
    except UserError as error:  # its places are in a file that is gone
        flags = {"model.model_name_or_path": "--model", "data.dataset_name_or_path": "--data"}
        keys = [problem.where.rpartition(": ")[2] for problem in error.problems]
        problems = [
            replace(problem, where=flags.get(key, key)) for problem, key in zip(error.problems, keys, strict=True)
        ]
        raise UserError.of(problems) from None


def _draft(model: str, data: str, gpus: str | None, say: Callable[[str], None]) -> Draft:
    base = find_base(model, "--model")
    nodes, per_node, gpu = _machines(gpus)
    made = Draft(
        {
            "model.model_name_or_path": (model, ""),
            "lora.r": (16, ""),
            "lora.lora_alpha": (32, ""),
            "lora.lora_dropout": (0.0, ""),
            "lora.target_modules": ("all-linear", ""),
            "data.dataset_name_or_path": (data, ""),
            "data.dataset_config_name": (None, ""),
            "data.val_split": (None, ""),
            "data.val_fraction": (0.02, "held out to evaluate on"),
            "data.max_length": (LONGEST, ""),
            "data.packing": (True, "short rows share a sequence and don't see each other"),
            "train.output_dir": ("run", ""),
            "train.num_train_epochs": (1, ""),
            "train.per_device_train_batch_size": ("auto", "the fastest that fits"),
            "train.global_batch_size": (nodes * per_node, "sequences per optimizer step"),
            "train.gradient_checkpointing": (False, "it fits without"),
            "train.learning_rate": (2e-4, ""),
            "train.lr_scheduler_type": ("cosine", ""),
            "train.bf16": (gpu != "cpu", ""),
            "train.logging_steps": (1, ""),
            "train.resume": ("auto", "the same command resumes after an interruption"),
            "layout.name": ("auto", "the fastest that fits"),
            "cluster.nodes": (nodes, ""),
            "cluster.gpus_per_node": (per_node, ""),
            "cluster.gpu": (gpu, ""),
        }
    )
    if nodes > 1:
        made = made.with_settings(cluster__network=("infiniband-400", "between nodes: put in what you have"))
    if gpu == "cpu":
        made = made.with_settings(model__torch_dtype=("float32", "CPUs compute in it"))
    return _fit(_follow_data(made, base, say))


def _machines(gpus: str | None) -> tuple[int, int, str]:
    """8xh200: eight on one node; 2x8xh200: two such nodes; None: what this machine has."""
    if gpus is None:
        here = hardware.this_machine().gpus
        return 1, max(1, len(here)), hardware.this_gpu()
    *counts, name = gpus.lower().split("x")
    if len(counts) > 2 or not all(count.isdigit() and int(count) for count in counts) or not name:
        raise UserError(f"{gpus!r} is no number of GPUs", "--gpus", "write 8xh200, or 2x8xh200 for two nodes")
    nodes, per_node = [1, 1, *map(int, counts)][-2:]
    return nodes, per_node, "cpu" if name == "cpu" else hardware.gpu(name, "--gpus").name


def _follow_data(made: Draft, base: Any, say: Callable[[str], None]) -> Draft:
    """Length, batch and epochs from how long the rows are and how many there are."""
    lengths, rows = _sample(made, base, say)
    longest, why = UNKNOWN, "how long rows are is not known: see `windlass data run.yaml`"
    if len(lengths) > 1:
        longest = _round_up(min(LONGEST, max(SHORTEST, _percentile(lengths, COVERED))), 256)
        share = sum(length <= longest for length in lengths) / len(lengths)
        why = f"{share:.1%} of the rows fit uncut, by the first {len(lengths):,}"
    made = made.with_settings(data__max_length=(longest, why))
    if rows is None or not lengths:
        return replace(
            made, warnings=(*made.warnings, "the rows can't be counted: set train.global_batch_size yourself")
        )
    mean = sum(min(length, longest) for length in lengths) / len(lengths)
    sequences = max(1, math.ceil(rows * 0.98 * mean / longest))
    ranks = made.settings["cluster.nodes"][0] * made.settings["cluster.gpus_per_node"][0]
    epochs = min(MOST_EPOCHS, max(1, math.ceil(FEW_STEPS * 2 * ranks / sequences)))
    batch = min(MOST_SEQUENCES, max(ranks, epochs * sequences // MANY_STEPS)) // ranks * ranks or ranks
    steps = max(1, epochs * sequences // batch)
    every = max(1, steps // 10)
    made = made.with_settings(
        train__num_train_epochs=(epochs, f"{steps} optimizer steps of about {batch * longest:,} tokens"),
        train__global_batch_size=(batch, "sequences per optimizer step, over all GPUs"),
        train__eval_steps=(every, ""),
        train__save_steps=(every, ""),
    )
    if steps < FEW_STEPS:
        warning = f"{rows:,} rows make only {steps} optimizer steps: an adapter hardly learns in fewer than {FEW_STEPS}"
        made = replace(made, warnings=(*made.warnings, warning))
    return made


def _sample(made: Draft, base: Any, say: Callable[[str], None]) -> tuple[list[int], int | None]:
    """The lengths of the first rows in tokens, and how many rows there are."""
    loaded = _read(made)
    split = loaded.run.data.train_split
    rows = count_rows(loaded.run.data, split, loaded.where)
    if base.path is None:
        return ([rows.text_bytes // rows.count // 4] if rows.count and rows.text_bytes else []), rows.count
    try:
        from windlass.data.prepare import audit_data
    except ImportError:
        return [], rows.count
    audits: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        sampled = made.with_settings(
            train__output_dir=(folder, ""),
            data__train_split=(f"{split}[:{SAMPLED}]", ""),
            data__val_fraction=(None, ""),
            data__packing=(False, ""),
            train__eval_strategy=("no", ""),
        )
        audit_data(_read(sampled), say=lambda _: None, audited=audits.append)
    found = audits[0]["splits"]["train"]
    say(f"{found['documents']:,} rows tokenized, {found['lengths'].get('mean', 0):.0f} tokens each on average")
    return _spread(found), rows.count


def _spread(found: dict[str, Any]) -> list[int]:
    """Lengths that are distributed as the audit's histogram: evenly within each of its bins."""
    most, lengths = found["lengths"]["most"], []
    for low, high, count in found["histogram"]:
        high = min(high, most)
        lengths += [low + (high - low) * (i + 1) // count for i in range(count)]
    return lengths


def _percentile(values: Sequence[int], percent: float) -> int:
    return sorted(values)[min(len(values) - 1, math.ceil(len(values) * percent / 100) - 1)]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _fit(made: Draft) -> Draft:
    """Recompute activations only if the run doesn't fit otherwise, and pack only where rows can't see each other."""
    try:
        plan = planning.make(_read(made))
    except UserError as error:
        if not any("packing" in problem.where for problem in error.problems):
            raise
        made = made.with_settings(data__packing=(False, error.problems[0].problem))
        plan = planning.make(_read(made))
    if not plan.cost.fits:
        made = made.with_settings(train__gradient_checkpointing=(True, "it doesn't fit without"))
        plan = planning.make(_read(made))
    if not plan.cost.fits:
        made = replace(made, warnings=(*made.warnings, plan.cost.remedy))
    return made


def _read(made: Draft) -> Loaded:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(made.text, encoding="utf-8")
        return read(path)
