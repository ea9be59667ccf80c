"""`windlass init --model --data`: a run file that fits the data, the model and the machines."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from windlass import init as draft
from windlass import plan as planning
from windlass import tiny
from windlass.errors import UserError
from windlass.plan.resolve import BYTES_PER_TOKEN, FEW_STEPS, MOST_EPOCHS
from windlass.plan.show import print_plan
from windlass.runfile import read_run_file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"), "mistral4")


def rows(path: Path, lengths: list[int]) -> str:
    path.write_text("".join(json.dumps({"text": "hull " * length}) + "\n" for length in lengths))
    return str(path)


def test_length_batch_and_epochs_follow_the_data(tmp_path: Path, model: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", [200] * 990 + [1500] * 10)
    command = [warm.python(), "-m", "windlass", "init", "--model", str(model), "--data", data, "--gpus", "2xcpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (tmp_path / "run.yaml").write_text(done.stdout)
    loaded = read_run_file(tmp_path / "run.yaml")
    assert loaded.run.data.length >= 1500  # 1 % of the rows are longer than the rest: they fit too
    assert loaded.run.data.packing
    plan = planning.make_plan(loaded)
    assert plan.cost.fits
    assert plan.schedule.steps is not None
    assert plan.schedule.steps >= FEW_STEPS
    assert "windlass plan run.yaml" in done.stdout.splitlines()[0]


def test_few_rows_are_repeated_and_warned_about(tmp_path: Path, model: Path) -> None:
    made = draft.draft_run(str(model), rows(tmp_path / "few.jsonl", [100] * 20), "1xcpu", print)
    assert made.settings["train.num_train_epochs"][0] == MOST_EPOCHS
    assert "20 rows make only" in made.warnings[0]


def unset(made: draft.Draft, *, recompute: bool | None = None) -> planning.Plan:
    """Return the same run without the keys that the plan chooses if unset."""
    chosen = ("train.gradient_checkpointing", "layout.name")
    settings = {key: value for key, value in made.settings.items() if key not in chosen}
    if recompute is not None:
        settings["train.gradient_checkpointing"] = (recompute, "")
    return planning.make_plan(draft.Draft(settings).load())


def test_activations_are_recomputed_where_the_run_does_not_fit_otherwise(tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", [2000] * 500)
    chosen = {}
    for gpu in ("8xh200", "1xl4", "1xh100"):
        name = "Mistral-Small-4-119B-2603" if gpu == "1xh100" else "Mistral-7B-v0.1"
        made = draft.draft_run(name, data, gpu, print)
        chosen[gpu] = made.settings["train.gradient_checkpointing"][0], any("needs" in each for each in made.warnings)
        if gpu != "1xh100":
            plan, own = planning.make_plan(made.load()), unset(made)
            assert own.batch == plan.batch
            assert own.layout.activation_checkpointing == chosen[gpu][0]
            assert ("doesn't fit without" in own.layout.reason) == chosen[gpu][0]
            assert not unset(made, recompute=False).layout.activation_checkpointing
    assert chosen == {"8xh200": (False, False), "1xl4": (True, False), "1xh100": (True, True)}


def test_unset_keys_are_chosen_and_reported(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(tmp_path / "rows.jsonl", [200] * 990 + [1000] * 10)

    def chosen(train: str = "", data: str = "", name: Path = model) -> planning.Plan:
        (tmp_path / "run.yaml").write_text(
            f"model: {{model_name_or_path: {name}}}\n"
            f"data: {{dataset_name_or_path: {tmp_path}/rows.jsonl, dataset_config_name: null, val_split: null{data}}}\n"
            f"train: {{output_dir: {tmp_path}/out, eval_strategy: 'no'{train}}}\n"
            "cluster: {gpu: cpu, gpus_per_node: 2}\n"
        )
        return planning.make_plan(read_run_file(tmp_path / "run.yaml"))

    plan = chosen()
    run = plan.run
    assert 5000 / BYTES_PER_TOKEN < run.data.length <= 1.5 * 5000 / BYTES_PER_TOKEN
    assert run.data.packing
    assert run.train.num_train_epochs == 3  # 1000 rows make some 200 sequences, 6 steps
    assert run.train.per_device_train_batch_size == "auto"
    assert plan.schedule.global_sequences == 16 * 2  # as ever
    assert [each.split(" ")[0] for each in plan.chosen] == ["data.max_length", "data.packing", "train.num_train_epochs"]
    assert f"not set, chosen: {plan.chosen[1]}" in plan.notes
    print_plan(plan)
    assert "\nnot set  chosen: max_length 1536, packing true, num_train_epochs 3\n" in capsys.readouterr().out
    # A default that is written out means the same.
    train = ", num_train_epochs: auto, gradient_accumulation_steps: auto, per_device_train_batch_size: null"
    train += ", max_steps: -1, gradient_checkpointing: auto, bf16: auto"
    assert chosen(train, ", max_length: auto, packing: auto").as_dict() == plan.as_dict()
    # No longer than the model's positions; what is set beyond them is warned of.
    small = shutil.copytree(model, tmp_path / "model")
    config = json.loads((small / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 600
    (small / "config.json").write_text(json.dumps(config))
    capped = chosen(name=small)
    assert capped.loaded.run.data.max_length == 600
    assert capped.chosen[0].startswith("data.max_length 600, all positions that the model has, ")
    assert (
        draft.draft_run(str(small), str(tmp_path / "rows.jsonl"), "2xcpu", print).settings["data.max_length"][0] == 600
    )
    warnings = chosen("", ", max_length: 700", small).warnings
    assert [each.override for each in warnings if "600 positions" in each.text] == ["data.max_length=600"]
    # Who says how many sequences a step has means rows of the data.
    of_step = chosen(", global_batch_size: 8").loaded.run
    assert (of_step.data.packing, of_step.train.num_train_epochs) == (False, 1)
    assert of_step.train.per_device_train_batch_size == "auto"
    counted = chosen(", gradient_accumulation_steps: 4")
    assert (counted.batch.micro, counted.batch.accumulation) == (1, 4)
    # What is set stays.
    plan = chosen(", num_train_epochs: 1", ", max_length: 300, packing: false")
    assert (plan.run.data.max_length, plan.run.data.packing, plan.chosen) == (300, False, ())
    assert plan.run.train.num_train_epochs == 1
    # A family that can't keep packed documents apart, and data that aren't here.
    assert not chosen(name=Path("Qwen3-Next-80B-A3B-Instruct")).loaded.run.data.packing
    (tmp_path / "rows.jsonl").unlink()
    assert chosen().loaded.run.data.max_length == 1024


@pytest.mark.parametrize("gpus", ["0xh200", "2x2x2xh200", "x", "8xh9000"])
def test_invalid_gpu_count_is_refused(model: Path, tmp_path: Path, gpus: str) -> None:
    with pytest.raises(UserError, match="--gpus"):
        draft.draft_run(str(model), rows(tmp_path / "rows.jsonl", [3]), gpus, print)


def test_model_and_data_are_both_needed(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "windlass", "init", "--model", str(model)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "needs both --model and --data" in done.stderr


def test_missing_path_is_named_by_its_flag(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--data: "):
        draft.draft_run(str(model), str(tmp_path / "none.jsonl"), "1xcpu", print)
    with pytest.raises(UserError, match=r"^--model: "):
        draft.draft_run(str(tmp_path / "none"), rows(tmp_path / "rows.jsonl", [3]), "1xcpu", print)


def test_columns_are_named_by_a_flag_that_the_error_suggests(tmp_path: Path, model: Path) -> None:
    data = tmp_path / "qa.jsonl"
    data.write_text("".join(json.dumps({"Question": f"{i}?", "answer": f" {i}", "id": i}) + "\n" for i in range(9)))

    def made(columns: str | None) -> draft.Draft:
        return draft.draft_run(str(model), str(data), "1xcpu", print, columns)

    hint = "--columns '{prompt: Question, completion: answer}'"
    with pytest.raises(UserError, match=f"^--data: the data have no column 'text'.*\n\n.* write {hint}$"):
        made(None)
    with pytest.raises(UserError, match=f"^--columns: the format text has no 'Question'\n\n.*: {hint}$"):
        made("{Question: prompt}")
    with pytest.raises(UserError, match=r"^--columns: .*no column 'question'.*\n\n.*did you mean 'Question'"):
        made("{prompt: question, completion: answer}")
    for text in ("Question", "{a"):
        with pytest.raises(UserError, match=r"^--columns: .* is not a mapping"):
            made(text)
    assert "  columns: {prompt: Question, completion: answer}\n" in made(hint.split("'")[1]).text
