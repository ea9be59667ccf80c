"""What can be checked before any machine: every check passes on a sound run and fails on a planted fault."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import warm

from windlass import demo
from windlass.launch import check
from windlass.launch.check import inputs
from windlass.launch.check.results import (
    FAIL,
    NODES,
    PASS,
    SKIPPED,
    WARN,
    Report,
    Result,
    failed,
    passed,
    show,
    skipped,
)
from windlass.plan import Plan, make
from windlass.runfile import Loaded, LoadedScript, read, read_any
from windlass.runfile.names import TRACKERS, absent_trackers

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "examples" / "mistral-small-4" / "train.yaml"
LACKING = sorted(name for name in TRACKERS if absent_trackers(name))
RAN = {name: tested.ran for name, tested in inputs.TESTED.items()}


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file of a small model that is whole, with data."""
    return demo.make(tmp_path_factory.mktemp("check") / "demo")


@pytest.fixture(scope="session")
def plan(sound: Path) -> Plan:
    return make(read(sound))


def named(results: Sequence[Result], name: str) -> Result:
    found = [result for result in results if result.name == name]
    assert len(found) == 1, [result.name for result in results]
    return found[0]


def with_(sound: Path, *overrides: str) -> Loaded:
    return read(sound, overrides)


# --- verdicts


def test_the_gravest_verdict_counts_and_nothing_checked_is_no_pass() -> None:
    good, bad, blind = passed("a", ""), failed("b", "", ""), skipped("c", "")
    for results, verdict in (((good, bad, blind), FAIL), ((good, blind), PASS), ((blind,), SKIPPED), ((), SKIPPED)):
        assert Report(check.ALONE, results).verdict == verdict


@pytest.mark.parametrize(("depth", "code"), [(check.ALONE, 1), (check.HERE, 1), (check.IN_POD, 13)])
def test_exit_codes(depth: str, code: int) -> None:
    assert Report(depth, (failed("a", "", ""),)).exit_code == code
    assert Report(depth, (passed("a", ""), skipped("b", ""))).exit_code == 0
    # A node that is missing may join the next try; whatever else is wrong stays so.
    assert Report(depth, (failed(NODES, "", ""), passed("a", ""))).exit_code == 1
    assert Report(depth, (failed(NODES, "", ""), failed("a", "", ""))).exit_code == code


# --- as a command


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm.python(), "-m", "windlass", "check", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


