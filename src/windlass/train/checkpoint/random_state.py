"""The state of every random number generator that training draws from."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().tolist(),
        # This rank's own GPU alone: how many others its node has may differ where a run goes on.
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else [],
    }


def restore_random(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """What is done inside draws numbers without taking them from training.

    An evaluation's data loader draws a seed: a run that was stopped instead of evaluating would go on with others.
    """
    before = random_state()
    try:
        yield
    finally:
        restore_random(before)
