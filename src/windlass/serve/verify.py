"""Does a server answer with the exported adapter? Compare its log-probabilities with the probe's."""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from windlass.errors import UserError
from windlass.files import read_json
from windlass.observe.format import describe_served, format_plural
from windlass.serve.client import BEFORE, ECHO, FORCED, OPEN, PROMPT, WHOLE, RefusedError, ServedModel
from windlass.serve.probe import (
    ADAPTER,
    AT_SCALE,
    BASE,
    LOGPROBS,
    ROUNDED,
    SCALES,
    describe_difference,
    fit_slope,
    median_size,
    read_probe,
    subtract,
)

EXPORT: Final = "export.json"
FORCED_POSITIONS: Final = 6  # of a row, each a request
# What noise explains, by the coarsest dtype of the base's weights: nats (median), and a share of what the adapter
# changes. Servers of FP8 weights round the inputs of products to FP8, too.
NOISE: Final = {"BF16": (0.02, 0.015), "F8": (0.1, 0.25)}
EXACT: Final = 1e-3  # nats, between two programs that compute in float32
DEVIATIONS: Final = 4  # standard errors of a slope
NOISES: Final = 2.5  # medians of the noise, that a median error may be
DECODING: Final = 5  # of the prompts' error, that the decoded tokens' may be
OTHER_BASE: Final = 5  # times the noise that is expected, from which on it is another base
CLEARLY: Final = 0.5  # of an effect or an error: less is much nearer
SMALLEST_SCALE: Final = 0.3  # that is named: an adapter at less is as likely another one
ONCE, TWICE = 1, 2  # roundings of a sum: the second takes a part of an adapter
ABOUT: Final = 0.05  # of what it takes, by which servers differ
PRECISE: Final = 0.3  # of the usual noise in bfloat16: a server with less doesn't compute in it
FAR_SCALES: Final = (0.5, 2.0)  # a polynomial through near ones would magnify what rounding does to each
SCALE_STEP: Final = 0.01  # by which a slope is measured
SCALE_ROUNDS: Final = 6
APPLIED: Final = "applied"
AS_BASE: Final = "answers as the base"
IN_PART: Final = "applied otherwise"
UNDECIDED: Final = "undecided"
SERVE_TEMPLATE: Final = (  # how, as the end of a problem
    "; the export has it: vLLM takes --chat-template chat_template.jinja, llama.cpp --chat-template-file"
)
WAYS: Final = {
    PROMPT: "log-probabilities of prompts (prompt_logprobs)",
    ECHO: "log-probabilities of prompts (echo)",
    FORCED: "no log-probabilities of prompts: tokens were forced one by one by logit_bias",
}


@dataclass
class Verdict:
    """What a server computes, and how that is known."""

    verdict: str
    summary: str
    model: str
    way: str
    nearest: str = ""
    share: float = 0.0  # of the adapter's effect
    share_error: float = 0.0  # standard error
    noise: float = 0.0  # median, in nats: of the server's base, else expected
    tokens: int = 0
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # by hypothesis, in nats
    bound: float = 0.0  # median difference of decoded tokens
    problems: list[str] = field(default_factory=list)  # of decoding and of the chat template
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.verdict == APPLIED and not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def verify(
    url: str, folder: Path, model: str | None, key: str | None, key_variable: str, say: Callable[[str], None]
) -> Verdict:
    """Compare a server's model with an export. Raises what makes a comparison impossible."""
    probe = read_probe(folder, read_json(folder / EXPORT))
    server = ServedModel(url, key=key, key_variable=key_variable, say=say)
    server.model = choose_model(server, model)
    expected = probe.get("tokenizer", {})
    tokens = server.tokenize(expected["text"]) if expected else None
    if tokens is not None and tokens != expected["ids"]:
        problem = f"the server has another tokenizer: {describe_tokens(tokens, expected['ids'])}"
        hint = f"serve the base model {probe['base']} with the tokenizer in its folder"
        raise UserError(problem, server.url, hint, "other-tokenizer")
    longest = max((row["ids"] for row in probe["rows"]), key=len)
    try:
        server.complete(longest)
    except RefusedError as error:
        hint = f"the server must take prompts of {len(longest)} tokens, as numbers, of the base {probe['base']}"
        raise UserError(f"it refuses a row of the probe: {error}", server.url, hint, "refused-row") from None
    way = server.find_way(longest)
    if not way:
        hint = "start it with log-probabilities: decoded text alone doesn't show which parts of an adapter are applied"
        raise UserError("it gives no log-probabilities", server.url, hint, "no-logprobs")
    say(f"server    {server.url}, {server.model}: {WAYS[way]}")
    verdict = compare_logprobs(server, probe, way, say)
    check_decoding(server, probe, verdict)
    check_template(server, probe, verdict)
    return verdict


