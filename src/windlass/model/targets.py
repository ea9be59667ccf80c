"""Resolve the run file's `lora` section against the model's parameters: matched modules and trainable parameters."""

import contextlib
import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from windlass.errors import Problem, UserError, Where, raise_all
from windlass.model.family import FUSED, USUAL
from windlass.model.files import abbreviate
from windlass.model.parameters import Base, Parameter
from windlass.runfile import Lora

ALL = "all"
ALL_LINEAR = "all-linear"
EXPERTS = "lora.experts"
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2}
LAYER: Final = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Target:
    """One pattern of `lora.target_modules` (or `lora.experts`) and its matches in one part of the model."""

    pattern: str  # as the user wrote it: q_proj
    names: tuple[str, ...]  # its names in this family: q_a_proj, q_b_proj
    part: str
    modules: tuple[str, ...]  # full module names: model.layers.0.self_attn.q_a_proj
    parameters: int  # trainable parameters that it adds
    note: str = ""  # the translation and its reason, if there was one
    r: int = 0


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter: the inputs of PEFT, and the expected result."""

    r: int
    alpha: float
    targets: tuple[Target, ...]
    target_modules: tuple[str, ...]  # exact full module names, for peft.LoraConfig
    target_parameters: tuple[str, ...]  # exact names of fused expert parameters, for peft.LoraConfig
    trainable: int
    dtype_bytes: int  # 4 or 2
    alphas: Mapping[str, float] = field(default_factory=dict)  # for modules with a value other than `alpha`
    in_full: Mapping[str, int] = field(default_factory=dict)  # base parameters trained in full, with their sizes
    biases: tuple[str, ...] = ()  # the base's own that are trained
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def r_by_module(self) -> dict[str, int]:
        """Return the r of each adapted module and expert parameter."""
        return {module: target.r or self.r for target in self.targets for module in target.modules}


def resolve_adapter(lora: Lora, base: Base, where: Where) -> Adapter:
    """Find the modules and expert parameters to adapt. Every pattern that matches nothing is an error."""
    lora = lora.stored
    linears = {  # modules that PEFT can adapt -> their weights
        p.name.removesuffix(".weight"): p
        for p in base.parameters
        if p.linear and _last_component(p.name) not in base.family.peft_takes and not _is_idle(p.name, base)
    }
    problems: list[Problem] = []
    experts: list[Target] = []
    in_full: dict[str, int] = {}
    layers = _choose_layers(lora, base, where)
    taken: dict[str, str] = {}  # module -> the pattern that came first
    targets = _match_modules(lora, base, where, linears, layers, taken, problems)
    try:
        experts = _match_experts(lora, base, where, layers)
    except UserError as error:
        problems += error.problems
    problems += _check_patterns(lora, taken, where)
    problems += _check_initial_ranks(lora, targets, linears, where)
    biased = [p for p in base.parameters if lora.bias == "all" and p.name.endswith(".bias")]
    if any(p.part == "head" for p in biased):
        problem = "the head's bias can't be trained: the loss takes it as it is"
        problems.append(Problem(problem, where("lora.bias"), "set lora.bias: lora_only", "head-bias"))
    if any(_is_idle(p.name, base) for p in biased):
        problem = f"some biases of {base.name} can't be trained: {_IDLE}"
        problems.append(Problem(problem, where("lora.bias"), "set lora.bias: lora_only", "idle-parameter"))
    try:
        in_full = _match_in_full(lora, base, where)
    except UserError as error:
        problems += error.problems
    targets += experts
    if not problems and not any(target.parameters for target in targets):
        notes = "; ".join(dict.fromkeys(target.note for target in targets if target.note))
        leaves = dict.fromkeys(_last_component(name) for name, p in linears.items() if p.part != "head")
        hint = f"add some of {', '.join(leaves)}"
        if "experts" in base.dims and base.family.expert_adapters:
            hint += ", or set lora.experts: true"
        problem = f"nothing would be adapted: {notes}"
        problems.append(Problem(problem, where("lora.target_modules"), hint, "nothing-adapted"))
    raise_all(problems)

    of_base = {p.name: p.count for p in base.parameters if p.name.endswith(".bias")}
    biases = {
        name: count
        for name, count in of_base.items()
        if lora.bias == "all" or (lora.bias == "lora_only" and name.removesuffix(".bias") in taken)
    }
    warnings: list[str] = []
    if isinstance(lora.target_modules, str) and lora.target_modules not in (ALL, ALL_LINEAR):
        reached = {module: p for module, p in linears.items() if layers is None or _layer_prefix(module) in layers}
        warnings = _warn_of_missed_modules(lora.target_modules, taken, reached)
    alphas = {module: match_first(lora.alpha_pattern, module, None) for module in taken}
    return Adapter(
        r=lora.r,
        alpha=lora.lora_alpha,
        targets=tuple(targets),
        target_modules=tuple(module for module in linears if module in taken),
        target_parameters=tuple(name for target in experts for name in target.modules),
        trainable=sum(target.parameters for target in targets) + sum((*biases.values(), *in_full.values())),
        dtype_bytes=DTYPE_BYTES[lora.dtype],
        alphas={module: alpha for module, alpha in alphas.items() if alpha is not None},
        in_full=in_full,
        biases=tuple(biases),
        notes=tuple(_list_notes(lora, base, targets, sum(biases.values()))),
        warnings=tuple(warnings),
    )


def _match_modules(
    lora: Lora,
    base: Base,
    where: Where,
    linears: Mapping[str, Parameter],
    layers: set[str] | None,
    taken: dict[str, str],
    problems: list[Problem],
) -> list[Target]:
    """Return the targets of `lora.target_modules`; fill `taken`, and add what is wrong to `problems`."""
    places = {"lora.target_modules": lora.target_modules}  # all, all-linear, or a regular expression
    if isinstance(lora.target_modules, list):
        places = {f"lora.target_modules[{i}]": pattern for i, pattern in enumerate(lora.target_modules)}
    targets: list[Target] = []
    for key, pattern in places.items():
        place = where(key)
        try:
            names, note, modules = _match(str(pattern), lora, linears, base, place)
        except UserError as error:
            problems += error.problems
            continue
        heads = [module for module in modules if linears[module].part == "head"]
        if heads:
            # The fused loss multiplies by the head's weight, in chunks, and never calls the module.
            problem = f"{heads[0]} can't be adapted: the loss is computed from its weight, without its adapter"
            problems.append(Problem(problem, place, "leave it out, or write all-linear", "adapted-head"))
        in_layers = [module for module in modules if layers is None or _layer_prefix(module) in layers]
        if modules and not in_layers:
            problem = f"{pattern!r} matches no module of these layers"
            hint = "name layers that have it, or take it out of lora.target_modules"
            problems.append(Problem(problem, where("lora.layers_to_transform"), hint, "no-match-in-layers"))
            continue
        new = [module for module in in_layers if taken.setdefault(module, str(pattern)) == pattern]
        if new:
            targets += _make_targets(lora, str(pattern), names, note, new, linears)
            continue
        if in_layers:
            earlier = f"already adapted through {', '.join(dict.fromkeys(taken[module] for module in in_layers))}"
            note = f"{note}; {earlier}" if note else earlier
        part = linears[in_layers[0]].part if in_layers else "experts"
        targets.append(Target(str(pattern), names, part, (), 0, note, lora.r))
    return targets


def _make_targets(
    lora: Lora,
    pattern: str,
    names: tuple[str, ...],
    note: str,
    modules: list[str],
    linears: Mapping[str, Parameter],
) -> Iterator[Target]:
    """Yield the target in each part of the model, for each r."""
    groups: dict[tuple[str, int], list[str]] = defaultdict(list)
    for module in modules:
        groups[linears[module].part, match_first(lora.rank_pattern, module, lora.r)].append(module)
    for (part, r), group in groups.items():
        # A is r x in, B is out x r; DoRA adds a magnitude per output
        count = sum(r * sum(linears[module].shape) for module in group)
        if lora.use_dora:
            count += sum(linears[module].shape[0] for module in group)
        yield Target(pattern, names, part, tuple(group), count, note, r)


def _check_initial_ranks(
    lora: Lora, targets: Sequence[Target], linears: Mapping[str, Parameter], where: Where
) -> Iterator[Problem]:
    """Yield a problem for each name of modules with fewer singular values than the adapter that begins with them."""
    if not lora.starts_from_weights:
        return
    least = {_last_component(name): min(linears[name].shape) for target in targets for name in target.modules}
    for target in targets:
        for leaf in dict.fromkeys(map(_last_component, target.modules)):
            if target.r // 2 > least[leaf]:  # the other half is what the adapter began with
                problem = f"{lora.init_lora_weights} with rank {target.r // 2}, and the weight of {leaf} has only rank"
                hint = f"set lora.rank_pattern: {{{leaf}: {least[leaf]}}}, or lora.init_lora_weights: true"
                yield Problem(f"{problem} {least[leaf]}", where("lora.r"), hint, "rank-above-weights")


def _check_patterns(lora: Lora, modules: Mapping[str, str], where: Where) -> Iterator[Problem]:
    """Yield a problem for each entry of `rank_pattern` and `alpha_pattern` that matches no adapted module."""
    for key, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            if not any(pattern_matches(pattern, module) for module in modules):
                hint = f"adapted: {abbreviate([*modules])}"
                problem = f"{pattern!r} matches no adapted module"
                yield Problem(problem, where(f"lora.{key}"), hint, "unused-pattern")


def _match_in_full(lora: Lora, base: Base, where: Where) -> dict[str, int]:
    """Return the weights that `lora.modules_to_save` names, and their sizes."""
    outer = [p for p in base.parameters if p.part in ("embedding", "head") and not _is_idle(p.name, base)]
    candidates = {p.name.removesuffix(".weight"): p for p in outer}
    tied = all(p.part == "embedding" for p in candidates.values())
    names = {p.name for p in base.parameters}
    sizes: dict[str, int] = {}
    problems: list[Problem] = []
    for index, name in enumerate(lora.modules_to_save or ()):
        modules = [module for module in candidates if f".{module}".endswith(f".{name}")]
        problem = ""
        hint = "leave lora.modules_to_save out"
        if tied:
            problem = "the head is the embedding, and PEFT would train and save a separate copy of it"
        elif not modules:
            problem = "only the embedding and the head can be"
            hint = f"choose of {', '.join(map(_last_component, candidates))}"
        elif any(f"{module}.bias" in names for module in modules):
            problem = "it has a bias, which would stay as it is"
        if problem:
            place = where(f"lora.modules_to_save[{index}]")
            problem = f"{name!r} can't be trained in full: {problem}"
            problems.append(Problem(problem, place, hint, "not-trainable-in-full"))
        sizes |= {candidates[module].name: candidates[module].count for module in modules}
    raise_all(problems)
    return sizes


def _match(
    pattern: str, lora: Lora, linears: Mapping[str, Parameter], base: Base, place: str
) -> tuple[tuple[str, ...], str, list[str]]:
    """Return a pattern's names in this family, a note on why, and the modules that match by PEFT's rules."""
    if isinstance(lora.target_modules, str):
        if pattern in (ALL, ALL_LINEAR):
            modules = [module for module, parameter in linears.items() if parameter.part != "head"]
            return (pattern,), _note_on_all(base), modules
        return _match_expression(pattern, linears, base, place)
    routed = "experts" in base.dims
    modules = _find_named(pattern, linears)
    layers = {_layer_prefix(module) for module in modules}
    names: tuple[str, ...] = (pattern,) if modules else ()
    notes = list[str]()
    for others, reason in USUAL.get(pattern, ()):  # in layers that have no module of that name
        more = [module for name in others for module in _find_named(name, linears)]
        more = [module for module in more if _layer_prefix(module) not in layers]
        if more:
            more_layers = {_layer_prefix(module) for module in more}
            where = f" of {len(more_layers)} layers" if modules else ""
            notes.append(f"{pattern} -> {', '.join(others)}{where}: {reason}")
            names += others
            modules += more
            layers |= more_layers
    if modules:
        if notes:
            modules = sorted(modules, key=list(linears).index)
        if routed and pattern in FUSED and {linears[module].part for module in modules} == {"shared_experts"}:
            notes.append(f"{pattern} -> shared_experts.{pattern}: routed experts are set by lora.experts")
        return names, "; ".join(notes), modules
    if routed and lora.experts and FUSED.get(pattern) in lora.experts.targets:
        return (FUSED[pattern],), f"{pattern} -> {FUSED[pattern]} of lora.experts", []
    if _find_named(pattern, _list_idle(base)):
        raise UserError(f"{pattern!r} can't be trained: {_IDLE}", place, "leave it out", "idle-parameter")
    if pattern in _list_taken_by_peft(base):
        return (pattern,), f"{pattern} is left out: {_PEFT_TAKES}", []
    raise _explain_no_match(pattern, linears, base, place)


def _find_named(name: str, linears: Iterable[str]) -> list[str]:
    """Return matches by PEFT's rule for a list: the full name, or its last components."""
    return [module for module in linears if module == name or module.endswith(f".{name}")]


