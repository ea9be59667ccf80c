"""`windlass init --model --data`: the shortest run file that trains fast, with the reason for each choice."""

import math
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from windlass import hardware
from windlass.data.reading import RowCount
from windlass.data.select import RowSet, list_training_sets
from windlass.data.sources import resolve_source
from windlass.errors import UserError, raise_all
from windlass.model import Base, find_base
from windlass.model.targets import resolve_adapter
from windlass.observe.format import format_plural
from windlass.plan import Plan, make_plan
from windlass.plan.resolve import FEW_STEPS, MOST_EPOCHS, SHORTEST
from windlass.plan.rows import NO_DATA, DataSample, SplitSample, sample_data
from windlass.plan.validate import check_rows
from windlass.runfile import Loaded, parse_settings, read_run_file
from windlass.runfile.accelerate import AccelerateFile
from windlass.runfile.reference import render_settings
from windlass.serve.servers import judge_adapter

LONGEST: Final = 16_384  # largest data.max_length
MANY_STEPS: Final = 150  # with more steps than this, an optimizer step takes more rows
SOONEST: Final = 5  # steps between evaluations, if there are few
HELD_OUT: Final = 0.02  # share of the rows that is evaluated on
FEW_HELD_OUT: Final = 20  # rows: fewer say little, and of few rows more are held out
MOST_HELD_OUT: Final = 0.1
UNKNOWN: Final = 2048  # data.max_length for rows of unknown lengths
NETWORK: Final = "infiniband-400"  # between nodes, if none is named
USUAL_BATCH: Final = 64  # sequences of an optimizer step, if there are no rows to go by
MOST_SEQUENCES: Final = 128  # most sequences of an optimizer step
ANY_RANKS: Final = 8  # sequences of an optimizer step divide by it, if the number of ranks isn't known
TEMPORARY: Final = re.compile(r"/\S+/run\.yaml:\d+: ")  # a place in a draft's file, which is gone
# A setting in a hint of what refuses the rows, if it leaves the prompt as it is at inference.
HINTED: Final = re.compile(r"data\.(turns|tools|reasoning|template_kwargs): (\{[^{}]*\}|\w+)")


@dataclass
class Draft:
    """Settings by key, each with its reason, and warnings."""

    settings: dict[str, tuple[Any, str]]
    warnings: list[str] = field(default_factory=list)
    ranks: int = 1
    has_ranks: bool = False  # whether it will have so many
    fixed: frozenset[str] = frozenset()  # keys that the user has set
    sample: DataSample | None = None  # of its rows, once it is drawn

    def set(self, key: str, value: Any, reason: str = "") -> None:
        """Set a key that the user hasn't set."""
        if key not in self.fixed:
            self.settings[key] = (value, reason)

    @property
    def text(self) -> str:
        values, reasons = ({key: each[i] for key, each in self.settings.items()} for i in (0, 1))
        return render_settings(values, reasons, "Next step: windlass plan run.yaml")

    def load(self, accelerate: AccelerateFile | None = None, overrides: Sequence[str] = (), **changes: Any) -> Loaded:
        """Load it as a run file, with other values for some keys. `overrides`: of those that are fixed already, which
        win over an Accelerate file."""
        changed = Draft(self.settings | {key.replace("__", "."): (value, "") for key, value in changes.items()})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.yaml"
            path.write_text(changed.text, encoding="utf-8")
            loaded = read_run_file(path, overrides, accelerate)
        places = {key: f"--override {key}" if key in self.fixed else key for key in loaded.places}
        places |= {key: place for key, place in loaded.places.items() if not place.startswith(folder)}
        return replace(loaded, places=places)  # the file is gone


