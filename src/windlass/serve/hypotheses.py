"""Compute a probe: log-probabilities of rows under every hypothesis about what a server computes."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from windlass.model import Base
from windlass.ranks import collectives
from windlass.run_folder import describe_files
from windlass.serve.probe import (
    ADAPTER,
    AT_SCALE,
    BASE,
    LOGPROBS,
    POSITIONS,
    ROUNDED,
    SCALES,
    TEXT,
    describe_difference,
    list_logprobs,
    measure_kept,
    median_size,
    subtract,
)

DECODED_ROWS: Final = 4
DECODED_TOKENS: Final = 8
PASS_TOKENS: Final = 1280  # of a rank in one forward pass, whose logits of the whole vocabulary need memory
LOG_SECONDS: Final = 20
WIDE: Final = {"BF16", "F16", "F32", "F64"}
DIGITS: Final = {LOGPROBS: 5, ROUNDED: 3}
Hypothesis = Callable[[], AbstractContextManager[None]]
Biases = Sequence[tuple[nn.Parameter, Tensor]]  # of the adapter, and their values in the base
DUMMY: Final = [0, 0]  # input of a rank without a row, which still takes part in every gather


@torch.no_grad()
def compute_rows(model: Any, rows: Sequence[list[int]], read: Callable[[list[int], Tensor], Any]) -> list[Any]:
    """Return what `read` makes of each row and its logits. Rows are dealt to the ranks, and all get all results.

    A pass over a sharded model gathers all its weights, so a rank computes its rows together. Padding follows a row's
    tokens, which don't see it.
    """
    world = collectives.get_world_size()
    device = next(p.device for name, p in model.named_parameters() if "lora_" in name)  # a base may be offloaded
    longest = max(map(len, rows))
    at_once = world * max(1, PASS_TOKENS // longest)
    results = []
    for start in range(0, len(rows), at_once):
        of_pass = rows[start : start + at_once]
        own = of_pass[collectives.get_rank() :: world] or [DUMMY]
        padded = [row + [0] * (max(map(len, own)) - len(row)) for row in own]
        logits = model(input_ids=torch.tensor(padded, device=device), use_cache=False).logits
        read_here = [read(row, of_row[: len(row)].float()) for row, of_row in zip(own, logits, strict=True)]
        read_by_rank = collectives.all_gather(read_here)
        results += [read_by_rank[number % world][number // world] for number in range(len(of_pass))]
    return results


def read_scores(row: list[int], logits: Tensor) -> list[float]:
    """Return the log-probability of each token from the second on."""
    following = torch.tensor(row[1:], device=logits.device)[:, None]
    scores: list[float] = torch.log_softmax(logits[:-1], -1).gather(1, following)[:, 0].tolist()
    return scores


def decode(model: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return each prompt with its likeliest continuation."""
    rows = [list(prompt) for prompt in prompts]
    for _ in range(DECODED_TOKENS):
        for row, token in zip(rows, compute_rows(model, rows, lambda _, logits: int(logits[-1].argmax())), strict=True):
            row.append(token)
    return rows


