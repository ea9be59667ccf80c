"""Evaluation between steps: the loss of the validation rows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from windlass.train.loss import SourceLosses
from windlass.train.optimizer import is_metric_scheduler

if TYPE_CHECKING:
    from windlass.train.loop import Loop


def evaluate(loop: Loop) -> bool:
    """Compute the mean loss of the validation rows. A stop signal interrupts it; the evaluation then stays due."""
    assert loop.validation is not None
    began = time.monotonic()
    loop.causal_lm.eval()
    loop.set_optimizer_mode("eval")
    by_set = SourceLosses(loop.validation.names, loop.device, torch.float64)
    # Loss, correct first choices, entropy, tokens; interruptions; then per data set.
    sums = torch.zeros(5 + len(by_set.sums), dtype=torch.float64, device=loop.device)
    requested = None  # a stop signal up to the previous batch: reading it then lets the device run ahead
    with loop.adapters.unchanged():
        for host_batch in loop.validation.epoch(0):
            loop.recorder.mark("pause")
            loop.progress.start_evaluation(loop.step)
            with torch.no_grad(), loop.autocast:
                figures = loop.causal_lm(**(inputs := host_batch.to(loop.device).inputs), per_token=True)
            if by_set.names and "sources" in inputs:
                by_set.add(inputs["sources"], figures[0])
            counts = figures.new_tensor([host_batch.supervised, loop.stop_signal.received])
            of_batch = torch.cat([figures.double().sum(1), counts.double(), by_set.take()])
            if loop.replicas.world > 1:
                dist.all_reduce(of_batch)
            sums += of_batch
            if requested is not None and bool(requested):  # an evaluation can outlast the grace period
                break
            requested = of_batch[4]
    loop.causal_lm.train()
    loss, right, entropy, tokens, interrupted, *of_sets = sums.tolist()
    loop.stopped = loop.evaluation_due = interrupted > 0
    if interrupted:
        return False
    loop.eval_loss = loss / max(tokens, 1)
    if is_metric_scheduler(loop.train):
        loop.scheduler.step(loop.eval_loss)
    named = by_set.means(of_sets) if by_set.names else dict.fromkeys(loop.validation.names, loop.eval_loss)
    metrics = {
        "eval_loss": loop.eval_loss,
        **{f"eval_{name}_loss": mean for name, mean in named.items()},
        "eval_mean_token_accuracy": right / max(tokens, 1),
        "eval_entropy": entropy / max(tokens, 1),
        "eval_num_tokens": loop.tokens,
        "eval_runtime": time.monotonic() - began,
    }
    loop.recorder.event("eval", loop.step, **metrics)
    loop.progress.end_evaluation(loop.step, loop.eval_loss)
    loop.log(metrics)
    if loop.samples is not None:
        loop.samples.generate(loop)
    return True
