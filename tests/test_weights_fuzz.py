"""Any config.json and any header: an error that names the file, or a model. Never a traceback."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass import tiny
from windlass.errors import UserError
from windlass.model.config import describe
from windlass.model.headers import read_header

FILE, CONFIG = "model.safetensors", "config.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    return {
        "single": tiny.write(root / "single", tokenizer=False),
        "mixtral": tiny.write(root / "mixtral", "mixtral", tokenizer=False),
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(data=st.data())
def test_any_config_is_an_error_or_a_model(originals: dict[str, Path], data: st.DataObject) -> None:
    said = json.loads((originals["single"] / CONFIG).read_text())
    table = data.draw(st.sampled_from([said, said["text_config"]]))
    for key in data.draw(st.lists(st.sampled_from(sorted(table)), max_size=3)):
        table[key] = data.draw(JSON)
    places = [CONFIG]
    try:
        assert describe(said, CONFIG).dims["layers"] > 0
    except UserError as error:
        places = [problem.where for problem in error.problems]
    assert all(place.startswith(CONFIG) for place in places)


@QUICK
@given(data=st.data())
def test_any_bytes_are_an_error_or_tensors(
    originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    said = bytearray((originals["mixtral"] / FILE).read_bytes()[:600])
    for _ in range(data.draw(st.integers(1, 6))):
        said[data.draw(st.integers(0, len(said) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    file.write_bytes(said[: data.draw(st.integers(0, len(said)))])
    with pytest.raises(UserError, match=r"fuzzed\.safetensors"):
        read_header(file)


@QUICK
@given(entries=st.dictionaries(st.text(max_size=6), JSON, max_size=4), body=st.binary(max_size=40))
def test_any_table_is_an_error_or_tensors(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, Any], body: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "table.safetensors"
    text = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)
    place = str(file)
    try:
        assert all(8 <= each.start <= each.end <= file.stat().st_size for each in read_header(file).values())
    except UserError as error:
        place = error.problems[0].where
    assert place == str(file)