def draft_run(
    model: str,
    data: str | None,
    gpus: str | None,
    say: Callable[[str], None],
    columns: str | None = None,
    overrides: Sequence[str] = (),
) -> Draft:
    """Choose what fits the data, the model and the machines. Without data: for rows of `data.max_length` tokens."""
    with name_options(overrides):
        base = find_base(model, "--model")
        made = Draft(
            {
                "model.model_name_or_path": (model, ""),
                "lora.r": (16, ""),
                "lora.lora_alpha": (32, ""),
                "lora.lora_dropout": (0.0, ""),
                "lora.target_modules": ("all-linear", ""),
                "data.dataset_name_or_path": (data or "no-data", ""),
                "data.val_fraction": (HELD_OUT, "held out to evaluate on"),
                "data.max_length": (LONGEST, ""),
                "data.packing": (True, "short rows share a sequence and can't attend to each other"),
                "train.output_dir": ("run", ""),
                "train.num_train_epochs": (1, ""),
                "train.per_device_train_batch_size": ("auto", "the fastest that fits"),
                "train.global_batch_size": (ANY_RANKS, "sequences per optimizer step"),
                "train.gradient_checkpointing": (False, "it fits without"),
                "train.learning_rate": (2e-4, ""),
                "train.lr_scheduler_type": ("cosine", ""),
                "train.logging_steps": (1, ""),
                "train.resume": ("auto", "the same command resumes after an interruption"),
                "layout.name": ("auto", "the fastest that fits"),
            }
        )
        set_machine(made, gpus)
        if columns is not None:
            try:
                named = yaml.safe_load(columns)
            except yaml.YAMLError:
                named = None
            if not isinstance(named, dict):
                hint = "name the format's columns and yours: --columns '{prompt: question, completion: answer}'"
                raise UserError(f"{columns!r} is not a mapping", "--columns", hint, "not-a-mapping")
            made.set("data.columns", named)
        settings = parse_settings(overrides)
        made.settings |= {key: (value, "") for key, value in settings.items()}
        made.fixed = frozenset(settings)
        if settings.get("train.objective", "sft") != "sft":
            _prefer(made)
        _leave_out_unserved(made, base)
        if data is None:
            nothing = RowSet("data", made.load().run.data, str)
            made.sample = DataSample([SplitSample(nothing, RowCount(None, NO_DATA))], [], None)
            made.set("train.global_batch_size", round_to_ranks(USUAL_BATCH, made.ranks))
        else:
            made.sample = _sample(made, base, say)
            raise_all(check_rows(made.sample))
            _follow_data(made, base, made.sample)
        plan = _fit_memory(made)
        _set_rhythm(made, plan, made.sample)
        return made


@contextmanager
def name_options(overrides: Sequence[str]) -> Iterator[None]:
    """Name the option behind each problem of a draft, whose file is gone."""
    try:
        yield
    except UserError as error:
        flags = {
            "model.model_name_or_path": "--model",
            "data.dataset_name_or_path": "--data",
            "data.text_field": "--data",
        }
        problems = []
        for problem in error.problems:
            key = problem.where.rpartition(": ")[2]
            where = "--columns" if key.startswith("data.columns") else flags.get(key, key)
            if any(override.startswith(f"{key}=") for override in overrides):
                where = f"--override {key}"
            hint = re.sub(r"data\.columns: (\{.*?\})", r"--columns '\1'", problem.hint)
            hint = re.sub(r"(data\.\w+|train\.objective): (\{.*?\}|\w+)", r"--override '\1=\2'", hint)
            text = TEMPORARY.sub("", problem.problem)
            problems.append(replace(problem, problem=text, where=where, hint=hint))
        raise UserError.of(problems) from None


def round_to_ranks(sequences: int, ranks: int) -> int:
    """Return the nearest number of sequences that divides evenly over the ranks."""
    return max(1, round(sequences / ranks)) * ranks


def _leave_out_unserved(made: Draft, base: Base) -> None:
    """Leave out targets that the server of `export.server` doesn't apply."""
    loaded = made.load()
    adapter = resolve_adapter(loaded.run.lora, base, loaded.where)
    adapted = [f"{module}.weight" for module in adapter.target_modules]
    verdicts = [v for v in judge_adapter(loaded.run.export.server, base, adapted, [], {}) if v.is_refused]
    unserved = {module.rpartition(".")[2] for verdict in verdicts for module in verdict.modules}
    leaves = dict.fromkeys(module.rpartition(".")[2] for module in adapter.target_modules)
    served = [leaf for leaf in leaves if leaf not in unserved]
    if unserved and served:
        made.set("lora.target_modules", served, f"without {', '.join(sorted(unserved))}: {verdicts[0]}")
    elif unserved:
        made.warnings.append(f"{verdicts[0]}: merge the adapter to serve it")