def _list_taken_by_peft(base: Base) -> set[str]:
    return {_last_component(p.name) for p in base.parameters if p.linear} & base.family.peft_takes


def _note_on_all(base: Base) -> str:
    note = "every linear layer but the head"
    taken = _list_taken_by_peft(base)
    if taken:
        note += f"; without {', '.join(sorted(taken))}: {_PEFT_TAKES}"
    if base.family.idle:
        note += f"; without {', '.join(sorted(base.family.idle))}: {_IDLE}"
    return note


def _match_expression(
    pattern: str, linears: Mapping[str, Parameter], base: Base, place: str
) -> tuple[tuple[str, ...], str, list[str]]:
    modules = [module for module in linears if re.fullmatch(pattern, module)]
    if modules:
        return tuple(dict.fromkeys(map(_last_component, modules))), "", modules
    if any(re.fullmatch(pattern, module) for module in _list_idle(base)):
        problem = f"{pattern!r} matches only modules that can't be trained: {_IDLE}"
        raise UserError(problem, place, "name modules of the layers", "idle-parameter")
    problem = f"the regular expression {pattern!r} matches no module"
    if _find_named(pattern, linears):
        problem += f"; as a list, [{pattern}], it would"
    example = next(iter(linears), "model.layers.0.self_attn.q_proj")
    hint = f"it must match full names, such as {example}; for example .*\\.self_attn\\..*_proj"
    raise UserError(problem, place, hint, "no-match")


