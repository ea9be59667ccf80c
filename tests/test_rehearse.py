"""The rehearsal: one from end to end, and every planted fault caught in the phase that is named for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from safetensors.torch import load_file, save_file

from windlass import demo, tiny
from windlass import model as weights
from windlass import plan as planning
from windlass.cli import app
from windlass.errors import UserError
from windlass.hardware import LocalMachine
from windlass.model.published import CONFIGS
from windlass.rehearse import Record, during, make, process, rehearse, reload
from windlass.rehearse import rows as rehearsed_rows
from windlass.rehearse.derived import STEPS, Material, derive
from windlass.rehearse.record import Failed, Phase
from windlass.rehearse.show import show
from windlass.rehearse.sizes import shrunk
from windlass.rehearse.spread import Spread, nodes, spread
from windlass.rehearse.stage import Stage, said
from windlass.runfile import RunFile, read

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "mistral-small-4" / "train.yaml"
PHASES = (
    *("plan", "check", "submit", "data", "twin", "launch", "load", "train", "stop", "resume", "finish"),
    *("best", "export", "merge", "reload"),
)


pytestmark = pytest.mark.timeout(600)  # a whole rehearsal on a machine that does other things as well


class Nobody:
    """A screen that is not there."""

    def begin(self, name: str) -> None: ...
    def tick(self, doing: str) -> None: ...
    def end(self, phase: Phase) -> None: ...


def rehearsed(run: Path, *overrides: str, keep: Path | None = None) -> Record:
    return rehearse(run, overrides=overrides, keep=keep, environ=os.environ, screen=Nobody())


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's run file with everything on this machine: a model in the published layout, data, two ranks."""
    folder = tmp_path_factory.mktemp("rehearse") / "demo"
    return demo.make(folder)


# --- from end to end


