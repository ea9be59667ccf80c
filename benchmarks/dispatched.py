"""Count what a training step dispatches in the real model: the table from which the plan estimates host time.

    python benchmarks/dispatched.py            write src/windlass/plan/operators.json
    python benchmarks/dispatched.py --show     print it instead
    python benchmarks/dispatched.py --kernels  print the kernels of one layer by the table, separate and fused

Tiny replicas of each family run one forward and backward under a dispatch mode, with the adapter, loss and experts of
training. Models with two numbers of layers are compared, so that everything outside the layers cancels. Counted per
layer: operators that launch work, views, module calls, and bytes read and written by operators other than matrix
products. Bytes per token are linear in the layer's widths; several sizes give the coefficients, and a remainder is an
error. "separate" is what a CPU and other engines dispatch, "fused" (train/patches.py) what a GPU does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import warnings
from collections import Counter, defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from windlass.model import Base, config
from windlass.model import targets as adapters
from windlass.model.family import FAMILIES, Family
from windlass.plan import workload as work
from windlass.plan.layout import Layout
from windlass.plan.operators import COUNTED, OF_FUSED, OF_LINEAR, layer_features, linear_features
from windlass.runfile import Lora
from windlass.tiny import EXTRA
from windlass.train import parallel
from windlass.train.head import Head
from windlass.train.kernels import on_cpu
from windlass.train.kernels.lora_linear import FusedAdapters
from windlass.train.lora import attach_adapter
from windlass.train.patches import PARTS, Patches

TABLE = Path(work.__file__).with_name("operators.json")
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "grouped_mm", "linear", "scaled_dot_product", "flash_attention")
MARKS = ("_wrap_tensor_autograd", "wait_tensor")  # nothing is launched, as by the profiler's marks that FSDP2 sets
WAYS = ("separate", "fused")
PHASES = ("forward", "backward")
COUNTS = ("operators", "views", "modules", "bytes")
LINEAR = 0.03  # of a count or of bytes may be left over: routing differs from pass to pass
TOKENS = (256, 512)  # enough for every expert to have some
# hidden, heads, kv_heads, intermediate, experts, top_k, and how many of its targets are adapted
SIZES = [
    (64, 4, 2, 128, 8, 2, 9),
    (96, 4, 2, 128, 8, 2, 9),
    (64, 8, 2, 128, 8, 2, 9),
    (64, 4, 4, 128, 8, 2, 9),
    (64, 4, 2, 192, 8, 2, 9),
    (64, 4, 2, 128, 16, 2, 9),
    (64, 4, 2, 128, 8, 4, 9),
    (64, 4, 2, 128, 8, 2, 1),
    (96, 8, 4, 192, 16, 4, 1),
    (64, 4, 2, 128, 8, 2, 3),
    (96, 4, 2, 256, 8, 2, 4),
    (128, 8, 2, 64, 8, 2, 5),
    (128, 8, 4, 128, 16, 4, 6),
]


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators by phase: those that launch work, views, and bytes of those that are not matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase, self.found = PHASES[0], defaultdict[str, Counter[str]](Counter)
        self.names = Counter[tuple[str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        name, count = func.overloadpacket.__name__, self.found[self.phase]
        self.names[self.phase, name] += 1
        if name in MARKS or name.startswith("_record_function"):
            return answer
        view = func.is_view or name in ("_unsafe_view", "detach", "lift_fresh") or "empty" in name
        count["views" if view else "operators"] += 1
        if not view and not any(word in name for word in PRODUCTS):
            tensors = [each for each in tree_leaves((args, kwargs, answer)) if isinstance(each, Tensor)]
            count["bytes"] += sum(each.nbytes for each in tensors)
        elif name == "addmm_":  # what a product is added to is read besides
            count["bytes"] += args[0].nbytes
        return answer


def describe(family: Family, sizes: tuple[int, ...], layers: int, dense: bool = False) -> Base:
    hidden, heads, kv, intermediate, experts, top_k, _ = sizes
    dims = {"hidden": hidden, "layers": layers, "heads": heads, "vocab": 64, "intermediate": intermediate}
    dims |= {"experts": experts, "top_k": top_k, "expert_intermediate": intermediate // 2, "kv_heads": kv}
    if "kv_rank" in family.sizes:
        dims |= {"q_rank": 8 * kv, "kv_rank": 16, "rope_dim": 8, "nope_dim": 8, "v_head_dim": 16, "kv_heads": heads}
        dims |= {"shared_experts": 1}
    named = {size.keys[0]: dims[name] for name, size in family.sizes.items() if name in dims and size.keys}
    named |= {"first_k_dense_replace": layers} if dense else {}
    named |= {"pad_token_id": 0, "tie_word_embeddings": False, **EXTRA.get(family.model_type, {})}
    return config.describe({"model_type": family.model_type, **named}, family.model_type)


def adapter_of(base: Base, count: int) -> tuple[Lora, adapters.Adapter]:
    """Adapt the first `count` linear modules of a layer; with the seventh, all and the routed experts."""
    names = [p.name.split(".")[-2] for p in base.parameters if ".layers.0." in p.name and p.part in ADAPTED]
    plain = list(dict.fromkeys(names))[:count]
    routed = count > 6 and any(p.part == "experts" for p in base.parameters)
    lora = Lora.model_validate(
        {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": plain}
        | ({"experts": {"r": 8}} if routed else {})
    )
    return lora, adapters.resolve_adapter(lora, base, str)


ADAPTED = ("attention", "mlp", "shared_experts")
LINEARS = [(64, 96, 32), (128, 96, 32), (64, 192, 32), (64, 96, 64), (128, 192, 64), (256, 64, 16), (64, 256, 16)]
# Whether it has DoRA, its dropout, the way, and whether it computes in 16 bits though the adapter is in float32.
OPTIONS = {
    "dropout, separate": (False, 0.1, "separate", True),
    "dropout, fused": (False, 0.1, "fused", True),
    "dora": (True, 0.0, "separate", True),
    "dora, dropout": (True, 0.1, "separate", True),
    "float32": (False, 0.0, "separate", False),
}


def count_step(base: Base, count: int, tokens: int, way: str) -> dict[str, dict[str, int]]:
    """Count one forward and backward of a model with random weights."""
    lora, adapter = adapter_of(base, count)
    layout = Layout("resident", "counted", 1, 1, shard=1)
    model = parallel.build_model(base, layout, torch.bfloat16)
    parallel.allocate(model, layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.requires_grad_(False)
    # Separate are PEFT's own forwards, which the published runs had: on a CPU windlass's need fewer operators.
    with patch.object(Patches, "patch_adapted_linears") if way == "separate" else nullcontext():
        peft = attach_adapter(model, lora, adapter, 0)
    causal_lm = peft.get_base_model()
    patches = Patches()
    patches.patch_forward(causal_lm)
    fused = patches.fuse_layers(causal_lm, torch.bfloat16, parts=PARTS if way == "fused" else (), always=True)
    causal_lm.train()
    calls = 0

    def called(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for module in causal_lm.modules():
        module.register_forward_pre_hook(called)
    ids = torch.randint(1, 64, (1, tokens))
    grouped = patch.object(on_cpu, "rounds_rows", lambda _: False)  # experts one after the other are a CPU's way alone
    adapters = patch.object(on_cpu, "is_on_cpu", lambda _: way != "fused")
    with patches, grouped, adapters, fused.unchanged(), Counting() as counting:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = causal_lm(ids, torch.arange(tokens - 1)).last_hidden_state
            loss, _ = Head(causal_lm).loss(hidden, ids[0, 1:])
        counting.phase = PHASES[1]
        loss.backward()  # type: ignore[no-untyped-call]
    found = {phase: dict(counting.found[phase]) for phase in PHASES}
    found["forward"]["modules"], found["backward"]["modules"] = calls, 0
    return found


def count_layer(
    family: Family, sizes: tuple[int, ...], dense: bool, way: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the features of such a model's last layer, and what it dispatches, as `forward operators` and so on."""
    bases = [describe(family, sizes, layers, dense) for layers in (2, 3)]
    layer = work.read_shape(bases[1], adapter_of(bases[1], sizes[-1])[1]).layers[-1]
    few, many = ([count_step(base, sizes[-1], tokens, way) for base in bases] for tokens in TOKENS)
    found = {}
    for phase in PHASES:
        for what in COUNTS:
            each: float = many[1][phase].get(what, 0) - many[0][phase].get(what, 0)
            if what == "bytes":
                each = (each - few[1][phase]["bytes"] + few[0][phase]["bytes"]) / (TOKENS[1] - TOKENS[0])
            found[f"{phase} {what}"] = each
    return layer_features(layer, sizes[0], bases[1].dims.get("top_k", 0)), found


