"""Predicted against measured peaks: windlass.plan.cost and torch's own FSDP2 memory tracker on fake tensors.

    python benchmarks/memory_model.py            the whole table
    python benchmarks/memory_model.py --quick    the rows that the tests check
    python benchmarks/memory_model.py --flops    operations instead, against torch's FlopCounterMode
    python benchmarks/memory_model.py --json     one JSON object per line

Nothing is allocated: the model, its PEFT adapter, FSDP2's gathers, autograd and AdamW run on fake tensors in a fake
process group, at full width if requested; loss, experts and fused layers are training's own, as on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPModMemStats, _FSDPRefType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from windlass.hardware import Machine, find_fabric, find_gpu
from windlass.model import Base
from windlass.model.config import describe
from windlass.model.targets import Adapter
from windlass.plan.cost import BatchSize, Workload, estimate_cost, read_shape
from windlass.plan.layout import Layout
from windlass.plan.step_time import causal_attention_flops
from windlass.runfile.objectives import Dpo
from windlass.train.collate import Pairs
from windlass.train.experts import experts
from windlass.train.head import Head
from windlass.train.kernels import family_layers, lora_linear, on_cpu
from windlass.train.patches import Patches
from windlass.train.preference import dpo_loss, measure_answers

GIB, MIB = 2**30, 2**20
RANK = 16
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}
MISTRAL4 = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "vocab_size": 8192,
}
MIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 1792,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 8192,
}
QWEN3_MOE = {
    "hidden_size": 1024,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 8192,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "mistral4": ("Mistral4", MISTRAL4),
    "mixtral": ("Mixtral", MIXTRAL),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE),
}


@dataclass(frozen=True)
class Case:
    family: str
    ranks: int = 3
    micro: int = 1
    length: int = 1024
    checkpointing: bool = False
    reshard: bool = True
    targets: str = "all"  # all, attention
    packed: bool = False  # rows of several documents, which a mask keeps apart
    adapter_bytes: int = 4
    pairs: bool = False  # rows are pairs, with DPO's loss
    evaluated: int = 0  # rows of an evaluation's pass, which is then what is measured
    sizes: dict[str, Any] = field(default_factory=dict)
    quick: bool = False

    def __str__(self) -> str:
        words = [f"{self.family:9} {self.ranks} ranks {self.micro}x{self.length}"]
        words += ["no reshard"] * (not self.reshard) + ["checkpointing"] * self.checkpointing
        words += ["attention only"] * (self.targets == "attention")
        words += ["pairs"] * self.pairs
        words += ["packed"] * self.packed + [f"evaluation of {self.evaluated}"] * bool(self.evaluated)
        words += ["bf16 adapter"] * (self.adapter_bytes == 2) + [f"{k}={v}" for k, v in self.sizes.items()]
        return ", ".join(words)


FULL_WIDTH = {
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_routed_experts": 128,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "vocab_size": 131072,
}
CASES = [
    Case("llama"),
    Case("llama", ranks=8, reshard=False, micro=2, length=512, quick=True),
    Case("llama", ranks=2, targets="attention", micro=4),
    Case("llama", ranks=2, adapter_bytes=2, micro=4),
    Case("llama", ranks=2, micro=2, length=2048, sizes={"hidden_size": 2048, "intermediate_size": 5632}),
    Case("llama", ranks=8, checkpointing=True, micro=8, sizes={"vocab_size": 128256}, quick=True),
    Case("llama", ranks=3, checkpointing=True, reshard=False, micro=8),
    Case("mistral4", quick=True),
    Case("mistral4", ranks=8, micro=4, reshard=False),
    Case("mistral4", ranks=2, checkpointing=True, targets="attention", micro=2, quick=True),
    Case("mistral4", ranks=8, checkpointing=True, micro=16),
    Case("mistral4", checkpointing=True, sizes=FULL_WIDTH),
    Case("mistral4", micro=4, sizes=FULL_WIDTH),
    Case("mixtral", ranks=2, micro=4),
    Case("mixtral", ranks=3, micro=2, reshard=False),
    Case("llama", ranks=2, micro=4, packed=True, quick=True),
    Case("mistral4", ranks=2, micro=4, length=2048, packed=True),
    Case("mixtral", ranks=2, micro=4, packed=True),
    Case("qwen3_moe", ranks=2, micro=4),
    Case("qwen3_moe", ranks=8, micro=4, checkpointing=True),
    Case("llama", ranks=2, micro=2, pairs=True, quick=True),
    Case("mistral4", ranks=2, micro=2, pairs=True),
    Case("mixtral", ranks=3, micro=2, pairs=True, checkpointing=True),
    Case("llama", ranks=2, evaluated=16, pairs=True, sizes={"vocab_size": 128256}, quick=True),
    Case("llama", ranks=2, evaluated=32),
    Case("llama", ranks=2, evaluated=16, reshard=False, sizes={"vocab_size": 128256}),
    Case("mistral4", ranks=3, evaluated=16, sizes=FULL_WIDTH),
    Case("qwen3_moe", ranks=2, evaluated=32, packed=True),
]


def describe_model(model: Any) -> Base:
    """Return what the headers of this model's files would say."""
    return describe(model.config.to_dict(), model.config.model_type)


