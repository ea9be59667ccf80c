"""Requests to an OpenAI-compatible server: vLLM, SGLang, llama.cpp's. Only the standard library."""

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Final

from windlass.data.messages import REASONING
from windlass.errors import UserError

SECONDS: Final = 300  # until an answer: the first request may compile
PATIENCE: Final = 60.0  # seconds that one request is repeated for, if the server is busy or drops it
PAUSE: Final = 1.0  # seconds before the first repetition; twice as long before each further one
BUSY: Final = (429, 502, 503, 504)
FORCING: Final = 100  # added to a token's logit
# vLLM and llama.cpp (`repeat_penalty`) else take a model's own, from its generation_config.json, and choose others.
NEUTRAL: Final = {"repetition_penalty": 1, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
SHOWN: Final = 300  # characters of a server's message

PROMPT: Final = "prompt_logprobs"
ECHO: Final = "echo"
FORCED: Final = "forced"  # the tokens of a prompt, each generated

WHOLE: Final = "whole"  # of a chat
OPEN: Final = "up to the end of its answer's text"
BEFORE: Final = "up to its last answer"

Generated = tuple[list[int] | None, list[float] | None]  # tokens and their log-probabilities; None: it doesn't say


class RefusedError(Exception):
    """The server understood the address, and refuses this request."""


class BusyError(Exception):
    """What may be answered if it is asked again. `pause`: after how many seconds, or when, the server says."""

    def __init__(self, why: str, pause: str | None = None) -> None:
        super().__init__(why)
        self.pause = float(pause) if pause and pause.isdecimal() else 0.0
        with contextlib.suppress(ValueError, OverflowError):  # no date
            date = parsedate_to_datetime(pause or "")
            date = date if date.tzinfo else date.replace(tzinfo=UTC)
            self.pause = max(0.0, date.timestamp() - time.time())


@dataclass
class ServedModel:
    """One model of a server."""

    url: str
    model: str = ""
    key: str | None = None
    key_variable: str = "OPENAI_API_KEY"
    say: Callable[[str], None] = print
    models: dict[str, dict[str, Any]] = field(default_factory=dict)  # those that were listed, by name

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/").removesuffix("/v1")
        if "://" not in self.url:
            self.url = f"http://{self.url}"

    def request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer's JSON. A server that is busy is asked again, for PATIENCE seconds at most."""
        began, pause = time.monotonic(), PAUSE
        while True:
            try:
                return self._ask(self.url + path, body)
            except BusyError as busy:
                wait = busy.pause or pause
                waited = time.monotonic() - began
                if waited + wait > PATIENCE:
                    hint = f"it was asked for {waited:.0f} s, and would be again in {wait:.0f} s: verify it again when "
                    hint += "it is not busy, or at its own address"
                    raise UserError(f"no answer: {busy}", self.url + path, hint, "busy") from None
                self.say(f"waiting   {busy}: asked again in {wait:.0f} s")
                time.sleep(wait)
                pause *= 2

    def _ask(self, where: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        content = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(where, content, headers)
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            error.close()
            if error.code in (401, 403):
                hint = (
                    f"put the server's key into the variable {self.key_variable}, or name another: --api-key-env NAME"
                )
                raise UserError(f"the server answers {error.code}", where, hint, "no-access") from None
            why = f"{error.code}: {_read_message(text)}"
            if error.code in BUSY:
                raise BusyError(why, error.headers["Retry-After"]) from None
            raise RefusedError(why) from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            hint = "name the address of an OpenAI-compatible server; a proxy may cut answers off"
            raise UserError("the answer is no complete JSON", where, hint, "cut-short") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, ConnectionResetError | http.client.IncompleteRead):
                raise BusyError(f"the connection broke off ({type(reason).__name__})") from None
            hint = "start the server, wait until it has loaded, and name its address: http://HOST:PORT"
            raise UserError(f"no answer: {reason}", where, hint, "no-answer") from None

    def list_models(self) -> list[str]:
        try:
            self.models = {str(model["id"]): model for model in self.request("/v1/models")["data"]}
            return [*self.models]
        except (RefusedError, KeyError, TypeError) as error:
            hint = "name the address of an OpenAI-compatible server, without /v1/…"
            raise UserError(f"it lists no models: {error}", f"{self.url}/v1/models", hint, "no-models") from None

    def find_base(self) -> str:
        """Return the name of the base that is served beside this adapter; empty if the server doesn't say."""
        parent = str(self.models[self.model].get("parent") or "")
        return parent if parent in self.models else ""

    def complete(self, prompt: Sequence[int], tokens: int = 1, **options: Any) -> dict[str, Any]:
        """Return the first choice of a completion."""
        body = {"model": self.model, "prompt": [*prompt], "max_tokens": tokens, "temperature": 0, **options}
        answer = self.request("/v1/completions", body)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not choices:
            raise RefusedError(f"an answer without choices: {str(answer)[:SHOWN]}")
        choice: dict[str, Any] = choices[0]
        return choice

    def find_way(self, ids: list[int]) -> str:
        """Return by which requests the server gives log-probabilities of a prompt; empty if by none."""
        for way in (PROMPT, ECHO):
            with contextlib.suppress(RefusedError):
                if self.read_prompt_logprobs(ids, way):
                    return way
        forced = [self.force(ids, position) for position in range(1, min(len(ids), 4))]
        known = [value for value in forced if value is not None]
        return FORCED if any(value < -1e-3 for value in known) else ""  # 0: of what the forcing has made certain

    def read_prompt_logprobs(self, ids: list[int], way: str) -> list[float] | None:
        """Return each token's log-probability from the second on; None if the answer has none."""
        if way == PROMPT:
            entries = self.complete(ids, prompt_logprobs=0).get("prompt_logprobs") or []
            by_token = [(entry or {}).get(str(token), {}) for token, entry in zip(ids, entries, strict=False)]
            given = [entry.get("logprob") for entry in by_token]
        else:
            logprobs = self.complete(ids, echo=True, logprobs=0).get("logprobs") or {}
            given = logprobs.get("token_logprobs") or []
        if len(given) <= 1:  # without an echo there is the generated token's alone
            return None
        values = [float(value) for value in given[1 : len(ids)] if isinstance(value, float | int)]
        if len(values) < len(ids) - 1:
            problem = f"log-probabilities of {len(values) + 1} tokens for a prompt of {len(ids)}"
            raise UserError(problem, self.url, "the server cuts prompts or answers off: raise its limits", "cut-short")
        return values

    def force(self, ids: list[int], position: int) -> float | None:
        """Return the log-probability of the token at this position, by making the server generate it."""
        token = ids[position]
        with contextlib.suppress(RefusedError):
            choice = self.complete(ids[:position], logprobs=1, logit_bias={str(token): FORCING})
            generated, logprobs = _read_generated(choice)
            if logprobs is not None and (generated is None or generated[:1] == [token]):
                return logprobs[0]
        return None

    def generate(self, prompt: Sequence[int], tokens: int) -> Generated:
        """Return what follows the prompt greedily."""
        choice = self.complete(prompt, tokens, logprobs=1, return_token_ids=True, **NEUTRAL)
        generated = _read_generated(choice)
        if choice.get("finish_reason") == "length" and 0 < len(generated[1] or ()) < tokens:
            return None, None  # llama.cpp leaves out tokens that end within a character
        return generated

    def tokenize(self, text: str) -> list[int] | None:
        """Return the tokens of a text without a beginning of sequence; None if the server doesn't say."""
        flags = {"add_special_tokens": False, "add_special": False, "parse_special": True}
        with contextlib.suppress(RefusedError):
            return self._ask_for_tokens({"prompt": text, "content": text, **flags})
        return None

    def tokenize_chat(self, chat: dict[str, Any]) -> dict[str, list[int]]:
        """Return the tokens of a chat through the server's chat template: `WHOLE`, else what it writes, or nothing.

        An answer at the end is refused by Mistral's tokenizer in vLLM, as are calls without an id; llama.cpp leaves it
        open, to be continued, and writes its thoughts without the template. What is before it is as in any chat.
        """
        messages = [_name_thoughts(message) for message in chat["messages"]]
        options = {"add_generation_prompt": False, **({"tools": chat["tools"]} if chat.get("tools") else {})}
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        parts = {WHOLE: messages, BEFORE: messages[: answers[-1]] if answers else []}
        found: dict[str, list[int]] = {}
        for part, asked in parts.items():
            if not asked or WHOLE in found:
                continue
            with contextlib.suppress(RefusedError):
                if tokens := self._ask_for_tokens({"messages": asked, **options}):
                    found[part] = tokens
                    continue
                rendered = self.request("/apply-template", {"messages": asked, **options})  # llama.cpp's
                body = {"content": rendered.get("prompt"), "add_special": True, "parse_special": True}
                if tokens := self._ask_for_tokens(body):
                    found[OPEN if part == WHOLE else part] = tokens
        return found

    def find_chat_refusal(self) -> str:
        """Return why the server answers no chat; empty if it does, or takes none at all."""
        body = {"model": self.model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        try:
            self.request("/v1/chat/completions", body)
        except RefusedError as error:
            return "" if str(error).startswith("404") else str(error)
        return ""

    def _ask_for_tokens(self, body: dict[str, Any]) -> list[int]:
        answer = self.request("/tokenize", {"model": self.model, **body})
        try:
            return [int(token) for token in answer["tokens"]]
        except (KeyError, TypeError, ValueError):
            raise RefusedError(f"an answer without tokens: {str(answer)[:SHOWN]}") from None


def _name_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Give thoughts both names: vLLM's /tokenize reads one, llama.cpp and most templates the other."""
    thoughts = next((message[name] for name in REASONING if message.get(name)), None)
    return {**message, "reasoning": thoughts, "reasoning_content": thoughts} if thoughts else message


def _read_generated(choice: dict[str, Any]) -> Generated:
    """Read tokens and log-probabilities in vLLM's form or in llama.cpp's."""
    logprobs = choice.get("logprobs") or {}
    content = logprobs.get("content")
    if content:
        ids = [entry["id"] for entry in content] if "id" in content[0] else None
        return ids, [float(entry["logprob"]) for entry in content]
    return choice.get("token_ids"), logprobs.get("token_logprobs") or None


def _read_message(text: str) -> str:
    """Return the message of an error's body."""
    with contextlib.suppress(ValueError, AttributeError):
        body = json.loads(text)
        error = body.get("error", body)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    return " ".join(text.split())[:SHOWN]
