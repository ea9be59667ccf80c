"""Run file and Accelerate file become one layout; where they differ, both places are named; `auto` goes by figures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.errors import UserError
from windlass.model.family import Family
from windlass.plan.layout import (
    LAYOUTS,
    AccelerateFile,
    Demand,
    candidates,
    check_wrap,
    demand,
    read_accelerate,
    settle,
)

EXAMPLES = Path(__file__).parent.parent / "examples" / "mistral-small-4"
DEFAULTS: dict[str, dict[str, Any]] = {
    "layout": {
        "name": "auto",
        "ranks": None,
        "shard": None,
        "replicate": None,
        "expert_parallel": None,
        "reshard_after_forward": None,
        "offload": None,
        "activation_checkpointing": None,
        "wrap": None,
    },
    "cluster": {"nodes": 1, "gpus_per_node": 1},
    "train": {"bf16": True, "fp16": False, "gradient_checkpointing": False, "optim": "adamw_torch"},
    "lora": {"experts": None, "use_dora": False},
}


class Job:
    """A run file in which only some keys were written; each stands in the line of its turn."""

    def __init__(self, **written: Any) -> None:
        self.experts_adapted = written.pop("experts_adapted", False)
        self.written = {key.replace("__", "."): value for key, value in written.items()}
        for section, values in DEFAULTS.items():
            mine = {key.partition(".")[2]: v for key, v in self.written.items() if key.startswith(section + ".")}
            setattr(self, section, SimpleNamespace(**(values | mine)))

    layout: Any
    cluster: Any
    train: Any
    lora: Any

    def where(self, path: str) -> str:
        if path not in self.written:
            return f"default: {path}"
        return f"run.yaml:{list(self.written).index(path) + 1}: {path}"

    def demand(self, accelerate: AccelerateFile | None = None, family: Family | None = None) -> Demand:
        return demand(self, self.where, family, accelerate, experts_adapted=self.experts_adapted)


def file(folder: Path, text: str) -> AccelerateFile:
    path = folder / "fsdp.yaml"
    path.write_text("distributed_type: FSDP\n" + text)
    return read_accelerate(path)


def problems(job: Job, accelerate: AccelerateFile | None = None) -> list[tuple[str, str]]:
    with pytest.raises(UserError) as caught:
        job.demand(accelerate)
    assert all(problem.hint for problem in caught.value.problems)
    return [(problem.where.rpartition("/")[2], problem.problem) for problem in caught.value.problems]


# --- one demand from two sources ------------------------------------------------------------------------------------


def test_a_run_file_that_says_nothing_asks_for_nothing() -> None:
    wanted = Job().demand()
    assert wanted == Demand("auto", "", 1, 1)


def test_the_published_file_becomes_full_shard_with_offload() -> None:
    wanted = Job().demand(read_accelerate(EXAMPLES / "fsdp.yaml"))
    layout = settle(wanted, 128)
    assert (layout.name, layout.nodes, layout.gpus_per_node, layout.shard) == ("full-shard", 3, 1, 3)
    assert layout.offload
    assert layout.reshard_after_forward
    assert layout.reason.endswith("fsdp.yaml:27: fsdp_config.fsdp_reshard_after_forward")


def test_the_fsdp1_file_becomes_full_shard_over_two() -> None:
    layout = settle(Job().demand(read_accelerate(EXAMPLES / "config/fsdp_2xH200.yaml")), 128)
    assert (layout.name, layout.nodes, layout.shard, layout.offload) == ("full-shard", 2, 2, False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("full-shard", True)),
        ("fsdp_config:\n  fsdp_reshard_after_forward: false\n", ("no-reshard", False)),
        ("fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n", ("no-reshard", False)),
        ("fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n", ("hybrid", True)),
        ("fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD_ZERO2\n", ("hybrid", False)),
        ("fsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\n", ("resident", False)),
        ("parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n", ("hybrid", True)),
    ],
)
def test_what_a_file_asks_for_is_one_of_the_layouts(text: str, expected: tuple[str, bool], tmp_path: Path) -> None:
    wanted = Job().demand(file(tmp_path, "num_machines: 2\nnum_processes: 8\n" + text))
    layout = settle(wanted, 128)
    assert (layout.name, layout.reshard_after_forward) == expected
    if layout.name == "hybrid":
        assert (layout.shard, layout.replicate) == (4, 2)


def test_a_file_that_only_starts_ranks_leaves_the_layout_open(tmp_path: Path) -> None:
    path = tmp_path / "ddp.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 4\n")
    wanted = Job().demand(read_accelerate(path))
    assert (wanted.name, wanted.nodes, wanted.gpus_per_node) == ("auto", 2, 2)


def test_what_such_a_file_says_about_fsdp_has_no_effect(tmp_path: Path) -> None:
    """As for Accelerate; but here the fate says so."""
    path = tmp_path / "ddp.yaml"
    path.write_text("distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_offload_params: true\n")
    file = read_accelerate(path)
    assert "offload" not in file.wishes
    assert file.entries[-1].fate.because == "read only with distributed_type: FSDP, and it is MULTI_GPU"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ({"layout__expert_parallel": 2}, "expert-parallel"),
        ({"layout__replicate": 2}, "hybrid"),
        ({"layout__reshard_after_forward": False}, "no-reshard"),
        ({"layout__reshard_after_forward": True}, "full-shard"),
        ({"layout__offload": True}, "full-shard"),
        ({"layout__name": "auto", "layout__offload": True}, "full-shard"),
        ({"layout__shard": 4}, "full-shard"),
        ({"layout__offload": False}, "auto"),
        ({"layout__expert_parallel": 1}, "auto"),
        ({"layout__wrap": ["A"]}, "auto"),
    ],
)
def test_keys_of_layout_without_a_name_mean_the_layout_that_has_them(written: dict[str, Any], name: str) -> None:
    wanted = Job(cluster__nodes=2, cluster__gpus_per_node=2, **written).demand()
    assert wanted.name == name
    if name != "auto":
        assert "layout." in wanted.where
        assert settle(wanted, 128).name == name


DISAGREEMENTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "nodes": ({"cluster__nodes": 2}, "num_machines: 3\n", "num_machines", "the number of nodes is 3 here, but 2 at"),
    "ranks": (
        {"cluster__nodes": 2, "cluster__gpus_per_node": 4},
        "num_processes: 2\n",
        "num_processes",
        "the number of ranks is 2 here, but 2 x 4 = 8 by run.yaml:1: cluster.nodes x run.yaml:2: cluster.gpus_per_node",
    ),
    "uneven": (
        {"cluster__nodes": 2},
        "num_processes: 3\n",
        "num_processes",
        "3 ranks do not spread evenly over 2 nodes",
    ),
    "precision": (
        {"train__bf16": True},
        "mixed_precision: 'no'\n",
        "mixed_precision",
        "precision is no here, but bf16",
    ),
    "precision off": (
        {"train__bf16": False},
        "mixed_precision: bf16\n",
        "mixed_precision",
        "precision is bf16 here, but no at run.yaml:1: train.bf16",
    ),
    "reshard": (
        {"layout__reshard_after_forward": False},
        "fsdp_config:\n  fsdp_reshard_after_forward: true\n",
        "fsdp_config.fsdp_reshard_after_forward",
        "reshard_after_forward is True here, but False at run.yaml:1",
    ),
    "layout": (
        {"layout__name": "no-reshard"},
        "fsdp_config:\n  fsdp_reshard_after_forward: true\n",
        "fsdp_config.fsdp_reshard_after_forward",
        "the layout is full-shard here, but no-reshard at run.yaml:1",
    ),
    "strategy": (
        {"layout__name": "resident"},
        "fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n",
        "fsdp_config.fsdp_sharding_strategy",
        "the layout is hybrid here, but resident at run.yaml:1",
    ),
    "offload": (
        {"layout__offload": True},
        "fsdp_config:\n  fsdp_offload_params: false\n",
        "fsdp_config.fsdp_offload_params",
        "offload is False here, but True at run.yaml:1",
    ),
    "checkpointing": (
        {"train__gradient_checkpointing": False},
        "fsdp_config:\n  fsdp_activation_checkpointing: true\n",
        "fsdp_config.fsdp_activation_checkpointing",
        "activation checkpointing is True here, but False at run.yaml:1",
    ),
    "wrap": (
        {"layout__wrap": "A"},
        "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: B\n",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "the wrapped layer is B here, but A at run.yaml:1",
    ),
    "wrap in a list": (
        {"layout__wrap": ["A", "B"]},
        "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: A\n",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "the wrapped layer is A here, but A,B at run.yaml:1",
    ),
    "replicate": (
        {"layout__replicate": 4},
        "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n",
        "parallelism_config.parallelism_config_dp_replicate_size",
        "replicate is 2 here, but 4 at run.yaml:1",
    ),
    "no node": ({}, "num_machines: 0\n", "num_machines", "0 is too few"),
    "no rank": ({}, "num_processes: 0\n", "num_processes", "0 is too few"),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_two_sources_that_disagree_are_an_error_that_names_both(name: str, tmp_path: Path) -> None:
    written, text, place, says = DISAGREEMENTS[name]
    found = problems(Job(**written), file(tmp_path, text))
    assert len(found) == 1
    assert found[0][0].startswith("fsdp.yaml:")
    assert found[0][0].endswith(f": {place}")
    assert says in found[0][1]


def test_all_disagreements_are_told_at_once(tmp_path: Path) -> None:
    job = Job(cluster__nodes=2, train__fp16=True, layout__offload=True)
    found = problems(
        job, file(tmp_path, "num_machines: 3\nmixed_precision: bf16\nfsdp_config:\n  offload_params: no\n")
    )
    assert [where.rpartition(" ")[2] for where, _ in found] == [
        "num_machines",
        "fsdp_config.offload_params",
        "mixed_precision",
    ]


def test_a_default_of_the_run_file_is_no_disagreement(tmp_path: Path) -> None:
    """Only what the user wrote speaks: else every file for three nodes would quarrel with the default of one."""
    wanted = Job().demand(
        file(
            tmp_path,
            "num_machines: 3\nnum_processes: 6\nmixed_precision: 'no'\n"
            "fsdp_config:\n  activation_checkpointing: true\n",
        )
    )
    assert (wanted.nodes, wanted.gpus_per_node, wanted.precision) == (3, 2, "no")
    assert wanted.activation_checkpointing


def test_agreeing_sources_are_fine_and_experts_may_be_split_beside_an_fsdp_file() -> None:
    job = Job(cluster__nodes=2, cluster__gpus_per_node=1, train__bf16=True, layout__name="expert-parallel")
    layout = settle(job.demand(read_accelerate(EXAMPLES / "config/fsdp_2xH200.yaml")), 128)
    assert (layout.name, layout.shard, layout.expert_parallel) == ("expert-parallel", 2, 2)
    assert layout.reason == "demanded by run.yaml:4: layout.name"


def test_layout_ranks_is_held_against_the_cluster() -> None:
    assert problems(Job(cluster__nodes=2, cluster__gpus_per_node=4, layout__ranks=4)) == [
        ("run.yaml:3: layout.ranks", "layout.ranks is 4, but 2 nodes x 4 GPUs are 8")
    ]


@pytest.mark.parametrize(
    ("written", "precision"),
    [
        ({}, "bf16"),
        ({"train__bf16": False}, "no"),
        ({"train__bf16": False, "train__fp16": True}, "fp16"),
        ({"train__bf16": True}, "bf16"),
    ],
)
def test_precision_of_the_run_file(written: dict[str, Any], precision: str) -> None:
    assert Job(**written).demand().precision == precision


# --- the layer that is wrapped --------------------------------------------------------------------------------------

MISTRAL4 = Family("mistral4", "Mistral4ForCausalLM", "Mistral4DecoderLayer")


def test_a_layer_class_that_the_model_lacks_is_an_error_that_names_its_own() -> None:
    with pytest.raises(UserError) as caught:
        Job().demand(read_accelerate(EXAMPLES / "fsdp-3xH200.yaml"), MISTRAL4)
    (problem,) = caught.value.problems
    assert "'MistralDecoderLayer'" in problem.problem
    assert "'Mistral4DecoderLayer'" in problem.problem
    assert problem.where.endswith("fsdp-3xH200.yaml:24: fsdp_config.fsdp_transformer_layer_cls_to_wrap")
    assert Job().demand(read_accelerate(EXAMPLES / "fsdp.yaml"), MISTRAL4).name == "full-shard"


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("Mistral4DecoderLayer", True),
        ("Mistral4DecoderLayer, Mistral4DecoderLayer", True),
        ("", True),
        ("mistral4decoderlayer", False),
        ("Mistral4DecoderLayer,Embedding", False),
    ],
)
def test_check_wrap(name: str, fine: bool) -> None:
    assert (check_wrap(name, MISTRAL4, "x") is None) == fine


# --- what the adapter rules out ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "barred"),
    [
        ({}, set()),
        ({"experts_adapted": True}, set()),
        ({"train__optim": "adafactor"}, set()),
        ({"experts_adapted": True, "train__optim": "adafactor"}, {"expert-parallel"}),
        ({"lora__use_dora": True}, set(LAYOUTS) - {"resident"}),
    ],
)
def test_what_an_adapter_does_not_bear(written: dict[str, Any], barred: set[str]) -> None:
    wanted = Job(cluster__nodes=2, **written).demand()
    assert set(wanted.barred) == barred
    rows = {row.title: row for row in candidates(wanted, 128)}
    assert {row.layout.name for row in rows.values() if row.layout and not row.possible} == barred - {"hybrid"}
    assert Job(**written).demand().barred == {}  # one GPU holds everything
