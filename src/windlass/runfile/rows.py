"""The run file's `data` section: data sets, how their rows become text, and how text becomes tokens."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from windlass.runfile.values import Auto, Count, Number, Section, Text

CHAT_KEYS = {"turns", "reasoning", "tools", "chat_template", "template_kwargs"}
RECIPE_CONFIG = "wikitext-2-raw-v1"


def is_template(text: str) -> bool:
    """Return whether `chat_template` is the template itself, and no name or file."""
    return "{{" in text or "{%" in text


class RowFormat(Section):
    """How the rows of one data set become text."""

    dataset_config_name: Text | None = "auto"
    """Configuration of the data set, if it has several. auto: wikitext-2-raw-v1 if the set has that, else its default
    or only one."""
    format: Literal["messages", "sharegpt", "alpaca", "prompt-completion", "preference", "input_ids", "text"] | None = (
        None
    )
    """What the columns hold; null: inferred from their names."""
    columns: dict[Text, Text] = Field(default={})
    """Your names for the format's columns: {messages: dialog, role: speaker} or {instruction: question}."""
    text_field: Text | None = None
    """Column with plain text; null: text, if no other format fits the columns."""
    prompt_template: Text | None = None
    """Format string over columns instead of `text_field`; loss is computed on the part in [[ ]]:
    "{question} [[{answer}]]"."""
    prompt_field: Text | None = None
    """Column with the prompt; needs `completion_field`."""
    completion_field: Text | None = None
    """Column with the completion, on which loss is computed; needs `prompt_field`."""
    messages_field: Text | None = None
    """Column with chats: lists of {role, content}, formatted by the chat template."""
    chat_template: Text | None = None
    """Chat template: mistral, chatml, llama3, alpaca, a file, or the template itself. null: the tokenizer's. Serve the
    model with the same one."""
    template_kwargs: dict[Text, Any] = Field(default={})
    """Variables of the chat template, such as {enable_thinking: false}."""
    completion_only_loss: bool | None = None
    """Compute loss on completions and assistant turns only. null: yes if the data have a prompt."""
    turns: Literal["auto", "all", "last", "each"] = "auto"
    """Assistant turns that loss is computed on. all: all of a chat, in one row, an error if the chat template writes
    earlier turns differently once later ones follow; each: each in a row of its own, behind the prompt of inference;
    auto: in one row if that is the same, else in as few as that takes; last: the last of each chat. A message with
    `weight: 0` or `train: false` is never one."""
    reasoning: Literal["keep", "drop"] = "keep"
    """Reasoning in assistant turns (reasoning_content, <think>): keep, an error if the chat template leaves it out; or
    drop."""
    tools: Literal["keep", "ignore"] = "keep"
    """The column of tools that rows may call: keep, an error if the chat template writes none; or ignore it. Calls and
    their results are written in any case."""


Amount = Annotated[Number, Field(gt=0)]


class MixedSet(RowFormat):
    """One data set of a mix. A key that it doesn't set is that of `data`."""

    path: Text
    """As data.dataset_name_or_path."""
    name: Text | None = None
    """Name in the audit, the logs and the report. Default: the last part of `path`."""
    split: Text = "train"
    """Split to train on, or a slice such as `train[:5%]`."""
    weight: Amount | None = None
    """Share of this set among all, in sequences. An epoch ends when the scarcest set has been seen once."""
    rows: Count | None = None
    """Rows of this set in an epoch: others every epoch, or some twice if it has fewer."""
    epochs: Amount | None = None
    """How often this set is seen in an epoch of the mix; may be a fraction. Default: once."""

    @property
    def title(self) -> str:
        return self.name or re.split(r"[/\\]", self.path.rstrip("/"))[-1].partition(".")[0] or self.path


class EvalSet(RowFormat):
    """A named evaluation set. A key that it doesn't set is that of `data`."""

    path: Text
    """As data.dataset_name_or_path."""
    split: Text = "train"
    """Split to evaluate on, or a slice. A single file is the split `train`."""


