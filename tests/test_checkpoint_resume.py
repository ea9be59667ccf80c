"""Runs interrupted in every way and resumed as if they had not been: real ranks over gloo, bit for bit."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train import WORDS, Outcomes, launched, write_run
from text_run import write_rows

from windlass import tiny
from windlass.errors import SAVED
from windlass.files import read_json, read_json_lines
from windlass.observe import report
from windlass.run_folder import ADAPTER, read_manifest
from windlass.train.checkpoint.folder import find_damage, list_checkpoints, read_step

pytestmark = pytest.mark.xdist_group("checkpoint resume")

STEPS = 12

Case = dict[str, Any]


def case(out: str, *faults: str, resume: bool = False, damage: dict[str, str] | None = None, **keys: Any) -> Case:
    overrides = {"train.output_dir": f"{{out}}/{out}"} | {key.replace("__", "."): value for key, value in keys.items()}
    printed = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()]
    return {"overrides": printed, "faults": list(faults), "resume": resume, "damage": damage or {}}


def resumed(cut: str, out: str, **keys: Any) -> Case:
    """Resume a copy of an interrupted run."""
    return case(out, resume=True, **keys) | {"copy": [f"{{out}}/{cut}", f"{{out}}/{out}"]}


PACKED: Case = {"data__packing": True, "data__max_length": 24}
STREAM: Case = {"data__streaming": True, "train__per_device_train_batch_size": 2}
TWO_STREAM: Case = {**STREAM, **PACKED, "train__gradient_accumulation_steps": 2}
SAME: Case = {"lora__lora_dropout": 0}
SPLIT: Case = {"layout__name": "expert-parallel", "layout__expert_parallel": 2}
FULL: Case = {"lora__modules_to_save": ["embed_tokens", "lm_head"]}
EXPERTS: Case = {**SAME, **FULL, "lora__experts": {"r": 2, "lora_alpha": 4}}

ALTERED = {"{folder}/model/model.safetensors": "flip"}  # one bit, where no sample of the files is taken

TWO: dict[str, Case] = {
    "plain": case("plain"),
    "plain, cut": case("plain cut", "signal at 6"),  # the end of an epoch
    "plain, resumed": resumed("plain cut", "plain parts"),
    "plain, on other bases": case("plain") | {"best": True, "base_dtypes": ["nf4"]},
    "packed stream": case("packed stream", **TWO_STREAM),
    "packed stream, cut": case("packed stream parts", "signal at 7", **TWO_STREAM),
    "packed stream, resumed": case("packed stream parts", resume=True, **TWO_STREAM),
    "evaluation, cut": case("evaluation parts", "signal in evaluation"),
    "evaluation, resumed": case("evaluation parts", train__resume="auto"),
    "last step, cut": case("last parts", "signal in the last step"),
    "last step, resumed": case("last parts", resume=True),
    "disk full for a while": case("disk", "disk full at 5", "disk emptied at 9"),
    "disk full, and a signal": case("full", "disk full at 1", "signal at 7"),
    "poisoned": case("poisoned", "nan 10"),
    "another run": case(
        "poisoned",
        resume=True,
        train__learning_rate=0.02,
        lora__lora_alpha=4,
        layout__base_dtype="nf4",
        train__per_device_train_batch_size=2,
    ),
    "newest damaged": case("poisoned", resume=True, damage={"{out}/poisoned/checkpoints/step-8/optimizer.pt": "flip"}),
    "experts": case("experts", **EXPERTS, **SPLIT),
    "experts, cut": case("experts cut", "signal at 7", **EXPERTS, **SPLIT),
    "experts, other layout": resumed("experts cut", "experts sharded", **EXPERTS),
    "experts, resumed": resumed("experts cut", "experts parts", **EXPERTS, **SPLIT),
    "experts, best": case(
        "experts best", "spoilt 0", "spoilt 1", train__load_best_model_at_end=True, **EXPERTS, **SPLIT
    ),
    "other rows": case("plain cut", resume=True, data__dataset_name_or_path="{folder}/model/../other"),
    "fewer epochs": case("plain cut", resume=True, train__max_steps=-1, train__num_train_epochs=0.1),
    "base, altered": case("plain cut", resume=True, damage=ALTERED),
    "adapter, altered": case("adapter", lora__adapter="{out}/plain/final"),
    "best, altered": case("plain") | {"best": True},
    "base, accepted": resumed("plain cut", "base parts") | {"allow_other_base": True},
    "base, put back": case("adapter", damage=ALTERED, lora__adapter="{out}/plain/final", train__max_steps=2),
}  # fmt: skip
ALONE: Case = {"layout__name": "resident", "cluster__gpus_per_node": 1, "train__per_device_train_batch_size": 8}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    tiny.write_model(folder / "model", experts=4)
    chance = random.Random(0)
    for name in ("data", "other"):
        (folder / name).mkdir()
        for split, count in (("train", 47), ("validation", 9)):  # 47: the last step of an epoch is a row short
            rows = [{"text": " ".join(chance.choices(WORDS.split(), k=chance.randint(3, 12)))} for _ in range(count)]
            write_rows(folder / name / f"{split}.jsonl", rows)
    train: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 2}
    train |= {"gradient_accumulation_steps": 1, "learning_rate": 0.01, "eval_steps": 4, "save_steps": 4}
    train |= {"eval_strategy": "steps", "save_strategy": "steps", "max_grad_norm": 1}
    write_run(
        folder / "run.yaml",
        lora__lora_dropout=0.1,
        data__val_split="validation",
        layout="full-shard",
        cluster={"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
        **{f"train__{key}": value for key, value in train.items()},
    )
    return folder


@pytest.fixture(scope="module")
def two(material: Path) -> Outcomes:
    return launched(material, 2, TWO, script="checkpoint_ranks.py")


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / ADAPTER)


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = adapter(one), adapter(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def steps(run: Path) -> list[tuple[Any, ...]]:
    lines = read_json_lines(run / "steps-rank0.jsonl")
    return [tuple(line[key] for key in ("step", "loss", "grad_norm", "learning_rate")) for line in lines]


def evaluations(run: Path) -> dict[int, tuple[float, float]]:
    """Return each evaluation's loss, and the tokens trained on before it."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {line["step"]: (line["eval_loss"], line["eval_num_tokens"]) for line in lines if line["kind"] == "eval"}


