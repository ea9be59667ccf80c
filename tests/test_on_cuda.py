"""A full training step on a GPU that computes nothing: `make prove-cuda` runs it on tests/cuda_stub.c.

The loop is real, with torch's CUDA build, autograd's own threads and FSDP2; tensors are fake ones on `cuda`, and other
ranks are absent. Checked is what a GPU would refuse or wait for: shapes, strides and dtypes of its kernels, tensors on
two devices in one operator, values that the host reads. What kernels compute is not checked.
"""

import contextlib
import importlib
import itertools
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from windlass import plan as planning
from windlass import runfile, tiny
from windlass.data.prepare import prepare_data
from windlass.errors import UserError
from windlass.files import WriteGuard
from windlass.model.family import FAMILIES
from windlass.observe.background import BackgroundReport
from windlass.ranks.rank import Rank, StopSignal
from windlass.train import parallel
from windlass.train.base_alone import BaseAlone
from windlass.train.kernels import compare, documents
from windlass.train.liveness import Liveness
from windlass.train.load import open_base_tokenizer
from windlass.train.lora import attach_adapter
from windlass.train.run import make_loop
from windlass.train.session import Options, Session
from windlass.train.step import StepSums
from windlass.weights import quantized

pytestmark = [
    pytest.mark.skipif(
        torch.version.cuda is None or not torch.cuda.is_available() or torch.cuda.get_device_name() != "stub",
        reason="make prove-cuda runs this, with torch's CUDA build above a GPU that is a stub",
    ),
    pytest.mark.filterwarnings("ignore"),
]
STEPS = 6  # the first ones prove that the adapter trains, which asks the GPU for more
RUN = """\
model: {{model_name_or_path: {folder}/model, torch_dtype: bfloat16}}
lora: {{r: 4, lora_alpha: 8, lora_dropout: 0, target_modules: all-linear{experts}}}
data: {{dataset_name_or_path: {folder}/rows.jsonl, dataset_config_name: null, val_split: null, max_length: 64{packing}}}
train: {{output_dir: {folder}/out, max_steps: {steps}, per_device_train_batch_size: 2, bf16: true,
  gradient_accumulation_steps: 2, gradient_checkpointing: {recompute}, save_strategy: "no", eval_strategy: "no",
  report_to: none}}
layout: {{name: {layout}, base_dtype: {dtype}}}
cluster: {{nodes: {nodes}, gpus_per_node: 2, gpu: h200, network: infiniband-400}}
"""
# Where the host waits for the GPU in a step, once the adapter is known to train.
WAITS = {"loop.py train_step": 1}  # the one wait: loss, norm, faults, signals
# NCCL takes from the host how many tokens go to which rank: in each layer and micro-batch, once.
EXCHANGE = {"exchange.py exchange_edges": 2 * 2}
PRODUCTS = ("mm", "scaled_dot_product", "flash_attention", "efficient_attention")


class Gpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what each operator requires of a GPU: where the host waits, wide products, tensors elsewhere."""

    def __init__(self, routed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.routed, self.waits = routed, Counter[str]()
        self.wide, self.mixed, self.called = Counter[str](), Counter[str](), Counter[str]()

    def where(self, name: str = "") -> str:
        files = ((frame.filename, frame.name) for frame in reversed(traceback.extract_stack()))
        own = (f"{Path(file).name} {of}" for file, of in files if "/windlass/" in file or "/transformers/" in file)
        return f"{name} {next(own, 'autograd')}".strip()

    def listed(self, tensor: Tensor) -> Any:
        """Return zeros instead of values; of tokens about equally many per expert, and all in total."""
        if tensor.is_cuda:
            self.waits[self.where()] += 1
        answer: Any = [0.0 if tensor.is_floating_point() else 0] * tensor.numel()
        if tensor.ndim > 1:  # the edges of [ranks, experts] rows, as many for each
            ranks, own = tensor.shape[-2], tensor.shape[-1] - 1
            rows = [self.routed * number // (ranks * own) for number in range(ranks * own + 1)]
            of_ranks = [rows[rank * own + edge] for rank in range(ranks) for edge in range(own + 1)]
            answer = of_ranks * (tensor.numel() // len(of_ranks))
        for size in reversed(tensor.shape[1:]):
            answer = [answer[i : i + size] for i in range(0, len(answer), size)]
        return answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        self.called[name] += 1
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        there = [each for each in tensors if each.is_cuda]
        if name == "nonzero" and there:
            self.waits[self.where()] += 1
            return there[0].new_empty((0, there[0].ndim), dtype=torch.long)
        if name == "_local_scalar_dense" and isinstance(tensors[0], FakeTensor):
            self.waits[self.where()] += bool(there)
            return 1.0 if tensors[0].is_floating_point() else 1
        if name in ("_to_copy", "copy_"):
            to, source = (kwargs.get("device"), args[0]) if name == "_to_copy" else (args[0].device, args[1])
            behind = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            if to is not None and source.is_cuda != (torch.device(to).type == "cuda") and not behind:
                self.waits[self.where("copy in")] += 1
        elif there and any(each.ndim and not each.is_cuda for each in tensors):
            self.mixed[self.where(name)] += 1
        elif any(word in name for word in PRODUCTS) and there and there[0].dtype == torch.float32:
            is_outer = 1 in there[0].shape[-2:]  # as rotary positions are in transformers 5.17
            self.wide[self.where(name)] += not is_outer
        return func(*args, **kwargs)


def everyones(values: list[Any], own: Any, *_: Any, **__: Any) -> None:
    values[:] = [own] * len(values)


@pytest.fixture(autouse=True)
def without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer reads of values, and treat compared values as equal."""
    monkeypatch.setattr(dist, "all_gather_object", everyones)
    monkeypatch.setattr(Liveness, "_require", lambda *_: None)
    monkeypatch.setattr(compare, "_are_close", lambda one, other: one.shape == other.shape and one.dtype == other.dtype)
    monkeypatch.setattr(documents, "compare_documents", lambda _: 0.0)
    monkeypatch.setattr(torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda _: []))
    optimizers = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizers, "_foreach_supported_types", [torch.nn.Parameter, FakeTensor])


