"""Evaluation between steps: the loss of the validation rows."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from windlass.observe import steps
from windlass.observe.recorder import Recorder
from windlass.ranks.rank import StopSignal
from windlass.runfile import RunFile
from windlass.train.base_alone import BaseAlone, BaseFigures
from windlass.train.batches import Batches, sum_over_batches
from windlass.train.collate import Batch
from windlass.train.console import Progress
from windlass.train.kept import measure_kept_sets
from windlass.train.loss import SourceLosses
from windlass.train.model import TrainedModel
from windlass.train.preference import Preference
from windlass.train.served import measure_share


@dataclass(eq=False)
class Evaluator:
    """Evaluates the model on the validation rows."""

    run: RunFile
    batches: Batches
    model: TrainedModel
    stop_signal: StopSignal
    recorder: Recorder
    progress: Progress
    base: BaseAlone
    base_figures: BaseFigures | None = None  # None: a loss that says nothing of the base
    kept: Batches | None = None  # rows that should not get worse

    def evaluate(self, step: int, tokens: int) -> dict[str, float] | None:
        """Return the mean loss of the validation rows and more about them; None if a stop signal interrupted it.

        tokens: those that were trained on up to this step.
        """
        began = time.monotonic()
        self.model.causal_lm.eval()
        of_base = self._evaluate_base(step)
        figures = None if of_base is None else self._measure(step)
        kept = None if figures is None else self._measure_kept(step)
        self.model.causal_lm.train()
        if of_base is None or figures is None or kept is None:
            return None
        return {
            **figures,
            **compare_with_base(figures, of_base, self.batches.names),
            **{f"{steps.KEPT}{name}": value for name, value in kept.items()},
            "eval_num_tokens": tokens,
            "eval_runtime": time.monotonic() - began,
        }

    def _evaluate_base(self, step: int) -> dict[str, float] | None:
        """Return the figures of the base alone, measured the first time; empty if there are none to compare with."""
        if self.base_figures is None:
            return {}
        known = self.base_figures.read()
        if known is None:
            with ExitStack() as stack:
                stack.enter_context(self.base.active())
                stack.enter_context(self.model.eager())  # compiled layers would be compiled once more, for one use
                known = self._measure(step)
            if known is not None:
                self.base_figures.write(known)
        return known

    def _measure_kept(self, step: int) -> dict[str, float] | None:
        """Return what became of the kept sets; None if a stop signal interrupted it."""
        if self.kept is None:
            return {}

        model = self.model
        with model.adapters.unchanged(), model.eager():  # both without compiling, which rounds otherwise
            begin_batch = partial(self._begin_batch, step)
            return measure_kept_sets(
                self.kept, model.causal_lm, self.base, autocast=model.autocast, begin_batch=begin_batch
            )

    def measure_share(self) -> tuple[float, float] | None:
        """Return the share of the adapter that servers in bfloat16 compute, and its standard error; None if sharded."""
        model = self.model
        model.causal_lm.eval()
        with model.adapters.unchanged(), model.eager():
            return measure_share(self.batches, model.causal_lm, self.base)

    def _begin_batch(self, step: int) -> bool:
        """Return whether a stop signal has come."""
        self.recorder.mark("pause")
        self.progress.start_evaluation(step)
        return self.stop_signal.received

    def _measure(self, step: int) -> dict[str, float] | None:
        """Return the means over the validation rows; None if a stop signal interrupted it."""
        model = self.model
        by_source = SourceLosses(self.batches.names, model.device, torch.float64)
        sum_batch = partial(_sum_tokens, model, by_source)
        if self.run.objective.of_pairs:
            sum_batch = partial(_sum_pairs, model, Preference(self.run, by_source))

        def measure(batch: Batch) -> Tensor:
            with model.evaluating():
                figures = sum_batch(batch)
            return torch.cat([figures.new_tensor([batch.supervised]), figures])

        with model.adapters.unchanged():
            sums = sum_over_batches(self.batches, measure, partial(self._begin_batch, step))
        if sums is None:
            return None
        names = self.run.objective.figures
        supervised, total, *figures = sums
        supervised = max(supervised, 1)
        loss = total / supervised
        of_sources = by_source.means(figures[len(names) :])
        means = of_sources if by_source.names else dict.fromkeys(self.batches.names, loss)
        return {
            "eval_loss": loss,
            **{f"eval_{name}_loss": mean for name, mean in means.items()},
            **{f"eval_{name}": value / supervised for name, value in zip(names, figures, strict=False)},
        }


def compare_with_base(
    figures: Mapping[str, float], of_base: Mapping[str, float], names: Sequence[str]
) -> dict[str, float]:
    """Return the base's loss and how far an evaluation is below it, of all rows and of each of several sets."""
    if not of_base:
        return {}
    keys = {"": "eval_loss", **{f"/{name}": f"eval_{name}_loss" for name in names if len(names) > 1}}
    gains = {f"eval_gain{of}": of_base[key] - figures[key] for of, key in keys.items() if key in figures}
    return {"eval_base": of_base["eval_loss"], **gains}


def _sum_tokens(model: TrainedModel, by_source: SourceLosses, batch: Batch) -> Tensor:
    """Return the summed loss of a batch's tokens, TOKEN_FIGURES, and the losses per data set."""
    figures = model.head.figures(model.causal_lm(**batch.inputs).last_hidden_state, batch.targets)
    if batch.sources is not None:
        by_source.add(batch.sources, figures[0])
    return torch.cat([figures.double().sum(1), by_source.take()])


def _sum_pairs(model: TrainedModel, preference: Preference, batch: Batch) -> Tensor:
    """Return the summed loss of a batch's pairs, PAIR_FIGURES, and the losses per data set."""
    log_probs = model.head.log_probs(model.causal_lm(**batch.inputs).last_hidden_state, batch.targets)
    loss = preference.compute(log_probs, batch)
    return torch.cat([loss.double()[None], preference.take()])
