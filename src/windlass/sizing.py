"""Which GPUs does a model need? Plans from a model's name alone, compared over GPUs, and the longest row that fits."""

import math
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from windlass import hardware
from windlass.errors import GIVEN, Problem, UserError, is_written, raise_all
from windlass.files import read_json
from windlass.init import NETWORK, Draft, draft_run, name_options, round_to_ranks, set_machine
from windlass.model import Base, find_base
from windlass.model.base import find_fetched_folder, find_published_base, read_published_configs
from windlass.model.files import CONFIG
from windlass.observe.format import format_duration
from windlass.plan import Plan, make_plan
from windlass.plan.longest import LongestRow, list_columns
from windlass.plan.search import is_same_layout
from windlass.plan.show import MILLIONS, estimate_millions, make_table
from windlass.runfile import Loaded, read_run_file
from windlass.runfile.accelerate import AccelerateFile, load_accelerate
from windlass.runfile.document import load_document
from windlass.runfile.names import find_close_names

ALL: Final = "all"  # of --gpus
COUNTS: Final = ("1x1", "1x2", "1x4", "1x8", "2x8", "3x8", "4x8")  # nodes x GPUs that are compared
# AMD's are in the table, and training expects NVIDIA's.
KINDS: Final = tuple(name for name, gpu in hardware.GPUS.items() if name != "cpu" and not gpu.link.startswith("xgmi"))
TOKENS: Final = 512  # of a row, if there is neither data nor --tokens


@dataclass(frozen=True, slots=True)
class Subject:
    """A run file, or a draft for a model, that can be loaded for any GPUs such as 2x8xh100."""

    name: str  # as the command was given it
    load: Callable[[str | None], Loaded]  # None: its own GPUs
    base: Base
    draft: Draft | None = None

    def plan(self, gpus: str | None = None, *, compare: bool = True) -> Plan:
        if self.draft is None:
            return make_plan(self.load(gpus), base=self.base, compare=compare)
        with name_options(()):
            return make_plan(self.load(gpus), base=self.base, sample=self.draft.sample, compare=compare)