CASES = [
    *itertools.product(("mistral4", "mixtral", "llama"), ("resident", "full-shard", "no-reshard", "hybrid"), ["bf16"]),
    *itertools.product(("mistral4", "mixtral"), ["expert-parallel"], ["bf16"]),
    *itertools.product(["mistral4"], ("resident", "full-shard", "expert-parallel"), ("fp8", "nf4")),
]


@pytest.mark.parametrize(("family", "layout", "dtype"), CASES)
def test_step_makes_no_unexpected_gpu_calls(
    family: str, layout: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        gpu = steps_of(family, layout, dtype, tmp_path, monkeypatch)
    except UserError as error:
        if error.problems[0].code != "too-old":
            raise
        pytest.skip(error.problems[0].problem)
    assert +gpu.waits == {**WAITS, **(EXCHANGE if layout == "expert-parallel" else {})}
    assert not +gpu.wide
    assert not gpu.mixed


@pytest.mark.parametrize(("family", "layout"), [("mistral4", "resident"), ("llama", "full-shard")])
def test_packed_rows_are_attended_to_by_document(
    family: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = steps_of(family, layout, "bf16", tmp_path, monkeypatch, packing=", packing: true")
    assert +gpu.waits == WAITS
    assert not +gpu.wide
    assert not gpu.mixed
    assert gpu.called["_varlen_attn"] >= STEPS * 2 * 2 * 2  # each layer of each micro-batch, and when recomputed
    assert not any("scaled_dot_product" in name for name in gpu.called)


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        (lambda loss: loss.item(), "waits"),
        (lambda loss: loss.cpu(), "waits"),
        (lambda loss: loss.expand(2, 2) @ loss.expand(2, 2), "wide"),
        (lambda loss: loss.expand(2)[torch.zeros(2, dtype=torch.long)], "mixed"),
    ],
)
def test_planted_faults_are_detected(planted: Any, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = StepSums.pack

    def faulty(sums: StepSums, rank: int, world: int) -> Tensor:
        planted(sums.loss)
        return pack(sums, rank, world)

    monkeypatch.setattr(StepSums, "pack", faulty)
    found = getattr(steps_of("llama", "resident", "bf16", tmp_path, monkeypatch), seen)
    assert any(where.endswith("loop.py train_step") for where in found - Counter(WAITS)), found


def steps_of(
    family: str, layout: str, dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch, packing: str = ""
) -> Gpu:
    tiny.write_model(
        folder / "model", family, layers=2, wrapper=False, quantization="tensor" if dtype == "fp8" else "none"
    )
    (folder / "rows.jsonl").write_text('{"text": "anchor bark cable deck eddy fathom galley"}\n' * 64)
    nodes = 2 if layout == "hybrid" else 1
    given = {"folder": folder, "layout": layout, "dtype": dtype, "nodes": nodes, "steps": STEPS}
    given |= {"packing": packing, "experts": ", experts: {r: 4}" if "experts" in FAMILIES[family].sizes else ""}
    (folder / "run.yaml").write_text(RUN.format(**given, recompute=str(layout != "no-reshard").lower()))
    world = 2 * nodes
    plan = planning.make_plan(runfile.read_run_file(folder / "run.yaml"))
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world}.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        tokenizer = open_base_tokenizer(plan)
        data, out = prepare_data(plan.run, tokenizer, say=print), plan.folder
        out.mkdir(exist_ok=True)
        model, gpu = parallel.build_model(plan.base, plan.layout, torch.bfloat16), Gpu(0)
        monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: gpu.listed(tensor))
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, gpu:
            parallel.allocate(model, plan.layout)
            quantized.list_quantized_params(model)  # as the loader does: scales of this rank's experts
            model.requires_grad_(False)
            peft = attach_adapter(model, plan.run.lora, plan.adapter, 0)
            parallel.assert_sharded(peft, plan.layout)
            here = Rank(0, 0, world)
            report = BackgroundReport(out)
            options = Options(debug_freq=0)
            session = Session(here, Console(quiet=True), StopSignal(), report, WriteGuard(print), options=options)
            loop = make_loop(plan, session, peft, data, tokenizer, BaseAlone(model, ()), facts={})
        assert loop.model.adapters.groups
        micro_batches = loop.batches.train(0, loop.length)
        real = [list(itertools.islice(micro_batches, loop.length.accumulation)) for _ in range(STEPS)]
        loop.model.causal_lm.train()
        loop.watch.report = lambda: None
        with loop.watch, contextlib.closing(loop.recorder), fake, gpu:
            loop.recorder.start(0)
            for batches in real:
                for found in (gpu.waits, gpu.wide, gpu.mixed):
                    found.clear()
                gpu.routed = batches[0].inputs["input_ids"].numel() * plan.base.dims.get("top_k", 1)
                loop.train_step(iter(batches))
        return gpu
    finally:
        dist.destroy_process_group()
