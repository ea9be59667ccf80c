"""The rehearsal: one from start to end, and every planted fault caught in its stage."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import typer
import warm
import yaml
from safetensors.torch import load_file, save_file
from text_run import make_text_run

from windlass import plan as planning
from windlass import tiny
from windlass.cli import app
from windlass.errors import UserError
from windlass.files import read_json_lines
from windlass.hardware import LocalMachine
from windlass.model import find_base, find_published_base, read_base
from windlass.model.base import read_published_configs
from windlass.model.config import describe
from windlass.model.family import FAMILIES, WRAPPERS
from windlass.plan.layout import Layout
from windlass.ranks import supervisor
from windlass.ranks.place import Node
from windlass.rehearse import RehearsalRecord, material, rehearse, reload, stages
from windlass.rehearse.process import RunningCommand, make_environment, node_variables
from windlass.rehearse.record import Failed, print_record
from windlass.rehearse.scale import STEPS, Change, Material, scale_config, scale_ranks, scale_run
from windlass.rehearse.stages import Rehearsal
from windlass.runfile import Loaded, RunFile, read_run_file
from windlass.runfile.rules import find_contradictions
from windlass.train.logits import load_float32

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "mistral-small-4" / "train.yaml"
STAGES = tuple(name for name, _, _ in stages.STAGES)

pytestmark = pytest.mark.timeout(600)  # a whole rehearsal on a machine that does other things as well


def rehearsed(run: Path, *overrides: str, keep: Path | None = None) -> RehearsalRecord:
    return rehearse(run, overrides=overrides, keep=keep, environ=os.environ, say=lambda _: None)


@pytest.fixture(scope="module", autouse=True)
def warm_processes() -> Iterator[str]:
    """Start a rehearsal's processes warm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        python = warm.python()
        (Path(python).parent / "python3").symlink_to(python)
        accelerate = Path(python).parent / "accelerate"
        accelerate.write_text(f'#!/bin/sh\nexec {python} {Path(sys.executable).parent}/accelerate "$@"\n')
        accelerate.chmod(0o755)
        patch.setattr(sys, "executable", python)
        yield python


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's run file with everything on this machine: a model in the published layout, data, two ranks."""
    return make_text_run(tmp_path_factory.mktemp("rehearse") / "demo", 400)


# --- from start to end


