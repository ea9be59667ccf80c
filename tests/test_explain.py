"""`windlass explain`: one setting or a whole Accelerate file, in words; an unknown name gets the nearest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from windlass import explain, runfile
from windlass.errors import UserError
from windlass.plan.accelerate import KEYS, Key, read_accelerate
from windlass.plan.layout import LAYOUTS
from windlass.variables import VARIABLES

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "mistral-small-4"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_every_accelerate_key_can_be_asked_for(key: Key) -> None:
    name = key.name.replace("*", "thing")
    for spelling in (name, f"{key.section}.{name}" if key.section else name, *key.spellings):
        rows = [row for row in explain.topic(spelling) if (row.kind, row.name) == ("accelerate", key.path)]
        assert rows[0].text == f"asks for: {key.about}"
        assert len(rows) == 1 + len({id(fate) for fate in key.fates.values()})
        assert {row.verdict for row in rows[1:]} == {fate.verdict for fate in key.fates.values()}


@pytest.mark.parametrize("name", VARIABLES)
def test_every_variable_can_be_asked_for(name: str) -> None:
    variable = VARIABLES[name]
    text = " ".join(row.text for row in explain.topic(name))
    assert variable.about in text
    assert variable.windlass in text
    assert variable.verdict in text
    assert (explain.topic(name)[0].verdict == "does not exist") == (not variable.exists)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_can_be_asked_for(name: str) -> None:
    assert [row.text for row in explain.topic(name)] == [LAYOUTS[name]]


@pytest.mark.parametrize("path", runfile.keys())
def test_every_key_of_the_run_file_can_be_asked_for_by_its_path(path: str) -> None:
    rows = [row for row in explain.topic(path) if row.kind == "run file"]
    assert {row.name for row in rows} == {path}
    assert rows[0].text


def test_a_key_of_the_run_file_goes_by_its_last_name_too() -> None:
    rows = explain.topic("learning_rate")
    assert {row.name for row in rows} == {"train.learning_rate"}
    assert "default: 0.0001" in [row.text for row in rows]
    assert explain.topic("max_seq_length")[0].text == "to data.max_length, its name here"
    assert explain.topic("load_in_4bit")[0].verdict == "refused"


def test_offloading_is_told_as_it_is() -> None:
    """The published recipe says that the optimizer's states are offloaded."""
    (row,) = [row for row in explain.topic("fsdp_offload_params") if row.value == "true"]
    assert row.verdict == "honoured"
    assert row.text.startswith("the frozen base is stored in host memory")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("fsdp_offlaod_params", "fsdp_offload_params"),
        ("fsdp_offload_param", "fsdp_offload_params"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("nccl_ib_hcas", "NCCL_IB_HCA"),
        ("full_shard", "full-shard"),
        ("IFNAME", "NCCL_SOCKET_IFNAME"),
        ("zero_stge", "zero_stage"),
        ("lora.rr", "lora.r"),
        ("learning_rat", "train.learning_rate"),
    ],
)
def test_an_unknown_name_gets_the_nearest_over_all_kinds(name: str, near: str) -> None:
    with pytest.raises(UserError, match=repr(name)) as caught:
        explain.topic(name)
    assert near in caught.value.problems[0].hint


@pytest.mark.parametrize("name", ["", "   ", "zzzzzzzz", "[bold]", "a.b.c", "\x00", "é" * 500])
def test_a_name_that_is_like_nothing_is_a_clear_error(name: str) -> None:
    with pytest.raises(UserError) as caught:
        explain.topic(name)
    assert caught.value.problems[0].hint


@pytest.mark.parametrize("name", ["fsdp.yaml", "fsdp-3xH200.yaml", "config/fsdp_2xH200.yaml"])
def test_a_file_is_explained_row_by_row(name: str) -> None:
    rows = explain.file(EXAMPLES / name)
    entries = read_accelerate(EXAMPLES / name).entries
    assert [(row.name, row.verdict, row.where) for row in rows] == [
        (entry.path, entry.fate.verdict, entry.where) for entry in entries
    ]
    assert all(row.text for row in rows)
    assert {row.value for row in rows if row.name == "fsdp_config.fsdp_offload_params"} <= {"true", "false"}


def test_a_refused_key_is_explained_and_a_misspelt_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ds.yaml"
    path.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n")
    rows = explain.file(path)
    assert [(row.name, row.verdict) for row in rows] == [
        ("distributed_type", "refused"),
        ("deepspeed_config", "honoured"),
        ("deepspeed_config.zero_stage", "no effect"),
    ]
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_verison: 2\n")
    with pytest.raises(UserError, match="did you mean fsdp_version"):
        explain.file(path)


def test_the_table_shows_what_users_wrote_as_they_wrote_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text("distributed_type: FSDP\nmain_process_ip: '[red]10.0.0.1[/red]'\nmachine_rank: null\n")
    explain.show(explain.file(path))
    shown = capsys.readouterr().out
    assert "[red]10.0.0.1[/red]" in shown
    assert "null" in shown


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_one_setting_is_told_in_paragraphs_that_fit(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    explain.show(explain.topic("gradient_accumulation_steps"))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= int(columns)
    assert re.sub(r"\s+", " ", shown).startswith("train.gradient_accumulation_steps (in the run file) ")
    assert "(in an Accelerate file)" in re.sub(r"\s+", " ", shown)


def test_explaining_needs_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from windlass import explain; "
        f"explain.show(explain.file(Path({str(EXAMPLES / 'fsdp.yaml')!r}))); explain.topic('NCCL_DEBUG'); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'peft', 'trl', 'accelerate', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


# --- the page about DeepSpeed ---------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "fsdp2-or-deepspeed.md").read_text(encoding="utf-8")


def test_the_page_answers_every_row_of_the_recipes_table() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| ")]
    assert rows[1:7] == [
        "PyTorch native",
        "PEFT compatibility",
        "Torch compile",
        "Maintenance",
        "Configuration",
        "Activation checkpointing",
    ]


def test_the_pages_equals_of_deepspeed_are_those_of_the_error(tmp_path: Path) -> None:
    told = dict(re.findall(r"^\| `([a-z0-9_]+: [a-z0-9]+)`(?:,[^|]*)? \| `(layout: [^`]+)`", PAGE, re.MULTILINE))
    assert told
    for setting, layout in told.items():
        path = tmp_path / "ds.yaml"
        stage = "" if setting.startswith("zero_stage") else "  zero_stage: 3\n"
        path.write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config:\n{stage}  {setting}\n")
        with pytest.raises(UserError) as caught:
            read_accelerate(path)
        assert caught.value.problems[0].hint == f"write in the run file: {layout}"


def test_every_key_that_the_page_names_can_be_explained() -> None:
    table = PAGE.partition("## Coming from a DeepSpeed file")[2]
    names = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([a-z0-9_]+)[:`]", line.split("|")[1])
    }
    assert {"zero_stage", "gradient_clipping", "deepspeed_hostfile"} <= names
    for name in names - {"1", "2"}:
        assert explain.topic(name)
