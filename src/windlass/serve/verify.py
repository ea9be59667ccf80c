"""Does a server answer with the exported adapter? Compare its log-probabilities with the probe's."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from windlass.errors import UserError
from windlass.files import read_json
from windlass.observe.format import format_plural
from windlass.serve.client import ECHO, FORCED, PROMPT, RefusedError, Server
from windlass.serve.probe import (
    ADAPTER,
    BASE,
    BOUNDS,
    describe_difference,
    read_probe,
)

EXPORT: Final = "export.json"
FORCED_POSITIONS: Final = 6  # of a row, each a request
CLEARLY: Final = 0.5  # of another hypothesis's error, that the best one's may be
APPLIED: Final = "applied"
AS_BASE: Final = "answers as the base"
IN_PART: Final = "applied otherwise"
UNDECIDED: Final = "undecided"
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
    bound: float = 0.0
    judged: str = "largest"
    tokens: int = 0
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # by hypothesis, in nats
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
    server = Server(url, key=key, key_variable=key_variable)
    server.model = choose_model(server, model)
    require_tokenizer(server, probe)
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


def choose_model(server: Server, wanted: str | None) -> str:
    names = server.list_models()
    if wanted in names:
        return str(wanted)
    listed = ", ".join(names) or "none"
    if wanted is None and len(names) == 1:
        return names[0]
    problem = f"the server has no model {wanted}" if wanted else f"the server has {format_plural(len(names), 'model')}"
    hint = f"it has {listed}; name one with --model, or start the server with the adapter under this name"
    raise UserError(problem, "--model", hint, "no-such-model")


def require_tokenizer(server: Server, probe: dict[str, Any]) -> None:
    """Refuse a server that splits a text into other tokens."""
    expected = probe.get("tokenizer", {})
    tokens = server.tokenize(expected["text"]) if expected else None
    if tokens is not None and tokens != expected["ids"]:
        problem = f"the server has another tokenizer: {describe_tokens(tokens, expected['ids'])}"
        hint = f"serve the base model {probe['base']} with the tokenizer in its folder"
        raise UserError(problem, server.url, hint, "other-tokenizer")


def describe_tokens(served: Sequence[int], trained: Sequence[int]) -> str:
    """Name the first token in which two sequences differ."""
    pairs = enumerate(zip(served, trained, strict=False))
    first = next((i for i, (one, other) in pairs if one != other), min(len(served), len(trained)))
    one, other = (tokens[first] if first < len(tokens) else "no token" for tokens in (served, trained))
    return f"token {first + 1} is {one}, it was {other} in training"


# --- log-probabilities ---


def compare_logprobs(server: Server, probe: dict[str, Any], way: str, say: Callable[[str], None]) -> Verdict:
    """Find the hypothesis that fits the server's log-probabilities."""
    measured: list[float] = []
    expected: dict[str, list[float]] = {name: [] for name in probe["hypotheses"]}
    for number, row in enumerate(probe["rows"], 1):
        try:
            values = read_row(server, row, way)
        except RefusedError as error:
            raise UserError(f"it refuses row {number} of the probe: {error}", server.url, "", "refused-row") from None
        for index, value in values.items():
            measured.append(value)
            for name in expected:
                expected[name].append(row["logprobs"][name][index])
        if way == FORCED:  # a request for each token
            say(f"row       {number} of {len(probe['rows'])}: {format_plural(len(values), 'token')}")
    if not measured:
        raise UserError("it gives no log-probabilities of these rows", server.url, "ask again", "cut-short")
    return judge(measured, expected, probe, server.model, way)


def read_row(server: Server, row: dict[str, Any], way: str) -> dict[int, float]:
    """Return log-probabilities by their place among the row's positions."""
    positions = row["positions"]
    if way != FORCED:
        values = server.read_prompt_logprobs(row["ids"], way)
        return {} if values is None else {place: values[i - 1] for place, i in enumerate(positions)}
    columns = [[values[place] for values in row["logprobs"].values()] for place in range(len(positions))]
    order = sorted(range(len(positions)), key=lambda place: min(columns[place]) - max(columns[place]))
    forced = {place: server.force(row["ids"], positions[place]) for place in sorted(order[:FORCED_POSITIONS])}
    return {place: value for place, value in forced.items() if value is not None}


