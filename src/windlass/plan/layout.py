"""How a run is spread over ranks: what the run file and an Accelerate file request -> one Layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.errors import Problem, raise_all
from windlass.model.family import Family
from windlass.plan.accelerate import AccelerateFile, Wish
from windlass.runfile import Loaded

AUTO = "auto"
# Every name that `layout.name` may have, from the most to the least network traffic.
LAYOUTS = {
    "full-shard": "every layer's weights are gathered for its forward, freed, and gathered again for its backward",
    "no-reshard": "weights are gathered once per optimizer step and stay unsharded until its last backward",
    "hybrid": "sharded inside a node, replicated across nodes: weights are sent over the node's own links only",
    "expert-parallel": "experts stay on their rank and tokens are sent to them; the dense rest is sharded",
    "resident": "every rank stores the full base: no weight is sent",
}
# Optimizers that treat every number by itself: part of a tensor becomes what it would have become in the full tensor.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
# Layouts that the run file may name although an FSDP file names another: FSDP files know no experts, and under expert
# parallelism the dense rest is sharded as they say.
ALONGSIDE = {"expert-parallel": ("full-shard", "no-reshard", "hybrid")}
# The layout that a key of `layout` implies if none is named. The first kind is as good as a name; the second adds to
# what an FSDP file names, and implies a layout only if nobody names one.
IMPLIED = {"expert_parallel": "expert-parallel", "replicate": "hybrid"}
IMPLIED_LAST = {"reshard_after_forward": "full-shard", "shard": "full-shard", "offload": "full-shard"}
# A name and a reshard_after_forward that contradict each other, and the layout that the latter means.
CONTRADICTIONS = {
    ("no-reshard", True): "full-shard",
    ("full-shard", False): "no-reshard",
    ("resident", True): "full-shard",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """shard x replicate = ranks. `expert_parallel` divides `shard`: the ranks that experts are split over."""

    name: str  # one of LAYOUTS
    reason: str  # why this one: chosen, set by run.yaml:40, set by fsdp.yaml …
    nodes: int
    gpus_per_node: int
    shard: int  # ranks that the dense weights are split over (transformers' fsdp_size)
    replicate: int = 1  # replicas of that (dp_replicate_size)
    expert_parallel: int = 1  # ep_size: experts stay on their rank, tokens are sent
    reshard_after_forward: bool = True
    offload: bool = False  # the frozen base is stored in host memory; the adapter and its states stay on the GPU
    activation_checkpointing: bool = False
    precision: str = "bf16"  # bf16 or no: the dtype that compute runs in
    base_dtype: str = "bf16"  # fp8: the frozen base stays as published, dequantised layer by layer as it is used

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """What the user sets of the layout. None: not set, so it is derived."""

    name: str  # auto, or one of LAYOUTS
    where: str  # what set the name
    nodes: int
    gpus_per_node: int
    shard: int | None = None
    replicate: int | None = None
    expert_parallel: int | None = None
    reshard_after_forward: bool | None = None
    offload: bool | None = None  # False: not under any layout
    activation_checkpointing: bool = False
    precision: str = "bf16"
    base_dtype: str | None = None  # bf16 or fp8
    barred: Mapping[str, str] = field(default_factory=dict)  # layouts that the rest of the run rules out, and why

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


def read_request(
    loaded: Loaded, family: Family | None, accelerate: AccelerateFile | None, *, experts_adapted: bool = False
) -> LayoutRequest:
    """Run file and Accelerate file as one. Reports every disagreement, and a layer class that the model lacks."""
    settings = _Settings(loaded, accelerate)
    nodes, gpus = _read_size(settings)
    name = _read_name(settings)
    wrap = settings.agree("the wrapped layer", settings.written("layout.wrap"), settings.wish("wrap"))
    if wrap and family and (problem := check_wrap(str(wrap.value), family, wrap.where)):
        settings.problems.append(problem)

    def agreed(key: str) -> Any:
        wish = settings.agree(key, settings.written(f"layout.{key}"), settings.wish(key))
        return None if wish is None else wish.value

    request = LayoutRequest(
        name=name.value,
        where=name.where,
        nodes=nodes,
        gpus_per_node=gpus,
        shard=agreed("shard"),
        replicate=agreed("replicate"),
        expert_parallel=agreed("expert_parallel"),
        reshard_after_forward=agreed("reshard_after_forward"),
        offload=agreed("offload"),
        activation_checkpointing=_read_checkpointing(settings),
        precision=_read_precision(settings),
        base_dtype=agreed("base_dtype"),
        barred=_rule_out(loaded.run, experts_adapted) if nodes * gpus > 1 else {},
    )
    raise_all(settings.problems)
    return request


class _Settings:
    """Which file sets what, and every disagreement."""

    def __init__(self, loaded: Loaded, accelerate: AccelerateFile | None) -> None:
        self.loaded = loaded
        self.wishes = accelerate.wishes if accelerate else {}
        self.problems: list[Problem] = []

    def value(self, path: str) -> Any:
        section, _, key = path.partition(".")
        return getattr(getattr(self.loaded.run, section), key, None)

    def written(self, path: str) -> Wish | None:
        """The run file's value, if the user wrote one; a list of layer classes as Accelerate writes it."""
        value = self.value(path)
        if path == "layout.name" and not self.loaded.given(path):
            path = "layout"  # written short, `layout: hybrid`
        if value is None or value == AUTO or not self.loaded.given(path):
            return None
        return Wish(",".join(value) if isinstance(value, list | tuple) else value, self.loaded.where(path))

    def wish(self, name: str) -> Wish | None:
        return self.wishes.get(name)

    def agree(self, what: str, *wishes: Wish | None) -> Wish | None:
        """The value that all sources share."""
        given = [wish for wish in wishes if wish is not None]
        for other in given[1:]:
            if other.value != given[0].value:
                text = f"{what} is {other.value} here, but {given[0].value} at {given[0].where}"
                self.add(text, other.where, "make the two agree, or keep one of them")
        return given[0] if given else None

    def add(self, problem: str, where: str, hint: str) -> None:
        self.problems.append(Problem(problem, where, hint))


