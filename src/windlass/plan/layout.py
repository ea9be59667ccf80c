"""Decide how a run is spread over ranks: combine the run file and an Accelerate file into one Layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any

from windlass.errors import Problem, UserError, raise_all
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
# Elementwise optimizers: they update a shard of a tensor exactly as they would in the full tensor.
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
CHECKPOINTING = ("train.gradient_checkpointing", "layout.activation_checkpointing")  # two names of one setting
# Layouts that the run file may name although an FSDP file names another: FSDP files have no keys for experts, and
# under expert parallelism they set how the dense rest is sharded.
ALONGSIDE = {"expert-parallel": ("full-shard", "no-reshard", "hybrid")}
# The layout that a key of `layout` implies if none is named. The first kind counts as a name; the second refines the
# layout of an FSDP file, and implies one only if neither file names any.
IMPLIED = {"expert_parallel": "expert-parallel", "replicate": "hybrid"}
IMPLIED_LAST = {"reshard_after_forward": "full-shard", "shard": "full-shard", "offload": "full-shard"}
# Contradictory pairs of name and reshard_after_forward, and the layout that the latter implies.
CONTRADICTIONS = {
    ("no-reshard", True): "full-shard",
    ("full-shard", False): "no-reshard",
    ("resident", True): "full-shard",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """A run's layout: shard x replicate = ranks. `expert_parallel`, the ranks that split experts, divides `shard`."""

    name: str  # one of LAYOUTS
    reason: str  # why this layout: chosen, set by run.yaml:40, set by fsdp.yaml …
    nodes: int
    gpus_per_node: int
    shard: int  # ranks that the dense weights are split over (transformers' fsdp_size)
    replicate: int = 1  # replicas of the dense weights (dp_replicate_size)
    expert_parallel: int = 1  # ep_size: experts stay on their rank, tokens are sent
    reshard_after_forward: bool = True
    offload: bool = False  # the frozen base is stored in host memory; the adapter and its states stay on the GPU
    activation_checkpointing: bool = False
    precision: str = "bf16"  # bf16 or no: the dtype that compute runs in
    base_dtype: str = "bf16"  # fp8, mxfp4: as published; nf4: as published or made at load

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """The layout settings of the user. None: not set, so it is derived."""

    name: str  # auto, or one of LAYOUTS
    where: str  # the setting that gave the name
    nodes: int
    gpus_per_node: int
    shard: int | None = None
    replicate: int | None = None
    expert_parallel: int | None = None
    reshard_after_forward: bool | None = None
    offload: bool | None = None  # False: no layout may offload
    activation_checkpointing: bool = False
    precision: str = "bf16"
    base_dtype: str | None = None  # bf16, fp8, nf4 or mxfp4
    barred: Mapping[str, str] = field(default_factory=dict)  # layouts that the rest of the run rules out, and why

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