def choose_model(server: ServedModel, wanted: str | None) -> str:
    names = server.list_models()
    if wanted in names:
        return str(wanted)
    listed = ", ".join(names) or "none"
    if wanted is None and len(names) == 1:
        return names[0]
    problem = f"the server has no model {wanted}" if wanted else f"the server has {format_plural(len(names), 'model')}"
    hint = f"it has {listed}; name one with --model, or start the server with the adapter under this name"
    raise UserError(problem, "--model", hint, "no-such-model")


def describe_tokens(served: Sequence[int], trained: Sequence[int]) -> str:
    """Name the first token in which two sequences differ."""
    pairs = enumerate(zip(served, trained, strict=False))
    first = next((i for i, (one, other) in pairs if one != other), min(len(served), len(trained)))
    one, other = (tokens[first] if first < len(tokens) else "no token" for tokens in (served, trained))
    return f"token {first + 1} is {one}, it was {other} in training"


# --- log-probabilities ---


def compare_logprobs(server: ServedModel, probe: dict[str, Any], way: str, say: Callable[[str], None]) -> Verdict:
    """Find the hypothesis that fits the server's log-probabilities."""
    measured: list[float] = []
    served_base: list[float] = []
    keys = [key for key in (LOGPROBS, ROUNDED) if key in probe["rows"][0]]
    expected: dict[str, dict[str, list[float]]] = {key: {name: [] for name in probe["hypotheses"]} for key in keys}
    base = "" if way == FORCED else server.find_base()  # forcing takes a request for each token
    for number, row in enumerate(probe["rows"], 1):
        try:
            values = read_row(server, row, way)
            of_base = read_row(replace(server, model=base), row, way) if base else {}
        except RefusedError as error:
            raise UserError(f"it refuses row {number} of the probe: {error}", server.url, "", "refused-row") from None
        measured += values.values()
        served_base += [of_base[index] for index in values] if base else []
        for key, name in itertools.product(keys, probe["hypotheses"]):
            expected[key][name] += [row[key][name][index] for index in values]
        if way == FORCED:
            say(f"row       {number} of {len(probe['rows'])}: {format_plural(len(values), 'token')}")
    if not measured:
        raise UserError("it gives no log-probabilities of these rows", server.url, "ask again", "cut-short")
    return judge(measured, served_base, expected, probe, server.model, way)


def read_row(server: ServedModel, row: dict[str, Any], way: str) -> dict[int, float]:
    """Return log-probabilities by their place among the row's positions."""
    positions = row["positions"]
    if way != FORCED:
        values = server.read_prompt_logprobs(row["ids"], way)
        return {} if values is None else {place: values[i - 1] for place, i in enumerate(positions)}
    columns = [[values[place] for values in row["logprobs"].values()] for place in range(len(positions))]
    order = sorted(range(len(positions)), key=lambda place: min(columns[place]) - max(columns[place]))
    forced = {place: server.force(row["ids"], positions[place]) for place in sorted(order[:FORCED_POSITIONS])}
    return {place: value for place, value in forced.items() if value is not None}


