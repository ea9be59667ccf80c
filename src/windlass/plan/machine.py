"""The machine file that `windlass calibrate` writes: measured rates with their conditions, checked when it is read."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.errors import Problem, UserError, raise_all
from windlass.files import write_json
from windlass.hardware import Gpu
from windlass.rates import KINDS, Collective, Rates

AGAIN = "measure again: windlass calibrate --out FILE"
FOLDER = Path("~/.cache/windlass/machines")
# No machine has more: a CPU by far, a GPU by a tenth above its data sheet, whose clocks are conservative.
CPU_TFLOPS, CPU_GB_PER_SECOND, ABOVE_SHEET = 100.0, 10_000.0, 1.1
MOST_SECONDS = 1.0  # of an operator or a small collective
NUMBERS = [field.name for field in fields(Rates) if field.type == "float"]


def own_file(kind: str, ranks: int) -> Path:
    """Where the file of this host is, if it was calibrated."""
    return FOLDER.expanduser() / f"{platform.node()}-{ranks}-{kind}.json"


def write_machine(path: Path, kind: str, ranks: int, conditions: Mapping[str, Any], rates: Rates) -> dict[str, Any]:
    content = {"windlass": __version__, "kind": kind, "ranks": ranks, "conditions": dict(conditions)}
    content |= {"rates": json.loads(json.dumps(asdict(rates)))}
    content["digest"] = _digest(content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    except OSError as error:
        raise UserError(f"can't be written: {error.strerror}", str(path), "give another --out FILE") from None
    return content


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps({key: content[key] for key in content if key != "digest"}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def read_machine(path: Path, gpu: Gpu, ranks: int, where: str) -> Rates:
    """`where`: what names the file. Everything that is wrong with it is one error."""
    file = str(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"can't be read as a machine file: {getattr(error, 'strerror', None) or error}"
        raise UserError(f"{file} {what}", where, "write one on such a machine: windlass calibrate --out FILE") from None
    problems = [*_foreign(content, file, gpu, ranks)]
    if not problems:
        problems = [*_impossible(content.get("rates"), file, gpu)]
        if not problems and content.get("digest") != _digest(content):
            problems = [
                Problem("was edited after it was measured: its digest is another one", f"{file}: digest", AGAIN)
            ]
    raise_all(problems)
    made = content["rates"]
    points = {key: tuple(map(tuple, made[key])) for key in ("grouped", "attention")}
    products = {dtype: tuple(map(tuple, rows)) for dtype, rows in made["products"].items()}
    return Rates(**{**made, **points, "products": products, "collectives": _collectives(made)})


def _collectives(made: Mapping[str, Any]) -> tuple[Collective, ...]:
    return tuple(Collective(**each) for each in made["collectives"])


def _foreign(content: Any, file: str, gpu: Gpu, ranks: int) -> Iterator[Problem]:
    """Not a machine file of this version, or one of another machine."""
    if not isinstance(content, dict) or not {"windlass", "kind", "ranks", "rates", "digest"} <= content.keys():
        yield Problem("is no machine file", file, "write one: windlass calibrate --out FILE")
    elif content["windlass"] != __version__:
        yield Problem(
            f"was written by windlass {content['windlass']}, this is {__version__}", f"{file}: windlass", AGAIN
        )
    elif content["kind"] != gpu.name:
        hint = "set cluster.gpu to what was measured, or cluster.machine to a file of this kind"
        yield Problem(f"was measured on {content['kind']}, the run is planned for {gpu.name}", f"{file}: kind", hint)
    elif gpu.name == "cpu" and content["ranks"] != ranks:
        hint = f"windlass calibrate --ranks {ranks} --out FILE"
        what = f"was measured with {content['ranks']} ranks on the processor, the run has {ranks}, which share it"
        yield Problem(what, f"{file}: ranks", hint)


def _impossible(made: Any, file: str, gpu: Gpu) -> Iterator[Problem]:
    """Rates that are missing, no positive numbers, or beyond what such a machine can do."""
    cpu = gpu.name == "cpu"
    tflops = CPU_TFLOPS if cpu else gpu.bf16_tflops * ABOVE_SHEET
    memory = CPU_GB_PER_SECOND if cpu else gpu.memory_gb_per_second / 0.9 * ABOVE_SHEET

    def bad(key: str, value: Any, most: float = math.inf, least: float = 0.0) -> Iterator[Problem]:
        place = f"{file}: rates.{key}"
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            yield Problem(f"is {value!r}, not a number", place, AGAIN)
        elif not least <= value <= most or (value == 0 and not key.startswith("sync")):
            bound = f"at most {most:,.4g}" if value > most else "positive"
            yield Problem(f"is {value:g}, which is impossible for {gpu.name}: it is {bound}", place, AGAIN)

    wanted = {field.name for field in fields(Rates)}
    if not isinstance(made, dict) or made.keys() != wanted:
        odd = ", ".join(sorted(wanted ^ set(made if isinstance(made, dict) else ())))
        yield Problem(f"lacks or adds {odd}", f"{file}: rates", AGAIN)
        return
    for key in NUMBERS:
        most = MOST_SECONDS if key.endswith("_seconds") else memory if key.startswith(("memory", "decode")) else 1e5
        yield from bad(key, made[key], most)
    try:
        curves = {f"products.{dtype}": rows for dtype, rows in made["products"].items()}
        for name, rows in {**curves, "grouped": made["grouped"], "attention": made["attention"]}.items():
            for i, (first, second, rate) in enumerate(rows):
                for value, most in ((first, math.inf), (second, math.inf), (rate, tflops)):
                    yield from bad(f"{name}[{i}]", value, most)
            if not rows:
                yield Problem("is empty", f"{file}: rates.{name}", AGAIN)
        for i, each in enumerate(_collectives(made)):
            yield from bad(f"collectives[{i}].gb_per_second", each.gb_per_second, 1e5)
            yield from bad(f"collectives[{i}].latency_seconds", each.latency_seconds, MOST_SECONDS)
        kinds = {(each.kind, each.fabric) for each in _collectives(made)}
        for kind in KINDS:
            if not {(kind, "link"), (kind, "network")} <= kinds:
                yield Problem(f"have no {kind} of each fabric", f"{file}: rates.collectives", AGAIN)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        yield Problem(f"are not of the form that calibrate writes: {error}", f"{file}: rates", AGAIN)
