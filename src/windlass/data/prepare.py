"""Turn a run file's `data` section into the sets that are trained and evaluated on, and the audit that describes
them."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from windlass import __version__
from windlass.data import packing
from windlass.data.audit import (
    LENGTH_GROUPED,
    PACKED,
    PADDING_FREE,
    audit_split,
    compare_batching,
    count_overlap,
    count_packs,
    find_problems,
    find_warnings,
    list_facts,
    sample_documents,
)
from windlass.data.cache import Say, get_or_create, hash_file
from windlass.data.choose import choose_format
from windlass.data.formats import Format
from windlass.data.inputs import fingerprint_inputs, fingerprint_rows
from windlass.data.mistral_ids import compare_with_mistral, find_mistral_file
from windlass.data.packing import Order, choose_epoch_rows, group_by_length, hash_rows, open_rows, shuffle, write_rows
from windlass.data.preference import SIDES
from windlass.data.progress import show_progress
from windlass.data.reading import SplitPart, count_parts, locate_row, read_chunks, read_rows
from windlass.data.select import RowSet, count_per_epoch, list_all_sets, require_validation, select_rows
from windlass.data.stream import stream_rows
from windlass.data.tokenize import (
    PART_BITS,
    TokenFile,
    TokenizedRows,
    allow_rust_threads,
    assemble,
    tokenize,
    tokenize_rows,
)
from windlass.data.trained_template import find_trained_template
from windlass.data.workers import Setup, count_workers, tokenize_chunks
from windlass.errors import UserError, Where, raise_all
from windlass.observe.format import format_plural

if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerBase

    from windlass.data.collate import Collator
    from windlass.model import Base
    from windlass.runfile import Data, Loaded, Model, RunFile

CACHE_VERSION = 18  # raise it when what is written into the cached folder changes
# Larger files are identified by a sample of their content and by their modification time.
HASHED_BYTES = 1 << 30
STREAM_AUDIT_ROWS = 10_000  # rows of a stream that are audited before training


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The sets that are trained and evaluated on, and how to batch them."""

    train: pa.Table | IterableDataset
    validation: pa.Table | None
    audit: dict[str, Any]
    fingerprint: str
    """Hash of the rows themselves: ranks, and a run and its resumption, must have the same."""
    inputs: str
    """Hash of the files, the tokenizer and the keys that they were made from."""
    lengths: np.ndarray[Any, np.dtype[np.int64]] | None = None
    """Tokens of each row of `train`; None when it is streamed."""
    batching: str = LENGTH_GROUPED
    masked: bool = False
    """Whether a mask has to separate packed documents: neither flash nor flex attention."""
    sources: tuple[str, ...] = ()
    """The sets of a mix, as rows of `train` number them."""
    evaluated: tuple[str, ...] = ()
    """The evaluation sets, as rows of `validation` number them."""
    keep: pa.Table | None = None
    """Rows that should not get worse."""
    kept: tuple[str, ...] = ()
    """The kept sets, as rows of `keep` number them."""
    shares: tuple[tuple[int, int], ...] = ()
    """Of every set of a mix its rows, and how many of them are in an epoch."""
    template: Mapping[str, str] = field(default_factory=dict)
    """The chat template that wrote the rows, and where it is from; empty if none did."""
    validation_file: Path | None = None
    """What `validation` is mapped from."""
    pairs: bool = False
    """Whether a row is a chosen sequence and the rejected one, end to end."""

    def collator(self, pad_token_id: int, *, on_cpu: bool = False, pairs: bool | None = None) -> Collator:
        """Return the collator for rows of `train` or `validation`, or for rows that are `pairs` or not.

        On a CPU it pads to few lengths: oneDNN prepares every product for each new length, and caches a thousand.
        """
        from windlass.data import collate  # imports torch

        multiple = 16 if on_cpu else 1
        if self.batching == LENGTH_GROUPED:
            padded = collate.PairCollator if (self.pairs if pairs is None else pairs) else collate.PaddedCollator
            return padded(pad_token_id, multiple)
        if self.batching == PACKED and self.masked:
            return collate.PaddedPackingCollator(pad_token_id, multiple)
        return collate.PaddingFreeCollator()

    def order(self, *, seed: int, epoch: int, global_batch: int) -> Order:
        """Return the order of `train`'s rows in this epoch, equal for any number of ranks."""
        if self.lengths is None:
            raise ValueError("a streamed set has its own order")
        rows = np.arange(len(self.lengths))
        if self.shares:
            firsts = np.cumsum([0, *(count for count, _ in self.shares)])
            parts = [choose_epoch_rows(count, wanted, seed, epoch) for count, wanted in self.shares]
            rows = np.concatenate([first + part for first, part in zip(firsts[:-1], parts, strict=True)])
        if self.batching != PACKED:
            return rows[group_by_length(self.lengths[rows], global_batch, seed, epoch)]
        return rows[shuffle(len(rows), seed, epoch)]


