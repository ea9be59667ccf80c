"""Mistral Small 4 without its files, built and filled on the GPU, and a training step of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from windlass import hardware
from windlass.compat import enable_checkpointing
from windlass.model import Base, Parameter, config, find_published_base
from windlass.model import targets as adapters
from windlass.model.parameters import Piece, Stored
from windlass.model.quantization import quantizable_names
from windlass.plan.cost import BatchSize, Cost, Workload, estimate_cost, read_shape
from windlass.plan.layout import Layout
from windlass.plan.workload import ModelShape
from windlass.runfile import Lora
from windlass.train import fsdp, parallel
from windlass.train.head import Head
from windlass.train.lora import attach_adapter
from windlass.train.patches import PARTS, Patches
from windlass.weights import quantized

GIB = 2**30
MODEL = "Mistral-Small-4-119B-2603"
SPREAD, CODE_SPREAD = 0.02, 32.0  # of weights; of codes: seven spreads stay within e4m3's 448
TINY = {  # of the text model's config, for --tiny
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
IGNORED = -100  # the label that losses pass over
DENSE = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GPU = torch.cuda.is_available()
Row = dict[str, Any]
Step = Callable[[], Any]


class Sizes:
    """The sizes of everything."""

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        self.layers, self.some = (3, 2) if tiny else (36, 4)
        self.length = 64 if tiny else 4096  # of one sequence
        self.sweep = (64, 128) if tiny else (4096, 8192, 16384, 32768)  # tokens per micro-batch
        self.masked = (32, 64) if tiny else (1024, 4096)  # rows of documents
        self.document = 12 if tiny else 110  # tokens, as WikiText's
        self.whole = 128 if tiny else 16384
        self.rows = (1, 2) if tiny else (1, 2, 4, 6, 8)  # of a micro-batch of the whole model
        self.r, self.expert_r = (4, 2) if tiny else (16, 4)
        self.per_expert = (2, 16) if tiny else (8, 32, 128, 512, 2048)
        self.square = 256 if tiny else 8192  # side of the products that the card's rate is taken from
        self.copied = 2**20 if tiny else 2**32  # bytes
        self.top = 15  # operations in the profile


def sync() -> None:
    if GPU:
        torch.cuda.synchronize()


def free() -> None:
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def begin_peak() -> None:
    """Restart the peak like `free`, but let torch keep its memory: the next step would have to allocate it again."""
    gc.collect()
    if GPU:
        torch.cuda.reset_peak_memory_stats()


def seconds_of(step: Step) -> float:
    sync()
    began = time.perf_counter()
    step()
    sync()
    return time.perf_counter() - began


# --- a model without files ---


def headers(sizes: Sizes, layers: int) -> Base:
    """Return the headers of the published checkpoint, cut to `layers` layers: enough to build and plan it."""
    known = find_published_base(MODEL)
    assert known is not None
    text = {**known.config, **(TINY if sizes.tiny else {}), "num_hidden_layers": layers}
    wrapped = {"model_type": "mistral3", "text_config": text}
    bare = config.describe({**wrapped, "quantization_config": known.quantization}, MODEL, known.name)
    eight = quantizable_names(bare)
    return replace(bare, parameters=tuple(_stored(each, each.name in eight) for each in bare.parameters))


def _stored(parameter: Parameter, eight: bool) -> Parameter:
    """Return the publisher's dtypes: FP8 with a scale per matrix, or BF16. There is no file, and none is opened."""
    nowhere, scales = Path("random"), (*parameter.shape[:-2], 1, 1) if len(parameter.shape) == 3 else ()
    stored = Stored(parameter.name, "F8_E4M3" if eight else "BF16", parameter.shape, nowhere, 0, 0)
    scale = Stored(f"{parameter.name}_scale_inv", "BF16", scales, nowhere, 0, 0) if eight else None
    return replace(parameter, pieces=(Piece(stored, (0,) * len(parameter.shape), scale),))


