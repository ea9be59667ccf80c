"""A demand that names a layout -> that Layout, its sizes derived and checked."""

from __future__ import annotations

from windlass.errors import Problem, raise_all
from windlass.plan.layout.shape import LAYOUTS, Layout
from windlass.plan.layout.sources import Demand

# What a name and reshard_after_forward say against each other, and the layout that the latter means.
CONTRADICTIONS = {
    ("no-reshard", True): "full-shard",
    ("full-shard", False): "no-reshard",
    ("resident", True): "full-shard",
}


def settle(wanted: Demand, experts: int) -> Layout:
    """The Layout that a demand names (not `auto`). `experts`: routed experts per layer, 0 for a dense model."""
    problems: list[Problem] = []
    if wanted.name in wanted.barred:
        fine = [name for name in LAYOUTS if name not in wanted.barred]
        problems.append(Problem(wanted.barred[wanted.name], wanted.where, f"layout may be {', '.join(fine)}"))
    reshard = wanted.reshard_after_forward
    if reshard is not None and (wanted.name, reshard) in CONTRADICTIONS:
        equal = CONTRADICTIONS[wanted.name, reshard]
        text = f"layout {wanted.name} with reshard_after_forward {str(reshard).lower()}"
        problems.append(Problem(text, wanted.where, f"leave reshard_after_forward out, or take {equal}"))
    shard, replicate = _sizes(wanted, problems)
    parallel = _expert_parallel(wanted, experts, shard, problems)
    raise_all(problems)
    return Layout(
        name=wanted.name,
        reason=f"demanded by {wanted.where}",
        nodes=wanted.nodes,
        gpus_per_node=wanted.gpus_per_node,
        shard=shard,
        replicate=replicate,
        expert_parallel=parallel,
        reshard_after_forward=wanted.name not in ("no-reshard", "resident") if reshard is None else reshard,
        offload=bool(wanted.offload) and wanted.name != "resident",
        activation_checkpointing=wanted.activation_checkpointing,
        precision=wanted.precision,
        base_dtype=wanted.base_dtype or "bf16",
    )


def _sizes(wanted: Demand, problems: list[Problem]) -> tuple[int, int]:
    """shard and replicate, whose product is the number of ranks."""
    ranks = wanted.ranks
    if wanted.name not in LAYOUTS:
        problems.append(Problem(f"no such layout: {wanted.name}", wanted.where, f"one of {', '.join(LAYOUTS)}"))
        return ranks, 1
    usual = {"hybrid": wanted.nodes, "resident": ranks}.get(wanted.name, 1)
    replicate = wanted.replicate or (ranks // wanted.shard if wanted.shard and ranks % wanted.shard == 0 else usual)
    shard = wanted.shard or max(1, ranks // replicate)
    if shard * replicate != ranks:
        problems.append(
            Problem(
                f"shard {shard} x replicate {replicate} = {shard * replicate}, but there are {ranks} ranks",
                wanted.where,
                "leave one of the two out: it is derived",
            )
        )
    if wanted.name in ("full-shard", "no-reshard") and shard == 1 < ranks:
        problems.append(
            Problem(f"{wanted.name} with shard 1: that is resident", wanted.where, "write layout: resident")
        )
    if wanted.name == "hybrid" and (shard == 1 or replicate == 1):
        equal = "resident" if shard == 1 else "full-shard"
        problems.append(
            Problem(
                f"hybrid on {wanted.nodes} x {wanted.gpus_per_node} GPUs would shard over {shard} and replicate "
                f"{replicate} times: that is {equal}",
                wanted.where,
                f"write layout: {equal}, or give layout.shard and layout.replicate",
            )
        )
    if wanted.name == "resident" and shard != 1:
        problems.append(Problem(f"resident with shard {shard}", wanted.where, "leave layout.shard out"))
    if wanted.name == "resident" and wanted.offload:
        problems.append(
            Problem("resident with offload: nothing would be resident", wanted.where, "write layout: full-shard")
        )
    return shard, replicate


def _expert_parallel(wanted: Demand, experts: int, shard: int, problems: list[Problem]) -> int:
    if wanted.name != "expert-parallel":
        if (wanted.expert_parallel or 1) > 1:
            problems.append(
                Problem(
                    f"expert_parallel {wanted.expert_parallel} with layout {wanted.name}",
                    wanted.where,
                    "write layout: {name: expert-parallel, …}",
                )
            )
        return 1
    parallel = wanted.expert_parallel or shard
    why = why_not_expert_parallel(experts, parallel, shard)
    if why:
        fitting = [n for n in range(2, shard + 1) if not why_not_expert_parallel(experts, n, shard)]
        hint = f"expert_parallel may be {', '.join(map(str, fitting))}" if fitting else "take another layout"
        if not fitting and experts:
            hint += f", or a number of ranks that divides {experts} experts"
        problems.append(Problem(why, wanted.where, hint))
    return parallel


def why_not_expert_parallel(experts: int, parallel: int, shard: int) -> str:
    """Why experts cannot be split so; empty where they can."""
    if not experts:
        return "the model has no routed experts to split"
    if parallel < 2:
        return "one rank alone has nothing to split experts over"
    if experts % parallel:
        return f"{experts} experts do not split evenly over {parallel} ranks, and the engine refuses uneven splits"
    if shard % parallel:
        return f"{parallel} does not divide the {shard} ranks that share one copy of the dense weights"
    return ""
