"""PiSSA and OLoRA: adapters initialized from the base's weights, with a fixed half that subtracts the initial value.

PEFT subtracts that part from the base. Here the base stays as stored: an adapter has twice the rank, A = [A; A0] and B
= [B, -B0], where A0 and B0 never change. PEFT itself saves such an adapter in this form, as a LoRA of the original
base.
"""

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from windlass.errors import UserError
from windlass.train.fsdp import get_device

ADAPTER_NAME = "default"  # PEFT's name of the only adapter


def init_from_weights(model: nn.Module, how: str) -> None:
    """Initialize every adapter from its weight, and its fixed half with the negative.

    Sharded weights are gathered one at a time: a collective. All ranks get rank 0's values.
    """
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        weight = module.get_base_layer().weight.detach()
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        weight = weight.to(get_device()).float()
        if getattr(module, "fan_in_fan_out", False):
            weight = weight.T
        r = module.r[ADAPTER_NAME] // 2
        if r > min(weight.shape):
            problem = f"{how} with rank {r}, and the weight of {name} has only rank {min(weight.shape)}"
            raise UserError(problem, "lora.r", f"set lora.r to {min(weight.shape)} or less", "rank-above-weights")
        a, b = (factor.contiguous() for factor in compute_factors(weight, r, module.scaling[ADAPTER_NAME], how))
        if dist.is_initialized():
            dist.broadcast(a, 0)
            dist.broadcast(b, 0)
        lora_a = module.lora_A[ADAPTER_NAME]
        lora_b = module.lora_B[ADAPTER_NAME]
        lora_a.weight.data = torch.cat([a, a]).to(lora_a.weight)
        lora_b.weight.data = torch.cat([b, -b], 1).to(lora_b.weight)


def compute_factors(weight: Tensor, r: int, scale: float, how: str) -> tuple[Tensor, Tensor]:
    """Return A0 and B0 as PEFT computes them: `scale` times B0 A0 is the weight's part."""
    if how == "olora":
        left, right = torch.linalg.qr(weight)
        return right[:r], left[:, :r]
    if how == "pissa":
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        left, sizes, columns = torch.svd_lowrank(weight, r, niter=int(how.rpartition("_")[2]))
        right = columns.T
    root = (sizes[:r] / scale).sqrt()
    return root[:, None] * right[:r], left[:, :r] * root


class FixedHalves:
    """The halves of adapters that never change, even if an optimizer moves parameters without a gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.parts: list[tuple[nn.Parameter, int]] = []  # and the dimension whose second half is fixed
        for module in model.modules():
            if isinstance(module, LoraLayer):
                self.parts += [(module.lora_A[ADAPTER_NAME].weight, 0), (module.lora_B[ADAPTER_NAME].weight, 1)]
        self.values = [self._half(parameter, dim).clone() for parameter, dim in self.parts]

    def clear_gradients(self) -> None:
        for parameter, dim in self.parts:
            if parameter.grad is not None:
                self._half(parameter.grad, dim).zero_()

    def restore(self) -> None:
        for (parameter, dim), value in zip(self.parts, self.values, strict=True):
            self._half(parameter, dim).copy_(value)

    @staticmethod
    def _half(tensor: Tensor, dim: int) -> Tensor:
        return tensor.detach().chunk(2, dim)[1]