def build(case: Case) -> Any:
    """Build the causal language model on the meta device."""
    prefix, sizes = FAMILIES[case.family]
    config = getattr(transformers, f"{prefix}Config")(**{**sizes, **case.sizes})
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.bfloat16)
    if case.family != "llama":
        model.set_experts_implementation("grouped_mm")
    return model


def adapt(case: Case, model: Any) -> tuple[Any, Adapter]:
    wanted = ATTENTION if case.targets == "attention" else ATTENTION | MLP
    modules = tuple(
        name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name.split(".")[-1] in wanted
    )
    config = LoraConfig(r=RANK, target_modules=list(modules))
    with next(model.parameters()).device:
        peft = get_peft_model(model, config, autocast_adapter_dtype=False)
    dtype = torch.float32 if case.adapter_bytes == 4 else torch.bfloat16
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    trainable = sum(p.numel() for p in peft.parameters() if p.requires_grad)
    return peft, Adapter(RANK, RANK, (), modules, (), trainable, case.adapter_bytes)


def fake_norm(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


torch.library.register_fake("windlass::rms_norm", fake_norm, lib=family_layers._LIBRARY)
torch.library.register_fake(
    "windlass::rms_norm_backward", lambda _gradient, x, *_: torch.empty_like(x), lib=family_layers._LIBRARY
)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Run softmax in float32, as CUDA's autocast does, products of experts together, and fuse what is fused there:
    fake numbers can't be compared before."""
    softmax = torch.Tensor.softmax
    functional: Callable[..., Any] = torch.nn.functional.softmax

    def wide(self: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
        return softmax(self, dim, dtype=torch.float32 if torch.is_autocast_enabled("cpu") else dtype)

    def wide_functional(x: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        return functional(x, dim=dim, dtype=torch.float32 if torch.is_autocast_enabled("cpu") else dtype)

    torch.Tensor.softmax, torch.nn.functional.softmax = wide, wide_functional  # type: ignore[method-assign,assignment]
    answers = {
        (on_cpu, "rounds_rows"): False, (on_cpu, "is_on_cpu"): False, (lora_linear, "are_equal"): True,
        (family_layers, "are_equal"): True, (family_layers, "check_keys"): True,
    }  # fmt: skip
    try:
        with ExitStack() as stack:
            for (module, name), answer in answers.items():
                stack.enter_context(mock.patch.object(module, name, lambda *_, answer=answer: answer))
            stack.enter_context(mock.patch.object(family_layers, "copy_module", lambda module, *_: module))
            stack.enter_context(mock.patch.object(family_layers, "check_rotation", lambda theirs, *_: bool(theirs)))
            yield
    finally:
        torch.Tensor.softmax, torch.nn.functional.softmax = softmax, functional  # type: ignore[method-assign]


def shard(case: Case, model: Any, trained: set[torch.nn.Parameter], mesh: Any) -> None:
    """Shard as transformers' plan does: embedding and layers one by one, final norm and head together and kept
    gathered."""
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": trained}
    for module in (model.model.embed_tokens, *model.model.layers):
        fully_shard(module, reshard_after_forward=case.reshard, **options)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, **options)


def measure(case: Case, model: Any, peft: Any) -> float:
    """Return the peak bytes on rank 0 in the second micro-batch of the second optimizer step."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    try:
        mesh = init_device_mesh("cpu", (case.ranks,))
        with FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda():
            return _peak(case, model, peft, mesh)
    finally:
        dist.destroy_process_group()
        gc.collect()


def _peak(case: Case, model: Any, peft: Any, mesh: Any) -> float:
    peft.to_empty(device="cpu")
    trained = {p for p in peft.parameters() if p.requires_grad}
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    peft.train()
    if case.family != "llama":
        model.config._experts_implementation = experts.NAME
    adapters = Patches().fuse_layers(peft, torch.bfloat16, always=True)
    shard(case, model, trained, mesh)
    optimizer = torch.optim.AdamW(list(trained), lr=1e-3, foreach=True)
    sides = 2 if case.pairs else 1
    ids = torch.zeros(case.micro * sides, case.length, dtype=torch.long)
    more = torch.zeros(case.evaluated * sides, case.length, dtype=torch.long)
    extra: dict[str, Any] = {"position_ids": documents(case, case.micro)} if case.packed else {}
    if case.pairs:
        extra["pairs"] = True
    adapters.valid = True
    _pass(peft, ids, **extra)
    optimizer.step()
    optimizer.zero_grad()
    _pass(peft, ids, **extra)  # the first of two micro-batches leaves gradients
    if case.evaluated:
        optimizer.zero_grad()
        peft.eval()
    gc.collect()
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((more if case.evaluated else ids,))
    plain = [tensor for parameter in trained for tensor in (parameter, parameter.grad) if tensor is not None]
    for tensor in (*plain, *adapters.copies):  # next to the sharded base, which the tracker does not look for
        tracker._update_and_maybe_create_winfos(tensor, _FSDPRefType.SHARDED_PARAM)
    # The head's module is never called, the fused loss reads its weight: its group hooks in by the final norm.
    tracker.memory_tracking[model.lm_head] = _FSDPModMemStats("lm_head")
    with tracker:
        if case.evaluated:
            with torch.no_grad():
                if case.packed:
                    extra["position_ids"] = documents(case, case.evaluated)
                _forward(peft, more, **extra)
        else:
            _pass(peft, ids, **extra)
            optimizer.step()
    return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _pass(peft: Any, ids: torch.Tensor, **extra: Any) -> None:
    _forward(peft, ids, **extra).backward()


def _forward(peft: Any, ids: torch.Tensor, *, pairs: bool = False, **extra: Any) -> Any:
    """Return the summed loss of all tokens but each row's first, or DPO's of each two rows as a pair."""
    rows, length = ids.shape
    supervised = (torch.arange(rows)[:, None] * length + torch.arange(length - 1)).flatten()
    with torch.autocast("cpu", torch.bfloat16):
        causal_lm = peft.get_base_model()
        hidden = causal_lm(ids, supervised, **extra).last_hidden_state
        head = Head(causal_lm)
        if not pairs:
            return head.loss(hidden, ids[:, 1:].flatten())[0]
        log_probs = head.log_probs(hidden, ids[:, 1:].flatten())
    lengths = torch.full((rows,), length - 1)
    of_rows = Pairs(supervised // length, lengths, torch.zeros(rows), None)
    return dpo_loss(Dpo(), measure_answers(log_probs, of_rows)).losses.sum()


def documents(case: Case, rows: int) -> torch.Tensor:
    """Return the positions of rows of documents, each an eighth of its row."""
    return (torch.arange(case.length) % (case.length // 8)).expand(rows, -1)


def work(case: Case, found: Base, adapter: Adapter) -> Workload:
    h200 = find_gpu("h200")
    layout = Layout(
        "full-shard" if case.reshard else "no-reshard",
        "given",
        1,
        case.ranks,
        case.ranks,
        reshard_after_forward=case.reshard,
        activation_checkpointing=case.checkpointing,
    )
    machine = Machine(h200, find_fabric("nvlink4"), find_fabric("infiniband-400"), find_fabric("pcie5"), 1, None)
    batch = BatchSize(case.micro, 2, case.length, 2 if case.pairs else 1)
    return Workload(
        read_shape(found, adapter),
        layout,
        batch,
        machine,
        "adamw_torch",
        2,
        masked=case.packed,
        evaluated=case.evaluated,
    )


ASSUMED = {"reserve", "fragmentation"}  # memory that torch does not allocate


def run(case: Case) -> dict[str, Any]:
    started = time.perf_counter()
    model = build(case)
    found = describe_model(model)
    peft, adapter = adapt(case, model)
    Patches().patch_forward(model)
    predicted = estimate_cost(work(case, found, adapter))
    rows = {r.item: r.bytes for r in predicted.rows if (r.phase, r.place) == ("step", "gpu") and r.item not in ASSUMED}
    total, measured = sum(rows.values()), measure(case, model, peft)
    return {
        "case": str(case),
        "settings": {k: v for k, v in asdict(case).items() if k != "quick"},
        "predicted_mib": total / MIB,
        "measured_mib": measured / MIB,
        "ratio": total / measured,
        "peak": predicted.peak,
        "rows_mib": {item: size / MIB for item, size in rows.items()},
        "seconds": time.perf_counter() - started,
    }


OPERATIONS = [
    Case("llama", length=512, checkpointing=True),
    Case("llama", length=2048, targets="attention"),
    Case("mistral4", length=512),
    Case("mixtral", length=512),
    Case("mistral4", length=512, packed=True, checkpointing=True),
]


def count_grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Count rows x inner x columns, twice; between two matrices (a weight's gradient) the rows are the inner
    dimension."""
    return int(2 * a[0] * a[1] * b[-1])


def count(case: Case) -> dict[str, Any]:
    """Compare forward and backward. torch counts attention over the full square, and the plan the half that causal
    kernels compute, except under a mask; and the plan's head projects once more."""
    model = build(case)
    model.set_attn_implementation("eager")
    found = describe_model(model)
    peft, adapter = adapt(case, model)
    shape = read_shape(found, adapter)
    predicted = estimate_cost(work(case, found, adapter))
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: count_grouped})
    with FakeTensorMode(allow_non_fake_inputs=True):
        peft.to_empty(device="cpu")
        peft.train()
        if case.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        embedded = torch.zeros(case.micro, case.length, model.config.hidden_size, dtype=torch.bfloat16)
        extra = {"position_ids": documents(case, case.micro)} if case.packed else {}
        with counter, torch.autocast("cpu", torch.bfloat16):
            peft(inputs_embeds=embedded.requires_grad_(), use_cache=False, **extra).logits.sum().backward()
    expected = predicted.flops_per_token + predicted.recompute_flops_per_token - 2.0 * shape.head
    if not case.packed:
        expected += (4 if case.checkpointing else 3) * causal_attention_flops(shape, case.length)
    expected *= case.micro * case.length
    counted = counter.get_total_flops()
    return {"case": str(case), "predicted": expected, "counted": counted, "ratio": expected / counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="only the rows that the tests check")
    parser.add_argument("--flops", action="store_true", help="compare operations instead of bytes")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with the rows of each prediction")
    parser.add_argument("--only", default="", help="only cases whose words contain this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if options.flops:
        for case in OPERATIONS:
            row = count(case)
            line = f"{row['predicted'] / 1e9:10.2f} {row['counted'] / 1e9:10.2f} GFLOP  {row['ratio']:.4f}  {case}"
            print(json.dumps(row) if options.json else line, flush=True)
        return
    chosen = [c for c in CASES if (c.quick or not options.quick) and options.only in str(c)]
    worst = 0.0
    if not options.json:
        print(f"torch {torch.__version__}, transformers {transformers.__version__}; MiB at the peak of one rank")
        print(f"{'predicted':>10} {'measured':>10}  ratio  case")
    for case in chosen:
        row = run(case)
        worst = max(worst, abs(row["ratio"] - 1))
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{row['predicted_mib']:10.1f} {row['measured_mib']:10.1f}  {row['ratio']:.3f}  {row['case']}",
                flush=True,
            )
    if not options.json:
        print(f"worst: {worst:.1%} off over {len(chosen)} cases")
        sys.exit(worst > 0.1)


if __name__ == "__main__":
    main()
