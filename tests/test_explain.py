"""`windlass explain`: one setting or an Accelerate file, in words; an unknown name suggests the nearest."""

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from windlass import explain
from windlass.cli import app
from windlass.errors import UserError
from windlass.plan.layout import LAYOUTS
from windlass.runfile import list_keys, read_run_file, reference
from windlass.runfile.accelerate import load_key_table, read_accelerate
from windlass.variables import list_other_names, variables

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "mistral-small-4"


def test_everything_can_be_explained() -> None:
    for key in load_key_table().every:
        name = key.name.replace("*", "thing")
        for spelling in (
            name,
            f"{key.section}.{name}" if key.section else name,
            *(s for s, k in load_key_table().spelled[key.section].items() if k is key),
        ):
            rows = [row for row in explain.explain_topic(spelling) if (row.kind, row.name) == ("accelerate", key.path)]
            assert rows[0].text.endswith(key.about)
            assert len(rows) == 1 + len({id(verdict) for verdict in key.verdicts.values()})
            assert {row.verdict for row in rows[1:]} == {verdict.word for verdict in key.verdicts.values()}
    for name, variable in variables().items():
        rows = [row for row in explain.explain_topic(name) if row.kind == "environment"]
        assert {variable.about, variable.windlass, variable.verdict} - {row.text for row in rows} <= {""}
        assert variable.status in {row.verdict for row in rows}
    for name in list_other_names():
        assert "neither sets nor reads" in explain.explain_topic(name)[0].text
    for name, text in LAYOUTS.items():
        assert [row.text for row in explain.explain_topic(name)] == [text]
    for path in list_keys():
        rows = [row for row in explain.explain_topic(path) if row.kind == "run file"]
        assert {row.name for row in rows} == {path}
        assert len(rows[0].text) > 8


def test_names_of_the_run_file() -> None:
    rows = explain.explain_topic("learning_rate")
    assert {row.name for row in rows} == {"train.learning_rate"}
    assert "default: 0.0001" in [row.text for row in rows]
    for name, verdict, text in (
        ("max_seq_length", "translated", "to data.max_length"),
        ("load_in_4bit", "refused", "write layout.base_dtype: nf4"),
        ("lora.rank", "", "windlass calls it lora.r"),
        ("micro_batch_size", "", "windlass calls it train.per_device_train_batch_size"),
        ("cluster.env.HOME", "", "Environment variables"),
        ("cluster.volumes[0].claim", "", "Name of the claim."),
    ):
        row = explain.explain_topic(name)[0]
        assert row.verdict == verdict
        assert text in row.text
    # The published recipe claims that the optimizer's states are offloaded.
    (row,) = [row for row in explain.explain_topic("fsdp_offload_params") if row.value == "true"]
    assert row.verdict == "honoured"
    assert row.text.startswith("the frozen base is stored in host memory")


UNKNOWN = {
    "fsdp_offlaod_params": "fsdp_offload_params",
    "nccl_ib_hcas": "NCCL_IB_HCA",
    "full_shard": "full-shard",
    "IFNAME": "NCCL_SOCKET_IFNAME",
    "zero_stge": "zero_stage",
    "lora.rr": "lora.r",
    "learning_rat": "train.learning_rate",
    **dict.fromkeys(("", "   ", "zzzzzzzz", "[bold]", "a.b.c", "\x00", "é" * 500), ""),
}


def test_unknown_name_suggests_the_nearest() -> None:
    for name, near in UNKNOWN.items():
        with pytest.raises(UserError, match=re.escape(repr(name.strip()))) as caught:
            explain.explain_topic(name)
        assert caught.value.problems[0].hint
        assert near in caught.value.problems[0].hint


def test_a_file_is_explained_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Including a refused key; a misspelt one is an error."""
    for name in ("fsdp.yaml", "fsdp-3xH200.yaml", "config/fsdp_2xH200.yaml"):
        rows = explain.explain_file(EXAMPLES / name)
        assert [(row.name, row.verdict, row.where) for row in rows] == [
            (entry.path, entry.verdict.word, entry.where) for entry in read_accelerate(EXAMPLES / name).entries
        ]
        explain.print_rows(rows)
        shown = " ".join(capsys.readouterr().out.split())
        assert all(" ".join(row.text.split()) in shown for row in rows)
    path = tmp_path / "ds.yaml"
    path.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n")
    assert [(row.name, row.verdict) for row in explain.explain_file(path)] == [
        ("distributed_type", "refused"),
        ("deepspeed_config", "honoured"),
        ("deepspeed_config.zero_stage", "no effect"),
    ]
    path.write_text("distributed_type: FSDP\nmain_process_ip: '[red]10.0.0.1[/red]'\nmachine_rank: null\n")
    explain.print_rows(explain.explain_file(path))
    assert {"main_process_ip: [red]10.0.0.1[/red]", "machine_rank: null"} <= {*capsys.readouterr().out.splitlines()}
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_verison: 2\n")
    with pytest.raises(UserError, match="did you mean fsdp_version"):
        explain.explain_file(path)


def test_explanation_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        explain.print_rows(explain.explain_topic("gradient_accumulation_steps"))
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= columns
        assert "(in an Accelerate file)" in re.sub(r"\s+", " ", shown)


# --- the page about DeepSpeed ---------------------------------------------------------------------------------------


def test_the_deepspeed_page_agrees_with_the_code(tmp_path: Path) -> None:
    """It names the error's equivalents, and its keys can be explained."""
    page = (ROOT / "docs" / "fsdp2-or-deepspeed.md").read_text(encoding="utf-8")
    equivalents = re.findall(r"^\| `([a-z0-9_]+: [a-z0-9]+)`(?:,[^|]*)? \| `(layout: [^`]+)`", page, re.MULTILINE)
    assert dict(equivalents)["zero_stage: 3"] == "layout: full-shard"
    assert dict(equivalents)["zero_stage: 0"] == "layout: resident"
    (tmp_path / "ds.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n")
    with pytest.raises(UserError) as caught:
        read_accelerate(tmp_path / "ds.yaml")
    hint = caught.value.problems[0].hint
    assert "layout: full-shard for ZeRO 3" in hint
    assert "layout: resident for ZeRO 1 and 2" in hint
    table = [line for line in page.partition("## Coming from a DeepSpeed file")[2].splitlines() if line[:3] == "| `"]
    names = {name for line in table for name in re.findall(r"`([a-z0-9_]+)[:`]", line.split("|")[1])}
    assert {"zero_stage", "gradient_clipping", "deepspeed_hostfile"} <= names
    for name in names - {"1", "2"}:
        assert explain.explain_topic(name)


