"""What a line of the step files holds: its fields, with units and meaning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

IGNORED: Final = -100  # label of a token on which no loss is computed
TOKENS, RATE = "tokens", "_per_second"  # what a language model's steps count, and what its rate is called

# Where an optimizer step's wall time goes. Together they are step_seconds.
PHASES: Final = ("data", "forward", "backward", "optimizer", "communication", "other")

# name -> (unit, meaning). A field that was not measured in a step is absent; one that this machine can't measure
# is absent throughout and named in meter-rank*.json under `unmeasured`.
FIELDS: Final[dict[str, tuple[str, str]]] = {
    "step": ("", "optimizer step, counted from 1"),
    "time": ("s", "end of the step, seconds since 1970"),
    "epoch": ("", "epochs trained so far, with the fraction"),
    "loss": ("nats", "mean loss per supervised token of the step, with the router's weighted balancing loss"),
    "source_loss": ("nats", "the same by the sets of a mix that had a token in the step"),
    "router_aux_loss": (
        "",
        "the router's balancing loss before its weight, mean of the micro-batches, if it is trained on",
    ),
    "grad_norm": ("", "norm of the gradient before clipping"),
    "learning_rate": ("", "rate that this step's update used, of the first parameter group"),
    "skipped": ("", "true: the gradients were not finite and the update was skipped"),
    "non_finite": ("", "those of `loss` and `grad_norm` that were not finite; they are null then"),
    "step_seconds": ("s", "wall time, without the pause before the step"),
    "data_seconds": ("s", "waiting for the data loader and moving the batch to the device"),
    "forward_seconds": ("s", "model forward"),
    "wait_seconds": (
        "s",
        "of forward: waiting for other ranks, going by the first micro-batch, if the base is sharded",
    ),
    "backward_seconds": ("s", "backward"),
    "optimizer_seconds": ("s", "clipping and the optimizer's update"),
    "communication_seconds": ("s", "collectives that the loop calls, with the wait for slower ranks"),
    "other_seconds": ("s", "the rest of the loop"),
    "pause_seconds": ("s", "evaluating, saving and logging before this step; not in step_seconds"),
    "meter_seconds": ("s", "what measuring this step cost"),
    "micro_batches": ("", "forward and backward passes in the step"),
    "sequences": ("", "rows of this rank's batches"),
    "rows": ("", "their numbers in the data set as prepared, if the loop knows them"),
    "tokens": ("", "tokens of this rank that are not padding"),
    "padded_tokens": ("", "padding that this rank computed on"),
    "supervised_tokens": ("", "tokens of this rank that count in the loss"),
    "masked_tokens": ("", "tokens of this rank that do not count in the loss"),
    "job_tokens": ("", "tokens of all ranks that are not padding, if the loop counts them"),
    "tokens_per_second": ("1/s", "tokens / step_seconds of this rank"),
    "model_tflops": ("TFLOP/s", "model arithmetic of this rank, recomputation not counted"),
    "mfu": ("", "model_tflops as a share of the GPU's dense BF16 peak"),
    "hfu": ("", "the same with recomputation counted"),
    "gpu_allocated_gib": ("GiB", "tensors on the GPU at the end of the step"),
    "gpu_reserved_gib": ("GiB", "reserved by the caching allocator at the end of the step"),
    "gpu_peak_gib": ("GiB", "peak of the allocated memory since the last sample"),
    "gpu_fragmentation": ("", "share of the reserved memory that no tensor uses"),
    "gpu_utilization": ("", "share of the last sample period in which a kernel ran (NVML)"),
    "gpu_memory_utilization": ("", "share of it in which memory was read or written (NVML)"),
    "gpu_power_watts": ("W", "power draw (NVML)"),
    "gpu_temperature_celsius": ("°C", "temperature of the chip (NVML)"),
    "gpu_sm_clock_mhz": ("MHz", "clock of the multiprocessors (NVML)"),
    "gpu_memory_clock_mhz": ("MHz", "clock of the memory (NVML)"),
    "gpu_throttle": ("", "reasons why the clock is held down (NVML); empty: none"),
    "pcie_sent_gb_per_second": ("GB/s", "GPU to host (NVML)"),
    "pcie_received_gb_per_second": ("GB/s", "host to GPU (NVML)"),
    "nvlink_sent_gb": ("GB", "over NVLink since the last sample (NVML)"),
    "nvlink_received_gb": ("GB", "over NVLink since the last sample (NVML)"),
    "infiniband_sent_gb": ("GB", "of this node, all ports, since the last sample"),
    "infiniband_received_gb": ("GB", "of this node, all ports, since the last sample"),
    "rss_gib": ("GiB", "resident memory of this rank's process"),
    "page_faults": ("", "major page faults since the last sample: memory read back from disk"),
    "cpu_cores": ("cores", "processors this process kept busy since the last sample"),
    "experts": ("", "per layer: `busiest` and `idlest` expert's share of the choices x experts, `unused` experts"),
}


def counted(unit: str) -> tuple[str, str]:
    """The fields that a loop over something else than tokens has in their place: images, images_per_second."""
    return unit, f"{unit}{RATE}"


def unit(names: Iterable[str]) -> str:
    """What a line with these fields counts."""
    found = set(names)
    return next((name.removesuffix(RATE) for name in found if name.removesuffix(RATE) in found - {name}), TOKENS)


def clock(seconds: float) -> str:
    """How long, as it is shown beside a step."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
