"""Accelerate files and `accelerate launch`'s environment: every key is handled, none is dropped silently."""

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import warm
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

from windlass.errors import Problem, UserError
from windlass.plan import make_plan
from windlass.runfile import read_run_file
from windlass.runfile.accelerate import (
    ANY,
    HONOURED,
    NO_EFFECT,
    REFUSED,
    TRANSLATED,
    AccelerateFile,
    AccelerateKey,
    find_key,
    load_accelerate,
    load_key_table,
    read_accelerate,
)
from windlass.sizing import open_subject

EXAMPLES = Path(__file__).parent.parent / "examples" / "mistral-small-4"
FSDP = "distributed_type: FSDP\n"


def settings_of(file: AccelerateFile | None) -> dict[str, Any]:
    assert file is not None
    return {name: setting.value for name, setting in file.settings.items()}


def read(folder: Path, text: str) -> AccelerateFile:
    path = folder / "fsdp.yaml"
    path.write_text(text, encoding="utf-8")
    return read_accelerate(path)


def refusal(folder: Path, text: str, code: str) -> list[Problem]:
    with refused(code) as problems:
        read(folder, text)
    assert all(problem.hint for problem in problems)
    return problems


RESHARD = "layout.reshard_after_forward"
THREE = {"sharded": True, "train.bf16": True, "cluster.nodes": 3, "ranks": 3, "cpu": False, RESHARD: True}
PUBLISHED: dict[str, dict[str, Any]] = {
    "fsdp.yaml": THREE | {"layout.wrap": "Mistral4DecoderLayer", "layout.offload": True},
    "fsdp-3xH200.yaml": THREE | {"layout.wrap": "MistralDecoderLayer", "layout.offload": True},
    "config/fsdp_2xH200.yaml": {
        **{key: value for key, value in THREE.items() if key != "cpu"},
        "cluster.nodes": 2,
        "ranks": 2,
        "layout.offload": False,
        "layout.name": "full-shard",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_key_of_an_accelerate_file_is_explained(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    plain, lines = yaml.safe_load(text), text.splitlines()
    file = read_accelerate(EXAMPLES / name)
    assert [e.path for e in file.entries if "." not in e.path] == list(plain)
    assert [e.path for e in file.entries if "." in e.path] == [f"fsdp_config.{key}" for key in plain["fsdp_config"]]
    for entry in file.entries:
        line = int(entry.where.rpartition(": ")[0].rpartition(":")[2])
        assert lines[line - 1].strip().startswith(entry.path.rpartition(".")[2] + ":")
    verdicts = {entry.key.name: entry.verdict.word for entry in file.entries}
    assert verdicts["fsdp_cpu_ram_efficient_loading"] == TRANSLATED
    assert verdicts["fsdp_use_orig_params"] == verdicts["fsdp_backward_prefetch"] == NO_EFFECT
    assert verdicts["num_machines"] == verdicts["fsdp_offload_params"] == HONOURED
    assert settings_of(file) == PUBLISHED[name]


SAMPLES = {"bool": "true", "int": "7", "word": "SOMETHING", "text": "x", "names": "SomeLayer", "any": "x"}


def sample(key: AccelerateKey, value: str) -> tuple[str, str]:
    """Return a file with that one key, and the key's path in it."""
    name = key.name.replace("*", "thing")
    written = SAMPLES[key.kind] if value == ANY else value
    head = "" if key.path == "distributed_type" else FSDP
    if key.section:
        return f"{head}{key.section}:\n  {name}: {written}\n", f"{key.section}.{name}"
    return f"{head}{name}: {written}\n", name


def test_every_row_of_the_table_is_reached_by_a_file(tmp_path: Path) -> None:
    rows = [
        (key, value, verdict)
        for key in load_key_table().every
        if key.kind != "section"
        for value, verdict in key.verdicts.items()
    ]
    assert len(rows) > 140
    for key, value, verdict in rows:
        assert verdict.because
        assert verdict.word in (HONOURED, TRANSLATED, NO_EFFECT, REFUSED)
        assert bool(verdict.hint) == (verdict.word == REFUSED)
        text, path = sample(key, value)
        if verdict.word == REFUSED:
            (problem,) = refusal(tmp_path, text, "refused-setting")
            assert verdict.because in problem.problem
            assert path in problem.where
        (tmp_path / "fsdp.yaml").write_text(text)
        file = read_accelerate(tmp_path / "fsdp.yaml", refuse=verdict.word != REFUSED)
        assert [entry.verdict for entry in file.entries if entry.path == path] == [verdict]
        assert set(verdict.sets) <= set(file.settings)


def test_misspelt_and_misplaced_keys_and_values_are_reported_at_once_with_what_was_meant(tmp_path: Path) -> None:
    lines = {
        "distributed_type: FSPD": "did you mean FSDP",
        "mixed_precison: bf16": "did you mean mixed_precision",
        "num_machine: 3": "did you mean num_machines",
        "zero_stage: 3": "write it below deepspeed_config:, indented",
        "offload_params: true": "write it below fsdp_config:, indented",
        "fsdp_forward_prefetch: true": "write it below fsdp_config:, indented",
        "fsdp_config:": "",
        "  fsdp_offlaod_params: true": "did you mean fsdp_offload_params",
        "  fsdp_reshard_after_foward: true": "did you mean fsdp_reshard_after_forward",
        "  qqqqqqqq: 1": "`windlass explain` knows the keys of fsdp_config",
        "  fsdp_sharding_strategy: FULL_SHRAD": "did you mean FULL_SHARD",
        "  num_machines: 2": "write it at the top, not indented",
    }
    problems = refusal(tmp_path, "\n".join(lines) + "\n", "misplaced-key")
    found = {int(p.where.split("fsdp.yaml:")[1].split(":")[0]): p.hint.partition("?")[0] for p in problems}
    assert found == {number: hint for number, hint in enumerate(lines.values(), 1) if hint}


def test_values_are_parsed_as_in_accelerate(tmp_path: Path) -> None:
    text = FSDP + "mixed_precision: no\nfsdp_config:\n  offload_params: 'yes'\n  sharding_strategy: 4\n"
    text += "  fsdp_transformer_layer_cls_to_wrap: [A, B]\n"
    expected = {"train.bf16": False, "layout.offload": True, "layout.name": "hybrid", "layout.wrap": "A,B"}
    assert expected.items() <= settings_of(read(tmp_path, text)).items()
    unread = read(tmp_path, "distributed_type: MULTI_GPU\nfsdp_config:\n  fsdp_offload_params: true\n")
    assert "layout.offload" not in unread.settings
    assert unread.entries[-1].verdict.because == "read only with distributed_type: FSDP, and it is MULTI_GPU"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_reshard_after_forward: false\n", "disagreement"),
        ("fsdp_config:\n  offload_params: true\n  fsdp_offload_params: false\n", "disagreement"),
        ("num_machines: 2\n\nnum_machines: 3\n", "duplicate-key"),
    ],
)
def test_a_file_that_contradicts_itself_names_both_lines(text: str, code: str, tmp_path: Path) -> None:
    (problem,) = refusal(tmp_path, FSDP + text, code)
    assert str(problem).count("fsdp.yaml:") == 2


BAD = {
    b"": "not-a-mapping",
    b"# nothing\n": "not-a-mapping",
    b"- a\n- b\n": "not-a-mapping",
    bytes(range(256)): "not-utf8",
    b"distributed_type: FSDP\nfsdp_config: {a: [\n": "not-yaml",
    b"#" * (200 * 1024): "too-large",
    b"num_machines: 2\n": "no-distributed-type",
    b"distributed_type: FSDP\nfsdp_config: full\n": "wrong-value",
    b"distributed_type: FSDP\nnum_machines: three\n": "wrong-value",
    b"distributed_type: FSDP\nnum_machines: 2.5\n": "wrong-value",
    b"distributed_type: FSDP\nuse_cpu: perhaps\n": "wrong-value",
    b"distributed_type: FSDP\nnum_machines: {a: 1}\n": "wrong-value",
}


def test_bad_files_are_clear_errors(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    for content, code in BAD.items():
        path.write_bytes(content)
        with refused(code) as problems:
            read_accelerate(path)
        assert all(str(path) in problem.where and problem.hint for problem in problems)
    for missing, code in ((tmp_path / "none.yaml", "no-such-file"), (tmp_path, "not-a-file")):
        with refused(code):
            read_accelerate(missing)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates())
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.text(max_size=5), SCALARS, max_size=2),
    st.sampled_from(sorted({value for key in load_key_table().every for value in key.verdicts})),
)
NAMES = st.one_of(
    st.sampled_from(sorted(n for names in load_key_table().spelled.values() for n in names)), st.text(max_size=6)
)
MAPPINGS = st.dictionaries(NAMES, st.one_of(VALUES, st.dictionaries(NAMES, VALUES, max_size=5)), max_size=8)
TEXTS = st.one_of(st.text(max_size=200), st.text(alphabet="{}[]:,&*!|>-?#%@ \n\t'\"ab01", max_size=120))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(MAPPINGS.map(lambda content: yaml.safe_dump(content, allow_unicode=True)), TEXTS))
def test_no_file_gives_a_traceback(tmp_path: Path, content: str) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(UserError):
        assert read_accelerate(path).entries


