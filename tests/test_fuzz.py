"""Valid run files, Accelerate files, safetensors headers and indexes with some entries changed: refused or read right.

The oracles are the run file's JSON schema, and Accelerate's and safetensors' own readers.
"""

import copy
import json
import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from safetensors import SafetensorError, safe_open
from test_runfile import RUNS

from windlass import tiny
from windlass.errors import UserError
from windlass.model import read_base
from windlass.model.files import read_header
from windlass.runfile import read_any, read_presets
from windlass.runfile.accelerate import read_accelerate
from windlass.runfile.reference import make_schema

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**400, 0.5, -1e-3, 1e308, float("nan"), float("inf")),
    *("", "0", "no", "null", "auto", "all", "FSDP", "a" * 300, "\u0000", "ä ", "../x", [], {}, [[]], [None], {"": ""}),
)
INDEX, SHARD, FILE = "model.safetensors.index.json", "model-00001-of-00002.safetensors", "model.safetensors"


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container with each of its keys or indexes."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(tree[key])


def change(tree: Any, chance: random.Random) -> Any:
    """Return a copy in which one to three entries are odd, removed, misspelt, replaced or doubled."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        found = list(places(tree))
        if not found:
            return tree
        holder, key = chance.choice(found)
        other, its = chance.choice(found)
        kind = chance.randrange(6)
        if kind == 0:
            holder[key] = chance.choice(ODD)
        elif kind == 1:
            del holder[key]
        elif kind == 2:
            holder[key] = copy.deepcopy(other[its])
        elif kind == 3 and isinstance(holder, dict) and isinstance(key, str) and key:
            at = chance.randrange(len(key))
            holder[key[:at] + chance.choice("_xe ") + key[at + 1 :]] = holder.pop(key)
        elif kind == 4 and isinstance(holder[key], int | float):
            holder[key] = chance.choice((-holder[key], holder[key] + 1, str(holder[key]), [holder[key]]))
        elif isinstance(holder, dict):
            holder[str(its)] = copy.deepcopy(other[its])
    return tree


class Fuzz:
    """How a kind of file is written into a folder and read here, and the oracle that must accept what is accepted
    here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run.yaml"
        self.validator = jsonschema.Draft202012Validator(make_schema())
        texts = (*(path.read_text() for path in RUNS), *read_presets().values())
        # PyYAML takes 1e-4 for a text; the run file does not.
        self.runs = [yaml.safe_load(re.sub(r"\b(\de-\d)", lambda m: f"{float(m[1]):.8f}", text)) for text in texts]
        examples = Path(__file__).parent.parent / "examples" / "mistral-small-4"
        self.accelerate = [yaml.safe_load(path.read_text()) for path in examples.glob("fsdp*.yaml")]
        self.model = tiny.write_model(folder / "model", "mistral", files=2, layers=1, tokenizer=False)
        self.index = json.loads((self.model / INDEX).read_text())
        self.content = (self.model / SHARD).read_bytes()

    def run_file(self, chance: random.Random) -> bool:
        tree = change(chance.choice(self.runs), chance)
        self.run.write_text(yaml.safe_dump(tree, allow_unicode=True))
        read_any(self.run)
        tree = yaml.safe_load(self.run.read_text())
        for holder, key in () if self.validator.is_valid(tree) else list(places(tree)):
            number = holder[key]
            if isinstance(number, int | float):  # where a text is wanted, 2024 is the text "2024"
                holder[key] = str(number)
                if self.validator.is_valid(tree):
                    return True
                holder[key] = number
        return bool(self.validator.is_valid(tree))

    def accelerate_file(self, chance: random.Random) -> bool:
        self.run.write_text(yaml.safe_dump(change(chance.choice(self.accelerate), chance), allow_unicode=True))
        read_accelerate(self.run)
        load_config_from_file(str(self.run))
        return True

    def header(self, chance: random.Random) -> bool:
        (size,) = struct.unpack("<Q", self.content[:8])
        table = json.dumps(change(json.loads(self.content[8 : 8 + size]), chance)).encode()
        length, body = len(table), self.content[8 + size :]
        if chance.random() < 0.2:
            length += chance.choice((-1, 1, 8, 2**32, 2**62))
        if chance.random() < 0.2:
            body = chance.choice((body[:-1], body + b"\0", b"", body[8:]))
        file = self.folder / FILE
        file.write_bytes(struct.pack("<Q", length) + table + body)
        mine = read_header(file)
        with safe_open(file, "pt") as opened:
            return {key: list(one.shape) for key, one in mine.items()} == {
                key: opened.get_slice(key).get_shape()
                for key in opened.keys()  # noqa: SIM118
            }

    def index_file(self, chance: random.Random) -> bool:
        table = change(self.index, chance)
        (self.model / INDEX).write_text(json.dumps(table))
        read_base(self.model)
        return bool(table["weight_map"] == self.index["weight_map"])


@pytest.mark.parametrize("count", [100, pytest.param(600, marks=pytest.mark.prove)])
@pytest.mark.parametrize("kind", ["run_file", "accelerate_file", "header", "index_file"])
def test_fuzzed_input_is_refused_or_correct(kind: str, count: int, tmp_path: Path) -> None:
    fuzz, taken = Fuzz(tmp_path), 0
    read: Callable[[random.Random], bool] = getattr(fuzz, kind)
    for seed in range(count):
        try:
            assert read(random.Random(seed)), f"seed {seed} is taken here, and nowhere else"
            taken += 1
        except UserError as error:
            complete = all(problem.problem and problem.where for problem in error.problems)
            if not complete or len(str(error).encode()) > 100_000:
                raise
        except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise AssertionError(f"seed {seed}") from error
    assert count / 100 <= taken <= count * 0.9
