"""No file, whatever it holds, makes the reader of Accelerate files end in a traceback."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.errors import UserError
from windlass.plan.layout import FATES, KEYS, read_accelerate


def write(folder: Path, text: str) -> Path:
    path = folder / "fsdp.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> UserError:
    with pytest.raises(UserError) as caught:
        read_accelerate(write(folder, text))
    return caught.value


BAD = {
    "empty": (b"", "is empty"),
    "only a comment": (b"# nothing\n", "is empty"),
    "a list": (b"- a\n- b\n", "not a mapping"),
    "a word": (b"hello\n", "not a mapping"),
    "binary": (bytes(range(256)), "is not text"),
    "control characters": (b"distributed_type: FSDP\n\x01\x02: 1\n", "is not YAML"),
    "broken": (b"distributed_type: FSDP\nfsdp_config: {a: [\n", "is not YAML"),
    "tabs": (b"fsdp_config:\n\tfsdp_version: 2\n", "is not YAML"),
    "deep": (b"a: " + b"[" * 5000 + b"]" * 5000, "nested more than"),
    "large": (b"#" * (300 * 1024), "larger than"),
    "two documents": (b"distributed_type: FSDP\n---\ndistributed_type: FSDP\n", "a second document"),
    "no type": (b"num_machines: 2\n", "distributed_type is missing"),
    "a section that is a word": (b"distributed_type: FSDP\nfsdp_config: full\n", "not keys and values"),
    "a section that is a list": (b"distributed_type: FSDP\nfsdp_config: [a]\n", "not keys and values"),
    "a number that is none": (b"distributed_type: FSDP\nnum_machines: three\n", "not a whole number"),
    "a fraction": (b"distributed_type: FSDP\nnum_machines: 2.5\n", "not a whole number"),
    "a boolean that is none": (b"distributed_type: FSDP\nuse_cpu: perhaps\n", "not true or false"),
    "a mapping as a value": (b"distributed_type: FSDP\nnum_machines: {a: 1}\n", "not a single value"),
    "a nested mapping": (b"distributed_type: FSDP\nfsdp_config:\n  fsdp_version:\n    a: 1\n", "not a single value"),
    "a key that is a list": (b"distributed_type: FSDP\n? [a, b]\n: 1\n", "must be plain text"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_a_clear_error(name: str, tmp_path: Path) -> None:
    content, says = BAD[name]
    path = tmp_path / "fsdp.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        read_accelerate(path)
    assert all(str(path) in problem.where and problem.hint for problem in caught.value.problems)


def test_a_bomb_of_aliases_costs_nothing(tmp_path: Path) -> None:
    lines = ["distributed_type: FSDP", "a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "holds more than" in str(refusal(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize("content", ["fsdp_config: &f {a: *f}\ndistributed_type: FSDP\n", "&a [*a]\n"])
def test_a_file_that_holds_itself_ends(content: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, content).problems


def test_a_missing_file_and_a_folder_are_clear_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UserError, match="cannot be read") as caught:
            read_accelerate(path)
        assert caught.value.problems[0].where == str(path)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates())
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=5), SCALARS, max_size=2))
NAMES = st.one_of(st.sampled_from(sorted(FATES[""])), st.text(max_size=6))
INNER = st.one_of(st.sampled_from(sorted(n for names in FATES.values() for n in names)), st.text(max_size=6))
WORDS = st.sampled_from(sorted({value for key in KEYS for value in key.fates}))
FILES = st.dictionaries(
    NAMES, st.one_of(VALUES, WORDS, st.dictionaries(INNER, st.one_of(VALUES, WORDS), max_size=5)), max_size=8
)
QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@QUICK
@given(FILES)
def test_no_mapping_gives_a_traceback(tmp_path: Path, content: dict[str, Any]) -> None:
    path = write(tmp_path, yaml.safe_dump(content, allow_unicode=True))
    file = None
    with contextlib.suppress(UserError):
        file = read_accelerate(path)
    if file:
        assert {entry.path.partition(".")[0] for entry in file.entries} <= set(FATES[""])


@QUICK
@given(st.one_of(st.text(max_size=200), st.text(alphabet="{}[]:,&*!|>-?#%@ \n\t'\"ab01", max_size=120)))
def test_no_text_gives_a_traceback(tmp_path: Path, content: str) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError):
        read_accelerate(path)