def layout_of(base: str) -> Layout:
    return Layout("resident", "given", 1, 1, shard=1, activation_checkpointing=True, base_dtype=base)


def lora_of(sizes: Sizes, routed: bool) -> Lora:
    extra = {"r": sizes.r, "lora_alpha": 2 * sizes.r, "lora_dropout": 0.0, "target_modules": DENSE}
    return Lora.model_validate({**extra, **({"experts": {"r": sizes.expert_r}} if routed else {})})


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Fill with random weights in place, a stack one expert at a time, so that no second stack is needed."""
    quantized_params = quantized.list_quantized_params(model)
    for name, tensor in model.named_parameters():
        if name in quantized_params:
            coding = quantized_params[name].format
            codes, scale = coding.parts(tensor, quantized_params[name].scale)
            if coding.kind:
                codes.random_()
                scale.fill_(2 * SPREAD)
                continue
            codes = codes.view(coding.codes)
            for part in codes if codes.ndim == 3 else [codes]:
                part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=part.device).mul_(CODE_SPREAD))
            scale.fill_(SPREAD / CODE_SPREAD)
        elif tensor.ndim == 1:
            tensor.fill_(1.0)  # norms
        else:
            for part in tensor if tensor.ndim == 3 else [tensor]:
                part.normal_(std=SPREAD)


def card() -> hardware.Gpu:
    """Return the hardware table's row. torch knows the GPU's name where NVML's bindings are not installed."""
    name = hardware.read_gpu_name()
    return hardware.find_gpu(torch.cuda.get_device_name().removeprefix("NVIDIA ") if GPU and name == "cpu" else name)


def make_machine() -> hardware.Machine:
    gpu = card()
    fabrics = (hardware.find_fabric(gpu.link), hardware.find_fabric(gpu.link), hardware.find_fabric(gpu.host_link))
    return hardware.Machine(gpu, *fabrics, 1, None)


def plan_gib(planned: Cost) -> float:
    """Return the planned GiB without what exists only on a device: torch's count of allocations excludes it."""
    rows = [r for r in planned.rows if (r.phase, r.place) == ("step", "gpu")]
    return float(sum(r.bytes for r in rows if r.item not in ("reserve", "fragmentation"))) / GIB


def replan(rows: list[Row]) -> list[Row]:
    """Return rows of layers and whole models with the seconds and GiB that the plan has for them now."""
    global card
    name = rows[0]["gpu"].partition(",")[0].removeprefix("NVIDIA ")
    card = partial(hardware.find_gpu, name)
    sizes = Sizes(tiny=False)

    @cache
    def shape(layers: int, routed: bool) -> ModelShape:
        found = headers(sizes, layers)
        return read_shape(found, adapters.resolve_adapter(lora_of(sizes, routed), found, str))

    planned = []
    for row in rows:
        part = row["part"]
        if part in ("layers", "whole", "whole-experts", "whole-nf4") and "tokens" in row:
            words = row["rows"].split(", ")
            count, length = map(int, words[0].split(" x "))
            document = sizes.document if "by document" in words else None
            model = shape(sizes.some if part == "layers" else sizes.layers, part == "whole-experts")
            batch, masked = BatchSize(count, 1, length), "masked" in words
            layout = layout_of(row["base"])
            work = Workload(model, layout, batch, make_machine(), "adamw_torch", 2, masked=masked, document=document)
            cost = estimate_cost(work, advise=False)
            row = {**row, "plan_seconds": cost.step_seconds, "plan_gib": plan_gib(cost)}
            if "peak_gib" in row:
                row["peak_to_plan"] = row["peak_gib"] / row["plan_gib"]
        planned.append(row)
    return planned


@dataclass
class Built:
    model: PeftModel
    work: Workload  # with the batch of the first cell
    words: str