def prepare_data(
    run: RunFile,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache: Path | None = None,
    spare: Path | None = None,
    where: Where = str,
    vocabulary: int | None = None,
    batch: int | None = None,
    say: Say,
    audited: Callable[[dict[str, Any]], None] | None = None,
) -> PreparedData:
    """Tokenize or read from the cache; audit; raise a UserError for data that can't be trained on.

    Every rank calls this. In a shared cache one rank tokenizes and the others wait. `spare`: where tokens are made that
    the cache lacks, if it is only read; `vocabulary`: rows of the model's embedding; `batch`: rows of a micro-batch, if
    the plan chose them; `audited` receives the audit before it is judged.
    """
    data = run.data
    seed = run.train.order_seed

    # 1. Which rows there are and how they become text.
    selections = [select_rows(rows, say) for rows in list_all_sets(data, where)]
    formats = [choose_format(rows.data, rows.columns, tokenizer, rows.where) for rows in selections]
    require_validation(run, selections, where)

    # 2. Tokens: from the cache, or made now.
    chosen = list(zip(selections, formats, strict=True))
    inputs = describe_inputs(data, chosen, tokenizer)
    key = compute_cache_key(inputs, chosen, find_mistral_file(Path(tokenizer.name_or_path)))
    cache = cache if cache is not None else Path(run.train.output_dir) / "tokens"
    if spare is not None and not (cache / key).exists():
        cache = spare

    def make(into: Path) -> None:
        with closing(TokenFile(into)) as file:
            write_tokens(into, data, chosen, tokenizer, file)

    folder = get_or_create(cache, key, make, say, spare)

    # 3. The audit, and what it finds wrong.
    batch = batch or run.train.least_batch
    batching = choose_batching(run)
    audit = complete_audit(folder, run, chosen, batching, batch)
    if data.streaming:  # only its first rows are tokenized by now
        dates = [format_.template.dates for _, format_ in chosen if format_.template] if has_dates(audit) else []
        audit["fingerprint"] = hash_text([audit["fingerprint"], inputs, *dates])
    trained = [rows for rows in selections if not rows.evaluated]
    shares = count_shares(trained, audit) if data.mix and not data.streaming else ()
    if not data.streaming:
        audit["sequences"] = count_rows_made(folder, audit, shares)
        audit["sequences"]["inputs"] = fingerprint_inputs(data, Path(tokenizer.name_or_path), where)
        audit["sequences"]["files"] = fingerprint_rows(data, where)
    notes = dict.fromkeys(note for format_ in formats for note in format_.notes)
    compared = audit.pop("mistral")
    audit["facts"] = [*list_facts(audit), *(fact for fact, _ in compared if fact)]
    wrote = [(rows.name, format_.template) for rows, format_ in chosen if not rows.evaluated]
    template, template_notes = find_trained_template(wrote)
    differing = [warning for _, warning in compared if warning]
    audit["notes"] = [*notes, *template_notes, *find_warnings(audit), *differing, *note_held_out(audit)]
    if not any(rows.validated for rows in selections):
        audit["notes"].append("there are no validation rows, so nothing is evaluated: data.val_fraction holds some out")
    if audited is not None:
        audited(audit)
    least = run.watch.min_supervised_fraction
    raise_all(find_problems(audit, vocabulary=vocabulary, least_fraction=least, where=where))

    # 4. The sets themselves, mapped into memory instead of read.
    validation = open_rows(folder / "validation.arrow") if "validation" in audit["splits"] else None
    if data.streaming:
        streams = [(rows, format_) for rows, format_ in chosen if not rows.evaluated]
        train = stream_rows(streams, tokenizer, data.length, data.length if data.packs else None, seed)
        row_lengths = None
    else:
        train = open_rows(folder / "train.arrow")
        row_lengths = np.load(folder / "train.rows.npy")
    return PreparedData(
        train,
        validation,
        audit,
        audit["fingerprint"],
        hash_text(inputs),
        row_lengths,
        batching,
        run.masked,
        sources=tuple(rows.name for rows in trained) if data.mix else (),
        evaluated=tuple(audit["evaluated"]),
        keep=open_rows(folder / "keep.arrow") if "keep" in audit["splits"] else None,
        kept=tuple(audit["kept"]),
        shares=shares,
        template=template,
        validation_file=folder / "validation.arrow" if validation is not None else None,
        pairs=data.pairs,
    )


