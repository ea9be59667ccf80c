"""Read the layout that a run file requests."""

from typing import Any

from windlass import hardware
from windlass.errors import Problem, raise_all
from windlass.observe.format import format_plural
from windlass.plan.layout import AUTO, OPEN, Layout
from windlass.runfile import Loaded, RunFile
from windlass.runfile.accelerate import CHECKPOINTING, IMPLIED

# The layout that a key of `layout` implies if none is named: so no key is ignored.
IMPLIED_BY = {key.partition(".")[2]: name for key, name in IMPLIED.items()} | {
    "reshard_after_forward": "",  # as its value says
    "shard": "full-shard",
    "offload": "full-shard",
}


def read_request(loaded: Loaded) -> Layout:
    """Return the layout that a run file requests. Report every disagreement."""
    run = loaded.run
    where = loaded.where
    nodes, gpus_per_node = run.cluster.size
    problems = []
    if run.layout.ranks not in (None, nodes * gpus_per_node):
        sizes = f"{format_plural(nodes, 'node')} x {format_plural(gpus_per_node, 'GPU')}"
        text = f"layout.ranks is {run.layout.ranks}, but {sizes} are {nodes * gpus_per_node}"
        hint = "leave layout.ranks out, or change cluster.nodes and cluster.gpus_per_node"
        problems.append(Problem(text, where("layout.ranks"), hint, "disagreement"))
    given: dict[str, Any] = {}
    for key, open_value in OPEN.items():
        value = getattr(run.layout, key, None)
        given[key] = open_value if value in (None, AUTO) else value
    written = (run.train.gradient_checkpointing, run.layout.activation_checkpointing)
    recompute = {bool(value) for value in written if value != AUTO}  # other true values say what is kept
    if len(recompute) > 1:
        text = f"activation checkpointing is {written[1]} here, but {written[0]} at {where(CHECKPOINTING[0])}"
        hint = "make the two agree, or keep one of them"
        problems.append(Problem(text, where(CHECKPOINTING[1]), hint, "disagreement"))
    raise_all(problems)
    offload = run.train.offload_activations
    given["offload_activations"] = None if offload == AUTO else offload
    # What is offloaded are the inputs of recomputed layers.
    given["activation_checkpointing"] = next(iter(recompute), given["offload_activations"] or None)
    precision = "bf16"
    if run.train.fp16:
        precision = "fp16"
    elif run.train.bf16 is False or (run.train.bf16 == AUTO and _computes_in_float32(run)):
        precision = "no"
    name, key = _name_layout(run)
    return Layout(name, where(key) if key else "", nodes, gpus_per_node, **given, precision=precision)


def _name_layout(run: RunFile) -> tuple[str, str]:
    """Return the layout's name, or `auto`, and the key that sets it."""
    section = run.layout
    if section.name != AUTO:
        return section.name, "layout.name"
    for key, name in IMPLIED_BY.items():
        value = getattr(section, key)
        if key == "reshard_after_forward" and value is not None:
            return "full-shard" if value else "no-reshard", f"layout.{key}"
        if value is True or (isinstance(value, int) and value > 1):
            return name, f"layout.{key}"
    return AUTO, ""


def _computes_in_float32(run: RunFile) -> bool:
    """Return whether a run of float32 weights that leaves train.bf16 open is for a processor that only emulates it."""
    if run.model.torch_dtype != "float32" or hardware.has_bf16_products():
        return False
    return (run.cluster.gpu or hardware.read_gpu_name()) == "cpu"