def _explain_no_match(pattern: str, linears: Mapping[str, Parameter], base: Base, place: str) -> UserError:
    """Return the error of a name in the list that matches nothing."""
    problem = f"{pattern!r} matches no module of {base.family.causal_lm}"
    leaves = tuple(dict.fromkeys(map(_last_component, linears)))
    hint = f"known: {', '.join(leaves)}"
    parts = {p.part for p in base.parameters if f".{p.name}".removesuffix(".weight").endswith(f".{pattern}")}
    if pattern in (ALL, ALL_LINEAR):
        hint = f"write target_modules: {pattern}, without a list"
    elif "experts" in base.dims and pattern in FUSED:
        hint = "every feed-forward is a set of routed experts: leave it out, or adapt them with lora.experts: true"
    elif "experts" in base.dims and pattern in FUSED.values():
        hint = "it is a fused parameter: leave it out, or adapt them with lora.experts: true"
    elif parts:
        problem += f" that can be adapted: it is the {', '.join(sorted(parts))}"
    elif pattern == "lm_head":
        hint = "this model's head is its embedding, and has no weights of its own to adapt"
    else:
        close = difflib.get_close_matches(pattern.rpartition(".")[2][:80], leaves, 3, 0.5)
        if close:
            hint = f"nearest: {', '.join(close)}"
    return UserError(problem, place, hint, "no-match")


