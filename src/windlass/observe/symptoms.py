"""Find signs of trouble in a run in which nothing failed, for the report and for the live view."""

from collections.abc import Sequence
from typing import Any, Final

from windlass.observe.reader import NAN, as_list, as_number, get_path, median

MIN_STEPS: Final = 20  # before clipping and step times are checked
CLIPPED_SHARE: Final = 0.9  # of the steps
DRIFT: Final = 2.0  # times the share that a layer's busiest expert had at the start
SLOWER: Final = 1.5  # times the planned seconds per step
MORE_MEMORY: Final = 1.1  # times the planned peak


def find_symptoms(
    steps: int,
    clipped_share: float,
    max_grad_norm: float,
    busiest: Sequence[Sequence[float]],
    *,
    plan: Any,
    step_seconds: float,
    gpu_peak_gib: float,
) -> list[str]:
    """Return one sentence per symptom. What is unknown is NaN; a run without a GPU has no `gpu_peak_gib`.

    busiest: for each sampled step, of each layer, the busiest expert's share x experts. plan: that of plan.json."""
    plan = None if has_shared_steps(plan) else plan
    symptoms = []
    if steps >= MIN_STEPS and clipped_share >= CLIPPED_SHARE:
        symptoms.append(f"{clipped_share:.0%} of the gradients were clipped to max_grad_norm {max_grad_norm:g}")
    layer, before, after = _find_expert_drift(busiest)
    if after >= DRIFT * before:
        text = f"the busiest expert of layer {layer} takes {after:.1f} times an even share of the tokens"
        symptoms.append(f"{text}, {before:.1f} times at the start")
    planned = as_number(get_path(plan, "estimate", "step_seconds"))
    is_on_gpu = gpu_peak_gib == gpu_peak_gib  # on a CPU the plan's figures are rough
    if is_on_gpu and steps >= MIN_STEPS and 0 < planned * SLOWER < step_seconds:
        text = f"a step takes {step_seconds:.3g} s, {step_seconds / planned:.1f} times the planned {planned:.3g} s"
        symptoms.append(text)
    planned_gib = as_number(get_path(plan, "memory", "gpu_gib"))
    if 0 < planned_gib * MORE_MEMORY < gpu_peak_gib:
        symptoms.append(f"the peak memory is {gpu_peak_gib:.1f} GiB, the plan has {planned_gib:.1f} GiB")
    return symptoms


def has_shared_steps(plan: Any) -> bool:
    """Return whether a trial was to train together with others: its plan has the time and memory of it alone."""
    return any(len(as_list(get_path(group, "names"))) > 1 for group in as_list(get_path(plan, "groups")))


def _find_expert_drift(busiest: Sequence[Sequence[float]]) -> tuple[int, float, float]:
    """Return the layer whose busiest expert gained most, and the medians of the first and last quarter of samples."""
    quarter = len(busiest) // 4
    if not quarter:
        return 0, NAN, NAN
    drifts = []
    for layer in range(min(map(len, busiest))):
        before = median(sample[layer] for sample in busiest[:quarter])
        after = median(sample[layer] for sample in busiest[-quarter:])
        if before > 0 and after > 0:
            drifts.append((after / before, layer, before, after))
    return max(drifts)[1:] if drifts else (0, NAN, NAN)
