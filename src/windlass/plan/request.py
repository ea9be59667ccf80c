"""Combine the layout settings of the run file and of an Accelerate file into one request."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from windlass import hardware
from windlass.errors import Problem, UserError, raise_all
from windlass.model.family import Family
from windlass.observe.format import format_plural
from windlass.plan.accelerate import AccelerateFile, Setting
from windlass.plan.layout import AUTO, LayoutRequest, rule_out_layouts
from windlass.runfile import Loaded, RunFile

CHECKPOINTING = ("train.gradient_checkpointing", "layout.activation_checkpointing")  # two names of one setting
# Layouts that the run file may name although an FSDP file names another: FSDP files have no keys for experts, and
# under expert parallelism they set how the dense rest is sharded.
ALONGSIDE = {"expert-parallel": ("full-shard", "no-reshard", "hybrid")}
# The layout that a key of `layout` implies if none is named. The first kind counts as a name; the second refines the
# layout of an FSDP file, and implies one only if neither file names any.
IMPLIED = {"expert_parallel": "expert-parallel", "replicate": "hybrid"}
IMPLIED_LAST = {"reshard_after_forward": "full-shard", "shard": "full-shard", "offload": "full-shard"}
# What the run file sets: `auto` and null set nothing.
KEYS = (
    "cluster.nodes",
    "cluster.gpus_per_node",
    "layout.name",
    "layout.shard",
    "layout.replicate",
    "layout.expert_parallel",
    "layout.context_parallel",
    "layout.reshard_after_forward",
    "layout.offload",
    "layout.base_dtype",
    "layout.wrap",
    *CHECKPOINTING,
    "train.offload_activations",
    "train.bf16",
    "train.fp16",
)
SETTINGS = ("reshard_after_forward", "offload", "base_dtype")
OVERRIDE = "--override "  # begins the place of a key on the command line
# What of an Accelerate file such a key replaces; others: what has their name.
REPLACED = {
    "cluster.gpus_per_node": ("ranks",),
    "layout.name": ("name", "sharded", "reshard_after_forward", "shard", "replicate", "offload"),
    "train.gradient_checkpointing": ("activation_checkpointing",),
    "train.bf16": ("precision",),
    "train.fp16": ("precision",),
}

RequestSettings = Mapping[str, Setting]


def apply_overrides(accelerate: AccelerateFile, loaded: Loaded) -> AccelerateFile:
    """Return the Accelerate file without what the command line sets otherwise, and with a note on it."""
    settings = {**accelerate.settings}
    notes = [*accelerate.notes]
    overrides = {key: one for key, one in _read_written(loaded).items() if one.where.startswith(OVERRIDE)}
    nodes, ranks = settings.get("nodes"), settings.get("ranks")
    if "cluster.nodes" in overrides and nodes and ranks and nodes.value > 0 and ranks.value % nodes.value == 0:
        settings["ranks"] = replace(ranks, value=ranks.value // nodes.value * overrides["cluster.nodes"].value)
    for key, override in overrides.items():
        if key == "layout.name" and _name_layout({}, settings, []).value == override.value:
            continue
        for name in REPLACED.get(key, (key.partition(".")[2],)):
            setting = settings.pop(name, None)
            if setting and setting.value != override.value:
                notes.append(f"{setting.where}: {setting.value} is overridden by {override.where}")
    return replace(accelerate, settings=settings, notes=tuple(notes))


def read_request(
    loaded: Loaded,
    family: Family | None,
    accelerate: AccelerateFile | None,
    *,
    experts_adapted: bool = False,
    base_trained: bool = False,
) -> LayoutRequest:
    """Combine run file and Accelerate file. Report every disagreement, and layer classes that the model lacks."""
    run = loaded.run
    written = _read_written(loaded)
    in_accelerate: RequestSettings = accelerate.settings if accelerate else {}
    problems: list[Problem] = []
    nodes, gpus_per_node = _count_gpus(loaded, written, in_accelerate, problems)
    name = _name_layout(written, in_accelerate, problems)
    _check_wrapped_layers(family, written.get("layout.wrap"), in_accelerate.get("wrap"), problems)
    checkpointing = [
        Setting(bool(written[key].value), written[key].where)  # the other true values say what is kept
        for key in CHECKPOINTING
        if key in written
    ]
    recompute = _agree(
        "activation checkpointing", [*checkpointing, in_accelerate.get("activation_checkpointing")], problems
    )
    offload_activations = _agree(
        "offloading of activations",
        [written.get("train.offload_activations"), in_accelerate.get("offload_activations")],
        problems,
    )
    if offload_activations and recompute is None:  # what is offloaded are the inputs of recomputed layers
        recompute = True
    precision = _agree("precision", [*_read_precision(written), in_accelerate.get("precision")], problems)
    sizes = {
        key: _agree(key, [written.get(f"layout.{key}"), in_accelerate.get(key)], problems)
        for key in (*("shard", "replicate", "expert_parallel", "context_parallel"), *SETTINGS)
    }
    raise_all(problems)
    return LayoutRequest(
        name=name.value,
        where=name.where,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        activation_checkpointing=recompute,
        offload_activations=offload_activations,
        precision=precision or ("no" if _computes_in_float32(run) else "bf16"),
        barred=rule_out_layouts(run, experts_adapted, base_trained),
        **sizes,
    )


def _read_written(loaded: Loaded) -> dict[str, Setting]:
    """Return the run file's values that are neither null nor auto; layer classes are joined as Accelerate writes
    them."""
    written = {}
    for key in KEYS:
        section, _, name = key.partition(".")
        value = getattr(getattr(loaded.run, section), name)
        if value is None or value == AUTO:
            continue
        written[key] = Setting(",".join(value) if isinstance(value, list) else value, loaded.where(key))
    return written


def _agree(title: str, settings: list[Setting | None], problems: list[Problem]) -> Any:
    """Return the value that all sources agree on, or None if none sets it; add a problem for each that disagrees."""
    given = [setting for setting in settings if setting]
    if not given:
        return None
    first, *others = given
    for other in others:
        if other.value != first.value:
            text = f"{title} is {other.value} here, but {first.value} at {first.where}"
            problems.append(Problem(text, other.where, "make the two agree, or keep one of them", "disagreement"))
    return first.value


def _count_gpus(
    loaded: Loaded, written: RequestSettings, in_accelerate: RequestSettings, problems: list[Problem]
) -> tuple[int, int]:
    """Return the number of nodes, and of GPUs on each."""
    one_node, per_node = loaded.run.cluster.size
    ranks = in_accelerate.get("ranks")
    for setting in (in_accelerate.get("nodes"), ranks):
        if setting and setting.value < 1:
            raise UserError(f"{setting.value} is too few", setting.where, "give 1 or more", "wrong-value")
    nodes = _agree("the number of nodes", [written.get("cluster.nodes"), in_accelerate.get("nodes")], problems)
    if nodes is None:
        nodes = one_node
    written_gpus = written.get("cluster.gpus_per_node")
    if ranks and ranks.value % nodes:
        text = f"{ranks.value} ranks do not spread evenly over {format_plural(nodes, 'node')}"
        hint = f"give a multiple of {nodes}, or change the number of nodes"
        problems.append(Problem(text, ranks.where, hint, "uneven-ranks"))
    elif ranks and written_gpus and ranks.value != nodes * per_node:
        sizes = f"{format_plural(nodes, 'node')} x {per_node}"
        text = f"the number of ranks is {ranks.value} here, but {sizes} at {written_gpus.where}"
        problems.append(Problem(text, ranks.where, "make the two agree, or keep one of them", "disagreement"))
    elif ranks:
        per_node = ranks.value // nodes
    planned = loaded.run.layout.ranks
    if planned not in (None, nodes * per_node):
        sizes = f"{format_plural(nodes, 'node')} x {format_plural(per_node, 'GPU')}"
        text = f"layout.ranks is {planned}, but {sizes} are {nodes * per_node}"
        hint = "leave layout.ranks out, or change cluster.nodes and cluster.gpus_per_node"
        problems.append(Problem(text, loaded.where("layout.ranks"), hint, "disagreement"))
    return nodes, per_node


def _name_layout(written: RequestSettings, in_accelerate: RequestSettings, problems: list[Problem]) -> Setting:
    """Return the layout's name, or `auto`. The run file comes first; an FSDP file is never `auto`."""
    name = written.get("layout.name") or _imply_name(written, IMPLIED)
    other = in_accelerate.get("name")
    reshard = in_accelerate.get("reshard_after_forward")
    if name:
        other = other or (_name_by_reshard(reshard) if reshard else None)
        if other and other.value not in ALONGSIDE.get(name.value, ()):
            _agree("the layout", [name, other], problems)
        return name
    sharded = in_accelerate.get("sharded")
    if sharded and sharded.value:
        replicas = in_accelerate.get("replicate")
        if replicas and replicas.value > 1:
            return Setting("hybrid", replicas.where)
        if other and (other.value != "full-shard" or not reshard):
            return other
        return _name_by_reshard(reshard) if reshard else Setting("full-shard", sharded.where)
    return _imply_name(written, IMPLIED_LAST) or Setting(AUTO, "")


