"""`windlass init --model --data`: a run file that fits the data, the model and the machines."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import warm
from refusals import refused
from text_run import write_rows as write_json_lines

from windlass import hardware, tiny
from windlass import init as draft
from windlass import plan as planning
from windlass.data.inputs import fingerprint_rows
from windlass.data.prepare import prepare_data
from windlass.data.show import sample_token_rows
from windlass.data.tokenize import open_model_tokenizer
from windlass.errors import UserError
from windlass.files import write_json
from windlass.plan.finished import describe_finished
from windlass.plan.resolve import FEW_STEPS, MOST_EPOCHS
from windlass.plan.show import print_plan
from windlass.run_folder import DATA, FINISHED, MANIFEST
from windlass.runfile import read_run_file
from windlass.runfile.recorded import record_run
from windlass.train.batches import Batches, RunLength


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"), "mistral4")


def rows(path: Path, lengths: list[int]) -> str:
    return str(write_json_lines(path, [{"text": "hull " * length} for length in lengths]))


@pytest.mark.parametrize(("fast", "gpus"), [(True, "1xcpu"), (False, None)])
def test_a_cpu_computes_in_what_the_file_says(
    fast: bool, gpus: str | None, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 if the processor has instructions for it; the file says so, and it is what a run does."""
    flags = "flags : fpu avx512f avx512_bf16" if fast else "flags : fpu avx512f"
    read = hardware.read_text
    monkeypatch.setattr(hardware, "read_text", lambda path: flags if path.name == "cpuinfo" else read(path))
    made = draft.Draft({"model.model_name_or_path": (str(model), "")})
    draft.set_machine(made, gpus)
    assert made.settings["train.bf16"][0] is fast
    assert made.settings["model.torch_dtype"][0] == "float32"
    assert made.load().run.train.in_bf16 is fast


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
    subprocess.run([*command, "--out", "its own.yaml"], cwd=tmp_path, check=True, timeout=300)
    text = (tmp_path / "its own.yaml").read_text()
    assert "windlass plan 'its own.yaml'" in text.splitlines()[0]


def test_few_rows_are_repeated_and_warned_about(tmp_path: Path, model: Path) -> None:
    made = draft.draft_run(str(model), rows(tmp_path / "few.jsonl", [20] * 20), "1xcpu", print)
    assert made.settings["train.num_train_epochs"][0] == MOST_EPOCHS
    assert "20 rows for only" in made.warnings[0]
    assert made.settings["train.eval_steps"][0] > 1  # not at every one of a few steps
    assert made.settings["data.val_fraction"] == (0.1, "about 2 rows to evaluate on")
    more = draft.draft_run(str(model), rows(tmp_path / "more.jsonl", [20] * 500), "1xcpu", print)
    assert more.settings["data.val_fraction"][0] == 0.04


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


@pytest.mark.takes("drafts and plans several runs")
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
    assert run.data.length == 3072  # the longest have 3,001 tokens
    assert run.data.packing
    assert run.train.num_train_epochs == 3  # 1000 rows make some 200 sequences, 6 steps
    assert run.train.per_device_train_batch_size == "auto"
    assert plan.schedule.global_sequences == 16 * 2  # as ever
    assert f"not set, chosen: {plan.chosen[1]}" in plan.notes
    print_plan(plan)
    assert "\nnot set  chosen: max_length 3072, packing true, num_train_epochs 3\n" in capsys.readouterr().out
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


@pytest.mark.parametrize("gpus", ["2x2x2xh200", "8xh9000"])
def test_invalid_gpu_count_is_refused(model: Path, tmp_path: Path, gpus: str) -> None:
    with pytest.raises(UserError, match="--gpus"):
        draft.draft_run(str(model), rows(tmp_path / "rows.jsonl", [3]), gpus, print)