_IDLE: Final = "PEFT refuses it, or text alone brings no gradient to it"
_PEFT_TAKES: Final = (
    "PEFT takes it for the routed experts, which lora.experts adapts, or renames it, and could not open the adapter"
)


def _last_component(name: str) -> str:
    """Return the last component of a module's name, or of its weight's."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _is_idle(name: str, base: Base) -> bool:
    """Return whether a module, or a weight's, gets no gradient in training on text, or is refused by PEFT."""
    idle = base.family.idle
    return _last_component(name) in idle or any(name.startswith(f"{beginning}.") for beginning in idle)


def _list_idle(base: Base) -> list[str]:
    return [p.name.removesuffix(".weight") for p in base.parameters if p.linear and _is_idle(p.name, base)]


def _layer_prefix(name: str) -> str:
    """Return the part of a name that identifies its layer: `.layers.3.`."""
    match = LAYER.search(name)
    return match[0] if match else ""


def _choose_layers(lora: Lora, base: Base, where: Where) -> set[str] | None:
    """Return the layers of `lora.layers_to_transform` as spelled in modules' names; None: all."""
    if lora.layers_to_transform is None:
        return None
    numbers = lora.layers_to_transform if isinstance(lora.layers_to_transform, list) else [lora.layers_to_transform]
    layers = {int(match[1]): match[0] for p in base.parameters if (match := LAYER.search(p.name))}
    wrong = [number for number in numbers if number not in layers]
    if wrong:
        hint = f"{base.name} has layers 0 to {max(layers)}"
        raise UserError(f"there is no layer {wrong[0]}", where("lora.layers_to_transform"), hint, "no-such-layer")
    return {layers[number] for number in numbers}


