"""Continue fixed prompts at evaluations, with the model as it is trained: sharded, in FP8, with split experts.

Generation is greedy: a left-padded batch goes through the same forward as in training, then its new tokens one by one,
with the keys and values of those before. No random numbers are drawn.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.compat import CACHE
from windlass.data.chat import list_ends
from windlass.data.inputs import read_prompt_lines
from windlass.data.packing import iter_documents
from windlass.errors import UserError, Where
from windlass.files import append_json_line
from windlass.observe.reader import is_as_in_the_data
from windlass.observe.recorder import Recorder
from windlass.ranks import collectives
from windlass.ranks.rank import StopSignal
from windlass.run_folder import SAMPLES
from windlass.runfile.fields import SampleSection
from windlass.train.console import Progress
from windlass.train.head import Head
from windlass.train.model import TrainedModel

STATE_INSIDE: Final = ("recurrent_gemma",)  # families that keep what they need of earlier tokens in their layers
DUMMY: Final = [0, 0]  # input of a rank without a prompt, which still takes part in every gather


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    ids: list[int]
    reference: str = ""  # the text that follows in the data


@dataclass(eq=False)
class Samples:
    """A run's prompts, and what continues them."""

    prompts: Sequence[Prompt]
    settings: SampleSection
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    tokens: int  # whose keys and values are kept at once: a micro-batch's
    model: TrainedModel
    stop_signal: StopSignal
    recorder: Recorder
    progress: Progress

    def generate(self, step: int, evaluations: int) -> None:
        """Continue every prompt and append the texts to samples.jsonl, after some evaluations. A collective.

        evaluations: how many there have been with this one.
        """
        if (evaluations - 1) % self.settings.every:
            return
        until = time.monotonic() + self.settings.max_seconds
        rank = collectives.get_rank()
        world = collectives.get_world_size()
        prompts = self.prompts[rank::world]
        rows = [list(prompt.ids) for prompt in prompts]
        at_once = 1  # without padding
        if keeps_keys(self.model.causal_lm):
            longest = max(len(prompt.ids) for prompt in self.prompts) + self.settings.max_new_tokens
            at_once = max(1, self.tokens // longest)
        rounds = -(-len(self.prompts) // (world * at_once))  # the same on every rank
        self.model.causal_lm.eval()
        ended: list[bool] = []
        stopped = False
        for start in range(0, rounds * at_once, at_once):
            if not stopped:  # on all ranks or none
                finished, stopped = self._continue_rows(rows[start : start + at_once], until)
                ended += finished
        self.model.causal_lm.train()
        texts = [
            self.tokenizer.decode(ids[len(prompt.ids) :], skip_special_tokens=True)
            for ids, prompt in zip(rows[: len(ended)], prompts, strict=False)
        ]
        everyones = collectives.all_gather(list(zip(texts, ended, strict=True)))
        if rank == 0:
            self._write(step, everyones)
        self.recorder.mark("pause")

    def _write(self, step: int, everyones: list[list[tuple[str, bool]]]) -> None:
        """Append a line per prompt. everyones: by rank, the text of each of its prompts and whether it has ended."""
        reached = sum(map(len, everyones))
        if reached < len(self.prompts) and not self.stop_signal.received:
            count = f"{reached:,} of {len(self.prompts):,}"
            text = f"{count} prompts were reached within max_seconds: {self.settings.max_seconds:g}"
            self.progress.console.print(f"warning: train.sample: {text}", style="yellow")
        path = self.recorder.folder / SAMPLES
        world = len(everyones)
        right = 0
        for number, prompt in enumerate(self.prompts[:reached]):
            text, ended = everyones[number % world][number // world]
            line = {"step": step, "prompt": prompt.text, "reference": prompt.reference, "text": text, "ended": ended}
            with self.recorder.unwritten(path):
                append_json_line(path, line)
            right += is_as_in_the_data(line)
        if right:
            self.progress.console.print(f"step {step:>5}  {right} of {reached} answers as in the data")

    def _continue_rows(self, rows: list[list[int]], until: float) -> tuple[list[bool], bool]:
        """Append tokens as often as any rank needs. Return which rows have ended, and whether time is up."""
        model = self.model
        device = model.device
        ends = list_ends(self.tokenizer, model=model.causal_lm)
        finished = [False] * len(rows)
        choices = iter_choices(model.causal_lm, rows or [DUMMY], self.max_length, device)
        for _ in range(self.settings.max_new_tokens):
            self.recorder.mark("pause")
            with torch.no_grad(), model.autocast:
                chosen = next(choices)
            for number, (row, choice) in enumerate(zip(rows, chosen, strict=False)):
                if not finished[number] and len(row) < self.max_length:
                    row.append(choice)
                    finished[number] = choice in ends
            open_rows = any(not end and len(row) < self.max_length for row, end in zip(rows, finished, strict=True))
            stop = time.monotonic() > until or self.stop_signal.received
            state = torch.tensor([float(open_rows), float(stop)], device=device)
            if collectives.get_world_size() > 1:
                dist.all_reduce(state)
            any_open, any_stop = state
            if not any_open or any_stop:
                break
        return finished, bool(any_stop)


def keeps_keys(model: PreTrainedModel) -> bool:
    """Whether a model's forward returns what it needs of earlier tokens. Of others, whole rows are computed."""
    return model.config.get_text_config().model_type not in STATE_INSIDE


def iter_choices(
    model: PreTrainedModel, rows: Sequence[list[int]], longest: int, device: torch.device
) -> Iterator[list[int]]:
    """Yield the likeliest token after each row, then the one after that, without end. The model has our forward.

    longest: tokens of a row, up to which positions count.
    """
    head = Head(model)
    width = max(map(len, rows))
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    keys: dict[str, Any] = {"use_cache": keeps_keys(model)}
    while True:
        last = torch.arange(1, len(rows) + 1, device=device) * ids.shape[1] - 1
        outputs = model(input_ids=ids, attention_mask=mask, position_ids=positions, supervised=last, **keys)
        choices, cache = head.argmax(outputs.last_hidden_state), getattr(outputs, CACHE, None)
        yield choices.tolist()
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        added, place = choices[:, None], (positions[:, -1:] + 1).clamp_max(longest - 1)
        if cache is None:
            ids, positions = torch.cat([ids, added], 1), torch.cat([positions, place], 1)
        else:
            ids, positions, keys[CACHE] = added, place, cache


def read_prompts(
    settings: SampleSection,
    tokenizer: PreTrainedTokenizerBase,
    validation: pa.Table,
    max_length: int,
    where: Where,
) -> list[Prompt]:
    """Return the run file's prompts, those of a file, or the beginnings of validation rows."""
    if settings.from_eval is not None:
        return _prompts_from_rows(validation, settings.from_eval, tokenizer)
    texts = settings.prompts or []
    key = "train.sample.prompts"
    if settings.file is not None:
        key = "train.sample.file"
        texts = [_parse_line(line) for line in read_prompt_lines(settings.file, where(key))]
    prompts = []
    for text in texts:
        rendered = text
        if settings.chat:
            if not tokenizer.chat_template:
                hint = "leave chat out: no chat template wrote the rows"
                raise UserError(
                    "the tokenizer has no chat template", where("train.sample.chat"), hint, "no-chat-template"
                )
            turn = [{"role": "user", "content": text}]
            rendered = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        ids = tokenizer(rendered, add_special_tokens=not settings.chat)["input_ids"]
        if not 0 < len(ids) < max_length:
            problem = f"the prompt {text[:40]!r} has {len(ids)} tokens, and rows may have {max_length}"
            raise UserError(problem, where(key), "shorten it, or raise data.max_length", "prompt-too-long")
        prompts.append(Prompt(text, ids))
    return prompts


def _parse_line(line: str) -> str:
    """Return the text of a prompt file's line: plain text, or JSON with a `prompt`."""
    try:
        value = json.loads(line)
    except ValueError:
        return line
    return str(value["prompt"]) if isinstance(value, dict) and "prompt" in value else line


def _prompts_from_rows(validation: pa.Table, count: int, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return prompts from the first validation documents: up to the first supervised token, or half of the document."""
    prompts: list[Prompt] = []
    for document, supervised in iter_documents(validation):
        start = len(document) // 2 if supervised[0] else int(supervised.argmax())
        if 0 < start < len(document):
            text = tokenizer.decode(document[:start].tolist(), skip_special_tokens=True)
            reference = tokenizer.decode(document[start:].tolist(), skip_special_tokens=True)
            prompts.append(Prompt(text, document[:start].tolist(), reference))
        if len(prompts) == count:
            return prompts
    return prompts