def set_machine(made: Draft, gpus: str | None) -> None:
    """Set the machines, if they are named; otherwise the run takes what it finds."""
    if gpus is None:
        found = hardware.read_gpus(health=False).gpus
        gpu = found[0].name if found else "cpu"
        made.ranks = len(found) or 1
        made.has_ranks = bool(found)
    else:
        nodes, per_node, gpu = hardware.parse_gpus(gpus, "--gpus")
        made.ranks = nodes * per_node
        made.has_ranks = True
        made.set("train.bf16", hardware.find_gpu(gpu).has_bf16)
        made.set("cluster.nodes", nodes)
        made.set("cluster.gpus_per_node", per_node)
        made.set("cluster.gpu", gpu)
        made.set("train.global_batch_size", round_to_ranks(ANY_RANKS, made.ranks), "sequences per optimizer step")
        if nodes > 1:
            made.set("cluster.network", NETWORK, "between nodes: put in what you have")
    if gpu == "cpu":
        if hardware.has_bf16_products():
            made.set("model.torch_dtype", "float32", "what is not a product is computed in it")
            made.set("train.bf16", True, "products: this processor has instructions for them")
        else:
            made.set("model.torch_dtype", "float32", "all is computed in it")
            made.set("train.bf16", False, "this processor has no instructions for bfloat16")
        if gpus is None:
            made.warnings.append("this machine has no GPU, and the run is made for it: --gpus 8xh100 names another")


def _sample(made: Draft, base: Base, say: Callable[[str], None]) -> DataSample:
    """Render and tokenize a sample of the rows; set what the template needs for them, as its errors say."""
    loaded = made.load()
    for row_set in list_training_sets(loaded.run.data, loaded.where):
        resolve_source(row_set.data, row_set.where)  # or what is wrong with the path
    if sample_data(loaded.run.data, None, loaded.where).pairs:
        _prefer(made)
    for _ in range(4):
        loaded = made.load()
        sample = sample_data(loaded.run.data, base.path, loaded.where)
        problem = next(iter(sample.problems), None)
        if problem is None:
            break
        hinted = HINTED.search(problem.hint)
        key = f"data.{hinted[1]}" if hinted else ""
        if not hinted or key in made.settings:
            raise UserError.of([problem])
        reason = re.sub(r"^.*?: row \d+: ", "", problem.problem)  # the row itself is not to blame
        made.set(key, yaml.safe_load(hinted[2]), textwrap.shorten(reason, 100, placeholder=" …"))
        made.warnings.append(f"{key} {hinted[2]}: {problem.problem}")
    if sample.tokenized:
        tokens = [tokens for tokens, _ in sample.lengths()]
        rows = format_plural(sample.sampled, "row")
        say(f"{rows} tokenized, {sum(tokens) / max(1, len(tokens)):.0f} tokens each on average")
    loaded = made.load(data__val_fraction=None)
    if "data.val_fraction" not in made.fixed and sample_data(loaded.run.data, None, loaded.where).evaluated:
        made.settings.pop("data.val_fraction")  # the data have validation rows of their own
        loaded = made.load()
        return sample_data(loaded.run.data, base.path, loaded.where)
    count = sum(split.rows.count or 0 for split in sample.train)
    if count and count * HELD_OUT < FEW_HELD_OUT:
        share = min(MOST_HELD_OUT, math.ceil(100 * FEW_HELD_OUT / count) / 100)
        made.set("data.val_fraction", share, f"about {format_plural(round(count * share), 'row')} to evaluate on")
        loaded = made.load()
        return sample_data(loaded.run.data, base.path, loaded.where)
    return sample


def _prefer(made: Draft) -> None:
    """Set what pairs of a chosen and a rejected answer are trained with."""
    made.set("train.objective", "dpo", "the rows have a chosen and a rejected answer")
    if made.settings["train.objective"][0] == "sft":
        return
    if made.settings["train.objective"][0] == "dpo":
        made.set("dpo.beta", 0.1, "larger stays closer to the model before step 1")
    made.set("train.learning_rate", 1e-5, "pairs need less: ten times TRL's 1e-6 for whole models")
    made.set("data.packing", False, "the two answers of a pair are padded")


