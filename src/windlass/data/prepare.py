"""Prepare a run's data: `prepare_data` calls every stage, from the rows of files to what is trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from windlass.data.audit import (
    LENGTH_GROUPED,
    PACKED,
    PADDING_FREE,
    Chosen,
    add_notes,
    audit_splits,
    complete_audit,
    find_problems,
)
from windlass.data.cache import Say, get_or_create
from windlass.data.choose import choose_format
from windlass.data.documents import Documents, TokenFile, assemble, hold_out
from windlass.data.formats import Format, render_rows
from windlass.data.inputs import compute_cache_key, describe_inputs, fingerprint_inputs, fingerprint_rows, hash_text
from windlass.data.mistral_ids import compare_with_mistral, find_mistral_file
from windlass.data.packing import Order, choose_epoch_rows, group_by_length, hash_rows, open_rows, shuffle, write_rows
from windlass.data.progress import show_progress
from windlass.data.reading import SplitPart, count_parts, locate_row, read_chunks
from windlass.data.select import RowSet, list_all_sets, require_validation, select_rows
from windlass.data.stream import stream_rows
from windlass.data.tokenize import allow_rust_threads, open_model_tokenizer, tokenize_rows
from windlass.data.trained_template import find_trained_template
from windlass.data.workers import count_workers, tokenize_chunks
from windlass.errors import Where, raise_all

if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerBase

    from windlass.data.collate import Collator
    from windlass.runfile import Data, Loaded, RunFile

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

    # 1. Which rows there are and how they become text.
    sets = [select_rows(rows, say) for rows in list_all_sets(data, where)]
    formats = [choose_format(rows.data, rows.columns, tokenizer, rows.where) for rows in sets]
    require_validation(run, sets, where)
    chosen = list(zip(sets, formats, strict=True))

    # 2. Tokens: from the cache, or made now.
    mistral_file = find_mistral_file(Path(tokenizer.name_or_path))
    inputs = describe_inputs(data, sets, [format_.identity for format_ in formats], tokenizer)
    key = compute_cache_key(inputs, sets, mistral_file)
    compared = {"inputs": fingerprint_inputs(data, Path(tokenizer.name_or_path), where)}
    compared["files"] = fingerprint_rows(data, where)
    cache = cache if cache is not None else Path(run.train.output_dir) / "tokens"
    if spare is not None and not (cache / key).exists():
        cache = spare
    make = partial(write_tokens, data, chosen, tokenizer, mistral_file)
    folder = get_or_create(cache, key, make, say, spare)

    # 3. The audit, and what it finds wrong.
    trained = [(rows, format_) for rows, format_ in chosen if not rows.evaluated]
    template, notes = find_trained_template((rows.name, format_.template) for rows, format_ in trained)
    batching = PACKED if data.packs else LENGTH_GROUPED if run.pads else PADDING_FREE
    sampled = STREAM_AUDIT_ROWS if data.streaming else None
    audit = complete_audit(folder, run, chosen, batching, batch or run.train.least_batch, sampled)
    mix = [rows.name for rows, _ in trained if data.mix]
    figures = [audit["sources"][name] for name in mix if not data.streaming]
    shares = tuple((each["sequences"], each["in_epoch"]) for each in figures)
    if data.streaming:  # only its first rows are tokenized by now
        remarks = [remark for split in audit["splits"].values() for remark in split["remarks"]]
        dated = any(remark["kind"] == "date" for remark in remarks)
        dates = [format_.template.dates for format_ in formats if dated and format_.template]
        audit["fingerprint"] = hash_text([audit["fingerprint"], inputs, *dates])
    else:  # from which `plan` counts steps
        made = {split: len(np.load(folder / f"{split}.rows.npy", mmap_mode="r")) for split in audit["splits"]}
        epoch = {"train": sum(used for _, used in shares)} if shares else {}
        audit["sequences"] = {"train": 0, "validation": 0, "keep": 0, **made, **epoch, **compared}
    notes = [*(note for format_ in formats for note in format_.notes), *notes]
    add_notes(audit, notes, evaluates=any(rows.validated for rows in sets))
    if audited is not None:
        audited(audit)
    least = run.watch.min_supervised_fraction
    raise_all(find_problems(audit, vocabulary=vocabulary, least_fraction=least, where=where))

    # 4. The sets themselves, mapped into memory instead of read.
    maps = {split: open_rows(folder / f"{split}.arrow") for split in audit["splits"]}
    train: pa.Table | IterableDataset = maps["train"]
    if data.streaming:
        train = stream_rows(trained, tokenizer, data.length, data.length if data.packs else None, run.train.order_seed)
    return PreparedData(
        train,
        maps.get("validation"),
        audit,
        audit["fingerprint"],
        hash_text(inputs),
        None if data.streaming else np.load(folder / "train.rows.npy"),
        batching,
        run.masked,
        sources=tuple(mix),
        evaluated=tuple(audit["evaluated"]),
        keep=maps.get("keep"),
        kept=tuple(audit["kept"]),
        shares=shares,
        template=template,
        validation_file=folder / "validation.arrow" if "validation" in maps else None,
        pairs=data.pairs,
    )


def write_tokens(
    data: Data, chosen: Chosen, tokenizer: PreTrainedTokenizerBase, mistral_file: Path | None, into: Path
) -> None:
    """Write a fingerprint's folder: training and evaluation rows, their lengths, and the audit."""
    splits: dict[str, dict[str, Documents]] = {"train": {}, "validation": {}, "keep": {}}
    sequences: dict[str, list[int]] = {}
    hashes: dict[str, str] = {}
    with closing(TokenFile(into)) as file:  # the tokens are there until they are written in their order

        def read(rows: RowSet, format_: Format, parts: Sequence[SplitPart], name: str, most: int | None) -> Documents:
            chunks = read_chunks(parts, most)
            rendered = (render_rows(chunk.rows(), format_) for chunk in chunks)
            count = 1 if most else count_workers(parts, tokenizer)
            if count == 1:
                tokenized = (tokenize_rows(*each, format_, tokenizer, data.length) for each in rendered)
            else:  # they do both
                tokenized = tokenize_chunks(chunks, (rows.data, rows.columns, tokenizer, data.length), count)
            report = show_progress(f"tokenizing {name}", lambda: most or count_parts(parts))
            with report as progress, allow_rust_threads(), closing(tokenized):
                place = partial(locate_row, parts)
                return assemble(
                    tokenized, format_, data.length, place=place, where=rows.where, progress=progress, file=file
                )

        for rows, format_ in chosen:
            name = rows.held_out_name
            most = STREAM_AUDIT_ROWS if data.streaming and not rows.evaluated else None
            documents = read(rows, format_, rows.train, rows.name, most)
            if rows.validation:
                splits["validation"][name] = read(rows, format_, rows.validation, name, None)
            elif rows.fraction:
                place = rows.where("data.val_fraction")
                documents, splits["validation"][name] = hold_out(documents, rows.fraction, place)
            splits["keep" if rows.kept else "validation" if rows.evaluated else "train"][rows.name] = documents
        splits = {split: sets for split, sets in splits.items() if sets}
        for split, sets in splits.items():
            counts = [len(documents.lengths) for documents in sets.values()]
            capacity = data.length if data.packs else None
            with show_progress(f"writing {split}", partial(sum, counts)) as progress:
                lengths = write_rows([*sets.values()], into / f"{split}.arrow", capacity=capacity, progress=progress)
            np.save(into / f"{split}.rows.npy", np.concatenate(lengths))
            np.save(into / f"{split}.lengths.npy", np.concatenate([documents.sides for documents in sets.values()]))
            sequences[split] = [*map(len, lengths)]
            hashes[split] = hash_rows(into / f"{split}.arrow")
        audit = audit_splits(splits, sequences, data, tokenizer)
    audit["mistral"] = [compare_with_mistral(mistral_file, *each, tokenizer) for each in chosen]
    audit["row_hashes"] = dict(sorted(hashes.items()))
    audit["fingerprint"] = hash_text(sorted(hashes.items()))
    (into / "audit.json").write_text(json.dumps(audit))


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