def match_first(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that matches, or `otherwise`."""
    return next((value for pattern, value in patterns.items() if pattern_matches(pattern, module)), otherwise)


def pattern_matches(pattern: str, module: str) -> bool:
    """Return whether a pattern matches a module by PEFT's rule."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _match_experts(lora: Lora, base: Base, where: Where, layers: set[str] | None) -> list[Target]:
    """Return the targets on routed experts: r x (in + out) parameters per expert, as in PEFT's target_parameters."""
    fused = [p for p in base.parameters if p.part == "experts" and len(p.shape) == 3]
    if lora.experts is None and not (lora.target_modules == ALL and fused):
        return []
    if not fused:
        hint = "leave lora.experts out: its feed-forward is reached by gate_proj, up_proj, down_proj"
        raise UserError("this model has no routed experts", where("lora.experts"), hint, "no-experts")
    if not base.family.expert_adapters:
        if lora.experts is None:
            return []
        problem = f"adapters for the routed experts of {base.family.causal_lm} are not supported"
        hint = "leave lora.experts out: lora.target_modules adapts attention and the experts that every token visits"
        raise UserError(problem, where("lora.experts"), hint, "no-expert-adapters")
    problems: list[Problem] = []
    if lora.use_dora:
        problem = "adapters of routed experts can't be DoRA"
        problems.append(Problem(problem, where("lora.use_dora"), "set lora.use_dora: false", "dora-of-experts"))
    if lora.starts_from_weights:
        problem = f"adapters of routed experts can't start by {lora.init_lora_weights}"
        hint = "leave lora.experts out, or set lora.init_lora_weights: true"
        problems.append(Problem(problem, where("lora.init_lora_weights"), hint, "init-of-experts"))
    r = lora.experts.r if lora.experts else lora.r
    leaves = tuple(dict.fromkeys(p.name.rpartition(".")[2] for p in fused))
    targets: dict[str, Target] = {}
    for index, name in enumerate(lora.experts.targets if lora.experts else leaves):
        leaf = name if name in leaves else FUSED.get(name, name)
        adapted = [p for p in fused if p.name.endswith(f".{leaf}")]
        if layers is not None:
            adapted = [p for p in adapted if _layer_prefix(p.name) in layers]
        if not adapted:
            problem = f"{name!r} is not a parameter of the routed experts"
            place = where(f"lora.experts.targets[{index}]")
            problems.append(Problem(problem, place, f"known: {', '.join(leaves)}", "no-such-parameter"))
        count = sum(r * p.shape[0] * (p.shape[1] + p.shape[2]) for p in adapted)
        note = f"{name} -> {leaf}: fused in routed experts" if leaf != name else ""
        targets.setdefault(leaf, Target(EXPERTS, (leaf,), "experts", tuple(p.name for p in adapted), count, note, r))
    raise_all(problems)
    return list(targets.values())


def _warn_of_missed_modules(pattern: str, taken: Mapping[str, str], linears: Mapping[str, Parameter]) -> list[str]:
    """Warn of modules that a regular expression misses although its words suggest them."""
    group = re.compile(r"\((?:\?:)?((?!\?)[^()]*\|[^()]*)\)")  # a group of alternatives without inner groups
    text = f"({pattern})"
    unmatched: list[str] = []
    for match in group.finditer(text):
        for word in match[1].split("|"):
            alone = f"{text[: match.start(1)]}{word}{text[match.end(1) :]}"
            with contextlib.suppress(re.error):  # (?i) is allowed at the beginning only
                if not any(re.fullmatch(alone, module) for module in linears):
                    unmatched.append(word)
    by_parent: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module in linears:  # self_attn -> q_proj -> its module in each layer
        place = re.search(r"\.\d+\.(.+)\.(\w+)$", module)
        if place:
            by_parent[place[1]][place[2]].append(module)
    warnings = []
    for parent, leaves in by_parent.items():
        count = {leaf: len(taken.keys() & {*modules}) for leaf, modules in leaves.items()}
        hit = [leaf for leaf in leaves if count[leaf]]
        missed = [leaf for leaf in leaves if not count[leaf]]
        if hit and missed and (unmatched or (len(hit) < len(missed) and not all(leaf in pattern for leaf in hit))):
            warnings.append(f"reaches {', '.join(hit)} of {parent}, not {', '.join(missed)}")
        if any(count[leaf] < len(leaves[leaf]) for leaf in hit) and not re.search(r"[0-9]", pattern):
            counts = ", ".join(f"{leaf} in {count[leaf]} of {len(leaves[leaf])}" for leaf in hit)
            warnings.append(f"reaches {parent}'s {counts} layers")
    if unmatched:
        warning = f"nothing matches its {', '.join(map(repr, unmatched))}"
        warnings[:1] = [f"{warnings[0]}; {warning}" if warnings else warning]
    return warnings


def _list_notes(lora: Lora, base: Base, targets: Sequence[Target], biases: int) -> Iterator[str]:
    yield from dict.fromkeys(target.note for target in targets if target.note)
    r_by_part = {target.part: target.r for target in targets if target.parameters}
    routed = sum(p.count for p in base.parameters if p.part == "experts")
    if routed and "experts" not in r_by_part:
        share = 100 * routed / base.total
        yield f"routed experts, {share:.1f} % of the weights, are not adapted: set lora.experts"
    if len(set(r_by_part.values())) > 1:
        yield "rank by part: " + ", ".join(f"{part} {r}" for part, r in r_by_part.items())
    if any(module.endswith(".kv_b_proj") for target in targets for module in target.modules):
        yield (
            "kv_b_proj: vLLM does not apply an adapter on it when serving latent attention unmerged "
            "(vllm-project/vllm#48974); merge the adapter before serving"
        )
    towers = sorted(name for name in base.family.idle if "." in name)
    if towers and lora.target_modules not in (ALL, ALL_LINEAR):
        yield f"{', '.join(towers)} gets no adapter: {_IDLE}"
    if lora.modules_to_save:
        yield "modules_to_save: vLLM loads no adapter that has them; merge the adapter before serving"
    if biases:
        yield f"bias: {lora.bias} trains {biases} biases of the base too: without them the adapter is another model"
