"""The run file's `lora` section resolved against the model's parameters: which modules match, how many parameters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from windlass.errors import Problem, raise_all
from windlass.model.family import FUSED
from windlass.model.parameters import Base, Parameter

if TYPE_CHECKING:
    from windlass.runfile import Lora

ALL, ALL_LINEAR, EXPERTS = "all", "all-linear", "lora.experts"
SPLIT, MERGED = "split", "merged"  # an expert's adapter computed next to its weight, or added to it before the product
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2}
LINEAR_PARTS: Final = ("attention", "mlp", "shared_experts", "head")
Where = Callable[[str], str]  # a key of the run file -> its place: run.yaml:12: lora.r


@dataclass(frozen=True, slots=True)
class Target:
    """One pattern of `lora.target_modules` (or `lora.experts`) and what it really matched in one part of the model."""

    pattern: str  # as the user wrote it: q_proj
    names: tuple[str, ...]  # what it stands for in this family: q_a_proj, q_b_proj
    part: str
    modules: tuple[str, ...]  # full module names: model.layers.0.self_attn.q_a_proj
    parameters: int  # trainable parameters that it adds
    note: str = ""  # the translation and its reason, if there was one
    r: int = 0  # rank


@dataclass(frozen=True, slots=True)
class Adapter:
    """What PEFT is given, and what must come out of it."""

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
        """Trainable parameters as a share of the model's."""
        return 100 * self.trainable / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class _Match:
    """A pattern and the modules it reaches."""

    pattern: str
    names: tuple[str, ...]
    note: str
    modules: Sequence[str]


def resolve(lora: Lora, base: Base, where: Where) -> Adapter:
    """Which modules and expert parameters are adapted. Every pattern that matches nothing is an error."""
    linears = {  # module -> its weight: what PEFT can adapt
        p.name.removesuffix(".weight"): p
        for p in base.parameters
        if p.part in LINEAR_PARTS and p.name.endswith(".weight") and not _out_of_reach(p, base)
    }
    matches, problems = _match(lora, linears, base, where)
    if heads := [module for match in matches for module in match.modules if linears[module].part == "head"]:
        # The fused loss multiplies by the head's weight, in chunks, and never calls the module.
        problem = f"{heads[0]} can't be adapted: the loss is computed from its weight, without its adapter"
        problems.append(Problem(problem, where("lora.target_modules"), "leave it out, or write all-linear"))
    experts, faults = _experts(lora, base, where)
    raise_all([*problems, *faults])

    targets: list[Target] = []
    taken: dict[str, str] = {}  # module -> the pattern that came first
    for match in matches:
        new = [module for module in match.modules if taken.setdefault(module, match.pattern) == match.pattern]
        if not new:
            note = match.note
            if match.modules:
                earlier = ", ".join(dict.fromkeys(taken[module] for module in match.modules))
                note = "; ".join(filter(None, (note, f"already adapted through {earlier}")))
            part = linears[match.modules[0]].part if match.modules else "experts"
            targets.append(Target(match.pattern, match.names, part, (), 0, note, lora.r))
        for part in dict.fromkeys(linears[module].part for module in new):
            modules = tuple(module for module in new if linears[module].part == part)
            shapes = [linears[module].shape for module in modules]
            # A is r x in, B is out x r; DoRA adds a magnitude per output
            count = sum(lora.r * (rows + columns) + (rows if lora.use_dora else 0) for rows, columns in shapes)
            targets.append(Target(match.pattern, match.names, part, modules, count, match.note, lora.r))
    targets += experts

    adapted = tuple(module for module in linears if module in taken)
    biases = 0  # the base's own, trained too
    if lora.bias != "none":
        named = (p for p in base.parameters if p.name.endswith(".bias"))
        biases = sum(p.count for p in named if lora.bias == "all" or p.name.removesuffix(".bias") in taken)
    by_part: dict[str, int] = {}
    for target in targets:
        if target.parameters:
            by_part[target.part] = by_part.get(target.part, 0) + target.parameters
    return Adapter(
        r=lora.r,
        alpha=lora.lora_alpha,
        targets=tuple(targets),
        target_modules=adapted,
        target_parameters=tuple(name for target in experts for name in target.modules),
        trainable=sum(target.parameters for target in targets) + biases,
        dtype_bytes=DTYPE_BYTES[lora.dtype],
        notes=tuple(_notes(lora, base, targets, by_part, biases)),
        total=base.total,
        by_part=by_part,
    )


def _out_of_reach(parameter: Parameter, base: Base) -> bool:
    """A dense feed-forward whose name PEFT takes for that of routed experts."""
    return parameter.part == "mlp" and parameter.name.split(".")[-2] in base.family.taken_for_experts


