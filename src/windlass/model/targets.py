"""The run file's `lora` section held against the model's parameters: which modules match, how many parameters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from windlass.errors import Problem, raise_all
from windlass.model import Base, Parameter

if TYPE_CHECKING:
    from windlass.runfile import Lora

ALL, ALL_LINEAR, EXPERTS = "all", "all-linear", "lora.experts"
SPLIT, MERGED = "split", "merged"  # an expert's adapter beside its weight, or put into it before the product
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LINEAR_PARTS = ("attention", "mlp", "shared_experts", "head")
# The usual names of a feed-forward's matrices, and the fused parameter that holds them in routed experts.
FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
FUSED |= {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class Target:
    """One pattern of `lora.target_modules` (or `lora.experts`) and what it really matched in one part of the model."""

    pattern: str  # as the user wrote it: q_proj
    names: tuple[str, ...]  # what it stands for in this family: q_a_proj, q_b_proj
    part: str
    modules: tuple[str, ...]  # full module names: model.layers.0.self_attn.q_a_proj
    parameters: int  # trainable parameters that it adds
    note: str = ""  # the translation and its reason, when there was one
    r: int = 0  # rank


@dataclass(frozen=True, slots=True)
class Adapter:
    """What PEFT is asked for, and what must come out of it."""

    r: int
    alpha: float
    targets: tuple[Target, ...]
    target_modules: tuple[str, ...]  # exact full module names, for peft.LoraConfig
    target_parameters: tuple[str, ...]  # exact names of fused expert parameters, for peft.LoraConfig
    trainable: int
    dtype_bytes: int  # 4 or 2
    notes: tuple[str, ...] = ()
    total: int = 0  # parameters of the model
    by_part: Mapping[str, int] = field(default_factory=dict)  # trainable parameters

    @property
    def percent(self) -> float:
        """Trainable parameters against the model's."""
        return 100 * self.trainable / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """The experts of a layer that one rank holds the adapter of, where experts are split over ranks."""

    first: int
    count: int
    total: int

    def own(self, name: str, whole: Any) -> Any:
        """This part of a matrix (a tensor), packed as the whole is."""
        return pack_experts(name, by_expert(name, whole, self.total)[self.first : self.first + self.count]).clone()


class ExpertShards:
    """Which tensors of a model's adapter a rank holds a part of."""

    def __init__(self, model: Any) -> None:
        modules = model.named_modules()
        self.held: dict[str, ExpertShard] = {
            name: module.part for name, module in modules if getattr(module, "part", None)
        }

    def of(self, name: str) -> ExpertShard | None:
        """`name` is a parameter's, or its tensor's in a file: the container's name stands before `.lora_` in both."""
        return self.held.get(name.partition(".lora_")[0])

    def own(self, name: str, whole: Any) -> Any:
        """This rank's part of a saved tensor."""
        part = self.of(name)
        return part.own(name, whole) if part else whole


def by_expert(name: str, matrix: Any, experts: int) -> Any:
    """A view [experts, r, features] of an expert adapter's matrix: PEFT packs A expert-slowest, B expert-fastest."""
    if ".lora_A." in name:
        return matrix.view(experts, -1, matrix.shape[1])
    return matrix.view(matrix.shape[0], -1, experts).permute(2, 1, 0)


def pack_experts(name: str, stack: Any) -> Any:
    """The matrix of which `stack` is the view by expert."""
    rows = stack.shape[0] * stack.shape[1]
    if ".lora_A." in name:
        return stack.reshape(rows, -1)
    return stack.permute(2, 1, 0).reshape(-1, rows)


@dataclass(frozen=True, slots=True)
class Linear:
    """A module that PEFT can adapt."""

    module: str
    parameter: Parameter

    @property
    def leaf(self) -> str:
        return self.module.rpartition(".")[2]

    def count(self, r: int, dora: bool) -> int:
        """A is r x in, B is out x r; DoRA adds a magnitude per output."""
        outputs, inputs = self.parameter.shape
        return r * (inputs + outputs) + (outputs if dora else 0)


