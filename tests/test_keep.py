"""What tuning costs the rest: figures of the base without its adapter, beside those of every evaluation."""

import json
import random
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_faults import windlass
from test_train import EXPERTS, IN_FULL, SPLIT, WORDS, Outcomes, case, launched, write_run
from text_run import write_rows
from torch.nn.functional import cross_entropy

from windlass import runfile, tiny
from windlass.data.packing import open_rows
from windlass.data.prepare import audit_data, prepare_data
from windlass.errors import SAVED, UserError
from windlass.files import read_json, read_json_lines, write_json
from windlass.observe.steps import IGNORED, KEPT
from windlass.plan import make_plan
from windlass.plan.layout import Layout
from windlass.run_folder import ADAPTER, BASE_FIGURES, DATA, list_trials
from windlass.train.base_alone import BaseAlone
from windlass.train.batches import make_kept_batches
from windlass.train.checkpoint.snapshot import load_adapter
from windlass.train.head import Head, States
from windlass.train.kept import list_worse, measure_kept_sets
from windlass.train.load import describe_precision, load_base, open_base_tokenizer
from windlass.train.logits import open_adapter
from windlass.train.lora import attach_adapter
from windlass.train.patches import Patches

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

TOLERANCE = 1e-6  # in float32
KEY = "data.keep"
BIASED: dict[str, Any] = {"model__model_name_or_path": "{folder}/biased", "lora__bias": "all"}
AS_STORED: dict[str, Any] = {"layout__base_dtype": "bf16"}
CASES: dict[int, dict[str, Any]] = {
    1: {
        "plain": case(1, **AS_STORED),
        "none kept": case(1, data__keep={}, **AS_STORED),
        "pissa": case(1, lora__lora_dropout=0, lora__init_lora_weights="pissa", **AS_STORED),
        "dora": case(1, lora__use_dora=True, **AS_STORED),
        "biases": case(1, **BIASED),
        "NF4": case(1, layout__base_dtype="nf4"),
        "dpo": case(1, file="{folder}/pairs.yaml", **AS_STORED),
        "orpo": case(1, train__objective="orpo", file="{folder}/pairs.yaml", **AS_STORED),
        "stopped": case(1, faults=["stop 3"], **AS_STORED),
        "fused": case(1, fused=True, lora__lora_dropout=0, **AS_STORED),
    },
    2: {
        "gathered, in full": case(2, layout="no-reshard", layout__reshard_after_forward=False, **IN_FULL),
        "experts split": case(2, **SPLIT, **EXPERTS, **AS_STORED),
    },
}
OTHERS = ("none kept", "dpo", "orpo", "stopped")
EVERY = [(world, name) for world, cases in CASES.items() for name in cases if name not in OTHERS]


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keep")
    tiny.write_model(folder / "model", experts=4)
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    tiny.write_family(folder / "biased", "qwen2", config=sizes, layers=2, tokenizer=True)
    chance = random.Random(0)
    for name, count in (("train", 60), ("sea", 11), ("land", 7), ("old", 8)):
        rows = [{"text": " ".join(chance.choices(WORDS.split(), k=chance.randint(3, 20)))} for _ in range(count)]
        write_rows(folder / f"{name}.jsonl", rows)

    def words() -> str:
        return " ".join(chance.choices(WORDS.split(), k=chance.randint(2, 9)))

    write_rows(folder / "tasks.jsonl", [{"prompt": f"{words()}:", "completion": f" {words()}"} for _ in range(9)])
    pairs = [{"prompt": f"{words()}:", "chosen": f" {words()}", "rejected": f" {words()}"} for _ in range(30)]
    write_rows(folder / "pairs.jsonl", pairs)
    paths = {name: {"path": f"{folder}/{name}.jsonl"} for name in ("sea", "land", "old", "tasks")}
    keep: dict[str, Any] = {"old": paths["old"], "tasks": {**paths["tasks"], "split": "train[:5]"}}
    data: dict[str, Any] = {
        "dataset_name_or_path": f"{folder}/train.jsonl",
        "val_split": None,
        "max_length": 48,
        "packing": False,
    }
    data |= {"eval": {name: paths[name] for name in ("sea", "land")}, "keep": keep}
    train: dict[str, Any] = {"max_steps": 4, "learning_rate": 0.01, "warmup_ratio": 0, "per_device_eval_batch_size": 2}
    train |= {
        "eval_strategy": "steps",
        "eval_on_start": True,
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    given: dict[str, Any] = {f"train__{key}": value for key, value in train.items()} | {"lora__lora_dropout": 0.1}
    write_run(folder / "run.yaml", data=data, train__neftune_noise_alpha=5, **given)
    data |= {"dataset_name_or_path": f"{folder}/pairs.jsonl", "val_fraction": 0.2, "max_length": 96}
    of_pairs = {key: value for key, value in data.items() if key not in ("eval", "val_split")}
    write_run(folder / "pairs.yaml", data=of_pairs, train__objective="dpo", **given)
    return folder


@pytest.fixture(scope="session")
def outcomes(material: Path) -> dict[int, Outcomes]:
    return {world: launched(material, world, cases) for world, cases in CASES.items()}


def find_run(outcomes: dict[int, Outcomes], world: int, name: str) -> Path:
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
    model, _ = load_base(plan.base, layout, **describe_precision(plan))
    return model.eval()


def read_rows(folder: Path, split: str) -> list[dict[str, Any]]:
    (path,) = (folder / "tokens").glob(f"*/{split}.arrow")
    rows: list[dict[str, Any]] = open_rows(path).to_pylist()
    return rows


@torch.no_grad()
def predict(model: Any, rows: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Return the log-probabilities at every supervised position of each row, one row at a time."""
    logits = [model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1] for row in rows]
    places = [torch.tensor(row.get("labels", row["input_ids"])[1:]) != IGNORED for row in rows]
    return [each.double().log_softmax(-1)[place] for each, place in zip(logits, places, strict=True)]


def judge_kept(base: list[torch.Tensor], adapted: list[torch.Tensor], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return what an evaluation says of the kept sets, from full predictions in float64."""
    figures: dict[str, float] = {}
    for number, name in enumerate(("old", "tasks")):
        of_set = [i for i, row in enumerate(rows) if row["source"] == [number]]
        q, p = (torch.cat([each[i] for i in of_set]) for each in (base, adapted))
        labels = torch.tensor([id_ for i in of_set for id_ in rows[i].get("labels", rows[i]["input_ids"])[1:]])
        targets = labels[labels != IGNORED, None]
        loss, of_base = (-float(each.gather(1, targets).mean()) for each in (p, q))
        divergence = float((p.exp() * (p - q)).sum(1).mean())
        figures |= {f"{name}/loss": loss, f"{name}/worse": loss - of_base, f"{name}/kl": divergence}
    return figures


def read_kept_figures(event: dict[str, Any]) -> dict[str, float]:
    return {name.removeprefix(KEPT): value for name, value in event.items() if name.startswith(KEPT)}


@torch.no_grad()
def judge(model: Any, folder: Path, split: str = "validation") -> dict[int, float]:
    """Return the mean loss of each set's rows, one row at a time, in plain operations."""
    sums: dict[int, list[float]] = {}
    for row in read_rows(folder, split):
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
    material: Path, outcomes: dict[int, Outcomes], world: int, name: str
) -> None:
    folder = find_run(outcomes, world, name)
    model = open_plain(material, CASES[world][name]["overrides"])
    base = judge(model, folder)
    first, *_, last = list_evaluations(folder)
    assert first["eval_base"] == last["eval_base"] == pytest.approx(base[-1], abs=TOLERANCE)
    assert first["eval_gain"] == pytest.approx(0, abs=TOLERANCE)
    (stored,) = read_json(folder / BASE_FIGURES).values()
    assert [stored[f"eval_{each}_loss"] for each in ("sea", "land")] == pytest.approx([base[0], base[1]], abs=TOLERANCE)
    rows = read_rows(folder, "keep")
    predicted = predict(model, rows)
    adapter = open_adapter(model, folder / "final")
    adapted = judge(adapter, folder)
    kept = judge_kept(predicted, predict(adapter, rows), rows)
    assert read_kept_figures(last) == pytest.approx(kept, abs=2 * TOLERANCE)
    assert kept["old/kl"] > 1e-3
    for key, value in read_kept_figures(first).items():
        if not key.endswith("/loss"):  # a new adapter is no difference
            assert value == pytest.approx(0, abs=1e-7 if folder.name != "pissa" else TOLERANCE)
    assert last["eval_loss"] == pytest.approx(adapted[-1], abs=TOLERANCE)
    for number, key in ((-1, "eval_gain"), (0, "eval_gain/sea"), (1, "eval_gain/land")):
        assert last[key] == pytest.approx(base[number] - adapted[number], abs=2 * TOLERANCE)
    assert abs(last["eval_gain"]) > 1e-3  # a difference that the tolerance does not hide
    assert read_json(folder / DATA)["row_hashes"].keys() == {"train", "validation", "keep"}


def test_a_loss_against_the_model_before_step_1_has_no_gain(outcomes: dict[int, Outcomes]) -> None:
    dpo, orpo = (list_evaluations(find_run(outcomes, 1, name)) for name in ("dpo", "orpo"))
    assert not [key for event in dpo for key in event if "gain" in key or "base" in key]
    assert all(event["eval_keep/tasks/kl"] > 1e-4 for event in (dpo[-1], orpo[-1]))  # rows of text beside pairs
    assert [event["eval_keep/tasks/worse"] for event in (dpo[0], orpo[0])] == [0, 0]
    assert not (outcomes[1].folder / "dpo" / BASE_FIGURES).exists()
    assert orpo[0]["eval_gain"] == pytest.approx(0, abs=TOLERANCE)
    assert orpo[-1]["eval_gain"] == pytest.approx(orpo[0]["eval_loss"] - orpo[-1]["eval_loss"], abs=2 * TOLERANCE)


def test_a_resumed_run_finds_the_figures_of_the_base(material: Path, outcomes: dict[int, Outcomes]) -> None:
    folder = outcomes[1].folder / "stopped"
    assert outcomes[1]["stopped"].get("code") == SAVED
    stored = read_json(folder / BASE_FIGURES)
    (identity,) = stored
    write_json(folder / BASE_FIGURES, {identity: stored[identity] | {"eval_loss": 100.0}})  # measured again, it is gone
    again = {"resumed": case(1, train__output_dir=str(folder), resume=True, **AS_STORED)}
    resumed = launched(material, 1, again, "resumed ")["resumed"]
    assert resumed.get("code") == 0, resumed
    first, *_, last = list_evaluations(folder)
    assert (first["eval_base"], last["eval_base"]) == (stored[identity]["eval_loss"], 100.0)
    assert last["eval_gain"] == 100.0 - last["eval_loss"]


def test_trials_of_a_sweep_measure_the_base_once(material: Path) -> None:
    path, text = material / "sweep.yaml", (material / "run.yaml").read_text().replace("/out", "/sweep")
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


def test_the_gain_is_in_log_watch_status_and_report(material: Path, outcomes: dict[int, Outcomes]) -> None:
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


def test_kept_sets_change_nothing_of_the_training(outcomes: dict[int, Outcomes]) -> None:
    with_kept, without = (find_run(outcomes, 1, name) for name in ("plain", "none kept"))
    assert not [key for event in list_evaluations(without) for key in event if key.startswith(KEPT)]
    for at in ("checkpoints/step-2", "final"):
        one, other = (load_file(folder / at / ADAPTER) for folder in (with_kept, without))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    losses = [[event["eval_loss"] for event in list_evaluations(folder)] for folder in (with_kept, without)]
    assert losses[0] == losses[1]


def test_a_wrong_figure_of_a_kept_set_is_seen(
    material: Path, outcomes: dict[int, Outcomes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The divergence in the other direction is close to the right one."""
    folder = find_run(outcomes, 1, "plain")
    overrides = ["layout.base_dtype=bf16", f"train.output_dir={folder}"]
    plan = make_plan(runfile.read_run_file(material / "run.yaml", overrides))
    model = open_plain(material, overrides[:1])
    rows = read_rows(folder, "keep")
    predicted = predict(model, rows)
    base = BaseAlone(model, ())
    adapted = attach_adapter(model, plan.run.lora, plan.adapter, plan.run.train.seed).eval()
    load_adapter(adapted, folder / "checkpoints" / "step-4")
    right = judge_kept(predicted, predict(adapted, rows), rows)
    causal_lm = adapted.get_base_model()
    Patches().patch_forward(causal_lm)
    tokenizer = open_base_tokenizer(plan)
    batches = make_kept_batches(plan, prepare_data(plan.run, tokenizer, say=print), tokenizer.pad_token_id)
    assert batches is not None
    batches.round_rows = 8  # filled up with rows that are none
    for _ in range(2):  # the adapter is back on afterwards
        found = measure_kept_sets(batches, causal_lm, base, autocast=nullcontext())
        assert found == pytest.approx(right, abs=TOLERANCE)
    original = Head.compare

    def swapped(self: Head, adapted: States, hidden: Any, targets: Any) -> Any:
        right = original(self, adapted, hidden, targets)
        return torch.cat([right[:2], original(self, self.capture(hidden), adapted.hidden, targets)[2:]])

    monkeypatch.setattr(Head, "compare", swapped)
    found = measure_kept_sets(batches, causal_lm, base, autocast=nullcontext())
    assert found != pytest.approx(right, abs=TOLERANCE)


def test_best_ranks_adapters_whose_kept_sets_did_not_get_worse(material: Path, outcomes: dict[int, Outcomes]) -> None:
    folder = find_run(outcomes, 2, "experts split")
    evaluations = {event["step"]: read_kept_figures(event) for event in list_evaluations(folder)}
    worst = {step: max(list_worse(figures).values()) for step, figures in evaluations.items() if step}
    bound = sum(worst.values()) / 2
    code, printed = windlass(f"best {shlex.quote(str(folder))} --ranks 1 --keep {bound} --json", material)
    assert code == 0, printed
    ranking = json.loads(printed[printed.index("{\n") : printed.rindex("}") + 1])
    within = {f"step-{step}" for step, worse in worst.items() if worse <= bound}
    assert {each["name"] for each in ranking["best"]} == within | {"base model"}
    assert ranking["passed_over"].keys() == {f"step-{step}" for step in worst} - within
    for each in ranking["best"]:
        if each["name"] in within:
            step = int(each["name"].removeprefix("step-"))
            assert each["kept_worse"] == pytest.approx(worst[step], abs=2 * TOLERANCE)


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (["data.keep={a: {path: empty.jsonl}}"], "empty-file", "empty.jsonl"),
        (["data.keep={a: {path: blank.jsonl}}"], "nothing-supervised", KEY),
        (["data.keep={a: {path: old.jsonl, split: 'train[:0]'}}"], "no-rows", KEY),
        (["data.keep={a: {path: absent.jsonl}}"], "no-such-file", KEY),
        (["data.eval={}", "data.val_split=auto"], "no-validation-rows", "train.eval_strategy"),
    ],
)
def test_kept_sets_that_cannot_be_measured_are_refused(
    material: Path, change: list[str], code: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(material)
    (material / "empty.jsonl").write_text("")
    (material / "blank.jsonl").write_text('{"text": ""}\n')
    loaded = runfile.read_run_file(material / "run.yaml", [*change, "train.output_dir=refused"])
    with pytest.raises(UserError) as caught:
        audit_data(loaded, say=print, audited=lambda _: None)
    found = [(problem.code, problem.where) for problem in caught.value.problems]
    assert [each for each in found if each[0] == code and where in each[1]], found
    assert all(problem.hint for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train.eval_strategy=no", "kept sets are measured at evaluations"),
        ("data.keep={sea: {path: old.jsonl}}", "has the name 'sea'"),
        ("data.keep={validation: {path: old.jsonl}}", "has the name 'validation'"),
        ("sweep={data.keep: [{}, {a: {path: old.jsonl}}]}", "trials are compared on the same rows"),
    ],
)
def test_run_files_whose_kept_sets_make_no_sense(material: Path, change: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        runfile.read_run_file(material / "run.yaml", [change])
    (problem,) = [problem for problem in caught.value.problems if said in problem.problem]
    assert "data.keep" in problem.where or change in problem.where
    assert problem.hint
