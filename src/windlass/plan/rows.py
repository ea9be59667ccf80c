"""How many sequences the rows make, counted or estimated from a sample or bytes, and the steps of a run on them.

With the tokenizer and the rows here, a sample is rendered and tokenized as in training; else by BYTES_PER_TOKEN.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from windlass.data.inputs import fingerprint_inputs
from windlass.data.reading import RowCount, read_rows, sample_rows
from windlass.data.select import RowSet, count_per_epoch, list_all_sets, list_training_sets
from windlass.data.sources import count_rows, parse_split, resolve_source
from windlass.errors import Problem, UserError, Where
from windlass.files import read_json
from windlass.model.targets import Adapter
from windlass.observe.format import format_plural
from windlass.plan.workload import BatchSize
from windlass.run_folder import DATA
from windlass.runfile import Data, Train
from windlass.settings import WINDOW_BATCHES

# Bytes of English text per token: WikiText-2 has 11.06 MB in 24,200 non-blank rows, 110 tokens each.
BYTES_PER_TOKEN = 4.15
ROWS: Final = 1000  # of a sample
TOKENS: Final = 250_000  # of a sample, about
MARGIN: Final = 1.25  # for text with more tokens per byte than English, and for tokens that a chat template adds
GROUP: Final = 100  # rows that a sample has at least
LEAST_OFF: Final = 0.03  # by what packing a sample differs from packing all rows
STATE_BYTES: Final = 8  # AdamW keeps two float32 moments per trainable parameter
MOST_ROWS: Final = 4096  # of a window of padded rows: more say nothing new about a sample
DEVIATIONS: Final = 2.5  # of the mean of a sample, that its estimates may be off by

NO_DATA: Final = "no data"  # why the rows of a run without a data set can't be counted

Document = tuple[int, int]  # its tokens (a pair's: of its longer side), position of the first that loss is computed on


@dataclass(frozen=True, slots=True)
class RowLengths:
    """The tokens of rows as they are trained on, cut to max_length."""

    usual: int  # the mean
    sample: tuple[int, ...] = ()  # shortest first; empty if rows are not padded, or of one length
    count: int | None = None  # rows of an epoch; None: a stream, which is not sorted

    def pad(self, micro: int, step_rows: int) -> float:
        """Return the mean length after padding, in micro-batches of `micro` rows and steps of `step_rows`."""
        if micro == 1 or not self.sample:
            return self.usual
        if self.count is None:
            return _pad_at_random(self.sample, micro)
        return _pad_sorted(self.sample, micro, min(self.count, step_rows * WINDOW_BATCHES, MOST_ROWS))


@cache
def _pad_at_random(sample: tuple[int, ...], micro: int) -> float:
    """Return the expected longest of `micro` rows that are drawn from the sample."""
    known = len(sample)
    chances = [((place + 1) / known) ** micro - (place / known) ** micro for place in range(known)]
    return sum(length * chance for length, chance in zip(sample, chances, strict=True))


@cache
def _pad_sorted(sample: tuple[int, ...], micro: int, rows: int) -> float:
    """Return the mean of the longest in each micro-batch of a window of `rows` rows, sorted, distributed as the
    sample."""
    firsts = range(0, max(1, rows), micro)  # each micro-batch's longest row, counted from the window's longest
    return fmean(sample[-1 - place * len(sample) // max(1, rows)] for place in firsts)


@dataclass(frozen=True, slots=True)
class SplitSample:
    """A split's number of rows, and the documents that a sample of its rows makes."""

    of: RowSet
    rows: RowCount
    fraction: float = 0.0  # of the documents that is held out
    sampled: int = 0  # rows; 0 if only their mean length is known
    groups: Sequence[Sequence[Document]] = ()
    tokenized: bool = False  # else estimated from bytes
    problem: Problem | None = None  # why these rows can't be tokenized
    pairs: bool = False  # the sampled rows have a chosen and a rejected answer

    def kept(self, limit: int) -> list[int]:
        """Return the sampled documents' tokens, cut to a limit, without those that have no loss before it."""
        return [min(tokens, limit) for tokens, trained_at in chain(*self.groups) if trained_at < limit]

    def count(self, limit: int, *, packing: bool) -> tuple[float, float] | None:
        """Return the sequences that are trained on and those held out; None if the rows can't be counted."""
        if self.rows.count is None:
            return None
        documents = float(self.rows.count - self.rows.blank)
        lengths = self.kept(limit)
        if self.sampled:
            documents *= len(lengths) / self.sampled
        held = 0.0
        if self.fraction and documents > 1:
            held = min(max(1, round(self.fraction * documents)), documents - 1)
        if not packing or not lengths:
            return documents - held, held
        return _count_packed(lengths, documents - held, limit), _count_packed(lengths, held, limit)

    def deviation(self, limit: int, *, packing: bool) -> float:
        """Return by what share the number of sequences may be off."""
        values = []
        for group in self.groups:
            kept = [min(tokens, limit) for tokens, trained_at in group if trained_at < limit]
            values.append(sum(kept) if packing else len(kept))
        least = LEAST_OFF if packing else 0.0
        if len(values) < 2 or not sum(values):
            return least
        filled = max(1, (self.rows.count or 0) - self.rows.blank)
        unseen = math.sqrt(max(0.0, 1 - self.sampled / filled))
        return max(least, DEVIATIONS * unseen * stdev(values) / fmean(values) / math.sqrt(len(values)))