@pytest.fixture(scope="module")
def whole(user: Path) -> Iterator[Path]:
    """One whole rehearsal through the command, kept."""
    keep = user.parent / "kept"
    command = [sys.executable, "-m", "windlass", "rehearse", str(user), "--keep", str(keep)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (user.parent / "said").write_text(done.stdout)
    yield keep
    shutil.rmtree(keep)


def test_the_whole_run_is_rehearsed_and_what_it_proved_is_written_down(whole: Path, user: Path) -> None:
    found = json.loads((whole / "rehearsal.json").read_text())
    assert found["passed"]
    assert found["exit_code"] == 0
    assert tuple(phase["name"] for phase in found["phases"]) == PHASES
    assert all(phase["passed"] and phase["seconds"] > 0 and phase["proved"] for phase in found["phases"])
    assert found["ranks"] == {"yours": 2, "here": 2, "nodes": 1, "layout": "full-shard", "why": ""}
    assert found["stand_ins"] == []
    assert found["failure"] is None
    assert found["seconds"] >= sum(phase["seconds"] for phase in found["phases"]) * 0.9
    said = (user.parent / "said").read_text()
    assert all(name in said for name in PHASES)
    assert "passed: rehearsed with 2 ranks, full-shard" in said
    assert "memory: the plan estimates" in said


def test_what_it_says_it_did_is_on_disk(whole: Path) -> None:
    steps = [json.loads(line)["step"] for line in (whole / "run" / "steps-rank0.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    certificate = json.loads((whole / "run" / "load.json").read_text())
    assert certificate["loaded"] == len(certificate["parameters"])
    assert (whole / "run" / "steps-rank1.jsonl").exists()
    assert (whole / "adapter" / "adapter_model.safetensors").exists()
    assert weights.read_base(whole / "merged").quantization is None
    assert weights.read_base(whole / "model").wrapper == "Mistral3ForConditionalGeneration"
    launched = (whole / "logs" / "launch.log").read_text()
    assert "ended with 75" in launched


def test_every_difference_of_the_run_file_is_listed(whole: Path, user: Path) -> None:
    """The two files say the same but for the keys that are named, with both values."""
    yours = read(user).run.model_dump(mode="json")
    here = read(whole / "rehearsal.yaml").run.model_dump(mode="json")
    listed = {change["key"] for change in json.loads((whole / "rehearsal.json").read_text())["changes"]}
    differing = {
        f"{section}.{key}"
        for section, values in yours.items()
        if isinstance(values, dict)
        for key in values
        if values[key] != here[section][key]
    }
    assert differing
    assert differing <= listed


def test_a_merge_that_is_not_what_was_trained_is_found_by_others_libraries(whole: Path, tmp_path: Path) -> None:
    for name in ("model", "adapter", "run"):
        (tmp_path / name).symlink_to(whole / name)
    shutil.copytree(whole / "merged", tmp_path / "merged")
    assert len(reload.main(tmp_path)["proved"]) == 2
    file = next((tmp_path / "merged").glob("model-00001*"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(reload.Differs, match="nats a token from what was trained"):
        reload.main(tmp_path)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(reload.Differs, match="missing keys"):
        reload.main(tmp_path)


def test_a_merge_without_the_adapter_is_found_however_little_was_trained(whole: Path, tmp_path: Path) -> None:
    for name in ("model", "adapter", "run"):
        (tmp_path / name).symlink_to(whole / name)
    shutil.copytree(whole / "merged", tmp_path / "merged")
    base = reload.certified(weights.read_base(whole / "model")).state_dict()
    for file in (tmp_path / "merged").glob("model-*.safetensors"):
        tensors = load_file(file)
        for key in tensors:
            if (name := key.removeprefix("language_model.")) in base:
                tensors[key] = base[name].to(tensors[key].dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    record = json.loads((whole / "merged" / "export.json").read_text())
    record["logits"]["bound_kl"] = 1e9  # as if it had been within the bound
    (tmp_path / "merged" / "export.json").write_text(json.dumps(record))
    with pytest.raises(reload.Differs, match=r"of what the adapter changes in the logits, -?\d% is in"):
        reload.main(tmp_path)


def test_an_export_of_another_adapter_is_found(whole: Path, tmp_path: Path) -> None:
    for name in ("model", "merged", "run"):
        (tmp_path / name).symlink_to(whole / name)
    shutil.copytree(whole / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({key: tensor * (2 if "lora_B" in key else 1) for key, tensor in tensors.items()}, file)
    with pytest.raises(reload.Differs, match="in plain PEFT: logits differ by"):
        reload.main(tmp_path)


TWO_BY_EIGHT = ("cluster.nodes=2", "cluster.gpus_per_node=8")
# Every example run file, and the other layouts and families: name -> (run file, overrides, ranks here, nodes here)
EXAMPLES: dict[str, tuple[Path, tuple[str, ...], int, int]] = {
    "three nodes": (EXAMPLE, (), 3, 3),
    "two nodes": (ROOT / "src/windlass/runfile/presets/mistral-small-4-2xh200.yaml", (), 2, 2),
    "experts split": (EXAMPLE, ("cluster.nodes=2", "layout.name=expert-parallel"), 2, 2),
    "hybrid": (EXAMPLE, (*TWO_BY_EIGHT, "layout.name=hybrid"), 4, 2),
    "llama": (EXAMPLE, ("model.model_name_or_path=Llama-3.1-8B", "cluster.nodes=1", "data.packing=true"), 1, 1),
    "qwen3 moe": (
        EXAMPLE,
        ("model.model_name_or_path=Qwen3-30B-A3B", "cluster.nodes=2", "lora.target_modules=all-linear"),
        2,
        2,
    ),
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
    assert [phase.name for phase in record.phases] == list(PHASES)
    assert any(text.startswith("data: ") for text in record.stand_ins)
    assert any(text.startswith("tokenizer and chat template: ") for text in record.stand_ins)
    assert {"GPU memory", "NCCL and GPUs"} <= {each["what"] for each in record.not_proved}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_run_in_small_is_planned_as_the_run_is(name: str, tmp_path: Path) -> None:
    """Without being run: the same layout, targets and schedule, on the ranks and the twin that it would have."""
    run, overrides, _, count = EXAMPLES[name]
    loaded = read(run, overrides)
    own = planning.make(loaded)
    here, _ = spread(own.as_dict()["layout"], LocalMachine((), 2, 24, None))
    sizes = shrunk(own.base, experts_over=here.expert_parallel, vocab=None)
    tiny.write_like(own.base, sizes, tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "some words of a row"}\n' * 40)
    made = material(model=tmp_path / "model", data=tmp_path / "data")
    derived = derive(loaded.run, own.as_dict(), here, made, tmp_path / "run", count)
    (tmp_path / "run.yaml").write_text(derived.text())
    small = planning.make(read(tmp_path / "run.yaml"))
    for key in ("name", "reshard_after_forward", "base_dtype", "precision"):
        assert getattr(small.layout, key) == getattr(own.layout, key), key
    assert not small.layout.offload
    assert (small.layout.ranks, small.layout.nodes) == (here.ranks, count)
    leaves = [{module.rpartition(".")[2] for module in plan.adapter.target_modules} for plan in (small, own)]
    assert leaves[0] == leaves[1]
    assert small.loaded.run.train.learning_rate == own.loaded.run.train.learning_rate
    assert small.schedule.steps == STEPS


# --- planted faults: in the run file and the checkpoint


def caught(record: Record, phase: str, words: str, code: int) -> None:
    assert record.failure is not None
    assert record.failure["phase"] == phase
    assert words in record.failure["text"], record.failure["text"]
    assert record.exit_code == record.failure["exit_code"] == code
    assert [each.name for each in record.phases if not each.passed] == [phase]
    assert record.phases[-1].name == phase
    assert record.folder is record.failure["log"] is None  # it is all told, and nothing is left behind


SMALL_EXPERTS = ("layout={name: expert-parallel}", "cluster.gpus_per_node=3")
# name -> (overrides, the phase that catches it, words of the message, exit code)
FAULTS: dict[str, tuple[tuple[str, ...], str, str, int]] = {
    "an unknown key": (("train.learning_rat=1",), "plan", "did you mean learning_rate?", 2),
    "a target that is not there": (("lora.target_modules=[qkv]",), "plan", "'qkv' matches no module", 2),
    "3 ranks for 8 experts": (SMALL_EXPERTS, "plan", "8 experts do not split evenly over 3 ranks", 2),
    "no such model": (("model.model_name_or_path=nowhere",), "plan", "there is no folder 'nowhere'", 2),
    "a run folder inside a file": (("train.output_dir={user}/x",), "check", "run.yaml is a file", 2),
    "a column that is not there": (("data.text_field=content",), "check", "the data have no column 'content'", 1),
}
NO_FOLDER = {"an unknown key", "a run folder inside a file"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_run_file_is_caught(name: str, user: Path, tmp_path: Path) -> None:
    """And takes an older record's place, where the run file says which folder that is."""
    (tmp_path / "rehearsal.json").write_text(json.dumps({"passed": True}))
    overrides, phase, words, code = FAULTS[name]
    given = (f"train.output_dir={tmp_path}", *(text.replace("{user}", str(user)) for text in overrides))
    caught(rehearsed(user, *given), phase, words, code)
    found = json.loads((tmp_path / "rehearsal.json").read_text())
    assert found["passed"] is (name in NO_FOLDER)


@pytest.fixture
def copied(user: Path, tmp_path: Path) -> Path:
    """The model's folder, to be damaged."""
    shutil.copytree(user.parent / "model", tmp_path / "model")
    return tmp_path / "model"


def test_a_checkpoint_without_a_shard_is_caught(user: Path, tmp_path: Path) -> None:
    tiny.write(tmp_path / "model", files=3)
    (tmp_path / "model" / "model-00002-of-00003.safetensors").unlink()
    record = rehearsed(user, f"model.model_name_or_path={tmp_path / 'model'}")
    caught(record, "plan", "names 1 of 3 files that are not there", 2)


def test_a_checkpoint_without_a_scale_is_caught(user: Path, copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    del tensors["language_model.model.layers.0.mlp.experts.down_proj_scale_inv"]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    caught(rehearsed(user, f"model.model_name_or_path={copied}"), "plan", "FP8 weights without a scale", 2)


def test_a_run_folder_that_holds_a_finished_run_is_caught(user: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"state": "finished"}))
    (tmp_path / "rehearsal.json").write_text("of that run")
    caught(rehearsed(user, f"train.output_dir={tmp_path}"), "check", "holds a finished run", 2)
    assert (tmp_path / "rehearsal.json").read_text() == "of that run"


# --- planted faults: in the data and the tokenizer


CHAT = ("data.messages_field=messages",)


def talks(folder: Path, answer: str = "It is a thing that is told about at some length.") -> Path:
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": answer}]
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    (folder / "validation.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
    return folder


def make_data(user: Path, tmp_path: Path, *overrides: str) -> dict[str, Any]:
    """The phase `data` in this process: what it says, or its error."""
    said = [f"data.dataset_name_or_path={talks(tmp_path / 'talks')}", *CHAT, *overrides]
    loaded = read(user, said)
    checkpoint = weights.find_base(loaded.run.model.model_name_or_path, "model")
    tokenizer, stand_in = make.tokenizer_of(checkpoint, loaded, tmp_path / "twin")
    return rehearsed_rows.take(loaded, checkpoint, tokenizer, tmp_path / "rows", 16, own=stand_in is None)


def test_sound_chats_are_taken(user: Path, tmp_path: Path) -> None:
    found = make_data(user, tmp_path)
    assert found["end"] == "40 of 40 rows end with a token that generation stops at"
    assert found["stand_ins"] == []
    assert found["length"] == 128
    assert len((tmp_path / "rows" / "train.jsonl").read_text().splitlines()) == found["rows"] == 40


def test_a_template_without_end_of_turn_is_caught(user: Path, copied: Path, tmp_path: Path) -> None:
    """Through the whole command: the phase is named, the user's place, and what to do."""
    path = copied / "chat_template.jinja"
    path.write_text(path.read_text().replace(" + eos_token", ""))
    data = talks(tmp_path / "talks")
    chat = [f"model.model_name_or_path={copied}", f"data.dataset_name_or_path={data}", *CHAT]
    record = rehearsed(user, *chat)
    assert record.failure is not None
    assert "--override data.messages_field=messages" in record.failure["text"]
    assert "hint: let the template close the assistant's turn with eos_token" in record.failure["text"]
    caught(record, "data", "the chat template writes no end of turn: 0 of 40 rows", 2)


@pytest.mark.parametrize("named", [3, [3, 4]])
def test_a_wrong_end_token_is_caught(user: Path, copied: Path, tmp_path: Path, named: Any) -> None:
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    with pytest.raises(UserError, match=r"rows end with '</s>' \(2\), and generation stops at '\[INST\]' \(3\)"):
        make_data(user, tmp_path, f"model.model_name_or_path={copied}")


def test_prompts_that_leave_no_room_for_an_answer_are_caught(user: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no row of train has a supervised token: of 40 rows"):
        make_data(user, tmp_path, "data.max_length=6")


def test_an_empty_split_is_caught(user: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\[:0\] has no rows"):
        make_data(user, tmp_path, "data.train_split=train[:0]")
    with pytest.raises(UserError, match=r"validation\[5:5\] has no rows"):
        make_data(user, tmp_path, "data.val_split=validation[5:5]")


def test_an_answer_behind_a_long_prompt_keeps_its_place(user: Path, tmp_path: Path) -> None:
    """The rehearsal's sequences are short, but not so short that nothing is left to learn."""
    data = tmp_path / "long"
    data.mkdir()
    row = {"prompt": "word " * 900, "completion": "an answer"}
    (data / "train.jsonl").write_text((json.dumps(row) + "\n") * 40)
    said = [f"data.dataset_name_or_path={data}", "data.prompt_field=prompt", "data.completion_field=completion"]
    said += ["data.val_split=null"]
    found = make_data(
        user, tmp_path, *said, "data.messages_field=null", "data.max_length=4096", "train.eval_strategy=no"
    )
    assert found["length"] > 900


def test_a_vocabulary_that_is_too_small_is_caught(user: Path, copied: Path, tmp_path: Path) -> None:
    tiny.write_tokenizer(copied, 2048)
    with pytest.raises(UserError, match="the model's vocabulary ends at 1023"):
        make_data(user, tmp_path, f"model.model_name_or_path={copied}", f"data.dataset_name_or_path={user.parent}/data",
                  "data.messages_field=null")  # fmt: skip


@pytest.mark.parametrize(
    ("section", "columns"),
    [
        ({"text_field": "body"}, {"body"}),
        ({"messages_field": "talk"}, {"talk"}),
        ({"prompt_field": "q", "completion_field": "a"}, {"q", "a"}),
        ({"prompt_template": "{q} {r!s} [[{answers[text][0]}]]"}, {"q", "r", "answers"}),
    ],
)
def test_stand_ins_have_the_columns_that_the_data_section_asks_for(
    section: dict[str, str], columns: set[str], tmp_path: Path
) -> None:
    run = tmp_path / "run.yaml"
    name = "Mistral-Small-4-119B-2603"
    data = {"dataset_name_or_path": "/no/such/volume/set", **section}
    run.write_text(yaml.safe_dump({"model": {"model_name_or_path": name}, "data": data}))
    loaded = read(run)
    checkpoint = weights.find_base(name, "model")
    tokenizer, stand_in = make.tokenizer_of(checkpoint, loaded, tmp_path / "twin")
    found = rehearsed_rows.take(loaded, checkpoint, tokenizer, tmp_path / "rows", 16, own=False)
    assert stand_in is not None
    assert set(found["columns"]) == columns
    assert "/no/such/volume/set is not on this machine" in found["stand_ins"][0]


# --- the run in small


def material(**more: Any) -> Material:
    return Material(
        **{"model": Path("m"), "data": Path("d"), "validation": True, "length": 64, "rows": 40, "layers": 2, **more}
    )


PLAN: dict[str, Any] = {
    "layout": {
        "name": "full-shard", "shard": 3, "replicate": 1, "expert_parallel": 1, "reshard_after_forward": True,
        "base_dtype": "bf16", "offload": False, "activation_checkpointing": False,
    },
    "adapter": {"targets": []},
    "batch": {"micro": 1, "accumulation": 16},
}  # fmt: skip


def test_names_of_layers_that_the_twin_lacks_become_those_it_has() -> None:
    modules = ["model.layers.30.self_attn.q_proj", "model.layers.31.self_attn.q_proj"]
    targets = [{"pattern": "31.self_attn.q_proj", "matched": modules[1:], "part": "attention"},
               {"pattern": "o_proj", "matched": ["model.layers.0.self_attn.o_proj"], "part": "attention"}]  # fmt: skip
    run = RunFile.model_validate({"lora": {"target_modules": ["31.self_attn.q_proj", "o_proj"]}})
    made = derive(run, {**PLAN, "adapter": {"targets": targets}}, Spread(3, 1, 1), material(), Path("out"))
    assert made.tree["lora"]["target_modules"] == ["q_proj", "o_proj"]
    assert [change.yours for change in made.changes if change.key == "lora.target_modules"] == [
        ["31.self_attn.q_proj", "o_proj"]
    ]


def test_what_only_gpus_or_other_machines_have_is_changed_and_said() -> None:
    run = RunFile.model_validate(
        {
            "model": {"torch_dtype": "float16", "attn_implementation": "flash_attention_2"},
            "train": {"bf16": False, "fp16": True, "report_to": "wandb", "warmup_steps": 100, "save_steps": 400},
            "cluster": {
                "nodes": 3,
                "image": "x",
                "env": {"NCCL_IB_HCA": "mlx5", "A": "b", "T": {"secret": "s", "key": "k"}},
            },
        }
    )
    made = derive(run, PLAN, Spread(3, 1, 1), material(), Path("out"))
    small = RunFile.model_validate(made.tree)
    assert (small.model.torch_dtype, small.model.attn_implementation, small.train.fp16) == ("float32", "sdpa", False)
    assert (small.train.report_to, small.train.warmup_steps) == ("none", STEPS // 4)
    assert small.train.save_steps == 2 * small.train.eval_steps
    assert small.cluster.env == {"A": "b"}
    said = {change.key: change.why for change in made.changes}
    assert {"model.torch_dtype", "train.fp16", "train.report_to", "cluster.image", "cluster.env"} <= said.keys()
    assert all(said.values())


@pytest.mark.parametrize(
    ("own", "cpus", "gib", "here"),
    [
        ((3, 1, 1), 2, 24, (3, 1, 1)),
        ((16, 1, 1), 2, 24, (4, 1, 1)),
        ((16, 1, 1), 8, 24, (8, 1, 1)),
        ((1, 16, 1), 2, 24, (1, 4, 1)),
        ((8, 2, 1), 2, 24, (2, 2, 1)),
        ((8, 2, 8), 2, 24, (2, 2, 2)),
        ((8, 1, 2), 2, 24, (4, 1, 2)),
        ((16, 1, 16), 2, 24, (4, 1, 4)),
        ((16, 1, 1), 32, 3, (2, 1, 1)),
    ],
)
def test_as_many_ranks_as_fit_share_the_model_as_the_run_does(
    own: tuple[int, int, int], cpus: int, gib: float, here: tuple[int, int, int]
) -> None:
    layout = dict(zip(("shard", "replicate", "expert_parallel"), own, strict=True))
    made, why = spread(layout, LocalMachine((), cpus, gib, None))
    assert (made.shard, made.replicate, made.expert_parallel) == here
    assert bool(why) == (own != here)


@pytest.mark.parametrize(("own", "ranks", "here"), [(1, 4, 1), (3, 3, 3), (2, 16, 2), (3, 4, 2), (8, 4, 4), (5, 3, 3)])
def test_nodes_are_played_where_ranks_divide_among_them(own: int, ranks: int, here: int) -> None:
    assert nodes(own, ranks) == here


@pytest.mark.parametrize("name", CONFIGS)
def test_every_known_model_has_a_small_config_of_its_kind(name: str) -> None:
    checkpoint = weights.published_base(name)
    assert checkpoint is not None
    small = shrunk(checkpoint, experts_over=3, vocab=None)
    described = weights.config.describe({**small, "model_type": checkpoint.family.model_type}, "small")
    was, now = checkpoint.dims, described.dims
    assert now["hidden"] <= 256
    assert now["layers"] == 2
    assert (now["kv_heads"] == now["heads"]) == (was["kv_heads"] == was["heads"])
    assert now.get("experts", 0) % 3 == 0
    assert now.get("top_k", 0) == was.get("top_k", 0)
    assert bool(now["moe_layers"]) == bool(was["moe_layers"])
    assert bool(now.get("q_rank")) == bool(was.get("q_rank"))


def test_the_twin_of_a_checkpoint_spells_names_as_it_does(tmp_path: Path) -> None:
    """Converters write a wrapper's names in two ways."""
    tiny.write(tmp_path / "one", files=1, tokenizer=False)
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    renamed = {}
    for key, tensor in tensors.items():
        ours = next((pair for pair in tiny.NESTED if key.startswith(pair[0])), None)
        renamed[key.replace(ours[0], ours[1], 1) if ours else key] = tensor
    save_file(renamed, tmp_path / "one" / "model.safetensors", metadata={"format": "pt"})
    checkpoint = weights.read_base(tmp_path / "one")
    tiny.write_like(checkpoint, shrunk(checkpoint, experts_over=2, vocab=None), tmp_path / "other")
    other = weights.read_base(tmp_path / "other")
    keys = [{p.pieces[0].stored.key for p in each.parameters if ".layers.1." in p.name} for each in (checkpoint, other)]
    assert keys[0] == keys[1]
    assert all(key.startswith("model.language_model.") for key in keys[0])


def test_a_script_is_planned_and_rendered_and_what_is_not_rehearsed_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        yaml.safe_dump({"kind": "script", "script": {"path": str(tmp_path / "train.py"), "output_dir": str(tmp_path)}})
    )
    (tmp_path / "train.py").write_text("print('trained')")
    record = rehearsed(run, "cluster.gpu=cpu")
    assert record.failure is None, record.failure
    assert [phase.name for phase in record.phases] == ["plan", "submit"]
    assert record.not_proved[0]["what"] == "the script itself"
    show(record)
    assert "planned and rendered, not rehearsed" in capsys.readouterr().out


# --- its own guards


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    (tmp_path / "logs").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    record = Record("run.yaml", ranks={"here": 1, "nodes": 1})
    return Stage(tmp_path / "run.yaml", [], tmp_path, {"PATH": "/usr/bin:/bin"}, record, Nobody())


def stepped(stage: Stage, steps: list[int]) -> None:
    text = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps)
    (stage.rehearsal / "steps-rank0.jsonl").write_text(text)


def test_a_command_that_fails_is_quoted_from_its_error_on(stage: Stage) -> None:
    script = "echo noise >&2; echo 'error: run.yaml:3: it is wrong' >&2; echo >&2; echo 'hint: mend it' >&2; exit 13"
    with pytest.raises(Failed) as found, stage.phase("load"):
        stage.call("load", ["bash", "-c", script])
    assert found.value.text == "error: run.yaml:3: it is wrong\n\nhint: mend it"
    assert stage.record.failure == {
        "phase": "load", "exit_code": 2, "text": found.value.text, "log": str(stage.logs / "load.log")
    }  # fmt: skip


def test_a_script_that_ends_before_its_time_has_failed(stage: Stage) -> None:
    starting = stage.started("launch", ["bash", "-c", "echo 'rank 1 was killed' >&2; exit 1"])
    with starting as running, pytest.raises(Failed, match="rank 1 was killed"):
        during.load(stage, running, stage.rehearsal)


@pytest.mark.parametrize(("steps", "told"), [([1, 2, 3, 1], "did not resume at step 4"), ([1, 2, 3, 5], "step 4")])
def test_a_run_that_begins_anew_is_not_taken_for_resumed(stage: Stage, steps: list[int], told: str) -> None:
    stepped(stage, steps)
    with stage.started("resume", ["sleep", "20"]) as running, pytest.raises(Failed, match=told):
        during.resume(stage, running, stage.rehearsal, 3)


def test_steps_that_are_done_twice_are_seen(stage: Stage) -> None:
    stepped(stage, [*range(1, STEPS), STEPS - 1, STEPS])
    with stage.started("resume", ["true"]) as running, pytest.raises(Failed, match="each once"):
        during.finish(stage, running, stage.rehearsal)


def test_a_stop_without_a_checkpoint_or_with_another_code_is_seen(stage: Stage) -> None:
    for code, told in ((75, "no checkpoint is there"), (1, "said nothing")):
        script = f"trap 'exit {code}' TERM; touch {stage.folder}/ready; while :; do sleep 0.05; done"
        with stage.started("launch", ["bash", "-c", script]) as running:
            while not (stage.folder / "ready").exists():
                time.sleep(0.01)
            with pytest.raises(Failed, match=told):
                during.stop(stage, running, stage.rehearsal)


def test_checks_that_fail_in_the_script_are_told(stage: Stage) -> None:
    failing = {"name": "host memory", "verdict": "fail", "seen": "too little", "where": "", "hint": "more"}
    (stage.rehearsal / "check.json").write_text(json.dumps({"results": [failing]}))
    with stage.started("launch", ["bash", "-c", "exit 13"]) as running, pytest.raises(Failed) as found:
        during.until(stage, running, (stage.rehearsal / "load.json").exists)
    assert (found.value.text, found.value.code) == ("error: host memory: too little\n\nhint: more", 2)


def test_the_node_that_says_why_is_quoted(stage: Stage) -> None:
    script = 'if [[ $PET_NODE_RANK == 1 ]]; then echo "error: here" >&2; exit 13; fi; echo "node 1 is gone" >&2; exit 1'
    environ = {"PATH": "/usr/bin:/bin"}
    with process.started("launch", ["bash", "-c", script], stage.logs, environ, process.places(3)) as running:
        ended = running.ended(lambda: None)
    assert (ended.log.name, ended.code) == ("launch-node1.log", 13)
    assert said(ended) == "error: here"


def test_a_command_that_does_not_end_is_ended(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LIMIT_SECONDS", 0.3)
    with pytest.raises(Failed, match="has not ended within"), stage.phase("best"):
        stage.call("best", ["bash", "-c", f"echo $$ > {stage.folder}/pid; exec sleep 60"])
    assert stage.record.failure is not None
    pid = int((stage.folder / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_nothing_is_left_running_when_it_is_interrupted(stage: Stage) -> None:
    with pytest.raises(KeyboardInterrupt), stage.started("launch", ["sleep", "60"]) as running:
        raise KeyboardInterrupt
    assert running.processes[0].returncode == -signal.SIGTERM


def test_a_folder_with_other_files_is_not_kept_in(user: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    for beside in ((), ("rehearsal.json",), ("logs/plan.log",)):  # also where an earlier one lies
        for name in beside:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        with pytest.raises(UserError, match=r"holds other files"):
            rehearsed(user, keep=tmp_path)
        assert (tmp_path / "thesis.tex").exists()


def test_platforms_words_do_not_reach_the_rehearsal(tmp_path: Path) -> None:
    given = {
        "PET_NNODES": "3",
        "RANK": "1",
        "WORLD_SIZE": "3",
        "NCCL_IB_HCA": "x",
        "HOME": "/h",
        "OMP_NUM_THREADS": "7",
    }
    made = process.environment(given, 2, tmp_path)
    assert not {"PET_NNODES", "RANK", "WORLD_SIZE", "NCCL_IB_HCA"} & made.keys()
    assert (made["HOME"], made["OMP_NUM_THREADS"], made["CUDA_VISIBLE_DEVICES"]) == ("/h", "7", "")


def test_its_page_has_every_key_and_its_ci_files_call_what_there_is() -> None:
    page = (ROOT / "docs" / "rehearse.md").read_text(encoding="utf-8")
    table = page.split("## rehearsal.json")[1].split("##")[0]
    documented = {
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall("`(\\w+)`", row.split("|")[1])
    }
    assert documented == Record("run.yaml").as_dict().keys()
    github, gitlab = (yaml.safe_load(block.split("```")[0]) for block in page.split("```yaml\n")[1:])
    steps = [step["run"] for step in github["jobs"]["rehearse"]["steps"] if "run" in step]
    for line in (steps[-1], gitlab["rehearse"]["script"][-1]):
        words = line.replace("${{ matrix.run }}", "run.yaml").replace('"$RUN"', "run.yaml").split()
        made = next(c for c in typer.main.get_command(app).commands.values() if c.name == words[1])  # type: ignore[attr-defined]
        made.make_context(words[1], words[2:], resilient_parsing=True)
        with pytest.raises(Exception, match="No such option"):
            made.make_context(words[1], [*words[2:], "--kepe", "x"])


def test_it_imports_no_torch_itself() -> None:
    script = "import sys; import windlass.rehearse, windlass.rehearse.show; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
