"""Combine the layout settings of the run file and of an Accelerate file into one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.errors import Problem, UserError, raise_all
from windlass.model.family import Family
from windlass.plan.accelerate import AccelerateFile, Wish
from windlass.plan.layout import AUTO, LayoutRequest, rule_out_layouts
from windlass.runfile import Loaded

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
    "layout.reshard_after_forward",
    "layout.offload",
    "layout.base_dtype",
    "layout.wrap",
    *CHECKPOINTING,
    "train.bf16",
    "train.fp16",
)

Wishes = Mapping[str, Wish]


def read_request(
    loaded: Loaded, family: Family | None, accelerate: AccelerateFile | None, *, experts_adapted: bool = False
) -> LayoutRequest:
    """Combine run file and Accelerate file. Report every disagreement, and layer classes that the model lacks."""
    run = loaded.run
    written = _read_written(loaded)
    wishes: Wishes = accelerate.wishes if accelerate else {}
    problems: list[Problem] = []
    nodes, gpus_per_node = _count_gpus(loaded, written, wishes, problems)
    name = _name_layout(written, wishes, problems)
    _check_wrapped_layers(family, written.get("layout.wrap"), wishes.get("wrap"), problems)
    checkpointing = [
        Wish(bool(written[key].value), written[key].where)  # the other true values say what is kept
        for key in CHECKPOINTING
        if key in written
    ]
    recompute = _agree("activation checkpointing", [*checkpointing, wishes.get("activation_checkpointing")], problems)
    precision = _agree("precision", [*_read_precision(written), wishes.get("precision")], problems)
    if precision is None:
        precision = "bf16" if run.train.bf16 else "no"
    sizes = {
        key: _agree(key, [written.get(f"layout.{key}"), wishes.get(key)], problems)
        for key in ("shard", "replicate", "expert_parallel", "reshard_after_forward", "offload", "base_dtype")
    }
    raise_all(problems)
    return LayoutRequest(
        name=name.value,
        where=name.where,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        activation_checkpointing=bool(recompute),
        precision=precision,
        barred=rule_out_layouts(run, experts_adapted) if nodes * gpus_per_node > 1 else {},
        **sizes,
    )


def _read_written(loaded: Loaded) -> dict[str, Wish]:
    """Return the values that the user wrote into the run file; layer classes are joined as Accelerate writes them."""
    written = {}
    for key in KEYS:
        section, _, name = key.partition(".")
        value = getattr(getattr(loaded.run, section), name)
        path = key
        if key == "layout.name" and not loaded.is_set(key):
            path = "layout"  # the short form, `layout: hybrid`
        if value is None or value == AUTO or not loaded.is_set(path):
            continue
        written[key] = Wish(",".join(value) if isinstance(value, list) else value, loaded.where(path))
    return written


def _agree(title: str, wishes: list[Wish | None], problems: list[Problem]) -> Any:
    """Return the value that all sources agree on, or None if none sets it; add a problem for each that disagrees."""
    given = [wish for wish in wishes if wish]
    if not given:
        return None
    first, *others = given
    for other in others:
        if other.value != first.value:
            text = f"{title} is {other.value} here, but {first.value} at {first.where}"
            problems.append(Problem(text, other.where, "make the two agree, or keep one of them"))
    return first.value


def _count_gpus(loaded: Loaded, written: Wishes, wishes: Wishes, problems: list[Problem]) -> tuple[int, int]:
    """Return the number of nodes, and of GPUs on each."""
    cluster = loaded.run.cluster
    ranks = wishes.get("ranks")
    for wish in (wishes.get("nodes"), ranks):
        if wish and wish.value < 1:
            raise UserError(f"{wish.value} is too few", wish.where, "give 1 or more")
    nodes = _agree("the number of nodes", [written.get("cluster.nodes"), wishes.get("nodes")], problems)
    if nodes is None:
        nodes = cluster.nodes
    per_node = cluster.gpus_per_node
    written_gpus = written.get("cluster.gpus_per_node")
    if ranks and ranks.value % nodes:
        text = f"{ranks.value} ranks do not spread evenly over {nodes} nodes"
        problems.append(Problem(text, ranks.where, f"give a multiple of {nodes}, or change the number of nodes"))
    elif ranks and written_gpus and ranks.value != nodes * per_node:
        text = f"the number of ranks is {ranks.value} here, but {nodes} nodes x {per_node} at {written_gpus.where}"
        problems.append(Problem(text, ranks.where, "make the two agree, or keep one of them"))
    elif ranks:
        per_node = ranks.value // nodes
    planned = loaded.run.layout.ranks
    if planned not in (None, nodes * per_node):
        text = f"layout.ranks is {planned}, but {nodes} nodes x {per_node} GPUs are {nodes * per_node}"
        hint = "leave layout.ranks out, or change cluster.nodes and cluster.gpus_per_node"
        problems.append(Problem(text, loaded.where("layout.ranks"), hint))
    return nodes, per_node


def _name_layout(written: Wishes, wishes: Wishes, problems: list[Problem]) -> Wish:
    """Return the layout's name, or `auto`. The run file comes first; an FSDP file is never `auto`."""
    name = written.get("layout.name") or _imply_name(written, IMPLIED)
    other = wishes.get("name")
    reshard = wishes.get("reshard_after_forward")
    if name:
        other = other or (_name_by_reshard(reshard) if reshard else None)
        if other and other.value not in ALONGSIDE.get(name.value, ()):
            _agree("the layout", [name, other], problems)
        return name
    sharded = wishes.get("sharded")
    if sharded and sharded.value:
        replicas = wishes.get("replicate")
        if replicas and replicas.value > 1:
            return Wish("hybrid", replicas.where)
        if other and (other.value != "full-shard" or not reshard):
            return other
        return _name_by_reshard(reshard) if reshard else Wish("full-shard", sharded.where)
    return _imply_name(written, IMPLIED_LAST) or Wish(AUTO, "")


def _imply_name(written: Wishes, meanings: Mapping[str, str]) -> Wish | None:
    """Return the layout that the run file's other keys imply if it names none, so that no key is ignored."""
    for key, name in meanings.items():
        wish = written.get(f"layout.{key}")
        if wish and key == "reshard_after_forward":
            return _name_by_reshard(wish)
        if wish and (wish.value is True or wish.value > 1):
            return Wish(name, wish.where)
    return None


def _name_by_reshard(reshard: Wish) -> Wish:
    return Wish("full-shard" if reshard.value else "no-reshard", reshard.where)


def _check_wrapped_layers(
    family: Family | None, written: Wish | None, other: Wish | None, problems: list[Problem]
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
        problems.append(Problem(f"{text}; it is sharded by {family.layer!r}", wrap.where, hint))


def _read_precision(written: Wishes) -> list[Wish]:
    """Return each precision that the run file sets: bf16 and fp16 are two keys."""
    precisions = [
        Wish(kind, written[f"train.{kind}"].where)
        for kind in ("bf16", "fp16")
        if f"train.{kind}" in written and written[f"train.{kind}"].value
    ]
    if not precisions and "train.bf16" in written:
        return [Wish("no", written["train.bf16"].where)]  # train.bf16: false, and no fp16 either
    return precisions