def read_request(
    loaded: Loaded, family: Family | None, accelerate: AccelerateFile | None, *, experts_adapted: bool = False
) -> LayoutRequest:
    """Combine run file and Accelerate file. Report every disagreement, and layer classes that the model lacks."""
    run, problems = loaded.run, list[Problem]()
    wishes = accelerate.wishes if accelerate else {}

    def written(path: str) -> Wish | None:
        """Return the run file's value if the user wrote one; layer classes are joined as Accelerate writes them."""
        section, _, key = path.partition(".")
        value = getattr(getattr(run, section), key)
        if path == "layout.name" and not loaded.is_set(path):
            path = "layout"  # the short form, `layout: hybrid`
        if value is None or value == AUTO or not loaded.is_set(path):
            return None
        return Wish(",".join(value) if isinstance(value, list) else value, loaded.where(path))

    def agree(what: str, *given: Wish | None) -> Any:
        """Return the value that all sources agree on, or None if none sets it."""
        first, *others = [wish for wish in given if wish] or [Wish(None, "")]
        for other in others:
            if other.value != first.value:
                text = f"{what} is {other.value} here, but {first.value} at {first.where}"
                problems.append(Problem(text, other.where, "make the two agree, or keep one of them"))
        return first.value

    def agree_on(key: str) -> Any:
        return agree(key, written(f"layout.{key}"), wishes.get(key))

    # 1. Nodes, and GPUs on each.
    nodes = agree("the number of nodes", written("cluster.nodes"), wishes.get("nodes")) or run.cluster.nodes
    gpus, per_node, ranks = written("cluster.gpus_per_node"), run.cluster.gpus_per_node, wishes.get("ranks")
    for wish in (wishes.get("nodes"), ranks):
        if wish and wish.value < 1:
            raise UserError(f"{wish.value} is too few", wish.where, "give 1 or more")
    if ranks and ranks.value % nodes:
        text = f"{ranks.value} ranks do not spread evenly over {nodes} nodes"
        problems.append(Problem(text, ranks.where, f"give a multiple of {nodes}, or change the number of nodes"))
    elif ranks and gpus and ranks.value != nodes * per_node:
        text = f"the number of ranks is {ranks.value} here, but {nodes} nodes x {per_node} at {gpus.where}"
        problems.append(Problem(text, ranks.where, "make the two agree, or keep one of them"))
    elif ranks:
        per_node = ranks.value // nodes
    if run.layout.ranks not in (None, nodes * per_node):
        text = f"layout.ranks is {run.layout.ranks}, but {nodes} nodes x {per_node} GPUs are {nodes * per_node}"
        hint = "leave layout.ranks out, or change cluster.nodes and cluster.gpus_per_node"
        problems.append(Problem(text, loaded.where("layout.ranks"), hint))

    # 2. The layout's name, if anything sets it. The run file comes first; an FSDP file is never `auto`.
    def implied(meanings: Mapping[str, str]) -> Wish | None:
        """Return the layout that the run file's other keys imply if it names none, so that no key is ignored."""
        for key, implies in meanings.items():
            wish = written(f"layout.{key}")
            if wish and key == "reshard_after_forward":
                return _name_by_reshard(wish)
            if wish and (wish.value is True or wish.value > 1):
                return Wish(implies, wish.where)
        return None

    reshard, sharded, replicas = (wishes.get(key) for key in ("reshard_after_forward", "sharded", "replicate"))
    mine, theirs = written("layout.name") or implied(IMPLIED), wishes.get("name")
    if mine:
        theirs = theirs or _name_by_reshard(reshard)
        if theirs and theirs.value not in (mine.value, *ALONGSIDE.get(mine.value, ())):
            agree("the layout", mine, theirs)
    elif sharded and sharded.value:
        mine = Wish("full-shard", sharded.where)
        if replicas and replicas.value > 1:
            mine = Wish("hybrid", replicas.where)
        elif theirs and (theirs.value != "full-shard" or not reshard):
            mine = theirs
        elif reshard:
            mine = _name_by_reshard(reshard)
    name = mine or implied(IMPLIED_LAST) or Wish(AUTO, "")

    # 3. The rest.
    wrap = agree("the wrapped layer", written("layout.wrap"), wishes.get("wrap"))
    lacking = [
        part for part in map(str.strip, (wrap or "").split(",")) if part and family and part not in family.layers
    ]
    if family and lacking:
        wrapped = written("layout.wrap") or wishes["wrap"]
        text = f"{family.causal_lm} has no layer class {', '.join(map(repr, lacking))}; it is sharded by "
        hint = f"write {family.layer}, or leave the key out: windlass knows the layer of each model family"
        problems.append(Problem(f"{text}{family.layer!r}", wrapped.where, hint))
    wish = wishes.get("activation_checkpointing")
    how = [replace(each, value=bool(each.value)) for key in CHECKPOINTING if (each := written(key))]
    recompute = agree("activation checkpointing", *how, wish)
    precisions = [
        Wish(kind, wish.where) for kind in ("bf16", "fp16") if (wish := written(f"train.{kind}")) and wish.value
    ]
    if not precisions and (off := written("train.bf16")):
        precisions = [Wish("no", off.where)]  # train.bf16: false, and no fp16 either
    precision = agree("precision", *precisions, wishes.get("precision"))
    request = LayoutRequest(
        name=name.value,
        where=name.where,
        nodes=nodes,
        gpus_per_node=per_node,
        shard=agree_on("shard"),
        replicate=agree_on("replicate"),
        expert_parallel=agree_on("expert_parallel"),
        reshard_after_forward=agree_on("reshard_after_forward"),
        offload=agree_on("offload"),
        activation_checkpointing=bool(recompute),
        precision=precision or ("bf16" if run.train.bf16 else "no"),
        base_dtype=agree_on("base_dtype"),
        barred=_rule_out(run, experts_adapted) if nodes * per_node > 1 else {},
    )
    raise_all(problems)
    return request


def _name_by_reshard(reshard: Wish | None) -> Wish | None:
    return Wish("full-shard" if reshard.value else "no-reshard", reshard.where) if reshard else None


def why_weights_needed(lora: Any) -> str:
    """Return why the adapter needs base weights, and so works with neither shards nor codes; empty if it doesn't."""
    return "lora.use_dora needs the norm of base weights" if lora.use_dora else ""