class Fit(NamedTuple):
    """How well a hypothesis explains what a server answers."""

    name: str
    rounds: int
    excess: float  # largest of the slopes of what is left, in multiples of what noise explains; up to 1 it explains
    score: float  # their root mean square
    error: float  # median, in nats


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of the same tokens: a server's, and by hypothesis as exact as the probe's and rounded twice."""

    measured: Sequence[float]
    exact: dict[str, list[float]]
    rounded: dict[str, list[float]]  # empty: nothing is added to a rounded product
    noise: float  # of this server, in nats
    slack: float  # share of the adapter's effect
    rounds: Sequence[int]  # of sums, that are likely here

    @cached_property
    def effect(self) -> list[float]:
        return subtract(self.exact[ADAPTER], self.exact[BASE])

    def fit(self, name: str) -> Fit:
        """Fit a hypothesis, whose sums the server rounds once or twice."""
        exact = self.exact[name]
        expected = {ONCE: exact}
        if self.rounded:
            lost = subtract(exact, self.rounded[name])
            share = fit_slope(lost, subtract(exact, self.measured))[0]
            for rounds in (ONCE, TWICE):
                near = min(max(share, rounds - ONCE - ABOUT), rounds - ONCE + ABOUT)
                expected[rounds] = [value - near * part for value, part in zip(exact, lost, strict=True)]
        fits = [self.compare(name, rounds, values) for rounds, values in expected.items()]
        return min(fits, key=lambda fit: (fit.excess > 1, fit.rounds not in self.rounds, fit.excess))

    def compare(self, name: str, rounds: int, expected: Sequence[float]) -> Fit:
        """Compare what is left with the direction of every other hypothesis: none may explain a part of it."""
        rest = subtract(self.measured, expected)
        error = median_size(rest)
        excesses = [error / (NOISES * self.noise + self.slack * median_size(self.effect) + EXACT)]
        if excesses[0] > 1:
            return Fit(name, rounds, excesses[0], excesses[0], error)
        for values in self.exact.values():
            direction = subtract(values, self.exact[name])
            if max(map(abs, direction)) <= EXACT:
                continue  # it can't be told from this one
            slope, deviation = fit_slope(direction, rest)
            bias = self.slack * abs(fit_slope(direction, self.effect)[0])
            excesses.append(abs(slope) / (DEVIATIONS * deviation + bias))
        return Fit(name, rounds, max(excesses), math.hypot(*excesses) / math.sqrt(len(excesses)), error)


def find_scale(measured: Sequence[float], columns: dict[float, list[float]]) -> tuple[float, float]:
    """Return the scale of the adapter that fits best, and its median error in nats.

    columns: log-probabilities by scale. Between them: Lagrange's polynomial, whose slope is followed.
    """

    def compute(scale: float) -> list[float]:
        weights = [math.prod((scale - o) / (one - o) for o in columns if o != one) for one in columns]
        return [sum(map(operator.mul, weights, values)) for values in zip(*columns.values(), strict=True)]

    scale, found = 1.0, []
    for _ in range(SCALE_ROUNDS):
        values = compute(scale)
        rest = subtract(measured, values)
        found.append((median_size(rest), scale))
        ahead = [(there - here) / SCALE_STEP for there, here in zip(compute(scale + SCALE_STEP), values, strict=True)]
        scale = min(max(scale + fit_slope(ahead, rest)[0], min(columns)), max(columns))
    error, scale = min(found)
    return scale, error


def select_scales(values_of: dict[str, list[float]], scales: Sequence[float]) -> dict[float, list[float]]:
    return {0.0: values_of[BASE], 1.0: values_of[ADAPTER]} | {one: values_of[AT_SCALE.format(one)] for one in scales}


def judge(
    measured: Sequence[float],
    served_base: Sequence[float],
    expected: dict[str, dict[str, list[float]]],
    probe: dict[str, Any],
    model: str,
    way: str,
) -> Verdict:
    """Choose between the hypotheses. served_base: what the server's base answers, empty if it serves none."""
    exact = expected[LOGPROBS]
    floor, slack = NOISE[probe["dtype"]]
    usual = max(probe["noise"], floor)
    by_rounds = {ONCE: find_scale(measured, select_scales(exact, SCALES))}
    _, left = by_rounds[ONCE]  # beside the adapter at any scale
    noise = min([usual, left, *(median_size(subtract(measured, values)) for values in exact.values())])
    if noise <= PRECISE * NOISE["BF16"][0]:  # it rounds no inputs to FP8, however the base is stored
        slack = NOISE["BF16"][1]
    if served_base:
        noise = median_size(subtract(served_base, exact[BASE]))
        if noise > OTHER_BASE * usual:
            raise_another_model(probe, model, f"its base is {noise:.2g} nats (median) from {probe['base']}")
    rounds = [ONCE, TWICE]
    if noise <= PRECISE * usual or ROUNDED not in expected:
        rounds = [ONCE]
    elif served_base:  # beside the adapter, which is then added to rounded products
        rounds = [TWICE]
    answers = Answers(measured, exact, expected.get(ROUNDED, {}), noise, slack, rounds)
    fits = {name: answers.fit(name) for name in exact}
    explaining = sorted((fit for fit in fits.values() if fit.excess <= 1), key=lambda fit: fit.score)
    fitting = [fit for fit in explaining if fit.rounds in rounds or fit.name == ADAPTER]
    nearest = (fitting or sorted(fits.values(), key=lambda fit: fit.error))[0]
    effect = median_size(answers.effect)
    share, error = fit_slope(answers.effect, subtract(measured, exact[BASE]))
    figures = f"{100 * share:.1f} ± {200 * error:.1f} % of its effect, {len(measured)} tokens, noise {noise:.2g} nats"
    errors = {name: describe_difference(measured, values) for name, values in exact.items()}
    bound = DECODING * fits[ADAPTER].error + slack * effect + EXACT
    verdict = Verdict(IN_PART, "", model, way, nearest.name, share, error, noise, len(measured), errors, bound)
    found = {fit.name for fit in fitting}
    scales = {AT_SCALE.format(scale) for scale in SCALES}
    if TWICE in rounds:
        by_rounds[TWICE] = find_scale(measured, select_scales(expected[ROUNDED], FAR_SCALES))
    scale, scale_error = min((by_rounds[each] for each in rounds), key=operator.itemgetter(1))
    enough = max(CLEARLY * nearest.error, 0.0 if fitting else NOISES * noise + EXACT)
    if not found - scales and scale >= SMALLEST_SCALE and scale_error <= enough:
        verdict.nearest = AT_SCALE.format(round(scale, 2))
    name = describe_hypothesis(verdict.nearest)
    if BASE in found and ADAPTER not in found:
        verdict.verdict, verdict.nearest = AS_BASE, BASE
        verdict.summary = f"answers as the base, the adapter is not applied: {figures}"
    elif BASE in found:
        verdict.verdict = UNDECIDED
        nats = " and ".join(f"{fits[one].error:.2g} nats from the {one}" for one in (ADAPTER, BASE))
        smaller = f"the adapter is smaller than this server's noise (it is {nats}, medians)"
        verdict.summary = f"can't be told: {smaller}: serve it in float32, or merged"
    elif ADAPTER in found:
        verdict.verdict, verdict.nearest = APPLIED, ADAPTER
        verdict.summary = f"applied: {figures}"
        if describe_served(share, error):
            rounding = f"rounding in 16 bits takes {100 - 100 * share:.0f} % of it: serve it merged, or in float32"
            verdict.summary = f"applied, and {rounding} ({figures})"
    elif fitting or verdict.nearest != nearest.name:
        verdict.summary = f"fits {name}, not as exported: {figures}"
    elif nearest.error <= CLEARLY * effect or served_base:
        verdict.summary = f"fits none: nearest is {name}, and rounding doesn't explain the rest ({figures})"
        verdict.notes.append("it may be another adapter, or this one in part")
    else:
        raise_another_model(probe, model, f"neither base nor adapter: {figures}; nearest: {nearest.name}")
    others = [describe_hypothesis(fit.name) for fit in fitting if fit.name != verdict.nearest]
    if others and verdict.verdict in (APPLIED, IN_PART):
        verdict.notes.append(f"too faint to be excluded at this precision: {', '.join(others)}")
    return verdict