def find_model(name: str) -> str | None:
    """Return the model's name or folder that the argument of `windlass plan` is; None if it is a run file."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / CONFIG).is_file():
            return name
        path = next(path.glob("*.gguf"), path)
    if path.suffix == ".gguf" and path.is_file():
        hint = "name the model that it was made of: its hub id, or a folder with its config.json and safetensors"
        raise UserError("is a GGUF file, in llama.cpp's rounding and names: windlass reads none", name, hint, "gguf")
    if path.is_dir():
        hint = "give a run file, or the folder of a model, which has a config.json"
        raise UserError("is a folder without config.json", name, hint, "not-a-file")
    if path.name == CONFIG and path.is_file():
        return str(path.parent)
    if path.suffix == ".json" and "model_type" in read_json(path):
        folder = shlex.quote(path.stem)
        hint = (
            f"`mkdir {folder} && cp {shlex.quote(name)} {folder}/config.json`, then `windlass plan {folder} --gpus all`"
        )
        raise UserError("is a model's configuration by another name", name, hint, "other-name")
    if path.exists() or path.suffix in (".yaml", ".yml", ".json"):
        return None
    if find_fetched_folder(name) or find_published_base(path.name):
        return name
    known = {file.stem: file.name for file in path.parent.glob("*.y*ml")}
    known |= {name: name for name in read_published_configs()}
    close = [path.with_name(known[near]) for near in find_close_names(path.name, known)]
    hint = "give a run file, a model's folder or its config.json, or the name of one such as Qwen/Qwen3-8B"
    if close:
        hint = f"did you mean {', '.join(map(str, close))}?"
    if len(path.parts) == 2:
        url = f"https://huggingface.co/{name}/resolve/main/config.json"
        guess = f"{hint} Or " if close else ""
        hint = f"{guess}fetch its config.json: `curl -L --create-dirs -o {path.name}/config.json {url}`, "
        hint += f"then `windlass plan {path.name} --gpus all`"
    raise UserError("is no file or folder here, and no model that windlass knows", name, hint, "unknown-model")


def open_subject(
    name: str,
    gpus: str | None,
    options: Mapping[str, Any],
    overrides: Sequence[str],
    accelerate: Path | None,
    say: Callable[[str], None],
) -> Subject | None:
    """Open what `windlass plan` is given with these options; None for a run file that is planned as it is."""
    model = find_model(name)
    raise_all([*_find_misplaced_options(name, gpus, options, is_model=model is not None)])
    if model is None and gpus is None and "--longest" not in options:
        return None
    file = load_accelerate(accelerate)
    if model is None:
        return _open_run_file(Path(name), gpus, overrides, file, say)
    if gpus is None and not options.get("--data"):
        hint = "--gpus 4xl40s, --gpus 2x8xh100 for two nodes, or --gpus all to compare every kind"
        raise UserError("no GPUs to plan it for", f"windlass plan {name}", hint, "no-gpus")
    GIVEN.clear()  # there is no run file that hints could name
    data = options.get("--data")
    tokens = options.get("--tokens")
    settings = [*overrides]
    if not data:
        settings.insert(0, f"data.max_length={TOKENS}")
    if tokens:
        settings.append(f"data.max_length={tokens}")
    draft = draft_run(model, data, f"8x{KINDS[0]}" if gpus == ALL else gpus, say, None, settings)
    if (gpus == ALL or "--longest" in options) and "train.gradient_checkpointing" not in draft.fixed:
        del draft.settings["train.gradient_checkpointing"]
    batch, _ = draft.settings["train.global_batch_size"]

    def load(others: str | None) -> Loaded:
        changed = Draft(dict(draft.settings), fixed=draft.fixed)
        if others:
            set_machine(changed, others)
            changed.set("train.global_batch_size", round_to_ranks(batch, changed.ranks))
        return changed.load(file, settings if file else ())

    for warning in draft.warnings if data else ():
        say(f"warning: {warning}")
    return Subject(name, load, find_base(model, "windlass plan"), draft)


# Options that only a model takes, and what does the same to a run file.
OF_MODELS: Final = {
    "--data": "--override data.dataset_name_or_path=FILE",
    "--tokens": "--override data.max_length=512",
    "--save": "leave it out: the run file is there",
}
OF_ONE_PLAN: Final = ("--save", "--compare", "--details", "--explain", "--out")


def _find_misplaced_options(
    name: str, gpus: str | None, options: Mapping[str, Any], *, is_model: bool
) -> Iterator[Problem]:
    for option, hint in OF_MODELS.items():
        if option in options and not is_model:
            yield Problem(f"is for a model, and {name} is a run file", option, hint, "not-for-run-files")
    if is_model and "--save" in options and "--data" not in options:
        hint = "add --data FILE, the rows to train on"
        yield Problem("a run file without rows would train on others", "--save", hint, "missing-option")
    if "--save" in options and options["--save"].exists():
        hint = "name another file: it is never overwritten"
        yield Problem("exists already", f"--save {options['--save']}", hint, "exists")
    question = "--gpus all" if gpus == ALL else "--longest"
    if "--prices" in options and gpus != ALL:
        yield Problem("has an effect only on a comparison", "--prices", "add --gpus all", "no-effect")
    if gpus == ALL and "--longest" in options:
        hint = "name the GPUs: --gpus 8xh100 --longest"
        yield Problem("is for one kind of GPUs", "--longest", hint, "conflicting-options")
    elif gpus == ALL or "--longest" in options:
        what = f"is for one plan, and {question} shows many"
        for option in (option for option in OF_ONE_PLAN if option in options):
            yield Problem(what, option, f"leave {question} out", "conflicting-options")


def _open_run_file(
    path: Path,
    gpus: str | None,
    overrides: Sequence[str],
    accelerate: AccelerateFile | None,
    say: Callable[[str], None],
) -> Subject:
    """Open a run file, whose machines `gpus` replaces."""
    loaded = read_run_file(path, overrides, None if gpus else accelerate)  # which may set other machines
    cluster = loaded.run.cluster
    named = None if gpus == ALL else gpus

    def load(others: str | None) -> Loaded:
        others = others or named
        if others is None:
            return read_run_file(path, overrides, accelerate) if gpus else loaded
        nodes, per_node, gpu = hardware.parse_gpus(others, "--gpus")
        settings: dict[str, Any] = {"nodes": nodes, "gpus_per_node": per_node, "gpu": gpu}
        if nodes > 1 and cluster.network is None:
            settings["network"] = NETWORK
        if cluster.gpu != gpu:  # what the file says is of another machine
            settings |= dict.fromkeys(("link", "machine", "host_memory_gib"), "null")
        machines = [f"cluster.{key}={value}" for key, value in settings.items()]
        return read_run_file(path, [*overrides, *machines], accelerate)

    written = [key for key in ("gpu", "gpus_per_node", "nodes") if is_written(loaded.where, f"cluster.{key}")]
    if gpus and written:
        say(f"note: --gpus {gpus} instead of the machines set at {loaded.where(f'cluster.{written[0]}')}")
    base = find_base(loaded.run.model.model_name_or_path, loaded.where("model.model_name_or_path"))
    return Subject(str(path), load, base)


@dataclass(frozen=True, slots=True)
class Offer:
    gpus: str
    layout: str
    gpu_gib: float
    host_gib: float  # of each node
    tokens_per_second: float
    hours: float  # of the run; of MILLIONS tokens, if its length is unknown
    gpu_hours: float
    price: float | None  # of those GPU-hours; None: no prices are given

    @property
    def rank(self) -> tuple[float, float]:
        """Order the cheapest first, then the fastest."""
        return self.gpu_hours if self.price is None else self.price, self.hours


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every kind and number of GPUs, the cheapest first; those that the run does not fit on; those without a price."""

    unit: str  # what hours and prices are of
    offers: tuple[Offer, ...]
    too_small: tuple[str, ...]
    impossible: dict[str, str]  # GPUs, and why the run can't have them
    unpriced: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_prices(path: Path) -> dict[str, float]:
    """Read prices per GPU-hour by GPU: a YAML, JSON or TOML file of names and numbers."""
    if path.suffix == ".toml":
        try:
            value: Any = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = f"can't be read as TOML: {getattr(error, 'strerror', None) or error}"
            raise UserError(why, str(path), "lines such as: h100 = 2.5", "unreadable") from None
    else:
        document = load_document(path, "write one with lines such as: h100: 2.5")
        raise_all(document.problems)
        value = document.value
    hint = "a line for each GPU, its price per hour: h100: 2.5"
    if not isinstance(value, dict) or not value:
        raise UserError("contains no prices", str(path), hint, "no-prices")
    prices: dict[str, float] = {}
    for name, price in value.items():
        place = f"{path}: {name}"
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            raise UserError(f"{price!r} is not a price per hour", place, hint, "wrong-value")
        kind = hardware.find_gpu(str(name), place).name
        if kind in prices:
            raise UserError(f"{kind} has a price already, by another name", place, "keep one of them", "duplicate-key")
        prices[kind] = float(price)
    return prices