def _named(name: str, modules: Iterable[str]) -> list[str]:
    """PEFT's rule for a list: the full name, or its last components."""
    return [module for module in modules if module == name or module.endswith(f".{name}")]


def _match(
    lora: Lora, linears: Mapping[str, Parameter], base: Base, where: Where
) -> tuple[list[_Match], list[Problem]]:
    """Each pattern with its modules, as PEFT understands patterns."""
    patterns = lora.target_modules
    if patterns in (ALL, ALL_LINEAR):
        body = [module for module, parameter in linears.items() if parameter.part != "head"]
        return [_Match(str(patterns), (str(patterns),), "every linear layer but the head", body)], []
    if isinstance(patterns, str):
        return _match_expression(patterns, list(linears), where("lora.target_modules"))
    matches: list[_Match] = []
    problems: list[Problem] = []
    for index, pattern in enumerate(patterns):
        usual = base.family.usual.get(pattern)
        if found := _named(pattern, linears):
            note = ""
            if pattern in FUSED and base.dims.get("experts") and {linears[m].part for m in found} == {"shared_experts"}:
                note = f"{pattern} -> shared_experts.{pattern}: routed experts are set by lora.experts"
            matches.append(_Match(pattern, (pattern,), note, found))
        elif usual and (found := [module for name in usual.names for module in _named(name, linears)]):
            note = f"{pattern} -> {', '.join(usual.names)}: {usual.reason}"
            matches.append(_Match(pattern, usual.names, note, found))
        elif lora.experts and FUSED.get(pattern) in lora.experts.targets and "experts" in base.dims:
            matches.append(_Match(pattern, (FUSED[pattern],), f"{pattern} -> {FUSED[pattern]} of lora.experts", ()))
        else:
            problems.append(_unmatched(pattern, linears, base, where(f"lora.target_modules[{index}]")))
    return matches, problems


def _match_expression(pattern: str, modules: Sequence[str], place: str) -> tuple[list[_Match], list[Problem]]:
    """PEFT's rule for a string: a regular expression for the full name."""
    if found := [module for module in modules if re.fullmatch(pattern, module)]:
        leaves = tuple(dict.fromkeys(module.rpartition(".")[2] for module in found))
        return [_Match(pattern, leaves, "", found)], []
    as_list = f"; as a list, [{pattern}], it would" if _named(pattern, modules) else ""
    example = modules[0] if modules else "model.layers.0.self_attn.q_proj"
    hint = f"it must match full names, such as {example}; for example .*\\.self_attn\\..*_proj"
    return [], [Problem(f"the regular expression {pattern!r} matches no module{as_list}", place, hint)]


def _unmatched(pattern: str, linears: Mapping[str, Parameter], base: Base, place: str) -> Problem:
    """Why a pattern matches nothing, and what was perhaps meant."""
    leaves = list(dict.fromkeys(module.rpartition(".")[2] for module in linears))
    problem = f"{pattern!r} matches no module of {base.family.causal_lm}"
    if pattern in (ALL, ALL_LINEAR):
        return Problem(problem, place, f"write target_modules: {pattern}, without a list")
    if "experts" in base.dims and (pattern in FUSED or pattern in FUSED.values()):
        reason = "every feed-forward is a set of routed experts" if pattern in FUSED else "it is a fused parameter"
        if any(_out_of_reach(p, base) for p in base.parameters):
            reason = "PEFT takes this name for routed experts and can't adapt the dense layers"
        return Problem(problem, place, f"{reason}: leave it out, or adapt them with lora.experts: true")
    parts = {p.part for p in base.parameters if f".{p.name}".removesuffix(".weight").endswith(f".{pattern}")}
    if parts:
        problem = f"{problem} that can be adapted: it is the {', '.join(sorted(parts))}"
        return Problem(problem, place, f"known: {', '.join(leaves)}")
    if pattern == "lm_head":
        return Problem(problem, place, "this model's head is its embedding, and has no weights of its own to adapt")
    close = difflib.get_close_matches(pattern.rpartition(".")[2][:80], leaves, 3, 0.5)
    return Problem(problem, place, f"nearest: {', '.join(close)}" if close else f"known: {', '.join(leaves)}")