def resolve(lora: Lora, checkpoint: Base, where: Callable[[str], str]) -> Adapter:
    """Which modules and expert parameters are adapted. Every pattern that matches nothing is an error."""
    linears = tuple(_linears(checkpoint))
    fused = tuple(p for p in checkpoint.parameters if p.part == "experts")
    matched, problems = _match(lora, linears, checkpoint, where)
    experts, found = _experts(lora, fused, where)
    raise_all([*problems, *found])
    targets: list[Target] = []
    taken: dict[str, str] = {}  # module -> the pattern that came first
    for pattern, names, note, own in matched:
        new = [linear for linear in own if taken.setdefault(linear.module, pattern) == pattern]
        targets += _by_part(lora, pattern, names, note, own, new, taken)
    targets += experts
    modules = tuple(linear.module for linear in linears if linear.module in taken)
    parameters = tuple(name for target in experts for name in target.modules)
    biases = _biases(lora, checkpoint, set(modules))
    by_part: dict[str, int] = {}
    for target in targets:
        if target.parameters:
            by_part[target.part] = by_part.get(target.part, 0) + target.parameters
    return Adapter(
        r=lora.r,
        alpha=lora.lora_alpha,
        targets=tuple(targets),
        target_modules=modules,
        target_parameters=parameters,
        trainable=sum(target.parameters for target in targets) + biases,
        dtype_bytes=DTYPE_BYTES[lora.dtype],
        notes=tuple(_notes(lora, checkpoint, targets, by_part, biases)),
        total=checkpoint.total,
        by_part=by_part,
    )


def _linears(checkpoint: Base) -> Iterator[Linear]:
    for parameter in checkpoint.parameters:
        module, _, leaf = parameter.name.rpartition(".")
        if leaf == "weight" and parameter.part in LINEAR_PARTS and not _out_of_reach(parameter, checkpoint):
            yield Linear(module, parameter)


def _out_of_reach(parameter: Parameter, checkpoint: Base) -> bool:
    """A dense feed-forward whose name PEFT takes for that of routed experts."""
    leaf = parameter.name.removesuffix(".weight").rpartition(".")[2]
    return parameter.part == "mlp" and leaf in checkpoint.family.taken_for_experts


Match = tuple[str, tuple[str, ...], str, Sequence[Linear]]  # pattern, names it stands for, note, modules


def _match(
    lora: Lora, linears: Sequence[Linear], checkpoint: Base, where: Callable[[str], str]
) -> tuple[list[Match], list[Problem]]:
    """Each pattern with its modules, as PEFT understands patterns."""
    asked = lora.target_modules
    if isinstance(asked, str):
        place = where("lora.target_modules")
        if asked in (ALL, ALL_LINEAR):
            body = [linear for linear in linears if linear.parameter.part != "head"]
            return [(asked, (asked,), "every linear layer but the head", body)], []
        return _expression(asked, linears, place)
    matched: list[Match] = []
    problems: list[Problem] = []
    for index, pattern in enumerate(asked):
        found = _named(pattern, linears)
        if found:
            matched.append((pattern, (pattern,), _only_shared(pattern, found, checkpoint), found))
            continue
        usual = checkpoint.family.usual.get(pattern)
        translated = [linear for name in usual.names for linear in _named(name, linears)] if usual else []
        if usual and translated:
            note = f"{pattern} -> {', '.join(usual.names)}: {usual.reason}"
            matched.append((pattern, usual.names, note, translated))
        elif lora.experts and FUSED.get(pattern) in lora.experts.targets and "experts" in checkpoint.dims:
            matched.append((pattern, (FUSED[pattern],), f"{pattern} -> {FUSED[pattern]} of lora.experts", ()))
        else:
            place = where(f"lora.target_modules[{index}]")
            problems.append(_unmatched(pattern, linears, checkpoint, place))
    return matched, problems


def _named(name: str, linears: Iterable[Linear]) -> list[Linear]:
    """PEFT's rule for a list: the whole name, or its last components."""
    return [linear for linear in linears if linear.module == name or linear.module.endswith(f".{name}")]


