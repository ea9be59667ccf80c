"""`windlass plan MODEL --gpus …`: a plan from a model's name, GPUs compared, the longest row, and prices."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refused

from windlass import cli, sizing
from windlass.errors import UserError
from windlass.hardware import parse_gpus
from windlass.model.base import read_published_configs
from windlass.plan import make_plan
from windlass.plan.longest import find_longest_rows
from windlass.plan.show import MILLIONS
from windlass.runfile import read_run_file

MODEL = "Qwen/Qwen3-30B-A3B"
SMALL = "Qwen/Qwen3-8B"
Command = Callable[..., tuple[str, str]]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: str, code: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", *words])
        shown = capsys.readouterr()
        assert ended.value.code == code, shown.err
        return shown.out, shown.err

    return run


def subject(name: str, gpus: str | None, *overrides: str, **options: object) -> sizing.Subject:
    found = sizing.open_subject(
        name, gpus, {f"--{key}": value for key, value in options.items()}, overrides, None, print
    )
    assert found
    return found


def write_rows(path: Path, count: int = 2000) -> Path:
    path.write_text("".join(json.dumps({"text": "the hull " * (20 + i % 60)}) + "\n" for i in range(count)))
    return path


# --- one plan ------------------


def test_a_model_is_planned_in_ten_lines_without_torch_in_a_second() -> None:
    code = (
        "import sys, time; sys.modules |= dict.fromkeys(('torch', 'transformers', 'datasets', 'numpy'))\n"
        "from windlass.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    print(end.code, time.process_time(), file=sys.stderr)\n"
    )
    seconds = []
    for _ in range(3):
        command = [sys.executable, "-c", code, "plan", MODEL, "--gpus", "4xl40s"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
        status, took = done.stderr.split()
        assert status == "0", done.stderr
        seconds.append(float(took))
        if min(seconds) < 1.5:
            break
    names = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert names == ["fits", "speed", "time", "layout", "limit", "machine", "model", "batch", "more"]
    assert len(done.stdout.splitlines()) <= 13
    assert "4 l40s" in done.stdout
    assert "Qwen3-30B-A3B, 30.5" in done.stdout
    assert f"for {MILLIONS} M tokens" in done.stdout.replace("\N{NO-BREAK SPACE}", " ")
    assert min(seconds) < 1.5


def test_a_folder_and_its_config_are_the_same_plan_as_the_name(plan: Command, tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(read_published_configs()["Qwen3-8B"]))
    plans = [
        json.loads(plan(name, "--gpus", "2xh100", "--json")[0])
        for name in (SMALL, str(folder), f"{folder}/config.json")
    ]
    for other in plans[1:]:
        assert other["memory"] == plans[0]["memory"]
        assert other["estimate"] == plans[0]["estimate"]
    assert not (tmp_path / "run").exists()


def test_the_run_in_ones_folder_is_not_taken_for_the_models(plan: Command, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "data.json").write_text('{"sequences": {"inputs": "x", "train": 3, "validation": 1}}')
    out, err = plan(SMALL, "--gpus", "1xh100")
    assert f"for {MILLIONS}" in out
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["data.json"]
    assert "plan.json" not in err
    plan(SMALL, "--gpus", "1xh100", "--out", "kept")
    assert json.loads((tmp_path / "kept" / "plan.json").read_text())["layout"]["ranks"] == 1


def test_what_is_saved_is_what_was_planned(plan: Command, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    out, err = plan(SMALL, "--gpus", "2x8xh100", "--data", str(rows), "--override", "lora.r=8", "--save", "my.yaml")
    assert "written to my.yaml" in err
    run = read_run_file(tmp_path / "my.yaml").run
    assert (run.cluster.nodes, run.cluster.gpus_per_node, run.cluster.gpu, run.lora.r) == (2, 8, "h100", 8)
    assert run.cluster.network
    assert plan("my.yaml")[0] == out
    before = (tmp_path / "my.yaml").read_text()
    plan(SMALL, "--data", str(rows), "--save", "here.yaml")  # for this machine
    assert "cluster:" not in (tmp_path / "here.yaml").read_text()
    _, err = plan(SMALL, "--gpus", "1xh100", "--data", str(rows), "--save", "my.yaml", code=2)
    assert "--save my.yaml: exists already" in err
    assert (tmp_path / "my.yaml").read_text() == before


def test_a_preference_objective_is_planned_for_pairs_that_are_not_here(plan: Command) -> None:
    out, _ = plan(SMALL, "--gpus", "1xh100", "--override", "train.objective=dpo")
    assert "up to 2 x 512 tokens" in out
    assert "learning_rate" not in out  # one for pairs
    words = ("--override", "train.objective=orpo", "--override", "data.packing=true")
    _, err = plan(SMALL, "--gpus", "1xh100", *words, code=2)
    assert err.startswith("error: --override data.packing: ")
    assert "/tmp" not in err  # the file of the draft, which is gone


# --- a run file on other GPUs ------------------


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {model_name_or_path: Qwen/Qwen3-8B}\ntrain: {global_batch_size: 48}\n"
        "cluster: {nodes: 1, gpus_per_node: 2, gpu: h200, link: nvlink, host_memory_gib: 100}\n"
    )
    return path


def test_gpus_replace_the_machines_of_a_run_file(plan: Command, run_file: Path) -> None:
    out, err = plan("run.yaml", "--gpus", "2x4xl40s")
    assert "note: --gpus 2x4xl40s instead of the machines set at run.yaml:3: cluster.gpu" in err
    assert (
        "machine  2 nodes x 4 l40s; infiniband-400 between nodes; pcie4 inside" in out
    )  # not nvlink, as the h200s have
    assert "2 h200" in plan("run.yaml")[0]
    assert "nvlink4 inside" in plan("run.yaml", "--gpus", "4xh200")[0]
    _, err = plan("run.yaml", "--gpus", "5xl40s", code=2)
    assert "train.global_batch_size" in err


def test_a_run_file_without_machines_says_which_it_is_planned_for(plan: Command, tmp_path: Path) -> None:
    (tmp_path / "axolotl.yml").write_text(
        "base_model: Qwen/Qwen3-8B\nadapter: lora\nlora_r: 8\nlora_target_linear: true\nsequence_len: 512\n"
        "datasets: [{path: rows.jsonl, type: completion}]\noutput_dir: out\nmicro_batch_size: 1\n"
    )
    write_rows(tmp_path / "rows.jsonl", 20)
    with pytest.raises(SystemExit):
        cli.main(["import", "axolotl.yml", "--out", "run.yaml"])
    remark = "this machine, for the run file names none: --gpus 8xh100"
    assert remark in " ".join(plan("run.yaml")[0].split())
    assert remark not in " ".join(plan("run.yaml", "--gpus", "8xh100")[0].split())


def test_no_command_takes_a_file_that_import_left_incomplete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "axolotl.yml").write_text("base_model: Qwen/Qwen3-8B\nadapter: lora\nrl: kto\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["import", "axolotl.yml"])
    assert ended.value.code == 2
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    for words in ("plan run.yaml --gpus all", "check run.yaml", "explain lora.r --run run.yaml"):
        with pytest.raises(SystemExit) as ended:
            cli.main(words.split())
        assert ended.value.code == 2
        shown = capsys.readouterr()
        assert "is incomplete" in " ".join((shown.out + shown.err).split())


# --- GPUs compared ------------------


@pytest.mark.takes("plans for every kind of GPU")
def test_every_kind_is_compared_and_the_cheapest_is_first(plan: Command, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = sizing.compare_gpus(subject(MODEL, "all"))
    sizing.print_comparison(comparison)
    out = capsys.readouterr().out
    found = comparison.as_dict()
    hours = [offer["gpu_hours"] for offer in found["offers"]]
    assert hours == sorted(hours)
    names = [offer["gpus"] for offer in found["offers"]]
    assert sorted([*names, *found["too_small"]]) == sorted(
        f"{count.removeprefix('1x')}x{kind}" for kind in sizing.KINDS for count in sizing.COUNTS
    )
    assert "1xl4" in found["too_small"]
    assert not {"cpu", "mi300x", "mi355x"} & set(sizing.KINDS)
    (offer,) = [offer for offer in found["offers"] if offer["gpus"] == "2x8xh100"]
    alone = json.loads(plan(MODEL, "--gpus", "2x8xh100", "--json")[0])
    assert offer["gpu_gib"] == alone["memory"]["gpu_gib"]
    assert offer["tokens_per_second"] == alone["estimate"]["tokens_per_second"]
    assert offer["hours"] * 3600 == pytest.approx(MILLIONS * 1e6 / offer["tokens_per_second"])
    assert re.findall(r"^ (\d\S+)", out, re.MULTILINE) == names
    assert "does not fit: " in out


def test_prices_are_yaml_json_or_toml(tmp_path: Path) -> None:
    for name, text in (
        ("p.yaml", "H100: 10\nNVIDIA L40S: 0.5\n"),
        ("p.toml", 'h100 = 10\n"NVIDIA L40S" = 0.5\n'),
        ("p.json", '{"h100-sxm": 10, "l40s": 0.5}'),
    ):
        (tmp_path / name).write_text(text)
        assert sizing.read_prices(tmp_path / name) == {"h100": 10, "l40s": 0.5}


def test_prices_decide_the_order(plan: Command, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("h100: 10\nl40s: 0.5\n")
    words = [SMALL, "--gpus", "all", "--data", str(write_rows(tmp_path / "rows.jsonl"))]
    found = json.loads(plan(*words, "--prices", "prices.yaml", "--json")[0])
    assert "h200" in found["unpriced"]
    prices = [offer["price"] for offer in found["offers"]]
    assert prices == sorted(prices)
    assert found["unit"] == "the run"
    for offer in found["offers"]:
        rate = 10 if "h100" in offer["gpus"] else 0.5
        assert offer["price"] == pytest.approx(rate * offer["gpu_hours"])
    assert found["offers"][0]["gpus"].endswith("l40s")
    cheapest = min(found["offers"], key=lambda offer: offer["gpu_hours"])
    assert cheapest["gpus"].endswith("h100")


@pytest.mark.takes("plans for every kind of GPU")
def test_a_run_file_is_compared_and_what_it_rules_out_is_named(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.write_text(run_file.read_text() + "layout: {name: hybrid}\n")
    found = sizing.compare_gpus(subject("run.yaml", "all"))
    assert {"2x8xh100", "3x8xh100"} <= {offer.gpus for offer in found.offers}
    assert "divided" in found.impossible["4x8xh100"]  # 48 sequences over 32 ranks
    sizing.print_comparison(found)
    assert "not possible: " in capsys.readouterr().out


# --- the longest row ------------------


def test_the_longest_row_fits_and_a_longer_one_does_not(plan: Command) -> None:
    rows = find_longest_rows(subject(MODEL, "4xl40s", longest=True).plan())
    assert [row.longest for row in rows] == sorted((row.longest for row in rows), reverse=True)
    assert all(row.recomputed_tokens >= row.tokens for row in rows)
    assert any(row.longest == 0 for row in rows)  # resident: 61 GB on 45 GiB
    for row in [row for row in rows if row.longest][::3]:
        for tokens, has_headroom in ((row.longest, True), (row.longest + 256, False)):
            longer = subject(MODEL, "4xl40s", *row.overrides, tokens=tokens).plan()
            assert longer.cost.has_headroom is has_headroom, (row, tokens)
    out, _ = plan(MODEL, "--gpus", "4xl40s", "--longest")
    command = out.splitlines()[-1]
    assert command.startswith(f"windlass plan {MODEL} --gpus 4xl40s --tokens {rows[0].longest} --override ")
    assert "fits" in plan(*command.split()[2:])[0].split()[0]


def test_the_longest_row_of_a_run_file(plan: Command, run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace("48}", "48, gradient_checkpointing: false}"))
    command = plan("run.yaml", "--longest")[0].splitlines()[-1].split()
    assert plan(*command[2:])[0].startswith("fits")
    again = plan("run.yaml", "--longest", "--override", "lora.r=2")[0].splitlines()[-1]
    assert again.startswith("windlass plan run.yaml --override lora.r=2 --override data.max_length=")
    rows = json.loads(plan("run.yaml", "--longest", "--json")[0])
    assert f"data.max_length={rows[0]['recomputed_tokens']}" in command
    assert rows[0]["recomputed_tokens"] > rows[0]["tokens"] > 0


def test_no_row_is_longer_than_the_models_positions(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(read_published_configs()["Qwen3-8B"] | {"max_position_embeddings": 5000})
    )
    rows = find_longest_rows(subject(str(folder), "8xb200", longest=True).plan())
    assert {row.recomputed_tokens for row in rows} == {5000}


# --- what is refused ------------------


def test_options_that_do_not_go_together_are_refused(run_file: Path, tmp_path: Path) -> None:
    def ask(name: str, gpus: str | None, **options: object) -> None:
        subject(name, gpus, **options)

    with refused("no-gpus", SMALL) as problems:
        ask(SMALL, None)
    assert "--gpus all" in problems[0].hint
    for option in ("data", "tokens", "save"):
        with refused("not-for-run-files", f"--{option}"):
            ask("run.yaml", None, **{option: tmp_path / "new"})
    with refused("no-effect", "--prices"):
        ask(SMALL, "1xh100", prices=tmp_path / "p.yaml")
    with refused("conflicting-options", "--longest"):
        ask(SMALL, "all", longest=True)
    for question in ({"gpus": "all"}, {"gpus": "1xh100", "longest": True}):
        for option in ("compare", "details", "explain", "out"):
            with refused("conflicting-options", f"--{option}"):
                ask(SMALL, **question, **{option: True})  # type: ignore[arg-type]


@pytest.mark.fault(
    "a run file saved for a model without rows, which would train on WikiText",
    "`windlass plan MODEL --save`",
    "a run file without rows would train on others",
)
def test_no_run_file_is_saved_without_rows(plan: Command, tmp_path: Path) -> None:
    _, err = plan(SMALL, "--gpus", "1xh100", "--save", "new.yaml", code=2)
    assert "--save: a run file without rows would train on others" in err
    assert not (tmp_path / "new.yaml").exists()


@pytest.mark.parametrize(
    ("name", "code", "hint"),
    [
        ("Qwen/Qwen3-30B-A3", "unknown-model", "did you mean Qwen/Qwen3-30B-A3B"),
        ("Qwen/Qwen3-9B", "unknown-model", "? Or fetch its config.json: `curl"),
        ("Some/Other-7B", "unknown-model", "huggingface.co/Some/Other-7B/resolve/main/config.json"),
        ("ru", "unknown-model", "did you mean run.yaml"),
        ("empty", "not-a-file", "config.json"),
        ("rum.yaml", "no-such-file", "did you mean run.yaml"),
        ("other.json", "other-name", "cp other.json other/config.json`, then `windlass plan other --gpus all`"),
        ("rounded", "gguf", "a folder with its config.json and safetensors"),
    ],
)
def test_what_is_no_model_gets_what_it_could_be(
    name: str, code: str, hint: str, run_file: Path, tmp_path: Path
) -> None:
    (run_file.parent / "empty").mkdir()
    (run_file.parent / "rounded").mkdir()
    (run_file.parent / "rounded" / "model.Q4_1.gguf").write_bytes(b"GGUF")
    (run_file.parent / "other.json").write_text('{"model_type": "qwen3"}')
    with refused(code, name) as problems:
        sizing.open_subject(name, "1xh100", {}, (), None, print)
    assert hint in problems[0].hint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4xl40s", (1, 4, "l40s")),
        ("3x8xH100", (3, 8, "h100")),
        ("h100", (1, 1, "h100")),
        ("0xh100", "not-gpu-count"),
        ("8", "not-gpu-count"),
        ("8h100", "number-in-name"),
        ("4xrtx4080", "unknown-hardware"),
    ],
)
def test_gpus_are_numbers_and_a_name_that_may_have_an_x(text: str, expected: object) -> None:
    if isinstance(expected, str):
        with refused(expected, "--gpus"):
            parse_gpus(text, "--gpus")
    else:
        assert parse_gpus(text, "--gpus") == expected


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "no-prices"),
        ("h100: -1\n", "wrong-value"),
        ("h10: 1\n", "unknown-hardware"),
        ("h100: 1\nh100-sxm: 2\n", "duplicate-key"),
    ],
)
def test_faulty_prices_are_refused(text: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with refused(code):
        sizing.read_prices(tmp_path / "p.yaml")
    with refused("no-such-file", "other.yaml"):
        sizing.read_prices(tmp_path / "other.yaml")
    with pytest.raises(UserError, match="TOML"):
        sizing.read_prices(tmp_path / "other.toml")


def test_a_plan_without_comparisons_is_the_same_plan(run_file: Path) -> None:
    loaded = read_run_file(run_file, ["cluster.nodes=2", "cluster.network=infiniband-400"])
    long, short = make_plan(loaded), make_plan(loaded, compare=False)
    assert (short.layout, short.cost.gpu_gib, short.gpu_hours) == (long.layout, long.cost.gpu_gib, long.gpu_hours)
    assert {c.layout.nodes for c in short.contenders} == {2}
    assert {c.layout.nodes for c in long.contenders} > {2}