def has_dates(audit: Mapping[str, Any]) -> bool:
    """Return whether a chat template wrote the day into any of the rows that were looked at."""
    return any(remark["kind"] == "date" for split in audit["splits"].values() for remark in split.get("remarks", ()))


def choose_batching(run: RunFile) -> str:
    """Return how rows form micro-batches, of any number of rows: a resumed run may have another."""
    if run.data.packs:
        return PACKED
    return LENGTH_GROUPED if run.pads else PADDING_FREE


def complete_audit(
    folder: Path, run: RunFile, chosen: Sequence[tuple[RowSet, Format]], batching: str, batch: int
) -> dict[str, Any]:
    """Return the audit of the cached folder with what this run does with its rows."""
    data = run.data
    audit: dict[str, Any] = json.loads((folder / "audit.json").read_text())
    compared = compare_batching(
        np.load(folder / "train.lengths.npy"),
        audit.pop("packs"),
        batch=batch,
        max_length=data.length,
        configured=batching,
        seed=run.train.order_seed,
    )
    sources = [{"name": s.source.name, "config": s.source.config, "how": s.source.how} for s, _ in chosen]
    selection, format_ = chosen[0]
    audit |= {
        "batching": compared,
        "sampled_rows": STREAM_AUDIT_ROWS if data.streaming else None,
        "source": sources[0],
        "shape": {"name": format_.name, "description": format_.description, "columns": list(selection.columns)},
        "max_length": data.length,
        "packing": data.packs,
        "held_out": selection.fraction,
    }
    if data.mix:
        names = [rows.name for rows, _ in chosen if not rows.evaluated]
        how = format_plural(len(names), "set")
        audit["source"] = {"name": f"a mix of {', '.join(names)}", "config": None, "how": how}
    for (rows, format_), source in zip(chosen, sources, strict=True):
        for key in ("kept",) if rows.kept else ("evaluated",) if rows.evaluated else ("sources", "evaluated"):
            name = rows.held_out_name if key == "evaluated" and not rows.evaluated else rows.name
            if name in audit[key]:  # there are several sets
                audit[key][name] |= {"source": source, "description": format_.description}
    return audit


