"""`windlass init --model --data`: the shortest run file that trains fast, with the reason for each choice."""

import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from windlass import hardware
from windlass.data.sources import count_rows
from windlass.errors import UserError
from windlass.model import find_base
from windlass.plan import make_plan
from windlass.plan.resolve import COVERED, FEW_STEPS, MOST_EPOCHS, SAMPLED, SHORTEST
from windlass.runfile import Loaded, read_run_file
from windlass.runfile.reference import render_settings

LONGEST: Final = 16_384  # largest data.max_length
MANY_STEPS: Final = 150  # with more steps than this, an optimizer step takes more rows
UNKNOWN: Final = 2048  # data.max_length for rows of unknown lengths
MOST_SEQUENCES: Final = 128  # most sequences of an optimizer step


class Draft:
    """Settings by key, each with its reason, and warnings."""

    def __init__(self, settings: dict[str, tuple[Any, str]]) -> None:
        self.settings = settings
        self.warnings = list[str]()

    @property
    def text(self) -> str:
        values, reasons = ({key: each[i] for key, each in self.settings.items()} for i in (0, 1))
        return render_settings(values, reasons, "Next step: windlass plan run.yaml")

    def load(self, **changes: Any) -> Loaded:
        """Load it as a run file, with other values for some keys."""
        changed = Draft(self.settings | {key.replace("__", "."): (value, "") for key, value in changes.items()})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.yaml"
            path.write_text(changed.text, encoding="utf-8")
            return read_run_file(path)


def draft_run(model: str, data: str, gpus: str | None, say: Callable[[str], None], columns: str | None = None) -> Draft:
    """Choose what fits the data, the model and the machines."""
    try:
        return _draft(model, data, gpus, say, columns)
    except UserError as error:  # its places are in a file that is gone
        flags = {
            "model.model_name_or_path": "--model",
            "data.dataset_name_or_path": "--data",
            "data.text_field": "--data",
        }
        keys = [problem.where.rpartition(": ")[2] for problem in error.problems]
        problems = [
            replace(
                problem,
                where="--columns" if key.startswith("data.columns") else flags.get(key, key),
                hint=re.sub(r"data\.columns: (\{.*?\})", r"--columns '\1'", problem.hint),
            )
            for problem, key in zip(error.problems, keys, strict=True)
        ]
        raise UserError.of(problems) from None


def _draft(model: str, data: str, gpus: str | None, say: Callable[[str], None], columns: str | None) -> Draft:
    base = find_base(model, "--model")
    nodes, per_node, gpu = _parse_gpus(gpus)
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
            "data.packing": (True, "short rows share a sequence and can't attend to each other"),
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
    if columns is not None:
        try:
            named = yaml.safe_load(columns)
        except yaml.YAMLError:
            named = None
        if not isinstance(named, dict):
            hint = "name the format's columns and yours: --columns '{prompt: question, completion: answer}'"
            raise UserError(f"{columns!r} is not a mapping", "--columns", hint)
        made.settings["data.columns"] = (named, "")
    if nodes > 1:
        made.settings["cluster.network"] = ("infiniband-400", "between nodes: put in what you have")
    if gpu == "cpu":
        made.settings["model.torch_dtype"] = ("float32", "CPUs compute in it")
    _follow_data(made, base, say)
    _fit_memory(made)
    return made


def _parse_gpus(gpus: str | None) -> tuple[int, int, str]:
    """Parse 8xh200 as eight GPUs on one node and 2x8xh200 as two such nodes; None: this machine's."""
    if gpus is None:
        here = hardware.read_this_machine().gpus
        return 1, max(1, len(here)), hardware.read_gpu_name()
    *counts, name = gpus.lower().split("x")
    if len(counts) > 2 or not all(count.isdigit() and int(count) for count in counts) or not name:
        raise UserError(f"{gpus!r} is not a number of GPUs", "--gpus", "write 8xh200, or 2x8xh200 for two nodes")
    nodes, per_node = [1, 1, *map(int, counts)][-2:]
    return nodes, per_node, "cpu" if name == "cpu" else hardware.find_gpu(name, "--gpus").name


def _follow_data(made: Draft, base: Any, say: Callable[[str], None]) -> None:
    """Set length, batch and epochs from the rows' lengths and number."""
    lengths, rows = _sample_lengths(made, base, say)
    longest = UNKNOWN
    why = "row lengths are unknown: see `windlass data run.yaml`"
    if len(lengths) > 1:
        covered = sorted(lengths)[math.ceil(len(lengths) * COVERED / 100) - 1]
        longest = min(-(-min(LONGEST, max(SHORTEST, covered)) // 256) * 256, base.positions or LONGEST)
        share = sum(length <= longest for length in lengths) / len(lengths)
        why = f"{share:.1%} of the rows fit uncut, by the first {len(lengths):,}"
    made.settings["data.max_length"] = (longest, why)
    if rows is None or not lengths:
        made.warnings.append("the rows can't be counted: set train.global_batch_size yourself")
        return
    mean = sum(min(length, longest) for length in lengths) / len(lengths)
    sequences = max(1, math.ceil(rows * 0.98 * mean / longest))
    ranks = made.settings["cluster.nodes"][0] * made.settings["cluster.gpus_per_node"][0]
    epochs = min(MOST_EPOCHS, max(1, math.ceil(FEW_STEPS * 2 * ranks / sequences)))
    batch = min(MOST_SEQUENCES, max(ranks, epochs * sequences // MANY_STEPS)) // ranks * ranks or ranks
    steps = max(1, epochs * sequences // batch)
    made.settings |= {
        "train.num_train_epochs": (epochs, f"{steps} optimizer steps of about {batch * longest:,} tokens"),
        "train.global_batch_size": (batch, "sequences per optimizer step, over all GPUs"),
        **dict.fromkeys(("train.eval_steps", "train.save_steps"), (max(1, steps // 10), "")),
    }
    if steps < FEW_STEPS:
        warning = f"{rows:,} rows make only {steps} optimizer steps: an adapter hardly learns in fewer than {FEW_STEPS}"
        made.warnings.append(warning)


def _sample_lengths(made: Draft, base: Any, say: Callable[[str], None]) -> tuple[list[int], int | None]:
    """Return the lengths of the first rows in tokens, and the number of rows."""
    loaded = made.load()
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
        sampled = {"data__train_split": f"{split}[:{SAMPLED}]", "data__val_fraction": None, "data__packing": False}
        loaded = made.load(train__output_dir=folder, train__eval_strategy="no", **sampled)
        audit_data(loaded, say=lambda _: None, audited=audits.append)
    found = audits[0]["splits"]["train"]
    say(f"{found['documents']:,} rows tokenized, {found['lengths'].get('mean', 0):.0f} tokens each on average")
    most = found["lengths"]["most"]
    lengths = list[int]()
    for low, high, count in found["histogram"]:  # spread evenly within each of its bins
        high = min(high, most)
        lengths += [low + (high - low) * (i + 1) // count for i in range(count)]
    return lengths, rows.count


def _fit_memory(made: Draft) -> None:
    """Recompute activations only if the run doesn't fit otherwise, and pack only if rows can't attend to each other."""
    try:
        plan = make_plan(made.load())
    except UserError as error:
        if not any("packing" in problem.where for problem in error.problems):
            raise
        made.settings["data.packing"] = (False, error.problems[0].problem)
        plan = make_plan(made.load())
    if not plan.cost.fits:
        made.settings["train.gradient_checkpointing"] = (True, "it doesn't fit without")
        plan = make_plan(made.load())
    if not plan.cost.fits:
        made.warnings.append(plan.cost.remedy)
