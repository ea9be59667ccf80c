"""Replicas of the adapter: one bucketed all-reduce per optimizer step, and proof that they stay equal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from windlass.ranks.collectives import get_world_size
from windlass.train.fsdp import list_fsdp_modules
from windlass.weights.expert_shards import AdapterShards, expert_peer_groups, find_shard_holders

BUCKET_BYTES = 256 * 2**20  # bounds the flat copy of the gradients; adapters without experts fit in one bucket
Groups = Sequence[dist.ProcessGroup | None]
EVERYONE: Groups = [None]


class ReplicaGroups:
    """The trainable parameters, grouped by which ranks have the same ones.

    `shared`: all ranks. `split`, experts' adapters under expert parallelism: ranks with the same experts; the gradient
    comes from the tokens of all ranks of their expert group. `sharded` by FSDP2 (the base's own biases): no two ranks,
    and FSDP2 averages their gradients.

    Only `find_differing` makes the host wait for the device.
    """

    def __init__(self, model: nn.Module) -> None:
        parts = AdapterShards(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        unsharded = {name: p for name, p in trained.items() if not isinstance(p, DTensor)}
        shared = {name: p for name, p in unsharded.items() if parts.of(name) is None}
        split = {name: p for name, p in unsharded.items() if parts.of(name) is not None}
        self.names = [*shared, *split]
        self.shared = list(shared.values())
        self.split = list(split.values())
        self.sharded = [p for p in trained.values() if isinstance(p, DTensor)]
        self.parameters = [*self.shared, *self.split]  # parameters that other ranks have too
        self.shared_buckets = list(_split_into_buckets(self.shared)) or [[]]
        self.split_buckets = list(_split_into_buckets(self.split))
        self.world = get_world_size()
        # Groups that together span the ranks with the same experts; none if every rank has its own.
        self.alike: Groups = expert_peer_groups(model)
        self.holders = list(find_shard_holders(parts).values())  # together they have all experts' adapters

    def gradients(self) -> list[Tensor]:
        """Return this rank's gradients of all trainable parameters."""
        return [to_local(p.grad) for p in (*self.parameters, *self.sharded) if p.grad is not None]

    @torch.no_grad()
    def reduce(self, sums: Tensor) -> Tensor:
        """Average the gradients over the ranks and return `sums` (float32) added up over them.

        Every rank makes the same calls whatever its batch was: a missing gradient counts as zeros.
        """
        if self.world == 1:
            return sums
        buckets = [(bucket, EVERYONE) for bucket in self.shared_buckets]
        buckets += [(bucket, self.alike) for bucket in self.split_buckets]
        for number, (bucket, groups) in enumerate(buckets):
            # In float32: a sum over many ranks in bfloat16 would drop small values.
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            is_first = number == 0  # `sums` are sent with the first bucket
            parts = [gradient.flatten().float() for gradient in gradients]
            flat = torch.cat([*parts, sums] if is_first else parts)
            for group in groups:
                dist.all_reduce(flat, group=group)
            if is_first:
                flat, sums = torch.split(flat, [flat.numel() - sums.numel(), sums.numel()])
            # Split ones are divided by all ranks too: their gradient comes from the tokens of all, as any other.
            averaged = torch.split(flat.div_(self.world), [p.numel() for p in bucket])
            for parameter, gradient in zip(bucket, averaged, strict=True):
                parameter.grad = gradient.view_as(parameter).to(parameter.dtype)
        return sums

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the norm of the full gradient, bit-equal on all ranks; each part of split experts counts once."""
        device = self.parameters[0].device
        norms = [_norm(self.shared, device)]
        if self.split:
            norm_here = _norm(self.split, device)
            everyones = [torch.empty_like(norm_here) for _ in range(self.world)]
            dist.all_gather(everyones, norm_here)
            norms += [everyones[rank] for rank in self.holders]
        if self.sharded:
            norms.append(_norm(self.sharded, device))
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def find_differing(self) -> list[str]:
        """Return the names of parameters that should be bit-equal between ranks and are not. A collective."""
        if self.world == 1 or not self.names:
            return []
        differ = []
        for parameters, groups in ((self.shared, EVERYONE), (self.split, self.alike)):
            if parameters:
                lowest = compute_fingerprints(parameters)
                highest = lowest.clone()
                for group in groups:
                    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
                    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
                differ.append((lowest != highest).int())
        flags = self.all_reduce_max(torch.cat(differ)).tolist()
        return [name for name, differs in zip(self.names, flags, strict=True) if differs]

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Return the maximum over ranks if ranks have parts: what holds for a part holds for the full parameter."""
        if self.split or self.sharded:
            values = values.clone()
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


class WaitTimer:
    """Measures how long this rank's forward waits for others: otherwise a slow rank looks like those waiting for it.

    Ranks wait where FSDP2 gathers weights, in its hook before a module's forward, in the experts' forward if experts
    are split, which exchanges tokens and is measured in full, and where keys of split rows are gathered. Measured while
    `on`.
    """

    def __init__(self, model: nn.Module, now: Callable[[], Any], *, split_experts: bool) -> None:
        self.now = now
        self.on = False
        self.depth = 0
        self.marks: list[Any] = []  # starts and ends, nested at most once
        for module in list_fsdp_modules(model):
            module.register_forward_pre_hook(self._begin, prepend=True)  # type: ignore[attr-defined]
            module.register_forward_pre_hook(self._end)  # type: ignore[attr-defined]
        for name, module in model.named_modules():
            if split_experts and name.endswith(".experts"):
                module.register_forward_pre_hook(self._begin, prepend=True)
                module.register_forward_hook(self._end)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure what runs within this."""
        self._begin()
        yield
        self._end()

    def _begin(self, *_: Any) -> None:
        self.depth += self.on
        if self.on and self.depth == 1:
            self.marks.append(self.now())

    def _end(self, *_: Any) -> None:
        self.depth -= self.on
        if self.on and not self.depth:
            self.marks.append(self.now())

    def seconds(self) -> float | None:
        """Return the latest measurement; on a GPU call it after a synchronization."""
        waits = zip(self.marks[::2], self.marks[1::2], strict=True)
        self.marks = []
        took = [end - start if isinstance(end, float) else start.elapsed_time(end) / 1000 for start, end in waits]
        return sum(took) if took else None


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _norm(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """Compute the norm on that device even without gradients: torch would put the norm of an empty list on the CPU."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=device)
    return (total.full_tensor() if isinstance(total, DTensor) else total).float()


def _split_into_buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield runs of parameters, cut where their gradients reach BUCKET_BYTES."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(parameter.numel() for parameter in bucket) * 4 >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


@torch.no_grad()
def compute_fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return a 64-bit number per tensor that changes with any of its bits, computed on the tensor's device.

    It is the sum of the values' bits, each times an odd number of its own, modulo 2^64: one pass, nothing copied to the
    host.
    """
    totals = [torch.zeros((), dtype=torch.int64, device=tensor.device) for tensor in tensors]
    for tensor, total in zip(tensors, totals, strict=True):
        bits = tensor.detach().contiguous().flatten().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        for start in range(0, bits.numel(), 2**24):  # bounds the int64 copy
            chunk = bits[start : start + 2**24].to(torch.int64)
            place = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=tensor.device)
            # 0x9E3779B97F4A7C15 as a signed number: the golden ratio's multiplier, so that places don't cancel out
            total += (chunk * ((place * -7046029254386353131) | 1)).sum()
    return torch.stack(totals)
