"""Replicas of the adapter: one bucketed all-reduce per optimizer step, and proof that they stay equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from windlass.model.targets import ExpertShards
from windlass.train.experts import peers
from windlass.train.group import gather, world

BUCKET_BYTES = 256 * 2**20  # bounds the flat copy of the gradients; adapters without experts fit in one


class Replicas:
    """The trainable parameters that ranks hold alike. Sharded ones (DTensors) reduce their own gradients.

    All ranks hold the shared ones; of split experts' adapters, only ranks with the same experts hold the same part,
    whose gradient comes from the tokens of every rank of their expert group.
    """

    def __init__(self, model: nn.Module) -> None:
        parts = ExpertShards(model)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
        shared = [(name, parameter) for name, parameter in named if parts.of(name) is None]
        split = [(name, parameter) for name, parameter in named if parts.of(name) is not None]
        self.names = [name for name, _ in (*shared, *split)]
        self.shared = [parameter for _, parameter in shared]
        self.split = [parameter for _, parameter in split]
        self.buckets = list(_buckets(self.shared))
        self.world = world()
        # Groups that together span the ranks with the same experts; none where every rank has its own.
        self.alike: Sequence[dist.ProcessGroup | None] = peers(model)
        self.holders = _holders(parts) if split else []

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.shared, *self.split]

    @torch.no_grad()
    def average(self, sums: Tensor) -> Tensor:
        """Average the gradients over the ranks and return `sums` (float32) added up over them.

        Every rank makes the same calls whatever its batch was: a parameter without a gradient counts as zeros.
        (The Trainer makes one call per tensor, in a gradient hook, and hangs where a rank's tensor gets none.)
        """
        if self.world == 1:
            return sums
        first = True
        for parameters in self.buckets or [[]]:
            flat = torch.cat([_gradient(parameter) for parameter in parameters] + [sums] * first)
            dist.all_reduce(flat)
            if first:
                flat, sums = torch.split(flat, [flat.numel() - sums.numel(), sums.numel()])
            first = False
            _set_gradients(parameters, flat.div_(self.world))
        for parameters in _buckets(self.split):
            flat = torch.cat([_gradient(parameter) for parameter in parameters])
            for group in self.alike:
                dist.all_reduce(flat, group=group)
            _set_gradients(parameters, flat.div_(self.world))  # it holds the tokens of all ranks, as any other does
        return sums

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Of the whole gradient, the same bits on every rank: each part of split experts' counts once."""
        device = self.parameters[0].device
        shared, own = (_norm(parameters, device) for parameters in (self.shared, self.split))
        if not self.split:
            return shared
        everyones = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(everyones, own)
        whole: Tensor = torch.linalg.vector_norm(torch.stack([shared, *(everyones[rank] for rank in self.holders)]))
        return whole

    @torch.no_grad()
    def clip(self, limit: float) -> Tensor:
        """Scale the gradient down to `limit`, and return its norm before."""
        norm = self.norm()
        torch.nn.utils.clip_grads_with_norm_(self.parameters, limit, norm)
        return norm

    @torch.no_grad()
    def differing(self) -> list[str]:
        """Names of the parameters that are not bit for bit the same where they should be. A collective."""
        if self.world == 1 or not self.names:
            return []
        kinds = ((self.shared, [None]), (self.split, self.alike))
        differ = torch.cat([_differ(parameters, groups) for parameters, groups in kinds if parameters])
        return [name for name, one in zip(self.names, self.most(differ).tolist(), strict=True) if one]

    def most(self, values: Tensor) -> Tensor:
        """The largest of every rank's values, where ranks hold parts: what is true of one is true of the whole."""
        if self.split:
            values = values.clone()
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


def _holders(parts: ExpertShards) -> list[int]:
    """For each part of the experts the first rank that holds it."""
    firsts = gather(next(iter(parts.held.values())).first)
    return [firsts.index(first) for first in sorted(set(firsts))]


def _differ(parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup | None]) -> Tensor:
    """1 for each that is not the same over the ranks that the groups span."""
    lowest = fingerprints(parameters)
    highest = lowest.clone()
    for group in groups:
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return (lowest != highest).int()


def _norm(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """On that device also where there is nothing: torch would put a norm of no gradients on the CPU."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).float() if gradients else torch.zeros((), device=device)


def _set_gradients(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    for parameter, gradient in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter).to(parameter.dtype)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Runs of parameters, cut where their gradients reach BUCKET_BYTES."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(p.numel() for p in bucket) * 4 >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Flat and in float32: a sum over many ranks in bfloat16 would drop the small ones."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.detach().flatten().float()


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """One 64-bit number per tensor that changes when any of its bits does, computed where the tensor lies.

    A sum of the values' bits, each times an odd number of its own, modulo 2^64: one pass, nothing copied to the host.
    """
    return torch.stack([_fingerprint(tensor.detach()) for tensor in tensors])


def _fingerprint(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().flatten().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), 2**24):  # bounds the int64 copy
        chunk = bits[start : start + 2**24].to(torch.int64)
        place = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=tensor.device)
        # 0x9E3779B97F4A7C15 as a signed number: the golden ratio's multiplier, so that places don't cancel out
        total += (chunk * ((place * -7046029254386353131) | 1)).sum()
    return total