@dataclass(frozen=True, slots=True)
class Counts:
    """What the rows make under a max_length, packed or not."""

    sequences: int | None  # of an epoch
    evaluated: int | None  # of one evaluation
    kept: int | None  # of the kept sets, in one evaluation
    lengths: RowLengths  # of the sequences
    document: int | None  # tokens of a usual document before it is cut; None: unknown
    reason: str  # how the rows were counted, or why they could not be
    tolerance: float | None  # the share by which `sequences` may be off; 0: none; None: without the tokenizer
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DataSample:
    """Samples of all sets: those trained on, and those evaluated on."""

    train: Sequence[SplitSample]
    evaluated: Sequence[SplitSample]
    tokenizer: Path | None  # its folder
    kept: Sequence[SplitSample] = ()

    @property
    def problems(self) -> list[Problem]:
        return [split.problem for split in (*self.train, *self.evaluated, *self.kept) if split.problem]

    @property
    def tokenized(self) -> bool:
        return all(split.tokenized for split in self.train)

    @property
    def pairs(self) -> bool:
        return all(split.pairs for split in self.train)

    @property
    def sampled(self) -> int:
        return sum(split.sampled for split in self.train)

    def lengths(self) -> list[Document]:
        """Return the sampled documents; with a margin those whose tokens are estimated."""
        scaled = [(split, 1.0 if split.tokenized else MARGIN) for split in self.train if split.sampled]
        documents = [(document, scale) for split, scale in scaled for document in chain(*split.groups)]
        return [(math.ceil(tokens * scale), trained_at) for (tokens, trained_at), scale in documents]

    def count(self, data: Data, folder: str) -> Counts:
        """Count the sequences: exactly if the tokens in the run folder are those of these files and settings. Nothing
        is chosen by exact numbers: a run that is started again must be the same."""
        counts = self.estimate(data)
        recorded = read_json(Path(folder) / DATA).get("sequences") or {}
        if not recorded or recorded["inputs"] != fingerprint_inputs(data, self.tokenizer, self.train[0].of.where):
            return counts
        numbers = {"sequences": recorded["train"], "evaluated": recorded["validation"], "tolerance": 0.0}
        numbers["kept"] = recorded.get("keep", 0)
        return replace(counts, **numbers, reason=f"counted in the tokens of {folder}")

    def estimate(self, data: Data) -> Counts:
        limit = data.length
        made = [split.count(limit, packing=data.packs) for split in self.train]
        evaluations = [split.count(limit, packing=data.packs) for split in self.evaluated]
        keep = [split.count(limit, packing=data.packs) for split in self.kept]
        sets = [split.of for split in self.train]
        sequences: int | None = None
        tolerance: float | None = None
        reason = next((split.rows.how for split in self.train if split.rows.count is None), self.train[0].rows.how)
        if None not in made:
            known = [max(1, round(each[0])) if each else 0 for each in made]
            rows = [round((split.rows.count or 0) * (1 - split.fraction)) for split in self.train]
            epoch = count_per_epoch(sets, rows, known)
            sequences = sum(epoch)
            if data.mix:
                reason = ", ".join(f"{n:,} of {of.name}" for n, of in zip(epoch, sets, strict=True))
            if self.tokenized:
                off = [split.deviation(limit, packing=data.packs) for split in self.train]
                tolerance = math.hypot(*(n * share for n, share in zip(epoch, off, strict=True))) / max(1, sequences)
        evaluated: int | None = None
        if None not in (*made, *evaluations):
            held = [each[1] for each in made if each]
            evaluated = math.ceil(math.fsum([*held, *(each[0] for each in evaluations if each)]))
        lengths = list(chain(*(split.kept(limit) for split in self.train)))
        uncut = [tokens for split in self.train for tokens, _ in chain(*split.groups)]
        usual = math.ceil(fmean(lengths)) if lengths else limit
        return Counts(
            sequences=sequences,
            evaluated=evaluated,
            kept=None if None in keep else math.ceil(math.fsum(each[0] for each in keep if each)),
            lengths=RowLengths(limit) if data.packs else RowLengths(usual, tuple(sorted(lengths)), sequences),
            document=math.ceil(fmean(uncut)) if uncut else None,
            reason=reason,
            tolerance=tolerance,
            notes=tuple(self._list_notes(data, usual, sequences)),
        )

    def _list_notes(self, data: Data, usual: int, sequences: int | None) -> Iterator[str]:
        filled = 0
        for split in self.train:
            count = split.rows.count or 0
            filled += count - split.rows.blank
            if split.rows.blank:
                yield f"{split.rows.blank:,} of {count:,} rows are blank{split.rows.blank_how} and left out"
        how = f"by a sample of {format_plural(self.sampled, 'row')}"
        if not self.tokenized:
            how = f"{self.train[0].rows.how}, {BYTES_PER_TOKEN} bytes a token"
        if data.packs and sequences is not None and usual < data.length:
            yield f"packing: {filled:,} rows of about {usual} tokens ({how}) make about {sequences:,} full sequences"
        elif usual < data.length:
            yield f"time is estimated for rows of {usual} tokens ({how}), memory for {data.length}"


