"""How a run is spread over ranks: the layouts, their sizes, and what rules them out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from types import MappingProxyType
from typing import Any, Final

from windlass import hardware
from windlass.errors import Problem, UserError, raise_all
from windlass.runfile import Loaded, Lora, RunFile

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
MAY_GATHER_ONCE = ("hybrid", "expert-parallel")  # they gather in each pass, or once for all micro-batches of a step
# Contradictory pairs of name and reshard_after_forward, and the layout that the latter implies.
CONTRADICTIONS = {
    ("no-reshard", True): "full-shard",
    ("full-shard", False): "no-reshard",
    ("resident", True): "full-shard",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """A run's layout, as requested or as decided. A request may leave keys OPEN; of a decided one shard x replicate =
    ranks, and `expert_parallel`, the ranks that split experts, divides `shard`."""

    name: str  # one of LAYOUTS; of a request also auto, of a script's run `script`
    reason: str  # why this layout: chosen, set by run.yaml:40, set by fsdp.yaml …; of a request the key that names it
    nodes: int
    gpus_per_node: int
    shard: int  # ranks that the dense weights are split over (transformers' fsdp_size)
    replicate: int = 1  # replicas of the dense weights (dp_replicate_size)
    expert_parallel: int = 1  # ep_size: experts stay on their rank, tokens are sent
    context_parallel: int = 1  # consecutive ranks that the tokens of each row are split over
    reshard_after_forward: bool | None = True
    offload: bool | None = False  # the frozen base is stored in host memory; the adapter and its states on the GPU
    activation_checkpointing: bool | None = False
    offload_activations: bool | None = False  # inputs of recomputed layers are stored in host memory
    precision: str = "bf16"  # bf16 or no: the dtype that compute runs in
    base_dtype: str = "bf16"  # fp8, mxfp4: as published; nf4: as published or made at load

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def is_sharded(self) -> bool:
        """Return whether ranks store parts. With a resident base or a single rank, all tensors are plain."""
        return self.name != "resident" and self.ranks > 1

    @property
    def needs(self) -> Iterator[str]:
        """Yield what this layout needs that not every supported library has: keys of `versions.SINCE`."""
        if self.expert_parallel > 1:
            yield "expert parallelism"
        if self.is_sharded and self.replicate > 1:
            yield "hybrid sharding"
        if self.is_sharded and self.base_dtype != "bf16":
            yield "sharding of a quantized base"

    @property
    def readers(self) -> int:
        """Return the ranks, or groups of ranks that split rows, that read rows of their own."""
        return self.ranks // (self.context_parallel or 1)


# What a request has for a key that is not set: it is derived, or chosen.
OPEN: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **dict.fromkeys(("shard", "replicate", "expert_parallel", "context_parallel"), 0),
        **dict.fromkeys(("reshard_after_forward", "offload", "activation_checkpointing", "offload_activations")),
        "base_dtype": "",
    }
)


def read_request(loaded: Loaded) -> Layout:
    run = loaded.run
    nodes, gpus_per_node = run.cluster.size
    if run.layout.ranks not in (None, nodes * gpus_per_node):
        gpus = f"{nodes} x {gpus_per_node} = {nodes * gpus_per_node} GPUs"
        problem = f"{run.layout.ranks} ranks, but the run is planned for {gpus}"
        hint = "leave layout.ranks out, or set cluster.nodes and cluster.gpus_per_node"
        raise UserError(problem, loaded.where("layout.ranks"), hint, "broken-rule")
    given: dict[str, Any] = {}
    for key, open_value in OPEN.items():
        value = getattr(run.layout, key, None)
        given[key] = open_value if value in (None, AUTO) else value
    # Two names of one setting.
    recompute: list[bool | str] = [run.train.gradient_checkpointing, run.layout.activation_checkpointing]
    offload = run.train.offload_activations
    if offload != AUTO:
        given["offload_activations"] = offload
        recompute.append(offload or AUTO)  # what is offloaded are the inputs of recomputed layers
    # True values other than true say what is kept.
    given["activation_checkpointing"] = next((bool(value) for value in recompute if value != AUTO), None)
    precision = "bf16"
    if run.train.fp16:
        precision = "fp16"
    elif run.train.bf16 is False or (run.train.bf16 == AUTO and _computes_in_float32(run)):
        precision = "no"
    name, key = run.layout.named
    return Layout(name, loaded.where(key) if key else "", nodes, gpus_per_node, **given, precision=precision)


def _computes_in_float32(run: RunFile) -> bool:
    """Return whether a run of float32 weights that leaves train.bf16 open is for a processor that only emulates it."""
    if run.model.torch_dtype != "float32" or hardware.has_bf16_products():
        return False
    return (run.cluster.gpu or hardware.read_gpu_name()) == "cpu"


def why_weights_needed(lora: Lora) -> str:
    """Return why the adapter needs base weights, and so works with neither shards nor codes; empty if it doesn't."""
    return "lora.use_dora needs the norm of base weights" if lora.use_dora else ""


def why_not_codes(lora: Lora) -> str:
    """Return why the adapter doesn't work with a base in fewer bits; empty if it does."""
    if lora.starts_from_weights:
        return f"lora.init_lora_weights: {lora.init_lora_weights} takes adapters from base weights"
    return why_weights_needed(lora)