def count_rows_made(folder: Path, audit: Mapping[str, Any], shares: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the rows of an epoch and of an evaluation, from which `plan` counts steps."""
    made = {split: len(np.load(folder / f"{split}.rows.npy", mmap_mode="r")) for split in audit["splits"]}
    epoch = sum(used for _, used in shares) if shares else made["train"]
    return {"train": epoch, "validation": made.get("validation", 0), "keep": made.get("keep", 0)}


def note_held_out(audit: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note if equal rows, which stay together, make the held-out part much larger than its share."""
    counts = {split: figures["documents"] for split, figures in audit["splits"].items()}
    total = sum(counts.values())
    held = counts.get("validation", 0)
    if audit["held_out"] and held > 2 * max(1, audit["held_out"] * total):
        share = f"{held:,} of {total:,} rows are held out, more than data.val_fraction {audit['held_out']:g}"
        yield f"{share}: equal rows stay together, and nearly all rows occur several times"


def count_shares(trained: Sequence[RowSet], audit: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return of every set of a mix its rows, and how many of them are in an epoch; note them in the audit."""
    figures = [audit["sources"][rows.name] for rows in trained]
    counts = [figure["sequences"] for figure in figures]
    used = count_per_epoch(trained, [figure["rows"] for figure in figures], counts)
    for figure, count, in_epoch in zip(figures, counts, used, strict=True):
        figure |= {"in_epoch": in_epoch, "epochs": in_epoch / max(1, count)}
    return tuple(zip(counts, used, strict=True))


def write_tokens(
    into: Path,
    data: Data,
    chosen: Sequence[tuple[RowSet, Format]],
    tokenizer: PreTrainedTokenizerBase,
    file: TokenFile,
) -> None:
    """Write a fingerprint's folder: training and evaluation rows, their lengths, and the audit. Until they are written
    in their order, the tokens are in `file`."""
    train: dict[str, TokenizedRows] = {}
    validation: dict[str, TokenizedRows] = {}
    keep: dict[str, TokenizedRows] = {}

    def read(
        selection: RowSet, kind: Format, parts: tuple[SplitPart, ...], name: str, most: int | None
    ) -> TokenizedRows:
        chunks = read_chunks(parts, most)
        count = 1 if most else count_workers(parts, tokenizer)
        results = (tokenize_rows(chunk.rows(), kind, tokenizer, data.length) for chunk in chunks)
        if count > 1:
            results = tokenize_chunks(chunks, Setup(selection.data, selection.columns, tokenizer, data.length), count)
        report = show_progress(f"tokenizing {name}", lambda: most or count_parts(parts))
        with report as progress, allow_rust_threads(), closing(results):
            place = partial(locate_row, parts)
            return assemble(
                results, kind, data.length, place=place, where=selection.where, progress=progress, file=file
            )

    for selection, kind in chosen:
        name = selection.held_out_name
        most = STREAM_AUDIT_ROWS if data.streaming and not selection.evaluated else None
        documents = read(selection, kind, selection.train, selection.name, most)
        if selection.validation:
            validation[name] = read(selection, kind, selection.validation, name, None)
        elif selection.fraction:
            place = selection.where("data.val_fraction")
            documents, validation[name] = hold_out(documents, selection.fraction, place)
        into_sets = keep if selection.kept else validation if selection.evaluated else train
        into_sets[selection.name] = documents
    audit: dict[str, Any] = {"splits": {}, "sources": {}, "evaluated": {}, "kept": {}}
    together = {"train": TokenizedRows.concatenate([*train.values()])}
    audit["samples"] = sample_documents(together["train"], tokenizer, "train")
    if validation:
        together["validation"] = TokenizedRows.concatenate([*validation.values()])
        audit["overlap"] = count_overlap(together["train"], together["validation"])
    if keep:
        together["keep"] = TokenizedRows.concatenate([*keep.values()])
    splits = (("train", train, "sources"), ("validation", validation, "evaluated"), ("keep", keep, "kept"))
    for split, sets, key in splits:
        if sets:
            capacity = data.length if data.packs else None
            with show_progress(f"writing {split}", partial(len, together[split].lengths)) as progress:
                rows = write_rows([*sets.values()], into / f"{split}.arrow", capacity=capacity, progress=progress)
            np.save(into / f"{split}.rows.npy", np.concatenate(rows))
            np.save(into / f"{split}.lengths.npy", together[split].sides)
            audit["splits"][split] = audit_split(together[split], tokenizer)
        # The only set of a run needs no figures of its own.
        named = {"sources": data.mix, "evaluated": data.eval, "kept": data.keep}[key]
        for name, lengths in zip(sets, rows, strict=True) if named or len(sets) > 1 else ():
            audit[key][name] = {**audit_split(sets[name], tokenizer), "sequences": len(lengths)}
            if key != "sources":
                audit[key][name]["overlap"] = count_overlap(together["train"], sets[name])
    audit["packs"] = count_packs(together["train"].sides, data.length)
    mistral_file = find_mistral_file(Path(tokenizer.name_or_path))
    audit["mistral"] = [compare_with_mistral(mistral_file, *each, tokenizer) for each in chosen]
    audit["row_hashes"] = {split: hash_rows(into / f"{split}.arrow") for split in sorted(audit["splits"])}
    audit["fingerprint"] = hash_text([*map(list, audit["row_hashes"].items())])
    (into / "audit.json").write_text(json.dumps(audit))


def hold_out(documents: TokenizedRows, fraction: float, place: str) -> tuple[TokenizedRows, TokenizedRows]:
    """Split into training and validation rows by hashes of the rows: no seed, and duplicates and chats stay together.

    Rows that occur more often than rows are wanted are trained on, if there are others.
    """
    hashes = documents.hashes >> np.uint64(PART_BITS)
    count = len(hashes)
    wanted = min(max(1, round(fraction * count)), count - 1) if count > 1 else 0
    values, counts = np.unique(hashes, return_counts=True)
    if wanted and len(values) == 1:
        hint = "remove the duplicates, or train without evaluation: data.val_fraction: null"
        problem = f"all {count:,} rows are equal or of one chat: none can be held out of the others"
        raise UserError(problem, place, hint, "nothing-to-hold-out")
    held = []
    missing = wanted
    for value, occurrences in zip(values, counts.tolist(), strict=True):
        if occurrences <= missing:
            held.append(value)
            missing -= occurrences
        if not missing:
            break
    if wanted and not held:
        held = [values[counts.argmin()]]
    chosen = np.isin(hashes, np.array(held, hashes.dtype))
    train = documents.select(np.flatnonzero(~chosen))
    validation = documents.select(np.flatnonzero(chosen))
    kept = int((validation.hashes % np.uint64(1 << PART_BITS) == 0).sum())  # once for all rows of a chat
    # Rows were dropped before the split.
    train.counts = {**documents.counts, "rows": documents.counts["rows"] - kept}
    train.left_out = documents.left_out
    train.remarks = documents.remarks
    validation.counts = {**dict.fromkeys(documents.counts, 0), "rows": kept}
    return train, validation


def describe_inputs(data: Data, chosen: Sequence[tuple[RowSet, Format]], tokenizer: Any) -> dict[str, Any]:
    """Return everything that the tokens depend on: files, tokenizer, rendering, lengths."""
    if tokenizer.is_fast:
        encoder = tokenizer.backend_tokenizer.to_str()
    else:
        encoder = [type(tokenizer).__name__, tokenizer.get_vocab(), repr(tokenizer.init_kwargs)]
    files = {
        path: [path.name, path.stat().st_size, hash_file(path, HASHED_BYTES)] for path in dict.fromkeys(_files(chosen))
    }

    def describe(parts: Sequence[SplitPart]) -> list[Any]:
        return [
            [part.source.format, part.split, part.start, part.stop, [files[path] for path in part.files]]
            for part in parts
        ]

    return {
        "sets": [
            {
                "name": rows.name,
                "train": describe(rows.train),
                "validation": describe(rows.validation),
                "held_out": rows.fraction,
                "evaluated": rows.evaluated,
                "kept": rows.kept,
                "format": format_.identity,
            }
            for rows, format_ in chosen
        ],
        "listed": [bool(data.mix), bool(data.eval), bool(data.keep)],
        "tokenizer": [encoder, tokenizer.special_tokens_map, getattr(tokenizer, "chat_template", None)],
    }


def compute_cache_key(
    inputs: dict[str, Any], chosen: Sequence[tuple[RowSet, Format]], mistral_file: Path | None
) -> str:
    """Return a hash of the inputs, of the code that makes tokens from them and what they are compared with, and of when
    files changed that were hashed in part."""
    import tokenizers
    import transformers

    versions = [CACHE_VERSION, __version__, tokenizers.__version__, transformers.__version__]
    versions += [metadata.version("mistral-common"), hash_file(mistral_file)] if mistral_file else []
    stats = [path.stat() for path in _files(chosen)]
    return hash_text([inputs, versions, [stat.st_mtime_ns for stat in stats if stat.st_size > HASHED_BYTES]])


def _files(chosen: Sequence[tuple[RowSet, Format]]) -> list[Path]:
    parts = [part for rows, _ in chosen for part in (*rows.train, *rows.validation)]
    return [path for part in parts for path in part.files]


def hash_text(facts: Any) -> str:
    """Return a short hash of what JSON can write."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def sample_token_rows(
    loaded: Loaded,
    *,
    say: Say,
    sample: int | None,
    row: int | None,
    source: str | None,
    prepared: int | None = None,
) -> list[dict[str, Any]]:
    """Return tokenized rows: one by its number in its split, from 1, or a seeded sample of every set. prepared: instead
    the documents in this row of the training set, counted from 0 as alarms do."""
    run = loaded.run
    tokenizer, _ = open_model_tokenizer(loaded)
    if prepared is not None:
        return _show_prepared_row(loaded, prepared, tokenizer, say)
    selections = [select_rows(rows, say) for rows in list_all_sets(run.data, loaded.where)]
    names = [selection.name for selection in selections]
    if source is not None and source not in names:
        raise UserError(f"there is no set {source!r}", "--source", f"it is one of {', '.join(names)}", "no-such-set")
    if source is not None:
        selections = [selection for selection in selections if selection.name == source]
    elif row is not None:
        selections = selections[:1]
    shown = []
    for selection in selections:
        format_ = choose_format(selection.data, selection.columns, tokenizer, selection.where)
        for number, columns in _pick_rows(selection, sample or 1, row, run.train.order_seed):
            place = partial(lambda parts, number, _: locate_row(parts, number), selection.train, number)
            documents = tokenize([columns], format_, tokenizer, run.data.length, place=place)
            spans = [*documents.side_spans()] or [slice(0, 0)]
            for part, span in enumerate(spans, 1):
                tokens = _list_tokens(documents.ids[span], documents.supervised[span], tokenizer)
                summary = _summarize(documents, tokens)
                if format_.pairs:
                    summary = f"{SIDES[part - 1]}, {summary}"
                elif len(spans) > 1:
                    summary += f" (row {part} of the {len(spans)} that this chat became)"
                facts = {"source": selection.name, "row": number + 1, "format": format_.name, "description": summary}
                shown.append({**facts, "parts": _split_into_parts(tokens, tokenizer), "tokens": tokens})
    return shown


def _show_prepared_row(loaded: Loaded, number: int, tokenizer: Any, say: Say) -> list[dict[str, Any]]:
    with TemporaryDirectory() as spare:
        data = prepare_data(loaded.run, tokenizer, spare=Path(spare), where=loaded.where, say=say)
        if loaded.run.data.streaming or not 0 <= number < len(data.train):
            hint = "prepared rows are counted from 0; those of a stream are not stored"
            raise UserError("no such row was prepared", f"--prepared-row {number}", hint, "no-such-row")
        shown = []
        for ids, supervised in packing.iter_documents(data.train.slice(number, 1).replace_schema_metadata()):
            tokens = _list_tokens(ids, supervised, tokenizer)
            facts = {"source": "prepared rows", "row": number, "description": format_plural(len(tokens), "token")}
            shown.append({**facts, "parts": _split_into_parts(tokens, tokenizer), "tokens": tokens})
    return shown


def _list_tokens(ids: Any, supervised: Any, tokenizer: Any) -> list[dict[str, Any]]:
    flags = enumerate(zip(ids.tolist(), supervised.tolist(), strict=True))
    return [{"id": id_, "text": tokenizer.decode([id_]), "loss": bool(at and flag)} for at, (id_, flag) in flags]


def _split_into_parts(tokens: Sequence[dict[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """Join tokens to text: a part for each special token and each run of others that the loss is computed on or not."""
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    parts = []
    written = ""
    ids: list[int] = []
    marks = [(token["loss"], place if token["id"] in special else None) for place, token in enumerate(tokens)]
    for (trained, alone), run in itertools.groupby(zip(marks, tokens, strict=True), key=lambda each: each[0]):
        own = [token["id"] for _, token in run]
        ids += own
        text = tokenizer.decode(ids, skip_special_tokens=False)
        # The whole row decoded so far, because words lose the space before them if they are decoded alone.
        added = text.removeprefix(written) if text.startswith(written) else tokenizer.decode(own)
        parts.append({"text": added, "trained": trained, "special": alone is not None})
        written = text
    return parts


def _pick_rows(selection: RowSet, sample: int, row: int | None, seed: int) -> list[tuple[int, dict[str, Any]]]:
    """Return rows of a set with their numbers: this one, or a seeded sample."""
    rows = enumerate(read_rows(selection.train))
    if row is None:
        rng = random.Random(seed)
        drawn = heapq.nsmallest(sample, ((rng.random(), number, columns) for number, columns in rows))
        return sorted((number, columns) for _, number, columns in drawn)
    picked = list(itertools.islice(rows, row - 1, row))
    if not picked:
        count = sum(1 for _ in read_rows(selection.train))
        problem = f"{selection.name} has {format_plural(count, 'row')}"
        raise UserError(problem, "--row", f"the last one is --row {count}", "no-such-row")
    return picked


def _summarize(document: TokenizedRows, tokens: Sequence[dict[str, Any]]) -> str:
    """Return how many tokens of a row are trained on, or why it is left out."""
    for reason in document.left_out:
        return reason
    if document.counts["unsupervised"]:
        return "left out (nothing supervised within max_length)"
    cut = f", {document.counts['tokens_cut']:,} more are cut off" if document.counts["truncated"] else ""
    return f"{format_plural(len(tokens), 'token')}, {sum(token['loss'] for token in tokens):,} trained on{cut}"


def open_model_tokenizer(loaded: Loaded) -> tuple[Any, int]:
    """Return the model's tokenizer and the number of rows of its embedding."""
    from windlass.model import find_base

    base = find_base(loaded.run.model.model_name_or_path, loaded.where("model.model_name_or_path"))
    return open_tokenizer(base, loaded.run.model, loaded.where), base.dims["vocab"]


def open_tokenizer(base: Base, model: Model, where: Where) -> Any:
    """Open the tokenizer in the model's folder."""
    from transformers import AutoTokenizer

    place = where("model.model_name_or_path")
    named = Path(model.model_name_or_path)
    folder = base.path or (named if (named / "tokenizer_config.json").is_file() else None)
    if folder is None:
        hint = "name the model's folder, or download it with `windlass fetch RUN`"
        raise UserError(f"no tokenizer at {model.model_name_or_path}", place, hint, "no-tokenizer")
    hint = "copy tokenizer.json and tokenizer_config.json there"
    try:
        # With mistral-common installed and a tekken.json, it would be a tokenizer that renders no template.
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=model.trust_remote_code, mistral_format=False
        )
    except Exception as error:  # a damaged file makes the library raise any kind of error
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        problem = f"{folder} has no tokenizer that can be opened: {why}"
        raise UserError(problem, place, hint, "unreadable-tokenizer") from None
    # Without files, transformers makes some families' tokenizers of their special tokens, and at most a word boundary.
    if len(tokenizer) - len(tokenizer.get_added_vocab()) < 2:
        problem = f"{folder} has no tokenizer: transformers makes one of {len(tokenizer)} special tokens alone"
        raise UserError(problem, place, hint, "no-tokenizer")
    return tokenizer


def audit_data(loaded: Loaded, *, say: Say, audited: Callable[[dict[str, Any]], None]) -> None:
    """Run `windlass data`: prepare the data as training would, and leave the folder of a run that has begun as it is.
    `audited` receives the audit even if it is then refused."""
    from windlass.files import write_json
    from windlass.run_folder import DATA, MANIFEST, is_free

    run = loaded.run
    tokenizer, vocabulary = open_model_tokenizer(loaded)

    def keep(audit: dict[str, Any]) -> None:
        if is_free(Path(run.train.output_dir)):
            write_json(Path(run.train.output_dir) / DATA, audit)
        audited(audit)

    with TemporaryDirectory() as temporary:
        spare = Path(temporary) if (Path(run.train.output_dir) / MANIFEST).exists() else None
        prepare_data(run, tokenizer, spare=spare, where=loaded.where, vocabulary=vocabulary, say=say, audited=keep)
