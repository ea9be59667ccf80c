"""The commands as a user sees them: output, streams and exit codes."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from test_faults import RUN
from text_run import make_text_run

from windlass import cli, tiny
from windlass.ranks.supervisor import default_overrides
from windlass.runfile import read_run_file

ROOT = Path(__file__).parent.parent
TRAIN = "examples/mistral-small-4/train.yaml"


class Windlass:
    """Runs commands in this process: the console script only calls `main`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.called: set[str] = set()

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Return what the command printed: its result, or its error if it should fail."""
        exit_code, out, err = self.run(*arguments)
        assert exit_code == code, err
        assert not (code and out)
        return err if code else out

    def run(self, *arguments: str) -> tuple[Any, str, str]:
        """Return a command's exit code, and what it printed."""
        self.called.add(arguments[0])
        exit_code: Any = 0
        try:
            cli.main(arguments)
        except SystemExit as ended:
            exit_code = ended.code or 0
        done = self.capsys.readouterr()
        assert "Traceback" not in done.err
        return exit_code, done.out, done.err


@pytest.fixture
def windlass(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Windlass:
    monkeypatch.chdir(ROOT)
    return Windlass(capsys)


def test_hints_name_the_users_run_file(windlass: Windlass, tmp_path: Path) -> None:
    """So that a hint works when pasted; RUN in anything else that is printed stays."""
    mine = tmp_path / "my run.yaml"
    mine.write_text(f"model: {{model_name_or_path: org/none}}\ntrain: {{output_dir: {tmp_path}/RUN}}\n")
    printed = windlass("status", str(mine), code=2)
    assert f"{tmp_path}/RUN/submitted.json: nothing was submitted" in printed
    assert f"hint: `windlass submit '{mine}'`" in printed
    assert f"`windlass fetch '{mine}'` (with --headers-only" in windlass("plan", str(mine), code=2)


def test_the_published_recipe_is_planned_without_weights(windlass: Windlass, tmp_path: Path) -> None:
    text = windlass("plan", TRAIN, "--json", "--out", str(tmp_path / "new"))
    plan: dict[str, Any] = json.loads(text)
    assert json.loads((tmp_path / "new" / "plan.json").read_text()) == plan
    assert plan["parameters"]["total"] == 118_972_826_624
    assert any("planned from the published config" in note for note in plan["notes"])
    uneven = next(row for row in plan["layouts"] if row["name"] == "expert-parallel 3")
    assert not uneven["possible"]
    assert "128 experts" in uneven["why_not"]
    more = ("lora.experts=true", "lora.lora_dropout=0", "train.per_device_train_batch_size=16")
    plan = json.loads(windlass("plan", TRAIN, "--json", *(word for each in more for word in ("--override", each))))
    assert plan["adapter"]["trainable"] == 1_084_428_288
    assert plan["memory"]["fits"] is False
    assert "gradient_checkpointing" in plan["memory"]["remedy"]
    assert "formula" in windlass("plan", TRAIN, "--compare", "--explain")


def test_all_problems_at_once_with_places_and_hints(windlass: Windlass, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("train:\n  learning_rat: 1e-4\n  bf16: true\n  fp16: true\nlora:\n  r: 0\n")
    errors = windlass("plan", str(run), code=2)
    for place in (f"{run}:2: train.learning_rat", f"{run}:4: train.fp16", f"{run}:6: lora.r"):
        assert f"error: {place}: " in errors
    assert "did you mean learning_rate?" in errors
    assert errors.count("\nhint: ") == 3


DATA = "data run.yaml --override train.eval_strategy=no --override data.dataset_name_or_path"
PLAN = "plan run.yaml --override"
# What a stranger may get wrong: the command, its exit code, what it prints and what it must not.
FIRST_SIGHT: tuple[tuple[str, int, str, str], ...] = (
    (f"{PLAN} train.learning_rate=200", 0, "learning_rate 200", ""),
    (f"{PLAN} cluster.gpu=8h100", 2, "cluster.gpus_per_node: 8", ""),
    (f"{DATA}=rows.jsonl", 2, "rows.jsonl: is empty", "split"),
    (f"{PLAN} data.dataset_name_or_path=rows.jsonl", 2, "rows.jsonl: is empty", "fits"),
    ("init --model model --data rows.jsonl", 2, "rows.jsonl: is empty", "max_length"),
    ("init --model model", 2, "needs both --model and --data", ""),
    (f"{PLAN} data.train_split=train[9:]", 2, "data: train[9:] has no rows", "fits"),
    (f"{DATA}=model", 2, "folder of a model", ""),
    (f"{PLAN} train.output_dir=file/run", 0, "fits", "error"),
    ("plan run.yaml --details", 0, "1 rank", "worker"),
)


def test_first_sight(windlass: Windlass, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and their nouns, one line for one error, and names that can be pasted."""
    tiny.write_model(tmp_path / "model", experts=4)
    (tmp_path / "data").mkdir()
    for name, text in (("data/train.jsonl", '{"text": "an anchor"}\n' * 9), ("rows.jsonl", ""), ("file", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    for command, code, says, never in FIRST_SIGHT:
        found, *printed = windlass.run(*shlex.split(command))
        text = re.sub(r"\s+", " ", "".join(printed))
        assert (found, says in text, bool(never) and never in text) == (code, True, False), (command, text)
        assert not re.search(r"\b1 (ranks|sequences|rows|steps|nodes|GPUs|evaluations|checkpoints)\b|\ba int\b", text)


# A command, and all that it prints on stderr: the words of errors are compared here and in docs/faults.md alone.
MESSAGES = {
    "plan run.yaml --override lora.rank=8": (
        "--override lora.rank=8: the run file has no lora.rank",
        "write lora.r",
    ),
    "plan bf16.yaml --accelerate fsdp.yaml": (
        "fsdp.yaml:2: mixed_precision: asks for train.bf16 false, but it is true at bf16.yaml:3: train.bf16",
        "make the two agree, or keep one of them",
    ),
    "check run.yaml --override train.optim=adamw_troch": (
        "--override train.optim=adamw_troch: there is no optimizer 'adamw_troch'",
        "choose adamw_torch, adamw_torch_8bit, adamw_torch_4bit",
    ),
    "train run.yaml --override train.fp16=true --override train.bf16=true": (
        "--override train.fp16=true: bf16 and fp16 are both on (--override train.bf16=true)",
        "remove train.fp16: bf16 has float32's range; windlass doesn't train in float16, which overflows",
    ),
    "data run.yaml --source x": (
        "--source: it changes how rows are printed, and none is",
        "add --row K or --sample N",
    ),
    "data run.yaml --prepared-row 3 --row 3": (
        "--prepared-row 3: a prepared row is chosen by its number alone",
        "leave --sample, --row and --source out",
    ),
    "submit run.yaml --to k8s": ("--to: unknown platform 'k8s'", "write kubernetes"),
    "status run.yaml": (
        "run/submitted.json: nothing was submitted from here",
        "`windlass submit run.yaml`; or the --out that it was given",
    ),
    "watch none --once": ("none: is not there", "give a run folder: the output_dir of a run"),
    "report none": ("none: is not there", "give a run folder: the output_dir of a run that has begun"),
    "explain lora.rnk": (
        "windlass explain: unknown setting 'lora.rnk'",
        "did you mean lora.r, lora.use_dora?",
    ),
    "import fsdp.yaml": (
        "fsdp.yaml: is not clearly a configuration of one tool",
        "name it: `windlass import fsdp.yaml --from axolotl`, or another: axolotl, llamafactory, trl, swift",
    ),
    "init nope": (
        "windlass init: there is no preset 'nope'",
        "choose mistral-small-4, mistral-small-4-2xh200, script, tiny-cpu",
    ),
    "export none --to out": ("none: no such folder", "name a run folder, or a folder that holds an adapter"),
    "best none": (
        "none: no such folder",
        "name the folder that train.output_dir named",
    ),
}


def test_each_command_prints_one_whole_message(
    windlass: Windlass, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    lines = "model: {model_name_or_path: Llama-3.1-8B}\ndata: {packing: false}\ntrain: {output_dir: run}\n"
    Path("run.yaml").write_text(lines + "cluster: {nodes: 1, gpus_per_node: 1, gpu: h200}\n")
    Path("bf16.yaml").write_text(Path("run.yaml").read_text().replace("train: {", "train: {bf16: true, "))
    Path("fsdp.yaml").write_text("distributed_type: FSDP\nmixed_precision: 'no'\n")
    for command, (problem, hint) in MESSAGES.items():
        assert windlass(*command.split(), code=2) == f"error: {problem}\n\nhint: {hint}\n", command


def test_wrong_words_of_a_command_are_one_message(windlass: Windlass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["windlass"])
    for words, problem, command, such in (
        ("plan run.yaml --detals", "no such option: --detals (Possible options: --data, --details)", "plan", ""),
        ("verify URL", "missing argument 'EXPORT'", "verify", "http://127.0.0.1:8000 my-adapter --model NAME"),
        ("export run", "missing option '--to'", "export", "run --to my-adapter"),
        ("submit run.yaml --to", "option '--to' requires an argument", "submit", ""),
        ("xyz run.yaml", "no such command 'xyz'", "", ""),
    ):
        command = f"windlass {command}".strip()
        such = such and f"such as `{command} {such}`; "
        assert windlass(*words.split(), code=2) == f"error: {command}: {problem}\n\nhint: {such}see `{command} -h`\n"


def test_every_preset_plans(windlass: Windlass, tmp_path: Path) -> None:
    lines = windlass("init", "--list").splitlines()
    names = [line for line in lines if not line.startswith(" ")]
    assert len(lines) == 2 * len(names), lines
    assert max(map(len, lines)) <= 80, lines
    assert names == ["mistral-small-4", "mistral-small-4-2xh200", "script", "tiny-cpu"]
    for name in names:
        (tmp_path / "run.yaml").write_text(windlass("init", name))
        model = ["--override", "model.model_name_or_path=Llama-3.1-8B"] if name == "tiny-cpu" else []
        assert json.loads(windlass("plan", str(tmp_path / "run.yaml"), "--json", *model))["layout"]


def test_a_plan_is_printed_where_plan_json_cant_be_written(windlass: Windlass, tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    run = "examples/mistral-small-4/train.yaml"
    assert "fits " in windlass("plan", run, "--override", f"train.output_dir={tmp_path}")


def test_help_groups_all_commands(windlass: Windlass) -> None:
    text = windlass("--help")
    groups = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert groups == ["Options:", "Before a run:", "During a run:", "After a run:", "If something is wrong:"]
    names = [name_command(command) for command in cli.app.registered_commands]
    assert len(names) == 24
    assert all(f"\n  {name} " in text for name in names)
    assert " report [OPTIONS] RUN_DIR...\n" in windlass("report", "--help")
    assert " explain [OPTIONS] [KEY]\n" in windlass("explain", "--help")
    assert not re.search(r"<(bool|str|path|list)", "".join(windlass(name, "--help") for name in names))
    assert windlass("--version").startswith("windlass ")
    assert "Did you mean 'plan'" in windlass("plam", code=2)
    assert "runai" in windlass("submit", TRAIN, "--to", "Run:ai", code=2).partition("hint: ")[2]


def test_default_number_of_ranks(tmp_path: Path) -> None:
    """From a launcher, or from this machine's visible GPUs; a configured number is kept."""
    torchrun = {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}
    path = tmp_path / "run.yaml"
    for text in ("cluster: {gpus_per_node: 4}\n", "cluster: {nodes: 2, network: infiniband-400}\n"):
        path.write_text(text)
        assert default_overrides(read_run_file(path), torchrun, 0) == []
    path.write_text("lora: {r: 8}\n")
    assert default_overrides(read_run_file(path), torchrun, 0) == ["cluster.nodes=3", "cluster.gpus_per_node=2"]
    assert default_overrides(read_run_file(path), {"CUDA_VISIBLE_DEVICES": "0,1"}, 4) == ["cluster.gpus_per_node=2"]
    assert default_overrides(read_run_file(path), {"CUDA_VISIBLE_DEVICES": "1"}, 4) == []
    assert default_overrides(read_run_file(path), {}, 4) == ["cluster.gpus_per_node=4"]
    for visible, gpus in (("0,1", 1), ("", 4), ("-1", 4)):
        assert default_overrides(read_run_file(path), {"CUDA_VISIBLE_DEVICES": visible}, gpus) == []


def test_a_machine_without_torch_gets_the_command_to_install(tmp_path: Path) -> None:
    """In its own process, which has not imported the libraries yet."""
    run = tmp_path / "run.yaml"
    run.write_text("model: {model_name_or_path: Llama-3.1-8B}\n")
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers')); from windlass.__main__ import main\n"
        "for arguments in {}:\n    try:\n        main(arguments)\n"
        "    except SystemExit as end:\n        assert end.code == 2\n    else:\n        assert False, arguments\n"
    ).format([["train", str(run)], ["data", str(run)], ["demo", "--dir", str(tmp_path / "made")]])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for error in ("train: torch", "data: transformers", "demo: torch"):
        assert f"error: windlass {error}" in done.stderr
    assert done.stderr.count("pip install 'windlass[train] @ file:///") == 3


@pytest.mark.fault(
    "a plan into the folder of a run that has begun",
    "`windlass plan run.yaml --out RUN`",
    "a run has begun there: its plan.json stays as it is",
)
@pytest.mark.fault(
    "a finished run made longer",
    "`windlass train run.yaml --resume`",
    "was 2 when this run began, is 4 now",
)
@pytest.mark.takes("runs every command that only reads")
@pytest.mark.parametrize("sweep", [False, pytest.param(True, marks=pytest.mark.long)], ids=["run", "sweep"])
def test_what_only_reads_leaves_a_finished_run_as_it_is(windlass: Windlass, tmp_path: Path, sweep: bool) -> None:
    """Of settings that the run did not have, and of its own: `report` believes what is in the folder."""
    file, folder = make_text_run(tmp_path / "made", 200), tmp_path / "made" / "run"
    few = ["cluster.gpus_per_node=1", "layout=resident", "train.max_steps=2", "train.eval_strategy=no"]
    trial = folder
    if sweep:
        file.write_text(f"{file.read_text()}sweep: {{train.learning_rate: [0.001, 0.002]}}\n")
        trial = folder / "trials" / "lr1e-3"
    mine = [word for each in few for word in ("--override", each)]
    command = [warm.python(), "-m", "windlass", "train", str(file), *mine]
    subprocess.run(command, check=True, capture_output=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    before = read_folder(folder)
    assert {"plan.json", "manifest.json"} <= before.keys()
    assert f"{trial.relative_to(folder) / 'data.json'}" in before

    other = ["--override", "lora.r=64", "--override", "data.max_length=64"]
    windlass("plan", str(file), *other, "--gpus", "8xh100")
    windlass("plan", str(file), *mine, "--json")
    assert "a run has begun there: its plan.json stays as it is" in windlass(
        "plan", str(file), "--out", str(folder), code=2
    )
    for here in [[]] if sweep else ([], ["--here"]):
        code, out, _ = windlass.run("check", str(file), *other, *here)
        assert (code, f"{folder} contains a finished" in " ".join(out.split())) == (1, True)
    windlass("watch", str(folder), "--once")
    windlass("report", str(folder), "--out", str(tmp_path / "report"))
    if not sweep:  # of which each trial is a run
        windlass("data", str(file), *other)
        windlass("data", str(file), *mine, "--html", str(tmp_path / "page.html"))
        windlass("fetch", str(file), *mine)
        windlass("explain", "lora.r", "--run", str(file))
        windlass("bug-report", str(folder), "--out", str(tmp_path / "report.tar.gz"))
        windlass("generate", str(folder), "--prompt", "import", "--tokens", "1")
        windlass("export", str(folder), "--to", str(tmp_path / "adapter"))
        for exported in (folder, folder / "final", tmp_path / "adapter"):
            windlass("verify", "http://127.0.0.1:9", str(exported), "--model", "mine", code=2)
        for name in ("status", "logs", "stop"):
            windlass.run(name, str(file))
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"text": "import os"}\n' * 2)
    windlass("best", str(folder), "--eval-data", str(held_out), "--ranks", "1")
    assert "contains a finished" in windlass("train", str(file), *mine, code=2)
    assert windlass("train", str(file), *mine, "--resume") == ""
    assert windlass("submit", str(file), *mine) == ""
    windlass("submit", str(file), *mine, "--to", "script", "--dry-run", "--out", str(tmp_path / "job"))
    for command in (["train", "--resume"], ["submit"]):
        changed = windlass(*command, str(file), *mine, "--override", "train.max_steps=4", code=2)
        assert "was 2 when this run began, is 4 now" in changed
        assert (f"lora.adapter: {folder}/final goes on from there" in changed) is not sweep
    other_rows = f"data.dataset_name_or_path={tmp_path / 'made' / 'data' / 'train.jsonl'}"
    rows = ("--override", other_rows, "--override", "data.val_split=null")
    assert "was" in windlass("train", str(file), *mine, *rows, "--resume", code=2)
    assert read_folder(folder) == before
    # Those whose answer is a file in the folder write no other.
    windlass("report", str(folder))
    answers = {"report.html", "report.json"}
    if sweep:
        windlass("best", str(trial), "--eval-data", str(held_out), "--ranks", "1", "--base-dtype", "nf4")
        answers.add(str(trial.relative_to(folder) / "bases.json"))
    after = read_folder(folder)
    assert answers <= after.keys()
    assert after.items() - before.items() <= {(name, after[name]) for name in answers}
    assert before.keys() <= after.keys()
    elsewhere = {"init", "import", "schema", "calibrate", "demo", "version"}  # they are given no run
    elsewhere.add("rehearse")  # trains a run of its own, for minutes
    others = {name_command(command) for command in cli.app.registered_commands} - elsewhere
    assert sweep or windlass.called == others


def name_command(command: Any) -> str:
    return str(command.name or command.callback.__name__)


def read_folder(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