@pytest.mark.parametrize("name", ["plain", "packed stream", "evaluation", "last step", "experts"])
def test_resumed_equals_uninterrupted(two: Outcomes, name: str) -> None:
    assert codes(two, f"{name}, cut") == [SAVED] * 2
    assert codes(two, f"{name}, resumed") == [0, 0]
    whole, parts = (
        two.folder / run for run in (name if name in TWO else "plain", f"{name.removesuffix(' step')} parts")
    )
    assert_same_bits(whole / "final", parts / "final")
    assert steps(parts) == steps(whole)
    assert len(steps(whole)) == STEPS
    assert evaluations(parts) == evaluations(whole)
    assert {read_step(f) for f in list_checkpoints(parts / "checkpoints")} >= {8, 12}


def codes(of: Outcomes, name: str) -> list[Any]:
    return [rank[name].get("code") for rank in of.ranks]


def printed(of: Outcomes, name: str) -> str:
    return of.printed.split(f"--- {name}\n")[1].split("--- ")[0]


def test_stopped_evaluation_is_repeated_after_resume(two: Outcomes) -> None:
    assert "stopped by a signal; step 7 is saved; --resume continues from it" in printed(two, "packed stream, cut")
    assert "step 8 is saved" in printed(two, "evaluation, cut")
    folders = [two.folder / name / "checkpoints" / "step-8" for name in ("plain", "evaluation parts")]
    manifests = [read_manifest(folder) for folder in folders]
    assert manifests[0]["eval_loss"] == manifests[1]["eval_loss"]
    assert not manifests[1]["evaluation_due"]


@pytest.fixture(scope="module")
def one(material: Path, two: Outcomes) -> Outcomes:
    cases = {
        "experts, on one rank": resumed("experts cut", "experts for one", **EXPERTS, **ALONE),
        "plain, on one rank": resumed("plain cut", "plain for one", **ALONE),
    }
    of_two = json.loads(json.dumps(cases).replace("{out}", str(two.folder)))
    return launched(material, 1, of_two, script="checkpoint_ranks.py")