def why_not_codes(lora: Any) -> str:
    """Return why the adapter doesn't work with a base in fewer bits; empty if it does."""
    if lora.starts_from_weights:
        return f"lora.init_lora_weights: {lora.init_lora_weights} takes adapters from base weights"
    return why_weights_needed(lora)


def _rule_out(run: Any, experts_adapted: bool) -> dict[str, str]:
    """Return layouts that don't work with the adapter, and why. Remove each once the engine supports it."""
    if why := why_weights_needed(run.lora):
        return {name: f"{why}, and a rank would hold a shard of them" for name in LAYOUTS if name != "resident"}
    if experts_adapted and run.train.optim not in ELEMENTWISE:
        why = f"train.optim: {run.train.optim} looks at a full tensor, and experts' adapters would be split"
        return {"expert-parallel": why}
    return {}


def resolve_layout(request: LayoutRequest, experts: int) -> Layout:
    """Build the Layout that a request names; derive and check its sizes. `experts`: routed experts per layer."""
    name, ranks, reshard = request.name, request.ranks, request.reshard_after_forward
    # Sizes that aren't set are derived so that their product is the number of ranks.
    replicate = request.replicate or {"hybrid": request.nodes, "resident": ranks}.get(name, 1)
    if request.shard and not request.replicate and ranks % request.shard == 0:
        replicate = ranks // request.shard
    shard = request.shard or max(1, ranks // replicate)
    parallel = (request.expert_parallel or shard) if name == "expert-parallel" else 1
    equal = CONTRADICTIONS.get((name, reshard)) if reshard is not None else None
    same = "resident" if shard == 1 else "full-shard"
    why = why_not_expert_parallel(experts, parallel, shard) if name == "expert-parallel" else ""
    fitting = [n for n in list_divisors(shard) if not why_not_expert_parallel(experts, n, shard)]
    possible = f"expert_parallel may be {', '.join(map(str, fitting))}" if fitting else "take another layout"
    problems: list[Problem] = []

    def refuse(is_wrong: object, text: str, hint: str) -> None:
        problems.extend([Problem(text, request.where, hint)] if is_wrong else [])

    others = [one for one in LAYOUTS if one not in request.barred]
    refuse(name in request.barred, request.barred.get(name, ""), f"layout may be {', '.join(others)}")
    text = f"layout {name} with reshard_after_forward {str(reshard).lower()}"
    refuse(equal, text, f"leave reshard_after_forward out, or take {equal}")
    text = f"shard {shard} x replicate {replicate} = {shard * replicate}, but there are {ranks} ranks"
    refuse(shard * replicate != ranks, text, "leave one of the two out: it is derived")
    is_resident = name in ("full-shard", "no-reshard") and shard == 1 < ranks
    refuse(is_resident, f"{name} with shard 1: that is resident", "write layout: resident")
    text = (
        f"hybrid on {request.nodes} x {request.gpus_per_node} GPUs would shard over {shard} and replicate {replicate}"
    )
    hint = f"write layout: {same}, or give layout.shard and layout.replicate"
    refuse(name == "hybrid" and 1 in (shard, replicate), f"{text} times: that is {same}", hint)
    refuse(name == "resident" and shard != 1, f"resident with shard {shard}", "leave layout.shard out")
    text = "resident with offload: nothing would be resident"
    refuse(name == "resident" and request.offload, text, "write layout: full-shard")
    is_split = name != "expert-parallel" and (request.expert_parallel or 1) > 1
    text = f"expert_parallel {request.expert_parallel} with layout {name}"
    refuse(is_split, text, "write layout: {name: expert-parallel, …}")
    refuse(why, why, possible)
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
        offload=bool(request.offload),
        activation_checkpointing=request.activation_checkpointing,
        precision=request.precision,
        base_dtype=request.base_dtype or "bf16",
    )


def list_divisors(number: int) -> list[int]:
    """Return the divisors, smallest first. Run files may have any number: pairs above 2**16 each are left out."""
    small = [n for n in range(1, min(isqrt(number), 2**16) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def why_not_expert_parallel(experts: int, parallel: int, shard: int) -> str:
    """Return why experts cannot be split this way; empty if they can."""
    if not experts:
        return "the model has no routed experts to split"
    if parallel < 2:
        return "one rank alone has nothing to split experts over"
    if experts % parallel:
        return f"{experts} experts do not split evenly over {parallel} ranks, and the engine refuses uneven splits"
    if shard % parallel:
        return f"{parallel} does not divide the {shard} ranks that share one copy of the dense weights"
    return ""