def test_a_sound_run_passes_here_and_leaves_check_json(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    done = command(str(sound), "--here", "--json", "--override", f"train.output_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "run" / "check.json").read_text())
    assert found["verdict"] in (PASS, WARN)
    verdicts = {result["name"]: result["verdict"] for result in found["results"]}
    for name in ("adapter", "memory", "model class", "attention", "weights", "tokenizer", "data", "host memory"):
        assert verdicts[name] == PASS, name
    assert verdicts["GPUs"] == verdicts["between nodes"] == SKIPPED


def test_faults_are_reported_all_at_once_with_their_places(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    faults = (
        "model.attn_implementation=flash_attention_2",
        "data.text_field=txet",
        f"train.output_dir={tmp_path / 'file' / 'run'}",
    )
    report = check.run(with_(sound, *faults))
    assert report.exit_code == 1
    assert {result.name for result in report.results if result.verdict == FAIL} == {"attention", "data", "run folder"}
    show(report)
    said = " ".join(capsys.readouterr().out.split())
    for words in ("flash-attn", "txet", "is a file", "hint: ", "--override data.text_field=txet", "fail: 3 fail"):
        assert words in said
    assert "failing: attention, run folder, data" in said


def test_an_invalid_run_file_is_a_user_error(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("model: {colour: red}\n")
    assert command(str(run)).returncode == 2
    done = command(str(run), "--in-pod")
    assert done.returncode == 13
    assert "colour" in done.stderr


def test_without_torch_the_rest_is_checked(sound: Path, tmp_path: Path) -> None:
    """An interpreter that has the login node's packages alone."""
    light = ("pydantic", "pydantic_core", "yaml", "typer", "click", "rich", "annotated_types", "typing_extensions",
             "typing_inspection", "markdown_it", "mdurl", "pygments", "shellingham", "annotated_doc")  # fmt: skip
    import pydantic

    packages = Path(pydantic.__file__).parents[1]
    for entry in packages.iterdir():
        if entry.name.split(".")[0].split("-")[0] in light:
            (tmp_path / entry.name).symlink_to(entry)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "windlass", "check", str(sound), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {result["name"]: result["verdict"] for result in json.loads(done.stdout)["results"]}
    assert verdicts["memory"] == verdicts["weights"] == verdicts["run folder"] == PASS
    assert verdicts["libraries"] == verdicts["tokenizer"] == verdicts["data"] == SKIPPED


def test_a_run_for_a_cluster_is_not_compared_with_the_machine_that_plans_it() -> None:
    loaded = read(RECIPE, ["cluster.platform=kubernetes", "cluster.image=x/y:1", "cluster.namespace=n"])
    report = check.run(loaded)
    assert report.exit_code == 0
    for name in ("libraries", "run folder", "weights", "data"):
        assert named(report.results, name).verdict == SKIPPED
    assert named(report.results, "memory").verdict == PASS


# --- plan, weights, tokenizer, data


def test_what_the_plan_refuses_fails_with_its_place(sound: Path) -> None:
    report = check.run(with_(sound, "lora.target_modules=[no_such_proj]"))
    found = named(report.results, "plan")
    assert (found.verdict, "no_such_proj" in found.seen, "lora.target_modules" in found.where) == (FAIL, True, True)
    # what needs no plan is still checked, and the rest says so
    assert named(report.results, "data").verdict == PASS
    assert named(report.results, "weights").verdict == SKIPPED


def test_a_run_that_does_not_fit_fails_with_the_remedy(sound: Path, plan: Plan) -> None:
    figures = "{name: thimble, memory_gib: 0.01, bf16_tflops: 1, memory_gb_per_second: 1}"
    found = inputs.check_memory(make(with_(sound, f"cluster.gpu={figures}")))
    assert (found.verdict, "thimble" in found.seen) == (FAIL, True)
    assert found.hint
    assert "cluster.gpu" in found.where
    assert inputs.check_memory(plan).verdict == PASS


def test_a_published_config_is_no_model(plan: Plan) -> None:
    assert inputs.check_weights(plan, elsewhere=False).verdict == PASS
    absent = make(read(RECIPE))
    assert inputs.check_weights(absent, elsewhere=False).verdict == FAIL
    assert inputs.check_weights(absent, elsewhere=True).verdict == SKIPPED


def test_a_tokenizer_that_is_damaged_absent_or_anothers_fails(sound: Path, tmp_path: Path) -> None:
    model = shutil.copytree(sound.parent / "model", tmp_path / "model")
    loaded = with_(sound, f"model.model_name_or_path={model}")
    assert inputs.check_tokenizer(make(loaded))[1].verdict == PASS
    original = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(original[:100])
    assert inputs.check_tokenizer(make(loaded))[1].verdict == FAIL
    longer = json.loads(original)
    size = len(longer["model"]["vocab"])
    longer["model"]["vocab"] |= {f"windlass{i}": size + i for i in range(1200)}
    (model / "tokenizer.json").write_text(json.dumps(longer))
    found = inputs.check_tokenizer(make(loaded))[1]
    assert (found.verdict, "rows" in found.seen) == (FAIL, True)
    for path in model.glob("tokenizer*"):
        path.unlink()
    assert inputs.check_tokenizer(make(loaded))[1].verdict == FAIL


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.text_field=txet", "txet"),
        ("data.dataset_name_or_path=/no/such/set", "does not exist"),
        ("data.train_split=trian", "trian"),
        ("data.val_split=holdout", "holdout"),
    ],
)
def test_data_that_cannot_be_read_fails(sound: Path, override: str, said: str) -> None:
    assert inputs.check_data(with_(sound), None, elsewhere=False).verdict == PASS
    found = inputs.check_data(with_(sound, override), None, elsewhere=False)
    assert (found.verdict, said in found.seen) == (FAIL, True), found


def test_data_without_validation_rows_warns_and_a_hub_name_is_skipped(sound: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n{"text": "two"}\n')
    alone = read_without(sound, tmp_path, ("val_split: validation\n",), f"data.dataset_name_or_path={rows}")
    found = inputs.check_data(alone, None, elsewhere=False)
    assert (found.verdict, "wants evaluation" in found.seen) == (FAIL, True)  # asked for with train.eval_steps
    lines = ("val_split: validation\n", "eval_steps: 20\n")
    alone = read_without(sound, tmp_path, lines, f"data.dataset_name_or_path={rows}")
    assert inputs.check_data(alone, None, elsewhere=False).verdict == WARN
    hub = with_(sound, "data.dataset_name_or_path=someone/set")
    assert inputs.check_data(hub, None, elsewhere=False).verdict == SKIPPED
    rows.write_text('{"text": "one"\n')
    assert inputs.check_data(alone, None, elsewhere=False).verdict == FAIL


def read_without(sound: Path, folder: Path, lines: Sequence[str], *overrides: str) -> Loaded:
    text = sound.read_text()
    for line in lines:
        assert line in text
        text = text.replace(f"  {line}", "")
    run = folder / "run.yaml"
    run.write_text(text)
    return read(run, overrides)


def test_chats_wait_for_a_tokenizer(sound: Path, tmp_path: Path) -> None:
    rows = tmp_path / "chat.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n')
    overrides = [f"data.dataset_name_or_path={rows}", "data.messages_field=messages"]
    chat = read_without(sound, tmp_path, ("val_split: validation\n",), *overrides, "train.eval_strategy=no")
    assert inputs.check_data(chat, None, elsewhere=False).verdict == SKIPPED
    opened, _ = inputs.check_tokenizer(make(chat))
    assert inputs.check_data(chat, opened, elsewhere=False).verdict == PASS


# --- libraries


def test_the_table_is_pyprojects() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    ranges = {f"{name}>={tested.least},<{tested.below}" for name, tested in inputs.TESTED.items()}
    assert ranges <= set(wanted)


def test_the_tests_run_with_what_the_table_says() -> None:
    have = inputs.installed()
    for name, tested in inputs.TESTED.items():
        assert inputs.release(have[name]) == inputs.release(tested.ran), name


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.13.0+cu130", PASS),
        ("2.13.1", PASS),
        ("2.12.1", WARN),
        ("2.10.0", FAIL),
        ("3.0.0a1", FAIL),
        (None, FAIL),
        ("nightly", SKIPPED),
    ],
)
def test_libraries_against_the_table(version: str | None, verdict: str) -> None:
    have = RAN if version is None else RAN | {"torch": version}
    if version is None:
        have = {name: ran for name, ran in RAN.items() if name != "torch"}
    results = [inputs.check_library(name, have.get(name)) for name in inputs.TESTED]
    assert named(results, "library torch").verdict == verdict
    assert {result.verdict for result in results if result.name != "library torch"} == {PASS}


def test_a_torchao_that_peft_refuses_fails() -> None:
    assert inputs.check_torchao({}).verdict == PASS
    assert inputs.check_torchao({"torchao": "0.16.0"}).verdict == PASS
    assert inputs.check_torchao({"torchao": "0.15.0"}).verdict == FAIL


def test_the_least_torchao_is_what_peft_says() -> None:
    import peft.import_utils

    assert f'"{inputs.TORCHAO_LEAST}"' in Path(peft.import_utils.__file__).read_text()


@pytest.mark.parametrize(
    ("cuda", "driver", "gpus", "verdict"),
    [
        ("12.8", "550.54.15", 1, PASS),
        ("13.0", "580.65.06", 8, PASS),
        ("13.0", "570.124.06", 8, FAIL),
        ("12.1", "470.57.02", 1, FAIL),
        (None, "580.65.06", 4, FAIL),
        (None, None, 0, SKIPPED),
        ("12.8", None, 0, SKIPPED),
        ("99.0", "999.0", 1, SKIPPED),
    ],
)
def test_driver_against_torchs_cuda(cuda: str | None, driver: str | None, gpus: int, verdict: str) -> None:
    assert inputs.check_cuda(cuda, driver, gpus).verdict == verdict


def test_an_older_driver_passes_if_cuda_starts_all_the_same() -> None:
    for works, verdict in ((True, PASS), (False, FAIL)):
        assert inputs.check_cuda("13.0", "570.10", 1, lambda works=works: works).verdict == verdict  # type: ignore[misc]
    # Nobody asks where the driver will do: the question starts CUDA.
    assert inputs.check_cuda("13.0", "580.65.06", 1, lambda: pytest.fail("asked")).verdict == PASS


def test_a_missing_model_class_is_reported_with_the_version_that_has_it() -> None:
    found, result = inputs.check_model_class("Mistral4ForCausalLM", inputs.installed(), "w")
    assert (found.__name__, result.verdict) == ("Mistral4ForCausalLM", PASS)
    found, result = inputs.check_model_class("Mistral9ForCausalLM", inputs.installed(), "w")
    assert (found, result.verdict) == (None, FAIL)
    old = inputs.missing_class("Mistral4ForCausalLM", "5.0.0", AttributeError("module has no attribute"), "w")
    assert "5.4 is the first that has" in old.seen
    assert "transformers==" in old.hint
    broken = inputs.missing_class("LlamaForCausalLM", "5.23.0", ImportError("undefined symbol: _ZN\nmore"), "w")
    assert "undefined symbol" in broken.seen
    assert "\n" not in broken.seen
    assert inputs.check_model_class("LlamaForCausalLM", {"transformers": "5.23.0"}, "w")[1].verdict == SKIPPED


def test_every_attention_that_a_run_file_takes_is_known() -> None:
    from windlass.runfile.names import ATTENTION

    assert set(inputs.ATTENTION) == set(ATTENTION)


class Model:
    """A class's flags, as transformers sets them."""

    _supports_sdpa = True
    _supports_flash_attn = False


@pytest.mark.parametrize(
    ("asked", "have", "model", "verdict"),
    [
        ("null", {}, Model, PASS),
        ("sdpa", {}, Model, PASS),
        ("eager", {}, Model, PASS),
        ("sdpa", {}, None, SKIPPED),
        ("flex_attention", {}, Model, FAIL),  # not supported by the model
        ("flash_attention_2", {}, Model, FAIL),  # not installed
        ("flash_attention_2", {"flash-attn": "2.8"}, Model, FAIL),  # its module is missing
        ("kernels-community/flash-attn", {}, Model, FAIL),
        ("kernels-community/flash-attn", {"kernels": "1"}, Model, SKIPPED),
    ],
)
def test_attention_is_installed_and_taken(
    sound: Path, asked: str, have: dict[str, str], model: Any, verdict: str
) -> None:
    found = inputs.check_attention(with_(sound, f"model.attn_implementation={asked}"), model, have)
    assert found.verdict == verdict, found
    assert found.hint or verdict != FAIL


# --- trackers, scripts


@pytest.mark.skipif(not LACKING, reason="every tracker is installed here")
def test_a_tracker_that_is_not_installed_fails(sound: Path) -> None:
    found = named(inputs.check_trackers(with_(sound, f"train.report_to={LACKING[0]}")), f"tracker {LACKING[0]}")
    assert (found.verdict, "pip install" in found.hint) == (FAIL, True)
    assert inputs.check_trackers(with_(sound, "train.report_to=none")) == []


def test_a_scripts_own_faults_fail(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"

    def checked(*overrides: str) -> tuple[Any, list[Result]]:
        loaded = read_any(run, overrides)
        assert isinstance(loaded, LoadedScript)
        return inputs.check_script(loaded, {}, passed("run folder", ""), elsewhere=False)

    run.write_text(f"kind: script\nscript: {{path: {tmp_path}/a.py, output_dir: {tmp_path}/run}}\n")
    for text, said in ((None, "can't be read"), ("def f(:\n", "a.py:1 is not Python"), ("\0", "not Python")):
        (tmp_path / "a.py").unlink(missing_ok=True)
        if text is not None:
            (tmp_path / "a.py").write_text(text)
        found = named(checked()[1], "script")
        assert (found.verdict, said in found.seen) == (FAIL, True), found
    results = checked()[1]
    assert named(results, "library torch").verdict == FAIL
    plan, results = checked("cluster.gpu=quantum")
    assert plan is None
    assert "quantum" in named(results, "plan").seen
