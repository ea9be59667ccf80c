"""The collectives of a step with 8, 16 and 64 ranks, of which this process plays one at a time: equal to the plan's."""

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.mistral4.modeling_mistral4 import Mistral4MLP

from windlass import hardware, tiny
from windlass.compat import enable_checkpointing
from windlass.model import Base, read_base
from windlass.model.targets import resolve_adapter
from windlass.plan.cost import BatchSize, Workload, estimate_cost, read_shape
from windlass.plan.layout import Layout
from windlass.runfile import Lora
from windlass.train import parallel
from windlass.train.experts.exchange import Exchange
from windlass.train.head import Head
from windlass.train.kernels import kept
from windlass.train.lora import attach_adapter
from windlass.train.patches import Patches
from windlass.train.sync import ReplicaGroups

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's and torch's of what is to come
LAYERS, TOKENS = 2, 32
LORA = Lora.model_validate({"r": 4, "lora_dropout": 0, "target_modules": "all-linear", "experts": {"r": 2}})
SIZES: dict[str, Any] = {"hybrid": {"shard": 4}, "expert-parallel": {"expert_parallel": 8}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return read_base(
        tiny.write_model(
            tmp_path_factory.mktemp("fake") / "tiny", hidden=512, experts=64, layers=LAYERS, tokenizer=False
        )
    )


def layout_of(name: str, world: int) -> Layout:
    sizes: dict[str, Any] = {"shard": world, **SIZES.get(name, {})}
    sizes["replicate"] = world // sizes["shard"]
    return Layout(name, "test", world // 8, 8, reshard_after_forward=name != "no-reshard", **sizes)


@contextmanager
def one_of(world: int, rank: int) -> Iterator[None]:
    """A process group without other ranks: nothing is sent, and received buffers keep their memory's contents."""
    # A cached operation of an earlier test would put its mesh, whose groups are gone, in the place of an equal one.
    torch._C._clear_DTensor_sharding_propagator_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each collective: the phase, its kind, and the bytes that this rank sends in a ring."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase, self.found = "forward", list[tuple[str, str, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in name and "wrap" not in name:
            first = args[0][0] if isinstance(args[0], list) else args[0]
            sent = first.nbytes - args[1].nbytes if name == "_allgather_base_" else first.nbytes
            self.found.append((self.phase, name, sent))
        return func(*args, **(kwargs or {}))


def step(base: Base, layout: Layout, rank: int) -> list[tuple[str, str, int]]:
    """Run one micro-batch and the reduction of its gradients, as this rank does."""
    with one_of(layout.ranks, rank):
        return recorded(base, layout)


def recorded(base: Base, layout: Layout) -> list[tuple[str, str, int]]:
    model = parallel.build_model(base, layout, torch.bfloat16)
    parallel.allocate(model, layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    model.requires_grad_(False)
    adapted = attach_adapter(model, LORA, resolve_adapter(LORA, base, str), 0)
    causal_lm: Any = adapted.get_base_model()
    Patches().patch_forward(causal_lm)
    causal_lm.train()
    replicas, ids = ReplicaGroups(adapted), torch.arange(1, TOKENS + 1)[None]
    with Recording() as recording:
        outputs = causal_lm(ids, torch.arange(TOKENS - 1))
        loss, _ = Head(causal_lm).loss(outputs.last_hidden_state, ids[0, 1:])
        recording.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]
        recording.phase = "reduce"
        replicas.reduce(torch.zeros(6))
    found: list[tuple[str, str, int]] = recording.found
    return found


@pytest.mark.parametrize(
    ("name", "world"),
    [
        *(("full-shard", 16), ("no-reshard", 64), ("hybrid", 16), ("expert-parallel", 8), ("expert-parallel", 16)),
        pytest.param("expert-parallel", 64, marks=pytest.mark.prove),
    ],
)
def test_collectives_equal_the_plan_on_all_ranks(
    name: str, world: int, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = dist.all_to_all_single

    def counted(received: Tensor, sent: Tensor, *rest: Any, **more: Any) -> Any:
        """Every rank sends this one as many tokens as it was sent: nothing was sent, so there is no number."""
        if not rest:
            received.copy_(sent)
        return exchange(received, sent, *rest, **more)

    monkeypatch.setattr(dist, "all_to_all_single", counted)
    layout, found = layout_of(name, world), []
    for rank in (0, world - 1):  # a process each: DTensor keeps what it found out of a mesh
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found.append(pool.apply(step, (base, layout, rank)))
    assert found[0] == found[1]
    counts = Counter((phase, kind) for phase, kind, _ in found[0])
    split = name == "expert-parallel"
    apart = LAYERS * (split and world > 8)  # of experts that are not whole after the exchange's groups
    # The embedding, each layer, and the final norm with the head, which stays gathered for the backward.
    assert counts["forward", "_allgather_base_"] == LAYERS + 2 + apart
    assert counts["backward", "_allgather_base_"] == (0 if name == "no-reshard" else LAYERS + apart)
    # Per layer: how many tokens, the tokens, and back; their gradients both ways.
    assert counts["forward", "alltoall_base_"] == 3 * LAYERS * split
    assert counts["backward", "alltoall_base_"] == 2 * LAYERS * split
    assert counts["reduce", "allreduce_"] == 1 + bool(apart)
    assert sum(counts.values()) == len(found[0])

    gpu = hardware.find_gpu("h100")
    link, network, host = (hardware.find_fabric(each) for each in (gpu.link, "infiniband-400", gpu.host_link))
    machine = hardware.Machine(gpu, link, network, host, 8, None)
    work = Workload(
        read_shape(base, resolve_adapter(LORA, base, str)), layout, BatchSize(1, 1, TOKENS), machine, "adamw_torch", 2
    )
    flows = estimate_cost(work, advise=False).flows
    for phase in ("forward", "backward"):
        sent = sum(size for of, kind, size in found[0] if (of, kind) == (phase, "_allgather_base_"))
        planned = sum(flow.bytes for flow in flows if flow.kind.startswith(f"all-gather {phase}"))
        # Few rows over many ranks are filled up, which of a real model is nothing.
        assert sent == pytest.approx(planned, rel=0.03, abs=4500 * world), (phase, flows)


def test_expert_tokens_use_their_own_communicator(base: Base) -> None:
    with one_of(8, 0):
        model = parallel.build_model(base, layout_of("expert-parallel", 8), torch.bfloat16)
        meshes = {parameter.device_mesh for parameter in model.parameters()}
        groups = {mesh[name].get_group() for mesh in meshes for name in ("ep", "fsdp") if name in mesh.mesh_dim_names}
        assert len(groups) == 2


@pytest.mark.parametrize("checkpointing", ["", "true", "selective"])
def test_shared_experts_are_computed_while_tokens_are_exchanged(
    checkpointing: str, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forward, the recomputation and the gradients; nothing is kept for a layer that doesn't fetch it. A
    recomputation knows the number of tokens, and with `selective` the tokens."""
    happened, counts = list[str](), list[Tensor]()

    def exchange(received: Tensor, sent: Tensor, *sizes: Any, **_: Any) -> Any:
        """Every rank sends this one as many tokens as it is sent."""
        if not sizes:
            counts.append(sent)
            return received.copy_(sent)
        happened.append("start")
        received.zero_()
        return SimpleNamespace(wait=lambda: happened.append("wait"))

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    with one_of(8, 0):
        layout = layout_of("expert-parallel", 8)
        model: Any = parallel.build_model(base, layout, torch.bfloat16)
        parallel.allocate(model, layout)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(0.01)
        model.requires_grad_(False)
        model.enable_input_require_grads()
        if checkpointing:
            options = {
                "use_reentrant": False,
                "context_fn": partial(kept.checkpoint_contexts, products=checkpointing == "selective"),
            }
            model.gradient_checkpointing_enable(options)
        for module in model.modules():
            if isinstance(module, Mistral4MLP):
                module.act_fn = Noting(happened)
        with Patches() as patches:
            once = patches.overlap_shared_experts(model)
        shared = Patches().overlap_shared_experts(model)  # again, as when compiled layers fall back to eager
        assert [each.original for each in shared] == [each.original for each in once] != []
        logits = model.train()(torch.arange(1, TOKENS + 1)[None], use_cache=False).logits
        forward = ["start", "shared", "wait", "start", "wait"]
        assert happened == forward * LAYERS
        happened.clear()
        logits.sum().backward()
        again = {"": [], "true": forward, "selective": ["shared"]}[checkpointing]
        assert happened == [*again, "start", "wait", "start", "shared gradient", "wait"] * LAYERS
        assert not any(each.computed for each in shared)
        assert len(counts) == LAYERS


@pytest.mark.parametrize(("rerouted", "products"), [(False, False), (True, False), (True, True)])
def test_different_routing_in_recomputation_gives_no_gradient(
    rerouted: bool, products: bool, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are sent by the forward's sizes: routed differently, they would reach other experts."""
    call, layers = Exchange.__call__, 0

    def routed(self: Exchange, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        nonlocal layers
        layers += 1
        again = rerouted and layers > LAYERS
        return call(self, hidden, index.flip(0) if again else index, weights)  # every expert has as many as before

    def exchange(received: Tensor, sent: Tensor, *sizes: Any, **_: Any) -> Any:
        received.copy_(sent)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(Exchange, "__call__", routed)
    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    with one_of(8, 0):
        layout = layout_of("expert-parallel", 8)
        model: Any = parallel.build_model(base, layout, torch.bfloat16)
        parallel.allocate(model, layout)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().normal_(std=0.02)
        model.requires_grad_(False)
        embedded = model.get_input_embeddings().weight.requires_grad_()
        options = {"use_reentrant": False, "context_fn": partial(kept.checkpoint_contexts, products=products)}
        enable_checkpointing(model, options)
        model.train()(torch.arange(1, TOKENS + 1)[None], use_cache=False).logits.sum().backward()
    assert layers == 2 * LAYERS
    assert bool(embedded.grad.to_local().isfinite().all()) is not rerouted


class Noting(nn.Module):
    """An activation that records when it is computed, and when its gradient is."""

    def __init__(self, happened: list[str]) -> None:
        super().__init__()
        self.happened = happened

    def forward(self, x: Tensor) -> Tensor:
        self.happened.append("shared")
        y = nn.functional.silu(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.happened.append("shared gradient"))  # type: ignore[no-untyped-call]
        return y
