"""Objectives: what follows from each one, and the sections of those on pairs of a chosen and a rejected answer."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from windlass.errors import make_pasteable
from windlass.runfile.values import Positive, Section

ObjectiveName = Literal["sft", "dpo", "orpo"]
# Recorded besides the loss, by TRL's names: of an evaluation's tokens, of the pairs of a step or an evaluation.
TOKEN_FIGURES: Final = ("mean_token_accuracy", "entropy")
PAIR_FIGURES: Final = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
LOSS: Final = "loss"
ACCURACY: Final = "accuracy"


@dataclass(frozen=True, slots=True)
class Objective:
    """What follows from an objective for its rows, their batches and what is measured of them."""

    row: str = "row"
    """Name of a row in messages."""
    unit: str = "sequence"
    """Name of what batch sizes count."""
    sides: int = 1
    """Sequences of a row. The loss of pairs is computed from both log-probabilities."""
    may_pack: bool = True
    covered_percent: float = 99.5
    """Rows that fit uncut if data.max_length is chosen. A pair that doesn't fit is refused."""
    figures: tuple[str, ...] = TOKEN_FIGURES
    """Recorded of an evaluation besides the loss."""
    has_reference: bool = False
    """Whether losses are relative to the model before step 1."""
    measures: tuple[str, ...] = (LOSS,)
    """By which adapters can be ranked."""

    @property
    def of_pairs(self) -> bool:
        return self.sides == 2


_OF_PAIRS: Final = Objective(
    row="pair",
    unit="pair",
    sides=2,
    may_pack=False,
    covered_percent=100,
    figures=PAIR_FIGURES,
    measures=(LOSS, ACCURACY),
)
OBJECTIVES: Final[dict[ObjectiveName, Objective]] = {
    "sft": Objective(),
    "dpo": replace(_OF_PAIRS, has_reference=True),
    "orpo": _OF_PAIRS,
}


class Dpo(Section):
    """Direct preference optimization, in TRL's terms. The reference is the model as it is before step 1."""

    beta: Positive = 0.1
    """How far the adapter may move from the reference: larger keeps it closer. With `loss: ipo`, its regularization
    tau."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO's own. ipo: squared distance of the margin per token from 1 / (2 beta), which does not push margins
    without end."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are believed to be labelled the wrong way round (TRL's loss `robust`)."""
    length_normalized: bool = False
    """Divide each answer's log-ratio by its tokens (TRL's loss `sigmoid_norm`), so that longer answers weigh no more.
    `loss: ipo` always does."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the chosen answer's next-token loss, a mean over its tokens, which is added. It keeps the chosen
    answer's probability from falling along with the rejected one's."""


class Orpo(Section):
    """Odds-ratio preference optimization: the chosen answer's next-token loss and a penalty, without a reference."""

    beta: Positive = 0.1
    """Weight of the penalty: minus the log-sigmoid of the log odds ratio of chosen and rejected answer."""


def explain_other_losses(keys: Iterable[str], folder: Path) -> str:
    """Return why losses of trials that differ in these keys can't be compared; empty if they can."""
    named = " and ".join(dict.fromkeys(key for key in keys if key.partition(".")[0] in ("dpo", "orpo")))
    if not named:
        return ""
    compare = "`windlass best RUN_DIR --by accuracy` compares by what is preferred"
    return make_pasteable(f"{named}: another value is another loss; {compare}", RUN_DIR=str(folder))
