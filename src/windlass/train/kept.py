"""What a checkpointed layer's forward keeps for its recomputation, instead of computing or waiting for it again.

Always: how many tokens go to each rank, for which the host waits. With `train.gradient_checkpointing: selective` also
the products of routed experts and the tokens that were sent to them: most of a layer's work and all of its traffic.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import Tensor

from windlass.errors import UserError

T = TypeVar("T")


class Kept:
    """Of one layer's forward, in the order in which its recomputation comes by."""

    current: Kept | None = None  # the layer that is being computed; a backward has a thread, but the host waits for it

    def __init__(self, products: bool) -> None:
        self.products, self.replaying = products, False
        self.values: deque[Any] = deque()

    @contextmanager
    def open(self, *, replaying: bool) -> Iterator[None]:
        self.replaying, Kept.current = replaying, self
        try:
            yield
        finally:
            Kept.current = None


def contexts(products: bool) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
    """For torch.utils.checkpoint: what a layer's forward and its recomputation run in."""

    def made() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        kept = Kept(products)
        return kept.open(replaying=False), kept.open(replaying=True)

    return made


def once(compute: Callable[[], T]) -> T:
    """What `compute` returns; in a recomputation what it did return."""
    kept = Kept.current
    if kept is None:
        return compute()
    if kept.replaying:
        return kept.values.popleft()  # type: ignore[no-any-return]
    value = compute()
    # Without its place in the graph, which would keep itself alive.
    kept.values.append(value.detach() if isinstance(value, Tensor) else value)
    return value


def product(compute: Callable[[], Tensor]) -> Tensor:
    """The same of a product of routed experts, or of tokens sent, where these are kept."""
    return once(compute) if keeps_products() else compute()


def unless_rerouted(weights: Tensor, order: Tensor) -> Tensor:
    """A router's weights; NaN, which no step trains on, where a recomputation sends tokens to other experts than the
    forward did: what is kept would be that of other tokens. The GPU compares, and the host doesn't wait."""
    if Kept.current is None:
        return weights
    return weights.masked_fill((once(lambda: order) != order).any(), math.nan)


def keeps_products() -> bool:
    return Kept.current is not None and Kept.current.products


def refuse(experts: object) -> None:
    """Experts of a form whose products go past here."""
    if keeps_products():
        what = f"the products of {type(experts).__name__} can't be kept"
        raise UserError(what, "train.gradient_checkpointing", "set train.gradient_checkpointing: true")