def _imply_name(written: RequestSettings, meanings: Mapping[str, str]) -> Setting | None:
    """Return the layout that the run file's other keys imply if it names none, so that no key is ignored."""
    for key, name in meanings.items():
        setting = written.get(f"layout.{key}")
        if setting and key == "reshard_after_forward":
            return _name_by_reshard(setting)
        if setting and (setting.value is True or setting.value > 1):
            return Setting(name, setting.where)
    return None


def _name_by_reshard(reshard: Setting) -> Setting:
    return Setting("full-shard" if reshard.value else "no-reshard", reshard.where)


def _check_wrapped_layers(
    family: Family | None, written: Setting | None, other: Setting | None, problems: list[Problem]
) -> None:
    """Add a problem if the two files disagree about the layers to wrap, or name classes that the model lacks."""
    classes = _agree("the wrapped layer", [written, other], problems)
    wrap = written or other
    if wrap is None or family is None:
        return
    lacking = [name for name in map(str.strip, classes.split(",")) if name and name not in family.layers]
    if lacking:
        text = f"{family.causal_lm} has no layer class {', '.join(map(repr, lacking))}"
        hint = f"write {family.layer}, or leave the key out: windlass knows the layer of each model family"
        problems.append(Problem(f"{text}; it is sharded by {family.layer!r}", wrap.where, hint, "no-such-layer"))


def _computes_in_float32(run: RunFile) -> bool:
    """Return whether a run of float32 weights that leaves train.bf16 open is for a processor that only emulates it."""
    if run.model.torch_dtype != "float32" or hardware.has_bf16_products():
        return False
    return (run.cluster.gpu or hardware.read_gpu_name()) == "cpu"


def _read_precision(written: RequestSettings) -> list[Setting]:
    """Return each precision that the run file sets: bf16 and fp16 are two keys."""
    precisions = [
        Setting(kind, written[f"train.{kind}"].where)
        for kind in ("bf16", "fp16")
        if f"train.{kind}" in written and written[f"train.{kind}"].value
    ]
    if not precisions and "train.bf16" in written:
        return [Setting("no", written["train.bf16"].where)]  # train.bf16: false, and no fp16 either
    return precisions
