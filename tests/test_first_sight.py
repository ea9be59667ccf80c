"""What a stranger counts: numbers and their nouns, places from 1, one line for one error, names that can be pasted."""

import re
from pathlib import Path

import pytest
from test_faults import RUN, windlass

from windlass import tiny

ROOT = Path(__file__).parent.parent
DATA = "data run.yaml --override train.eval_strategy=no --override data.dataset_name_or_path"
PLAN = "plan run.yaml --override"
# What is planted: the command, its exit code, what it prints and what it must not.
CASES: dict[str, tuple[str, int, str, str]] = {
    "a learning rate of another kind": (f"{PLAN} train.learning_rate=200", 0, "learning_rate 200", ""),
    "GPUs and their number in one word": (f"{PLAN} cluster.gpu=8h100", 2, "cluster.gpus_per_node: 8", ""),
    "a key with a letter too many": (f"{PLAN} lora.rank_=8", 2, "lora.r?", "layout.ranks"),
    "an empty file": (f"{DATA}=rows.jsonl", 2, "rows.jsonl: is empty", "split"),
    "an empty file, planned": (f"{PLAN} data.dataset_name_or_path=rows.jsonl", 2, "rows.jsonl: is empty", "fits"),
    "an empty file, drafted": ("init --model model --data rows.jsonl", 2, "rows.jsonl: is empty", "max_length"),
    "a slice without rows": (f"{PLAN} data.train_split=train[9:]", 2, "data: train[9:] has no rows", "fits"),
    "a model's folder as data": (f"{DATA}=model", 2, "folder of a model", ""),
    "a number where text is expected": (f"{DATA}=number.jsonl", 2, "row 1:", "row 0"),
    "a control character": (f"{DATA}=control.jsonl", 2, "column 12", "at "),
    "an option that there isn't": ("plan run.yaml --nothing", 2, "no such option: --nothing", "Error:"),
    "a row before the first": ("data run.yaml --row 0", 2, "--row", "Traceback"),
    "a folder that can't be written": (f"{PLAN} train.output_dir=file/run", 0, "fits", "error"),
    "one rank": ("plan run.yaml --details", 0, "1 rank", "worker"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    tiny.write_model(folder / "model", experts=4)
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text('{"text": "an anchor"}\n' * 9)
    for name, text in (("rows", ""), ("number", '{"text": 5}\n'), ("control", '{"text": "a\x01b"}\n'), ("file", "")):
        (folder / (name if name == "file" else f"{name}.jsonl")).write_text(text)
    (folder / "run.yaml").write_text(RUN)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_first_sight(case: str, folder: Path) -> None:
    command, code, says, never = CASES[case]
    found, printed = windlass(command, folder)
    printed = re.sub(r"\s+", " ", printed)
    assert (found, says in printed) == (code, True), printed
    assert not never or never not in printed, printed
    assert not re.search(r"\b1 (ranks|sequences|rows|steps|nodes|GPUs|evaluations|checkpoints)\b|\ba int\b", printed)


def test_no_word_is_split_in_a_narrow_terminal(folder: Path) -> None:
    code, printed = windlass("plan run.yaml --compare", folder, COLUMNS="60")
    assert code == 0
    assert max(map(len, printed.splitlines())) <= 60
    assert re.search(r"expert-parallel\b", printed)


@pytest.mark.parametrize("suffix", ["md", "py", "toml", "yaml", "j2", "sh"])
def test_nothing_says_to_install_windlass_from_an_index(suffix: str) -> None:
    """The name is not this project's: a folder, a wheel or a URL follows."""
    wrong = re.compile(r"(pip|uv) (tool )?install (-\S+ )*['\"]?windlass(\[[\w,]+\])?['\"]?(?! ?@)(?=[\s'\",)`]|$)")
    assert wrong.search("pip install 'windlass[train]'")
    assert not wrong.search("pip install 'windlass[train] @ file:///here'")
    files = [file for top in ("docs", "src", "examples") for file in (ROOT / top).rglob(f"*.{suffix}")]
    files.append(ROOT / "README.md")
    assert [f"{file}: {found[0]}" for file in files if (found := wrong.search(file.read_text()))] == []