def build(sizes: Sizes, layers: int, base: str, routed: bool) -> Built:
    """Build the model with its adapter, ready to train, on the GPU if there is one."""
    found, layout, lora = headers(sizes, layers), layout_of(base), lora_of(sizes, routed)
    adapter = adapters.resolve_adapter(lora, found, str)
    model = parallel.build_model(found, layout, torch.bfloat16)
    parallel.allocate(model, layout)
    torch.manual_seed(0)
    fill(model)
    model.requires_grad_(False)
    peft = attach_adapter(model, lora, adapter, 0)
    causal_lm = peft.get_base_model()
    Patches().patch_forward(causal_lm)
    enable_checkpointing(causal_lm, {"use_reentrant": False})
    peft.train()
    batch = BatchSize(1, 1, sizes.length)
    work = Workload(read_shape(found, adapter), layout, batch, make_machine(), "adamw_torch", 2)
    words = f"r={sizes.r} attention, shared" + (f"; r={sizes.expert_r} routed" if routed else "")
    return Built(peft, work, f"{words}: {adapter.trainable / 1e6:.1f} M")


# --- a step ---


@dataclass(frozen=True)
class Cell:
    """The size of a micro-batch, and what its attention covers."""

    tokens: int
    length: int  # of a row
    masked: bool = False  # rows are documents, which a mask keeps apart
    by_document: bool = False  # the same, attended to by document
    cudnn: bool = False  # the attention that torch would choose first on a Hopper

    @property
    def words(self) -> str:
        return (
            f"{self.tokens // self.length} x {self.length}"
            + ", masked" * self.masked
            + ", by document" * self.by_document
            + ", cuDNN" * self.cudnn
        )


class Trainee:
    """Trains one micro-batch per optimizer step and times forward, backward and update."""

    def __init__(self, built: Built, parts: Collection[str] = PARTS, *, always: bool = False) -> None:
        """`parts`: what is fused, on a GPU or if `always`."""
        self.model: Any = built.model.get_base_model()
        self.head = Head(self.model)
        self.patches = Patches()
        self.adapters = self.patches.fuse_layers(self.model, torch.bfloat16, parts=parts, always=always)
        self.trained = [p for p in built.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        self.device = fsdp.get_device()
        self.vocabulary = built.work.shape.vocab

    def batch(self, cell: Cell, document: int) -> dict[str, Any]:
        """Return a batch like training's. Documents separated by a mask begin at position 0, and none predicts the
        next."""
        dice = torch.Generator().manual_seed(cell.tokens)
        shape = cell.tokens // cell.length, cell.length
        rows = torch.randint(self.vocabulary, shape, generator=dice).to(self.device)
        following = nn.functional.pad(rows[:, 1:], (0, 1), value=IGNORED)
        inputs: dict[str, Any] = {"input_ids": rows}
        if cell.masked or cell.by_document:
            inputs["position_ids"] = (torch.arange(cell.length, device=self.device) % document).expand(shape)
            following[:, :-1][inputs["position_ids"][:, 1:] == 0] = IGNORED
        if cell.by_document:
            edges = (inputs["position_ids"].flatten() == 0).nonzero().flatten()
            inputs["document_edges"] = nn.functional.pad(edges, (0, 1), value=cell.tokens).to(torch.int32)
            inputs |= {"longest_document": document, "several": True}
        supervised = (following != IGNORED).flatten().nonzero().squeeze(1)
        return {**inputs, "supervised": supervised, "targets": following.flatten()[supervised]}

    def step(self, batch: dict[str, Any]) -> dict[str, float]:
        marks = []

        def mark() -> None:
            sync()
            marks.append(time.perf_counter())

        mark()
        with self.adapters.unchanged():
            with torch.autocast(self.device.type, torch.bfloat16):
                targets = batch["targets"]
                inputs = {name: value for name, value in batch.items() if name != "targets"}
                total, _ = self.head.loss(self.model(**inputs).last_hidden_state, targets)
                loss = total / len(targets)
            mark()
            loss.backward()  # type: ignore[no-untyped-call]
        mark()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark()
        thirds = {name: marks[i + 1] - marks[i] for i, name in enumerate(("forward", "backward", "update"))}
        return {**thirds, "seconds": marks[-1] - marks[0], "loss": float(loss.detach())}