def check_wrap(name: str, family: Family, where: str) -> Problem | None:
    """Whether every class of a comma-separated list is the one that this family is sharded by."""
    wrong = [part for part in (p.strip() for p in name.split(",")) if part and part != family.layer]
    if not wrong:
        return None
    return Problem(
        f"{family.causal_lm} has no layer class {', '.join(map(repr, wrong))}; it is sharded by '{family.layer}'",
        where,
        f"write {family.layer}, or leave the key out: windlass knows the layer of each model family",
    )


def _read_size(settings: _Settings) -> tuple[int, int]:
    """Nodes, and GPUs on each."""
    nodes = settings.agree("the number of nodes", settings.written("cluster.nodes"), settings.wish("nodes"))
    gpus, total = settings.written("cluster.gpus_per_node"), settings.wish("ranks")
    count = int(nodes.value if nodes else settings.value("cluster.nodes") or 1)
    per_node = int(settings.value("cluster.gpus_per_node") or 1)
    for wish in (nodes, total):
        if wish and int(wish.value) < 1:
            settings.add(f"{wish.value} is too few", wish.where, "give 1 or more")
            return max(count, 1), max(per_node, 1)
    if total and total.value % count:
        said = f"{nodes.where} sets the nodes; " if nodes else ""
        text = f"{total.value} ranks do not spread evenly over {count} nodes"
        settings.add(text, total.where, f"{said}give a multiple of {count}")
    elif total and gpus and total.value != count * per_node:
        by = f"{nodes.where} x {gpus.where}" if nodes else gpus.where
        text = f"the number of ranks is {total.value} here, but {count} x {per_node} = {count * per_node} by {by}"
        settings.add(text, total.where, "make the two agree, or keep one of them")
    elif total:
        per_node = total.value // count
    ranks = settings.written("layout.ranks")
    if ranks and ranks.value != count * per_node:
        text = f"layout.ranks is {ranks.value}, but {count} nodes x {per_node} GPUs are {count * per_node}"
        settings.add(text, ranks.where, "leave layout.ranks out, or change cluster.nodes and cluster.gpus_per_node")
    return count, per_node


