"""What the ways to sum a base's product and an adapter's cost on this CPU, and how much of a small adapter they keep.

    python benchmarks/one_rounding.py
    python benchmarks/one_rounding.py --tokens 1024 --rounds 60

Forward and backward of one layer in bfloat16, rank 16, in seconds of one processor: the ways take turns in one process,
each round in another order, so that other work on the machine meets all alike. Printed are each way's time by that of
PEFT's way in the same round, the median with its 95 % interval (by bootstrap), and the share of the adapter's effect
that is in the output. FP8: weights in codes, decoded for each product. Experts: forward alone, as in evaluations.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from windlass.train.kernels.products import QuantizedLinear, _WideProduct, multiply_one_by_one
from windlass.weights.quantized import StoredFormat

R = 16
SCALE = 2.0
SMALL = 2.0**-14  # standard deviation of B
EXPERTS = 8
# name -> inputs, outputs, bias, codes
KINDS = {
    "576 to 192": (576, 192, False, False),
    "576 to 576": (576, 576, False, False),
    "576 to 1536": (576, 1536, False, False),
    "1536 to 576": (1536, 576, False, False),
    "2048 to 2048": (2048, 2048, False, False),
    "2048 to 2048, bias": (2048, 2048, True, False),
    "2048 to 2048, FP8": (2048, 2048, False, True),
}


class Layer:
    """A frozen linear layer and its adapter."""

    def __init__(self, inputs: int, outputs: int, bias: bool, in_codes: bool) -> None:
        plain = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
        self.base: Any = plain
        if in_codes:
            self.base = QuantizedLinear(plain, StoredFormat(torch.float8_e4m3fn, (128, 128), torch.bfloat16))
            self.base.weight.data.copy_(torch.randn(outputs, inputs).to(torch.float8_e4m3fn).view(torch.uint8))
            self.base.weight_scale.fill_(inputs**-0.5)
        self.bias: Tensor | None = self.base.bias
        self.down = nn.Parameter(torch.randn(R, inputs, dtype=torch.bfloat16) * inputs**-0.5)
        self.up = nn.Parameter(torch.randn(outputs, R, dtype=torch.bfloat16) * SMALL)

    def weight(self) -> Tensor:
        weight: Tensor = self.base.dense(torch.bfloat16) if hasattr(self.base, "dense") else self.base.weight
        return weight

    @torch.no_grad()
    def exact(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the base's product and what the adapter adds."""
        bias = None if self.bias is None else self.bias.double()
        change = linear(linear(x.double(), self.down.double()), self.up.double()) * SCALE
        return linear(x.double(), self.weight().double(), bias), change


def round_twice(layer: Layer, x: Tensor) -> Tensor:
    return linear(x, layer.weight(), layer.bias) + linear(linear(x, layer.down), layer.up) * SCALE


def add_inside(layer: Layer, x: Tensor) -> Tensor | None:
    if layer.bias is not None:  # a sum of three
        return None
    added = linear(linear(x, layer.down) * SCALE, layer.up)
    return torch.addmm(added, x, layer.weight().t())


def widen(layer: Layer, x: Tensor) -> Tensor:
    bias = x.new_zeros(len(layer.up)) if layer.bias is None else layer.bias
    narrow = linear(x, layer.down) * SCALE
    output: Tensor = _WideProduct.apply(x, narrow, layer.weight(), None, None, layer.up, bias)  # type: ignore[no-untyped-call]
    return output


def cast_after(layer: Layer, x: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    product = linear(x.float(), layer.weight().float(), bias)
    return (product + linear(linear(x, layer.down).float(), layer.up.float()) * SCALE).bfloat16()


WAYS: dict[str, Callable[[Layer, Tensor], Tensor | None]] = {
    "two roundings (PEFT)": round_twice,
    "added inside the product": add_inside,
    "[x, xA'] [W, sB]'": widen,
    "float32, then cast": cast_after,
}


def measure(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """Return each step's seconds of processor time in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for i in range(rounds + 3):
        random.shuffle(order)
        for name in order:
            began = time.process_time()
            steps[name]()
            if i >= 3:
                seconds[name].append(time.process_time() - began)
    return {name: np.array(values) for name, values in seconds.items()}


def describe(kind: str, seconds: dict[str, np.ndarray], shares: dict[str, float]) -> None:
    first = next(iter(seconds))
    chance = np.random.default_rng(0)
    for name, values in seconds.items():
        ratios = values / seconds[first]
        medians = np.median(chance.choice(ratios, (2000, len(ratios))), 1)
        low, high = np.quantile(medians, [0.025, 0.975])
        ratio = f"{np.median(ratios):5.2f} ({low:.2f} to {high:.2f})"
        print(f"{kind:20}  {name:26}  {np.median(values) * 1000:8.2f} ms  {ratio}  {shares[name]:5.0%}", flush=True)


def compare_linear(kind: str, tokens: int, rounds: int) -> None:
    layer = Layer(*KINDS[kind])
    x = torch.randn(tokens, KINDS[kind][0], dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(tokens, KINDS[kind][1], dtype=torch.bfloat16)
    base, change = layer.exact(x)

    def make_step(way: Callable[[Layer, Tensor], Tensor | None]) -> Callable[[], object]:
        def step() -> None:
            output = way(layer, x)
            assert output is not None
            torch.autograd.grad(output, (x, layer.down, layer.up), gradient)

        return step

    outputs = {name: None if (output := way(layer, x)) is None else output.detach() for name, way in WAYS.items()}
    shares = {
        name: float(((output.double() - base) * change).sum() / change.square().sum())
        for name, output in outputs.items()
        if output is not None
    }
    describe(kind, measure({name: make_step(WAYS[name]) for name in shares}, rounds), shares)


@torch.no_grad()
def compare_experts(tokens: int, rounds: int) -> None:
    inputs, outputs = 576, 1536
    x = torch.randn(tokens, inputs).bfloat16()
    weight = (torch.randn(EXPERTS, outputs, inputs) * inputs**-0.5).bfloat16()
    added = (torch.randn(tokens, outputs) * SMALL * SCALE * math.sqrt(R)).bfloat16()
    edges = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (tokens // EXPERTS)
    by_expert = zip(torch.split(x, tokens // EXPERTS), weight, strict=True)
    base: Tensor = torch.cat([rows.double() @ own.double().t() for rows, own in by_expert])

    def add_after() -> Tensor:
        return multiply_one_by_one(x, weight, None, edges, None, transposed=True) + added

    def add_into() -> Tensor:
        return multiply_one_by_one(x, weight, None, edges, None, added.clone(), transposed=True)

    steps = {"two roundings (PEFT)": add_after, "added inside the product": add_into}
    change = added.double()
    shares = {
        name: float(((step().double() - base) * change).sum() / change.square().sum()) for name, step in steps.items()
    }
    describe(f"experts, {inputs} to {outputs}", measure(dict(steps), rounds), shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    print(f"{options.tokens} tokens, {options.rounds} rounds, one thread; torch {torch.__version__}")
    for kind in KINDS:
        compare_linear(kind, options.tokens, options.rounds)
    compare_experts(options.tokens, options.rounds)


if __name__ == "__main__":
    main()