@pytest.mark.parametrize(
    ("content", "code"),
    [('{"text": "pähp"}\n'.encode("latin-1") * 40, "not-utf8"), (b'["a", "b"]\n' * 40, "not-an-object")],
)
def test_data_that_no_command_can_read_gets_no_run_file(content: bytes, code: str, tmp_path: Path, model: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with refused(code):
        draft.draft_run(str(model), str(tmp_path / "rows.jsonl"), "1xcpu", print)


def test_missing_path_is_named_by_its_flag(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--data: "):
        draft.draft_run(str(model), str(tmp_path / "none.jsonl"), "1xcpu", print)
    with pytest.raises(UserError, match=r"^--model: "):
        draft.draft_run(str(tmp_path / "none"), rows(tmp_path / "rows.jsonl", [3]), "1xcpu", print)


def test_columns_are_named_by_a_flag_that_the_error_suggests(tmp_path: Path, model: Path) -> None:
    lines = [{"Question": f"{i}?", "answer": f" {i}", "id": i} for i in range(9)]
    data = write_json_lines(tmp_path / "qa.jsonl", lines)

    def made(columns: str | None) -> draft.Draft:
        return draft.draft_run(str(model), str(data), "1xcpu", print, columns)

    hint = "--columns '{instruction: Question, output: answer}'"
    with pytest.raises(UserError, match=f"^--data: the data have no column 'text'.*\n\n.* write {hint}$"):
        made(None)
    with pytest.raises(UserError, match=f"^--columns: the format text has no 'Question'\n\n.*: {hint}$"):
        made("{Question: prompt}")
    with pytest.raises(UserError, match=r"^--columns: .*no column 'question'.*\n\n.*did you mean 'Question'"):
        made("{prompt: question, completion: answer}")
    for text in ("Question", "{a"):
        with pytest.raises(UserError, match=r"^--columns: .* is not a mapping"):
            made(text)
    assert "  columns: {instruction: Question, output: answer}\n" in made(hint.split("'")[1]).text


# --- the steps that init, plan and training count ---

WORDS = ("the", "hull", "anchor", "rope", "sails", "north", "wind", "over", "deep", "waters", "captain", "said")


def write_rows(folder: Path, kind: str, count: int = 700) -> str:
    """Write rows of widely differing lengths in a format."""
    random = Random(kind)

    def text(longest: int) -> str:
        return " ".join(random.choice(WORDS) for _ in range(random.randint(2, longest)))

    texts = [text(random.choice((10, 30, 200))) for _ in range(count)]
    if kind == "text":
        (folder / "rows.txt").write_text("".join(f"{each}\n" + "\n" * random.randint(0, 1) for each in texts))
        return str(folder / "rows.txt")
    if kind == "parquet":
        pq.write_table(
            pa.Table.from_pylist([{"text": each} for each in texts]), folder / "a.parquet", row_group_size=50
        )
        return str(folder / "a.parquet")
    lines: list[dict[str, Any]] = [{"text": each} for each in texts]
    if kind == "chats":
        turns = [[("user", text(9)), ("assistant", each)] * random.randint(1, 4) for each in texts]
        lines = [{"messages": [{"role": role, "content": said} for role, said in each]} for each in turns]
    return str(write_json_lines(folder / "rows.jsonl", lines))


def count_trained(plan: planning.Plan, audited: Callable[[Any], Any] = str) -> int:
    """Count the steps that training would make, and compare them with the plan's."""
    tokenizer, _ = open_model_tokenizer(plan.loaded)
    data = prepare_data(plan.run, tokenizer, where=plan.where, say=print, audited=audited)
    order = partial(data.order, seed=0, global_batch=4)
    batches = Batches(data.train, None, 2, order=lambda epoch: order(epoch=epoch), round_rows=4)  # type: ignore[arg-type]
    trained = RunLength.of(plan.run.train, batches, plan.batch.accumulation).total
    assert plan.schedule.steps is not None
    assert plan.schedule.tolerance is not None
    assert abs(plan.schedule.steps - trained) <= max(2, plan.schedule.tolerance * trained)
    assert plan.run.data.packing or plan.schedule.steps == trained
    return trained


@pytest.mark.parametrize(
    ("kind", "packing"), [("jsonl", "true"), ("parquet", "false"), ("text", "false"), ("chats", "true")]
)
def test_init_plan_and_training_count_the_same_steps(
    kind: str, packing: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Init said 42, plan 66, and training made 48; 900 steps for Parquet that made 15."""
    monkeypatch.setattr("windlass.plan.rows.ROWS", 350)  # half of them: an estimate
    out = f"train.output_dir={tmp_path / 'out'}"
    sizes = ("data.max_length=256", f"data.packing={packing}", "train.global_batch_size=4", out)
    made = draft.draft_run(str(model), write_rows(tmp_path, kind), "2xcpu", print, overrides=sizes)
    (tmp_path / "run.yaml").write_text(made.text)
    loaded = read_run_file(tmp_path / "run.yaml")
    plan = planning.make_plan(loaded)
    counted = re.search(r"#.*?([\d,]+) optimizer steps", made.text)
    assert counted
    assert int(counted[1].replace(",", "")) == plan.schedule.steps
    audits: list[Any] = []
    trained = count_trained(plan, audits.append)
    # Once the tokens are there, they are counted.
    (tmp_path / "out" / "data.json").write_text(json.dumps(audits[0]))
    again = planning.make_plan(loaded)
    assert (again.schedule.steps, again.schedule.tolerance) == (trained, 0.0)
    assert (again.run, again.layout) == (plan.run, plan.layout)
    # Not those of other settings.
    other = planning.make_plan(read_run_file(tmp_path / "run.yaml", ["data.max_length=128"]))
    assert other.schedule.tolerance != 0.0 or packing == "false"
    assert "counted in the tokens" not in other.schedule.rows_reason


@pytest.mark.parametrize("packing", ["true", "false"])
def test_plan_and_training_count_the_same_steps_of_a_mix(packing: str, tmp_path: Path, model: Path) -> None:
    text, parquet = (write_rows(tmp_path, kind, 300) for kind in ("jsonl", "parquet"))
    (tmp_path / "run.yaml").write_text(
        f"model: {{model_name_or_path: {model}}}\n"
        f"data: {{mix: [{{path: {text}, epochs: 2}}, {{path: {parquet}, rows: 100}}], val_fraction: 0.1,"
        f" max_length: 256, packing: {packing}}}\n"
        f"train: {{global_batch_size: 4, num_train_epochs: 1, output_dir: {tmp_path / 'out'}}}\n"
        "cluster: {gpu: cpu, gpus_per_node: 2}\n"
    )
    count_trained(planning.make_plan(read_run_file(tmp_path / "run.yaml")))


def test_a_prepared_row_is_shown_by_the_number_that_alarms_give(tmp_path: Path, model: Path) -> None:
    """Counted from 0, as packed."""
    path = rows(tmp_path / "rows.jsonl", [60, 20, 50, 30])
    (tmp_path / "run.yaml").write_text(
        f"model: {{model_name_or_path: {model}}}\n"
        f"data: {{dataset_name_or_path: {path}, dataset_config_name: null, val_split: null, max_length: 96}}\n"
        f"train: {{output_dir: {tmp_path / 'out'}, eval_strategy: 'no'}}\n"
    )
    loaded = read_run_file(tmp_path / "run.yaml", ["data.packing=true"])

    def show(number: int) -> list[int]:
        shown = sample_token_rows(loaded, say=print, sample=None, row=None, source=None, prepared=number)
        assert all("".join(part["text"] for part in each["parts"]).count("hull") for each in shown)
        return [len(each["tokens"]) for each in shown]

    tokenizer, _ = open_model_tokenizer(loaded)
    train = prepare_data(loaded.run, tokenizer, where=loaded.where, say=print).train
    sizes = [list(row["seq_lengths"]) for row in train.to_pylist()]
    assert [show(number) for number in range(len(train))] == sizes
    for number in (-1, len(train)):
        with refused("no-such-row", f"--prepared-row {number}"):
            show(number)


def test_steps_without_a_tokenizer_are_said_to_be_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = draft.draft_run("Mistral-7B-v0.1", write_rows(tmp_path, "jsonl"), "1xh100", print)
    assert "# about " in made.text
    assert ", by their bytes" in made.text
    print_plan(planning.make_plan(made.load()))
    assert re.search(r"about \d+ steps", capsys.readouterr().out)


# --- rows that init must look at ---


def test_the_length_covers_what_the_template_adds(tmp_path: Path, model: Path) -> None:
    """`512, which 100 % fit`, then `no row has a supervised token`: the template wrote 2,000 characters itself."""
    verbose = shutil.copytree(model, tmp_path / "model")
    template = verbose / "chat_template.jinja"
    template.write_text("You are " + "very " * 700 + "helpful." + template.read_text())
    data = write_rows(tmp_path, "chats", 60)
    made = draft.draft_run(str(verbose), data, "1xcpu", print, overrides=[f"train.output_dir={tmp_path / 'out'}"])
    assert made.settings["data.max_length"][0] > 1500
    (tmp_path / "run.yaml").write_text(made.text)
    loaded = read_run_file(tmp_path / "run.yaml")
    tokenizer, _ = open_model_tokenizer(loaded)
    audit = prepare_data(loaded.run, tokenizer, where=loaded.where, say=print).audit
    assert audit["splits"]["train"]["unsupervised"] == 0
    # A plan chooses so too.
    chosen = planning.make_plan(read_run_file(tmp_path / "run.yaml", ["data.max_length=auto"]))
    assert chosen.run.data.length > 1500


def test_rows_that_are_all_too_long_are_named(tmp_path: Path, model: Path) -> None:
    small = shutil.copytree(model, tmp_path / "model")
    config = json.loads((small / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 600
    (small / "config.json").write_text(json.dumps(config))
    made = draft.draft_run(str(small), rows(tmp_path / "long.jsonl", [900] * 50), "1xcpu", print)
    assert any("data.max_length 600: every row is longer" in warning for warning in made.warnings)
    assert "0.0%" not in made.text
    chat = {"messages": [{"role": "user", "content": "hull " * 900}, {"role": "assistant", "content": "rope"}]}
    write_json_lines(tmp_path / "chat.jsonl", [chat])
    with pytest.raises(UserError, match=r"^--data: no row has anything to train on within 600 tokens"):
        draft.draft_run(str(small), str(tmp_path / "chat.jsonl"), "1xcpu", print)


def test_what_the_template_needs_for_the_rows_is_set_with_the_reason(tmp_path: Path, model: Path) -> None:
    plain = shutil.copytree(model, tmp_path / "model")
    template = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}<s>assistant {% endif %}"
    (plain / "chat_template.jinja").write_text(template)
    thought = {"role": "assistant", "content": "rope", "reasoning_content": "a hull needs one"}
    write_json_lines(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "hull"}, thought]}] * 30)
    made = draft.draft_run(str(plain), str(tmp_path / "rows.jsonl"), "1xcpu", print)
    value, reason = made.settings["data.reasoning"]
    assert value == "drop"
    assert "leaves out an answer's reasoning" in reason
    assert any("data.reasoning drop" in warning for warning in made.warnings)
    assert "  reasoning: drop  # " in made.text


def test_pairs_are_found_even_if_one_lacks_an_answer(tmp_path: Path, model: Path) -> None:
    chat = [{"role": "user", "content": "hull"}, {"role": "assistant", "content": "keel"}]
    data = write_json_lines(tmp_path / "chats.jsonl", [{"messages": chat, "rejected_response": "rope"}] * 40)
    assert draft.draft_run(str(model), str(data), "1xcpu", print).settings["train.objective"][0] == "dpo"
    rows = [{"prompt": "hull", "chosen": f"rope {i}", "rejected": "sail" if i else None} for i in range(30)]
    write_json_lines(tmp_path / "rows.jsonl", rows)
    with refused("empty-answer") as problems:
        draft.draft_run(str(model), str(tmp_path / "rows.jsonl"), "1xcpu", print)
    assert (problems[0].where, problems[0].problem) == ("row 1", "the rejected answer is empty")


def test_without_gpus_any_number_of_ranks_divides_the_batch(tmp_path: Path, model: Path) -> None:
    made = draft.draft_run(str(model), write_rows(tmp_path, "jsonl"), None, print)
    assert made.settings["train.global_batch_size"][0] % 8 == 0
    assert not any(key.startswith("cluster.") for key in made.settings)
    assert not {"data.dataset_config_name", "data.val_split"} & made.settings.keys()
    (tmp_path / "run.yaml").write_text(made.text)
    assert planning.make_plan(read_run_file(tmp_path / "run.yaml", ["cluster.gpus_per_node=2"])).layout.ranks == 2


def test_gpus_that_are_here_are_the_ranks(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = draft.draft_run(str(model), write_rows(tmp_path, "jsonl"), "2xh100", print).settings
    here = SimpleNamespace(gpus=(SimpleNamespace(name="NVIDIA H100 80GB HBM3"),) * 2)
    monkeypatch.setattr(hardware, "read_gpus", lambda health: here)
    monkeypatch.setattr(hardware, "read_gpu_name", lambda: "h100")
    found = draft.draft_run(str(model), write_rows(tmp_path, "jsonl"), None, print).settings
    for key in ("train.global_batch_size", "train.num_train_epochs"):
        assert found[key][0] == named[key][0]


def test_a_gpu_without_bfloat16_gets_none(tmp_path: Path, model: Path) -> None:
    made = draft.draft_run(str(model), write_rows(tmp_path, "jsonl"), "1xt4", print)
    assert made.settings["train.bf16"] == (False, "")
    assert draft.draft_run(str(model), write_rows(tmp_path, "jsonl"), "1xa10", print).settings["train.bf16"][0]


@pytest.mark.fault(
    "a finished run whose rows have changed since",
    "`windlass train`",
    "have changed since this run was trained on them",
)
def test_a_finished_run_of_other_rows_is_not_the_one_that_is_asked_for(tmp_path: Path, model: Path) -> None:
    data = Path(write_rows(tmp_path, "jsonl"))
    made = draft.draft_run(str(model), str(data), "1xcpu", print, overrides=[f"train.output_dir={tmp_path / 'run'}"])
    (tmp_path / "run.yaml").write_text(made.text)
    plan = planning.make_plan(read_run_file(tmp_path / "run.yaml"))
    (tmp_path / "run").mkdir()
    for name, value in (
        (MANIFEST, {"state": FINISHED, "run": record_run(plan.run)}),
        (DATA, {"sequences": {"files": fingerprint_rows(plan.run.data, plan.where)}}),
    ):
        write_json(tmp_path / "run" / name, value)
    os.utime(data, (1, 1))  # a copy
    assert "nothing is left to train" in describe_finished(plan)
    with data.open("a") as file:
        file.write('{"text": "another row"}\n')
    with refused("other-rows") as problems:
        describe_finished(plan)
    assert "have changed since this run was trained on them" in problems[0].problem
    data.unlink()
    assert "nothing is left to train" in describe_finished(plan)


@pytest.mark.fault(
    "a finished run with another batch",
    "`windlass train`",
    "an optimizer step had 32 sequences when this run began, and would have 16 now",
)
@pytest.mark.fault(
    "a finished run with its base in another dtype", "`windlass train`", "was stored in bf16 when this run began, and"
)
def test_a_finished_run_of_other_steps_is_not_the_one_that_is_asked_for(tmp_path: Path, model: Path) -> None:
    """Keys that a run may change if what they come to is the same."""
    overrides = [f"train.output_dir={tmp_path / 'run'}", "train.global_batch_size=32", "cluster.gpu=h200"]
    made = draft.draft_run(str(model), write_rows(tmp_path, "jsonl"), None, print, overrides=overrides)
    (tmp_path / "run.yaml").write_text(made.text)

    def plan(*changes: str) -> planning.Plan:
        return planning.make_plan(read_run_file(tmp_path / "run.yaml", changes))

    began = plan()
    (tmp_path / "run").mkdir()
    recorded = {"run": record_run(began.run), "sequences": 32, "layout": {"base_dtype": "bf16"}}
    write_json(tmp_path / "run" / MANIFEST, {"state": FINISHED, **recorded})
    same = ["train.global_batch_size=null", "train.per_device_train_batch_size=4"]
    assert "nothing is left to train" in describe_finished(plan(*same, "train.gradient_accumulation_steps=8"))
    with refused("other-batch-size", "train.global_batch_size=null") as problems:
        describe_finished(plan(*same, "train.gradient_accumulation_steps=4"))
    assert problems[0].problem == "an optimizer step had 32 sequences when this run began, and would have 16 now"
    assert problems[0].hint.startswith("set train.global_batch_size: 32, which holds on any number of ranks; or name")
    with refused("other-base-dtype", "layout.base_dtype=nf4") as problems:
        describe_finished(plan("layout.base_dtype=nf4"))
    assert "was stored in bf16 when this run began, and would be in nf4 now" in problems[0].problem


def test_overrides_are_kept_and_refused_by_name(tmp_path: Path, model: Path) -> None:
    data = write_rows(tmp_path, "jsonl")
    overrides = ["data.max_length=300", "train.num_train_epochs=2", "lora.r=4", "name=mine"]
    made = draft.draft_run(str(model), data, "1xcpu", print, overrides=overrides)
    (tmp_path / "run.yaml").write_text(made.text)
    run = read_run_file(tmp_path / "run.yaml").run
    assert (run.data.length, run.train.epochs, run.lora.r, run.name) == (300, 2, 4, "mine")
    inner = ["train.sample.from_eval=8", "train.sample.max_new_tokens=12", "cluster.kubernetes.user={uid: 7, gid: 8}"]
    for sample in (inner, ["train.sample={from_eval: 8, max_new_tokens: 12}", "cluster.kubernetes.user.uid=7"]):
        sampled = draft.draft_run(str(model), data, "1xcpu", print, overrides=sample).load().run
        assert sampled.train.sample is not None
        assert (sampled.train.sample.from_eval, sampled.train.sample.max_new_tokens) == (8, 12)
        assert sampled.cluster.kubernetes.user is not None
        assert sampled.cluster.kubernetes.user.uid == 7
    for override in ("data.pack=false", "lora.r", "data.max_seq_length=3"):
        with refused("unknown-key", override):
            draft.draft_run(str(model), data, "1xcpu", print, overrides=[override])
    with pytest.raises(UserError, match=r"^--override lora.r"):
        draft.draft_run(str(model), data, "1xcpu", print, overrides=["lora.r=none"])


def test_validation_rows_of_the_data_are_used(tmp_path: Path, model: Path) -> None:
    (tmp_path / "set").mkdir()
    for split in ("train", "validation"):
        rows(tmp_path / "set" / f"{split}.jsonl", [9] * 40)
    made = draft.draft_run(str(model), str(tmp_path / "set"), "1xcpu", print)
    assert "data.val_fraction" not in made.settings
    assert planning.make_plan(made.load()).counts.evaluated
