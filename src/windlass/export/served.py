"""An adapter as a server reads it: refused where the server would not apply it, experts as a matrix each, scales folded
into lora_B."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from windlass.errors import Problem, raise_all
from windlass.export.deltas import Delta, Deltas
from windlass.export.screen import Say
from windlass.model import Base
from windlass.model.targets import LAYER
from windlass.model.wrapped import PREFIX, Rename
from windlass.serve.servers import FOLDED, PER_EXPERT, ServerRow, ServerVerdict, judge_adapter, list_ways_on

PROVEN_ROWS: Final = 64  # of each matrix, when it is opened again
SLACK: Final = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # of products of rounded factors


@dataclass(frozen=True, slots=True)
class MatrixPair:
    """One pair of matrices in the form to write."""

    module: str  # its name in the server's base
    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float
    delta: Delta | None = None  # the change that it is of; None: zeros beside an adapted matrix
    expert: int = 0
    first_row: int = 0  # of the delta's rows


def list_features(deltas: Deltas, config: Mapping[str, Any]) -> list[str]:
    """Return the features of an adapter that servers may not have, by their names in servers.toml."""
    replaced = [name for name, delta in deltas.by_name.items() if delta.replaced is not None]
    present = {
        "rslora": config.get("use_rslora"),
        "patterns": config.get("rank_pattern") or config.get("alpha_pattern"),
        "dora": config.get("use_dora"),
        "modules_to_save": any(not name.endswith(".bias") for name in replaced),
        "bias": any(name.endswith(".bias") for name in replaced),
    }
    return [feature for feature, is_present in present.items() if is_present]


def require_served(
    server: str, base: Base, deltas: Deltas, config: Mapping[str, Any], environment: Mapping[str, str], source: Path
) -> list[ServerVerdict]:
    """Return what the server does with every part of the adapter, or raise a problem for each that it doesn't apply."""
    adapted = [name for name, delta in deltas.by_name.items() if delta.replaced is None]
    verdicts = list(judge_adapter(server, base, adapted, list_features(deltas, config), environment))
    refused = [verdict for verdict in verdicts if verdict.is_refused]
    run = shlex.quote(str(source))
    raise_all([Problem(str(v), f"--for {server}", list_ways_on(v, base, run), "not-served") for v in refused])
    return verdicts


def report_missing_files(base: Base, base_name: str, served: Path, has_mistrals: bool, say: Say) -> None:
    """Report a file that vLLM needs beside the weights and that the base's folder lacks, and how to get it."""
    if not base.wrapper or not base.path:
        return
    needed = "tekken.json" if has_mistrals else "*processor_config.json"
    if any(base.path.glob(needed)):
        return
    way = f"copy it there from the repository that {base_name} was downloaded from"
    if "/" in base_name:
        way = f"`hf download {base_name} --include {shlex.quote(needed)} --local-dir {shlex.quote(str(served))}`"
    say(f"note      vLLM needs {needed.replace('*', 'pre')} in {served}, and the base has none: {way}")


