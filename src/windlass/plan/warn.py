"""What of a run is possible, but most probably not meant so; each with the key that changes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass.data.sources import Rows
from windlass.plan.work import Shape

if TYPE_CHECKING:
    from windlass.plan import Plan

# Bytes of English text per token: WikiText-2 has 11.06 MB in 24,200 rows that are not blank, 110 tokens each.
BYTES_PER_TOKEN = 4.15
FEW_STEPS = 50  # a warm-up and a decay need some; an adapter hardly moves in fewer
SHORT = 0.5  # of max_length: below, rows are mostly padding, or the products small
# Trained parameters per token of the data: an adapter stores about two bits in each, text has about one a token.
LARGE = 100
SLOW = 1.2  # what larger micro-batches must gain


@dataclass(frozen=True, slots=True)
class Warning:
    text: str
    override: str = ""  # KEY=VALUE that changes it


def row_tokens(rows: Rows) -> int | None:
    """Tokens of a usual row, uncut; None if nobody knows."""
    if not rows.count or not rows.text_bytes:
        return None
    return math.ceil(rows.text_bytes / max(1, rows.count - rows.blank) / BYTES_PER_TOKEN)


def find_warnings(plan: Plan, rows: Rows, shape: Shape) -> Iterator[Warning]:
    """The gravest first."""
    yield from (Warning(f"lora.target_modules {text}") for text in plan.adapter.warnings)
    run, schedule, limit, tokens = plan.loaded.run, plan.schedule, plan.batch.length, row_tokens(rows)
    gains = {advice.change.replace(": ", "="): advice.gain for advice in plan.advice}
    steps, train = schedule.steps, run.train
    if steps is not None and steps < FEW_STEPS and train.max_steps <= 0:
        at_once = train.least_batch * plan.layout.ranks
        fewer = int((schedule.rows or 0) * train.num_train_epochs) // (FEW_STEPS * at_once)
        key = f"train.gradient_accumulation_steps={fewer}"
        if train.global_batch_size is not None:
            key = f"train.global_batch_size={fewer * at_once}"
        each = f"{steps} optimizer step{'s' * (steps != 1)}, each on {schedule.global_sequences} sequences"
        is_set = train.global_batch_size and plan.loaded.given("train.gradient_accumulation_steps")
        yield Warning(f"only {each}, is hardly any training", key if fewer and not is_set else "")
    if tokens and tokens > limit:
        key = f"data.max_length={1 << (tokens - 1).bit_length()}"
        yield Warning(f"rows have about {tokens:,} tokens and are cut at data.max_length {limit:,}", key)
    elif tokens and tokens <= SHORT * limit and not run.data.packing:
        text = f"rows have about {tokens:,} tokens, {tokens / limit:.0%} of data.max_length"
        if gain := gains.get("data.packing=true"):
            text += f"; packed, {gain:.1f} x as many tokens/s"
        yield Warning(text, "data.packing=true")
    key = "train.per_device_train_batch_size=auto"
    if gains.get(key, 0.0) >= SLOW and plan.machine.gpu.name != "cpu":
        text = (
            f"micro-batches of {plan.batch.micro} are too small for the GPU; larger ones are {gains[key]:.1f} x as fast"
        )
        yield Warning(text, key)
    yield from _large_adapter(plan, shape, tokens)


def _large_adapter(plan: Plan, shape: Shape, tokens: int | None) -> Iterator[Warning]:
    modules = [lora for layer, _ in shape.kinds for lora in (*layer.plain_lora, *layer.expert_lora)]
    break_even = {lora: lora.inputs * lora.outputs // (lora.inputs + lora.outputs) for lora in modules}
    if modules and (least := min(modules, key=lambda lora: break_even[lora] / lora.r)).r > break_even[least]:
        text = (
            f"at rank {least.r} the adapter of {least.leaf} is larger than its {least.outputs} x {least.inputs} weight"
        )
        yield Warning(text, f"lora.r={max(1, break_even[least] // 2)}")
        return
    seen = min(tokens or 0, plan.batch.length) * (plan.schedule.rows or 0)
    if plan.loaded.run.data.packing:
        seen = plan.batch.length * (plan.schedule.rows or 0)
    if seen and plan.adapter.trainable > LARGE * seen:
        text = f"{plan.adapter.trainable / 1e6:,.1f} M trained parameters for {seen / 1e6:,.1f} M tokens of data"
        smaller = max(1, int(plan.adapter.r * LARGE * seen / plan.adapter.trainable))
        yield Warning(f"{text}: a smaller rank does as well", f"lora.r={smaller}")