def _count_packed(lengths: Sequence[int], count: float, limit: int) -> float:
    if len(lengths) == 1:  # the mean of rows that are not here
        return math.ceil(count * lengths[0] / limit)
    try:
        from windlass.data.sample import count_packed
    except ImportError:  # a machine without the training libraries
        return math.ceil(count * fmean(lengths) / limit)
    return count_packed(lengths, count, limit) if count else 0.0


def sample_data(data: Data, tokenizer: Path | None, where: Where) -> DataSample:
    """Sample the rows of all sets that are here, with the tokenizer in this folder, if there is one."""
    trained = list_training_sets(data, where)
    wanted = max(1, ROWS // len(trained))
    opened = _open_tokenizer(tokenizer)
    train = []
    evaluated = []
    kept: list[SplitSample] = []
    for of in trained:
        validation = _sample_split(of, of.data.validation_split, "data.val_split", wanted // 4, opened)
        fraction = 0.0 if validation else of.data.val_fraction or 0.0
        split = _sample_split(of, of.data.train_split, "data.train_split", wanted, opened, fraction)
        train += [split] if split else [SplitSample(of, RowCount(None, "the training split is missing"))]
        evaluated += [validation] if validation else []
    for of in list_all_sets(data, where)[len(trained) :]:
        split = _sample_split(of, of.data.train_split, "data.train_split", wanted // 4, opened)
        if split:
            (kept if of.kept else evaluated).append(split)
    return DataSample(train, evaluated, tokenizer, kept)


def _open_tokenizer(folder: Path | None) -> Any:
    if folder is None:
        return None
    try:
        from windlass.data.sample import open_fast_tokenizer
    except ImportError:
        return None
    return open_fast_tokenizer(folder)


def _sample_split(
    of: RowSet, split: str | None, key: str, wanted: int, tokenizer: Any, fraction: float = 0.0
) -> SplitSample | None:
    """Sample a split; None if there is none."""
    if split is None:
        return None
    try:
        rows = count_rows(of.data, split, of.where, key)
    except UserError:
        if key == "data.val_split" and (of.part or of.data.val_split == "auto"):
            return None
        raise
    made = SplitSample(of, rows, fraction)
    if rows.count and rows.text_bytes:  # of a published set, whose rows need not be here
        tokens = math.ceil(rows.text_bytes / max(1, rows.count - rows.blank) / BYTES_PER_TOKEN)
        made = replace(made, groups=(((tokens, 1),),))
        wanted = min(wanted, max(GROUP, TOKENS // tokens))
    try:
        parts = parse_split(split, resolve_source(of.data, of.where), of.where(key))
    except (UserError, ImportError, FileNotFoundError):  # not here: rows are counted otherwise, which is said
        return made
    try:
        sampled = sample_rows(parts, rows.count or wanted, wanted)
        located = list(sampled if rows.count else islice(sampled, wanted))  # else all rows of unknown many
        if not located:
            next(iter(read_rows(parts)), None)  # says what is wrong with the first
    except UserError as error:
        return replace(made, problem=error.problems[0])
    except (ImportError, FileNotFoundError):
        return made
    except (OSError, ValueError) as error:
        hint = "fetch or write the file again; the plan takes every row for as long as data.max_length"
        return replace(made, problem=Problem(f"no rows can be read: {error}", of.where(key), hint, "unreadable"))
    answers = [_find_answers(row, of.data) for *_, row in located]
    made = replace(made, pairs=sum(map(bool, answers)) > len(answers) / 2)  # the others are refused
    guessed = [estimate_tokens(_drop_shorter(row, pair)) for (*_, row), pair in zip(located, answers, strict=True)]
    if not any(guessed):
        return made
    by_bytes = [(tokens, 1) for tokens in guessed if tokens]
    made = replace(made, sampled=len(located), groups=[by_bytes])
    if tokenizer is None:
        return made
    from windlass.data.sample import tokenize_sample

    thinned = located[:: max(1, sum(guessed) // TOKENS)]
    try:
        groups = tokenize_sample(of.data, thinned, tokenizer, of.where)
    except UserError as error:
        return replace(made, problem=error.problems[0])
    return replace(made, sampled=len(thinned), groups=groups, tokenized=True)


def _find_answers(row: dict[str, Any], data: Data) -> list[str]:
    """Return the columns of the chosen and the rejected answer; none if a row is no pair."""
    forms = (("chosen", "rejected"), ("messages", "rejected_response"), ("messages", "rejected_messages"))
    named = ([data.columns.get(name, name) for name in form] for form in forms)
    return next((answers for answers in named if all(row.get(name) for name in answers)), [])


def _drop_shorter(row: dict[str, Any], answers: list[str]) -> dict[str, Any]:
    """Return a row without the shorter answer: both sides of a pair are padded to the longer one."""
    shorter = min(answers, key=lambda name: estimate_tokens(row[name]), default=None)
    return {name: value for name, value in row.items() if name != shorter}


def estimate_tokens(value: Any) -> int:
    """Estimate the tokens of a row from the bytes of its texts, or from its longest list of token ids."""
    if isinstance(value, str):
        return math.ceil(len(value.encode(errors="replace")) / BYTES_PER_TOKEN)
    if isinstance(value, list) and value and isinstance(value[0], int):
        return math.ceil(len(value) / MARGIN)
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return 0
    ids = [estimate_tokens(part) for part in value if isinstance(part, list) and part and isinstance(part[0], int)]
    return max(ids) if ids else sum(map(estimate_tokens, value))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The length of the run. Fields are None if the number of rows is unknown."""

    rows: int | None  # sequences of an epoch, or pairs
    rows_reason: str  # how the rows were counted, or why they could not be
    tolerance: float | None  # the share by which `rows` may be off; 0: none; None: estimated without the tokenizer
    global_sequences: int  # micro-batch x readers x accumulation
    tokens_per_step: int  # when every row is full
    steps_per_epoch: int | None
    steps: int | None
    warmup_steps: int | None
    evaluations: int | None
    checkpoints: int | None  # written during the run
    checkpoints_kept: int | None
    checkpoint_bytes: int


def make_schedule(train: Train, batch: BatchSize, readers: int, adapter: Adapter, counts: Counts) -> Schedule:
    """Compute the schedule, rounded as in the Trainer: ceil(rows / ranks) rows per rank, a last short step counts.
    `readers`: ranks, or groups of ranks that split rows."""
    rows = counts.sequences
    per_epoch = None
    if rows is not None:
        micro_batches = math.ceil(math.ceil(rows / readers) / batch.micro)
        per_epoch = max(1, math.ceil(micro_batches / batch.accumulation))
    steps = None
    if train.max_steps > 0:
        steps = train.max_steps
    elif per_epoch is not None:
        steps = math.ceil(per_epoch * train.epochs)
    warmup: int | None = train.warmup_steps or 0
    if not warmup and train.warmup_ratio:
        warmup = None if steps is None else math.ceil(steps * train.warmup_ratio)
    saves = _count_events(train.save_strategy, train.save_steps, steps, per_epoch)
    kept = saves
    if saves is not None and train.save_total_limit is not None:
        kept = min(saves, train.save_total_limit)
    global_sequences = batch.micro * readers * batch.accumulation
    return Schedule(
        rows=rows,
        rows_reason=counts.reason,
        tolerance=0.0 if train.max_steps > 0 else counts.tolerance,
        global_sequences=global_sequences,
        tokens_per_step=global_sequences * batch.sides * batch.length,
        steps_per_epoch=per_epoch,
        steps=steps,
        warmup_steps=warmup,
        evaluations=_count_events(train.evaluation, train.eval_steps, steps, per_epoch),
        checkpoints=saves,
        checkpoints_kept=kept,
        checkpoint_bytes=adapter.trainable * (adapter.dtype_bytes + STATE_BYTES),
    )


def _count_events(strategy: str, every: float | None, steps: int | None, per_epoch: int | None) -> int | None:
    """Return how often the run evaluates or saves with this strategy; `every` below 1 is a share of the run."""
    if strategy == "no":
        return 0
    if steps is None:
        return None
    if strategy == "epoch":
        return None if per_epoch is None else math.ceil(steps / per_epoch)
    if every and every < 1:
        return steps // max(1, math.ceil(steps * every))
    return steps // int(every or 1)
