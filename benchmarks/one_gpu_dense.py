"""A part of benchmarks/one_gpu.py: a dense model's step, by windlass and by transformers + PEFT, on the same tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import transformers
from one_gpu_model import GIB, GPU, Row, Sizes, begin_peak, card, free, make_machine, plan_gib, sync
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.models.llama import modeling_llama

from windlass.compat import enable_checkpointing
from windlass.model import config
from windlass.model import targets as adapters
from windlass.plan.cost import BatchSize, Cost, Workload, estimate_cost, read_shape
from windlass.plan.layout import Layout
from windlass.runfile import Lora
from windlass.train import fsdp
from windlass.train.head import Head
from windlass.train.patches import Patches

OURS, PEFTS, LIGERS = "windlass", "transformers + PEFT", "transformers + PEFT + Liger"
WAYS = (OURS, PEFTS, LIGERS) if GPU and find_spec("liger_kernel") else (OURS, PEFTS)
R = 16
KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
MODELS = {  # as published, and the head's vocabulary
    "Llama 3.1 8 B": (32, 4096, 14336, 32, 8, 128256),
    "Llama 3.2 1 B": (16, 2048, 8192, 32, 8, 128256),
}
TOY = {"a toy": (2, 64, 128, 4, 2, 512)}
CELLS = ((1, 2048), (2, 4096))  # rows, tokens of each
WARM, TIMED = 2, 5  # steps


def dense(sizes: Sizes, until: float) -> Iterator[Row]:
    """Yield a row for each model, micro-batch and way: r 16 on all linear layers, bfloat16, recomputed layers."""
    for name, numbers in (TOY if sizes.tiny else MODELS).items():
        described = dict(zip((*KEYS, "vocab_size"), numbers, strict=True))
        for rows, length in ((2, 64),) if sizes.tiny else CELLS:
            for way in WAYS:
                if time.time() > until - 8:
                    yield {"skipped": f"{name}, {rows} x {length}, {way}: no time left"}
                    continue
                row = {"dense": name, "rows": f"{rows} x {length}", "way": way}
                try:
                    yield row | measure(way, described, rows, length)
                except torch.OutOfMemoryError:
                    yield row | {"skipped": f"{name}, {rows} x {length}, {way}: does not fit"}
                free()


def measure(way: str, described: dict[str, int], rows: int, length: int) -> Row:
    model = make_model(described)
    base = model.get_base_model()
    enable_checkpointing(base, {"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    device = fsdp.get_device()
    dice = torch.Generator().manual_seed(rows)
    ids = torch.randint(described["vocab_size"], (rows, length), generator=dice).to(device)
    unchanged: Any = nullcontext
    forward: Any = partial(model, input_ids=ids, labels=ids)
    tokens = 1
    head = Head(base)
    with Patches() as patches, mock.patch.dict(vars(modeling_llama)):  # where Liger's rotary positions go
        if way == LIGERS:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(model=base)
        if way == OURS:
            patches.patch_forward(base)
            unchanged = patches.fuse_layers(base, torch.bfloat16).unchanged
            places = torch.arange(rows * length, device=device)
            supervised = places[places % length != length - 1]
            tokens = len(supervised)
            targets = ids.flatten()[supervised + 1]
            forward = partial(base, input_ids=ids, supervised=supervised)

        def step() -> tuple[float, float]:
            sync()
            began = time.perf_counter()
            with unchanged():
                with torch.autocast(device.type, torch.bfloat16):
                    answer = forward()
                    total = head.loss(answer.last_hidden_state, targets)[0] if way == OURS else answer.loss
                    loss = total / tokens
                loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            value = float(loss.detach())
            sync()
            return time.perf_counter() - began, value

        losses = [step()[1] for _ in range(WARM)]
        begin_peak()
        timed = [step() for _ in range(TIMED)]
    seconds = statistics.median(taken for taken, _ in timed)
    row: Row = {"seconds": seconds, "tokens_per_second": rows * length / seconds, "losses": losses}
    row["losses"] += [loss for _, loss in timed]
    row["loss"] = row["losses"][-1]
    row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB if GPU else None
    planned = plan(described, rows, length)
    row["mfu"] = planned.flops_per_token * rows * length / seconds / (card().bf16_tflops * 1e12) if GPU else None
    return row | figures(planned) if way == OURS else row


def figures(planned: Cost) -> Row:
    return {
        "plan_seconds": planned.step_seconds,
        "plan_low": planned.step_seconds_low,
        "plan_high": planned.step_seconds_high,
        "plan_gib": plan_gib(planned),
    }


def replan(rows: list[Row]) -> list[Row]:
    """Return rows of dense models with what the plan says now; the card is that of `one_gpu_model.replan`."""

    def now(row: Row) -> Row:
        numbers = MODELS.get(row.get("dense", ""))
        if numbers is None or row["way"] != OURS or "seconds" not in row:
            return row
        described = dict(zip((*KEYS, "vocab_size"), numbers, strict=True))
        return row | figures(plan(described, *map(int, row["rows"].split(" x "))))

    return [now(row) for row in rows]


def make_model(described: dict[str, int]) -> PeftModel:
    """Return the model with random weights, made on the device, and its adapter."""
    device = fsdp.get_device()
    text = transformers.LlamaConfig(
        **described, use_cache=False, max_position_embeddings=8192, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(text)
    torch.set_default_dtype(before)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(text).to(device)  # its buffers are computed, not filled
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(std=0.02)
    model.requires_grad_(False)
    torch.manual_seed(1)
    lora = LoraConfig(r=R, lora_alpha=2 * R, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    peft_model = get_peft_model(model, lora)
    assert isinstance(peft_model, PeftModel)
    return peft_model.train()


def plan(described: dict[str, int], rows: int, length: int) -> Cost:
    base = config.describe({"model_type": "llama", **described}, "random weights")
    lora = Lora.model_validate({"r": R, "lora_alpha": 2 * R, "lora_dropout": 0.0, "target_modules": "all-linear"})
    layout = Layout("resident", "given", 1, 1, shard=1, activation_checkpointing=True)
    shape = read_shape(base, adapters.resolve_adapter(lora, base, str))
    work = Workload(shape, layout, BatchSize(rows, 1, length), make_machine(), "adamw_torch", 2)
    return estimate_cost(work, advise=False)
