"""Evaluation between steps: the loss of the validation rows."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.observe.recorder import Recorder
from windlass.ranks import collectives
from windlass.ranks.rank import StopSignal
from windlass.train.batches import Batches
from windlass.train.console import Progress
from windlass.train.loss import SourceLosses
from windlass.train.samples import Samples
from windlass.train.step import Number, TrainedModel


class EvaluationSums(NamedTuple):
    """What an evaluation adds up over batches and ranks, in one vector of float64."""

    loss: Number  # summed over supervised tokens, as the next two
    correct: Number  # first choices that are the next token
    entropy: Number
    supervised: Number  # tokens
    interrupted: Number  # ranks that received a signal
    by_source: Any  # losses per data set, then tokens

    @staticmethod
    def pack(figures: Tensor, supervised: int, interrupted: bool, by_source: Tensor) -> Tensor:
        """Return a batch's vector. figures: per token its loss, whether the first choice is correct, entropy."""
        counts = figures.new_tensor([supervised, interrupted])
        return torch.cat([figures.double().sum(1), counts.double(), by_source])

    @classmethod
    def unpack(cls, sums: Tensor | Sequence[float]) -> Self:
        numbers = cls._fields.index("by_source")
        return cls._make([*sums[:numbers], sums[numbers:]])


@dataclass(eq=False)
class Evaluator:
    """Evaluates the model on the validation rows."""

    batches: Batches
    model: TrainedModel
    stop_signal: StopSignal
    recorder: Recorder
    progress: Progress
    samples: Samples | None = None  # prompts continued after an evaluation

    def evaluate(self, step: int, tokens: int) -> dict[str, float] | None:
        """Return the mean loss of the validation rows and more about them; None if a stop signal interrupted it.

        tokens: those that were trained on up to this step.
        """
        began = time.monotonic()
        model = self.model
        model.causal_lm.eval()
        losses = SourceLosses(self.batches.names, model.device, torch.float64)
        size = EvaluationSums._fields.index("by_source") + len(losses.sums)
        sums = torch.zeros(size, dtype=torch.float64, device=model.device)
        requested = None  # a stop signal up to the previous batch: reading it then lets the device run ahead
        with model.adapters.unchanged():
            for host_batch in self.batches.epoch(0):
                self.recorder.mark("pause")
                self.progress.start_evaluation(step)
                inputs = host_batch.to(model.device).inputs
                with torch.no_grad(), model.autocast:
                    figures = model.causal_lm(**inputs, per_token=True)
                if losses.names and "sources" in inputs:
                    losses.add(inputs["sources"], figures[0])
                supervised = host_batch.supervised
                vector = EvaluationSums.pack(figures, supervised, self.stop_signal.received, losses.take())
                if collectives.get_world_size() > 1:
                    dist.all_reduce(vector)
                sums += vector
                if requested is not None and bool(requested):  # an evaluation can outlast the grace period
                    break
                requested = EvaluationSums.unpack(vector).interrupted
        model.causal_lm.train()
        total = EvaluationSums.unpack(sums.tolist())
        if total.interrupted:
            return None
        supervised = max(total.supervised, 1)
        loss = total.loss / supervised
        means = losses.means(total.by_source) if losses.names else dict.fromkeys(self.batches.names, loss)
        return {
            "eval_loss": loss,
            **{f"eval_{name}_loss": mean for name, mean in means.items()},
            "eval_mean_token_accuracy": total.correct / supervised,
            "eval_entropy": total.entropy / supervised,
            "eval_num_tokens": tokens,
            "eval_runtime": time.monotonic() - began,
        }