@pytest.mark.parametrize(
    ("name", "folder"), [("experts, other layout", "experts sharded"), ("experts, on one rank", "experts for one")]
)
def test_resume_on_other_ranks_or_layout_keeps_the_batches(
    two: Outcomes, one: Outcomes, name: str, folder: str
) -> None:
    assert {*codes(two if name in TWO else one, name)} == {0}
    again, whole = (steps(two.folder / run) for run in (folder, "experts"))
    assert len(again) == STEPS
    for step, other in zip(again, whole, strict=True):
        assert step == pytest.approx(other, abs=1e-4)


def test_resume_on_other_ranks_with_dropout_has_the_same_rows_and_other_masks(two: Outcomes, one: Outcomes) -> None:
    """As docs/checkpoints.md says: the losses are not those of the run that was never stopped, but as good."""
    assert codes(one, "plain, on one rank") == [0]
    runs = [two.folder / run for run in ("plain for one", "plain")]
    again, whole = map(steps, runs)
    assert [(step[0], step[3]) for step in again] == [(step[0], step[3]) for step in whole]
    tokens, expected = ([count for _, count in evaluations(run).values()] for run in runs)
    assert tokens == expected
    first = next(i for i, (step, other) in enumerate(zip(again, whole, strict=True)) if step != other)
    assert first == 6, "the first resumed step"
    losses = [(step[1], other[1]) for step, other in zip(again, whole, strict=True)]
    assert all(loss == pytest.approx(other, rel=0.1) for loss, other in losses)
    assert not all(loss == pytest.approx(other, rel=1e-4) for loss, other in losses)


def test_full_disk_is_reported_and_training_continues(two: Outcomes) -> None:
    assert two["disk full for a while"]["code"] == 0
    run = two.folder / "disk"
    assert "step     8  NOT saved: No space left on device" in printed(two, "disk full for a while")
    assert [f.name for f in list_checkpoints(run / "checkpoints")] == ["step-4", "step-12"]
    assert not list((run / "checkpoints").glob(".*"))
    assert all(not find_damage(f) for f in list_checkpoints(run / "checkpoints"))
    assert_same_bits(run / "final", two.folder / "plain" / "final")
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    saves = [line for line in lines if line["kind"] == "save"]
    assert [(line["step"], line["ok"], line.get("error")) for line in saves] == [
        (4, True, None),
        (8, False, "No space left on device"),
        (12, True, None),
    ]
    written = sum(path.stat().st_size for path in (run / "checkpoints" / "step-12").iterdir())
    assert saves[2]["bytes"] == written, "as much as lies there"
    assert saves[2]["seconds"] > 0
    assert [line["kind"] for line in lines][-1] == "end", "the last save is waited for"


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        (
            "disk full, and a signal",
            ["step 7 could not be saved: No space left on device", "there is no checkpoint before"],
        ),
        (
            "another run",
            [
                "was 0.01 when this run began, is 0.02 now",
                "was 8 when this run began, is 4 now",
                "when this run began, and would be in nf4 now: other weights",
                "set layout.base_dtype: ",
                "an optimizer step had 8 sequences when this run began, and would have 4 now",
                "set train.global_batch_size: 8",
            ],
        ),
        ("poisoned", ["non-finite"]),
    ],
)
@pytest.mark.fault(
    "a signal while the disk is full", "`windlass train`", "step 7 could not be saved: No space left on device"
)
@pytest.mark.fault(
    "another learning rate at the resume", "`windlass train --resume`", "was 0.01 when this run began, is 0.02 now"
)
@pytest.mark.fault(
    "another batch at the resume",
    "`windlass train --resume`",
    "an optimizer step had 8 sequences when this run began, and would have 4 now",
)
def test_failures_end_the_run_on_every_rank(two: Outcomes, name: str, messages: list[str]) -> None:
    for outcome in (rank[name] for rank in two.ranks):
        assert [message for message in messages if message not in outcome["error"]] == []


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("another run", "when this run began"),
        ("other rows", "the data are not those this run began with"),
        ("fewer epochs", "the run has 1 step now, and has reached step 6"),
        ("base, altered", "are not those that checkpoints/step-6 was trained on"),
    ],
)
def test_a_resume_that_is_refused_leaves_what_the_run_recorded(two: Outcomes, name: str, error: str) -> None:
    """`report` believes it; only the state, and why, are those of the resume."""
    outcome = two[name]
    assert error in outcome["error"]
    assert outcome["changed"] == []