class Data(RowFormat):
    """The data set, and how text becomes tokens."""

    dataset_name_or_path: Text = "/data/input/Datasets/wikitext"
    """Local folder, file or glob (JSONL, JSON, Parquet, CSV, text, save_to_disk), or a Hub data set. The first run
    tokenizes it; later ones take the tokens from a cache."""
    train_split: Text = "train"
    """Split to train on, or a slice such as `train[:5%]`."""
    val_split: Text | None = "auto"
    """Split to evaluate on; null for none. auto: validation, if the data have it and val_fraction isn't set. Each
    evaluation reads all of it, and the best checkpoint is chosen by it."""
    max_length: Count | Auto = "auto"
    """Longest sequence in tokens. Longer ones are cut, and `windlass data` counts them. auto: a length from 512 to 4096
    that nearly all of the first rows fit in, or 1024 if they can't be read, within the model's positions. Memory for
    activations grows with it, attention's time with its square."""
    truncation: Literal["refuse", "prompt"] = "refuse"
    """What becomes of pairs (dpo, orpo) with a sequence longer than max_length. refuse: an error; prompt: the prompt's
    beginning is cut off, as much of both sequences, and an answer that doesn't fit is still an error."""
    packing: bool | Auto = "auto"
    """Fill each sequence with several documents that can't attend to each other: several times faster on short texts.
    auto: true if the model's family isolates documents and no batch size is set (per_device_train_batch_size,
    gradient_accumulation_steps or global_batch_size), so that a batch size you set still counts rows. At the same batch
    size an epoch has fewer, fuller optimizer steps."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the training split to hold out for evaluation, if there is no validation split."""
    streaming: bool = False
    """Read the data set as a stream, if it is larger than memory. Rows are then shuffled within a window only, and
    train.max_steps must be set."""
    mix: list[MixedSet] = Field(default=[])
    """Several data sets instead of dataset_name_or_path: [{path: a.jsonl, epochs: 2}, {path: b.jsonl, rows: 5000}]."""
    eval: dict[Text, EvalSet] = Field(default={})
    """Evaluation sets by name, each with its own curve, besides val_split or val_fraction: {math: {path: m.jsonl}}."""

    keep: dict[Text, EvalSet] = Field(default={})
    """Sets that should not get worse, by name. Each evaluation also measures their loss, that of the base without its
    adapter, and how far the predictions are from the base's: {general: {path: general.jsonl, split: "train[:200]"}}."""

    @property
    def length(self) -> int:
        """max_length, once chosen."""
        assert self.max_length != "auto"
        return self.max_length

    @property
    def packs(self) -> bool:
        """packing, once chosen."""
        assert self.packing != "auto"
        return self.packing

    _inherited: frozenset[str] = PrivateAttr(frozenset())
    _pairs: bool = PrivateAttr(False)

    @property
    def pairs(self) -> bool:
        """Whether rows are pairs of a chosen and a rejected answer, because train.objective compares them."""
        return self._pairs

    @property
    def validation_split(self) -> str | None:
        """val_split; `auto` is `validation`, or none if rows of the training split are held out."""
        if self.val_split != "auto":
            return self.val_split
        return None if self.val_fraction is not None else "validation"

    @property
    def own_changes(self) -> list[str]:
        """Keys with another value than the default; of one set of a mix, without those that it takes from `data`."""
        return [key for key in self.changed if key not in self._inherited]

    def of(self, part: MixedSet | EvalSet) -> Data:
        """This section as it holds for one set of a mix, or for an evaluation set."""
        own = {"path": "dataset_name_or_path", "split": "train_split"}
        named = {own.get(key, key): getattr(part, key) for key in {*part.model_fields_set, "split"}}
        changes = {key: value for key, value in named.items() if key in type(self).model_fields}
        if isinstance(part, EvalSet):
            changes |= {"val_split": None, "val_fraction": None}
        complete = self.model_copy(update={**changes, "mix": [], "eval": {}, "keep": {}})
        complete._inherited = frozenset(type(self).model_fields) - changes.keys()
        return complete

    def of_kept(self, part: EvalSet) -> Data:
        """This section as it holds for a kept set, whose rows are no pairs whatever the objective."""
        complete = self.of(part)
        complete._pairs = False
        return complete
