"""What can be known before a machine is looked at: every check passes on a sound run and fails on a planted fault."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from checks_seen import places_of, require_all, watched

from windlass import demo
from windlass.launch import check
from windlass.launch.check import folders, script, static, versions
from windlass.launch.check.result import FAIL, PASS, UNSEEN, WARN, Result, failed, passed, unseen, worst
from windlass.launch.check.show import show
from windlass.plan import Plan, make
from windlass.runfile import Loaded, LoadedScript, read, read_any
from windlass.runfile.names import TRACKERS, absent_trackers

ROOT = Path(__file__).parent.parent
WATCHED = re.compile(r"require_all\(request, \[([a-z, ]+)\]")
RECIPE = ROOT / "examples" / "mistral-small-4" / "train.yaml"
LACKING = sorted(name for name in TRACKERS if absent_trackers(name))
TESTED = {name: tested.ran for name, tested in versions.TESTED.items()}


@pytest.fixture(scope="module", autouse=True)
def said() -> Iterator[set[Any]]:
    """What the tests of this file made checks say; the last one looks at it."""
    with watched() as found:
        yield found


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


def test_the_gravest_verdict_counts_and_nothing_seen_is_no_pass() -> None:
    good, bad, blind = passed("a", ""), failed("b", "", ""), unseen("c", "")
    assert worst([good, bad, blind]) == FAIL
    assert worst([good, blind]) == PASS
    assert worst([blind]) == UNSEEN
    assert worst([]) == UNSEEN


@pytest.mark.parametrize(("depth", "code"), [(check.ALONE, 1), (check.HERE, 1), (check.IN_POD, 13)])
def test_exit_codes(depth: str, code: int) -> None:
    assert check.Report(depth, (failed("a", "", ""),)).exit_code == code
    assert check.Report(depth, (passed("a", ""), unseen("b", ""))).exit_code == 0
    # A node that did not come may come to the next try; what is wrong besides stays so.
    assert check.Report(depth, (failed("nodes", "", ""), passed("a", ""))).exit_code == 1
    assert check.Report(depth, (failed("nodes", "", ""), failed("a", "", ""))).exit_code == code


# --- the whole, as a command


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "windlass", "check", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


def test_a_sound_run_passes_here_and_leaves_check_json(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    began = time.monotonic()
    done = command(str(sound), "--here", "--json", "--override", f"train.output_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "run" / "check.json").read_text())
    assert found["verdict"] in (PASS, WARN)
    verdicts = {result["name"]: result["verdict"] for result in found["results"]}
    for name in ("adapter", "memory", "model class", "attention", "weights", "tokenizer", "data", "host memory"):
        assert verdicts[name] == PASS, name
    assert verdicts["GPUs"] == verdicts["between nodes"] == UNSEEN
    # 10 s on an idle machine; others may be busy on this one.
    assert found["seconds"] < 10 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert time.monotonic() - began < 120


def test_faults_are_told_all_at_once_with_their_places(
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


def test_a_run_file_that_cannot_be_read_is_a_users_mistake(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("model: {colour: red}\n")
    assert command(str(run)).returncode == 2
    done = command(str(run), "--in-pod")
    assert done.returncode == 13
    assert "colour" in done.stderr


def test_without_torch_the_rest_is_looked_at(sound: Path, tmp_path: Path) -> None:
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
    assert verdicts["libraries"] == verdicts["tokenizer"] == verdicts["data"] == UNSEEN


def test_a_run_for_a_cluster_is_not_held_against_the_machine_that_plans_it() -> None:
    loaded = read(RECIPE, ["cluster.platform=kubernetes", "cluster.image=x/y:1", "cluster.namespace=n"])
    report = check.run(loaded)
    assert report.exit_code == 0
    for name in ("libraries", "run folder", "weights", "data"):
        assert named(report.results, name).verdict == UNSEEN
    assert named(report.results, "memory").verdict == PASS


# --- plan, weights, tokenizer, data


def test_what_the_plan_refuses_fails_with_its_place(sound: Path) -> None:
    plan, results = static.planned(with_(sound, "lora.target_modules=[no_such_proj]"), lambda: None)
    assert plan is None
    assert [result.verdict for result in results] == [FAIL]
    assert "no_such_proj" in results[0].seen
    assert "lora.target_modules" in results[0].where
    # what needs no plan is still looked at, and the rest says so
    report = check.run(with_(sound, "lora.target_modules=[no_such_proj]"))
    assert named(report.results, "data").verdict == PASS
    assert named(report.results, "weights").verdict == UNSEEN


def test_a_run_that_does_not_fit_fails_with_the_remedy(sound: Path, plan: Plan) -> None:
    figures = "{name: thimble, memory_gib: 0.01, bf16_tflops: 1, memory_gb_per_second: 1}"
    found = static.memory(make(with_(sound, f"cluster.gpu={figures}")))
    assert (found.verdict, "thimble" in found.seen) == (FAIL, True)
    assert found.hint
    assert "cluster.gpu" in found.where
    assert static.memory(plan).verdict == PASS


def test_a_published_config_is_no_model(plan: Plan) -> None:
    assert static.weights(plan, elsewhere=False).verdict == PASS
    absent = make(read(RECIPE))
    assert static.weights(absent, elsewhere=False).verdict == FAIL
    assert static.weights(absent, elsewhere=True).verdict == UNSEEN


def test_a_tokenizer_that_is_damaged_absent_or_anothers_fails(sound: Path, tmp_path: Path) -> None:
    model = shutil.copytree(sound.parent / "model", tmp_path / "model")
    loaded = with_(sound, f"model.model_name_or_path={model}")
    assert static.tokenizer(make(loaded))[1].verdict == PASS
    original = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(original[:100])
    assert static.tokenizer(make(loaded))[1].verdict == FAIL
    longer = json.loads(original)
    size = len(longer["model"]["vocab"])
    longer["model"]["vocab"] |= {f"windlass{i}": size + i for i in range(1200)}
    (model / "tokenizer.json").write_text(json.dumps(longer))
    found = static.tokenizer(make(loaded))[1]
    assert (found.verdict, "rows" in found.seen) == (FAIL, True)
    for path in model.glob("tokenizer*"):
        path.unlink()
    assert static.tokenizer(make(loaded))[1].verdict == FAIL


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
    assert static.data(with_(sound), None, elsewhere=False).verdict == PASS
    found = static.data(with_(sound, override), None, elsewhere=False)
    assert (found.verdict, said in found.seen) == (FAIL, True), found


def test_data_without_validation_rows_warns_and_a_hub_name_was_not_looked_at(sound: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n{"text": "two"}\n')
    alone = read_without(sound, tmp_path, ("val_split: validation\n",), f"data.dataset_name_or_path={rows}")
    found = static.data(alone, None, elsewhere=False)
    assert (found.verdict, "wants evaluation" in found.seen) == (FAIL, True)  # asked for with train.eval_steps
    lines = ("val_split: validation\n", "eval_steps: 20\n")
    alone = read_without(sound, tmp_path, lines, f"data.dataset_name_or_path={rows}")
    assert static.data(alone, None, elsewhere=False).verdict == WARN
    hub = with_(sound, "data.dataset_name_or_path=someone/set")
    assert static.data(hub, None, elsewhere=False).verdict == UNSEEN
    rows.write_text('{"text": "one"\n')
    assert static.data(alone, None, elsewhere=False).verdict == FAIL


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
    assert static.data(chat, None, elsewhere=False).verdict == UNSEEN
    opened, _ = static.tokenizer(make(chat))
    assert static.data(chat, opened, elsewhere=False).verdict == PASS


# --- libraries


def test_the_table_is_pyprojects() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    ranges = {f"{name}>={tested.least},<{tested.below}" for name, tested in versions.TESTED.items()}
    assert ranges <= set(wanted)


def test_the_tests_run_with_what_the_table_says() -> None:
    have = versions.installed()
    for name, tested in versions.TESTED.items():
        assert versions.number(have[name]) == versions.number(tested.ran), name


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.13.0+cu130", PASS),
        ("2.13.1", PASS),
        ("2.12.1", WARN),
        ("2.10.0", FAIL),
        ("3.0.0a1", FAIL),
        (None, FAIL),
        ("nightly", UNSEEN),
    ],
)
def test_libraries_against_the_table(version: str | None, verdict: str) -> None:
    have = TESTED if version is None else TESTED | {"torch": version}
    if version is None:
        have = {name: ran for name, ran in TESTED.items() if name != "torch"}
    results = versions.libraries(have)
    assert named(results, "library torch").verdict == verdict
    assert {result.verdict for result in results if result.name != "library torch"} == {PASS}


def test_a_torchao_that_peft_refuses_fails() -> None:
    assert versions.torchao({}).verdict == PASS
    assert versions.torchao({"torchao": "0.16.0"}).verdict == PASS
    assert versions.torchao({"torchao": "0.15.0"}).verdict == FAIL


def test_the_least_torchao_is_what_peft_says() -> None:
    import peft.import_utils

    assert f'"{versions.TORCHAO_LEAST}"' in Path(peft.import_utils.__file__).read_text()


@pytest.mark.parametrize(
    ("cuda", "driver", "gpus", "verdict"),
    [
        ("12.8", "550.54.15", 1, PASS),
        ("13.0", "580.65.06", 8, PASS),
        ("13.0", "570.124.06", 8, FAIL),
        ("12.1", "470.57.02", 1, FAIL),
        (None, "580.65.06", 4, FAIL),
        (None, None, 0, UNSEEN),
        ("12.8", None, 0, UNSEEN),
        ("99.0", "999.0", 1, UNSEEN),
    ],
)
def test_driver_against_torchs_cuda(cuda: str | None, driver: str | None, gpus: int, verdict: str) -> None:
    assert versions.cuda(cuda, driver, gpus).verdict == verdict


def test_a_driver_that_the_images_own_libraries_make_do_passes() -> None:
    for works, verdict in ((True, PASS), (False, FAIL)):
        assert versions.cuda("13.0", "570.10", 1, lambda works=works: works).verdict == verdict  # type: ignore[misc]
    # Nobody asks where the driver will do: the question starts CUDA.
    assert versions.cuda("13.0", "580.65.06", 1, lambda: pytest.fail("asked")).verdict == PASS


def test_the_model_class_is_imported_and_its_absence_told_with_the_version_that_has_it() -> None:
    found, results = versions.model_class("Mistral4ForCausalLM", versions.installed(), "w")
    assert (found.__name__, results[0].verdict) == ("Mistral4ForCausalLM", PASS)
    found, results = versions.model_class("Mistral9ForCausalLM", versions.installed(), "w")
    assert (found, results[0].verdict) == (None, FAIL)
    old = versions.no_class("Mistral4ForCausalLM", "5.0.0", AttributeError("module has no attribute"), "w")
    assert "5.4 is the first that has" in old.seen
    assert "transformers==" in old.hint
    broken = versions.no_class("LlamaForCausalLM", "5.23.0", ImportError("undefined symbol: _ZN\nmore"), "w")
    assert "undefined symbol" in broken.seen
    assert "\n" not in broken.seen
    assert versions.model_class("LlamaForCausalLM", {"transformers": "5.23.0"}, "w")[1][0].verdict == UNSEEN


def test_every_family_says_since_when_transformers_has_it() -> None:
    from windlass.model.family import FAMILIES

    assert {family.causal_lm for family in FAMILIES.values()} == set(versions.MODEL_SINCE)


def test_every_attention_that_a_run_file_takes_is_known() -> None:
    from windlass.runfile.names import ATTENTION

    assert set(versions.ATTENTION) == set(ATTENTION)


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
        ("sdpa", {}, None, UNSEEN),
        ("flex_attention", {}, Model, FAIL),  # not supported by the model
        ("flash_attention_2", {}, Model, FAIL),  # not installed
        ("flash_attention_2", {"flash-attn": "2.8"}, Model, FAIL),  # its module is missing
        ("kernels-community/flash-attn", {}, Model, FAIL),
        ("kernels-community/flash-attn", {"kernels": "1"}, Model, UNSEEN),
    ],
)
def test_attention_is_installed_and_taken(
    sound: Path, asked: str, have: dict[str, str], model: Any, verdict: str
) -> None:
    found = versions.attention(with_(sound, f"model.attn_implementation={asked}"), model, have)
    assert found.verdict == verdict, found
    assert found.hint or verdict != FAIL


# --- folders


def test_a_folder_that_cannot_be_written_fails(sound: Path, tmp_path: Path) -> None:
    assert folders.fault(tmp_path / "not" / "yet") == ""
    assert not list(tmp_path.iterdir())  # the trial leaves nothing
    (tmp_path / "file").touch()
    assert "is a file" in folders.fault(tmp_path / "file" / "below")
    assert "/proc" in folders.fault(Path("/proc/windlass"))  # refused to root too
    assert folders.output(with_(sound, "train.output_dir=/proc/windlass"), elsewhere=False).verdict == FAIL
    assert folders.output(with_(sound, f"train.output_dir={tmp_path}"), elsewhere=False).verdict == PASS


def test_room_for_the_run_and_for_a_merged_model() -> None:
    plan = make(read(RECIPE))
    run, merged, words = folders.needed(plan)
    kept = plan.schedule.checkpoints_kept or 0
    adapter = plan.adapter.trainable * plan.adapter.dtype_bytes
    tokens = 8 * plan.schedule.tokens_per_step * (plan.schedule.steps_per_epoch or 0)
    assert run == (kept + 1) * plan.schedule.checkpoint_bytes + adapter + tokens
    assert merged == plan.total * 2
    assert folders.enough(run - 1, plan).verdict == FAIL
    assert words in folders.enough(run - 1, plan).seen
    assert folders.enough(run, plan).verdict == WARN
    assert folders.enough(run + merged, plan).verdict == PASS


def test_what_the_run_has_written_is_not_asked_for_again(tmp_path: Path) -> None:
    before, _, _ = folders.needed(make(read(RECIPE, [f"train.output_dir={tmp_path}"])))
    for name, size in (("checkpoints/step-10/adapter.safetensors", 300_000), ("tokens/a/data.arrow", 200_000)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"x" * size)
    plan = make(read(RECIPE, [f"train.output_dir={tmp_path}"]))
    after, _, words = folders.needed(plan)
    assert 500_000 <= before - after < 600_000
    assert "are there" in words
    assert folders.enough(after, plan).verdict != FAIL
    assert folders.enough(after - 1, plan).verdict == FAIL
    # More than this run would ever hold makes no room for the rest.
    with (tmp_path / "tokens" / "a" / "other.arrow").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 << 20)
    tokens = 8 * plan.schedule.tokens_per_step * (plan.schedule.steps_per_epoch or 0)
    assert before - folders.needed(plan)[0] <= 300_000 + 100_000 + tokens


def test_caches_and_home_must_be_writable(tmp_path: Path) -> None:
    good = folders.caches({"HOME": str(tmp_path)})
    assert {result.verdict for result in good} == {PASS}
    bad = {"HOME": "/proc/nobody", "HF_HOME": "/proc/hub", "TRITON_CACHE_DIR": str(tmp_path), "TMPDIR": "/proc/tmp"}
    results = folders.caches(bad | {"TORCHINDUCTOR_CACHE_DIR": "/proc/inductor"})
    for name in ("HOME", "HF_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert named(results, f"folder {name}").verdict == FAIL, name
    assert named(results, "folder TRITON_CACHE_DIR").verdict == PASS
    assert named(folders.caches({}), "folder HOME").verdict == FAIL


@pytest.mark.skipif(not LACKING, reason="every tracker is installed here")
def test_a_tracker_that_is_not_installed_fails(sound: Path) -> None:
    found = named(versions.trackers(with_(sound, f"train.report_to={LACKING[0]}")), f"tracker {LACKING[0]}")
    assert (found.verdict, "pip install" in found.hint) == (FAIL, True)
    assert versions.trackers(with_(sound, "train.report_to=none")) == []


def test_a_scripts_own_faults_fail(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"

    def checked(*overrides: str) -> tuple[Any, list[Result]]:
        loaded = read_any(run, overrides)
        assert isinstance(loaded, LoadedScript)
        return script.static(loaded, {}, elsewhere=False)

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


def test_every_module_of_checks_is_watched_in_one_of_the_files() -> None:
    """A new one is added to the last test of the file that plants its faults."""
    folder = Path(str(check.__file__)).parent
    calling = {path.stem for path in folder.glob("*.py") if places_of(path)} - {"result"}
    texts = (ROOT / "tests" / f"test_check{name}.py" for name in ("", "_machine", "_nodes"))
    watched = {word for path in texts for list_ in WATCHED.findall(path.read_text()) for word in list_.split(", ")}
    assert calling == watched


def test_every_check_of_these_has_failed_above(request: pytest.FixtureRequest, said: set[Any]) -> None:
    require_all(request, [static, versions, folders, script], said)