def convert_adapter(
    saved: Mapping[str, Tensor],
    config: Mapping[str, Any],
    deltas: Deltas,
    base: Base,
    verdicts: Sequence[ServerVerdict],
    rename: Rename,
) -> tuple[list[MatrixPair], dict[str, Any]]:
    """Return the pairs to write, and adapter_config.json, if the server reads another form than PEFT's; else no pairs.

    rename: from the language model's names to the served model's.
    """
    forms = {verdict.row.form for verdict in verdicts} - {""}
    if not forms:
        return [], dict(config)
    rows = {module: verdict.row for verdict in verdicts for module in verdict.modules}
    pairs: list[MatrixPair] = []
    for name, delta in deltas.by_name.items():
        assert delta.a is not None
        assert delta.b is not None
        module = name.removesuffix(".weight")
        if rows[module].form == PER_EXPERT:
            pairs += _split_experts(delta, deltas, rows[module], rename, saved[delta.b.key].dtype)
        else:
            pairs.append(MatrixPair(rename(module), saved[delta.a.key], saved[delta.b.key], delta.scale, delta))
    r = int(config["r"])
    alpha = config["lora_alpha"]
    if FOLDED in forms or any(pair.scale != alpha / r or pair.b.shape[1] != r for pair in pairs):
        r = alpha = max(pair.b.shape[1] for pair in pairs)
        pairs = [_fold(pair, r) for pair in pairs]
    experts = [row for row in rows.values() if row.form == PER_EXPERT]
    pairs += _add_zeros(base, pairs, experts, rename, r)
    modules = sorted({pair.module.rpartition(".")[2] for pair in pairs})
    plain = {"use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "target_parameters": None}
    return pairs, {**config, **plain, "r": r, "lora_alpha": alpha, "target_modules": modules}


def _layer_of(name: str) -> str:
    match = LAYER.search(name)
    assert match is not None
    return name[: match.end() - 1]


def _list_matrices(name: str, row: ServerRow, expert: int, outputs: int) -> Iterator[tuple[str, int, int]]:
    """Yield the modules that an expert's part of a parameter becomes, each with its first row and the one after."""
    gate, down, up = row.matrices
    half = outputs // 2
    parts = {gate: (0, half), up: (half, 2 * half)}
    if name.endswith("down_proj"):
        parts = {down: (0, outputs)}
    for matrix, (first, last) in parts.items():
        yield f"{_layer_of(name)}.{row.module}.{expert}.{matrix}", first, last


def _split_experts(
    delta: Delta, deltas: Deltas, row: ServerRow, rename: Rename, dtype: torch.dtype
) -> Iterator[MatrixPair]:
    """Yield a pair for each matrix of each expert: gate and up share their A."""
    name = delta.parameter.name
    factors = deltas.factors(name)
    for expert in range(delta.experts):
        for module, first, last in _list_matrices(name, row, expert, factors.b.shape[1]):
            b = factors.b[expert, first:last].to(dtype)
            yield MatrixPair(rename(module), factors.a[expert].to(dtype), b, delta.scale, delta, expert, first)


def _fold(pair: MatrixPair, r: int) -> MatrixPair:
    """Multiply the scale into B, and fill both up with zeros to rank r; B stays in its dtype if that rounds nothing."""
    b = pair.b.float() * pair.scale
    narrow = b.to(pair.b.dtype)
    if torch.equal(narrow.float(), b):
        b = narrow
    missing = r - b.shape[1]
    a = nn.functional.pad(pair.a, (0, 0, 0, missing))
    b = nn.functional.pad(b, (0, missing))
    return MatrixPair(pair.module, a, b, 1.0, pair.delta, pair.expert, pair.first_row)


def _add_zeros(
    base: Base, pairs: Sequence[MatrixPair], experts: Sequence[ServerRow], rename: Rename, r: int
) -> Iterator[MatrixPair]:
    """Yield pairs that change nothing for matrices beside adapted ones: servers take all of an expert's or none."""
    if not experts:
        return
    present = {pair.module for pair in pairs}
    layers = {_layer_of(pair.delta.parameter.name) for pair in pairs if pair.delta and pair.delta.experts}
    for parameter in base.parameters:
        if parameter.part != "experts" or len(parameter.shape) != 3 or _layer_of(parameter.name) not in layers:
            continue
        count, outputs, inputs = parameter.shape
        for expert in range(count):
            for module, first, last in _list_matrices(parameter.name, experts[0], expert, outputs):
                if rename(module) not in present:
                    yield MatrixPair(rename(module), torch.zeros(r, inputs), torch.zeros(last - first, r), 1.0)


def name_tensors(pairs: Sequence[MatrixPair]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for pair in pairs:
        for kind, matrix in (("lora_A", pair.a), ("lora_B", pair.b)):
            tensors[f"{PREFIX}{pair.module}.{kind}.weight"] = matrix.clone().contiguous()  # gate and up share their A
    return tensors


def prove_served(
    pairs: Sequence[MatrixPair], written: Mapping[str, Tensor], config: Mapping[str, Any], deltas: Deltas
) -> Iterator[str]:
    """Yield modules whose written matrices, at alpha / r alone, are not the adapter's change."""
    scale = config["lora_alpha"] / config["r"]
    for pair in pairs:
        a, b = (written[f"{PREFIX}{pair.module}.{kind}.weight"] for kind in ("lora_A", "lora_B"))
        rows = b[:PROVEN_ROWS].double()
        read = rows @ a.double() * scale
        exact = torch.zeros_like(read)
        if pair.delta:
            factors = deltas.factors(pair.delta.parameter.name)
            exact = factors.rows(pair.expert, pair.first_row, pair.first_row + len(rows)).double()
        size = rows.abs() @ a.double().abs() * abs(scale)
        if not bool(((read - exact).abs() <= SLACK[b.dtype] * size + 1e-30).all()):
            yield f"{pair.module} is not the adapter's change when it is read back"