# --- the table of variables -----------------------------------------------------------------------------------------


def test_torch_variables_exist_in_torch() -> None:
    """The installed torch names them in its headers; a rename upstream shows here."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    headers = Path(spec.origin or "").parent / "include"
    text = (headers / "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp").read_text()
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        assert name in text
        assert name in list_other_names()
    allocator = (headers / "c10/cuda/CUDAAllocatorConfig.h").read_text()
    assert {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} <= {name for name in variables() if name in allocator}


def test_examples_are_of_keys_and_accepted(tmp_path: Path) -> None:
    examples = tomllib.loads((Path(reference.__file__).with_name("examples.toml")).read_text())
    known = reference.list_documented()
    assert {key.removesuffix(".*") for key in examples} <= known.keys()
    (tmp_path / "run.yaml").write_text("cluster: {gpus_per_node: 8}")
    for path in reference.list_fields():
        for line in reference.describe(path):
            if line.startswith("example: --override "):
                read_run_file(tmp_path / "run.yaml", [word for word in shlex.split(line)[1:] if word != "--override"])
    for path in known:
        lines = [*reference.describe(path)]
        if not lines[1].startswith("keys: "):
            assert [line for line in lines if line.startswith("example: ")], path


def test_explain_shows_where_a_run_sets_a_key_and_each_entry_of_a_list_or_mapping(tmp_path: Path) -> None:
    lists = "cluster:\n  volumes:\n    - {claim: a, path: /x}\n    - {claim: b, path: /y}\n"
    sets = "data:\n  mix:\n    - {path: m.jsonl}\n  eval: {old: {path: e.jsonl}}\n"
    (tmp_path / "run.yaml").write_text(lists + sets)
    (tmp_path / "script.yaml").write_text("kind: script\nscript: {path: train.py}\n")

    def shown(key: str, file: str = "run.yaml") -> list[str]:
        texts = [row.text for row in explain.explain_topic(key, tmp_path / file)]
        return [text.removeprefix("in this run: ") for text in texts if text.startswith("in this run")]

    at = f"{tmp_path}/run.yaml"
    assert shown("cluster.volumes.claim") == [
        f"a ({at}:3: cluster.volumes[0].claim)",
        f"b ({at}:4: cluster.volumes[1].claim)",
    ]
    assert shown("data.mix.path") == [f"m.jsonl ({at}:7: data.mix[0].path)"]
    assert shown("data.eval.path") == [f"e.jsonl ({at}:8: data.eval.old.path)"]
    assert shown("seed") == ["42 (default: train.seed)"]
    assert shown("data.keep.path") == shown("seed", "script.yaml") == []
    assert shown("path", "script.yaml") == [f"train.py ({tmp_path}/script.yaml:2: script.path)"]


def test_questions_lead_to_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """By any of their words; the commands exist, with these options, and stay on a line."""
    for words, topic, answer in (
        ("how do I run trials?", "trials", "sweep.lora.r=[8, 16, 32]"),
        ("grid search", "trials", "windlass best RUN_FOLDER"),
        ("preference tuning", "preference", "windlass init --model DIR --data pairs.jsonl"),
        ("RLHF", "preference", "windlass init --model DIR --data pairs.jsonl"),
        ("several adapters", "adapters", "lora.adapter: FOLDER"),
        ("a benchmark", "benchmark", "lm_eval --model hf"),
        ("evaluation", "benchmark", "lm_eval --model hf"),
        ("W&B", "trackers", "train.report_to: wandb"),
        ("which GPUs?", "gpus", "windlass plan MODEL --gpus all"),
    ):
        rows = [row for row in explain.explain_topic(words) if row.kind == "question"]
        assert {row.name for row in rows} == {topic}
        assert any(answer in row.text for row in rows), words
    assert {row.kind for row in explain.explain_topic("adapters")} == {"run file", "question"}
    lines = [line for question in explain.load_questions().values() for line in question["answer"]]
    commands = {command.name for command in app.registered_commands}
    for line in lines:
        for name, rest in re.findall(r"windlass ([a-z-]+)([^;:()]*)", line):
            if name == "has":
                continue
            known = (ROOT / "docs" / "commands" / f"{name}.md").read_text()
            assert name in commands
            assert set(re.findall(r"--[a-z-]+", rest)) <= set(re.findall(r"--[a-z-]+", known)), line
        for key in re.findall(r"\b(?:train|lora|cluster|data)\.\w+", line):
            assert key in list_keys(), line
    for word in (word for question in explain.load_questions().values() for word in question["names"].split()):
        assert any(row.kind == "question" for row in explain.explain_topic(word))
    explain.print_rows(explain.explain_topic("trials"))
    printed = capsys.readouterr().out.splitlines()
    assert all(f"  {line}" in printed for line in explain.load_questions()["trials"]["answer"])
