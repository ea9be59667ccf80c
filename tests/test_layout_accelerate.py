"""An Accelerate file is read key by key: every key has a fate, misspelt ones are errors, none is dropped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from windlass.errors import UserError
from windlass.plan.layout import FATES, KEYS, read_accelerate
from windlass.plan.layout.accelerate import AccelerateFile
from windlass.plan.layout.fate import ANY, HONOURED, NO_EFFECT, REFUSED, TRANSLATED, Key

EXAMPLES = Path(__file__).parent.parent / "examples" / "mistral-small-4"

THREE_NODES = {
    "compute_environment": NO_EFFECT,
    "debug": NO_EFFECT,
    "distributed_type": HONOURED,
    "downcast_bf16": NO_EFFECT,
    "enable_cpu_affinity": NO_EFFECT,
    "mixed_precision": HONOURED,
    "num_machines": HONOURED,
    "num_processes": HONOURED,
    "rdzv_backend": HONOURED,
    "same_network": NO_EFFECT,
    "use_cpu": HONOURED,
    "fsdp_config": HONOURED,
    "fsdp_config.fsdp_version": HONOURED,
    "fsdp_config.fsdp_use_orig_params": NO_EFFECT,
    "fsdp_config.fsdp_auto_wrap_policy": HONOURED,
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": HONOURED,
    "fsdp_config.fsdp_reshard_after_forward": HONOURED,
    "fsdp_config.fsdp_limit_all_gathers": NO_EFFECT,
    "fsdp_config.fsdp_cpu_ram_efficient_loading": TRANSLATED,
    "fsdp_config.fsdp_sync_module_states": NO_EFFECT,
    "fsdp_config.fsdp_offload_params": HONOURED,
    "fsdp_config.fsdp_backward_prefetch": NO_EFFECT,
    "fsdp_config.fsdp_forward_prefetch": NO_EFFECT,
    "fsdp_config.fsdp_state_dict_type": HONOURED,
    "fsdp_config.state_dict_cpu_offload": NO_EFFECT,
    "fsdp_config.fsdp_activation_checkpointing": NO_EFFECT,
}
TWO_NODES = {
    "compute_environment": NO_EFFECT,
    "distributed_type": HONOURED,
    "fsdp_config": HONOURED,
    "fsdp_config.fsdp_auto_wrap_policy": HONOURED,
    "fsdp_config.fsdp_backward_prefetch": NO_EFFECT,
    "fsdp_config.fsdp_cpu_ram_efficient_loading": TRANSLATED,
    "fsdp_config.fsdp_forward_prefetch": NO_EFFECT,
    "fsdp_config.fsdp_offload_params": HONOURED,
    "fsdp_config.fsdp_sharding_strategy": HONOURED,
    "fsdp_config.fsdp_state_dict_type": HONOURED,
    "fsdp_config.fsdp_sync_module_states": NO_EFFECT,
    "fsdp_config.fsdp_use_orig_params": NO_EFFECT,
    "machine_rank": NO_EFFECT,
    "main_training_function": NO_EFFECT,
    "mixed_precision": HONOURED,
    "num_machines": HONOURED,
    "num_processes": HONOURED,
}
PUBLISHED = {"fsdp.yaml": THREE_NODES, "fsdp-3xH200.yaml": THREE_NODES, "config/fsdp_2xH200.yaml": TWO_NODES}


def wishes(file: AccelerateFile) -> dict[str, Any]:
    return {name: wish.value for name, wish in file.wishes.items()}


def write(folder: Path, text: str) -> Path:
    path = folder / "fsdp.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> UserError:
    with pytest.raises(UserError) as caught:
        read_accelerate(write(folder, text))
    return caught.value


def wheres(error: UserError) -> list[str]:
    return [problem.where.rpartition("/")[2] for problem in error.problems]


# --- the three published files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_key_of_a_published_file_has_the_fate_that_is_written_down(name: str) -> None:
    file = read_accelerate(EXAMPLES / name)
    assert {entry.path: entry.fate.verdict for entry in file.entries} == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_key_of_a_published_file_is_left_out(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    plain = yaml.safe_load(text)
    keys = [*plain, *(f"fsdp_config.{key}" for key in plain["fsdp_config"])]
    entries = read_accelerate(EXAMPLES / name).entries
    assert sorted(entry.path for entry in entries) == sorted(keys)
    lines = text.splitlines()
    for entry in entries:  # the line that an entry names really holds it
        line = int(entry.where.rpartition(": ")[0].rpartition(":")[2])
        assert lines[line - 1].strip().startswith(entry.path.rpartition(".")[2] + ":")


def test_what_the_published_files_ask_for() -> None:
    three = {
        "sharded": True,
        "precision": "bf16",
        "nodes": 3,
        "ranks": 3,
        "cpu": False,
        "wrap": "Mistral4DecoderLayer",
        "reshard_after_forward": True,
        "offload": True,
    }
    assert wishes(read_accelerate(EXAMPLES / "fsdp.yaml")) == three
    assert wishes(read_accelerate(EXAMPLES / "fsdp-3xH200.yaml")) == three | {"wrap": "MistralDecoderLayer"}
    assert wishes(read_accelerate(EXAMPLES / "config/fsdp_2xH200.yaml")) == {
        "sharded": True,
        "precision": "bf16",
        "nodes": 2,
        "ranks": 2,
        "offload": False,
        "name": "full-shard",
        "reshard_after_forward": True,
    }


# --- the table of fates ---------------------------------------------------------------------------------------------

SAMPLES = {"bool": "true", "int": "7", "word": "SOMETHING", "text": "x", "names": "SomeLayer", "any": "x"}
ROWS = [(key, value) for key in KEYS if key.kind != "section" for value in key.fates]


def sample(key: Key, value: str) -> tuple[str, str]:
    """A file with that one key, and the line that it stands in."""
    name = key.name.replace("*", "thing")
    written = SAMPLES[key.kind] if value == ANY else value
    head = "" if key.path == "distributed_type" else "distributed_type: FSDP\n"
    if key.section:
        return f"{head}{key.section}:\n  {name}: {written}\n", f"{key.section}.{name}"
    return f"{head}{name}: {written}\n", name


@pytest.mark.parametrize(("key", "value"), ROWS, ids=[f"{key.path}={value}" for key, value in ROWS])
def test_every_row_of_the_table_is_reached_by_a_file(key: Key, value: str, tmp_path: Path) -> None:
    text, path = sample(key, value)
    expected = key.fates[value]
    if expected.verdict == REFUSED:
        error = refusal(tmp_path, text)
        assert expected.because in str(error)
        assert path in error.problems[0].where
        assert error.problems[0].hint
        explained = read_accelerate(tmp_path / "fsdp.yaml", refuse=False)
        assert [entry.fate for entry in explained.entries if entry.path == path] == [expected]
        return
    file = read_accelerate(write(tmp_path, text))
    assert [entry.fate for entry in file.entries if entry.path == path] == [expected]
    for name, _ in expected.sets:
        assert name in file.wishes


def test_every_fate_says_why_and_every_refusal_what_to_do() -> None:
    for key in KEYS:
        for fate in key.fates.values():
            assert fate.because
            assert fate.verdict in (HONOURED, TRANSLATED, NO_EFFECT, REFUSED)
            assert fate.verdict != REFUSED or fate.hint or key.name == "distributed_type"  # its hint is computed
            assert fate.verdict != REFUSED or not fate.sets


@pytest.fixture(scope="module")
def accelerate_options() -> set[str]:
    from accelerate.commands.launch import launch_command_parser

    return {action.dest for action in launch_command_parser()._actions}


def test_every_key_that_accelerate_knows_is_in_the_table(accelerate_options: set[str]) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig

    fields = {field.name for kind in (ClusterConfig, SageMakerConfig) for field in dataclasses.fields(kind)}
    assert fields - set(FATES[""]) == set()
    for prefix, section in (
        ("fsdp_", "fsdp_config"),
        ("parallelism_config_", "parallelism_config"),
        ("dynamo_", "dynamo_config"),
        ("fp8_", "fp8_config"),
    ):
        options = {option for option in accelerate_options if option.startswith(prefix)}
        assert options
        assert options - set(FATES[section]) == set()
    assert {"zero_stage", "gradient_clipping", "deepspeed_hostfile"} <= accelerate_options & set(
        FATES["deepspeed_config"]
    )


def test_the_distributed_types_are_accelerates() -> None:
    from accelerate.utils import DistributedType

    assert {kind.value for kind in DistributedType} - set(FATES[""]["distributed_type"].fates) == set()


# --- spelling and places --------------------------------------------------------------------------------------------


def test_misspelt_keys_are_errors_all_at_once_each_with_the_nearest_name(tmp_path: Path) -> None:
    error = refusal(
        tmp_path,
        "distributed_type: FSDP\nmixed_precison: bf16\nnum_machine: 3\n"
        "fsdp_config:\n  fsdp_offlaod_params: true\n  fsdp_reshard_after_foward: true\n  qqqqqqqq: 1\n",
    )
    assert wheres(error) == [
        "fsdp.yaml:2: mixed_precison",
        "fsdp.yaml:3: num_machine",
        "fsdp.yaml:5: fsdp_config.fsdp_offlaod_params",
        "fsdp.yaml:6: fsdp_config.fsdp_reshard_after_foward",
        "fsdp.yaml:7: fsdp_config.qqqqqqqq",
    ]
    hints = [problem.hint for problem in error.problems]
    assert hints[:4] == [
        "did you mean mixed_precision?",
        "did you mean num_machines?",
        "did you mean fsdp_offload_params?",
        "did you mean fsdp_reshard_after_forward?",
    ]
    assert "did you mean" not in hints[4]


def test_a_misspelt_value_names_the_nearest(tmp_path: Path) -> None:
    error = refusal(tmp_path, "distributed_type: FSPD\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHRAD\n")
    assert [problem.hint.partition("?")[0] for problem in error.problems] == [
        "did you mean FSDP",
        "did you mean FULL_SHARD",
    ]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("fsdp_config:\nfsdp_offload_params: true\n", "write it below fsdp_config:, indented"),
        ("fsdp_config:\noffload_params: true\n", "write it below fsdp_config:, indented"),
        ("fsdp_config:\n  num_machines: 2\n", "write it at the top, not indented"),
        ("zero_stage: 3\n", "write it below deepspeed_config:, indented"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_where_it_belongs(text: str, hint: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, "distributed_type: FSDP\n" + text)
    assert [problem.hint for problem in error.problems] == [hint]


def test_keys_without_their_prefix_are_the_same_keys(tmp_path: Path) -> None:
    file = read_accelerate(
        write(tmp_path, "distributed_type: FSDP\nfsdp_config:\n  offload_params: 'yes'\n  sharding_strategy: 4\n")
    )
    assert wishes(file)["offload"] is True
    assert wishes(file)["name"] == "hybrid"


def test_several_layer_classes_are_one_list(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: [A, B]\n"
    assert wishes(read_accelerate(write(tmp_path, text)))["wrap"] == "A,B"


def test_a_bare_no_is_the_word_although_yaml_reads_false(tmp_path: Path) -> None:
    assert (
        wishes(read_accelerate(write(tmp_path, "distributed_type: FSDP\nmixed_precision: no\n")))["precision"] == "no"
    )


# --- contradictions inside one file ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "both"),
    [
        (
            "fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_reshard_after_forward: false\n",
            ("fsdp.yaml:3: ", "fsdp.yaml:4: "),
        ),
        ("fsdp_config:\n  offload_params: true\n  fsdp_offload_params: false\n", ("fsdp.yaml:3: ", "fsdp.yaml:4: ")),
        ("num_machines: 2\nnum_machines: 3\n", ("fsdp.yaml:2", "fsdp.yaml:3: ")),
    ],
)
def test_a_file_that_contradicts_itself_names_both_lines(text: str, both: tuple[str, str], tmp_path: Path) -> None:
    error = refusal(tmp_path, "distributed_type: FSDP\n" + text)
    assert len(error.problems) == 1
    assert all(place in str(error) for place in both)


def test_options_of_the_launcher_are_held_against_the_file() -> None:
    path = EXAMPLES / "config/fsdp_2xH200.yaml"
    assert wishes(read_accelerate(path, [("num_machines", "2"), ("tee", "3")])) == wishes(read_accelerate(path))
    with pytest.raises(UserError) as caught:
        read_accelerate(path, [("num_machines", "3"), ("num_processes", "3")])
    assert "accelerate launch --num_machines" in str(caught.value)
    assert "fsdp_2xH200.yaml:19: num_machines" in str(caught.value)
    assert len(caught.value.problems) == 2


# --- DeepSpeed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["mixed_precision: fp16", "fp16: true"])
def test_float16_is_refused_in_a_file_too(text: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, f"distributed_type: FSDP\n{text}\n")
    assert "float16 overflows" in str(error)


@pytest.mark.parametrize(
    ("settings_text", "layout"),
    [
        ("  zero_stage: 3\n", "layout: full-shard"),
        ("  zero_stage: 3\n  offload_param_device: cpu\n", "layout: {name: full-shard, offload: true}"),
        ("  zero_stage: 3\n  offload_param_device: none\n", "layout: full-shard"),
        ("  zero_stage: 2\n  offload_optimizer_device: cpu\n", "layout: resident"),
        ("  gradient_clipping: 1.0\n", "layout: resident"),
    ],
)
def test_deepspeed_is_refused_with_the_equal_layout(settings_text: str, layout: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, "distributed_type: DEEPSPEED\ndeepspeed_config:\n" + settings_text)
    assert [problem.hint for problem in error.problems] == [f"write in the run file: {layout}"]
    assert wheres(error) == ["fsdp.yaml:1: distributed_type"]