def describe_hypothesis(name: str) -> str:
    return {BASE: "the base", ADAPTER: "the adapter"}.get(name, f"the adapter {name}")


def raise_another_model(probe: dict[str, Any], model: str, why: str) -> NoReturn:
    hint = f"serve {probe['base']} with this adapter"
    raise UserError(f"the server has another model: {why}", model, hint, "another-model")


# --- decoded tokens, chat template ---


def check_decoding(server: ServedModel, probe: dict[str, Any], verdict: Verdict) -> None:
    """Compare decoded tokens with the adapter's: a server may compute prompts and decoding differently."""
    if verdict.verdict != APPLIED:
        return
    same = tokens = 0
    differences = []
    for row in (row for row in probe["rows"] if row.get("decoded")):
        expected = row["ids"][row["start"] :]
        try:
            ids, logprobs = server.generate(row["ids"][: row["start"]], len(expected))
        except RefusedError as error:
            verdict.notes.append(f"decoding was not compared: {error}")
            return
        if ids is None:
            continue
        pairs = list(zip(ids, expected, strict=False))
        equal = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
        tokens += len(pairs)
        same += equal
        # The first other token is compared too: at a tie its log-probability is the expected one's.
        references = [row[key][ADAPTER] for key in (LOGPROBS, ROUNDED) if key in row]
        for value, *adapters in list(zip(logprobs or (), *references, strict=False))[: equal + 1]:
            differences.append(min(abs(value - adapter) for adapter in adapters))
    if tokens:
        verdict.notes.append(f"decoded: {same} of {tokens} tokens are the adapter's, up to each row's first other one")
    if differences:
        difference = median_size(differences)
        if difference > verdict.bound:
            text = f"decoding differs from the prompt's answers: median difference {difference:.3g} nats"
            verdict.problems.append(f"{text}, bound {verdict.bound:.3g}")