@pytest.fixture(scope="module")
def kept(user: Path) -> Iterator[Path]:
    """One rehearsal through the command, kept."""
    keep = user.parent / "kept"
    command = [sys.executable, "-m", "windlass", "rehearse", str(user), "--keep", str(keep)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (user.parent / "printed").write_text(done.stdout)
    yield keep
    shutil.rmtree(keep)


def test_a_run_is_rehearsed_and_the_record_is_true(kept: Path, user: Path) -> None:
    found = json.loads((kept / "rehearsal.json").read_text())
    assert (found["passed"], found["exit_code"], found["failure"], found["stand_ins"]) == (True, 0, None, [])
    assert tuple(phase["name"] for phase in found["phases"]) == STAGES
    assert all(phase["passed"] and phase["seconds"] > 0 and phase["proved"] for phase in found["phases"])
    assert found["ranks"] == {"yours": 2, "here": 2, "nodes": 1, "layout": "full-shard", "why": ""}
    printed = (user.parent / "printed").read_text()
    assert "passed: rehearsed with 2 ranks, full-shard" in printed
    steps = [line["step"] for line in read_json_lines(kept / "run" / "steps-rank0.jsonl")]
    assert steps == list(range(1, STEPS + 1))
    certificate = json.loads((kept / "run" / "load.json").read_text())
    assert certificate["loaded"] == len(certificate["parameters"])
    assert (kept / "run" / "steps-rank1.jsonl").exists()
    assert (kept / "adapter" / "adapter_model.safetensors").exists()
    assert read_base(kept / "merged").quantization is None
    assert read_base(kept / "model").wrapper == WRAPPERS["mistral3"]

    # The two run files say the same but for the keys that are listed.
    yours, here = (read_run_file(path).run.model_dump(mode="json") for path in (user, kept / "rehearsal.yaml"))
    sections = [section for section, values in yours.items() if isinstance(values, dict)]
    differing = {f"{s}.{key}" for s in sections for key in yours[s] if yours[s][key] != here[s][key]}
    assert differing
    assert differing <= {change["key"] for change in found["changes"]}


@pytest.mark.takes("makes small models of every family")
def test_exports_that_are_not_what_was_trained_are_found(kept: Path, tmp_path: Path) -> None:
    for name in ("model", "run"):
        (tmp_path / name).symlink_to(kept / name)
    for name in ("adapter", "merged"):
        shutil.copytree(kept / name, tmp_path / name)
    assert len(reload.main(tmp_path)) == 2

    @contextlib.contextmanager
    def found(file: Path, words: str) -> Iterator[dict[str, Any]]:
        """Return the finding with other tensors in the file, which is then restored."""
        before, tensors = file.read_bytes(), load_file(file)
        yield tensors
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(reload.ReloadMismatch, match=words):
            reload.main(tmp_path)
        file.write_bytes(before)

    with found(tmp_path / "adapter" / "adapter_model.safetensors", "in plain PEFT: logits differ by") as tensors:
        tensors.update({key: tensor * 2 for key, tensor in tensors.items() if "lora_B" in key})
    shard = next((tmp_path / "merged").glob("model-00001*"))
    with found(shard, r"weights of model.embed_tokens.weight are not base \+ adapter, merged by PEFT") as tensors:
        name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
        tensors[name] = tensors[name].flip(0).contiguous()
    with found(shard, "missing keys") as tensors:
        del tensors[name]

    # A merge without the adapter, however little was trained.
    base = load_float32(read_base(kept / "model")).state_dict()
    for file in (tmp_path / "merged").glob("model-*.safetensors"):
        tensors = load_file(file)
        for key in tensors:
            if (name := key.removeprefix("language_model.")) in base:
                tensors[key] = base[name].to(tensors[key].dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        reload.ReloadMismatch, match=r"are not base \+ adapter, merged by PEFT|of what the adapter adds"
    ):
        reload.main(tmp_path)


TWO_BY_EIGHT = ("cluster.nodes=2", "cluster.gpus_per_node=8")
QWEN = (
    *("model.model_name_or_path=Qwen3-30B-A3B", "lora.target_modules=all-linear", "data.packing=true"),
    *("cluster.nodes=2", "layout.name=expert-parallel"),
)
# An example, and other layouts and families: name -> (run file, overrides, ranks here, nodes here)
EXAMPLES: dict[str, tuple[Path, tuple[str, ...], int, int]] = {
    "three nodes": (EXAMPLE, (), 3, 3),
    "hybrid": (EXAMPLE, (*TWO_BY_EIGHT, "layout.name=hybrid"), 4, 2),
    "qwen3 moe": (EXAMPLE, QWEN, 2, 2),
}


@pytest.mark.prove
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_rehearsed(name: str, tmp_path: Path) -> None:
    run, overrides, ranks, count = EXAMPLES[name]
    record = rehearsed(run, *overrides, keep=tmp_path / "kept")
    assert record.failure is None, record.failure
    # A machine with more cores has more ranks of the two by eight.
    assert record.ranks["here"] == ranks or name == "hybrid"
    assert record.ranks["nodes"] == count
    assert tuple(phase.name for phase in record.phases) == STAGES
    assert [text.partition(":")[0] for text in record.stand_ins] == ["data", "tokenizer and chat template"]
    assert {"GPU memory", "NCCL and GPUs"} <= {each["what"] for each in record.not_proved}


@pytest.mark.long
@pytest.mark.parametrize("name", ["mix", pytest.param("preference", marks=pytest.mark.prove)])
def test_every_data_format_is_rehearsed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mix has every format."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    make_text_run(tmp_path / "demo")
    record = rehearsed(Path(f"examples/data/{name}.yaml"), keep=tmp_path / "kept")
    assert record.failure is None, record.failure
    made = yaml.safe_load((tmp_path / "kept" / "rehearsal.yaml").read_text())["data"]
    if name == "mix":
        assert [each["name"] for each in made["mix"]][:3] == ["messages", "sharegpt", "alpaca"]
        assert made["eval"].keys() == {"hanging", "spelling"}


def some_material(**more: Any) -> Material:
    sizes = {"validation": True, "length": 64, "rows": 40, "layers": 2}
    return Material(**{"model": Path("m"), "data": Path("d"), **sizes, **more})


@pytest.mark.parametrize("name", EXAMPLES)
def test_scaled_down_run_has_the_same_plan(name: str, tmp_path: Path) -> None:
    """Only planned: the same layout, targets and schedule, on the ranks and replica of a rehearsal."""
    run, overrides, _, count = EXAMPLES[name]
    loaded = read_run_file(run, overrides)
    own = planning.make_plan(loaded)
    here, _ = scale_ranks(own.layout, LocalMachine((), 2, 24, None))
    assert here.nodes == count
    base = own.base
    tiny.write_like(base, scale_config(base, experts_over=here.expert_parallel, vocab=None), tmp_path / "model")
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "data" / f"{split}.jsonl").write_text('{"text": "some words of a row"}\n' * 40)
    made = some_material(model=tmp_path / "model", data=tmp_path / "data")
    text, _ = scale_run(loaded.run, own.as_dict(), here, made, tmp_path / "run", packs=own.run.data.packs)
    (tmp_path / "run.yaml").write_text(text)
    small = planning.make_plan(read_run_file(tmp_path / "run.yaml"))
    for key in ("name", "reshard_after_forward", "base_dtype", "precision"):
        assert getattr(small.layout, key) == getattr(own.layout, key), key
    assert not small.layout.offload
    assert (small.layout.ranks, small.layout.nodes) == (here.ranks, count)
    leaves = [{module.rpartition(".")[2] for module in plan.adapter.target_modules} for plan in (small, own)]
    assert leaves[0] == leaves[1]
    assert small.loaded.run.train.learning_rate == own.loaded.run.train.learning_rate
    assert small.schedule.steps == STEPS


