"""Replicas of the adapter: one bucketed all-reduce per optimizer step, and proof that they stay equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 256 * 2**20  # bounds the flat copy of the gradients; adapters without experts fit in one


class Replicas:
    """The trainable parameters that every rank holds whole. Sharded ones (DTensors) reduce their own gradients."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.buckets = list(_buckets(self.parameters))
        self.world = dist.get_world_size() if dist.is_initialized() else 1

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
            gradients = torch.split(flat.div_(self.world), [p.numel() for p in parameters])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.view_as(parameter).to(parameter.dtype)
        return sums

    @torch.no_grad()
    def differing(self) -> list[str]:
        """Names of the parameters that are not bit for bit the same on all ranks. A collective: call it everywhere."""
        if self.world == 1 or not self.parameters:
            return []
        mine = fingerprints(self.parameters)
        lowest, highest = mine.clone(), mine.clone()
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return [name for name, equal in zip(self.names, (lowest == highest).tolist(), strict=True) if not equal]


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
