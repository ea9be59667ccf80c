"""A demand gets its sizes, the layouts to compare are listed, and the best of them is chosen by its figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import UserError
from windlass.plan.compare import Contender, chosen
from windlass.plan.cost import Batch, Cost
from windlass.plan.layout import LAYOUTS, Candidate, Demand, Layout, candidates, named, settle

# --- a demand settled -----------------------------------------------------------------------------------------------


def want(name: str, nodes: int, gpus: int, **more: Any) -> Demand:
    return replace(Demand(name, "run.yaml:9: layout", nodes, gpus), **more)


@pytest.mark.parametrize(
    ("wanted", "experts", "sizes"),
    [
        (want("full-shard", 3, 1), 128, (3, 1, 1)),
        (want("no-reshard", 2, 8), 0, (16, 1, 1)),
        (want("hybrid", 2, 8), 0, (8, 2, 1)),
        (want("hybrid", 1, 8, replicate=4), 0, (2, 4, 1)),
        (want("hybrid", 2, 2, shard=2), 0, (2, 2, 1)),
        (want("expert-parallel", 2, 1), 128, (2, 1, 2)),
        (want("expert-parallel", 2, 4, expert_parallel=4), 128, (8, 1, 4)),
        (want("expert-parallel", 2, 4, replicate=2), 128, (4, 2, 4)),
        (want("resident", 3, 1), 128, (1, 3, 1)),
        (want("full-shard", 1, 1), 0, (1, 1, 1)),
    ],
)
def test_sizes_are_derived(wanted: Demand, experts: int, sizes: tuple[int, int, int]) -> None:
    layout = settle(wanted, experts)
    assert (layout.shard, layout.replicate, layout.expert_parallel) == sizes
    assert layout.shard * layout.replicate == layout.ranks


@pytest.mark.parametrize(
    ("wanted", "experts", "says"),
    [
        (want("expert-parallel", 3, 1), 128, "128 experts do not split evenly over 3 ranks"),
        (want("expert-parallel", 3, 1), 0, "no routed experts"),
        (want("expert-parallel", 1, 1), 128, "one rank alone"),
        (want("expert-parallel", 2, 3, expert_parallel=4), 128, "4 does not divide the 6 ranks"),
        (want("full-shard", 2, 2, expert_parallel=2), 128, "expert_parallel 2 with layout full-shard"),
        (want("full-shard", 2, 2, shard=3), 128, "shard 3 x replicate 1 = 3, but there are 4 ranks"),
        (want("hybrid", 2, 2, shard=2, replicate=3), 0, "shard 2 x replicate 3 = 6, but there are 4 ranks"),
        (want("hybrid", 3, 1), 0, "that is resident"),
        (want("full-shard", 2, 1, shard=1), 0, "full-shard with shard 1: that is resident"),
        (want("no-reshard", 2, 1, shard=1), 0, "no-reshard with shard 1: that is resident"),
        (want("hybrid", 1, 4), 0, "that is full-shard"),
        (want("resident", 2, 1, shard=2), 0, "resident with shard 2"),
        (want("resident", 2, 1, offload=True), 0, "resident with offload"),
        (want("no-reshard", 2, 1, reshard_after_forward=True), 0, "no-reshard with reshard_after_forward true"),
        (want("full-shard", 2, 1, reshard_after_forward=False), 0, "full-shard with reshard_after_forward false"),
        (want("resident", 2, 1, reshard_after_forward=True), 0, "resident with reshard_after_forward true"),
        (want("ful-shard", 2, 1), 0, "no such layout"),
        (want("expert-parallel", 2, 1, barred={"expert-parallel": "not with these"}), 128, "not with these"),
    ],
)
def test_a_layout_that_cannot_be_says_why(wanted: Demand, experts: int, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        settle(wanted, experts)
    assert all(problem.where == "run.yaml:9: layout" and problem.hint for problem in caught.value.problems)


def test_the_hint_lists_the_splits_that_would_do() -> None:
    with pytest.raises(UserError) as caught:
        settle(want("expert-parallel", 4, 3), 128)
    assert caught.value.problems[0].hint == "expert_parallel may be 2, 4"


# --- what is compared -----------------------------------------------------------------------------------------------


def titles(nodes: int, gpus: int, experts: int, fp8: bool = False) -> dict[str, str]:
    return {row.title: row.why_not for row in candidates(want("auto", nodes, gpus), experts, fp8) if row.here}


def test_three_nodes_with_one_gpu_each_as_published() -> None:
    rows = titles(3, 1, 128, fp8=True)
    assert [title for title, why in rows.items() if why == "" and "FP8" in title] == [
        "full-shard, FP8",
        "no-reshard, FP8",
        "resident, FP8",
    ]
    assert {title: why for title, why in rows.items() if "FP8" not in title} == {
        "full-shard": "",
        "full-shard, parameters offloaded": "",
        "no-reshard": "",
        "hybrid": "one GPU per node: there is nothing to shard over inside a node, it would be resident",
        "expert-parallel 3": ("128 experts do not split evenly over 3 ranks, and the engine refuses uneven splits"),
        "resident": "",
    }


def test_two_nodes_with_eight_gpus_each() -> None:
    rows = titles(2, 8, 128)
    assert [title for title, why in rows.items() if not why] == [
        "full-shard",
        "full-shard, parameters offloaded",
        "no-reshard",
        "hybrid",
        "hybrid, gathered once",
        "expert-parallel 2",
        "expert-parallel 2, gathered once",
        "expert-parallel 4",
        "expert-parallel 4, gathered once",
        "expert-parallel 8",
        "expert-parallel 8, gathered once",
        "expert-parallel 16",
        "expert-parallel 16, gathered once",
        "expert-parallel 8, replicated across nodes",
        "expert-parallel 8, replicated across nodes, gathered once",
        "resident",
    ]
    for row in candidates(want("auto", 2, 8), 128):
        if row.layout:
            kept = row.layout.name in ("no-reshard", "resident") or "gathered once" in row.title
            assert row.layout.reshard_after_forward != kept, row.title


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shard", 1),
        ("shard", 8),
        ("replicate", 1),
        ("expert_parallel", 1),
        ("expert_parallel", 8),
        ("reshard_after_forward", False),
        ("offload", False),
        ("offload", True),
        ("base_dtype", "bf16"),
    ],
)
@pytest.mark.parametrize("gpus", [1, 8])
def test_no_layout_contradicts_what_the_run_asks_for(key: str, value: Any, gpus: int) -> None:
    free = candidates(want("auto", 2, gpus), 128, fp8=True)
    rows = candidates(want("auto", 2, gpus, **{key: value}), 128, fp8=True)
    assert {getattr(row.layout, key) for row in rows if row.layout} <= {value}
    assert len([row for row in rows if row.layout]) < len([row for row in free if row.layout])


def test_beside_a_layout_that_is_named_its_keys_speak_of_that_one_alone() -> None:
    rows = candidates(want("full-shard", 2, 8, shard=16, offload=False), 128)
    assert {row.layout.name for row in rows if row.layout} == set(LAYOUTS)
    assert not [row for row in rows if row.layout and row.layout.offload]


def test_a_dense_model_has_no_experts_to_split() -> None:
    assert titles(2, 1, 0)["expert-parallel"] == "the model has no routed experts to split"


def test_one_gpu_alone() -> None:
    assert [title for title, why in titles(1, 1, 128).items() if not why] == ["one GPU"]


def test_more_and_fewer_nodes_are_shown_and_never_chosen() -> None:
    rows = [row for row in candidates(want("auto", 3, 1), 128) if not row.here]
    assert {row.layout.nodes for row in rows if row.layout} == {1, 2, 4, 5, 6}
    assert "expert-parallel 2, on 2 nodes" in {row.title for row in rows}
    assert chosen([priced(row, True, 1.0, 1.0) for row in rows]) is None


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([0, 4, 8, 60, 128]), st.booleans())
def test_every_row_can_be_or_says_why(nodes: int, gpus: int, experts: int, fp8: bool) -> None:
    rows = candidates(want("auto", nodes, gpus), experts, fp8)
    assert len({row.title for row in rows}) == len(rows)
    for row in rows:
        assert row.possible == (row.why_not == "")
        assert row.layout or row.why_not
        if row.layout:
            layout = row.layout
            assert layout.shard * layout.replicate == layout.ranks
            assert layout.shard % layout.expert_parallel == 0
            assert layout.expert_parallel == 1 or experts % layout.expert_parallel == 0
            assert layout.name in LAYOUTS
            assert (layout.nodes == nodes) == row.here


def test_the_rest_of_the_demand_goes_into_every_candidate() -> None:
    wanted = want("full-shard", 2, 1, activation_checkpointing=True, precision="no", offload=True)
    for row in candidates(wanted, 128):
        if row.layout:
            assert (row.layout.activation_checkpointing, row.layout.precision) == (True, "no")
            assert row.layout.offload == ("offloaded" in row.title)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_demanded_dtype_is_the_only_one_compared(dtype: str) -> None:
    rows = candidates(want("auto", 2, 8, base_dtype=dtype), 128, fp8=True)
    assert {row.layout.base_dtype for row in rows if row.layout} == {dtype}
    assert [c.layout.base_dtype for c in named(want("hybrid", 2, 8, base_dtype=dtype), 128, fp8=True) if c.layout] == [
        dtype
    ]


def test_a_named_layout_is_weighed_in_both_dtypes_unless_it_is_offloaded() -> None:
    assert [c.title for c in named(want("no-reshard", 2, 1), 128, fp8=True)] == ["no-reshard", "no-reshard, FP8"]
    assert [c.title for c in named(want("full-shard", 2, 1, offload=True), 128, fp8=True)] == ["full-shard"]
    assert [c.title for c in named(want("full-shard", 2, 1), 128, fp8=False)] == ["full-shard"]


# --- the choice -----------------------------------------------------------------------------------------------------


def priced(row: Candidate, fits: bool, gib: float, seconds: float, serial: float | None = None) -> Contender:
    """A candidate with figures as the cost model would give them."""
    paid = Cost(
        rows=(),
        flows=(),
        gpu_gib=gib,
        host_gib=0.0,
        fits=fits,
        remedy="",
        flops_per_token=1.0,
        recompute_flops_per_token=0.0,
        compute_seconds=0.0,
        step_seconds=seconds,
        step_seconds_serial=seconds if serial is None else serial,
        tokens_per_second=1 / seconds,
        mfu=0.1,
        wire_gb_per_step=0.0,
    )
    ranks = row.layout.ranks if row.layout else 1
    return Contender(row, ranks, Batch(1, 1, 1), paid, None, roomy=fits)


def choose(contenders: list[Contender]) -> Layout | None:
    best = chosen(contenders)
    return best.layout if best else None


def figures(*rows: tuple[Any, ...]) -> list[Contender]:
    known = {row.title: row for row in candidates(want("auto", 2, 2), 128, fp8=True)}
    known["barred"] = replace(known["resident, FP8"], why_not="not with these")
    return [priced(known[title], *rest) for title, *rest in rows]


def test_the_fastest_that_fits_is_chosen_and_the_reason_says_so() -> None:
    layout = choose(
        figures(
            ("full-shard", True, 60, 20.0),
            ("hybrid", True, 100, 5.0),
            ("expert-parallel 4", True, 70, 2.5),
            ("resident", False, 238, 1.0),
        )
    )
    assert layout is not None
    assert (layout.name, layout.expert_parallel) == ("expert-parallel", 4)
    assert layout.reason == (
        "chosen: the fastest of the 3 layouts that fit, 2.5 s a step (hybrid 5 s, full-shard 20 s)"
    )


def test_a_tie_is_told_as_one() -> None:
    layout = choose(figures(("full-shard", True, 60, 20.0), ("full-shard, parameters offloaded", True, 50, 20.0)))
    assert layout is not None
    assert not layout.offload
    assert layout.reason.endswith("20 s a step (full-shard, parameters offloaded 20 s)")


def test_of_equals_the_one_with_least_to_overlap_is_taken() -> None:
    layout = choose(figures(("hybrid", True, 52, 2.50, 4.8), ("expert-parallel 4", True, 24, 2.52, 2.9)))
    assert layout is not None
    assert layout.name == "expert-parallel"
    layout = choose(figures(("hybrid", True, 52, 2.50, 4.8), ("expert-parallel 4", True, 24, 2.6, 2.9)))
    assert layout is not None
    assert layout.name == "hybrid"


def test_what_training_cannot_run_is_never_chosen_however_fast() -> None:
    layout = choose(figures(("full-shard", True, 60, 20.0), ("barred", True, 120, 1.0)))
    assert layout is not None
    assert (layout.name, layout.reason) == ("full-shard", "chosen: the only layout that is possible")


def test_where_nothing_fits_the_smallest_is_taken_and_says_so() -> None:
    layout = choose(figures(("full-shard", False, 300, 20.0), ("resident", False, 900, 1.0)))
    assert layout is not None
    assert layout.name == "full-shard"
    assert layout.reason == "chosen: none of 2 layouts fits, and this one needs least, 300 GiB per GPU"


def test_the_only_one_that_fits() -> None:
    layout = choose(figures(("full-shard", True, 60, 20.0), ("resident", False, 900, 1.0)))
    assert layout is not None
    assert layout.reason == "chosen: the only one of 2 layouts that fits"


def test_nothing_to_choose_from() -> None:
    assert choose([]) is None
    assert choose([priced(Candidate("x", None, "no"), False, 1, 1)]) is None