def compute_probe(
    model: PeftModel,
    rows: Sequence[dict[str, Any]],
    tokenizer: Any,
    *,
    base: Base,
    adapter: Path,
    computed_in: str,
    rows_from: str,
    say: Callable[[str], None],
    biases: Biases = (),
    rounding: Hypothesis,
) -> dict[str, Any]:
    """Return the probe. A collective.

    rows: of `choose_rows`; more are decoded from them; biases: that were trained; rounding: a context in which the
    model computes as a server in bfloat16 does.
    """
    hypotheses = list_hypotheses(model, biases)
    say(f"probe     {len(rows)} rows under {len(hypotheses)} hypotheses: base, adapter, and parts of the adapter")
    prompts = [row["ids"][: row["start"] or len(row["ids"]) // 2] for row in rows[:DECODED_ROWS]]
    decoded = zip(decode(model, prompts), map(len, prompts), strict=True)
    probed = [dict(row) for row in rows] + [{"ids": ids, "start": start, "decoded": True} for ids, start in decoded]
    passes = [(key, name) for key in DIGITS for name in hypotheses]
    scores: dict[str, dict[str, list[Any]]] = {key: {} for key in DIGITS}
    said = time.monotonic()
    for number, (key, name) in enumerate(passes, 1):
        with rounding() if key == ROUNDED else nullcontext(), hypotheses[name]():
            scores[key][name] = compute_rows(model, [row["ids"] for row in probed], read_scores)
        if time.monotonic() - said > LOG_SECONDS:
            said = time.monotonic()
            say(f"probe     {number} of {len(passes)} passes, in {computed_in} and as a server in bfloat16 rounds")
    beginnings: set[tuple[int, ...]] = set()
    for number, row in enumerate(probed):
        of_row = {key: {name: values[number] for name, values in of.items()} for key, of in scores.items()}
        row["positions"] = choose_positions(row, of_row[LOGPROBS], beginnings)
        for key, digits in DIGITS.items():
            row[key] = {
                n: [round(values[i - 1], digits) for i in row["positions"]] for n, values in of_row[key].items()
            }
    probe: dict[str, Any] = {
        "base": base.name,
        "adapter": describe_files(adapter)["files"],
        "computed_in": computed_in,
        "rows_from": rows_from,
        "dtype": read_coarsest_dtype(base),
        "hypotheses": list(hypotheses),
        "rows": probed,
    }
    if tokenizer is not None:
        probe["tokenizer"] = {"text": TEXT, "ids": tokenizer(TEXT, add_special_tokens=False)["input_ids"]}
    exact, rounded = ({name: list_logprobs(probe, name, key) for name in (BASE, ADAPTER)} for key in DIGITS)
    probe["difference"] = describe_difference(exact[BASE], exact[ADAPTER])
    effect, effect_rounded = (subtract(values[ADAPTER], values[BASE]) for values in (exact, rounded))
    of_base = subtract(rounded[BASE], exact[BASE])  # of two passes, as the adapter's effect is
    kept, error = measure_kept(effect, effect_rounded, of_base if computed_in != "float32" else [])
    probe |= {"kept": round(kept, 3), "kept_error": round(min(error, 1e9), 4)}  # JSON has no infinity
    probe["noise"] = round(median_size(of_base), 4)
    return probe


def read_coarsest_dtype(base: Base) -> str:
    """Return what the noise of a server of this model depends on: a key of the table in verify.py."""
    stored = {piece.stored.dtype for parameter in base.parameters for piece in parameter.pieces}
    return "BF16" if stored <= WIDE else "F8"


def choose_positions(
    row: dict[str, Any], scores: dict[str, list[float]], beginnings: set[tuple[int, ...]]
) -> list[int]:
    """Return the positions on which the hypotheses differ most; of a decoded row all that were decoded.

    A token after what another row begins with too says nothing more, and would repeat its noise.
    """
    if row.get("decoded"):
        return list(range(row["start"], len(row["ids"])))
    columns = list(zip(*scores.values(), strict=True))
    ids = [tuple(row["ids"][: i + 2]) for i in range(len(columns))]
    new = [i for i in range(len(columns)) if ids[i] not in beginnings]
    beginnings.update(ids)
    order = sorted(new, key=lambda i: (min(columns[i]) - max(columns[i]), i))
    return sorted(i + 1 for i in order[:POSITIONS])


# --- what a server may compute instead ---


def list_hypotheses(model: PeftModel, biases: Biases = ()) -> dict[str, Hypothesis]:
    """Return what a server may compute, by name, and what makes the model compute it."""
    groups = list_groups(model)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    name = model.active_adapter
    config = model.peft_config[name]
    everything = list(dict.fromkeys(module for modules in groups.values() for module in modules))
    hypotheses: dict[str, Hypothesis] = {ADAPTER: nullcontext, BASE: partial(switched_off, everything, biases)}
    for group, modules in groups.items():
        if len(modules) < len(everything):
            hypotheses[f"without {group}"] = partial(switched_off, modules)
    if biases:
        hypotheses["without its biases"] = partial(switched_off, (), biases)
    scales = [layer.scaling[name] for layer in layers]
    for factor in SCALES:
        hypotheses[AT_SCALE.format(factor)] = partial(scaled, layers, name, [factor * scale for scale in scales])
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
    """Return the adapter's modules by their last name and by what contains them; routed experts together, and each of
    their parameters."""
    groups: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, ParamWrapper):
            groups.setdefault("experts", []).append(module)
            groups.setdefault(f"experts.{module.parameter_name}", []).append(module)
        elif isinstance(module, LoraLayer | AuxiliaryTrainingWrapper):
            groups.setdefault(leaf, []).append(module)
            parent = name.split(".")[-2]  # self_attn, mlp
            if not parent.isdigit():
                groups.setdefault(parent, []).append(module)
    of_experts = [name for name in groups if name.startswith("experts.")]
    if len(of_experts) == 1:
        del groups[of_experts[0]]
    return {name: of for number, (name, of) in enumerate(groups.items()) if of not in [*groups.values()][:number]}


@contextmanager
def switched_off(modules: Sequence[Any], biases: Biases = ()) -> Iterator[None]:
    """Switch modules off as PEFT does, and give biases back the values that they have in the base."""
    trained = [(parameter, parameter.detach().clone()) for parameter, _ in biases]
    for module in modules:
        module.enable_adapters(False)
    for parameter, value in biases:
        parameter.data.copy_(value)
    try:
        yield
    finally:
        for module in modules:
            module.enable_adapters(True)
        for parameter, value in trained:
            parameter.data.copy_(value)


@contextmanager
def scaled(layers: Sequence[Any], name: str, scales: Sequence[float]) -> Iterator[None]:
    before = [layer.scaling[name] for layer in layers]
    for layer, scale in zip(layers, scales, strict=True):
        layer.scaling[name] = scale
    try:
        yield
    finally:
        for layer, scale in zip(layers, before, strict=True):
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