@pytest.mark.fault(
    "the newest of several checkpoints is damaged",
    "`windlass train --resume`",
    "step-8: optimizer.pt is not what was written; kept as damaged-step-8",
)
def test_damaged_newest_checkpoint_is_skipped_and_reported(two: Outcomes) -> None:
    run = two.folder / "poisoned"
    assert two["newest damaged"]["code"] == 0, two["newest damaged"]
    assert "step-8: optimizer.pt is not what was written; kept as damaged-step-8" in printed(two, "newest damaged")
    assert_same_bits(run / "final", two.folder / "plain" / "final")
    assert steps(run) == steps(two.folder / "plain")
    assert evaluations(run) == evaluations(two.folder / "plain")


def test_a_base_that_changed_by_one_bit_is_refused_unless_it_is_accepted(two: Outcomes) -> None:
    for name, adapter in (
        ("base, altered", "checkpoints/step-6"),
        ("adapter, altered", "plain/final"),
        ("best, altered", "checkpoints/step-"),
    ):
        for outcome in (rank[name] for rank in two.ranks):
            assert re.search(
                rf"the weights of model \(digest \w+\) are not those that {adapter}\d* was trained on: "
                r"model \(digest \w+\)",
                outcome["error"],
            ), outcome
            assert "add --allow-other-base" in outcome["error"]
            assert "model.model_name_or_path" in outcome["where"]
    assert codes(two, "base, accepted") == codes(two, "base, put back") == [0, 0]
    assert "accepted with --allow-other-base" in printed(two, "base, accepted")
    runs = two.folder
    records = {name: read_json(runs / name / "final" / "base_model.json") for name in ("plain", "base parts")}
    loads = {name: read_json(runs / name / "load.json")["base_digest"] for name in records}
    assert (records["plain"]["base_name"], records["plain"]["base_digest"]) == ("model", loads["plain"])
    assert records["plain"]["base_config"]["hidden_size"] == 64
    assert records["base parts"]["base_digest"] == loads["base parts"] != loads["plain"]
    assert "are not those that checkpoints/step-6" in records["base parts"]["other_base"]
    for name, record in records.items():
        assert record.pop("files").keys() == {"adapter_config.json", "adapter_model.safetensors"}
        for manifest in (runs / name, runs / name / "checkpoints" / "step-12"):
            found = read_manifest(manifest)
            assert {key: found[key] for key in record} == record
    (facts,) = report.make_report([runs / "base parts"]).runs
    assert [why for why in facts["verdict"]["against"] if "trained on another base model than before" in why]


def test_held_out_losses_on_bases_that_are_stored_in_other_ways(two: Outcomes) -> None:
    run = two.folder / "plain"
    assert codes(two, "plain, on other bases") == [0, 0]
    found = json.loads((run / "bases.json").read_text())
    adapter, losses = int(found["adapter"].removeprefix("step-")), found["losses"]
    (own,) = losses.keys() - {"nf4"}
    assert losses[own][1] == pytest.approx(evaluations(run)[adapter][0], rel=1e-5)
    assert 1e-5 < abs(losses[own][0] - losses["nf4"][0]) < 0.1


def test_best_checkpoint_is_linked_and_loaded_at_the_end(two: Outcomes) -> None:
    run = two.folder / "experts best"
    losses = {step: loss for step, (loss, _) in evaluations(run).items()}
    lowest = min(losses, key=lambda step: losses[step])
    assert lowest != STEPS
    assert (run / "best").resolve() == run / "checkpoints" / f"step-{lowest}"
    assert_same_bits(run / "final", run / "best")
    assert f"the adapter is that of step-{lowest}" in printed(two, "experts, best")
