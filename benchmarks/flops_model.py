"""Predicted against counted FLOPs: windlass.plan.cost and torch's FlopCounterMode, with PEFT adapters.

    python benchmarks/flops_model.py [--json]

The models run on fake tensors. torch counts attention over the full square, and the plan counts the half that causal
kernels compute: the table doubles the plan's attention to compare like with like. Packed rows are separated by a mask:
for them the plan counts the full square too.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
import transformers
from memory_model import Case, adapt, build, checkpoint, documents, work
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from windlass.plan.cost import estimate_cost
from windlass.plan.step_time import causal_attention_flops
from windlass.plan.workload import read_shape

CASES = [
    Case("llama", length=512),
    Case("llama", length=512, checkpointing=True),
    Case("llama", length=2048, targets="attention"),
    Case("mistral4", length=512),
    Case("mistral4", length=512, checkpointing=True),
    Case("mixtral", length=512),
    Case("llama", length=512, packed=True),
    Case("mistral4", length=512, packed=True, checkpointing=True),
]


def grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Count rows x inner x columns, twice; between two matrices (a weight's gradient) the rows are the inner
    dimension."""
    return int(2 * a[0] * a[1] * b[-1])


def count(case: Case) -> tuple[int, float, float]:
    """Return the FLOPs that torch counts in forward and backward, the plan's, and its recomputation's."""
    model = build(case)
    model.set_attn_implementation("eager")
    found = checkpoint(model)
    peft, adapter = adapt(case, model)
    planned = replace(work(case, found, adapter), full_logits=True)
    predicted = estimate_cost(planned)
    square = 0.0 if case.packed else causal_attention_flops(read_shape(found, adapter), case.length)
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped})
    with FakeTensorMode(allow_non_fake_inputs=True):
        peft.to_empty(device="cpu")
        peft.train()
        if case.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        embedded = torch.zeros(case.micro, case.length, model.config.hidden_size, dtype=torch.bfloat16)
        extra = {"position_ids": documents(case, case.micro)} if case.packed else {}
        with counter, torch.autocast("cpu", torch.bfloat16):
            peft(inputs_embeds=embedded.requires_grad_(), use_cache=False, **extra).logits.sum().backward()
    passes = 4 if case.checkpointing else 3
    expected = predicted.flops_per_token + predicted.recompute_flops_per_token + passes * square
    return counter.get_total_flops(), expected * case.micro * case.length, predicted.recompute_flops_per_token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    worst = 0.0
    for case in CASES:
        counted, expected, _ = count(case)
        worst = max(worst, abs(expected / counted - 1))
        row = {"case": str(case), "predicted": expected, "counted": counted, "ratio": expected / counted}
        line = f"{expected / 1e9:10.2f} {counted / 1e9:10.2f} GFLOP  {expected / counted:.4f}  {case}"
        print(json.dumps(row) if options.json else line, flush=True)
    sys.exit(worst > 0.02)


if __name__ == "__main__":
    main()
