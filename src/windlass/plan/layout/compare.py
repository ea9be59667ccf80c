"""The layouts to compare. This part knows no arithmetic of bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windlass.plan.layout.shape import Layout
from windlass.plan.layout.sizes import settle, why_not_expert_parallel
from windlass.plan.layout.sources import AUTO, Demand


@dataclass(frozen=True, slots=True)
class Candidate:
    """One row of the comparison. `layout` is None where not even its costs can be said."""

    title: str  # full-shard, parameters offloaded
    layout: Layout | None
    why_not: str = ""  # why training cannot run it; empty where it can
    here: bool = True  # on the nodes that the run has; False: what more or fewer of them would give

    @property
    def possible(self) -> bool:
        return not self.why_not


ONCE = "gathered once"  # a step, in the titles of layouts that may do either
# Keys of `layout` that rule layouts out where they name none.
KEYS = ("shard", "replicate", "expert_parallel", "reshard_after_forward", "offload")


def candidates(wanted: Demand, experts: int, fp8: bool = False) -> tuple[Candidate, ...]:
    """Every layout on the nodes of the run, then those that make sense on 1 to 2 times as many.

    `experts`: routed experts per layer, 0 for a dense model. `fp8`: the checkpoint is published in FP8, so that each
    layout is there with the base as published too, unless the run says how it is to be held.
    """
    free = replace(
        wanted,
        where="",
        shard=None,
        replicate=None,
        expert_parallel=None,
        reshard_after_forward=None,
        offload=None,
        barred={},  # such layouts are still costed
    )
    rows = [_bar(row, wanted) for row in _on(free, experts, fp8) if _as_asked(row, wanted)]
    for nodes in _other_nodes(wanted.nodes):
        other = replace(free, nodes=nodes)
        suffix = f", on {nodes} node{'s' * (nodes > 1)}"
        rows += [
            replace(row, title=row.title + suffix, here=False)
            for row in (_bar(row, wanted) for row in _on(other, experts, fp8))
            if row.possible and row.layout and not row.layout.offload and row.layout.name != "no-reshard"
            if _as_asked(row, wanted)
        ]
    return tuple(rows)


def _as_asked(row: Candidate, wanted: Demand) -> bool:
    """Whether a layout is what the run's keys ask for. Beside a layout that is named they speak of that one alone,
    but for an offload that is ruled out: that holds for all."""
    if row.layout is None:
        return True
    said = KEYS if wanted.name == AUTO else ("offload",) if wanted.offload is False else ()
    return all(getattr(wanted, key) in (None, getattr(row.layout, key)) for key in said)


def named(wanted: Demand, experts: int, fp8: bool = False) -> tuple[Candidate, ...]:
    """The layout that a demand names, in each dtype that it leaves open how to hold the base in."""
    return tuple(
        Candidate(
            wanted.name + (", FP8" if dtype == "fp8" else ""),
            settle(replace(wanted, base_dtype=dtype), experts),
        )
        for dtype in _dtypes(wanted, fp8)
    )


def _dtypes(wanted: Demand, fp8: bool) -> list[str]:
    """How the base may be held. What is offloaded stays as it is computed with: host memory has the room."""
    if wanted.base_dtype:
        return [wanted.base_dtype]
    return ["bf16", "fp8"] if fp8 and not wanted.offload else ["bf16"]


def _bar(row: Candidate, wanted: Demand) -> Candidate:
    """Say of a layout that the rest of the run rules it out."""
    why = wanted.barred.get(row.layout.name, "") if row.layout and row.layout.ranks > 1 else ""
    return replace(row, why_not=row.why_not or why)


def _other_nodes(nodes: int) -> list[int]:
    """1 to 2 times the nodes: every number where they are few, else halves and steps of a half."""
    if nodes <= 4:
        return [n for n in range(1, 2 * nodes + 1) if n != nodes]
    return sorted({max(1, nodes // 4), nodes // 2, nodes * 3 // 2, nodes * 2} - {nodes})


def _on(wanted: Demand, experts: int, fp8: bool) -> list[Candidate]:
    """Every layout on that many nodes, in each dtype that the base may be held in."""
    rows = [row for dtype in _dtypes(wanted, fp8) for row in _in(replace(wanted, base_dtype=dtype), experts)]
    impossible = {row.title: row for row in rows if not row.possible and not row.layout}
    return [row for row in rows if row.layout] + list(impossible.values())  # those say why once, not for each dtype


def _in(wanted: Demand, experts: int) -> list[Candidate]:
    """Every layout with the base held in one dtype."""
    ranks = wanted.ranks
    held = ", FP8" if wanted.base_dtype == "fp8" else ""

    def row(title: str, name: str, why_not: str = "", **sizes: int | bool) -> Candidate:
        return Candidate(title, None if why_not else _layout(wanted, name, experts, **sizes), why_not)

    alone = "one GPU: there is nothing to shard over" if ranks == 1 else ""
    rows = [row("full-shard", "full-shard", alone)]
    if not held:
        rows.append(row("full-shard, parameters offloaded", "full-shard", alone, offload=True))
    rows += [
        row("no-reshard", "no-reshard", alone),
        row("hybrid", "hybrid", _why_not_hybrid(wanted)),
        *_expert_rows(wanted, experts),
        row("resident" if ranks > 1 else "one GPU", "resident"),
    ]
    rows = [each for one in rows for each in (one, *_gathered_once(one))]
    return [replace(each, title=each.title + held) if each.layout else each for each in rows]


def _gathered_once(row: Candidate) -> list[Candidate]:
    """What is sharded beside split experts, or inside a node, may stay gathered through accumulation too."""
    if row.layout is None or row.layout.name not in ("hybrid", "expert-parallel"):
        return []
    return [Candidate(f"{row.title}, {ONCE}", replace(row.layout, reshard_after_forward=False))]


def _why_not_hybrid(wanted: Demand) -> str:
    if wanted.nodes == 1:
        return "one node: there is nothing to replicate across, it would be full-shard"
    if wanted.gpus_per_node == 1:
        return "one GPU per node: there is nothing to shard over inside a node, it would be resident"
    return ""


def _expert_rows(wanted: Demand, experts: int) -> list[Candidate]:
    """One row per number of ranks that experts can be split over, and one per number that divides ranks but cannot."""
    ranks, gpus = wanted.ranks, wanted.gpus_per_node
    sizes = [n for n in range(2, ranks + 1) if ranks % n == 0]
    if not experts or not sizes:
        return [Candidate("expert-parallel", None, why_not_expert_parallel(experts, ranks, ranks))]
    rows = []
    for size in sizes:
        why = why_not_expert_parallel(experts, size, ranks)
        layout = None if why else _layout(wanted, "expert-parallel", experts, expert_parallel=size)
        rows.append(Candidate(f"expert-parallel {size}", layout, why))
    if wanted.nodes > 1 and gpus > 1 and not why_not_expert_parallel(experts, gpus, gpus):
        layout = _layout(wanted, "expert-parallel", experts, shard=gpus, replicate=wanted.nodes, expert_parallel=gpus)
        rows.append(Candidate(f"expert-parallel {gpus}, replicated across nodes", layout))
    return rows


def _layout(wanted: Demand, name: str, experts: int, **sizes: int | bool) -> Layout:
    return replace(settle(replace(wanted, name=name, **sizes), experts), reason="compared")  # type: ignore[arg-type]