def compare_gpus(subject: Subject, prices: dict[str, float] | None = None) -> Comparison:
    plans: dict[str, Plan] = {}
    impossible: dict[str, str] = {}
    too_small = []
    unpriced = [kind for kind in KINDS if prices is not None and kind not in prices]
    for kind in KINDS:
        for count in COUNTS:
            gpus = f"{count.removeprefix('1x')}x{kind}"
            if kind in unpriced:
                continue
            try:
                plan = subject.plan(gpus, compare=False)
            except UserError as error:
                impossible[gpus] = error.problems[0].problem
                continue
            if plan.cost.fits:
                plans[gpus] = plan
            else:
                too_small.append(gpus)
    is_run = all(plan.gpu_hours is not None for plan in plans.values())
    offers = []
    for gpus, plan in plans.items():
        hours = plan.hours if is_run else None
        if hours is None:
            hours = estimate_millions(plan.cost) / 3600
        gpu_hours = hours * plan.layout.ranks
        price = prices[plan.machine.gpu.name] * gpu_hours if prices is not None else None
        layout = next((c.name for c in plan.contenders if is_same_layout(c.layout, plan.layout)), plan.layout.name)
        if plan.layout.activation_checkpointing:
            layout += ", recomputed"
        speed = plan.cost.tokens_per_second
        cost = plan.cost
        offers.append(Offer(gpus, layout, cost.gpu_gib, cost.host_gib, speed, hours, gpu_hours, price))
    unit = "the run" if is_run else f"{MILLIONS} M tokens"
    ordered = tuple(sorted(offers, key=lambda offer: offer.rank))
    return Comparison(unit, ordered, tuple(too_small), impossible, tuple(unpriced))


