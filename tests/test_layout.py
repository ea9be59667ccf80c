"""Run file and Accelerate file become one layout; contradictions name both places; `auto` chooses."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from windlass.errors import Problem, raise_all
from windlass.model.family import Family
from windlass.plan.cost import BatchSize, Cost
from windlass.plan.layout import LAYOUTS, OPEN, Layout, list_divisors, read_request, resolve_layout, rule_out_layouts
from windlass.plan.search import Candidate, choose_layout, list_impossible, list_layouts, list_named_layouts
from windlass.plan.validate import check_wrapped_layers
from windlass.runfile import Loaded, read_run_file
from windlass.runfile.accelerate import read_accelerate

EXAMPLES = Path(__file__).parent.parent / "examples" / "mistral-small-4"
FSDP = "distributed_type: FSDP\n"
MISTRAL4 = Family("mistral4", "Mistral4ForCausalLM", "Mistral4DecoderLayer")


def load(folder: Path, *overrides: str, accelerate: str | Path = "", written: str = "") -> Loaded:
    """Load a minimal run file with these sections and overrides, and with an Accelerate file as text or path."""
    path = folder / "run.yaml"
    path.write_text(f"model: {{model_name_or_path: Mistral-Small-4-119B-2603}}\ndata: {{val_split: null}}\n{written}\n")
    if isinstance(accelerate, str):
        (folder / "fsdp.yaml").write_text(accelerate or "distributed_type: MULTI_GPU")
        accelerate = folder / "fsdp.yaml"
    common = ("train.eval_strategy=no", "cluster.network=infiniband-400")
    return read_run_file(path, [*common, *overrides], read_accelerate(accelerate))


def request(folder: Path, *overrides: str, **more: Any) -> Layout:
    return read_request(load(folder, *overrides, **more))


# --- run file and Accelerate file ------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("full-shard", True)),
        ("fsdp_config:\n  fsdp_reshard_after_forward: false\n", ("no-reshard", False)),
        ("fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n", ("no-reshard", False)),
        ("fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD_ZERO2\n", ("hybrid", False)),
        ("fsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\n", ("resident", False)),
        ("parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n", ("hybrid", True)),
    ],
)
def test_accelerate_files_map_to_a_layout(text: str, expected: tuple[str, bool], tmp_path: Path) -> None:
    layout = resolve_layout(request(tmp_path, accelerate=FSDP + "num_machines: 2\nnum_processes: 8\n" + text), 128)
    assert (layout.name, layout.reshard_after_forward) == expected
    assert (layout.shard, layout.replicate) == {"hybrid": (4, 2), "resident": (1, 8)}.get(layout.name, (8, 1))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("layout=hybrid", "hybrid"),
        ("layout.expert_parallel=2", "expert-parallel"),
        ("layout.replicate=2", "hybrid"),
        ("layout.reshard_after_forward=false", "no-reshard"),
        ("layout.reshard_after_forward=true", "full-shard"),
        ("layout.offload=true", "full-shard"),
        ("layout.shard=4", "full-shard"),
        ("layout.expert_parallel=1", "auto"),
    ],
)
def test_keys_of_layout_imply_the_layout_that_has_them(key: str, name: str, tmp_path: Path) -> None:
    found = request(tmp_path, "cluster.nodes=2", "cluster.gpus_per_node=2", key)
    assert found.name == name
    if name != "auto":
        assert found.reason == f"--override {key}"
        assert resolve_layout(found, 128).name == name


# key of the Accelerate file, its value, code, and what the run file says otherwise
DISAGREEMENTS: list[tuple[str, str, str, str]] = [
    ("num_machines", "3", "disagreement", "cluster: {nodes: 2}"),
    ("num_processes", "2", "disagreement", "cluster: {nodes: 2, gpus_per_node: 4}"),
    ("num_processes", "3", "uneven-ranks", "cluster: {nodes: 2}"),
    ("num_processes", "0", "wrong-value", ""),
    ("mixed_precision", "bf16", "disagreement", "train: {bf16: false}"),
    ("fsdp_config.fsdp_reshard_after_forward", "true", "disagreement", "layout: no-reshard"),
    ("fsdp_config.fsdp_sharding_strategy", "HYBRID_SHARD", "disagreement", "layout: resident"),
    ("fsdp_config.fsdp_offload_params", "false", "disagreement", "layout: {offload: true}"),
    ("fsdp_config.fsdp_activation_checkpointing", "true", "disagreement", "train: {gradient_checkpointing: false}"),
    ("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "A", "disagreement", "layout: {wrap: [A, B]}"),
    ("parallelism_config.parallelism_config_dp_replicate_size", "2", "disagreement", "layout: {replicate: 4}"),
]


def test_two_sources_that_disagree_are_an_error_that_names_both_and_all_are_reported_at_once(tmp_path: Path) -> None:
    for key, value, code, written in DISAGREEMENTS:
        lines = key.replace(".", ":\n  ") + f": {value}\n"
        with refused(code, f"fsdp.yaml:{1 + lines.count(chr(10))}: {key}") as problems:
            load(tmp_path, accelerate=FSDP + lines, written=written)
        assert len(problems) == 1
    text = FSDP + "num_machines: 3\nmixed_precision: bf16\nfsdp_config:\n  offload_params: no\n"
    with refused("disagreement") as problems:
        load(tmp_path, accelerate=text, written="cluster: {nodes: 2}\ntrain: {bf16: false}\nlayout: {offload: true}")
    places = {problem.where.rpartition(": ")[2].rpartition(".")[2] for problem in problems}
    assert places == {"mixed_precision", "num_machines", "offload_params"}
    assert all(problem.hint for problem in problems)
    assert f"asks for cluster.nodes 3, but it is 2 at {tmp_path}/run.yaml:3: cluster.nodes" in str(problems)


def test_a_default_is_no_disagreement_and_experts_may_be_split_under_an_fsdp_file(tmp_path: Path) -> None:
    text = FSDP + "num_machines: 3\nnum_processes: 6\nmixed_precision: 'no'\n"
    found = request(tmp_path, accelerate=text + "fsdp_config:\n  activation_checkpointing: true\n")
    assert (found.nodes, found.gpus_per_node, found.precision, found.activation_checkpointing) == (3, 2, "no", True)
    keys = ("cluster.nodes=2", "train.bf16=true", "layout.name=expert-parallel")
    layout = resolve_layout(request(tmp_path, *keys, accelerate=EXAMPLES / "config/fsdp_2xH200.yaml"), 128)
    assert (layout.name, layout.shard, layout.expert_parallel) == ("expert-parallel", 2, 2)
    text = FSDP + "fsdp_config: {fsdp_reshard_after_forward: true, fsdp_transformer_layer_cls_to_wrap: ''}\n"
    text += "num_processes: 4\nparallelism_config: {parallelism_config_dp_replicate_size: 2}\n"
    loaded = load(tmp_path, accelerate=text, written="layout: hybrid\ntrain: {gradient_checkpointing: selective}")
    assert (loaded.run.cluster.gpus_per_node, loaded.run.layout.replicate, loaded.run.layout.wrap) == (4, 2, None)
    assert loaded.where("cluster.gpus_per_node") == f"{tmp_path}/fsdp.yaml:3: num_processes"
    with refused("wrong-value", "run.yaml:3: layout"):  # never replaced by what the file sets
        load(tmp_path, accelerate=text, written="layout: 5")
    assert request(tmp_path, "train.bf16=false").precision == "no"
    assert request(tmp_path, "train.bf16=false", "train.fp16=true").precision == "fp16"


def check_layers(folder: Path, *overrides: str, **more: Any) -> list[Problem]:
    loaded = load(folder, *overrides, **more)
    return check_wrapped_layers(loaded.run, MISTRAL4, loaded.where("layout.wrap"))


def test_a_layer_class_that_the_model_lacks_is_an_error_that_names_its_own(tmp_path: Path) -> None:
    with refused("no-such-layer", "fsdp-3xH200.yaml:24: fsdp_config.fsdp_transformer_layer_cls_to_wrap") as problems:
        raise_all(check_layers(tmp_path, accelerate=EXAMPLES / "fsdp-3xH200.yaml"))
    assert problems[0].hint.startswith("write Mistral4DecoderLayer, or")
    for name in ("Mistral4DecoderLayer", "Mistral4DecoderLayer, Mistral4DecoderLayer"):
        assert not check_layers(tmp_path, f"layout.wrap={name}")
    with refused("no-such-layer", "layout.wrap=mistral4decoderlayer"):
        raise_all(check_layers(tmp_path, "layout.wrap=mistral4decoderlayer"))


@pytest.mark.parametrize(
    ("keys", "trained", "barred"),
    [
        ((), {"experts_adapted", "base_trained"}, set()),
        (("train.optim=adafactor",), {"experts_adapted"}, {"expert-parallel"}),
        (("train.optim=adafactor",), {"base_trained"}, set(LAYOUTS) - {"resident"}),
        (("lora.bias=all",), {"experts_adapted"}, {"expert-parallel"}),
        (("lora.use_dora=true",), set(), set(LAYOUTS) - {"resident"}),
    ],
)
def test_adapter_rules_out_layouts(keys: tuple[str, ...], trained: set[str], barred: set[str], tmp_path: Path) -> None:
    run = load(tmp_path, *keys).run
    assert set(rule_out_layouts(run, "experts_adapted" in trained, "base_trained" in trained)) == barred


# --- a request that names a layout ------------------


def want(name: str, nodes: int, gpus: int, **more: Any) -> Layout:
    return Layout(name, "run.yaml:9: layout", nodes, gpus, **{**OPEN, **more})


def test_sizes_are_derived() -> None:
    for wanted, sizes in (
        (want("no-reshard", 2, 8), (16, 1, 1)),
        (want("hybrid", 2, 8), (8, 2, 1)),
        (want("hybrid", 1, 8, replicate=4), (2, 4, 1)),
        (want("expert-parallel", 2, 1), (2, 1, 2)),
        (want("expert-parallel", 2, 4, expert_parallel=4), (8, 1, 4)),
        (want("expert-parallel", 2, 4, replicate=2), (4, 2, 4)),
        (want("resident", 3, 1), (1, 3, 1)),
    ):
        layout = resolve_layout(wanted, 128)
        assert (layout.shard, layout.replicate, layout.expert_parallel) == sizes


IMPOSSIBLE: list[tuple[str, Layout, int]] = [
    ("experts-not-divisible", want("expert-parallel", 3, 1), 128),
    ("experts-not-divisible", want("expert-parallel", 1, 1), 128),
    ("experts-not-divisible", want("expert-parallel", 2, 3, expert_parallel=4), 128),
    ("experts-split-in-layout", want("full-shard", 2, 2, expert_parallel=2), 128),
    ("sizes-unlike-ranks", want("full-shard", 2, 2, shard=3), 128),
    ("sizes-unlike-ranks", want("hybrid", 2, 2, shard=2, replicate=3), 0),
    ("hybrid-of-one", want("hybrid", 1, 4), 0),
    ("nothing-sharded", want("full-shard", 2, 1, shard=1), 0),
    ("resident-sharded", want("resident", 2, 1, shard=2), 0),
    ("resident-offloaded", want("resident", 2, 1, offload=True), 0),
    ("reshard-contradicts-layout", want("no-reshard", 2, 1, reshard_after_forward=True), 0),
    ("reshard-contradicts-layout", want("resident", 2, 1, reshard_after_forward=True), 0),
]


def test_impossible_layouts_have_a_reason() -> None:
    for code, wanted, experts in IMPOSSIBLE:
        with refused(code, "run.yaml:9: layout") as problems:
            resolve_layout(wanted, experts)
        assert all(problem.where == "run.yaml:9: layout" and problem.hint for problem in problems)
    with refused("experts-not-divisible") as problems:
        resolve_layout(want("expert-parallel", 4, 3), 128)
    assert problems[0].problem.startswith("128 experts do not split evenly over 12 ranks, ")
    assert problems[0].hint == "expert_parallel may be 2, 4"


# --- what is compared ------------------


def titles(nodes: int, gpus: int, experts: int, kept: str = "") -> list[str]:
    return [name for name, row in list_layouts(want("auto", nodes, gpus), experts, kept) if row.nodes == nodes]


def test_the_layouts_of_three_single_gpu_nodes_and_of_two_with_eight() -> None:
    plain = ["full-shard", "full-shard, parameters offloaded", "no-reshard"]
    assert titles(3, 1, 128, kept="fp8") == [*plain, "resident", "full-shard, FP8", "no-reshard, FP8", "resident, FP8"]
    assert list_impossible(want("auto", 3, 1), 128) == {
        "hybrid": "one GPU per node: there is nothing to shard over inside a node, it would be resident",
        "expert-parallel 3": "128 experts do not split evenly over 3 ranks, and the engine refuses uneven splits",
    }
    experts = [f"expert-parallel {size}" for size in (2, 4, 8, 16)]
    either = ["hybrid", *experts, "expert-parallel 8, replicated across nodes"]
    once = [title for name in either for title in (name, f"{name}, gathered once")]
    assert titles(2, 8, 128) == [*plain, *once, "resident"]
    for name, layout in list_layouts(want("auto", 2, 8), 128):
        kept = layout.name in ("no-reshard", "resident") or "gathered once" in name
        assert layout.reshard_after_forward != kept, name
    assert list_impossible(want("auto", 2, 1), 0)["expert-parallel"] == "the model has no routed experts to split"
    assert titles(1, 1, 128) == ["resident"]
    assert {layout.nodes for _, layout in list_layouts(want("auto", 3, 1), 128)} == {1, 2, 3, 4, 5, 6}


KEYS: dict[str, tuple[Any, ...]] = {
    "shard": (1, 8),
    "replicate": (1,),
    "expert_parallel": (1, 8),
    "reshard_after_forward": (False,),
    "offload": (False, True),
    "base_dtype": ("bf16", "fp8"),
}


def test_no_layout_contradicts_the_runs_keys() -> None:
    free = list_layouts(want("auto", 2, 8), 128, kept="fp8")
    for key, values in KEYS.items():
        for value in values:
            rows = list_layouts(want("auto", 2, 8, **{key: value}), 128, kept="fp8")
            assert {getattr(layout, key) for _, layout in rows} <= {value}
            assert len(rows) < len(free)


def test_keys_of_a_named_layout_apply_only_to_it() -> None:
    rows = list_layouts(want("full-shard", 2, 8, shard=16, offload=False), 128)
    assert {layout.name for _, layout in rows} == set(LAYOUTS)
    assert not [layout for _, layout in rows if layout.offload]
    for _, layout in list_layouts(want("full-shard", 2, 1, activation_checkpointing=True, precision="no"), 128):
        assert (layout.activation_checkpointing, layout.precision) == (True, "no")
    for wanted, kept, names in (
        (want("no-reshard", 2, 1), "fp8", ["no-reshard", "no-reshard, FP8"]),
        (want("full-shard", 2, 1, offload=True), "fp8", ["full-shard"]),
        (want("full-shard", 2, 1), "", ["full-shard"]),
    ):
        assert [name for name, _ in list_named_layouts(wanted, 128, kept)] == names
    (only,) = list_named_layouts(want("hybrid", 2, 8, base_dtype="fp8"), 128, kept="fp8")
    assert only[1].base_dtype == "fp8"


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([0, 4, 8, 60, 128]), st.sampled_from(["", "fp8"]))
def test_every_listed_layout_is_possible(nodes: int, gpus: int, experts: int, kept: str) -> None:
    rows = list_layouts(want("auto", nodes, gpus), experts, kept)
    assert len({name for name, _ in rows}) == len(rows)
    assert all(list_impossible(want("auto", nodes, gpus), experts).values())
    for _, layout in rows:
        assert layout.shard * layout.replicate == layout.ranks
        assert layout.shard % layout.expert_parallel == 0
        assert layout.expert_parallel == 1 or experts % layout.expert_parallel == 0


def test_divisors() -> None:
    for number in (1, 2, 17, 360):
        assert list_divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


# --- the choice ------------------

FOUR = dict(list_layouts(want("auto", 2, 2), 128, kept="fp8"))


def priced(name: str, fits: bool, gib: float, seconds: float, serial: float | None = None, why: str = "") -> Candidate:
    """Return a layout on two nodes of two, with figures as from the cost model."""
    figures: dict[str, Any] = dict.fromkeys(Cost.__dataclass_fields__, 0.0)
    figures |= {"rows": (), "flows": (), "fits": fits, "has_headroom": fits}
    figures |= {"gpu_gib": gib, "batch": BatchSize(1, 1, 1)}
    figures |= {"step_seconds": seconds, "step_seconds_serial": serial or seconds, "tokens_per_second": 1 / seconds}
    return Candidate(name, FOUR[name], Cost(**figures), (), FOUR[name].nodes == 2, why)


def chosen(*rows: tuple[Any, ...]) -> Layout:
    best = choose_layout([priced(*row) for row in rows])
    assert best
    return best.layout


def test_the_fastest_that_fits_is_chosen_and_the_reason_says_so() -> None:
    resident = ("resident", False, 900, 1.0)
    layout = chosen(
        ("full-shard", True, 60, 20.0), ("hybrid", True, 100, 5.0), ("expert-parallel 4", True, 70, 2.5), resident
    )
    assert (layout.name, layout.expert_parallel) == ("expert-parallel", 4)
    assert (
        layout.reason
        == "chosen: the fastest of the 3 layouts that fit, 2.5 s a step: 2.00 x faster than the next (hybrid)"
    )
    layout = chosen(("full-shard", True, 60, 20.0), ("full-shard, parameters offloaded", True, 50, 20.0))
    assert not layout.offload
    assert layout.reason.endswith("20 s a step: as fast as the next (full-shard, parameters offloaded)")
    # Of equals, the one with least to overlap.
    hybrid = ("hybrid", True, 52, 2.50, 4.8)
    assert chosen(hybrid, ("expert-parallel 4", True, 24, 2.52, 2.9)).name == "expert-parallel"
    assert chosen(hybrid, ("expert-parallel 4", True, 24, 2.6, 2.9)).name == "hybrid"
    # What training cannot run is never chosen, however fast.
    layout = chosen(("full-shard", True, 60, 20.0), ("resident, FP8", True, 120, 1.0, None, "not with these"))
    assert (layout.name, layout.reason) == ("full-shard", "chosen: the only layout that is possible")
    assert chosen(("full-shard", True, 60, 20.0), resident).reason == "chosen: the only one of 2 layouts that fits"
    layout = chosen(("full-shard", False, 300, 20.0), resident)
    assert layout.name == "full-shard"
    assert layout.reason == "chosen: none of 2 layouts fits, and this one needs least, 300 GiB per GPU"
    assert choose_layout([]) is None
    assert choose_layout([priced("resident, on 1 node", True, 1.0, 1.0)]) is None