def _experts(lora: Lora, base: Base, where: Where) -> tuple[list[Target], list[Problem]]:
    """Adapters on the routed experts: r x (in + out) for each expert, as PEFT's target_parameters counts."""
    fused = [p for p in base.parameters if p.part == "experts"]
    wanted = lora.experts
    if wanted is None and not (lora.target_modules == ALL and fused):
        return [], []
    place = where("lora.experts" if wanted else "lora.target_modules")
    if not fused:
        hint = "leave lora.experts out: its feed-forward is reached by gate_proj, up_proj, down_proj"
        return [], [Problem("this model has no routed experts", place, hint)]
    problems: list[Problem] = []
    if lora.use_dora:
        hint = "set lora.use_dora: false"
        problems.append(Problem("adapters of routed experts can't be DoRA", where("lora.use_dora"), hint))
    r = wanted.r if wanted else lora.r
    leaves = tuple(dict.fromkeys(p.name.rpartition(".")[2] for p in fused))
    targets: dict[str, Target] = {}
    for index, name in enumerate(wanted.targets if wanted else leaves):
        leaf = name if name in leaves else FUSED.get(name, name)
        own = [p for p in fused if p.name.endswith(f".{leaf}")]
        if not own:
            spot = where(f"lora.experts.targets[{index}]")
            problem = f"{name!r} is no parameter of the routed experts"
            problems.append(Problem(problem, spot, f"known: {', '.join(leaves)}"))
            continue
        count = sum(r * p.shape[0] * (p.shape[1] + p.shape[2]) for p in own)
        note = f"{name} -> {leaf}: fused in routed experts" if leaf != name else ""
        targets.setdefault(leaf, Target(EXPERTS, (leaf,), "experts", tuple(p.name for p in own), count, note, r))
    return list(targets.values()), problems


def _notes(lora: Lora, base: Base, targets: Sequence[Target], by_part: Mapping[str, int], biases: int) -> Iterator[str]:
    yield from dict.fromkeys(target.note for target in targets if target.note)
    routed = sum(p.count for p in base.parameters if p.part == "experts")
    if routed and "experts" not in by_part:
        share = 100 * routed / base.total
        yield f"routed experts, {share:.1f} % of the weights, are not adapted: set lora.experts"
    ranks = {target.part: target.r for target in targets if target.parameters}
    if len(set(ranks.values())) > 1:
        yield "rank by part: " + ", ".join(f"{part} {r}" for part, r in ranks.items())
    if isinstance(lora.target_modules, str) and any(_out_of_reach(p, base) for p in base.parameters):
        yield "the feed-forward of dense layers is not adapted: PEFT takes its names for those of routed experts"
    # From half of a matrix's smaller side on, an adapter has as many parameters as the matrix.
    shapes = {p.name.removesuffix(".weight"): p.shape for p in base.parameters}
    too_high = {
        module.rpartition(".")[2]: target.r
        for target in targets
        for module in target.modules
        if 2 * target.r >= min(shapes[module][-2:])
    }
    for leaf, r in too_high.items():
        yield f"rank {r} is not low for {leaf}: it is at least half of the matrix's smaller side"
    if any(module.endswith(".kv_b_proj") for target in targets for module in target.modules):
        yield (
            "kv_b_proj: vLLM does not apply an adapter on it when serving latent attention unmerged "
            "(vllm-project/vllm#48974); merge the adapter before serving"
        )
    if biases:
        yield f"bias: {lora.bias} trains {biases} biases of the base too: without them the adapter is another model"


def expert_path(shapes: Sequence[Sequence[int]], top_k: int, tokens: int, *, mergeable: bool) -> str:
    """How the adapters of these stacks [E, m, n] are computed if a micro-batch has so many tokens: SPLIT or MERGED.

    Merged first, W + s B A costs r m n for each expert; split, (x A) B costs r (m + n) for each of its tokens. They
    meet at E m n / (top_k (m + n)) tokens, whatever the rank: 44,000 to 66,000 for Mistral Small 4.
    `mergeable`: there is no dropout, and a rank has all experts with their true values, not some, not in FP8.
    """
    if not mergeable or not shapes:
        return SPLIT
    merged = sum(experts * m * n for experts, m, n in shapes)
    split = sum(m + n for _, m, n in shapes) * top_k * tokens
    return MERGED if split > merged else SPLIT


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """The experts of a layer whose adapter this rank has, under expert parallelism."""

    first: int
    count: int
    total: int

    def own(self, name: str, matrix: Any) -> Any:
        """This shard of a matrix (a tensor) of all experts, packed as that is."""
        return pack_experts(name, by_expert(name, matrix, self.total)[self.first : self.first + self.count]).clone()


class ExpertShards:
    """Which tensors of a model's adapter this rank has a shard of."""

    def __init__(self, model: Any) -> None:
        modules = model.named_modules()
        self.held: dict[str, ExpertShard] = {
            name: module.part for name, module in modules if getattr(module, "part", None)
        }

    def of(self, name: str) -> ExpertShard | None:
        """`name` is a parameter's, or its tensor's in a file: the container's name comes before `.lora_` in both."""
        return self.held.get(name.partition(".lora_")[0])

    def own(self, name: str, matrix: Any) -> Any:
        """This rank's part of a saved tensor."""
        shard = self.of(name)
        return shard.own(name, matrix) if shard else matrix


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
