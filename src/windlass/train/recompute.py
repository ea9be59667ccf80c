"""Recompute layers in the backward from their inputs, which are kept on the device or in host memory.

With `train.offload_activations` a layer's input goes to host memory in the forward and comes back before the layer's
backward. It is all that activation checkpointing keeps of a layer, and for long rows most of what a step keeps. Masks
and rotary positions stay: all layers share them. On a GPU a stream of its own copies through pinned memory, so that
copies overlap with layers that compute; at most `settings.INPUTS_ON_DEVICE` inputs are then on the GPU. On a CPU they
are plain copies in the same memory, so that tests and rehearsals run the same code.

torch's hooks for saved tensors do it: they are in force only where a checkpoint saves the inputs of its layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from windlass.compat import enable_checkpointing
from windlass.plan import Plan
from windlass.settings import INPUTS_ON_DEVICE
from windlass.train.kernels import kept


def recompute_layers(model: PreTrainedModel, plan: Plan, *, compiled: bool = False) -> None:
    """Recompute the model's layers in the backward, if the plan says so."""
    layout = plan.layout
    if not layout.activation_checkpointing:
        return
    keeps = {} if compiled else {"context_fn": partial(kept.checkpoint_contexts, plan.run.train.keeps_products)}
    enable_checkpointing(model, {"use_reentrant": False, **keeps})
    if layout.offload_activations:
        inputs = LayerInputs()
        for layer in model.modules():
            if getattr(layer, "gradient_checkpointing", False):
                layer._gradient_checkpointing_func = inputs.offload(layer._gradient_checkpointing_func)


class HostCopy:
    """A layer's input in host memory."""

    def __init__(self, host: Tensor, device: torch.device, before: ref[HostCopy] | None = None) -> None:
        self.host = host
        self.device = device
        self.before = before  # the next one that the backward needs
        self.back: Tensor | None = None  # on the device again, once `arrived`
        self.arrived: Any = None
        self.used = False


class LayerInputs:
    """Sends the inputs of a model's checkpointed layers to host memory, and brings them back."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.latest: ref[HostCopy] | None = None
        # Inputs that are still on the device, each with its version and the event after which it may go.
        self.leaving: deque[tuple[Tensor, int, Any]] = deque()

    def offload(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's checkpoint that keeps the layer's inputs in host memory."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(self.send, self.bring_back):
                return checkpoint(*args, **kwargs)

        return call

    def send(self, tensor: Tensor) -> Tensor | HostCopy:
        if not tensor.requires_grad:  # shared by all layers
            return tensor
        tensor = tensor.detach()
        if not tensor.is_cuda:
            return HostCopy(tensor.clone(), tensor.device)
        self.stream = self.stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        self.leaving.append((tensor, tensor._version, self.stream.record_event()))
        self._release(INPUTS_ON_DEVICE - 1)
        copy = HostCopy(host, tensor.device, self.latest)
        self.latest = ref(copy)
        return copy

    def bring_back(self, copy: Tensor | HostCopy) -> Tensor:
        if isinstance(copy, Tensor):
            return copy
        copy.used = True
        if copy.device.type == "cpu":
            return copy.host
        self._release(0)
        self._fetch(copy)
        torch.cuda.current_stream().wait_event(copy.arrived)
        before = copy.before() if copy.before else None
        if before and not before.used:  # it is copied while this layer is recomputed
            self._fetch(before)
        tensor = copy.back
        copy.back = None
        assert tensor is not None
        return tensor

    def _release(self, keep: int) -> None:
        """Let all but the latest `keep` inputs go. The device waits for their copies, the host does not: their memory
        is then free for what is computed next, however far the host is ahead."""
        while len(self.leaving) > keep:
            tensor, version, copied = self.leaving.popleft()
            assert tensor._version == version, "a layer's input was changed while it was copied to host memory"
            torch.cuda.current_stream().wait_event(copied)

    def _fetch(self, copy: HostCopy) -> None:
        """Start to copy an input to the device, unless it is on its way."""
        if copy.back is None:
            copy.back = torch.empty_like(copy.host, device=copy.device)
            self.stream.wait_stream(torch.cuda.current_stream())  # which may still use that memory
            with torch.cuda.stream(self.stream):
                copy.back.copy_(copy.host, non_blocking=True)
            copy.arrived = self.stream.record_event()
