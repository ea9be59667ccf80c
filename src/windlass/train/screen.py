"""What the user sees before the first step, and how everyone but windlass is kept quiet."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.text import Text

from windlass.observe.meter.summary import hardware
from windlass.train.folder import versions
from windlass.train.rank import Place

if TYPE_CHECKING:
    from windlass.plan import Plan


def quiet(here: Place) -> Console:
    """The one console of this run, on stderr; of ranks other than 0 it says nothing.

    Libraries' progress bars and warnings are switched off: what matters in them is checked and said by windlass.
    """
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for name in ("accelerate", "trl", "peft", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore")
    width = None if sys.stderr.isatty() else 240  # a log has no width to break lines at
    return Console(stderr=True, width=width, highlight=False, emoji=False, markup=False, quiet=here.rank != 0)


def header(console: Console, plan: Plan) -> None:
    """Model, adapter, layout, batch, machine: what this run is, in seven lines."""
    job, layout, adapter, batch = plan.loaded.run, plan.layout, plan.adapter, plan.batch
    total = sum(_count(parameter.shape) for parameter in plan.base.parameters)
    sequences = plan.schedule.global_sequences
    rows = {
        "model": f"{plan.base.name}: {plan.base.family.causal_lm}, {total:,} parameters",
        "adapter": f"rank {adapter.r}, {adapter.trainable:,} parameters ({adapter.trainable / total:.3%}): "
        + ", ".join(f"{target.pattern} in {target.part} x {len(target.modules)}" for target in adapter.targets),
        "layout": f"{layout.name} on {layout.ranks} ranks: {layout.reason}",
        "batch": f"{batch.micro} x {layout.ranks} ranks x {batch.accumulation} accumulated = {sequences} sequences"
        f" of up to {batch.length} tokens",
        "machine": machine(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "folder": job.train.output_dir,
    }
    for name, value in rows.items():
        console.print(Text(f"{name:9}", style="bold") + Text(str(value)))


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def machine() -> str:
    """GPUs with their memory, driver and network, or the CPU that stands in for them."""
    found = hardware()
    if not torch.cuda.is_available():
        return f"{found['processor']}, {found['memory_gib']} GiB, {torch.get_num_threads()} threads a rank, gloo"
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in found["gpus"])
    network = ", ".join(found["infiniband"]) or "no InfiniBand"
    return f"{gpus}, driver {found['driver']}, CUDA {found['cuda']}, {network}"
