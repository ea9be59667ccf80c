"""Shared experts under expert parallelism: computed while tokens are exchanged, before their layer calls them."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import Tensor, nn

SHARED: Final = ("shared_experts", "shared_expert")  # modules next to `experts`, in families that have shared experts


class SharedExperts:
    """A layer's shared experts, computed before the layer calls them. Their forward becomes `take`."""

    def __init__(self, original: Callable[[Tensor], Tensor]) -> None:
        self.original = original
        self.first = False  # the layer calls them before the routed experts: nothing left to overlap
        self.computed: tuple[Tensor, Tensor] | None = None  # input and output

    def compute(self, x: Tensor) -> None:
        self.computed = None if self.first else (x, self.original(x))

    def take(self, x: Tensor) -> Tensor:
        computed = self.computed
        self.computed = None
        if computed is None or _place(computed[0]) != _place(x):
            self.first = True
            return self.original(x)
        return computed[1].view(*x.shape[:-1], -1)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tensor's place in memory, whatever its shape."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()


def find_shared_experts(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each layer's exchange of tokens with the shared experts next to it, in families that have them."""
    for layer in model.modules():
        children = dict(layer.named_children())
        shared = [children[name] for name in SHARED if name in children]
        if not shared or "experts" not in children:
            continue
        for routed in children["experts"].modules():
            exchange = vars(routed).get("exchange")
            if exchange:
                yield exchange, *shared