def count_family(family: Family, way: str, dense: bool = False) -> dict[str, Any]:
    """Return, by phase, what one layer and each adapter in it dispatch, and the coefficients of bytes per token."""
    counted = [count_layer(family, sizes, dense, way) for sizes in SIZES]
    every = tuple(name for name in counted[0][0] if way == "fused" or name not in OF_FUSED)
    matrix = np.array([[row[name] for name in every] for row, _ in counted])
    table: dict[str, Any] = {phase: {} for phase in PHASES}
    for phase, what in itertools.product(PHASES, COUNTS):
        values = [found[f"{phase} {what}"] for _, found in counted]
        table[phase][what] = solve(matrix, values, every, every if what == "bytes" else COUNTED)
    return table


def on_gpu() -> Any:
    """Compute dropout as on a GPU: one operator."""
    return patch("torch.nn.functional.dropout", lambda x, p, training, _: torch.native_dropout(x, p, training)[0])


def count_linear(
    sizes: tuple[int, ...], dora: bool, dropout: float, way: str, autocast: bool
) -> dict[str, dict[str, int]]:
    """Count what an adapted linear layer of `inputs, outputs, tokens` dispatches beyond plain LoRA under autocast."""
    inputs, outputs, tokens = sizes
    found = []
    for options, mixed in (({"use_dora": dora, "lora_dropout": dropout}, autocast), ({}, True)):
        base = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        linear = Linear(base, "default", config=LoraConfig(r=4, **options), r=4, lora_alpha=8)
        for each in (linear.lora_A, linear.lora_B, linear.lora_magnitude_vector):
            each.float()
        model, calls = nn.Module(), 0
        model.q_proj = linear
        fused = FusedAdapters([model] if way == "fused" else [], torch.bfloat16)
        Patches().patch_adapters(fused)

        def called(*_: Any) -> None:
            nonlocal calls
            calls += 1

        for module in linear.modules():
            module.register_forward_pre_hook(called)
        x = torch.randn(tokens, inputs, dtype=torch.bfloat16).requires_grad_()
        with on_gpu() if way == "fused" else nullcontext(), fused.unchanged(), Counting() as counting:
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                y = linear(x * 1)
            counting.phase = PHASES[1]
            y.backward(y.detach())
        found.append({phase: Counter(counting.found[phase]) for phase in PHASES})
        found[-1][PHASES[0]]["modules"] = calls
    return {phase: {what: found[0][phase][what] - found[1][phase][what] for what in COUNTS} for phase in PHASES}


