"""Losses of pairs: DPO and ORPO, from the summed log-probabilities of a chosen and a rejected answer."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from windlass.runfile.fields import RunFile
from windlass.runfile.objectives import PAIR_FIGURES, Dpo, Orpo
from windlass.train.collate import Batch, Pairs
from windlass.train.loss import SourceLosses


class PairAnswers(NamedTuple):
    """The answers of a micro-batch. Shape [pairs, 2]: chosen, rejected."""

    logps: Tensor  # summed over an answer's tokens
    lengths: Tensor  # tokens
    reference: Tensor  # as logps, of the model before step 1


class PairOutcome(NamedTuple):
    """Losses of pairs, and the rewards that they imply."""

    losses: Tensor  # [pairs]
    rewards: Tensor  # [pairs, 2], without gradient
    logps: Tensor  # [pairs, 2], without gradient: as the objective compares them

    @property
    def preferred(self) -> Tensor:
        """Whether the chosen answer has the higher reward, 1 or 0. A tie is 0, as in TRL: the reference itself."""
        return (self.rewards[:, 0] > self.rewards[:, 1]).float()


def dpo_loss(settings: Dpo, answers: PairAnswers) -> PairOutcome:
    """Return the loss of DPO, or of IPO. https://arxiv.org/abs/2305.18290, https://arxiv.org/abs/2310.12036"""
    ratios = answers.logps - answers.reference
    scores = ratios / answers.lengths if settings.length_normalized or settings.loss == "ipo" else ratios
    margins = scores[:, 0] - scores[:, 1]
    if settings.loss == "ipo":
        losses = (margins - 1 / (2 * settings.beta)) ** 2
    else:
        # With a share of labels flipped, the loss whose expectation is that of the true labels:
        # https://arxiv.org/abs/2403.00409
        flipped = settings.label_smoothing
        as_given = -logsigmoid(settings.beta * margins)
        other_way = -logsigmoid(-settings.beta * margins)
        losses = ((1 - flipped) * as_given - flipped * other_way) / (1 - 2 * flipped) if flipped else as_given
    if settings.sft_weight:
        losses = losses - settings.sft_weight * answers.logps[:, 0] / answers.lengths[:, 0]
    return PairOutcome(losses, settings.beta * ratios.detach(), answers.logps.detach())


def orpo_loss(settings: Orpo, answers: PairAnswers) -> PairOutcome:
    """Return the loss of ORPO, of means over tokens. https://arxiv.org/abs/2403.07691, equations 6 and 7"""
    means = answers.logps / answers.lengths
    log_odds = means - _log1mexp(means)
    penalty = -logsigmoid(log_odds[:, 0] - log_odds[:, 1])
    return PairOutcome(settings.beta * penalty - means[:, 0], settings.beta * means.detach(), means.detach())


def _log1mexp(values: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of x < 0, exact near 0 and far from it."""
    near = values > -math.log(2)
    # Where the other branch is taken, its argument is replaced: an infinite gradient times 0 would be NaN.
    by_expm1 = torch.log(-torch.expm1(torch.where(near, values, -1.0)))
    by_log1p = torch.log1p(-torch.exp(torch.where(near, -1.0, values)))
    return torch.where(near, by_expm1, by_log1p)


class Preference:
    """The objective of a run on pairs."""

    def __init__(self, run: RunFile, sources: SourceLosses) -> None:
        self.name = run.train.objective
        self.settings: Dpo | Orpo = run.dpo if self.name == "dpo" else run.orpo
        self.sources = sources  # losses by data set
        self.figures = torch.zeros(len(PAIR_FIGURES), device=sources.sums.device, dtype=sources.sums.dtype)

    def compute(self, log_probs: Tensor, batch: Batch) -> Tensor:
        """Return the summed loss of a micro-batch's pairs, and add up what is recorded of them."""
        pairs = batch.pairs
        assert pairs is not None
        outcome = self.compare(measure_answers(log_probs, pairs))
        real = pairs.lengths.view(-1, 2)[:, 0] > 0
        losses = torch.where(real, outcome.losses, 0)
        with torch.no_grad():
            chosen, rejected = outcome.rewards.unbind(1)
            figures = [chosen, rejected, chosen - rejected, outcome.preferred, *outcome.logps.unbind(1)]
            self.figures += torch.where(real, torch.stack(figures), 0).sum(1)
            if pairs.sources is not None:
                self.sources.add(pairs.sources[real], losses.detach()[real])
        return losses.sum()

    def compare(self, answers: PairAnswers) -> PairOutcome:
        if isinstance(self.settings, Dpo):
            return dpo_loss(self.settings, answers)
        return orpo_loss(self.settings, answers)

    def take(self) -> Tensor:
        """Return the sums since the last call."""
        figures = self.figures
        self.figures = torch.zeros_like(figures)
        return torch.cat([figures, self.sources.take()])

    def describe(self, sums: Sequence[float], pairs: float) -> dict[str, Any]:
        """Return the recorded means of all ranks' pairs, by name."""
        count = len(PAIR_FIGURES)
        means = [value / max(pairs, 1) for value in sums[:count]]
        return {
            "preference": dict(zip(PAIR_FIGURES, means, strict=True)),
            **self.sources.describe(sums[count:], pairs),
        }


def measure_answers(log_probs: Tensor, pairs: Pairs) -> PairAnswers:
    """Sum the tokens of each answer. A filler, which has none, has any log-probability that objectives can take."""
    of_fillers = -(pairs.lengths == 0).to(log_probs.dtype)
    logps = of_fillers.index_add(0, pairs.sequences, log_probs).view(-1, 2)
    lengths = pairs.lengths.clamp(min=1).view(-1, 2)
    reference = pairs.reference.view(-1, 2) if len(pairs.reference) else torch.zeros_like(logps)
    return PairAnswers(logps, lengths, reference)
