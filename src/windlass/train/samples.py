"""Continue fixed prompts at evaluations, with the model as it is trained: sharded, in FP8, with split experts.

Generation is greedy and uses no KV cache: a right-padded batch goes through the same forward as in training, so nothing
that training depends on changes, and no random numbers are drawn.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist

from windlass.data.inputs import read_prompt_lines
from windlass.errors import UserError
from windlass.files import append_json_line
from windlass.observe.steps import IGNORED
from windlass.ranks import collectives as group
from windlass.run_folder import SAMPLES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from windlass.runfile.fields import SampleSection
    from windlass.train.batches import Batches
    from windlass.train.loop import Loop

DUMMY: Final = [0, 0]  # input of a rank without a prompt, which still takes part in every gather


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    ids: list[int]
    reference: str = ""  # the text that follows in the data


@dataclass(eq=False)
class Samples:
    """A run's prompts."""

    prompts: Sequence[Prompt]
    settings: SampleSection
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    at_once: int  # sequences in one forward pass
    folder: Path

    def generate(self, loop: Loop) -> None:
        """Continue every prompt and append the texts to samples.jsonl. A collective."""
        evaluations = sum("eval_loss" in values for values in loop.log_history)
        if (evaluations - 1) % self.settings.every:
            return
        ends = time.monotonic() + self.settings.max_seconds
        rank, world = group.get_rank(), group.get_world_size()
        own = [list(prompt.ids) for prompt in self.prompts[rank::world]]
        rounds = -(-len(self.prompts) // (world * self.at_once))  # the same on every rank
        loop.causal_lm.eval()
        ended, stopped = list[bool](), False
        for start in range(0, rounds * self.at_once, self.at_once):
            if not stopped:  # on all ranks or none
                finished, stopped = self._continue_rows(loop, own[start : start + self.at_once], ends)
                ended += finished
        loop.causal_lm.train()
        texts = [
            self.tokenizer.decode(ids[len(prompt.ids) :], skip_special_tokens=True)
            for ids, prompt in zip(own[: len(ended)], self.prompts[rank::world], strict=False)
        ]
        everyones = group.all_gather(list(zip(texts, ended, strict=True)))
        if rank == 0:
            reached = sum(map(len, everyones))
            if reached < len(self.prompts) and not loop.stop_signal.received:
                of, seconds = f"{reached:,} of {len(self.prompts):,}", f"{self.settings.max_seconds:g}"
                text = f"warning: train.sample: {of} prompts were reached within max_seconds: {seconds}"
                loop.progress.console.print(text, style="yellow")
            for number, prompt in enumerate(self.prompts[:reached]):
                text, at_end = everyones[number % world][number // world]
                line = {
                    "step": loop.step,
                    "prompt": prompt.text,
                    "reference": prompt.reference,
                    "text": text,
                    "ended": at_end,
                }
                with loop.recorder.unwritten(self.folder / SAMPLES):
                    append_json_line(self.folder / SAMPLES, line)
        loop.recorder.mark("pause")

    def _continue_rows(self, loop: Loop, rows: list[list[int]], until: float) -> tuple[list[bool], bool]:
        """Append tokens to the rows as often as any rank needs. Returns which rows have ended, and whether time is
        up."""
        device, ends = loop.device, _find_end_tokens(loop.causal_lm, self.tokenizer)
        finished = [False] * len(rows)
        for _ in range(self.settings.max_new_tokens):
            loop.recorder.mark("pause")
            batch = rows or [DUMMY]
            width = max(map(len, batch))
            ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in batch], device=device)
            last = torch.tensor([number * width + len(row) - 1 for number, row in enumerate(batch)], device=device)
            with torch.no_grad(), loop.autocast:
                choices = loop.causal_lm(input_ids=ids, supervised=last, targets=last, choose=True)
            for number, (row, choice) in enumerate(zip(rows, choices.tolist(), strict=False)):
                if not finished[number] and len(row) < self.max_length:
                    row.append(choice)
                    finished[number] = choice in ends
            open_rows = any(not end and len(row) < self.max_length for row, end in zip(rows, finished, strict=True))
            stop = time.monotonic() > until or loop.stop_signal.received
            state = torch.tensor([float(open_rows), float(stop)], device=device)
            if group.get_world_size() > 1:
                dist.all_reduce(state)
            if not state[0] or state[1]:
                break
        return finished, bool(state[1])


def _find_end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    return {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}


def read_prompts(
    settings: SampleSection,
    tokenizer: PreTrainedTokenizerBase,
    validation: Batches,
    max_length: int,
    where: Callable[[str], str],
) -> list[Prompt]:
    """Return the run file's prompts, those of a file, or the beginnings of validation rows."""
    if settings.from_eval is not None:
        return _prompts_from_rows(validation, settings.from_eval, tokenizer)
    texts, key = settings.prompts or [], "train.sample.prompts"
    if settings.file is not None:
        key = "train.sample.file"
        texts = [_parse_line(line) for line in read_prompt_lines(settings.file, where(key))]
    prompts = []
    for text in texts:
        rendered = text
        if settings.chat:
            if not tokenizer.chat_template:
                hint = "leave chat out, or set data.chat_template"
                raise UserError("the tokenizer has no chat template", where("train.sample.chat"), hint)
            turn = [{"role": "user", "content": text}]
            rendered = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        ids = tokenizer(rendered, add_special_tokens=not settings.chat)["input_ids"]
        if not 0 < len(ids) < max_length:
            what = f"the prompt {text[:40]!r} has {len(ids)} tokens, and rows may have {max_length}"
            raise UserError(what, where(key), "shorten it, or raise data.max_length")
        prompts.append(Prompt(text, ids))
    return prompts


def _parse_line(line: str) -> str:
    """Return the text of a prompt file's line: plain text, or JSON with a `prompt`."""
    try:
        value = json.loads(line)
    except ValueError:
        return line
    return str(value["prompt"]) if isinstance(value, dict) and "prompt" in value else line


def _prompts_from_rows(validation: Batches, count: int, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return prompts from the first validation documents: up to the first supervised token, or half of the document."""
    prompts: list[Prompt] = []
    blocks = validation.rows.to_batches(max_chunksize=16)
    for row in itertools.chain.from_iterable(block.to_pylist() for block in blocks):
        ids, labels = np.asarray(row["input_ids"]), np.asarray(row["labels"] if "labels" in row else row["input_ids"])
        sizes = row["seq_lengths"] if "seq_lengths" in row else [len(ids)]
        for end, size in zip(np.cumsum(sizes), sizes, strict=True):
            own, target = ids[end - size : end], labels[end - size : end] != IGNORED
            start = int(target.argmax()) if not target[0] else len(own) // 2
            if 0 < start < len(own):
                parts = (
                    tokenizer.decode(part.tolist(), skip_special_tokens=True) for part in (own[:start], own[start:])
                )
                prompts.append(Prompt(next(parts), own[:start].tolist(), next(parts)))
            if len(prompts) == count:
                return prompts
    return prompts