def _read_name(settings: _Settings) -> Wish:
    """Which layout is requested, if any. The run file comes first; an FSDP file is never `auto`."""
    mine = settings.written("layout.name") or _implied_name(settings, IMPLIED)
    if mine is None:
        return _accelerate_name(settings) or _implied_name(settings, IMPLIED_LAST) or Wish(AUTO, "")
    named = settings.wish("name") or _name_by_reshard(settings.wish("reshard_after_forward"))
    if named and named.value not in (mine.value, *ALONGSIDE.get(mine.value, ())):
        settings.agree("the layout", mine, named)
    return mine


def _implied_name(settings: _Settings, meanings: Mapping[str, str]) -> Wish | None:
    """The layout that the run file's other keys imply when it names none: no key is left without effect."""
    for key, name in meanings.items():
        wish = settings.written(f"layout.{key}")
        if wish and key == "reshard_after_forward":
            return _name_by_reshard(wish)
        if wish and (wish.value is True or int(wish.value) > 1):
            return Wish(name, wish.where)
    return None


def _accelerate_name(settings: _Settings) -> Wish | None:
    name, reshard = settings.wish("name"), settings.wish("reshard_after_forward")
    replicate, sharded = settings.wish("replicate"), settings.wish("sharded")
    if sharded is None or not sharded.value:
        return None
    if replicate and int(replicate.value) > 1:
        return Wish("hybrid", replicate.where)
    if name and (name.value != "full-shard" or reshard is None):
        return name
    return _name_by_reshard(reshard) or Wish("full-shard", sharded.where)


def _name_by_reshard(reshard: Wish | None) -> Wish | None:
    return Wish("full-shard" if reshard.value else "no-reshard", reshard.where) if reshard else None


def _read_checkpointing(settings: _Settings) -> bool:
    keys = ("train.gradient_checkpointing", "layout.activation_checkpointing")
    what, wish = "activation checkpointing", settings.wish("activation_checkpointing")
    wish = settings.agree(what, *map(settings.written, keys), wish)
    return bool(wish.value) if wish else any(map(settings.value, keys))


def _read_precision(settings: _Settings) -> str:
    written = {kind: settings.written(f"train.{kind}") for kind in ("bf16", "fp16")}
    chosen = [Wish(kind, wish.where) for kind, wish in written.items() if wish and wish.value]
    if not chosen and (off := written["bf16"]) and not settings.value("train.fp16"):
        chosen = [Wish("no", off.where)]  # train.bf16: false, and no fp16 either
    wish = settings.agree("precision", *chosen, settings.wish("precision"))
    if wish:
        return str(wish.value)
    return next((kind for kind in ("bf16", "fp16") if settings.value(f"train.{kind}")), "no")


def needs_weights(lora: Any) -> str:
    """Which setting of the adapter computes with the base's weights, and so works with neither shards nor FP8 codes."""
    return "lora.use_dora needs the norm of base weights" if lora.use_dora else ""


def _rule_out(run: Any, experts_adapted: bool) -> dict[str, str]:
    """Layouts that the adapter doesn't work with, and why. Each goes when the engine supports it."""
    if why := needs_weights(run.lora):
        return {name: f"{why}, and a rank would hold a shard of them" for name in LAYOUTS if name != "resident"}
    if experts_adapted and run.train.optim not in ELEMENTWISE:
        why = f"train.optim: {run.train.optim} looks at a full tensor, and experts' adapters would be split"
        return {"expert-parallel": why}
    return {}


# --- a request that names a layout -> that Layout, its sizes derived and checked ------------------


