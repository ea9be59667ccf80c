"""The sections of preference objectives: what is minimized on pairs of a chosen and a rejected answer."""

from typing import Annotated, Literal

from pydantic import Field

from windlass.runfile.values import Positive, Section

Objective = Literal["sft", "dpo", "orpo"]


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
