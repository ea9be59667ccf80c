"""Whatever is in a run file or an override, only a UserError comes out, and it can be printed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.errors import Problem, UserError
from windlass.runfile import init, keys, presets, read

ROOT = Path(__file__).parent.parent / "examples" / "mistral-small-4"
EXAMPLES = [*(path.read_bytes() for path in sorted(ROOT.glob("*.yaml"))), *(init(name).encode() for name in presets())]
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LONG = settings(max_examples=4000, deadline=None, suppress_health_check=list(HealthCheck))

SPECIAL = ["auto", "no", "1e999", "-1", "0", "nan", "[", "{}", "all", "*", "\ud800", "\0", "9" * 5000, "~"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(SPECIAL)
KEYS = st.sampled_from([part for key in keys() for part in (key, key.rpartition(".")[2])]) | st.text(max_size=10)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)
SECTIONS = st.sampled_from(["name", "kind", "model", "lora", "data", "train", "layout", "cluster", "watch"])
TREES = st.dictionaries(SECTIONS | KEYS, VALUES | st.dictionaries(KEYS, VALUES, max_size=8), max_size=8)
ENDS = st.sampled_from(["", "[0]", "[99]", ".0", ".x", "[-1]", ".", "[", "a" * 300])
SETTINGS = st.builds(lambda key, end, value: f"{key}{end}={value}", KEYS, ENDS, st.text(max_size=20) | VALUES.map(str))
OVERRIDES = st.lists(SETTINGS | st.text(max_size=30), max_size=4)
ODD = [b"-1", b"0", b"1e400", b".nan", b"null", b"[]", b"{}", b"[[[[", b"'", b"no", b"12:30:00", b"2020-01-01"]


def read_or_refuse(path: Path, content: bytes, overrides: list[str]) -> None:
    path.write_bytes(content)
    problems: Sequence[Problem] = ()
    try:
        loaded = read(path, overrides)
        assert all(map(loaded.where, keys()))
        loaded.run.model_dump_json()
    except UserError as error:
        problems = error.problems or (Problem(""),)
    assert all(problem.problem and problem.where for problem in problems), problems
    assert len("".join(map(str, problems)).encode("utf-8")) < 400_000


def mutate(content: bytes, seed: int) -> bytes:
    """Change a few bytes, lines or indentations of a real file."""
    choice = random.Random(seed)
    lines = content.split(b"\n")
    for _ in range(choice.randint(1, 4)):
        at = choice.randrange(len(lines))
        line, half = lines[at], len(lines[at]) // 2
        lines[at] = choice.choice(
            [
                b" " * choice.randint(0, 6) + line.strip(),
                line + line,
                line.replace(b":", choice.choice([b"", b": &a", b": *a", b": !!int", b":\t"])),
                line[:half] + bytes([choice.randrange(256)]) + line[half:],
                lines[choice.randrange(len(lines))],
                line.partition(b":")[0] + b": " + choice.choice(ODD),
            ]
        )
    return b"\n".join(lines)


@pytest.mark.parametrize("how", [QUICK, pytest.param(LONG, marks=pytest.mark.prove)], ids=["quick", "long"])
def test_only_user_errors_come_out(tmp_path: Path, how: settings) -> None:
    path = tmp_path / "run.yaml"

    @how
    @given(content=st.binary(max_size=300))
    def any_bytes(content: bytes) -> None:
        read_or_refuse(path, content, [])

    @how
    @given(content=st.text(st.sampled_from(list("abr:-[]{}&*!|>%@`'\"#,? \n\t01~<\\xU")), max_size=80))
    def any_yaml_like(content: str) -> None:
        read_or_refuse(path, b"lora:\n  r: 1\n" + content.encode(), [])

    @how
    @given(tree=TREES, overrides=OVERRIDES)
    def any_tree(tree: dict[str, Any], overrides: list[str]) -> None:
        try:
            content = yaml.safe_dump(tree, allow_unicode=True).encode()
        except (UnicodeEncodeError, yaml.YAMLError):
            content = yaml.safe_dump(tree).encode()
        read_or_refuse(path, content, overrides)

    @how
    @given(example=st.sampled_from(EXAMPLES), seed=st.integers(0, 2**32), overrides=OVERRIDES)
    def any_mutation(example: bytes, seed: int, overrides: list[str]) -> None:
        read_or_refuse(path, mutate(example, seed), overrides if seed % 3 == 0 else [])

    any_bytes()
    any_yaml_like()
    any_tree()
    any_mutation()