def resolve(request: LayoutRequest, experts: int) -> Layout:
    """The Layout that a request names (not `auto`). `experts`: routed experts per layer, 0 for a dense model."""
    name, ranks, reshard = request.name, request.ranks, request.reshard_after_forward
    problems: list[Problem] = []

    def wrong(text: str, hint: str) -> None:
        problems.append(Problem(text, request.where, hint))

    if name in request.barred:
        wrong(request.barred[name], f"layout may be {', '.join(one for one in LAYOUTS if one not in request.barred)}")
    if reshard is not None and (equal := CONTRADICTIONS.get((name, reshard))):
        text = f"layout {name} with reshard_after_forward {str(reshard).lower()}"
        wrong(text, f"leave reshard_after_forward out, or take {equal}")
    # Sizes as they are set, else derived so that their product is the number of ranks.
    usual = {"hybrid": request.nodes, "resident": ranks}.get(name, 1)
    replicate = request.replicate or usual
    if request.shard and not request.replicate and ranks % request.shard == 0:
        replicate = ranks // request.shard
    shard = request.shard or max(1, ranks // replicate)
    if name not in LAYOUTS:
        wrong(f"no such layout: {name}", f"one of {', '.join(LAYOUTS)}")
    elif shard * replicate != ranks:
        text = f"shard {shard} x replicate {replicate} = {shard * replicate}, but there are {ranks} ranks"
        wrong(text, "leave one of the two out: it is derived")
    elif name in ("full-shard", "no-reshard") and shard == 1 < ranks:
        wrong(f"{name} with shard 1: that is resident", "write layout: resident")
    elif name == "hybrid" and 1 in (shard, replicate):
        equal = "resident" if shard == 1 else "full-shard"
        text = f"hybrid on {request.nodes} x {request.gpus_per_node} GPUs would shard over {shard} and replicate"
        hint = f"write layout: {equal}, or give layout.shard and layout.replicate"
        wrong(f"{text} {replicate} times: that is {equal}", hint)
    if name == "resident" and shard != 1:
        wrong(f"resident with shard {shard}", "leave layout.shard out")
    if name == "resident" and request.offload:
        wrong("resident with offload: nothing would be resident", "write layout: full-shard")
    parallel = (request.expert_parallel or shard) if name == "expert-parallel" else 1
    if name != "expert-parallel" and (request.expert_parallel or 1) > 1:
        text = f"expert_parallel {request.expert_parallel} with layout {name}"
        wrong(text, "write layout: {name: expert-parallel, …}")
    elif name == "expert-parallel" and (why := why_not_expert_parallel(experts, parallel, shard)):
        fitting = [n for n in range(2, shard + 1) if not why_not_expert_parallel(experts, n, shard)]
        other = f"take another layout, or a number of ranks that divides {experts} experts" if experts else ""
        possible = f"expert_parallel may be {', '.join(map(str, fitting))}" if fitting else ""
        wrong(why, possible or other or "take another layout")
    raise_all(problems)
    return Layout(
        name=name,
        reason=f"set by {request.where}",
        nodes=request.nodes,
        gpus_per_node=request.gpus_per_node,
        shard=shard,
        replicate=replicate,
        expert_parallel=parallel,
        reshard_after_forward=name not in ("no-reshard", "resident") if reshard is None else reshard,
        offload=bool(request.offload) and name != "resident",
        activation_checkpointing=request.activation_checkpointing,
        precision=request.precision,
        base_dtype=request.base_dtype or "bf16",
    )


def why_not_expert_parallel(experts: int, parallel: int, shard: int) -> str:
    """Why experts cannot be split so; empty if they can."""
    if not experts:
        return "the model has no routed experts to split"
    if parallel < 2:
        return "one rank alone has nothing to split experts over"
    if experts % parallel:
        return f"{experts} experts do not split evenly over {parallel} ranks, and the engine refuses uneven splits"
    if shard % parallel:
        return f"{parallel} does not divide the {shard} ranks that share one copy of the dense weights"
    return ""
