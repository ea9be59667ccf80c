"""What the forward of a checkpointed layer keeps, so that the recomputation need not compute or wait for it again.

Always the number of tokens per rank, for which the host waits. With `train.gradient_checkpointing: selective` also the
products of routed experts and the tokens sent to them: most of a layer's work and all of its traffic.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import Tensor

from windlass.errors import UserError

T = TypeVar("T")


class KeptValues:
    """Values kept by one layer's forward, in the order in which the recomputation asks for them."""

    # The layer being computed, if any. Global, because torch's checkpointing enters a context around a layer, and what
    # is in the layer has no argument to get it by. A context variable would not do: the recomputation runs in the
    # backward's thread. Only one layer is computed at a time, since the host waits for the backward.
    current: "KeptValues | None" = None

    def __init__(self, products: bool) -> None:
        self.products = products
        self.replaying = False
        self.values: deque[Any] = deque()

    @contextmanager
    def open(self, *, replaying: bool) -> Iterator[None]:
        self.replaying = replaying
        KeptValues.current = self
        try:
            yield
        finally:
            KeptValues.current = None


def checkpoint_contexts(products: bool) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a layer's forward and its recomputation: torch.utils.checkpoint's `context_fn`."""
    kept = KeptValues(products)
    return kept.open(replaying=False), kept.open(replaying=True)


def keep_value(compute: Callable[[], T]) -> T:
    """Return what `compute` returns; in a recomputation, return what it returned in the forward."""
    kept = KeptValues.current
    if kept is None:
        return compute()
    if kept.replaying:
        return kept.values.popleft()  # type: ignore[no-any-return]
    value = compute()
    # Detached: with its graph it would keep itself alive.
    kept.values.append(value.detach() if isinstance(value, Tensor) else value)
    return value


def keep_expert_product(compute: Callable[[], Tensor]) -> Tensor:
    """Do the same for a product of routed experts or exchanged tokens, if those are kept."""
    return keep_value(compute) if keeps_products() else compute()


def require_same_routing(weights: Tensor, order: Tensor) -> Tensor:
    """Return a router's weights, or NaN (which no step trains on) if the recomputation routes tokens differently
    than the forward did: kept products would then belong to other tokens. Compared on the GPU, without a host wait."""
    if KeptValues.current is None:
        return weights
    return weights.masked_fill((keep_value(lambda: order) != order).any(), math.nan)


def keeps_products() -> bool:
    return KeptValues.current is not None and KeptValues.current.products


def refuse_experts(experts: object) -> None:
    """Raise for experts whose products can't be kept."""
    if keeps_products():
        problem = f"the products of {type(experts).__name__} can't be kept"
        raise UserError(
            problem, "train.gradient_checkpointing", "set train.gradient_checkpointing: true", "kept-products"
        )
