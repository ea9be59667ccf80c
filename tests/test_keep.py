"""What tuning costs the rest: figures of the base without its adapter, beside those of every evaluation."""

import importlib
import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from test_faults import windlass
from torch.nn.functional import cross_entropy

from windlass import runfile, tiny
from windlass.data.packing import open_rows
from windlass.errors import SAVED
from windlass.files import read_json, read_json_lines, write_json
from windlass.plan import make_plan
from windlass.plan.layout import Layout
from windlass.run_folder import BASE_FIGURES, DATA, list_trials
from windlass.train import run
from windlass.train.load import load_base
from windlass.train.logits import open_adapter

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

train: Any = importlib.import_module("test_train")
case = train.case
EXPERTS, SPLIT, IN_FULL = train.EXPERTS, train.SPLIT, train.IN_FULL
TOLERANCE = 1e-6  # in float32
WORDS = "anchor bark cable deck eddy fathom galley hull inlet jib keel lee mast north oar pier quay reef sail tide"
RUN = """
model: {{model_name_or_path: {folder}/model, torch_dtype: float32}}
lora: {{r: 4, lora_alpha: 8, lora_dropout: 0.1, target_modules: all-linear}}
data:
  dataset_name_or_path: {folder}/train.jsonl
  val_split: null
  max_length: 48
  packing: false
  eval: {{sea: {{path: {folder}/sea.jsonl}}, land: {{path: {folder}/land.jsonl}}}}
train:
  output_dir: {folder}/out
  max_steps: 4
  learning_rate: 0.01
  bf16: false
  gradient_checkpointing: false
  per_device_eval_batch_size: 2
  eval_on_start: true
  eval_steps: 2
  save_steps: 2
  neftune_noise_alpha: 5
  ddp_timeout: 60
"""
BIASED = {"model__model_name_or_path": "{folder}/biased", "lora__bias": "all"}
AS_STORED = {"layout__base_dtype": "bf16"}
CASES: dict[int, dict[str, Any]] = {
    1: {
        "plain": case(1, **AS_STORED),
        "experts": case(1, **EXPERTS, **AS_STORED),
        "pissa": case(1, lora__lora_dropout=0, lora__init_lora_weights="pissa", **AS_STORED),
        "dora": case(1, lora__use_dora=True, **AS_STORED),
        "biases": case(1, **BIASED),
        "in full": case(1, **IN_FULL),
        "fused": case(1, fused=True, lora__lora_dropout=0, **AS_STORED),
        "FP8": case(1, layout__base_dtype="fp8"),
        "NF4": case(1, layout__base_dtype="nf4"),
    },
    2: {
        "full-shard": case(2, **AS_STORED),
        "gathered, in full": case(2, layout="no-reshard", layout__reshard_after_forward=False, **IN_FULL),
        "resident": case(2, layout="resident", **EXPERTS, **AS_STORED),
        "experts split": case(2, **SPLIT, **EXPERTS, **AS_STORED),
    },
}
EVERY = [(world, name) for world, cases in CASES.items() for name in cases]
PAIRS = {"file": "{folder}/pairs.yaml", **AS_STORED}
OTHERS = {
    "dpo": case(1, **PAIRS),
    "orpo": case(1, train__objective="orpo", **PAIRS),
    "bf16": case(1, train__bf16=True, **AS_STORED),
    "stopped": case(1, train__output_dir="{out}/resumed", faults=["stop 3"], **AS_STORED),
}
RESUMED = {"resumed": case(1, train__output_dir="{folder}/others of 1/resumed", resume=True, **AS_STORED)}


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keep")
    tiny.write_model(folder / "model", experts=4)
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    tiny.write_family(folder / "biased", "qwen2", config=sizes, layers=2, tokenizer=True)
    chance = random.Random(0)
    for name, count in (("train", 60), ("sea", 11), ("land", 7)):
        rows = [{"text": " ".join(chance.choices(WORDS.split(), k=chance.randint(3, 20)))} for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(RUN.format(folder=folder))

    def words() -> str:
        return " ".join(chance.choices(WORDS.split(), k=chance.randint(2, 9)))

    pairs = [{"prompt": f"{words()}:", "chosen": f" {words()}", "rejected": f" {words()}"} for _ in range(30)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    of_pairs = [line for line in RUN.splitlines() if "eval:" not in line and "noise" not in line]
    text = "\n".join(of_pairs).replace("train.jsonl", "pairs.jsonl").replace("train:", "train:\n  objective: dpo")
    (folder / "pairs.yaml").write_text(
        text.replace("val_split: null", "val_fraction: 0.2").replace("48", "96").format(folder=folder)
    )
    return folder


@pytest.fixture(scope="session")
def outcomes(material: Path) -> dict[int, Any]:
    return {world: train.launched(material, world, cases) for world, cases in CASES.items()}


@pytest.fixture(scope="session")
def others(material: Path) -> Any:
    return train.launched(material, 1, OTHERS, "others ")


def find_run(outcomes: dict[int, Any], world: int, name: str) -> Path:
    folder: Path = outcomes[world].folder / name
    assert outcomes[world][name].get("code") == 0, outcomes[world][name]
    return folder


def list_evaluations(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(folder / "events.jsonl") if event["kind"] == "eval"]


def open_plain(material: Path, overrides: list[str]) -> Any:
    """Open the base on one rank, as it is stored in the run, with the family's own forward."""
    text = json.dumps(overrides).replace("{folder}", str(material))
    plan = make_plan(runfile.read_run_file(material / "run.yaml", json.loads(text)))
    layout = Layout("resident", "", 1, 1, 1, 1, base_dtype=plan.layout.base_dtype)
    model, _ = load_base(plan.base, layout, **run.describe_precision(plan))
    return model.eval()


@torch.no_grad()
def judge(model: Any, folder: Path, split: str = "validation") -> dict[int, float]:
    """Return the mean loss of each set's rows, one row at a time, in plain operations."""
    sums: dict[int, list[float]] = {}
    (path,) = (folder / "tokens").glob(f"*/{split}.arrow")
    for row in open_rows(path).to_pylist():
        ids = torch.tensor([row["input_ids"]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
        losses = cross_entropy(logits, ids[0, 1:], reduction="none")
        of_set = sums.setdefault(row.get("source", [0])[0], [0.0, 0.0])
        of_set[0] += float(losses.sum())
        of_set[1] += len(losses)
    return {number: loss / tokens for number, (loss, tokens) in sums.items()} | {
        -1: sum(loss for loss, _ in sums.values()) / sum(tokens for _, tokens in sums.values())
    }


@pytest.mark.parametrize(("world", "name"), EVERY, ids=[f"{name} on {world}" for world, name in EVERY])
def test_the_base_is_measured_as_if_no_adapter_had_been_attached(
    material: Path, outcomes: dict[int, Any], world: int, name: str
) -> None:
    folder = find_run(outcomes, world, name)
    model = open_plain(material, CASES[world][name]["overrides"])
    base = judge(model, folder)
    first, *_, last = list_evaluations(folder)
    assert first["eval_base"] == last["eval_base"] == pytest.approx(base[-1], abs=TOLERANCE)
    assert first["eval_gain"] == pytest.approx(0, abs=TOLERANCE)
    (stored,) = read_json(folder / BASE_FIGURES).values()
    assert [stored[f"eval_{each}_loss"] for each in ("sea", "land")] == pytest.approx([base[0], base[1]], abs=TOLERANCE)
    adapted = judge(open_adapter(model, folder / "final"), folder)
    assert last["eval_loss"] == pytest.approx(adapted[-1], abs=TOLERANCE)
    for number, key in ((-1, "eval_gain"), (0, "eval_gain/sea"), (1, "eval_gain/land")):
        assert last[key] == pytest.approx(base[number] - adapted[number], abs=2 * TOLERANCE)
    assert abs(last["eval_gain"]) > 1e-3  # a difference that the tolerance does not hide
    assert read_json(folder / DATA)["row_hashes"].keys() == {"train", "validation"}


def test_a_loss_against_the_model_before_step_1_has_no_gain(others: Any) -> None:
    dpo, orpo = (list_evaluations(find_run({1: others}, 1, name)) for name in ("dpo", "orpo"))
    assert not [key for event in dpo for key in event if "gain" in key or "base" in key]
    assert not (others.folder / "dpo" / BASE_FIGURES).exists()
    assert orpo[0]["eval_gain"] == pytest.approx(0, abs=TOLERANCE)
    assert orpo[-1]["eval_gain"] == pytest.approx(orpo[0]["eval_loss"] - orpo[-1]["eval_loss"], abs=2 * TOLERANCE)


def test_a_resumed_run_finds_the_figures_of_the_base(material: Path, others: Any) -> None:
    folder = others.folder / "resumed"
    assert others["stopped"].get("code") == SAVED
    stored = read_json(folder / BASE_FIGURES)
    (identity,) = stored
    write_json(folder / BASE_FIGURES, {identity: stored[identity] | {"eval_loss": 100.0}})  # measured again, it is gone
    resumed = train.launched(material, 1, RESUMED, "resumed ")
    assert resumed["resumed"].get("code") == 0, resumed["resumed"]
    first, *_, last = list_evaluations(folder)
    assert (first["eval_base"], last["eval_base"]) == (stored[identity]["eval_loss"], 100.0)
    assert last["eval_gain"] == 100.0 - last["eval_loss"]


def test_trials_of_a_sweep_measure_the_base_once(material: Path) -> None:
    text = (material / "run.yaml").read_text().replace(f"{material}/out", f"{material}/sweep")
    path = material / "sweep.yaml"
    path.write_text(
        f"{text}layout: {{base_dtype: bf16}}\nsweep: {{train.learning_rate: [0.01, 0.002]}}\ncluster: {{gpu: cpu}}\n"
    )
    code, printed = windlass(f"train {path}", material)
    assert code == 0, printed
    assert len(read_json(material / "sweep" / BASE_FIGURES)) == 1
    trials = list_trials(material / "sweep")
    assert len(trials) == 2
    assert not [trial for trial in trials if (trial / BASE_FIGURES).exists()]
    evaluations = [list_evaluations(trial)[-1] for trial in trials]
    assert len({event["eval_base"] for event in evaluations}) == 1
    assert len({event["eval_gain"] for event in evaluations}) == 2


def test_the_gain_is_in_log_watch_status_and_report(material: Path, outcomes: dict[int, Any]) -> None:
    folder = find_run(outcomes, 1, "plain")
    gain = list_evaluations(folder)[-1]["eval_gain"]
    said = f"{abs(gain):.4f} {'below' if gain > 0 else 'above'} the base"
    assert said in outcomes[1].printed
    assert said in windlass(f"watch --once {shlex.quote(str(folder))}", material)[1]
    assert windlass(f"report {shlex.quote(str(folder))}", material)[0] == 0
    (facts,) = json.loads((folder / "report.json").read_text())["runs"]
    assert facts["headline"]["gain"] == pytest.approx(max(event["eval_gain"] for event in list_evaluations(folder)))
    (loss,) = [chart for chart in facts["charts"] if chart["id"] == "loss"]
    assert {"evaluation", "evaluation sea", "base model, evaluated"} < {curve["label"] for curve in loss["series"]}
