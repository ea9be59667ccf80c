"""The share of an adapter that arrives where it is served: servers in bfloat16 add it to products rounded before."""

from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch

from windlass.ranks import collectives
from windlass.serve.probe import fit_slope, subtract
from windlass.train.base_alone import BaseAlone
from windlass.train.batches import Batches
from windlass.train.collate import Batch
from windlass.train.fsdp import get_device, list_fsdp_modules
from windlass.train.head import Head
from windlass.train.kernels.products import as_served
from windlass.train.precision import in_float32


@torch.no_grad()
def measure_share(batches: Batches, causal_lm: Any, base: BaseAlone) -> tuple[float, float] | None:
    """Return the share by the first batch's supervised tokens, and its standard error. A collective.

    None if the exact effect is not to be had: of shards, whose ranks would wait for one that runs out of memory; of
    rows that ranks share; where float32 doesn't fit into memory, which is no reason to lose a run.
    """
    if list_fsdp_modules(causal_lm) or batches.readers < collectives.get_world_size():
        return None
    try:
        effects = measure_effects(next(batches.epoch(0)), causal_lm, base)
    except torch.OutOfMemoryError:
        effects = []
    of_ranks = collectives.all_gather(effects)
    if not all(of_ranks):
        return None
    exact, served = (list(chain.from_iterable(of_rank[kind] for of_rank in of_ranks)) for kind in range(2))
    return fit_slope(exact, served)


def measure_effects(host_batch: Batch, causal_lm: Any, base: BaseAlone) -> list[list[float]]:
    """Return by how much the adapter changes the loss of each token: exactly, and as served in bfloat16."""
    device = get_device()
    batch = host_batch.to(device)
    effects = []
    for computing in (partial(in_float32, causal_lm), partial(as_served, device)):
        losses = []
        for which in (nullcontext, base.active):
            with which(), computing():
                hidden = causal_lm(**batch.inputs).last_hidden_state
                losses.append(Head(causal_lm).figures(hidden, batch.targets)[0].tolist())
        effects.append(subtract(*losses))
    return effects
