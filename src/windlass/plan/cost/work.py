"""What the arithmetic is given, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windlass.hardware import Machine
from windlass.model import Base
from windlass.model.targets import Adapter, expert_path
from windlass.plan.layout import Layout


@dataclass(frozen=True, slots=True)
class Batch:
    micro: int  # sequences per GPU and micro-batch
    accumulation: int
    length: int  # tokens per sequence

    @property
    def tokens(self) -> int:
        """Tokens per GPU and micro-batch."""
        return self.micro * self.length


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that the arithmetic needs."""

    base: Base
    adapter: Adapter
    layout: Layout
    batch: Batch
    machine: Machine
    optim: str  # transformers' name: adamw_torch
    base_bytes: int  # bytes per base parameter once loaded: 2 for bfloat16
    dropout: float = 0.0  # lora.lora_dropout
    expert_path: str = "split"  # how expert adapters are computed: beside the experts (split) or merged first (merged)
    masked: bool = False  # packed rows whose documents a mask keeps apart
    document: int | None = None  # usual tokens of what packed rows are made of, where attention is within each
    full_logits: bool = False  # a loss that needs every logit at once, as label smoothing does
    evaluated: int = 0  # sequences per GPU in one pass of an evaluation; 0: there is none

    def under(self, layout: Layout) -> Work:
        """The same run under another layout, which also decides how adapters of experts can be computed."""
        mergeable = not self.dropout and layout.expert_parallel == 1 and layout.base_dtype != "fp8"
        adapted = set(self.adapter.target_parameters)
        shapes = [parameter.shape for parameter in self.base.parameters if parameter.name in adapted]
        path = expert_path(shapes, self.base.dims.get("top_k", 0), self.batch.tokens, mergeable=mergeable)
        return replace(self, layout=layout, expert_path=path)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the memory table."""

    phase: str  # load, step, save
    place: str  # gpu, host
    item: str
    bytes: float
    formula: str


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes that one GPU sends (and as many it receives) once per micro-batch or once per optimizer step."""

    kind: str  # all-gather forward, all-gather backward, expert dispatch, adapter all-reduce, host transfer
    fabric: str
    bytes: float
    per_step: int  # how many times in one optimizer step
    seconds: float  # for one time
    formula: str


@dataclass(frozen=True, slots=True)
class Cost:
    rows: tuple[Row, ...]
    flows: tuple[Flow, ...]
    gpu_gib: float  # peak over the phases
    host_gib: float  # per node, peak over the phases
    fits: bool
    remedy: str  # what would make it fit; empty when it fits
    flops_per_token: float  # model FLOPs: forward + backward, recomputation apart
    recompute_flops_per_token: float
    compute_seconds: float  # per micro-batch
    step_seconds: float
    step_seconds_serial: float  # when nothing overlaps
    tokens_per_second: float  # of the whole job
    mfu: float
    wire_gb_per_step: float  # per GPU
    wire_seconds: float = 0.0  # per micro-batch
    host_seconds: float = 0.0  # per micro-batch: between host and GPU memory
    bound: str = ""  # what the step waits for: compute, memory, wire or host
    peak: str = ""  # the moment of the step when the GPU holds most