# --- accelerate launch ------------------

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}


@pytest.mark.fault(
    "a flag of accelerate launch against its file",
    "`accelerate launch`",
    "num_processes: 3 is overridden by accelerate launch: WORLD_SIZE=2: its flags win",
)
def test_the_launchers_environment_sets_the_layout_and_its_flags_win_over_the_file() -> None:
    assert load_accelerate(None, {"PATH": "/bin", "ACCELERATE_USE_CPU": "true", "WORLD_SIZE": "2"}) is None
    assert settings_of(load_accelerate(None, LAUNCHED)) == {
        "cluster.nodes": 2,
        "ranks": 4,
    }  # a precision of no is a default
    fsdp = LAUNCHED | {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true", "FSDP_VERSION": "2"}
    file = load_accelerate(None, fsdp | {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_SHARDING_STRATEGY": "FULL_SHARD"})
    assert settings_of(file) == {"cluster.nodes": 2, "ranks": 4, "sharded": True, "layout.offload": True}
    assert file
    assert file.settings["layout.offload"].where == "accelerate launch: FSDP_OFFLOAD_PARAMS"
    assert "--accelerate FILE" in file.notes[0]
    on_cpu = settings_of(load_accelerate(None, LAUNCHED | {"ACCELERATE_USE_CPU": "True"}))
    assert on_cpu["cpu"] is True  # refused on a GPU
    with refused("refused-setting", "ACCELERATE_USE_DEEPSPEED"):
        load_accelerate(None, LAUNCHED | {"ACCELERATE_USE_DEEPSPEED": "true"})
    path = EXAMPLES / "fsdp.yaml"
    file = load_accelerate(path, LAUNCHED | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})
    assert settings_of(file) == PUBLISHED["fsdp.yaml"] | {"cluster.nodes": 2, "ranks": 2}
    assert file
    assert [note.partition("fsdp.yaml")[2] for note in file.notes] == [
        ":11: num_machines: 3 is overridden by accelerate launch: WORLD_SIZE=2: its flags win",
        ":12: num_processes: 3 is overridden by accelerate launch: WORLD_SIZE=2: its flags win",
    ]


SCRIPT = """
import dataclasses, json, os, sys
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from windlass.runfile.accelerate import load_accelerate
fields = {field.name for kind in (ClusterConfig, SageMakerConfig) for field in dataclasses.fields(kind)}
answer = {
    "settings": {name: setting.value for name, setting in load_accelerate(None, os.environ).settings.items()},
    "environ": list(os.environ),
    "fields": sorted(fields),
    "options": [action.dest for action in launch_command_parser()._actions],
    "types": [kind.value for kind in DistributedType],
}
open(sys.argv[1], "w").write(json.dumps(answer))
"""


def test_key_table_covers_accelerate_and_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(SCRIPT)
    (tmp_path / "fsdp.yaml").write_text(
        FSDP + "num_processes: 3\nnum_machines: 1\nmixed_precision: bf16\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n  fsdp_offload_params: true\n"
        "parallelism_config:\n  parallelism_config_dp_shard_size: 1\n"
    )
    command = [warm.python(), "-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml", "--num_processes", "1"]
    command += ["--main_process_port", "0", "rank.py", "out.json"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP_", "ACCELERATE_"))}
    subprocess.run(command, cwd=tmp_path, env=environ, check=True, timeout=180, capture_output=True)
    found = json.loads((tmp_path / "out.json").read_text())
    set_by_both = {"sharded": True, "train.bf16": True, RESHARD: False, "layout.offload": True}
    assert found["settings"] == {**set_by_both, "cluster.nodes": 1, "ranks": 1}
    # With --cpu it starts a single process, which shards nothing.
    unset = {"ACCELERATE_USE_CPU", "FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_IGNORED_MODULES", "FSDP_STATE_DICT_TYPE"}
    assert set(load_key_table().launcher) - set(found["environ"]) <= unset
    assert [name for name in found["fields"] if find_key("", name) is None] == []
    for section in ("fsdp_config", "parallelism_config", "dynamo_config", "fp8_config", "megatron_lm_config"):
        prefix = section.removesuffix("_config") if section != "parallelism_config" else section
        known = {option for option in found["options"] if option.startswith(f"{prefix}_")}
        assert known
        assert {name for name in known if find_key(section, name) is None} == set()
    assert set(found["types"]) <= set(load_key_table().spelled[""]["distributed_type"].verdicts)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    """As what `plan --compare` suggests must be taken beside the file."""
    run = tmp_path / "run.yaml"
    run.write_text("model: {model_name_or_path: Qwen3-8B}\ncluster: {gpu: h200, network: roce-400}\n")
    layout = "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_offload_params: true}\n"
    file = read(
        tmp_path, f"distributed_type: FSDP\nnum_machines: 3\nnum_processes: 24\nmixed_precision: bf16\n{layout}"
    )
    plain = make_plan(read_run_file(run, (), file), compare=False).layout
    assert (plain.name, plain.nodes, plain.gpus_per_node, plain.offload) == ("full-shard", 3, 8, True)
    for overrides, expected in (
        (["cluster.nodes=2"], ("full-shard", 2, 8, True)),
        (["cluster.gpus_per_node=4"], ("full-shard", 3, 4, True)),
        (["layout=full-shard"], ("full-shard", 3, 8, True)),
        (["layout.offload=false"], ("full-shard", 3, 8, False)),
        (["layout=resident", "layout.base_dtype=bf16"], ("resident", 3, 8, False)),
    ):
        plan = make_plan(read_run_file(run, overrides, file), compare=False)
        one = plan.layout
        assert (one.name, one.nodes, one.gpus_per_node, one.offload) == expected
        notes = [note for note in plan.notes if "is overridden by --override" in note]
        assert bool(notes) == (expected != ("full-shard", 3, 8, True)), notes
    run.write_text(run.read_text() + "sweep: {lora.r: [8, 16]}\n")  # a trial's run file has what it was planned with
    for trial in read_run_file(run, (), file).trials:
        assert (trial.run.cluster.size, "offload: true" in str(trial.trial and trial.trial.file)) == ((3, 8), True)
    with refused("disagreement"):  # the run file is a file too
        run.write_text(run.read_text() + "layout: resident\n")
        make_plan(read_run_file(run, (), file), compare=False)


@pytest.mark.fault("an Accelerate file beside a run file with an empty section", "`windlass plan`", "full-shard")
def test_what_a_run_file_leaves_open_or_refines_is_no_other_layout(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    top = "model: {model_name_or_path: Qwen3-8B}\n"
    fsdp = "distributed_type: FSDP\nnum_machines: 3\nnum_processes: 24\nfsdp_config: {fsdp_version: 2%s}\n"
    plain, gathered = (read(tmp_path, fsdp % more) for more in ("", ", fsdp_reshard_after_forward: true"))
    machine = "cluster: {gpu: h200, network: roce-400}\n"
    hybrid = "layout: {name: hybrid}\n"
    for more, file, overrides, expected in (
        ("train:\n  # nothing yet\n", plain, [], ("full-shard", True, 3)),
        ("layout: {ranks: 24}\n", plain, [], ("full-shard", True, 3)),
        (hybrid, plain, ["layout.reshard_after_forward=false"], ("hybrid", False, 3)),
        (hybrid, gathered, [], ("hybrid", True, 3)),
        ("layout: full-shard\n", gathered, ["layout.shard=8", "layout.replicate=3"], ("full-shard", True, 3)),
    ):
        run.write_text(top + machine + more)
        layout = make_plan(read_run_file(run, overrides, file), compare=False).layout
        assert (layout.name, layout.reshard_after_forward, layout.nodes) == expected, more
    run.write_text(top + machine + "layout: {ranks: 24}\n")  # is read without the file that gives the machines
    with refused("broken-rule"):
        make_plan(read_run_file(run), compare=False)
    run.write_text(top + "cluster: two\n")
    with refused("wrong-value", "run.yaml:2: cluster"):
        read_run_file(run, ["cluster.gpu=h200"])


def test_gpus_replace_the_machines_of_both_files(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    machines = "cluster: {nodes: 2, gpus_per_node: 8, gpu: h200, network: roce-400}\n"
    run.write_text("model: {model_name_or_path: Qwen3-8B}\n" + machines)
    file = tmp_path / "fsdp.yaml"
    file.write_text("distributed_type: FSDP\nnum_machines: 3\nnum_processes: 24\nfsdp_config: {fsdp_version: 2}\n")
    subject = open_subject(str(run), "3x8xh200", {}, (), file, lambda _: None)
    assert subject is not None
    layout = subject.plan().layout
    assert (layout.name, layout.nodes, layout.gpus_per_node) == ("full-shard", 3, 8)