def linear_table(*options: Any) -> dict[str, Any]:
    """Return counts of one adapted linear layer: bytes per token of input and output, and per weight, in one pass."""
    counted = [(sizes, count_linear(sizes, *options)) for sizes in LINEARS]
    matrix = np.array([linear_features(*sizes) for sizes, _ in counted], float)
    table: dict[str, Any] = {}
    for phase in PHASES:
        table[phase] = {what: counted[0][1][phase][what] for what in COUNTS}
        answer, *_ = np.linalg.lstsq(matrix, np.array([found[phase]["bytes"] for _, found in counted], float))
        values = zip(OF_LINEAR, answer, strict=True)
        table[phase]["bytes"] = {name: round(float(value), 2) for name, value in values if abs(value) > 0.005}
    return table


def solve(matrix: Any, values: list[float], every: tuple[str, ...], names: tuple[str, ...]) -> dict[str, float]:
    """Solve least squares without negative coefficients; a remainder that is not linear is an error."""
    used = [name for name in names if name in every and (names is COUNTED or name not in COUNTED)]
    matrix, target = matrix[:, [every.index(name) for name in used]], np.array(values)
    active = [True] * len(used)
    while True:
        chosen = np.flatnonzero(active)
        answer, *_ = np.linalg.lstsq(matrix[:, chosen], target, rcond=1e-9)
        if not len(chosen) or answer.min() >= 0:
            break
        active[chosen[answer.argmin()]] = False
    left = np.abs(matrix[:, chosen] @ answer - target).max() / max(1.0, *map(abs, values))
    if left > LINEAR:
        raise SystemExit(f"{left:.1%} of {values} is left over")
    return {used[i]: round(float(value), 2) for i, value in zip(chosen, answer, strict=True) if value > 0.005}


def show_kernels(table: dict[str, Any]) -> None:
    """Print a layer's operators and views in forward and backward, all its linear modules and experts adapted."""
    print(f"{'of one layer:':10} {'kernels':>15} {'views':>15}\n{'family':10}" + 2 * f" {'separate':>8} {'fused':>6}")
    for name in ("mistral4", "mixtral", "llama"):
        base = describe(FAMILIES[name], SIZES[0], 3)
        layer = work.read_shape(base, adapter_of(base, SIZES[0][-1])[1]).layers[-1]
        features = layer_features(layer, SIZES[0][0], base.dims.get("top_k", 0))
        counts = []
        for what, way in itertools.product(("operators", "views"), WAYS):
            counted = [table[way][name][phase][what] for phase in PHASES]
            counts.append(sum(features[feature] * value for row in counted for feature, value in row.items()))
        print("{:10} {:8.0f} {:6.0f} {:8.0f} {:6.0f}".format(name, *counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of one layer by the written table")
    parser.add_argument("--show", action="store_true", help="print the table instead of writing it")
    parser.add_argument("--only", default="", help="this family alone, the others as they are")
    parser.add_argument("--way", choices=WAYS, help="these tables alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table: dict[str, Any] = json.loads(TABLE.read_text())
    if options.kernels:
        show_kernels(table)
        return
    table["linear"] = {name: linear_table(*every) for name, every in OPTIONS.items()}
    for way, (name, family) in itertools.product(WAYS, FAMILIES.items()):
        if options.only in ("", name) and options.way in (None, way):
            table[way][name] = count_family(family, way)
            if "first_dense" in family.sizes:
                table[way][f"{name}, dense"] = count_family(family, way, dense=True)
            print(name, way, flush=True)
    text = re.sub(r"\{[^{}]*\}", lambda row: " ".join(row[0].split()), json.dumps(table, indent=1)) + "\n"
    print(text) if options.show else TABLE.write_text(text)


if __name__ == "__main__":
    main()
