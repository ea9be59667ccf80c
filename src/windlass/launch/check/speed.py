"""The speed of each GPU of a node, compared with its kind and the other nodes': a short `windlass calibrate`."""

import statistics
from collections.abc import Mapping, Sequence

from windlass.hardware import interpolate
from windlass.launch.check.machine import OTHER_NODE
from windlass.launch.check.results import Context, Result, failed, passed, skipped, warned
from windlass.plan.script import AnyPlan

Speeds = Mapping[str, Mapping[str, float] | str]  # GPU of a node -> measurement -> rate, or why there is none
SLOW_SHARE = 0.75  # of its kind's or the other GPUs' rate: lowered clocks, a bad slot, another process
SIDE = 4096  # of the product
ELEMENTS = 1 << 27  # of the addition
COPIED = 256 << 20  # bytes of the copy
UNITS = {"products": "TFLOP/s", "memory": "GB/s", "host link": "GB/s"}
TITLE = "GPU speed"


def measure_gpus(local_rank: str | None = None) -> Speeds:
    """Measure the GPUs, about a second each. `local_rank`: only that one, if each rank checks for itself."""
    import torch

    from windlass import measure

    if not torch.cuda.is_available():
        return {}
    measured = dict[str, Mapping[str, float] | str]()
    own = [int(local_rank)] if local_rank and local_rank.isdigit() else range(torch.cuda.device_count())
    for index in own:
        device = torch.device("cuda", index)
        try:
            ((*_, products),) = measure.measure_products(device, torch.bfloat16, [(SIDE, SIDE)])
            memory = measure.measure_memory(device, ELEMENTS)
            copied = measure.measure_copy(device, COPIED)
            measured[f"GPU {index}"] = {"products": products, "memory": memory, "host link": copied}
            torch.cuda.empty_cache()
        except RuntimeError as error:  # it is full, or broken
            measured[f"GPU {index}"] = str(error).partition("\n")[0]
    return measured


def check_here(c: Context) -> list[Result]:
    """Measure the only node's GPUs if possible."""
    if c.plan is None or "torch" not in c.have or c.plan.machine.gpu.name == "cpu":
        return []
    return [check_gpu_speed(c.plan, [measure_gpus(c.environ.get("LOCAL_RANK"))], [""])]


def check_gpu_speed(plan: AnyPlan, by_node: Sequence[Speeds | None], names: Sequence[str]) -> Result:
    """Compare each rate of each GPU with the plan's figure for such a GPU and the median of all."""
    rates = plan.machine.rates
    basis = plan.machine.rates.basis
    kind = {
        "products": interpolate(rates.products["bfloat16"], SIDE, SIDE),
        "memory": rates.memory_gb_per_second,
        "host link": rates.host_link_gb_per_second,
    }
    found = {
        f"{name} {gpu}".strip(): speeds
        for name, node in zip(names, by_node, strict=True)
        for gpu, speeds in (node or {}).items()
    }
    if failures := "; ".join(f"{gpu}: {why}" for gpu, why in found.items() if isinstance(why, str)):
        return failed(TITLE, failures, f"end what else runs on it; {OTHER_NODE}")
    every = {gpu: speeds for gpu, speeds in found.items() if not isinstance(speeds, str)}
    if not every:
        return skipped(TITLE, "torch sees no GPU here")
    slow = []
    for name, unit in UNITS.items():
        median = statistics.median(speeds[name] for speeds in every.values())
        for gpu, speeds in every.items():
            expected, whose = max((kind[name], f"{plan.machine.gpu.name} by {basis}"), (median, "the median GPU"))
            if speeds[name] < SLOW_SHARE * expected:
                share = f"{speeds[name] / expected:.0%} of {whose}'s {expected:,.4g}"
                slow.append(f"{gpu}: {name} {speeds[name]:,.4g} {unit}, {share}")
    products = [speeds["products"] for speeds in every.values()]
    count = "1 GPU" if len(every) == 1 else f"{len(every)} GPUs"
    seen = f"{count}: products {min(products):,.4g} to {max(products):,.4g} TFLOP/s"
    if slow:
        hint = f"other processes, power or heat: nvidia-smi -q -d PERFORMANCE; {OTHER_NODE}"
        return warned(TITLE, "; ".join(slow) + f". {seen}", hint)
    return passed(TITLE, f"{seen}, as {plan.machine.gpu.name} by {basis}")
