"""Evaluation between steps: the loss of the validation rows."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.observe.recorder import Recorder
from windlass.ranks import collectives
from windlass.ranks.rank import StopSignal
from windlass.runfile import RunFile
from windlass.train.batches import Batch, Batches
from windlass.train.console import Progress
from windlass.train.loss import SourceLosses
from windlass.train.preference import Preference
from windlass.train.samples import Samples
from windlass.train.step import Number, TrainedModel


class EvaluationSums(NamedTuple):
    """What an evaluation adds up over batches and ranks, in one vector of float64."""

    supervised: Number  # tokens, or pairs
    interrupted: Number  # ranks that received a signal
    loss: Number  # summed over supervised tokens or pairs, as all that follows
    figures: Any  # the objective's; losses per data set, then their tokens or pairs

    @classmethod
    def unpack(cls, sums: Tensor | Sequence[float]) -> Self:
        numbers = cls._fields.index("figures")
        return cls._make([*sums[:numbers], sums[numbers:]])


@dataclass(eq=False)
class Evaluator:
    """Evaluates the model on the validation rows."""

    run: RunFile
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
        by_source = SourceLosses(self.batches.names, model.device, torch.float64)
        sum_batch = partial(_sum_tokens, model, by_source)
        if self.run.objective.of_pairs:
            sum_batch = partial(_sum_pairs, model, Preference(self.run, by_source))
        names = self.run.objective.figures
        size = EvaluationSums._fields.index("figures") + len(names) + len(by_source.sums)
        sums = torch.zeros(size, dtype=torch.float64, device=model.device)
        requested = None  # a stop signal up to the previous batch: reading it then lets the device run ahead
        with model.adapters.unchanged():
            for host_batch in self.batches.epoch(0):
                self.recorder.mark("pause")
                self.progress.start_evaluation(step)
                batch = host_batch.to(model.device)
                with torch.no_grad(), model.autocast:
                    figures = sum_batch(batch)
                counts = figures.new_tensor([host_batch.supervised, self.stop_signal.received])
                vector = torch.cat([counts, figures])
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
        of_sources = by_source.means(total.figures[len(names) :])
        means = of_sources if by_source.names else dict.fromkeys(self.batches.names, loss)
        return {
            "eval_loss": loss,
            **{f"eval_{name}_loss": mean for name, mean in means.items()},
            **{f"eval_{name}": value / supervised for name, value in zip(names, total.figures, strict=False)},
            "eval_num_tokens": tokens,
            "eval_runtime": time.monotonic() - began,
        }


def _sum_tokens(model: TrainedModel, by_source: SourceLosses, batch: Batch) -> Tensor:
    """Return the summed loss of a batch's tokens, TOKEN_FIGURES, and the losses per data set."""
    figures = model.causal_lm(**batch.inputs, per_token=True)
    if by_source.names and "sources" in batch.inputs:
        by_source.add(batch.inputs["sources"], figures[0])
    return torch.cat([figures.double().sum(1), by_source.take()])


def _sum_pairs(model: TrainedModel, preference: Preference, batch: Batch) -> Tensor:
    """Return the summed loss of a batch's pairs, PAIR_FIGURES, and the losses per data set."""
    assert batch.pairs is not None
    loss = preference.compute(model.causal_lm(**batch.inputs, summed=False), batch.pairs)
    return torch.cat([loss.double()[None], preference.take()])
