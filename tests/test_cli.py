"""The commands as a user meets them: real processes, what they print, and how they exit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TRAIN = "examples/mistral-small-4/train.yaml"


def windlass(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "windlass", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def planned(*arguments: str) -> dict[str, Any]:
    done = windlass("plan", TRAIN, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_the_published_recipe_planned_without_weights() -> None:
    made = planned()
    assert made["parameters"]["total"] == 118_972_826_624
    assert sum(made["parameters"]["by_part"].values()) == made["parameters"]["total"]
    assert made["adapter"]["trainable"] == 27_463_680
    assert sum(target["parameters"] for target in made["adapter"]["targets"]) == made["adapter"]["trainable"]
    assert made["batch"]["global_sequences"] == 48
    assert made["batch"]["tokens_per_step"] == 48 * 1024
    assert made["memory"]["fits"] is True
    assert {"gpu_gib", "host_gib", "rows", "fits"} <= made["memory"].keys()
    assert {"step_seconds", "tokens_per_second", "mfu", "gpu_hours"} <= made["estimate"].keys()
    assert any("planned from the published config" in note for note in made["notes"])


def test_every_layout_is_listed_with_its_figures_or_its_reason() -> None:
    keys = {"name", "possible", "why_not", "fits", "gpu_gib", "wire_gb_per_step", "step_seconds", "tokens_per_second"}
    layouts = planned()["layouts"]
    for row in layouts:
        assert keys | {"gpu_hours"} <= row.keys()
        assert row["possible"] == (not row["why_not"])
        assert row["step_seconds"] is not None or row["why_not"]
    uneven = next(row for row in layouts if row["name"] == "expert-parallel 3")
    assert not uneven["possible"]
    assert "128 experts" in uneven["why_not"]


def test_experts_adapted_too() -> None:
    more = ("lora.experts=true", "lora.lora_dropout=0", "train.per_device_train_batch_size=16")
    made = planned(*(word for override in more for word in ("--override", override)))
    assert made["adapter"]["trainable"] == 1_084_428_288
    assert made["memory"]["fits"] is False
    assert "gradient_checkpointing" in made["memory"]["remedy"]


def test_a_plan_for_people_ends_with_its_verdict() -> None:
    done = windlass("plan", TRAIN, "--compare", "--explain")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().splitlines()[-1].startswith("fits: ") or "\nfits: " in done.stdout
    for title in ("Parameters", "Adapter", "Memory", "Traffic", "Time (estimate)", "other layouts"):
        assert title in done.stdout


def test_plan_json_is_written_where_out_says(tmp_path: Path) -> None:
    done = windlass("plan", TRAIN, "--json", "--out", str(tmp_path / "new"))
    assert json.loads((tmp_path / "new" / "plan.json").read_text()) == json.loads(done.stdout)


def test_all_problems_at_once_with_places_and_hints(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("train:\n  learning_rat: 1e-4\n  bf16: true\n  fp16: true\nlora:\n  r: 0\n")
    done = windlass("plan", str(run))
    assert done.returncode == 2
    assert done.stdout == ""
    for place in (f"{run}:2: train.learning_rat", f"{run}:4: train.fp16", f"{run}:6: lora.r"):
        assert place in done.stderr
    assert "learning_rate" in done.stderr
    assert done.stderr.count("hint: ") >= 3
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lora.target_modules=[qq_proj]", "qq_proj"),
        ("cluster.gpu=h900", "h900"),
        ("layout={name: expert-parallel, expert_parallel: 3}", "128 experts"),
        ("train.learning_rate=fast", "train.learning_rate"),
        ("train.nothing=1", "train.nothing"),
        ("model.model_name_or_path=/nowhere/Mistral-Smal-4-119B", "Mistral-Small-4-119B-2603"),
        ("cluster.network=null", "cluster.network"),
    ],
)
def test_what_cannot_be_is_found_by_the_plan(override: str, said: str) -> None:
    done = windlass("plan", TRAIN, "--override", override)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_two_sources_that_disagree_name_both_places() -> None:
    done = windlass("plan", TRAIN, "--accelerate", "examples/mistral-small-4/config/fsdp_2xH200.yaml")
    assert done.returncode == 2
    assert "fsdp_2xH200.yaml" in done.stderr
    assert "train.yaml" in done.stderr


def test_a_layer_class_that_the_model_does_not_have() -> None:
    done = windlass("plan", TRAIN, "--accelerate", "examples/mistral-small-4/fsdp-3xH200.yaml")
    assert done.returncode == 2
    assert "Mistral4DecoderLayer" in done.stderr


@pytest.mark.parametrize("preset", ["mistral-small-4", "mistral-small-4-2xh200", "tiny-cpu"])
def test_a_preset_is_a_run_file_that_plans(preset: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(windlass("init", preset).stdout)
    model = [] if "4" in preset else ["--override", "model.model_name_or_path=Llama-3.1-8B"]  # to be made by the user
    done = windlass("plan", str(tmp_path / "run.yaml"), "--json", *model)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layout"]["reason"]


def test_every_preset_is_tried_above() -> None:
    names = [line.split()[0] for line in windlass("init", "--list").stdout.splitlines()]
    assert names == ["mistral-small-4", "mistral-small-4-2xh200", "script", "tiny-cpu"]


def test_the_schema_is_one() -> None:
    schema = json.loads(windlass("schema").stdout)
    assert schema["if"]["properties"]["kind"] == {"const": "script"}
    assert {"model", "lora", "data", "train", "layout", "cluster", "watch"} <= schema["else"]["properties"].keys()
    assert {"script", "layout", "cluster", "watch"} <= schema["then"]["properties"].keys()


@pytest.mark.parametrize("topic", ["fsdp_use_orig_params", "lora.r", "NCCL_TIMEOUT", "full-shard"])
def test_explain_knows_every_kind(topic: str) -> None:
    done = windlass("explain", topic)
    assert done.returncode == 0, done.stderr
    assert topic.rpartition(".")[2] in done.stdout


def test_explain_a_whole_file() -> None:
    done = windlass("explain", "--accelerate", "examples/mistral-small-4/fsdp.yaml", "--json")
    assert len(json.loads(done.stdout)) > 15


def test_version_and_unknown_commands() -> None:
    assert windlass("--version").stdout.startswith("windlass ")
    assert windlass("plam").returncode == 2


@pytest.mark.parametrize(("command", "missing"), [("train", "torch"), ("data", "transformers"), ("demo", "torch")])
def test_a_machine_without_torch_says_what_to_install(command: str, missing: str, tmp_path: Path) -> None:
    block = f"import sys; sys.modules[{missing!r}] = None; from windlass.cli import main"
    run = tmp_path / "run.yaml"
    run.write_text("model: {model_name_or_path: Llama-3.1-8B}\n")
    arguments = [command, "--dir", str(tmp_path / "made")] if command == "demo" else [command, str(run)]
    done = subprocess.run(
        [sys.executable, "-c", f"{block}; main({arguments!r})"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"error: windlass {command}: {missing} is not installed" in done.stderr
    assert "pip install '.[train]'" in done.stderr
    assert "Traceback" not in done.stderr