def check_template(server: ServedModel, probe: dict[str, Any], verdict: Verdict) -> None:
    """Compare the server's chat template with the one that was trained with."""
    chats = [row["chat"] for row in probe["rows"] if "chat" in row]
    parts = set()
    compared = 0
    for chat in chats:
        found = server.tokenize_chat(chat)
        if not found:
            continue
        compared += 1
        same = next((part for part, tokens in found.items() if are_trained(part, tokens, chat["ids"])), None)
        if same:
            parts.add(same)
        elif chat.get("dates"):
            verdict.notes.append(f"chat template: not compared, it writes the day's date: {', '.join(chat['dates'])}")
            return
        else:
            text = f"another than the one trained with: {describe_tokens(next(iter(found.values())), chat['ids'])}"
            verdict.problems.append(f"the server's chat template is {text}{SERVE_TEMPLATE}")
            return
    if not chats:
        verdict.notes.append("chat template: not compared, no row of the probe is a chat that its template makes again")
    if compared:
        up_to = "".join(f", {part}" for part in (OPEN, BEFORE) if part in parts)
        verdict.notes.append(f"chat template: {compared} of {len(chats)} chats have the tokens trained on{up_to}")
    elif chats and (refusal := server.find_chat_refusal()):
        verdict.problems.append(f"the server answers no chat: {refusal.rstrip('.')}{SERVE_TEMPLATE}")
    elif chats:
        verdict.notes.append("chat template: not compared, since the server has no /tokenize that takes these chats")


def are_trained(part: str, tokens: list[int], trained: list[int]) -> bool:
    """Return whether a server's tokens of this part of a chat are those of training, as far as these go."""
    if part == WHOLE:
        return tokens[: len(trained)] == trained
    if part == OPEN:  # what follows may lengthen its last token
        tokens = tokens[:-1]
    return tokens[: len(trained)] == trained[: len(tokens)]


def print_verdict(verdict: Verdict) -> None:
    print(verdict.summary)
    for problem in verdict.problems:
        print(f"problem: {problem}")
    for note in verdict.notes:
        print(f"note: {note}")