def _follow_data(made: Draft, base: Base, sample: DataSample) -> None:
    """Set length, batch and epochs from the rows' lengths and number."""
    documents = sample.lengths()
    covered_percent = made.load().run.objective.covered_percent
    longest = UNKNOWN
    why = "row lengths are unknown: see `windlass data run.yaml`"
    if documents:
        lengths = sorted(tokens for tokens, _ in documents)
        covered = lengths[math.ceil(len(lengths) * covered_percent / 100) - 1]
        longest = min(-(-min(LONGEST, max(SHORTEST, covered)) // 256) * 256, base.positions or LONGEST)
        share = sum(tokens <= longest for tokens in lengths) / len(lengths)
        why = f"{share:.1%} of a sample of {len(lengths):,} fit uncut{'' if sample.tokenized else ', by their bytes'}"
        if not share:
            why = f"every row is longer, {lengths[len(lengths) // 2]:,} tokens at the middle, and is cut"
            made.warnings.append(f"data.max_length {longest:,}: {why}")
        lost = sum(trained_at >= longest for _, trained_at in documents)
        if lost == len(documents):
            problem = f"no row has anything to train on within {longest:,} tokens, the most that is chosen"
            raise UserError(problem, "--data", "shorten the prompts, or split the rows", "nothing-supervised")
        if lost:
            rows = f"{lost / len(documents):.1%} of the rows"
            made.warnings.append(f"{rows} have nothing to train on within {longest:,} tokens and are left out")
    made.set("data.max_length", longest, why)
    loaded = made.load()
    sequences = sample.estimate(loaded.run.data).sequences
    if sequences is None or not documents:
        made.warnings.append("the rows can't be counted: set train.global_batch_size yourself")
        return
    even = made.ranks if made.has_ranks else math.lcm(made.ranks, ANY_RANKS)
    epochs = min(MOST_EPOCHS, max(1, math.ceil(FEW_STEPS * 2 * even / sequences)))
    batch = min(MOST_SEQUENCES, max(even, epochs * sequences // MANY_STEPS)) // even * even or even
    made.set("train.num_train_epochs", epochs)
    made.set("train.global_batch_size", batch, f"{loaded.run.train.unit}s per optimizer step, over all GPUs")


def _fit_memory(made: Draft) -> Plan:
    """Recompute activations only if the run doesn't fit otherwise, and pack only if rows can't attend to each other."""
    try:
        plan = make_plan(made.load(), sample=made.sample)
    except UserError as error:
        if not any("packing" in problem.where for problem in error.problems) or "data.packing" in made.fixed:
            raise
        made.set("data.packing", False, error.problems[0].problem)
        plan = make_plan(made.load(), sample=made.sample)
    if not plan.cost.fits and "train.gradient_checkpointing" not in made.fixed:
        made.set("train.gradient_checkpointing", True, "it doesn't fit without")
        plan = make_plan(made.load(), sample=made.sample)
    if not plan.cost.fits:
        made.warnings.append(plan.cost.remedy)
    return plan


def _set_rhythm(made: Draft, plan: Plan, sample: DataSample) -> None:
    """Evaluate and save ten times, and say how many steps the plan counts."""
    steps = plan.schedule.steps
    if steps is None:
        return
    epochs, _ = made.settings["train.num_train_epochs"]
    about = "" if plan.schedule.tolerance == 0 else "about "
    tokens = plan.schedule.global_sequences * plan.batch.sides * plan.counts.lengths.usual
    made.set("train.num_train_epochs", epochs, f"{about}{steps:,} optimizer steps of about {tokens:,} tokens")
    for key in ("train.eval_steps", "train.save_steps"):
        made.set(key, max(min(steps, SOONEST), steps // 10))
    if steps < FEW_STEPS:
        rows = format_plural(sum(split.rows.count or 0 for split in sample.train), "row")
        few = format_plural(steps, "optimizer step")
        warning = f"{rows} for only {few}: an adapter hardly learns in fewer than {FEW_STEPS}"
        fewer = made.ranks * max(1, plan.schedule.global_sequences // made.ranks // 2)
        if fewer < plan.schedule.global_sequences:
            warning += f": --override train.global_batch_size={fewer}"
        made.warnings.append(warning)