def judge(
    measured: Sequence[float], expected: dict[str, list[float]], probe: dict[str, Any], model: str, way: str
) -> Verdict:
    """Choose between the hypotheses: one counts only if it clearly fits better than the others."""
    errors = {name: describe_difference(measured, values) for name, values in expected.items()}
    nearest = min(errors, key=lambda name: errors[name]["mean"])
    effect = describe_difference(expected[ADAPTER], expected[BASE])
    # A token at a tie between two experts goes to the other one by the last bit: with experts the median is judged.
    judged = "median" if probe["mixture"] else "largest"
    least, part = BOUNDS[probe["dtype"]][judged]
    bound = max(least, part * effect[judged])
    mean = {name: error["mean"] for name, error in errors.items()}
    beats_adapter = mean[nearest] <= CLEARLY * mean[ADAPTER]
    is_applied = errors[ADAPTER][judged] <= bound and mean[ADAPTER] <= CLEARLY * mean[BASE] and not beats_adapter
    if is_applied:
        nearest = ADAPTER
    distance = errors[nearest][judged]
    figures = f"{judged} difference {distance:.3g} nats of {len(measured)} tokens, bound {bound:.3g} ({probe['dtype']})"
    verdict = Verdict(IN_PART, "", model, way, nearest, bound, judged, len(measured), errors)
    if is_applied:
        verdict.verdict = APPLIED
        verdict.summary = f"applied: {figures}; the base is {effect[judged]:.3g} away"
        close = [name for name in mean if name not in (ADAPTER, BASE) and mean[ADAPTER] > CLEARLY * mean[name]]
        if close:
            faint = ", ".join(f"the adapter {name}" for name in close)
            verdict.notes.append(f"too faint to be excluded at this precision: {faint}")
    elif distance <= bound and beats_adapter and nearest == BASE:
        verdict.verdict = AS_BASE
        verdict.summary = f"answers as the base, the adapter is not applied: {figures}"
    elif distance <= bound and beats_adapter:
        verdict.summary = f"fits the adapter {nearest}, not all of it: {figures}"
    elif max(errors[ADAPTER][judged], errors[BASE][judged]) <= bound:
        verdict.verdict = UNDECIDED
        verdict.summary = (
            f"can't be told: base and adapter are {effect['mean']:.2g} nats apart (mean), and the server is "
            f"{mean[ADAPTER]:.2g} from the adapter and {mean[BASE]:.2g} from the base"
        )
    elif mean[nearest] <= CLEARLY * effect["mean"]:
        name = {BASE: "the base", ADAPTER: "the adapter"}.get(nearest, f"the adapter {nearest}")
        verdict.summary = f"fits none: nearest is {name}, and rounding doesn't explain the rest ({figures})"
    else:
        problem = f"the server has another model: neither base nor adapter ({figures}; nearest: {nearest})"
        hint = f"serve {probe['base']} with this adapter"
        raise UserError(problem, model, hint, "another-model")
    return verdict


# --- decoded tokens, chat template ---


def check_decoding(server: Server, probe: dict[str, Any], verdict: Verdict) -> None:
    """Compare decoded tokens with the adapter's: a server may compute prompts and decoding differently."""
    if verdict.verdict != APPLIED:
        return
    same = tokens = 0
    differences = []
    for row in (row for row in probe["rows"] if row.get("decoded")):
        expected = row["ids"][row["start"] :]
        try:
            generated = server.generate(row["ids"][: row["start"]], len(expected))
        except RefusedError as error:
            verdict.notes.append(f"decoding was not compared: {error}")
            return
        if generated.ids is None:
            continue
        pairs = list(zip(generated.ids, expected, strict=False))
        equal = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
        tokens += len(pairs)
        same += equal
        # The first other token is compared too: at a tie its log-probability is the expected one's.
        for value, adapter in list(zip(generated.logprobs or (), row["logprobs"][ADAPTER], strict=False))[: equal + 1]:
            differences.append(abs(value - adapter))
    if tokens:
        verdict.notes.append(f"decoded: {same} of {tokens} tokens are the adapter's, up to each row's first other one")
    if differences:
        values = sorted(differences)
        judged = values[len(values) // 2] if probe["mixture"] else values[-1]
        if judged > verdict.bound:
            text = f"decoding differs from the prompt's answers: {verdict.judged} difference {judged:.3g} nats"
            verdict.problems.append(f"{text}, bound {verdict.bound:.3g}")


def check_template(server: Server, probe: dict[str, Any], verdict: Verdict) -> None:
    """Compare the server's chat template with the one that was trained with."""
    chats = [row["chat"] for row in probe["rows"] if "chat" in row]
    compared = 0
    for chat in chats:
        tokens = server.tokenize_chat(chat)
        if tokens is None:
            continue
        compared += 1
        trained = chat["ids"]
        if tokens[: len(trained)] != trained[: len(tokens)] or len(tokens) < len(trained):
            verdict.problems.append(
                f"the server's chat template is another than the one trained with: {describe_tokens(tokens, trained)}"
            )
            return
    if chats:
        verdict.notes.append(f"chat template: {compared} of {len(chats)} chats have the tokens trained on")


def print_verdict(verdict: Verdict) -> None:
    print(verdict.summary)
    for problem in verdict.problems:
        print(f"problem: {problem}")
    for note in verdict.notes:
        print(f"note: {note}")
