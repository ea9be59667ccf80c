"""Render chats through a chat template and find which parts of the text are the assistant's."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data.answers import (
    Answer,
    Pieces,
    RenderedRow,
    RowShape,
    Span,
    common_prefix_length,
    find_shape,
    join_spans,
    make_placeholders,
)
from windlass.data.messages import (
    FLAGS,
    OWN_ROLES,
    REASONING,
    ROLES,
    TEXT_ROLES,
    Structs,
    Turn,
    Unfilled,
    arguments_as_text,
    describe_lost_thought,
    drop_none,
    explain_refusal,
    find_lost_part,
    read_json_column,
    read_turn,
    require_calls,
)
from windlass.data.template import (
    CONTROL,
    GENERATION,
    find_template,
    list_searched,
    read_template,
    read_variables,
    require_tokens,
    require_variables,
    run_within,
)
from windlass.errors import UserError, Where
from windlass.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from windlass.runfile import Data

# A part of render_jinja_template in transformers 5.17 to 5.24: calling it directly saves a tenth to a third of the time
# per chat. The public function does it where a later one has no such part.
COMPILED = "_compile_jinja_template"
THINKING = ("thinking", "enable_thinking")  # variables by which templates switch thoughts
SECONDS = 30.0  # that a template may take for its first chat
REMEDIED = ("not-written", "template-refuses", "answer-not-found", "tools-not-written")  # codes that a setting may mend
DOES = {"data.tools: ignore": "trains on the calls without them", "data.reasoning: drop": "trains without it"}
TRIED = ("What does a windlass do?", "It lifts an anchor.", "Who turns it?")  # a chat that templates are tried on
TAG = re.compile(r"</?\|?[A-Za-z_]+\|?>|\[/?[A-Z_]+\]")  # or where the tokenizer has no such token


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer and the template that renders chats for it; `source` says where the template comes from."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    source: str = ""
    notes: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    turns: str = "auto"
    """Assistant turns that loss is computed on, and in how many rows, as in the run file."""
    drop_reasoning: bool = False
    ignore_tools: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    """What a message's keys are called in these data, and how they are called here."""
    shapes: dict[Any, list[RowShape]] = field(default_factory=dict, compare=False, repr=False)
    """Rows of the shapes of chats that have been seen."""
    timed: set[bool] = field(default_factory=set, compare=False, repr=False)
    """Whether a chat without tools, and one with some, has been rendered in time."""
    is_remedy: bool = False
    """Whether it is tried because another refuses a chat."""

    @cached_property
    def has_generation_marks(self) -> bool:
        """Return whether the template itself marks the assistant's part."""
        return bool(GENERATION.search(self.template))

    @cached_property
    def unmarked(self) -> str:
        """The template with plain scopes for its marks, whose calls take longer than all the rest of it."""
        return GENERATION.sub(lambda mark: mark[0].replace("generation", "with"), self.template)

    @cached_property
    def roles(self) -> dict[str, str]:
        """Return role names in messages and the template's names for them: some templates rename `tool`."""
        own = {name: name for name, role in ROLES.items() if role in ("tool", "system") and self.supports_role(name)}
        return {**ROLES, **own}

    @cached_property
    def examines_none(self) -> bool:
        """Return whether the template asks for no content, which answers that call tools have."""
        return re.search(r"\bcontent['\"]?\]? is (?:not )?none\b", self.template) is not None

    def supports_role(self, role: str) -> bool:
        return re.search(rf"""(['"]){re.escape(role)}\1""", self.template) is not None

    @cached_property
    def variables(self) -> dict[str, Any]:
        """Return the variables that the template reads besides the chat: each one costs time per row."""
        named = {**self.tokenizer.special_tokens_map, **self.kwargs}
        return {name: value for name, value in named.items() if name in self.template}

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces({*self.tokenizer.get_added_vocab(), *TAG.findall(self.template)}, self.stops)

    @cached_property
    def stops(self) -> set[str]:
        """Return the tokens that generation ends at, and all special ones if the next role's token ends an answer."""
        last, followed = self.tails
        special = not last.strip() and self.special is not None and self.special.match(followed.lstrip())
        added = self.tokenizer.added_tokens_decoder.values()
        return self.ends | {token.content for token in added if special and token.special}

    @cached_property
    def ends(self) -> set[str]:
        """Return the tokens that generation ends at."""
        ids = list_ends(self.tokenizer)
        return {token.content for number, token in self.tokenizer.added_tokens_decoder.items() if number in ids}

    @cached_property
    def header(self) -> str:
        """Return what the template writes before an answer to a user, with the thought that it may open."""
        tried = self.try_turns(TRIED[0], prompt=True), self.try_turns(TRIED[0])
        prompt, plain = (found[0] if found else "" for found in tried)
        if self.opened:
            return prompt[prompt.rfind(self.opened) :] if self.opened in prompt else self.opened
        return prompt[self.pieces.find_change(prompt, plain) :]

    @cached_property
    def end(self) -> str:
        """Return the token that the template writes behind any answer, else the tokenizer's end token."""
        last, followed = self.tails
        closing = self.pieces.token.match(last.lstrip())
        closes = closing is not None and followed.lstrip().startswith(closing[0])
        return closing[0] if closing and closes else str(self.tokenizer.eos_token)

    def render(self, messages: Sequence[Any], *, first: int = 0, tools: Any = None) -> list[RenderedRow]:
        """Return the rows of a chat. Each assistant turn from message `first` on is supervised in one of them.

        An answer is exact in a rendering that agrees, up to the answer's end, with the rendering of the chat that ends
        with it. The rendering of the full chat has all answers that are exact in it; others get rows of their own, with
        the prompt that the model sees at inference.
        """
        turns = self.read(messages)
        wanted = [i for i, turn in enumerate(turns) if turn.is_assistant and i >= first]
        wanted = [i for i in wanted[-1 if self.turns == "last" else 0 :] if turns[i].trained is not False]
        try:
            read = self.read_tools(tools)
            known = None if read or self.has_generation_marks else self.render_known(turns, wanted)
            rows = self.render_found(turns, read, wanted) if known is None else known
        except UserError as error:
            raise self.add_remedy(error, messages, first, tools) from None
        remarks = {"split": why_split(rows, self.special)} if len(rows) > 1 and self.turns == "auto" else {}
        remarks |= {"tools": ""} if read and isinstance(tools, Structs) and read != tools else {}
        return self.note_remarks(turns, rows, remarks)

    def add_remedy(self, error: UserError, messages: Sequence[Any], first: int, tools: Any) -> UserError:
        """Return the error with the first setting as its hint that makes the row pass, if there is one."""
        changes: list[tuple[str, dict[str, Any]]] = []
        problem = error.problems[0]
        if self.is_remedy or problem.code not in REMEDIED:
            return error
        for name in read_variables(self.template):
            if name in (*THINKING, "tools", "functions"):
                kwargs = {**self.kwargs, name: True if name in THINKING else list[Any]()}
                changes.append((f"data.template_kwargs: {json.dumps(kwargs)}", {"kwargs": kwargs}))
        both = [(f"{key} with data.reasoning: drop", change | {"drop_reasoning": True}) for key, change in changes]
        changes += [("data.reasoning: drop", {"drop_reasoning": True}), ("data.tools: ignore", {"ignore_tools": True})]
        if "<|im_start|>" in self.tokenizer.get_vocab():
            changes.append(("data.chat_template: chatml", {"template": read_template("chatml"), "kwargs": {}}))
        for setting, change in changes + both:
            with suppress(UserError):
                other = replace(self, **change, shapes={}, timed=set(), is_remedy=True)
                other.render(messages, first=first, tools=tools)
                does = DOES.get(setting, "makes it pass")
                return UserError(problem.problem, problem.where, f"{setting} {does}", problem.code)
        return error

    def render_found(self, turns: list[Turn], tools: Any, wanted: Sequence[int]) -> list[RenderedRow]:
        """Return the rows of any chat."""
        if self.has_generation_marks:
            rows = [self.note_thoughts(row, turns, tools) for row in self.render_by_marks(turns, tools, wanted)]
        else:
            rows = self.render_unmarked(turns, tools, wanted)
        for row in rows:
            self.require_written(turns, row)
        return [self.close_row(row, turns, tools) for row in rows]

    def render_known(self, turns: list[Turn], wanted: Sequence[int]) -> list[RenderedRow] | None:
        """Return the rows of a chat of plain texts if they are, but for the texts, those of its shape."""
        contents = [turn.message["content"] for turn in turns]
        roles = tuple(turn.message["role"] for turn in turns)
        if not self.are_plain(turns, contents):
            return None
        users = [content for content, role in zip(contents, roles, strict=True) if role != "assistant"]
        if len({*users}) < len(users):
            return None
        key = (roles, tuple(wanted))
        if key not in self.shapes:
            self.shapes[key] = self.find_shapes(turns, wanted)
        rows = []
        for shape in self.shapes[key]:
            text = self.apply(turns[: shape.length], None)[0]
            trimmed = [content.strip() for content in contents]
            answers = shape.find_answers(text, contents) or shape.find_answers(text, trimmed)
            if answers is None:
                return None
            rows.append(self.close_row(RenderedRow(text, answers, shape.length), turns, None))
        return rows or None

    def find_shapes(self, turns: list[Turn], wanted: Sequence[int]) -> list[RowShape]:
        """Return the shapes of the rows of a chat of placeholders; none if they can't be told."""
        words = make_placeholders(len(turns))
        chat = [
            turn._replace(message={**turn.message, "content": word}) for turn, word in zip(turns, words, strict=True)
        ]
        try:
            rows = self.render_unmarked(chat, None, wanted)
        except UserError as error:
            if error.problems[0].code == "template-slow":
                raise
            return []
        shapes = [find_shape(row.text, row.answers, row.length) for row in rows if not row.remarks]
        known = [shape for shape in shapes if shape is not None]
        return known if len(known) == len(rows) else []

    def are_plain(self, turns: Sequence[Turn], contents: Sequence[Any]) -> bool:
        """Return whether the turns are text in which the template finds nothing that it looks for."""
        texts = {*map(type, contents)} == {str} and all(content and not content[0].isspace() for content in contents)
        if not texts or any(len(turn.message) > 2 or turn.reasoning for turn in turns):
            return False
        joined = "\n".join(contents).lower()
        return self.examined is not None and not any(text in joined for text in self.examined)

    @cached_property
    def examined(self) -> list[str] | None:
        """Texts that the template looks for in messages, and may cut them at; None if it looks at more than these."""
        return list_searched(self.template)

    def note_remarks(
        self, turns: Sequence[Turn], rows: Sequence[RenderedRow], remarks: dict[str, str]
    ) -> list[RenderedRow]:
        """Add what a user should know of a chat to the first of its rows."""
        for row in rows:
            remarks |= row.remarks
        trained = [(i, row.text[start:end]) for row in rows for i, (start, end) in row.answers.items() if i >= 0]
        if any(turns[i].is_empty and text.strip() for i, text in trained):
            remarks["empty"] = ""
        answers = "\0".join(turn.words for turn in turns if turn.is_assistant)
        spelled_end = next((end for end in sorted({*self.stops, self.end}) if end in answers), None)
        remarks |= {"ends": spelled_end} if spelled_end else {}
        for call in itertools.chain(*(turn.calls for turn in turns)):
            if isinstance(call["function"]["arguments"], Unfilled):
                remarks["filled"] = str(call["function"].get("name"))
        if self.special is not None:
            spelled = self.special.search("\0".join(turn.words for turn in turns if not turn.is_assistant))
            remarks |= {"special": spelled[0]} if spelled else {}
        for date in self.dates:
            if any(re.search(rf"(?<!\d){re.escape(date)}(?!\d)", row.text) for row in rows):
                names = [name for name in read_variables(self.template) if "date" in name]
                remarks["date"] = f"{date!r}"
                remarks["date"] += f"; data.template_kwargs: {{{names[0]}: {date}}} fixes it" if names else ""
        header = self.header.strip()
        for row in rows if header else ():
            for i, (start, end) in row.answers.items():
                asked = start < end and i > 0 and (turns[i - 1].message["role"] == "user" or self.opens_always)
                written = row.text[:start].rstrip()
                if asked and not written.endswith(header):
                    remarks["thought"] = repr(header)
                    switch = next((self.openers[each] for each in self.openers if written.endswith(each)), "")
                    if switch:
                        remarks["thought"] += f"; data.template_kwargs: {switch} gives the one before this answer"
                elif asked and not row.text[:start].endswith(self.header):
                    space = row.text[len(written) : start]
                    remarks["blank"] = f"{space!r} instead of {self.header[len(self.header.rstrip()) :]!r}"
        return [row._replace(remarks={} if number else remarks) for number, row in enumerate(rows)]

    @cached_property
    def openers(self) -> dict[str, str]:
        """What the template writes before an answer with other switches for thoughts, longest first, and those."""
        found: dict[str, str] = {}
        for name, value in itertools.product(read_variables(self.template), (True, False)):
            if name in THINKING:
                kwargs = {**self.kwargs, name: value}
                other = replace(self, kwargs=kwargs, shapes={}, timed=set(), is_remedy=True)
                found.setdefault(other.header.strip(), json.dumps(kwargs))
        found.pop("", None)  # any text would end with it
        return dict(sorted(found.items(), key=lambda each: -len(each[0])))

    @cached_property
    def special(self) -> re.Pattern[str] | None:
        """The tokenizer's special tokens: text of a message that spells one becomes it."""
        added = self.tokenizer.added_tokens_decoder.values()
        names = {token.content for token in added if token.special} | {*self.tokenizer.all_special_tokens}
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None

    @cached_property
    def dates(self) -> list[str]:
        """Today, as the template writes it."""
        forms = re.findall(r"""strftime_now\((['"])(.*?)\1""", self.template)
        return [datetime.now().strftime(form) for _, form in forms]

    def render_whole(self, messages: Sequence[Any], tools: Any = None) -> str:
        """Return the text of all of a chat, for loss on everything."""
        turns = self.read(messages)
        text = self.apply(turns, self.read_tools(tools))[0]
        self.require_written(turns, RenderedRow(text, {}, len(turns)))
        return text

    def write_request(self, messages: Sequence[Any], tools: Any) -> dict[str, Any]:
        """Return the messages and tools as a request to a server has them."""
        read = [arguments_as_text(turn.message) for turn in self.read(messages)]
        return {"messages": read, "tools": self.read_tools(tools)}

    def read(self, messages: Sequence[Any]) -> list[Turn]:
        turns = [read_turn(message, self.names, self.roles, drop_reasoning=self.drop_reasoning) for message in messages]
        if not {*TEXT_ROLES}.issuperset(str(turn.message["role"]) for turn in turns):
            self.require_roles(turns)
            require_calls(turns)
        return turns

    def render_by_marks(self, turns: list[Turn], tools: Any, wanted: Sequence[int]) -> list[RenderedRow]:
        """Return one row, or a row for each answer that later turns would change in the template's rendering."""
        whole = self.render_marked(turns, tools, wanted)
        if self.turns != "each" and (wanted == [len(turns) - 1] or not whole.answers.keys() >= {*wanted}):
            return [whole]

        def is_exact(i: int) -> bool:
            start, end = whole.answers[i]
            words = turns[i].words.strip()
            body = max(start, whole.text.rfind(words, start, end) + len(words) if words else start)
            own = self.apply(turns[: i + 1], tools)[0]
            answer = Answer(whole.text, start, end, body)
            return whole.text.startswith(own.rstrip()) or self.pieces.find_in(own, answer, "") is not None

        if self.turns != "each" and all(map(is_exact, wanted)):
            return [whole]
        rows = [self.render_marked(turns[: i + 1], tools, [i]) for i in wanted]
        self.require_split_allowed(rows)
        return rows

    def note_thoughts(self, row: RenderedRow, turns: list[Turn], tools: Any) -> RenderedRow:
        """Add a remark to a row that lacks earlier thoughts which the prompt of one of its answers has."""
        for i, (start, _) in row.answers.items():
            thoughts = [thought.strip() for turn in turns[: max(i, 0)] for thought in turn.reasoning]
            lost = [thought for thought in thoughts if thought not in row.text[:start]]
            with suppress(UserError):  # a template that writes no such prompt
                if lost and any(thought in self.apply(turns[:i], tools, prompt=True)[0] for thought in lost):
                    return row._replace(remarks={"prompt": ""})
        return row

    def close_row(self, row: RenderedRow, turns: list[Turn], tools: Any) -> RenderedRow:
        """Return a row with the token of the next turn that its last answer ends with, or would before a user."""
        i, (start, end) = max(row.answers.items(), key=lambda answer: answer[1], default=(0, (0, 0)))
        written = row.text.rstrip()
        if end < len(written) or written.endswith((*self.stops,)) or row.text.endswith(self.end):
            return row
        is_last = row.length == len(turns)
        text = "" if is_last else self.apply(turns[: row.length + 1], tools)[0]
        if not text.startswith(row.text):  # nothing follows, or what follows changes the answer
            others = not is_last and turns[row.length].message["role"] != "user"
            if others or self.tails[0] or written.endswith(self.pieces.tokens):
                return row
            text = row.text + self.tails[1]
        end = self.pieces.close(text, start, end, self.pieces.find_opener(self.header))
        if end <= len(row.text) or (is_last and not text.endswith((*self.ends,), 0, end)):
            return row
        return row._replace(text=text[:end], answers={**row.answers, i: (start, end)})

    def require_split_allowed(self, rows: Sequence[RenderedRow]) -> None:
        if self.turns == "all" and len(rows) > 1:
            problem = f"{why_split(rows, self.special)}, so one row can't have all answers"
            hint = "set data.turns: auto, which gives such answers rows of their own"
            raise UserError(problem, "data.turns", hint, "turns-rewritten")

    def render_marked(self, turns: list[Turn], tools: Any, wanted: Sequence[int]) -> RenderedRow:
        """Return the rendering with the spans that the template's own marks enclose."""
        text, marked = self.apply(turns, tools, marks=True)
        answers = [i for i, turn in enumerate(turns) if turn.is_assistant]
        if len(marked) > len(answers):
            marked = join_spans(text, marked)
        if len(marked) != len(answers) != len(wanted):
            problem = f"the chat template marks {len(marked)} parts of a chat with {len(answers)} assistant turns"
            hint = "mark each assistant turn once: {% generation %} … {% endgeneration %}"
            raise UserError(problem, "data", hint, "generation-marks")
        if self.marks_users:
            problem = "the chat template's {% generation %} marks enclose a user's turn"
            hint = "put {% generation %} and {% endgeneration %} around the assistant's part only"
            raise UserError(problem, "data.chat_template", hint, "generation-marks")
        single = len(marked) == len(answers)
        ends = (*self.stops, self.end)
        spans = [
            self.pieces.trim_mark(text, a, b, self.header, close=single or text[b:].lstrip().startswith(ends))
            for a, b in marked
        ]
        if not single:  # several marks in a turn: all are supervised
            written = "".join(text[start:end] for start, end in spans)
            for thought in itertools.chain(*(turns[i].reasoning for i in wanted)):
                if thought.strip() not in written:
                    raise self.not_written_error(*describe_lost_thought(thought))
            several = {-1 - number: span for number, span in enumerate(spans) if span[0] < span[1]}
            return RenderedRow(text, several, len(turns))
        return RenderedRow(text, {i: spans[answers.index(i)] for i in wanted}, len(turns))

    def try_turns(self, *texts: str, prompt: bool = False, marks: bool = False) -> tuple[str, list[Span]] | None:
        """Render a chat of these texts, a user's first; None if the template refuses it."""
        roles = itertools.cycle(("user", "assistant"))
        turns = [Turn({"role": role, "content": text}, None, []) for text, role in zip(texts, roles, strict=False)]
        try:
            return self.apply(turns, None, prompt=prompt, marks=marks)
        except UserError:
            return None

    @cached_property
    def marks_users(self) -> bool:
        """Return whether the template's marks enclose what a user says."""
        text, marked = self.try_turns(*TRIED[:2], marks=True) or ("", [])
        return any(TRIED[0] in text[start:end] for start, end in marked)

    @cached_property
    def tails(self) -> tuple[str, str]:
        """Return what the template writes behind an answer: behind the last, and behind one that a user follows."""
        last, followed = ((self.try_turns(*texts) or ("", []))[0] for texts in (TRIED[:2], TRIED))
        return last.partition(TRIED[1])[2], followed.partition(TRIED[1])[2]

    @cached_property
    def opens_always(self) -> bool:
        """Return whether the template opens an answer behind every chat, also a finished one."""
        prompt = self.try_turns(TRIED[0], prompt=True)
        last, followed = self.tails
        if prompt is None or not last or not followed or followed.startswith(last.rstrip()):
            return False
        token = next(reversed(self.pieces.token.findall(last)), "")
        return token != "" and last.rstrip().endswith(token) and token in prompt[0]

    @cached_property
    def opened(self) -> str:
        """Return what the template opens another answer with behind a finished chat, if it always does."""
        rest = self.tails[0].rpartition(self.end)[2] if self.opens_always else ""
        closing = self.pieces.token.match(rest)
        return rest[closing.end() :] if closing and closing[0] in self.stops else rest

    def render_unmarked(self, turns: list[Turn], tools: Any, wanted: Sequence[int]) -> list[RenderedRow]:
        # The first turns, and the header of an answer to them if asked.
        write = cache(lambda count, prompt=False: self.apply(turns[:count], tools, prompt=prompt)[0])
        whole = write(len(turns))
        answers = {i: self.find_answer(turns, i, tools, write) for i in wanted}
        opener = self.pieces.find_opener(self.header)
        rows: list[RenderedRow] = []
        left = list(wanted)
        while left:
            last = left[-1]
            lengths = [last + 1] if rows or self.turns == "each" else [len(turns), last + 1]
            for length in lengths:
                text = answers[last].text if length == last + 1 else write(length)
                ends = {i: self.pieces.find_in(text, answers[i], opener) for i in left}
                if ends[last] is not None:
                    break
            spans = {i: (answers[i].start, end) for i, end in ends.items() if end is not None}
            if self.turns == "each":
                spans = {last: spans[last]}
            remarks = {} if all(answers[i].after_prompt for i in spans) else {"prompt": ""}
            rows.insert(0, RenderedRow(text, spans, length, remarks))
            left = [i for i in left if i not in spans]
        self.require_split_allowed(rows)
        return rows or [RenderedRow(whole, {}, len(turns))]

    def find_answer(self, turns: list[Turn], i: int, tools: Any, write: Callable[..., str]) -> Answer:
        """Find a turn in the rendering of the chat that ends with it."""
        if self.opens_always and self.end not in self.tails[0]:
            problem = "the chat template opens another answer at the end of every chat"
            hint = "write {% if add_generation_prompt %} … {% endif %} around that in a template of your own"
            raise UserError(problem, "data.chat_template", hint, "opens-always")
        text = write(i + 1)
        body = turns[i].words.strip()
        begin = self.pieces.find_last(text, body)
        opened = self.opened
        prompt = write(i, True) if i else ""
        found = self.pieces.find_start(text, prompt, lambda: write(i).removesuffix(opened), self.header) if i else None
        start, after_prompt = found or (None, False)
        follows = i > 0 and turns[i - 1].is_assistant
        unprompted = start is not None and follows and not prompt.rstrip().endswith(self.header.strip())
        if unprompted or (start is None and begin >= 0 and (i == 0 or follows)):
            # No prompt leads to an opening answer, and hardly one to an answer that follows another.
            before = common_prefix_length(text, write(i)) if i else 0
            headed = self.pieces.find_header(text[before : begin if begin >= 0 else None], self.header)
            start = (begin if start is None else start) if headed is None else before + headed
            after_prompt = False
        elif (
            start is not None and begin > start and text[start:begin].strip() and not self.header and turns[i].is_plain
        ):
            start = begin  # without a header that generation starts from, what precedes the words is none of the answer
        if start is None:
            if any(turn.reasoning for turn in turns[:i]) and (own := self.find_after_thoughts(turns, i, tools, prompt)):
                return own
            self.require_written(turns[: i + 1], RenderedRow(text, {}, i + 1))
            problem = "the chat template doesn't write an answer behind the prompt that it writes for it"
            hint = "leave out such rows, or give data.chat_template a template with {% generation %} … "
            hint += "{% endgeneration %} around the assistant's part"
            raise UserError(problem, "data", hint, "answer-not-found")
        body_end = start if begin < start or turns[i].calls else begin + len(body)
        end = self.pieces.find_end(text.removesuffix(opened), start)
        if self.opens_always and (closed := text.find(self.end, body_end)) >= 0:
            end = closed + len(self.end)
        return Answer(text, start, end, body_end, after_prompt or i == 0)

    def find_after_thoughts(self, turns: list[Turn], i: int, tools: Any, prompt: str) -> Answer | None:
        """Find a turn behind its prompt, which has earlier thoughts that the template drops once the turn is there."""
        bare = [*(read_turn(turn.message, {}, self.roles, drop_reasoning=True) for turn in turns[:i]), turns[i]]
        write = cache(lambda count, prompt=False: self.apply(bare[:count], tools, prompt=prompt)[0])
        with suppress(UserError):
            text, start, end, body, _ = self.find_answer(bare, i, tools, write)
            moved = len(prompt) - start
            if text[:start] == write(i, True):
                return Answer(prompt + text[start:], start + moved, end + moved, body + moved)
        return None

    def require_roles(self, turns: Sequence[Turn]) -> None:
        for role in {str(turn.message["role"]) for turn in turns}.difference(OWN_ROLES):
            if not self.supports_role(role):
                problem = f"a message has the role {role!r}, which {self.source or 'the chat template'} doesn't name"
                close = difflib.get_close_matches(role.lower(), ROLES, n=1)
                hint = f"did you mean {close[0]}? roles are" if close else "write one of the roles"
                hint += f" {', '.join(OWN_ROLES)}, or one that a data.chat_template of yours names"
                raise UserError(problem, "data", hint, "unknown-role")

    def read_tools(self, tools: Any) -> Any:
        if self.ignore_tools:
            return None
        tools = read_json_column(tools) or None
        tools = drop_none(tools, "") if isinstance(tools, Structs) else tools
        if tools and not re.search(r"\btools\b", self.template):
            problem = f"{self.source or 'the chat template'} doesn't write tools, and a row has some"
            hint = "leave out such rows, or name a data.chat_template that writes tools and calls"
            raise UserError(problem, "data.tools", hint, "tools-not-written")
        return tools

    def require_written(self, turns: Sequence[Turn], row: RenderedRow) -> None:
        """Refuse a row that lacks anything of the chat up to its last answer."""
        count = max(row.answers, default=len(turns) - 1) + 1
        lost = find_lost_part(turns[: count or row.length], row.text, row.answers)
        if lost is not None:
            raise self.not_written_error(*lost)
        for i, (start, end) in row.answers.items():
            closing = self.pieces.find_unclosed(row.text[start:end]) if i >= 0 and turns[i].calls else None
            if closing and closing in self.template:
                hint = "leave out such rows, or name a data.chat_template that writes it"
                raise self.not_written_error(f"the end of a tool call: {closing!r}", "data", hint)

    def not_written_error(self, what: str, key: str, hint: str) -> UserError:
        return UserError(f"{self.source or 'the chat template'} leaves out {what}", key, hint, "not-written")

    def apply(
        self, turns: list[Turn], tools: Any, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text, and the spans that the template's own marks enclose."""
        from jinja2 import TemplateError

        chat = [turn.message for turn in turns]
        if self.examines_none:
            chat = [{**one, "content": None} if one.get("tool_calls") and not one["content"] else one for one in chat]
        try:
            if bool(tools) in self.timed:
                return self.run_template(chat, tools, prompt=prompt, marks=marks)
            text, spans = run_within(SECONDS, lambda: self.run_template(chat, tools, prompt=prompt, marks=marks))
            self.timed.add(bool(tools))
            return text, spans
        except TimeoutError:
            problem = f"the chat template takes longer than {SECONDS:g} s for one chat"
            hint = "look for a loop over a long range in it, or name another data.chat_template"
            raise UserError(problem, "data.chat_template", hint, "template-slow") from None
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            roles = [str(message["role"]) for message in chat]
            problem = f"the chat template refuses a chat ({', '.join(roles)}): {error}"
            hint = explain_refusal(roles, str(error), writes_tools=self.supports_role("tool"))
            raise UserError(problem, "data", hint, "template-refuses") from None

    def run_template(
        self, chat: list[dict[str, Any]], tools: Any, *, prompt: bool, marks: bool
    ) -> tuple[str, list[Span]]:
        from transformers.utils import chat_template_utils as jinja

        variables = {"tools": tools, "add_generation_prompt": prompt, **self.variables}
        if tools:
            variables["tools"] = tools
        # For chats of plain text, which are most, the public function gives the same result more slowly.
        compiled = getattr(jinja, COMPILED, None)
        keys = {key for message in chat for key in message}
        types = {type(value) for message in chat for value in message.values()}
        plain = not tools and types == {str} and keys.isdisjoint(REASONING)
        if plain and compiled and not marks:
            return str(compiled(self.unmarked).render(messages=chat, documents=None, **variables)), []
        options = {"chat_template": self.template, "return_assistant_tokens_mask": marks, **variables}
        filled = [{**one, "content": one["content"] or ""} for one in chat]
        # Some take a call's arguments as text, as in OpenAI's format, or no content that is None.
        for form in (chat, [*map(arguments_as_text, chat)], filled):
            try:
                texts, marked = jinja.render_jinja_template([form], **options)
                break
            except TypeError:
                if form is filled:
                    raise
        return str(texts[0]), [(start, end) for start, end in marked[0]] if marks else []


def list_ends(tokenizer: PreTrainedTokenizerBase, folder: Path | None = None, model: Any = None) -> set[int]:
    """Return the tokens that generation ends at: of the tokenizer, of generation_config.json, of the model's config."""
    ends = read_json((folder or Path(str(tokenizer.name_or_path))) / "generation_config.json").get("eos_token_id")
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = [each if isinstance(each, list) else [each] for each in (ends, own, tokenizer.eos_token_id)]
    return {*itertools.chain(*named)} - {None}


def choose_template(
    tokenizer: PreTrainedTokenizerBase, data: Data | None = None, where: Where = str, *, fallback: str = "mistral"
) -> ChatTemplate:
    """Return the template that the run file sets, else the tokenizer's, else the fallback."""
    asked = data.chat_template if data else None
    own = getattr(tokenizer, "chat_template", None)
    notes = []
    named = asked
    if asked is None and own:
        template = tokenizer.get_chat_template()
        source = "the tokenizer's chat template"
    elif asked is None:
        named = fallback
        template = read_template(fallback)
        require_tokens(fallback, tokenizer, where("data.chat_template"))
        notes.append(f"the tokenizer has no chat template: {fallback.capitalize()}'s is used")
        source = f"{fallback.capitalize()}'s chat template (the tokenizer has none)"
    else:
        template, source = find_template(asked, own, where("data.chat_template"))
    unknown = sorted({*CONTROL.findall(template)} - {*tokenizer.get_vocab()}) if named else []
    if unknown:
        are = "are no tokens of this tokenizer and are" if len(unknown) > 1 else "is no token of this tokenizer and is"
        notes.append(f"{' and '.join(unknown)} {are} spelt out")
    if data is None:
        return ChatTemplate(tokenizer, template, source, tuple(notes))
    require_variables(template, data.template_kwargs, where)
    names = {data.columns[name]: name for name in ("role", "content", "from", "value", *FLAGS) if name in data.columns}
    return ChatTemplate(
        tokenizer, template, source, tuple(notes), data.template_kwargs, data.turns, data.reasoning == "drop",
        data.tools == "ignore", names,
    )  # fmt: skip


def why_split(rows: Sequence[RenderedRow], special: re.Pattern[str] | None) -> str:
    """Return where the rows of a chat differ first."""
    at, text = min((common_prefix_length(row.text, rows[-1].text), row.text) for row in rows[:-1])
    start, stop = max(0, at - 20), at + 30
    for token in special.finditer(text, max(0, start - 40), stop + 40) if special else ():  # quoted whole
        start = token.start() if token.start() < start < token.end() else start
        stop = token.end() if token.start() < stop < token.end() else stop
    return f"the chat template writes turns differently once later ones follow (at {text[start:stop]!r})"