# --- planted faults


@pytest.fixture
def copied(user: Path, tmp_path: Path) -> Path:
    """Return a copy of the model's folder, to be damaged."""
    shutil.copytree(user.parent / "model", tmp_path / "model")
    return tmp_path / "model"


def write_talks(folder: Path) -> Path:
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A thing of some length."}]
    folder.mkdir(exist_ok=True)
    for split, count in (("train", 40), ("validation", 8)):
        (folder / f"{split}.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * count)
    return folder


# name -> (overrides, the stage that catches it, words of the message, exit code)
TALKS = ("model.model_name_or_path={copied}", "data.dataset_name_or_path={talks}", "data.messages_field=messages")
FAULTS: dict[str, tuple[tuple[str, ...], str, str, int]] = {
    "an unknown key": (("train.learning_rat=1",), "plan", "train.learning_rat", 2),
    "a shard that is missing": (("model.model_name_or_path={copied}",), "plan", "model-00002-of-00003.safetensors", 2),
    "a run folder inside a file": (("train.output_dir={user}/x",), "check", "run.yaml is a file", 1),
    "a finished run": ((), "check", "contains a finished run", 2),
    "a chat template without an end": (TALKS, "data", "the model would never stop: 0 of 40 rows end", 2),
}
NOT_WRITTEN = {"an unknown key", "a run folder inside a file", "a finished run"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_in_its_stage(name: str, user: Path, copied: Path, tmp_path: Path) -> None:
    """And replaces an older record, if the run file names the folder and no run has finished there."""
    (tmp_path / "rehearsal.json").write_text(json.dumps({"passed": True}))
    template = copied / "chat_template.jinja"
    template.write_text(template.read_text().replace(" + eos_token", ""))
    if name == "a shard that is missing":
        (copied / "model.safetensors").unlink()
        tiny.write_model(copied, files=3)
        (copied / "model-00002-of-00003.safetensors").unlink()
    if name == "a finished run":
        (tmp_path / "manifest.json").write_text(json.dumps({"state": "finished"}))
    overrides, stage, words, code = FAULTS[name]
    talks = write_talks(tmp_path / "talks")
    places = {"{user}": user, "{copied}": copied, "{talks}": talks}
    given = [
        functools.reduce(lambda text, name: text.replace(name, str(places[name])), places, one) for one in overrides
    ]
    record = rehearsed(user, f"train.output_dir={tmp_path}", *given)
    assert record.failure is not None
    assert (record.failure["phase"], words in record.failure["text"]) == (stage, True), record.failure["text"]
    assert record.exit_code == record.failure["exit_code"] == code
    assert [each.name for each in record.phases if not each.passed] == [stage] == [record.phases[-1].name]
    assert record.folder is record.failure["log"] is None  # it is all in the text, and nothing is left behind
    assert json.loads((tmp_path / "rehearsal.json").read_text())["passed"] is (name in NOT_WRITTEN)


def take_rows(user: Path, tmp_path: Path, *overrides: str) -> dict[str, Any]:
    """Run the stage `data` in this process; return its report or its error."""
    talks = (f"data.dataset_name_or_path={write_talks(tmp_path / 'talks')}", "data.messages_field=messages")
    loaded = read_run_file(user, [*talks, *overrides])
    base = find_base(loaded.run.model.model_name_or_path, "model")
    tokenizer = material.copy_tokenizer(base, loaded, tmp_path / "replica")
    return material.take_rows(loaded, base, tokenizer, tmp_path / "rows", 16)


def test_rows_are_judged_as_training_will(user: Path, copied: Path, tmp_path: Path) -> None:
    found = take_rows(user, tmp_path)
    assert found["end"] == "40 of 40 rows end with a token that generation stops at"
    assert (found["stand_ins"], found["length"], found["rows"]) == ([], 128, 40)
    assert len((tmp_path / "rows" / "train.jsonl").read_text().splitlines()) == 40
    for override, words in (
        ("data.max_length=6", r"no row of train has a supervised token: of 40 rows"),
        ("data.train_split=train[:0]", r"train\[:0\] has no rows"),
        ("data.val_split=validation[5:5]", r"validation\[5:5\] has no rows"),
    ):
        with pytest.raises(UserError, match=words):
            take_rows(user, tmp_path, override)
    for named in (3, [3, 4]):  # generation would stop at another token
        (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        with pytest.raises(UserError, match=r"stops at '\[INST\]' \(3\).*; most end with '</s>' \(2\)"):
            take_rows(user, tmp_path, f"model.model_name_or_path={copied}")
    tiny.write_tokenizer(copied, 2048)
    plain = (f"data.dataset_name_or_path={user.parent}/data", "data.messages_field=null")
    with pytest.raises(UserError, match="the model's vocabulary ends at 1023"):
        take_rows(user, tmp_path, f"model.model_name_or_path={copied}", *plain)
    # Sequences are short, but not so short that nothing supervised is left of an answer behind a long prompt.
    row = {"prompt": "word " * 900, "completion": "an answer"}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 40)
    pair = ("data.prompt_field=prompt", "data.completion_field=completion", "data.messages_field=null")
    more = (f"data.dataset_name_or_path={tmp_path}/train.jsonl", "data.max_length=4096", "data.val_split=null")
    assert take_rows(user, tmp_path, *pair, *more, "train.eval_strategy=no")["length"] > 900


@pytest.mark.parametrize(
    ("section", "columns"),
    [
        ({"messages_field": "talk"}, {"talk"}),
        ({"prompt_field": "q", "completion_field": "a"}, {"q", "a"}),
        ({"prompt_template": "{q} {r!s} [[{answers[text][0]}]]"}, {"q", "r", "answers"}),
    ],
)
def test_stand_ins_have_the_requested_columns(section: dict[str, str], columns: set[str], tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    data = {"dataset_name_or_path": "/no/such/volume/set", "messages_field": None, **section}
    run.write_text(yaml.safe_dump({"model": {"model_name_or_path": "Mistral-Small-4-119B-2603"}, "data": data}))
    found = take_rows(run, tmp_path, *(f"data.{key}={json.dumps(value)}" for key, value in data.items()))
    assert set(found["columns"]) == columns
    assert "/no/such/volume/set is not on this machine" in found["stand_ins"][0]


# --- the run scaled down


SHARDED = Layout("full-shard", "", 1, 3, shard=3)
PLAN = {"layout": asdict(SHARDED), "adapter": {"targets": []}, "batch": {"micro": 1, "accumulation": 16}}


def test_rehearsal_lists_every_changed_key() -> None:
    modules = ["model.layers.30.self_attn.q_proj", "model.layers.31.self_attn.q_proj"]
    targets = [{"pattern": "31.self_attn.q_proj", "matched": modules[1:], "part": "attention"},
               {"pattern": "o_proj", "matched": ["model.layers.0.self_attn.o_proj"], "part": "attention"}]  # fmt: skip
    env = {"NCCL_IB_HCA": "mlx5", "A": "b", "T": {"secret": "s", "key": "k"}}
    run = RunFile.model_validate(
        {
            "model": {"torch_dtype": "float16", "attn_implementation": "flash_attention_2"},
            "lora": {"target_modules": ["31.self_attn.q_proj", "o_proj"]},
            "train": {"bf16": False, "fp16": True, "report_to": "wandb", "warmup_steps": 100, "save_steps": 400},
            "cluster": {"nodes": 3, "image": "x", "env": env},
        }
    )
    layout = replace(SHARDED, activation_checkpointing=True, offload_activations=True)
    plan = {**PLAN, "layout": asdict(layout), "adapter": {"targets": targets}}
    text, changes = scale_run(run, plan, layout, some_material(), Path("out"), packs=False)
    small = RunFile.model_validate(yaml.safe_load(text))
    assert (small.model.torch_dtype, small.model.attn_implementation, small.train.fp16) == ("float32", "sdpa", False)
    assert small.lora.target_modules == ["q_proj", "o_proj"]  # names of layers that the replica has not got
    assert (small.train.report_to, small.train.warmup_steps) == ("none", STEPS // 4)
    assert small.train.save_steps == 2 * small.train.eval_steps
    assert small.cluster.env == {"A": "b"}
    assert (small.layout.activation_checkpointing, small.train.offload_activations) == (True, True)
    listed = {change.key: change for change in changes}
    keys = {"model.torch_dtype", "train.fp16", "train.report_to", "cluster.image", "cluster.env", "lora.target_modules"}
    assert keys <= listed.keys()
    assert all(change.why for change in changes)
    assert listed["lora.target_modules"].yours == ["31.self_attn.q_proj", "o_proj"]


def test_a_run_without_validation_rows_is_rehearsed_without_evaluation() -> None:
    """As `windlass train` trains it, after a warning."""
    run = RunFile.model_validate({"train": {"sample": {"from_eval": 4}}})
    for rows, strategy in ((some_material(), "auto"), (some_material(validation=False), "no")):
        text, _ = scale_run(run, PLAN, SHARDED, rows, Path("out"), packs=False)
        small = RunFile.model_validate(yaml.safe_load(text))
        assert small.train.eval_strategy == strategy
        assert (small.train.sample is None) == (strategy == "no")
        clashes = [problem.where for problem in find_contradictions(small, lambda key: key, lambda _: True)]
        assert not [key for key in clashes if key.startswith(("train.eval", "train.sample", "data.val"))]


def test_as_many_ranks_and_nodes_as_fit_share_the_model_as_the_run_does() -> None:
    for own, cpus, gib, here in (
        ((3, 1, 1), 2, 24, (3, 1, 1)),
        ((16, 1, 1), 8, 24, (8, 1, 1)),
        ((1, 16, 1), 2, 24, (1, 4, 1)),
        ((8, 2, 1), 2, 24, (2, 2, 1)),
        ((8, 2, 8), 2, 24, (2, 2, 2)),
        ((8, 1, 2), 2, 24, (4, 1, 2)),
        ((16, 1, 1), 32, 3, (2, 1, 1)),
    ):
        made, why = scale_ranks(Layout("", "", 1, own[0] * own[1], *own), LocalMachine((), cpus, gib, None))
        assert (made.shard, made.replicate, made.expert_parallel) == here
        assert bool(why) == (own != here)
    for ranks, split, groups in ((8, 8, 1), (8, 4, 2), (8, 2, 2), (16, 1, 4), (4, 2, 2), (2, 2, 1)):
        layout = Layout("", "", 1, ranks, shard=1, replicate=ranks, context_parallel=split)
        assert scale_ranks(layout, LocalMachine((), 2, 24, None))[0].readers == groups, (ranks, split)
    for nodes, gpus, cpus, played in ((1, 4, 16, 1), (3, 1, 16, 3), (2, 8, 16, 2), (3, 8, 16, 2), (8, 1, 4, 4)):
        layout = Layout("", "", nodes, gpus, shard=nodes * gpus)
        assert scale_ranks(layout, LocalMachine((), cpus, 24, None))[0].nodes == played


@pytest.mark.takes("makes small models of every family")
def test_every_known_model_has_a_small_config_of_its_kind() -> None:
    for name in read_published_configs():
        base = find_published_base(name)
        assert base is not None
        small = scale_config(base, experts_over=3, vocab=None)
        was, now = base.dims, describe({**small, "model_type": base.family.model_type}, "small").dims
        most = 2 if base.family.model_type in FAMILIES else 4  # others keep every kind of layer that four can have
        assert (now["hidden"] <= 256, now["layers"] <= most, now.get("experts", 0) % 3) == (True, True, 0), name
        assert (now["kv_heads"] == now["heads"]) == (was["kv_heads"] == was["heads"])
        assert ("top_k" in now) == ("top_k" in was)
        assert ("experts" in now) == ("experts" in was)
        assert bool(now.get("q_rank")) == bool(was.get("q_rank"))


def test_a_script_is_planned_and_rendered_but_not_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.yaml"
    script = {"path": str(tmp_path / "train.py"), "output_dir": str(tmp_path)}
    run.write_text(yaml.safe_dump({"kind": "script", "script": script}))
    (tmp_path / "train.py").write_text("print('trained')")
    record = rehearsed(run, "cluster.gpu=cpu")
    assert record.failure is None, record.failure
    assert [phase.name for phase in record.phases] == ["plan", "submit"]
    assert record.not_proved[0]["what"] == "the script itself"
    record.changes.append(Change("data.columns", {"text": "Wörter"}, None, "as rehearsed"))
    print_record(record)
    printed = capsys.readouterr().out
    assert "planned and rendered, not rehearsed" in printed
    assert '{"text": "Wörter"} -> unset' in printed


# --- its own guards


@pytest.fixture
def rehearsal(tmp_path: Path) -> Iterator[Rehearsal]:
    (tmp_path / "logs").mkdir()
    (tmp_path / "run" / "checkpoints" / "step-3").mkdir(parents=True)
    record = RehearsalRecord("run.yaml", ranks={"here": 1, "nodes": 1})
    environ = {"PATH": "/usr/bin:/bin"}
    with contextlib.ExitStack() as processes:
        yield Rehearsal(tmp_path / "run.yaml", [], tmp_path, environ, record, lambda _: None, processes)


def test_an_accelerate_file_counts_in_the_rehearsed_run(rehearsal: Rehearsal, user: Path, tmp_path: Path) -> None:
    """Its precision, beside the layout that is planned of it."""
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nmixed_precision: no\nfsdp_config: {fsdp_version: 2}\n")
    rehearsal.run.write_text(user.read_text().replace("  bf16: false\n", ""))
    rehearsal.accelerate = tmp_path / "fsdp.yaml"
    loaded = rehearsal.load()
    assert isinstance(loaded, Loaded)
    assert not loaded.run.train.in_bf16
    assert loaded.where("train.bf16").startswith(str(tmp_path / "fsdp.yaml"))


def test_failed_command_is_quoted_from_its_error(rehearsal: Rehearsal) -> None:
    script = "echo noise >&2; echo 'error: run.yaml:3: it is wrong' >&2; echo >&2; echo 'hint: mend it' >&2; exit 13"

    def prove(r: Rehearsal) -> Iterator[str]:
        yield "something"
        r.start("load", ["bash", "-c", script]).finish()

    with pytest.raises(Failed):
        rehearsal.stage("load", "", prove)
    text = "error: run.yaml:3: it is wrong\n\nhint: mend it"
    log = str(rehearsal.folder / "logs" / "load.log")
    assert rehearsal.record.failure == {"phase": "load", "exit_code": 2, "text": text, "log": log}
    assert rehearsal.record.phases[0].proved == ["something"]


# name -> (steps in the run folder, launch.sh, the stage that fails, words of the message)
LAUNCHES: dict[str, tuple[list[int], str, Any, str]] = {
    "ends before its time": ([], "echo 'rank 1 was killed' >&2; exit 1", stages.load, "rank 1 was killed"),
    "begins anew": ([1, 2, 3, 1], "exec sleep 20", stages.resume, "did not resume at step 4"),
    "leaves a step out": ([1, 2, 3, 5], "exec sleep 20", stages.resume, "did not resume at step 4"),
    "does a step twice": ([*range(1, STEPS), STEPS - 1, STEPS], "true", stages.finish, "each once"),
    "fails a check": ([], "exit 13", stages.load, "error: host memory: too little\n\nhint: more"),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_failing_launch_script_is_detected(name: str, rehearsal: Rehearsal) -> None:
    steps, script, prove, words = LAUNCHES[name]
    folder = rehearsal.run_folder
    (folder / "launch.sh").write_text(script)
    (folder / "steps-rank0.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    if name == "fails a check":
        failing = {"name": "host memory", "verdict": "fail", "seen": "too little", "where": "", "hint": "more"}
        (folder / "check.json").write_text(json.dumps({"results": [failing]}))
    rehearsal.launch("launch")
    with pytest.raises(Failed, match=re.escape(words)):
        list(prove(rehearsal))


def test_stop_without_checkpoint_is_detected(rehearsal: Rehearsal) -> None:
    (rehearsal.run_folder / "checkpoints" / "step-3").rmdir()
    for code, words in ((75, "no checkpoint is there"), (1, "printed nothing")):
        ready = rehearsal.folder / f"ready-{code}"
        script = f"trap 'exit {code}' TERM; touch {ready}; while :; do sleep 0.05; done"
        (rehearsal.run_folder / "launch.sh").write_text(script)
        rehearsal.launch("launch")
        rehearsal.wait_for(ready.exists)
        with pytest.raises(Failed, match=words):
            list(stages.stop(rehearsal))


def test_error_quotes_the_node_with_the_cause(tmp_path: Path) -> None:
    script = 'if [[ $PET_NODE_RANK == 1 ]]; then echo "error: here" >&2; exit 13; fi; echo "node 1 is gone" >&2; exit 1'
    command = RunningCommand("launch", ["bash", "-c", script], tmp_path, {"PATH": "/usr/bin:/bin"}, node_variables(3))
    with pytest.raises(Failed, match=r"^error: here$") as caught:
        command.finish()
    assert (caught.value.log, command.code) == (tmp_path / "launch-node1.log", 13)


def test_nothing_is_left_running(rehearsal: Rehearsal, tmp_path: Path) -> None:
    def hang(r: Rehearsal) -> Iterator[str]:
        command = RunningCommand("best", ["bash", "-c", "exec sleep 60"], tmp_path, os.environ, limit_seconds=0.3)
        r.processes.callback(command.stop)
        command.finish()
        yield "never"

    with pytest.raises(Failed, match="has not ended within"):
        rehearsal.stage("best", "", hang)
    started = rehearsal.start("launch", ["sleep", "60"])
    rehearsal.processes.close()
    assert started.processes[0].returncode == -signal.SIGTERM
    # A platform's variables reach none of its commands.
    places = {"PET_NNODES": "3", "RANK": "1", "WORLD_SIZE": "3", "NCCL_IB_HCA": "x"}
    made = make_environment({**places, "HOME": "/h", "OMP_NUM_THREADS": "7"}, rehearsal.folder)
    assert not places.keys() & made.keys()
    assert (made["HOME"], made["OMP_NUM_THREADS"], made["CUDA_VISIBLE_DEVICES"]) == ("/h", "7", "")


def test_threads_of_ranks_are_within_the_quota(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stages, supervisor):
        monkeypatch.setattr(module, "count_usable_cpus", lambda: 6)
    started = rehearsal.start("load", ["bash", "-c", "echo $OMP_NUM_THREADS"], ranks=2)
    assert started.finish().out.strip() == "3"
    assert supervisor.make_environments(2, {}, Node())[0]["OMP_NUM_THREADS"] == "3"


def test_rehearsal_refuses_a_folder_with_other_files(user: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    for name in ("thesis.tex", "rehearsal.json", "logs/plan.log"):  # also where an earlier one left its files
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        with pytest.raises(UserError, match=r"contains other files"):
            rehearsed(user, keep=tmp_path)
        assert (tmp_path / "thesis.tex").exists()


def test_recipe_page_lists_every_key_and_ci_files_are_valid() -> None:
    page = (ROOT / "docs" / "rehearse.md").read_text(encoding="utf-8")
    rows = [row for row in page.split("## rehearsal.json")[1].split("##")[0].splitlines() if row.startswith("| `")]
    names = {name for row in rows for name in re.findall("`(\\w+)`", row.split("|")[1])}
    assert names == RehearsalRecord("").as_dict().keys()
    listed = re.findall(r"^\| ([\w, ]+) \|", page.split("## What happens")[1].split("##")[0], re.MULTILINE)
    assert tuple(name for row in listed[1:] for name in row.split(", ")) == STAGES
    github, gitlab = (yaml.safe_load(block.split("```")[0]) for block in page.split("```yaml\n")[1:])
    steps = [step["run"] for step in github["jobs"]["rehearse"]["steps"] if "run" in step]
    for line in (steps[-1], gitlab["rehearse"]["script"][-1]):
        words = line.replace("${{ matrix.run }}", "run.yaml").replace('"$RUN"', "run.yaml").split()
        made = next(c for c in typer.main.get_command(app).commands.values() if c.name == words[1])  # type: ignore[attr-defined]
        made.make_context(words[1], words[2:])
        with pytest.raises(Exception, match="No such option"):
            made.make_context(words[1], [*words[2:], "--kepe", "x"])
