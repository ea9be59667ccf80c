"""Compile layers with torch.compile, part by part, and fall back to eager layers on all ranks together.

The compiled parts are the largest ones without a collective: a full layer, or everything in it except routed experts. A
rank that can't compile a part runs it eagerly and keeps no other rank waiting.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch._functorch.config
import torch._inductor.config
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.distributed.fsdp import FSDPModule

from windlass.ranks import collectives

LAYER: Final = re.compile(r"\blayers\.\d+$")
GRAPHS: Final = 64  # per forward: by shape, dtype, training or evaluation
# Largest relative difference from eager layers, of the loss and of a gradient. Compiled layers round fewer intermediate
# values.
TOLERANCE: Final = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (2e-2, 2e-1)}
COMPILING_SECONDS: Final = (
    3600  # a rank beside others on few processors takes much longer than one that finds its kernels
)


@torch.compiler.substitute_in_graph(dequantize_module_weight)
def dora_weight(module: Any) -> Any:
    """Return the weight of a DoRA layer, whose base is never quantized. PEFT's version checks the weight's class by
    name."""
    return module.weight


class CompiledPart:
    """One module's compiled forward. Once any part has failed, parts that have not been compiled yet run eagerly.

    Parts that have been compiled stay so until the end of the step: checkpointing must recompute a layer the way it was
    computed.
    """

    def __init__(self, module: nn.Module, compiled: "Compiled") -> None:
        self.module = module
        self.eager = module.forward
        self.compiled = compiled
        self.fast = torch.compile(self.eager, fullgraph=True, dynamic=True)
        self.works: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled.on and (not self.compiled.problem if self.works is None else self.works):
            try:
                output = self.fast(*args, **kwargs)
                self.works = True
                return output
            except (TorchDynamoException, FailOnRecompileLimitHit, AssertionError) as error:
                # A missing C++ compiler and torch's assertions about its own traces end here too. An error of the layer
                # itself is raised again by the eager forward.
                self.works = False
                self.compiled.problem = f"{type(self.module).__name__}: {_first_sentence(error)}"
        return self.eager(*args, **kwargs)


class Compiled:
    """The compiled parts of a model."""

    def __init__(self, model: nn.Module) -> None:
        torch._dynamo.config.recompile_limit = GRAPHS
        torch._functorch.config.force_non_lazy_backward_lowering = True  # makes failures surface in the forward
        torch._inductor.config.fallback_random = True  # dropout draws the same masks as in eager layers
        self.on = True
        self.problem = ""
        layers = [module for name, module in model.named_modules() if LAYER.search(name)]
        modules = [module for layer in layers for module in _find_parts_without_collectives(layer)]
        self.parts = [CompiledPart(module, self) for module in modules]

    @property
    def graphs(self) -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def prove(self, compute: Callable[[], tuple[Tensor, list[Tensor]]], *, narrow: bool, timeout_seconds: float) -> str:
        """Return why the layers can't be used, or nothing. Compares what `compute` returns, a loss and gradients, for
        eager and compiled layers. A collective. narrow: whether layers compute in 16 bits."""
        tolerance = TOLERANCE[torch.bfloat16 if narrow else torch.float32]
        collectives.set_timeout(max(COMPILING_SECONDS, timeout_seconds))
        self.on = False
        eager_loss, eager_gradients = compute()
        self.on = True
        loss, gradients = compute()
        far = (_largest_difference([loss], [eager_loss]), _largest_difference(gradients, eager_gradients))
        if not self.problem and not all(map(float.__le__, far, tolerance)):
            self.problem = "loss and gradients differ from eager layers' by {:.1e} and {:.1e}".format(*far)
        reason = self.reason()
        collectives.set_timeout(timeout_seconds)
        return reason

    def reason(self) -> str:
        """Return the first rank's problem and the ranks that have one; empty if none has. A collective."""
        problems = collectives.all_gather(self.problem)
        ranks = [str(rank) for rank, problem in enumerate(problems) if problem]
        where = f" (rank {collectives.list_first(ranks, ', ')})" if len(problems) > len(ranks) > 0 else ""
        return next(filter(None, problems), "") + where


def _find_parts_without_collectives(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or its largest submodules without experts: those send tokens or have their weights gathered
    separately."""
    inside = list(module.named_modules())[1:]
    if not any(name.endswith("experts") or isinstance(child, FSDPModule) for name, child in inside):
        yield module
        return
    for name, child in module.named_children():
        if name != "experts" and not isinstance(child, FSDPModule):
            yield from _find_parts_without_collectives(child)


def _largest_difference(ones: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest relative difference; values near zero are compared with the mean norm."""
    norms = torch.stack(torch._foreach_norm([other.float() for other in others]))
    apart = torch.stack(torch._foreach_norm([a.float() - b.float() for a, b in zip(ones, others, strict=True)]))
    return float((apart / (norms + norms.mean()).clamp(min=1e-20)).max())


def _first_sentence(error: Exception) -> str:
    """Return the error in one line, without torch's advice on tracing."""
    text = " ".join(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split())
    return f"{type(error).__name__}: {text}"[:300]
