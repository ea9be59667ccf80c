"""Training with the base held in FP8 is training with the same weights in 16 or 32 bits: whole runs over gloo."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from windlass import tiny
from windlass.train.again import again

test_train = importlib.import_module("test_train")  # beside this file: its run file, and how ranks are started
pytestmark = pytest.mark.xdist_group("fp8 run")
STEPS = 20
MODELS: dict[str, dict[str, Any]] = {
    "published": {"experts": 4},
    # Experts stored one by one, blocks that their sides are no multiples of.
    "blocks": {"family": "qwen3_moe", "quantization": "block128", "experts": 4, "hidden": 160, "moe_intermediate": 144},
}


def case(model: str, base: str, layout: str = "resident", **rest: Any) -> dict[str, Any]:
    found: dict[str, Any] = test_train.case(
        2,
        layout=layout,
        model__model_name_or_path=f"{{folder}}/{model}",
        layout__base_dtype=base,
        train__learning_rate=0.001,
        train__lr_scheduler_type="constant",  # the first steps of a run are the same however many follow
        **{**test_train.EXPERTS, **rest},
    )
    return found


SPLIT: dict[str, Any] = {"layout": "expert-parallel", "layout__expert_parallel": 2}
BRIEF: dict[str, Any] = {"train__max_steps": 6}
BF16: dict[str, Any] = {"model__torch_dtype": "bfloat16", "train__max_steps": 6}
SAVING: dict[str, Any] = {"train__output_dir": "{out}/in two parts", **test_train.SAVING, **test_train.HELD_OUT}
CASES = {
    "published": case("published", "bf16"),
    "published resident": case("published", "fp8"),
    "published full-shard": case("published", "fp8", layout="full-shard", **BRIEF),
    "blocks": case("blocks", "bf16"),
    "blocks resident": case("blocks", "fp8"),
    "blocks checkpointing": case("blocks", "fp8", **SPLIT, train__gradient_checkpointing=True, **BRIEF),
}
MORE = {
    "published": case("published", "bf16", **BRIEF),
    "published accumulated": case("published", "fp8", layout="no-reshard", accumulation=2, **BRIEF),
    "published expert-parallel": case("published", "fp8", **SPLIT, **BRIEF),
    "published checkpointing": case("published", "fp8", train__gradient_checkpointing=True, **BRIEF),
    "narrow": case("published", "bf16", **BF16),
    "narrow full-shard": case("published", "fp8", layout="full-shard", **BF16),
    "interrupted": case("published", "fp8", layout="full-shard", faults=["terminate"], train__max_steps=10, **SAVING),
    "resumed": case("published", "fp8", layout="full-shard", resume=True, train__max_steps=10, **SAVING),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return runs(tmp_path_factory.mktemp("fp8"), CASES)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return runs(tmp_path_factory.mktemp("fp8"), MORE)


def runs(folder: Path, wanted: dict[str, dict[str, Any]]) -> Any:
    for name, options in MODELS.items():
        tiny.write(folder / name, **options)
    (folder / "data").mkdir()
    chance, words = random.Random(0), test_train.WORDS.split()
    rows = [" ".join(chance.choices(words, k=chance.randint(3, 12))) for _ in range(240)]
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    run_file = test_train.RUN.format(folder=folder, steps=STEPS).replace("warmup_ratio: 0.1", "warmup_ratio: 0")
    (folder / "run.yaml").write_text(run_file)
    cases = {
        name: {**each, "overrides": [text.replace("{folder}", str(folder)) for text in each["overrides"]]}
        for name, each in wanted.items()
    }
    return test_train.launched(folder, 2, cases)


def numbers(steps: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(step["loss"], step["grad_norm"]) for step in steps]


def compare(outcomes: Any, name: str) -> None:
    """Each product is the same bit for bit (test_fp8.py); whole steps differ in the last digit, if at all."""
    assert outcomes[name].get("error") is None
    reference, steps = outcomes.steps(name.split()[0]), outcomes.steps(name)
    assert len(steps) == (STEPS if "resident" in name else 6)
    exact = 5e-3 if name.startswith("narrow") else 1e-6
    for mine, wanted in zip(numbers(steps), numbers(reference), strict=False):
        assert mine == pytest.approx(wanted, rel=exact)


@pytest.mark.parametrize("name", [name for name in CASES if " " in name])
def test_in_fp8_it_is_the_same_training(two: Any, name: str) -> None:
    compare(two, name)


@pytest.mark.prove
@pytest.mark.parametrize("name", [name for name in MORE if " " in name])
def test_in_fp8_it_is_the_same_training_in_more_ways(more: Any, name: str) -> None:
    compare(more, name)


def test_the_models_differ_and_learn(two: Any) -> None:
    for name in MODELS:
        losses = [step["loss"] for step in two.steps(name)]
        assert losses[-1] < losses[0] - 0.1
    assert two.steps("published")[0]["loss"] != two.steps("blocks")[0]["loss"]


def test_sharded_in_fp8_is_sharded(two: Any) -> None:
    for name in ("published full-shard", "blocks checkpointing"):
        assert two[name]["placements"]["whole"] == 0
    assert two["published resident"]["placements"]["sharded"] == 0


@pytest.mark.prove
def test_an_interrupted_run_goes_on_where_it_was(more: Any) -> None:
    assert more["interrupted"]["code"] == 75
    assert more["resumed"]["code"] == 0
    steps = more.steps("in two parts")
    assert [step["step"] for step in steps] == list(range(1, 11))
    folder = Path(more.folder) / "in two parts"
    assert again(folder, eval_data=None, ranks=1).run.layout.base_dtype == "fp8"  # what `windlass best --ranks 1` runs
    saved = json.loads((folder / "load.json").read_text())
    assert "float8_e4m3fn" in {each["dtype"] for each in saved["parameters"]}
