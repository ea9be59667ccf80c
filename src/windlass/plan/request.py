"""Read the layout that a run file requests."""

from typing import Any

from windlass import hardware
from windlass.errors import UserError
from windlass.plan.layout import AUTO, OPEN, Layout
from windlass.runfile import Loaded, RunFile


def read_request(loaded: Loaded) -> Layout:
    """Return the layout that a run file requests."""
    run = loaded.run
    nodes, gpus_per_node = run.cluster.size
    if run.layout.ranks not in (None, nodes * gpus_per_node):
        gpus = f"{nodes} x {gpus_per_node} = {nodes * gpus_per_node} GPUs"
        problem = f"{run.layout.ranks} ranks, but the run is planned for {gpus}"
        hint = "leave layout.ranks out, or set cluster.nodes and cluster.gpus_per_node"
        raise UserError(problem, loaded.where("layout.ranks"), hint, "broken-rule")
    given: dict[str, Any] = {}
    for key, open_value in OPEN.items():
        value = getattr(run.layout, key, None)
        given[key] = open_value if value in (None, AUTO) else value
    recompute: list[bool | str] = [
        run.train.gradient_checkpointing,
        run.layout.activation_checkpointing,
    ]  # two names of one setting
    offload = run.train.offload_activations
    if offload != AUTO:
        given["offload_activations"] = offload
        recompute.append(offload or AUTO)  # what is offloaded are the inputs of recomputed layers
    # True values other than true say what is kept.
    given["activation_checkpointing"] = next((bool(value) for value in recompute if value != AUTO), None)
    precision = "bf16"
    if run.train.fp16:
        precision = "fp16"
    elif run.train.bf16 is False or (run.train.bf16 == AUTO and _computes_in_float32(run)):
        precision = "no"
    name, key = run.layout.named
    return Layout(name, loaded.where(key) if key else "", nodes, gpus_per_node, **given, precision=precision)


def _computes_in_float32(run: RunFile) -> bool:
    """Return whether a run of float32 weights that leaves train.bf16 open is for a processor that only emulates it."""
    if run.model.torch_dtype != "float32" or hardware.has_bf16_products():
        return False
    return (run.cluster.gpu or hardware.read_gpu_name()) == "cpu"