def rule_out_layouts(run: RunFile, experts_adapted: bool, base_trained: bool) -> dict[str, str]:
    """Return layouts that don't work with the adapter, and why. Remove each once the engine supports it."""
    sharded = [name for name in LAYOUTS if name != "resident"]
    why = why_weights_needed(run.lora)
    if why:
        return dict.fromkeys(sharded, f"{why}, and a rank would hold a shard of them")
    optimizer = f"train.optim: {run.train.optim} looks at a full tensor"
    if base_trained and run.train.optim not in ELEMENTWISE:
        return dict.fromkeys(sharded, f"{optimizer}, and what is trained of the base would be sharded")
    if experts_adapted and run.train.optim not in ELEMENTWISE:
        return {"expert-parallel": f"{optimizer}, and experts' adapters would be split"}
    if experts_adapted and run.lora.bias != "none":
        why = f"lora.bias: {run.lora.bias} trains biases of the base, and experts' adapters would be split"
        return {"expert-parallel": why}
    return {}


def resolve_layout(request: Layout, experts: int) -> Layout:
    """Derive and check what a request that names a layout leaves open. `experts`: routed experts per layer."""
    name = request.name
    # Sizes that aren't set are derived so that their product is the number of ranks.
    replicate = request.replicate or {"hybrid": request.nodes, "resident": request.ranks}.get(name, 1)
    if request.shard and not request.replicate and request.ranks % request.shard == 0:
        replicate = request.ranks // request.shard
    shard = request.shard or max(1, request.ranks // replicate)
    reshard = request.reshard_after_forward
    layout = replace(
        request,
        reason=f"set by {request.reason}",
        shard=shard,
        replicate=replicate,
        expert_parallel=(request.expert_parallel or shard) if name == "expert-parallel" else 1,
        context_parallel=request.context_parallel or 1,
        reshard_after_forward=name not in ("no-reshard", "resident") if reshard is None else reshard,
        offload=bool(request.offload),
        activation_checkpointing=bool(request.activation_checkpointing),
        offload_activations=bool(request.offload_activations),
        base_dtype=request.base_dtype or "bf16",
    )
    contradictions = _find_contradictions(request, layout, experts)
    raise_all([Problem(text, request.reason, hint, code) for code, text, hint in contradictions])
    return layout


def list_keys(layout: Layout) -> dict[str, Any]:
    """Return the keys of `layout` in a run file with which it has this layout."""
    keys: dict[str, Any] = {"name": layout.name}
    if layout.name == "expert-parallel":
        keys["expert_parallel"] = layout.expert_parallel
        if layout.replicate > 1:
            keys |= {"shard": layout.shard, "replicate": layout.replicate}
    if layout.name in MAY_GATHER_ONCE and not layout.reshard_after_forward:
        keys["reshard_after_forward"] = False
    keys["base_dtype"] = layout.base_dtype
    if layout.offload:
        keys["offload"] = True
    if layout.context_parallel > 1:
        keys["context_parallel"] = layout.context_parallel
    return keys


def _find_contradictions(request: Layout, layout: Layout, experts: int) -> Iterator[tuple[str, str, str]]:
    """Yield a code for what is wrong with a requested layout, a sentence, and a hint."""
    name = layout.name
    shard = layout.shard
    replicate = layout.replicate
    reshard = request.reshard_after_forward
    if reshard is not None and (name, reshard) in CONTRADICTIONS:
        text = f"layout {name} with reshard_after_forward {str(reshard).lower()}"
        hint = f"leave reshard_after_forward out, or take {CONTRADICTIONS[name, reshard]}"
        yield "reshard-contradicts-layout", text, hint
    if shard * replicate != layout.ranks:
        text = f"shard {shard} x replicate {replicate} = {shard * replicate}, not the number of ranks, {layout.ranks}"
        yield "sizes-unlike-ranks", text, "leave one of the two out: it is derived"
    if name in ("full-shard", "no-reshard") and shard == 1 < layout.ranks:
        yield "nothing-sharded", f"{name} with shard 1: that is resident", "write layout: resident"
    if name == "hybrid" and 1 in (shard, replicate):
        same = "resident" if shard == 1 else "full-shard"
        grid = f"{request.nodes} x {request.gpus_per_node} GPUs"
        text = f"hybrid on {grid} would shard over {shard} and replicate {replicate} times: that is {same}"
        yield "hybrid-of-one", text, f"write layout: {same}, or give layout.shard and layout.replicate"
    if name == "resident" and shard != 1:
        yield "resident-sharded", f"resident with shard {shard}", "leave layout.shard out"
    if name == "resident" and request.offload:
        yield "resident-offloaded", "resident with offload: nothing would be resident", "write layout: full-shard"
    if name != "expert-parallel" and request.expert_parallel > 1:
        text = f"expert_parallel {request.expert_parallel} with layout {name}"
        yield "experts-split-in-layout", text, "write layout: {name: expert-parallel, …}"
    if name == "expert-parallel":
        why_not = why_not_expert_parallel(experts, layout.expert_parallel, shard)
        possible = [size for size in list_divisors(shard) if not why_not_expert_parallel(experts, size, shard)]
        hint = f"expert_parallel may be {', '.join(map(str, possible))}" if possible else "take another layout"
        if why_not:
            yield "experts-not-divisible", why_not, hint


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
