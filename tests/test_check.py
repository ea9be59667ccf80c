"""Checks before any machine: every check passes on a valid run and fails on a planted fault."""

import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import warm
import yaml
from refusals import refused
from rich.console import Console
from text_run import make_text_run

from windlass import versions
from windlass.cli import during, options
from windlass.errors import TRAINING
from windlass.hardware import GpuReading, Gpus
from windlass.launch import check
from windlass.launch.check import inputs
from windlass.launch.check.results import FAIL, NODES, PASS, SKIPPED, WARN, Context, Result, failed, passed, skipped
from windlass.model.family import FAMILIES
from windlass.plan import Plan, make_plan
from windlass.plan.longest import find_longest_rows
from windlass.plan.machine import is_this_machine
from windlass.runfile import Loaded, LoadedScript, read_any, read_run_file
from windlass.runfile.names import ATTENTION, TRACKERS, find_absent_trackers
from windlass.train import console

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "examples" / "mistral-small-4" / "train.yaml"
LACKING = sorted(name for name in TRACKERS if find_absent_trackers(name))


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a valid run file of a small complete model, with data."""
    return make_text_run(tmp_path_factory.mktemp("check") / "demo")


ABSENT = {  # a key that names a file or folder that is not here, and what is said
    "data.dataset_config_name=other": "has no config 'other'; it has none",
    "data.eval={held: {path: held.jsonl}}": "held.jsonl does not exist",
    "data.dataset_name_or_path=/no/rows.jsonl": "/no/rows.jsonl does not exist",
    "data.chat_template=chat.jinja": "there is no file chat.jinja",
    "lora.adapter=adapter": "no adapter_config.json in adapter",
    "train.sample.file=prompts.txt": "prompts.txt can't be read: No such file or directory",
    f"train.output_dir={__file__}": f"{__file__} is a file",
}


@pytest.mark.parametrize("overrides", [list(ABSENT)[:1], list(ABSENT)[1:2], list(ABSENT)[2:]], ids=str)
def test_missing_input_files_are_named_by_plan_and_check(sound: Path, overrides: list[str]) -> None:
    """The rows are read up to the first that is absent."""
    loaded = read_run_file(sound, overrides)
    cautions = [each.text for each in make_plan(loaded, compare=False).warnings]
    failures = [result for result in check.run_checks(loaded).results if result.verdict == FAIL]
    for override in overrides:
        (warning,) = (text for text in cautions if ABSENT[override] in text)
        assert warning.startswith(f"--override {override}: ")
        where = f"--override {override}"
        assert any(ABSENT[override] in each.seen and each.where == where for each in failures), failures


def test_files_that_a_pod_will_find_are_not_missed(sound: Path) -> None:
    mounted = ["data.chat_template=/mounted/there/chat.jinja", "lora.adapter=/mounted/there/adapter"]
    loaded = read_run_file(sound, ["cluster.platform=kubernetes", "cluster.image=a/b", *mounted])
    cautions = [each.text for each in make_plan(loaded, compare=False).warnings]
    assert not [text for text in cautions if "mounted" in text and "no effect on text rows" not in text]
    results = check.run_checks(loaded).results
    assert not [each for each in results if each.verdict == FAIL and "mounted" in each.seen]


@pytest.fixture(scope="module", autouse=True)
def read_distributions_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "list_distributions", functools.cache(inputs.list_distributions))
        yield


def named(results: Sequence[Result], name: str) -> Result:
    (found,) = (result for result in results if result.name == name)
    return found


def context(
    loaded: Loaded | LoadedScript, plan: Plan | None = None, have: Mapping[str, str] | None = None, alone: bool = False
) -> Context:
    return Context(loaded, plan, inputs.list_distributions() if have is None else have, {}, Path("/"), alone)


def checked_data(loaded: Loaded, tokenizer: Any = None) -> Result:
    return inputs.check_data(context(loaded), loaded, tokenizer)


def test_worst_result_decides_the_exit_code() -> None:
    good, bad, blind = passed("a", ""), failed("b", "", ""), skipped("c", "")
    for results, verdict in (((good, bad, blind), FAIL), ((good, blind), PASS), ((blind,), SKIPPED), ((), SKIPPED)):
        assert check.CheckReport(check.ALONE, results).verdict == verdict
    # A node that is missing may join the next try; whatever else is wrong stays so.
    missing = failed(NODES, "", "")
    for depth, code in ((check.ALONE, 1), (check.HERE, 1), (check.IN_POD, 13)):
        for found, expected in (((bad,), code), ((good, blind), 0), ((missing, good), 1), ((missing, bad), code)):
            assert check.CheckReport(depth, found).exit_code == expected


# --- as a command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [warm.python(), "-m", "windlass", "check", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_valid_run_passes_and_writes_check_json(sound: Path, tmp_path: Path) -> None:
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


def test_an_invalid_run_file_is_not_tried_again_in_a_pod(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {colour: red}\n")
    done = command(str(tmp_path / "run.yaml"), "--in-pod")
    assert (done.returncode, "colour" in done.stderr) == (13, True)


def test_without_torch_the_rest_is_checked(sound: Path, tmp_path: Path) -> None:
    """Runs an interpreter with only the login node's packages."""
    light = "pydantic pydantic_core yaml ruamel typer click rich annotated_types typing_extensions typing_inspection"
    light += " markdown_it mdurl pygments shellingham annotated_doc"
    for entry in Path(yaml.__file__).parents[1].iterdir():
        if entry.name.split(".")[0].split("-")[0] in light.split():
            (tmp_path / entry.name).symlink_to(entry)
    python = [sys.executable, "-S", "-m", "windlass", "check", str(sound), "--json"]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run(python, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {result["name"]: result["verdict"] for result in json.loads(done.stdout)["results"]}
    assert verdicts["memory"] == verdicts["weights"] == verdicts["run folder"] == PASS
    assert verdicts["libraries"] == verdicts["tokenizer"] == verdicts["data"] == SKIPPED


def test_the_log_of_a_pod_cuts_no_word(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are read at 80 columns, and searched for names of pods and paths."""
    monkeypatch.setenv("COLUMNS", "80")
    pod, path = "node 11 (mistral4small-lora-fsdp-2xh200-node-0-11-abcde)", "/data/output/Models/" + "m" * 70
    seen = "eth0 has no IP address; " + "it has lo and net1, " * 5
    rows = (
        failed("interface GLOO_SOCKET_IFNAME", seen, "set it", "x:1"),
        passed("run folder", f"written, locked and renamed in {path}, where it will be created"),
    )
    check.print_report(check.CheckReport(check.IN_POD, tuple(replace(row, node=pod) for row in rows)))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 or path in line for line in lines), lines
    words = " ".join(lines).split()
    for word in (*pod.split(), "GLOO_SOCKET_IFNAME", f"{path},", "created", "hint:"):
        assert word in words


# --- plan, weights, tokenizer, data


def test_faults_are_reported_all_at_once_with_their_places(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    faults = (
        "model.attn_implementation=flash_attention_2",
        "data.text_field=txet",
        f"train.output_dir={tmp_path / 'file' / 'run'}",
        "cluster.env.NCCL_IB_HCAS=mlx5_0",
    )
    report = check.run_checks(read_run_file(sound, faults))
    assert report.exit_code == 1
    assert {result.name for result in report.results if result.verdict == FAIL} == {"attention", "data", "run folder"}
    check.print_report(report)
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("flash-attn", "is a file", "hint: ", "--override data.text_field=txet", "did you mean NCCL_IB_HCA?"):
        assert words in printed
    assert "failing: attention, data, run folder" in printed


def test_what_the_plan_refuses_fails_with_its_place_and_the_rest_is_checked(sound: Path) -> None:
    report = check.run_checks(read_run_file(sound, ["lora.target_modules=[no_such_proj]"]))
    found = named(report.results, "plan")
    assert (found.verdict, "no_such_proj" in found.seen, "lora.target_modules" in found.where) == (FAIL, True, True)
    assert named(report.results, "data").verdict == PASS
    assert named(report.results, "weights and tokenizer").verdict == SKIPPED
    figures = "{name: thimble, memory_gib: 0.01, bf16_tflops: 1, memory_gb_per_second: 1}"
    found = named(check.run_checks(read_run_file(sound, [f"cluster.gpu={figures}"])).results, "memory")
    assert (found.verdict, "thimble" in found.seen, bool(found.hint)) == (FAIL, True, True)
    assert "cluster.gpu" in found.where


def test_a_run_for_a_cluster_is_not_compared_with_the_machine_that_plans_it() -> None:
    loaded = read_run_file(
        RECIPE, ["cluster.platform=kubernetes", "cluster.image=x/y:1", "cluster.kubernetes.namespace=n"]
    )
    report = check.run_checks(loaded)
    assert report.exit_code == 0
    for name in ("libraries", "run folder", "weights", "data"):
        assert named(report.results, name).verdict == SKIPPED
    assert named(report.results, "memory").verdict == PASS
    assert inputs.check_weights(context(loaded), make_plan(loaded)).verdict == FAIL  # a published config is no model


def test_damaged_absent_or_foreign_tokenizer_fails(sound: Path, tmp_path: Path) -> None:
    model = shutil.copytree(sound.parent / "model", tmp_path / "model")
    plan = make_plan(read_run_file(sound, [f"model.model_name_or_path={model}"]))
    assert inputs.check_tokenizer(plan)[1].verdict == PASS
    original = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(original[:100])
    assert inputs.check_tokenizer(plan)[1].verdict == FAIL
    longer = json.loads(original)
    size = len(longer["model"]["vocab"])
    longer["model"]["vocab"] |= {f"windlass{i}": size + i for i in range(1200)}
    (model / "tokenizer.json").write_text(json.dumps(longer))
    found = inputs.check_tokenizer(plan)[1]
    assert (found.verdict, "rows" in found.seen) == (FAIL, True)


def test_data_that_cannot_be_read_fails(sound: Path, tmp_path: Path) -> None:
    assert checked_data(read_run_file(sound)).verdict == PASS
    for override, printed in (
        ("data.train_split=trian", "trian"),
        ("data.val_split=holdout", "holdout"),
    ):
        found = checked_data(read_run_file(sound, [override]))
        assert (found.verdict, printed in found.seen) == (FAIL, True), found
    assert (
        checked_data(read_run_file(sound, ["data.dataset_name_or_path=someone/set"])).verdict == SKIPPED
    )  # from the hub

    def alone(text: str, *lines: str, more: Sequence[str] = ()) -> Loaded:
        """Return one file of rows, and the run file without some of its lines."""
        (tmp_path / "rows.jsonl").write_text(text)
        run = tmp_path / "run.yaml"
        run.write_text("".join(row for row in sound.read_text().splitlines(True) if row.strip() not in lines))
        return read_run_file(run, [f"data.dataset_name_or_path={tmp_path / 'rows.jsonl'}", *more])

    rows, no_split = '{"text": "one"}\n{"text": "two"}\n', "val_split: validation"
    found = checked_data(alone(rows, no_split))
    assert (found.verdict, "wants evaluation" in found.seen) == (FAIL, True)  # requested with train.eval_steps
    assert checked_data(alone(rows, no_split, "eval_steps: 20")).verdict == WARN
    found = checked_data(alone(rows * 900 + '{"text": "thr\n' + rows * 200, no_split))
    assert (found.verdict, found.where) == (FAIL, f"{tmp_path / 'rows.jsonl'}:1801"), "neither the first nor sampled"
    talk = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n'
    chat = alone(talk, no_split, more=["data.messages_field=messages", "train.eval_strategy=no"])
    assert checked_data(chat).verdict == SKIPPED  # it waits for a tokenizer
    assert checked_data(chat, inputs.check_tokenizer(make_plan(chat))[0]).verdict == PASS


# --- libraries


def test_version_table_matches_pyproject_and_the_environment() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    assert {f"{name}{supported}" for name, (supported, _) in versions.TESTED.items()} <= set(wanted)
    have = inputs.list_distributions()
    for name, (_, ran) in versions.TESTED.items():
        assert versions.parse_release(have[name]) == versions.parse_release(ran), name
    import peft.import_utils

    assert f'"{inputs.TORCHAO_LEAST}"' in Path(peft.import_utils.__file__).read_text()
    assert set(inputs.ATTENTION) == set(ATTENTION)


@pytest.mark.parametrize(
    ("name", "version", "verdict"),
    [
        ("torch", "2.13.0a0+0e7d5b8.nv26.01", PASS),  # NVIDIA's images
        ("torch", "2.11.0", PASS),
        ("torch", "2.10.0", FAIL),
        ("torch", "3.0.0a1", WARN),
        ("peft", None, FAIL),
        ("torch", "nightly", SKIPPED),
        ("torchao", "0.15.0", FAIL),  # PEFT refuses it
    ],
)
def test_libraries_against_the_table(sound: Path, name: str, version: str | None, verdict: str) -> None:
    have = {**RAN, "torchao": "0.16.0", name: version}
    loaded = read_run_file(sound)
    results = inputs.check_libraries(context(loaded, have={k: v for k, v in have.items() if v}), loaded)
    bad = {result.name: result.verdict for result in results if result.verdict != PASS}
    assert bad == {"model class and attention": SKIPPED, **({} if verdict == PASS else {f"library {name}": verdict})}


@pytest.mark.fault("a library that is too old", "`windlass train`, before it is imported", "is too old: it has to be")
def test_a_library_that_is_too_old_is_named_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.require_libraries(TRAINING, "train")
    monkeypatch.setattr(versions, "version", lambda name: "5.10.0" if name == "transformers" else "100")
    with refused("too-old", "windlass train") as problems:
        versions.require_libraries(TRAINING, "train")
    assert problems[0].problem == "transformers 5.10.0 is too old: it has to be >=5.17,<5.25"
    versions.require_libraries(("torch",), "train")


@pytest.mark.fault(
    "a library that is newer than tested", "`windlass train`, in its head", "peft 0.22.0 is newer than tested, >="
)
def test_a_library_that_is_newer_than_tested_is_noted(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()
    have = {**RAN, "peft": "0.22.0", "torch": "2.13.1+cpu"}
    monkeypatch.setattr(console, "read_versions", lambda libraries: have)
    console.print_header(Console(file=printed, width=240), make_plan(read_run_file(sound), compare=False), {})
    (note,) = (line for line in printed.getvalue().splitlines() if line.startswith("note: "))
    said = "peft 0.22.0 is newer than tested, >=0.20,<0.22: `windlass check --self-test` tries it"
    assert note.startswith(f"note: {said}")


RAN = {name: ran for name, (_, ran) in versions.TESTED.items()}
LACKED = [  # a library's version, a key of `layout`, and what is said of it
    ("transformers", "5.20.2", "name=expert-parallel", "transformers 5.20.2 has no expert parallelism"),
    ("transformers", "5.24.0.dev0", "name=hybrid", ""),
    ("torch", "2.11.0a0+nv", "base_dtype=fp8", "torch 2.11.0a0+nv has no sharding of a quantized base"),
    ("torch", "2.11.0", "base_dtype=bf16", ""),
]


@pytest.mark.fault(
    "a layout that the installed libraries lack",
    "`windlass plan` of a run for this machine, `windlass check`",
    "transformers 5.20.2 has no expert parallelism",
)
@pytest.mark.parametrize(("library", "version", "key", "said"), LACKED)
def test_a_layout_that_the_libraries_lack_is_named(
    monkeypatch: pytest.MonkeyPatch, library: str, version: str, key: str, said: str
) -> None:
    have = RAN | {library: version}
    loaded = read_run_file(RECIPE, ["cluster.nodes=2", "cluster.gpus_per_node=8", "layout=full-shard", f"layout.{key}"])
    plan = make_plan(loaded, compare=False)  # on another machine than the run's
    results = inputs.check_libraries(replace(context(loaded, plan, have), alone=False), loaded)
    assert [result.seen for result in results if result.name == "layout"] == [said] * bool(said)
    use(monkeypatch, have)
    if not said:
        assert make_plan(loaded, compare=False, is_here=True).layout == plan.layout
        return
    with refused("too-old") as problems:
        make_plan(loaded, compare=False, is_here=True)
    assert problems[0].problem == said
    assert problems[0].hint.startswith(f"pip install '{library}>=")


def use(monkeypatch: pytest.MonkeyPatch, have: dict[str, str]) -> None:
    """Let these libraries be this process's."""
    monkeypatch.setattr("windlass.plan.make.read_versions", lambda libraries: have)


def test_versions_that_cannot_be_compared_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch alone there is no `packaging`."""
    needs, have = ["sharding of a quantized base"], {"torch": "2.11.0"}
    assert versions.find_lacking(needs, have)
    monkeypatch.setitem(sys.modules, "packaging.version", None)
    assert versions.find_lacking(needs, have) is None


@pytest.mark.takes("plans two nodes of eight GPUs four times")
def test_auto_chooses_no_layout_that_the_libraries_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = read_run_file(RECIPE, ["cluster.nodes=2", "cluster.gpus_per_node=8"])
    use(monkeypatch, RAN | {"transformers": "5.17.0"})
    assert make_plan(loaded, compare=False).layout.name == "expert-parallel"
    plan = make_plan(loaded, compare=False, is_here=True)
    assert plan.layout.name in ("full-shard", "no-reshard", "resident")
    whys = {c.layout.name: c.why_not for c in plan.contenders if c.why_not}
    assert whys.keys() == {"expert-parallel", "hybrid"}
    assert {c.layout.name for c in plan.contenders if not c.why_not}.isdisjoint(whys)
    use(monkeypatch, RAN | {"torch": "2.12.0"})
    plan = make_plan(loaded, compare=False, is_here=True)
    assert all(bool(c.why_not) == (c.layout.base_dtype == "fp8" and c.layout.is_sharded) for c in plan.contenders)
    assert not plan.layout.is_sharded or plan.layout.base_dtype == "bf16"
    rows = find_longest_rows(plan)
    assert rows
    assert not [row for row in rows if "FP8" in row.layout and "resident" not in row.layout]


@pytest.mark.parametrize(
    ("gpu", "given", "is_here"),
    [
        ("NVIDIA H200", [], True),  # as the driver calls it
        ("NVIDIA H200", ["cluster.platform=slurm"], False),
        ("NVIDIA L4", [], False),
        ("NVIDIA L4", ["cluster.gpu=null"], True),
    ],
)
def test_a_plan_for_this_machine_is_held_against_its_libraries(
    monkeypatch: pytest.MonkeyPatch, gpu: str, given: list[str], is_here: bool
) -> None:
    monkeypatch.setattr("windlass.hardware.read_gpu_name", lambda: gpu)
    assert is_this_machine(read_run_file(RECIPE, given).run.cluster) == is_here


def test_plan_and_train_know_the_libraries_and_submit_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's image has its own."""
    monkeypatch.setattr("windlass.hardware.read_gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("windlass.start.train", lambda planned, *_, **__: planned())
    use(monkeypatch, RAN | {"transformers": "5.20.2"})
    given = ["cluster.nodes=2", "cluster.gpus_per_node=8", "layout=expert-parallel"]
    with refused("too-old"):
        options.make_plan(RECIPE, given, None)
    with refused("too-old"):
        during.train(RECIPE, override=given)
    assert options.make_plan(RECIPE, given, None, for_start=False).layout.ranks == 16


@pytest.mark.parametrize(
    ("cuda", "driver", "works", "verdict"),
    [
        ("13.0", "580.65.06", False, PASS),
        ("13.0", "570.124.06", False, FAIL),
        ("13.0", "570.124.06", True, PASS),
        (None, "580.65.06", False, FAIL),
        (None, None, False, SKIPPED),
        ("99.0", "999.0", False, SKIPPED),
    ],
)
def test_driver_against_torchs_cuda(
    sound: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, driver: str | None, works: bool, verdict: str
) -> None:
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.cuda.is_available", lambda: works)
    found = Gpus((GpuReading(0, "NVIDIA H200", 140, 140),) * bool(driver), driver=driver)
    assert inputs.check_cuda(context(read_run_file(sound)), found).verdict == verdict


def test_a_missing_model_class_is_reported_with_the_version_that_has_it(sound: Path) -> None:
    c, family = context(read_run_file(sound)), FAMILIES["mistral4"]
    found, result = inputs.check_model_class(c, family)
    assert (found.__name__, result.verdict) == ("Mistral4ForCausalLM", PASS)
    for since, printed in (("5.4", "can't be imported"), ("99.1", "99.1 is the first that has")):
        found, result = inputs.check_model_class(c, replace(family, causal_lm="Mistral9ForCausalLM", since=since))
        assert (found, result.verdict) == (None, FAIL)
        assert printed in result.seen
    light = context(c.loaded, have={"transformers": "5.23.0"})
    assert inputs.check_model_class(light, family)[1].verdict == SKIPPED


class Model:
    """A class's flags, as transformers sets them."""

    _supports_sdpa = True
    _supports_flash_attn = False


@pytest.mark.parametrize(
    ("asked", "have", "model", "verdict"),
    [
        ("null", {}, Model, PASS),
        ("sdpa", {}, None, SKIPPED),
        ("flex_attention", {}, Model, FAIL),  # not supported by the model
        ("flash_attention_2", {}, Model, FAIL),  # not installed
        ("flash_attention_2", {"flash-attn": "2.8"}, Model, FAIL),  # its module is missing
        ("kernels-community/flash-attn", {"kernels": "1"}, Model, SKIPPED),
    ],
)
def test_attention_implementation_is_checked(
    sound: Path, asked: str, have: dict[str, str], model: Any, verdict: str
) -> None:
    loaded = read_run_file(sound, [f"model.attn_implementation={asked}"])
    found = inputs.check_attention(context(loaded, have=have), loaded, model)
    assert (found.verdict, bool(found.hint)) == (verdict, verdict == FAIL), found


@pytest.mark.skipif(not LACKING, reason="every tracker is installed here")
def test_missing_tracker_fails_the_check(sound: Path) -> None:
    found = named(
        inputs.check_trackers(read_run_file(sound, [f"train.report_to={LACKING[0]}"])), f"tracker {LACKING[0]}"
    )
    assert (found.verdict, "pip install" in found.hint) == (FAIL, True)
    assert inputs.check_trackers(read_run_file(sound, ["train.report_to=none"])) == []


def test_script_errors_fail_the_check(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(f"kind: script\nscript: {{path: {tmp_path}/a.py, output_dir: {tmp_path}/run}}\n")
    for text, printed in ((None, "can't be read"), ("def f(:\n", "a.py:1 is not Python"), ("\0", "not Python")):
        (tmp_path / "a.py").unlink(missing_ok=True)
        if text is not None:
            (tmp_path / "a.py").write_text(text)
        results = inputs.check_inputs(context(read_any(run), have={}))
        found = named(results, "script")
        assert (found.verdict, printed in found.seen) == (FAIL, True), found
        assert named(results, "library torch").verdict == FAIL
    (tmp_path / "a.py").write_text("a = 1\n")
    report = check.run_checks(read_any(run, ["layout.ranks=2", "cluster.gpu=cpu"]), depth=check.HERE)
    by_name = {result.name: result for result in report.results}
    assert (by_name["script"].verdict, by_name["model, data and optimizer"].verdict) == (PASS, SKIPPED)
    assert by_name["processors"].seen.endswith("for 2 ranks")
    assert not {"adapter", "tokenizer", "weights", "data", "model class"} & by_name.keys()
    plan, results = inputs.check_plan(read_any(run, ["cluster.gpu=quantum"]))
    assert (plan, "quantum" in named(results, "plan").seen) == (None, True)