def _expression(pattern: str, linears: Sequence[Linear], place: str) -> tuple[list[Match], list[Problem]]:
    """PEFT's rule for a string: a regular expression for the whole name."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        return [], [Problem(f"{pattern!r} is no regular expression: {error}", place, "or give a list of names")]
    found = [linear for linear in linears if expression.fullmatch(linear.module)]
    if found:
        leaves = tuple(dict.fromkeys(linear.leaf for linear in found))
        return [(pattern, leaves, "", found)], []
    as_list = f"; as a list, [{pattern}], it would" if _named(pattern, linears) else ""
    example = linears[0].module if linears else "model.layers.0.self_attn.q_proj"
    return [], [
        Problem(
            f"the regular expression {pattern!r} matches no module{as_list}",
            place,
            f"it must match whole names, such as {example}; for example .*\\.self_attn\\..*_proj",
        )
    ]


def _only_shared(pattern: str, found: Sequence[Linear], checkpoint: Base) -> str:
    if pattern in FUSED and checkpoint.dims.get("experts") and all(x.parameter.part == "shared_experts" for x in found):
        return f"{pattern} -> shared_experts.{pattern}: a name of the routed experts is given in lora.experts"
    return ""


def _unmatched(pattern: str, linears: Sequence[Linear], checkpoint: Base, place: str) -> Problem:
    """Why a pattern matches nothing, and what was perhaps meant."""
    leaves = list(dict.fromkeys(linear.leaf for linear in linears))
    problem = f"{pattern!r} matches no module of {checkpoint.family.causal_lm}"
    if pattern in (ALL, ALL_LINEAR):
        return Problem(problem, place, f"write target_modules: {pattern}, without a list")
    if "experts" in checkpoint.dims and (pattern in FUSED or pattern in FUSED.values()):
        reason = "every feed-forward is a set of routed experts" if pattern in FUSED else "it is a fused parameter"
        if any(_out_of_reach(p, checkpoint) for p in checkpoint.parameters):
            reason = "PEFT takes this name for routed experts and can't adapt the dense layers"
        return Problem(problem, place, f"{reason}: leave it out, or adapt them with lora.experts: true")
    parts = {p.part for p in checkpoint.parameters if f".{p.name}".removesuffix(".weight").endswith(f".{pattern}")}
    if parts:
        return Problem(
            f"{problem} that can be adapted: it is the {', '.join(sorted(parts))}", place, f"known: {', '.join(leaves)}"
        )
    if pattern == "lm_head":
        return Problem(problem, place, "this model's head is its embedding, and has no weights of its own to adapt")
    close = difflib.get_close_matches(pattern.rpartition(".")[2][:80], leaves, 3, 0.5)
    return Problem(problem, place, f"nearest: {', '.join(close)}" if close else f"known: {', '.join(leaves)}")


def _by_part(
    lora: Lora,
    pattern: str,
    names: tuple[str, ...],
    note: str,
    own: Sequence[Linear],
    new: Sequence[Linear],
    taken: Mapping[str, str],
) -> Iterator[Target]:
    """A pattern's targets, one for each part of the model that it reaches."""
    if not new:
        earlier = dict.fromkeys(taken[linear.module] for linear in own)
        said = f"already adapted through {', '.join(earlier)}" if own else ""
        part = own[0].parameter.part if own else "experts"
        yield Target(pattern, names, part, (), 0, "; ".join(filter(None, (note, said))), lora.r)
        return
    for part in dict.fromkeys(linear.parameter.part for linear in new):
        inside = [linear for linear in new if linear.parameter.part == part]
        count = sum(linear.count(lora.r, lora.use_dora) for linear in inside)
        yield Target(pattern, names, part, tuple(linear.module for linear in inside), count, note, lora.r)


def _experts(lora: Lora, fused: Sequence[Parameter], where: Callable[[str], str]) -> tuple[list[Target], list[Problem]]:
    """Adapters on the routed experts: r x (in + out) for each expert, as PEFT's target_parameters counts."""
    wanted = lora.experts
    everything = lora.target_modules == ALL
    if wanted is None and not (everything and fused):
        return [], []
    place = where("lora.experts" if wanted else "lora.target_modules")
    leaves = tuple(dict.fromkeys(p.name.rpartition(".")[2] for p in fused))
    if not fused:
        hint = "leave lora.experts out: its feed-forward is reached by gate_proj, up_proj, down_proj"
        return [], [Problem("this model has no routed experts", place, hint)]
    problems = list(_expert_refusals(lora, where))
    r = wanted.r if wanted else lora.r
    targets: dict[str, Target] = {}
    for index, asked in enumerate(wanted.targets if wanted else leaves):
        leaf = FUSED.get(asked, asked) if asked not in leaves else asked
        own = tuple(p for p in fused if p.name.rpartition(".")[2] == leaf)
        if not own:
            spot = where(f"lora.experts.targets[{index}]")
            problems.append(
                Problem(f"{asked!r} is no parameter of the routed experts", spot, f"known: {', '.join(leaves)}")
            )
            continue
        count = sum(r * p.shape[0] * (p.shape[1] + p.shape[2]) for p in own)
        note = f"{asked} -> {leaf}: routed experts hold it fused" if leaf != asked else ""
        targets.setdefault(leaf, Target(EXPERTS, (leaf,), "experts", tuple(p.name for p in own), count, note, r))
    return list(targets.values()), problems