def print_comparison(comparison: Comparison) -> None:
    console = Console(highlight=False, emoji=False, markup=False)
    rows = []
    for offer in comparison.offers:
        time = format_duration(offer.hours * 3600)
        cells = [offer.gpus, offer.layout, f"{offer.gpu_gib:,.1f}", f"{offer.host_gib:,.0f}"]
        cells += [f"{offer.tokens_per_second:,.0f}", time]
        cells += [f"{offer.gpu_hours:,.2f}", "" if offer.price is None else f"{offer.price:,.2f}"]
        rows.append((cells, False))
    order = "GPU-hours" if all(offer.price is None for offer in comparison.offers) else "price"
    title = f"Where it fits, by {order}: time and cost of {comparison.unit} (estimates)"
    hide = (">price",) if order == "GPU-hours" else ()
    if rows:
        console.print(make_table(title, "GPUs layout >GiB/GPU >host >tok/s >time >GPU-h >price", rows, hide))
        console.print("host: GiB of host memory that each node needs; how much such nodes have is not checked")
    if comparison.too_small:
        console.print(f"does not fit: {', '.join(comparison.too_small)}")
    for why in dict.fromkeys(comparison.impossible.values()):
        gpus = [name for name, reason in comparison.impossible.items() if reason == why]
        console.print(f"not possible: {', '.join(gpus)}: {why}")
    if comparison.unpriced:
        console.print(f"without a price: {', '.join(comparison.unpriced)}")


def print_longest(rows: Sequence[LongestRow], subject: Subject, gpus: str | None, given: Sequence[str] = ()) -> None:
    """`given`: other options that the rows are planned with."""
    console = Console(highlight=False, emoji=False, markup=False)
    title = "The longest row that fits, in tokens (estimate)"
    table = make_table(
        title, "layout >kept >recomputed >offloaded >split >tok/s", [(cells, False) for cells in list_columns([*rows])]
    )
    console.print(table)
    console.print("1 row per micro-batch, 5 % of the GPU left free; –: none fits")
    console.print("kept: with every activation kept; recomputed: with train.gradient_checkpointing")
    if any(row.offloaded_tokens for row in rows):
        console.print("offloaded: recomputed, and layer inputs in host memory with train.offload_activations")
    if any(row.split_tokens for row in rows):
        console.print("split: recomputed, and each row over as many GPUs with layout.context_parallel; tok/s: without")
    if subject.base.positions is None:
        console.print("the positions that the model was made for are not known here: they may be fewer")
    if not rows or not rows[0].longest:
        return
    length = f"--tokens {rows[0].longest}" if subject.draft else f"--override data.max_length={rows[0].longest}"
    words = [f"windlass plan {shlex.quote(subject.name)}", *([f"--gpus {gpus}"] if gpus else [])]
    words += [shlex.join(given), length] if given else [length]
    words += [f"--override {shlex.quote(override)}" for override in rows[0].overrides]
    console.print(f"\n{' '.join(words)}", soft_wrap=True)
