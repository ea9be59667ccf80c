"""Compute a probe: log-probabilities of rows under every hypothesis about what a server computes.

An adapter is changed in place and restored: groups of its modules are switched off as PEFT does, scales are multiplied,
experts' factors are packed in another order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Protocol

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from windlass.serve.probe import (
    ADAPTER,
    BASE,
    DECODED_ROWS,
    DECODED_TOKENS,
    POSITIONS,
    TEXT,
    describe_difference,
    list_logprobs,
)

SCALES: Final = (0.5, 2.0)
DIGITS: Final = 5
Hypothesis = Callable[[], AbstractContextManager[None]]


class Scorer(Protocol):
    """The model, as a process or all ranks have it."""

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Return each row's log-probabilities, from its second token on."""

    def choose(self, rows: Sequence[list[int]]) -> list[int]:
        """Return the likeliest token after each row."""


class PlainScorer:
    """A model that this process has alone, with plain logits."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def _compute_logits(self, row: list[int]) -> torch.Tensor:
        ids = torch.tensor([row], device=self.device)
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits.float()

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        scores = []
        for row in rows:
            log_probs = torch.log_softmax(self._compute_logits(row), -1)[:-1]
            targets = torch.tensor(row[1:], device=log_probs.device)
            scores.append(log_probs.gather(1, targets[:, None])[:, 0].tolist())
        return scores

    def choose(self, rows: Sequence[list[int]]) -> list[int]:
        return [int(self._compute_logits(row)[-1].argmax()) for row in rows]


def compute_probe(
    model: PeftModel, rows: Sequence[dict[str, Any]], scorer: Scorer, tokenizer: Any, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return what a probe has of the model. rows: of `choose_rows`; more are decoded from them. A collective."""
    hypotheses = list_hypotheses(model)
    say(f"probe     {len(rows)} rows under {len(hypotheses)} hypotheses: base, adapter, and parts of the adapter")
    prompts = [row["ids"][: row["start"] or len(row["ids"]) // 2] for row in rows[:DECODED_ROWS]]
    decoded = {}
    for name in (BASE, ADAPTER):
        with hypotheses[name]():
            decoded[name] = decode(scorer, prompts)
    probed: list[dict[str, Any]] = [dict(row) for row in rows]
    for prompt, by_base, by_adapter in zip(prompts, decoded[BASE], decoded[ADAPTER], strict=True):
        row: dict[str, Any] = {"ids": [*prompt, *by_adapter], "start": len(prompt), "decoded": True, "by_base": by_base}
        if tokenizer is not None:
            row["texts"] = {BASE: tokenizer.decode(by_base), ADAPTER: tokenizer.decode(by_adapter)}
        probed.append(row)
    scores = {}
    for name, changed in hypotheses.items():
        with changed():
            scores[name] = scorer.score([row["ids"] for row in probed])
    for number, row in enumerate(probed):
        of_row = {name: scores[name][number] for name in hypotheses}
        row["positions"] = choose_positions(row, of_row)
        kept = {name: [round(values[i - 1], DIGITS) for i in row["positions"]] for name, values in of_row.items()}
        row["logprobs"] = kept
    probe: dict[str, Any] = {"hypotheses": list(hypotheses), "rows": probed}
    probe["difference"] = describe_difference(list_logprobs(probe, BASE), list_logprobs(probe, ADAPTER))
    if tokenizer is not None:
        probe["tokenizer"] = {"text": TEXT, "ids": tokenizer(TEXT, add_special_tokens=False)["input_ids"]}
    return probe


def decode(scorer: Scorer, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the likeliest continuation of each prompt."""
    rows = [list(prompt) for prompt in prompts]
    for _ in range(DECODED_TOKENS):
        for row, token in zip(rows, scorer.choose(rows), strict=True):
            row.append(token)
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def choose_positions(row: dict[str, Any], scores: dict[str, list[float]]) -> list[int]:
    """Return the positions on which the hypotheses differ most; of a decoded row all that were decoded."""
    if row.get("decoded"):
        return list(range(row["start"], len(row["ids"])))
    columns = list(zip(*scores.values(), strict=True))
    order = sorted(range(len(columns)), key=lambda i: (min(columns[i]) - max(columns[i]), i))
    return sorted(i + 1 for i in order[:POSITIONS])


# --- what a server may compute instead ---


def list_hypotheses(model: PeftModel) -> dict[str, Hypothesis]:
    """Return what a server may compute, by name, and what makes the model compute it."""
    groups = list_groups(model)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    name = model.active_adapter
    config = model.peft_config[name]
    everything = list(dict.fromkeys(module for modules in groups.values() for module in modules))
    hypotheses: dict[str, Hypothesis] = {ADAPTER: nullcontext, BASE: partial(switched_off, everything)}
    for group, modules in groups.items():
        if len(modules) < len(everything):
            hypotheses[f"without {group}"] = partial(switched_off, modules)
    scales = [layer.scaling[name] for layer in layers]
    for factor in SCALES:
        hypotheses[f"at {factor:g} x its scale"] = partial(scaled, layers, name, [factor * scale for scale in scales])
    plain = [config.lora_alpha / config.r] * len(layers)
    of_ranks = [config.lora_alpha / layer.r[name] for layer in layers]
    if plain != scales:  # rsLoRA, or patterns, which some servers ignore
        hypotheses["at the scale lora_alpha / r everywhere"] = partial(scaled, layers, name, plain)
    if of_ranks not in (plain, scales):
        hypotheses["at the scale lora_alpha / its own rank of each module"] = partial(scaled, layers, name, of_ranks)
    stacks = [layer for layer in layers if isinstance(layer, ParamWrapper) and layer.num_experts > 1]
    if stacks and not any(getattr(stack, "part", None) for stack in stacks):  # ranks have parts: not tried
        hypotheses["with experts packed in another order"] = partial(repacked, stacks, name)
    return hypotheses


def list_groups(model: PeftModel) -> dict[str, list[Any]]:
    """Return the adapter's modules by their last name; routed experts together, and each of their parameters."""
    groups: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, ParamWrapper):
            groups.setdefault("experts", []).append(module)
            groups.setdefault(f"experts.{module.parameter_name}", []).append(module)
        elif isinstance(module, LoraLayer | AuxiliaryTrainingWrapper):
            groups.setdefault(leaf, []).append(module)
    of_experts = [name for name in groups if name.startswith("experts.")]
    if len(of_experts) == 1:
        del groups[of_experts[0]]
    return groups


@contextmanager
def switched_off(modules: Sequence[Any]) -> Iterator[None]:
    for module in modules:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in modules:
            module.enable_adapters(True)


@contextmanager
def scaled(layers: Sequence[Any], name: str, scales: Sequence[float]) -> Iterator[None]:
    before = [layer.scaling[name] for layer in layers]
    _set_scales(layers, name, scales)
    try:
        yield
    finally:
        _set_scales(layers, name, before)


def _set_scales(layers: Sequence[Any], name: str, scales: Sequence[float]) -> None:
    for layer, scale in zip(layers, scales, strict=True):
        layer.scaling[name] = scale


@contextmanager
def repacked(stacks: Sequence[Any], name: str) -> Iterator[None]:
    """Read the columns of lora_B by expert and then rank, where they go by rank and then expert."""
    before = [stack.lora_B[name].weight for stack in stacks]
    for stack, weight in zip(stacks, before, strict=True):
        by_expert = weight.detach().view(len(weight), stack.num_experts, -1)
        stack.lora_B[name].weight = nn.Parameter(by_expert.transpose(1, 2).reshape(weight.shape), requires_grad=False)
    try:
        yield
    finally:
        for stack, weight in zip(stacks, before, strict=True):
            stack.lora_B[name].weight = weight