def expert_path(shapes: Sequence[Sequence[int]], top_k: int, tokens: int, *, mergeable: bool) -> str:
    """How the adapters of these stacks [E, m, n] are computed when a micro-batch has so many tokens: SPLIT or MERGED.

    Merged first, W + s B A costs r m n for each expert; beside it, (x A) B costs r (m + n) for each of its tokens.
    They meet at E m n / (top_k (m + n)) tokens, whatever the rank: 44,000 to 66,000 for Mistral Small 4.
    `mergeable`: there is no dropout, and a rank has whole experts with their true values, not some, not in FP8.
    """
    if not mergeable or not shapes:
        return SPLIT
    merged = sum(experts * m * n for experts, m, n in shapes)
    split = sum(m + n for _, m, n in shapes) * top_k * tokens
    return MERGED if split > merged else SPLIT


def _expert_refusals(lora: Lora, where: Callable[[str], str]) -> Iterator[Problem]:
    if lora.use_dora:
        yield Problem("adapters of routed experts can't be DoRA", where("lora.use_dora"), "set lora.use_dora: false")


def _biases(lora: Lora, checkpoint: Base, modules: set[str]) -> int:
    """The base's own biases that are trained too."""
    if lora.bias == "none":
        return 0
    named = (p for p in checkpoint.parameters if p.name.endswith(".bias"))
    return sum(p.count for p in named if lora.bias == "all" or p.name.removesuffix(".bias") in modules)


def _notes(
    lora: Lora, checkpoint: Base, targets: Sequence[Target], by_part: Mapping[str, int], biases: int
) -> Iterator[str]:
    yield from dict.fromkeys(target.note for target in targets if target.note)
    routed = sum(p.count for p in checkpoint.parameters if p.part == "experts")
    if routed and "experts" not in by_part:
        share = 100 * routed / checkpoint.total
        yield f"routed experts, {share:.1f} % of the weights, are not adapted: set lora.experts"
    ranks = {target.part: target.r for target in targets if target.parameters}
    if len(set(ranks.values())) > 1:
        yield "rank by part: " + ", ".join(f"{part} {r}" for part, r in ranks.items())
    if isinstance(lora.target_modules, str) and any(_out_of_reach(p, checkpoint) for p in checkpoint.parameters):
        yield "the feed-forward of dense layers is not adapted: PEFT takes its names for those of routed experts"
    yield from _too_high(checkpoint, targets)
    if any(module.endswith(".kv_b_proj") for target in targets for module in target.modules):
        yield (
            "kv_b_proj: vLLM does not apply an adapter on it when serving latent attention unmerged "
            "(vllm-project/vllm#48974); merge the adapter before serving"
        )
    if biases:
        yield f"bias: {lora.bias} trains {biases} biases of the base as well: without them the adapter is another model"


def _too_high(checkpoint: Base, targets: Sequence[Target]) -> Iterator[str]:
    """From half of a matrix's smaller side on, an adapter has as many parameters as the matrix."""
    shapes = {p.name.removesuffix(".weight"): p.shape for p in checkpoint.parameters}
    seen: dict[str, int] = {}
    for target in targets:
        for module in target.modules:
            if 2 * target.r >= min(shapes[module][-2:]):
                seen[module.rpartition(".")[2]] = target.r
    for leaf, r in seen.items():
        yield f"rank {r} is no low rank for {leaf}: it is at least half of the matrix's smaller side"
