"""Turn a run file's `data` section into the sets that are trained and evaluated on, and the audit that describes
them."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from windlass.data import audit as auditing
from windlass.data.cache import Say, get_or_create, hash_file
from windlass.data.formats import Format, choose_format
from windlass.data.mix import count_per_epoch
from windlass.data.packing import Order, choose_epoch_rows, group_by_length, open_rows, shuffle, write_rows
from windlass.data.select import Selection, check_selection, select_all
from windlass.data.sources import Part, Where, locate_row, read_rows
from windlass.data.stream import stream_rows
from windlass.data.tokenize import Documents, tokenize
from windlass.errors import UserError, raise_all

if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerBase

    from windlass.data.collate import Collator
    from windlass.model import Base
    from windlass.runfile import Data, Loaded, Model, RunFile

CACHE_VERSION = 7  # raise it when what is written into the cached folder changes
# Larger files are identified by a sample of their content, which is equal on every node whatever the modification
# times.
HASHED_BYTES = 1 << 30
STREAM_AUDIT_ROWS = 10_000  # rows of a stream that are audited before training


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The sets that are trained and evaluated on, and how to batch them."""

    train: pa.Table | IterableDataset
    validation: pa.Table | None
    audit: dict[str, Any]
    fingerprint: str
    lengths: np.ndarray[Any, np.dtype[np.int64]] | None = None
    """Tokens of each row of `train`; None when it is streamed."""
    batching: str = auditing.LENGTH_GROUPED
    masked: bool = False
    """Whether a mask has to separate packed documents: neither flash nor flex attention."""
    sources: tuple[str, ...] = ()
    """The sets of a mix, as rows of `train` number them."""
    evaluated: tuple[str, ...] = ()
    """The evaluation sets, as rows of `validation` number them."""
    shares: tuple[tuple[int, int], ...] = ()
    """Of every set of a mix its rows, and how many of them are in an epoch."""

    def collator(self, pad_token_id: int, *, on_cpu: bool = False) -> Collator:
        """Return the collator for rows of `train` or `validation`.

        On a CPU it pads to few lengths: oneDNN prepares every product for each new length, and caches a thousand.
        """
        from windlass.data import collate  # imports torch

        if self.batching == auditing.LENGTH_GROUPED:
            return collate.PaddedCollator(pad_token_id, 16 if on_cpu else 1)
        if self.batching == auditing.PACKED and self.masked:
            return collate.PaddedPackingCollator(pad_token_id)
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
        if self.batching == auditing.LENGTH_GROUPED:
            return rows[group_by_length(self.lengths[rows], global_batch, seed, epoch)]
        return rows[shuffle(len(rows), seed, epoch)]


def prepare_data(
    run: RunFile,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache: Path | None = None,
    where: Where = str,
    vocabulary: int | None = None,
    batch: int | None = None,
    say: Say = lambda _: None,
    audited: Callable[[dict[str, Any]], None] = lambda _: None,
) -> PreparedData:
    """Tokenize or read from the cache; audit; raise a UserError for data that can't be trained on.

    Every rank calls this. In a shared cache one rank tokenizes and the others wait. `vocabulary`: rows of the model's
    embedding; `batch`: rows of a micro-batch, if the plan chose them; `audited` receives the audit before it is judged.
    """
    data, max_length, seed = run.data, run.data.length, run.train.order_seed
    capacity = max_length if data.packs else None

    # 1. Which rows there are and how they become text.
    selections = select_all(data, where, say)
    kinds = [choose_format(each.of.data, each.columns, tokenizer, each.of.where) for each in selections]
    raise_all(check_selection(run, selections, where))

    # 2. Tokens: from the cache, or made now.
    chosen = list(zip(selections, kinds, strict=True))
    key = fingerprint_data(data, chosen, tokenizer)
    cache = cache if cache is not None else Path(run.train.output_dir) / "tokens"
    folder = get_or_create(cache, key, lambda into: write_tokens(into, data, chosen, tokenizer), say)

    # 3. The audit, and what it finds wrong.
    batch = batch or run.train.least_batch
    # Unpacked rows may be laid end to end if attention is computed per document, not over a square mask.
    flat = "flash" in (run.model.attn_implementation or "") and batch > 1
    batching = auditing.PACKED if data.packs else auditing.PADDING_FREE if flat else auditing.LENGTH_GROUPED
    lengths, kind, selection = np.load(folder / "train.lengths.npy"), kinds[0], selections[0]
    trained = [each for each in selections if not each.evaluated]
    sources = [{"name": s.source.name, "config": s.source.config, "how": s.source.how} for s in selections]
    audit = json.loads((folder / "audit.json").read_text()) | {
        "batching": auditing.compare_batching(
            lengths, batch=batch, max_length=max_length, configured=batching, seed=seed
        ),
        "sampled_rows": STREAM_AUDIT_ROWS if data.streaming else None,
        "source": sources[0],
        "shape": {"name": kind.name, "description": kind.description, "columns": list(selection.columns)},
        "fingerprint": key,
        "max_length": max_length,
        "packing": data.packs,
        "held_out": selection.fraction,
    }
    if data.mix:
        named = ", ".join(each.of.name for each in trained)
        audit["source"] = {"name": f"a mix of {named}", "config": None, "how": f"{len(trained)} sets"}
    for (each, kind), source in zip(chosen, sources, strict=True):  # if there are several
        if figures := audit["sources"].get(each.of.name) or audit["evaluated"].get(each.of.name):
            figures |= {"source": source, "description": kind.description}
    shares: tuple[tuple[int, int], ...] = ()
    if data.mix and not data.streaming:
        figures = [audit["sources"][each.of.name] for each in trained]
        counts = [one["sequences"] for one in figures]
        used = count_per_epoch([each.of for each in trained], [one["rows"] for one in figures], counts)
        shares = tuple(zip(counts, used, strict=True))
        for one, wanted in zip(figures, used, strict=True):
            one |= {"in_epoch": wanted, "epochs": wanted / max(1, one["sequences"])}
    audit["notes"] = [*dict.fromkeys(note for kind in kinds for note in kind.notes), *auditing.find_warnings(audit)]
    if not any(each.validated for each in selections):
        audit["notes"].append("there are no validation rows, so nothing is evaluated: data.val_fraction holds some out")
    audited(audit)
    least = run.watch.min_supervised_fraction
    raise_all(auditing.find_problems(audit, vocabulary=vocabulary, least_fraction=least, where=where))

    # 4. The sets themselves, mapped into memory instead of read.
    train, validation, per_row = None, None, None
    if "validation" in audit["splits"]:
        validation = open_rows(folder / "validation.arrow")
    if data.streaming:
        streams = [(each, kind) for each, kind in chosen if not each.evaluated]
        train = stream_rows(streams, tokenizer, max_length, capacity, seed)
    else:
        train, per_row = open_rows(folder / "train.arrow"), np.load(folder / "train.rows.npy")
    names = tuple(each.of.name for each in trained) if data.mix else ()
    evaluated = tuple(audit["evaluated"])
    return PreparedData(train, validation, audit, key, per_row, batching, run.masked, names, evaluated, shares)


def write_tokens(
    into: Path, data: Data, chosen: Sequence[tuple[Selection, Format]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write a fingerprint's folder: training and evaluation rows, their lengths, and the audit."""
    train: dict[str, Documents] = {}
    validation: dict[str, Documents] = {}

    def read(parts: tuple[Part, ...], kind: Format, most: int | None = None) -> Documents:
        rows, place = itertools.islice(read_rows(parts), most), partial(locate_row, parts)
        return tokenize(rows, kind, tokenizer, data.length, place=place)

    for selection, kind in chosen:
        of, name = selection.of, selection.of.held_out_name
        most = STREAM_AUDIT_ROWS if data.streaming and not selection.evaluated else None
        documents = read(selection.train, kind, most)
        if selection.validation:
            validation[name] = read(selection.validation, kind)
        elif selection.fraction:
            documents, validation[name] = hold_out(documents, selection.fraction)
        (validation if selection.evaluated else train)[of.name] = documents
    eos = tokenizer.eos_token_id
    audit: dict[str, Any] = {"splits": {}, "sources": {}, "evaluated": {}}
    together = {"train": Documents.concatenate([*train.values()])}
    audit["samples"] = auditing.sample_documents(together["train"], tokenizer, "train")
    if validation:
        together["validation"] = Documents.concatenate([*validation.values()])
        audit["overlap"] = auditing.count_overlap(together["train"], together["validation"])
    for split, sets, key in (("train", train, "sources"), ("validation", validation, "evaluated")):
        if sets:
            capacity = data.length if data.packs else None
            rows = write_rows([*sets.values()], into / f"{split}.arrow", capacity=capacity)
            np.save(into / f"{split}.rows.npy", np.concatenate(rows))
            np.save(into / f"{split}.lengths.npy", together[split].lengths)
            audit["splits"][split] = auditing.audit_split(together[split], eos)
        named = data.mix if key == "sources" else data.eval  # the only set of a run needs no figures of its own
        for name, lengths in zip(sets, rows, strict=True) if named or len(sets) > 1 else ():
            audit[key][name] = {**auditing.audit_split(sets[name], eos), "sequences": len(lengths)}
            if key == "evaluated":
                audit[key][name]["overlap"] = auditing.count_overlap(together["train"], sets[name])
    (into / "audit.json").write_text(json.dumps(audit))


def hold_out(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """Split into training and validation rows by hashes of the rows: no seed, and duplicates stay together."""
    count = len(documents.hashes)
    wanted = min(max(1, round(fraction * count)), count - 1) if count > 1 else 0
    chosen = documents.hashes <= np.sort(documents.hashes)[wanted - 1] if wanted else np.zeros(count, np.bool_)
    train, validation = documents.take(np.flatnonzero(~chosen)), documents.take(np.flatnonzero(chosen))
    kept = len(validation.lengths)
    # Rows were dropped before the split.
    train.counts = {**documents.counts, "rows": documents.counts["rows"] - kept}
    train.left_out = documents.left_out
    validation.counts = {**dict.fromkeys(documents.counts, 0), "rows": kept}
    return train, validation


def fingerprint_data(data: Data, chosen: Sequence[tuple[Selection, Format]], tokenizer: Any) -> str:
    """Return a hash of everything that the tokens depend on: files, tokenizer, rendering, lengths, cache version."""
    import tokenizers

    if tokenizer.is_fast:
        encoder = tokenizer.backend_tokenizer.to_str()
    else:
        encoder = [type(tokenizer).__name__, tokenizer.get_vocab(), repr(tokenizer.init_kwargs)]
    parts = [part for selection, _ in chosen for part in (*selection.train, *selection.validation)]
    facts = {
        "version": CACHE_VERSION,
        "files": [
            [path.name, path.stat().st_size, hash_file(path, HASHED_BYTES)]
            for path in dict.fromkeys(path for part in parts for path in part.files)
        ],
        "parts": [(part.source.format, part.split, part.start, part.stop) for part in parts],
        "sets": [
            [
                each.of.name,
                len(each.train),
                len(each.validation),
                each.fraction,
                each.evaluated,
                kind.name,
                kind.identity,
            ]
            for each, kind in chosen
        ],
        "tokenizer": [encoder, tokenizer.special_tokens_map, getattr(tokenizer, "chat_template", None)],
        "tokenizers": tokenizers.__version__,
        "max_length": data.length,
        "packing": data.packs,
        "streaming": data.streaming,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def sample_token_rows(
    loaded: Loaded, *, say: Say, sample: int | None, row: int | None, source: str | None
) -> list[dict[str, Any]]:
    """Return tokenized rows: one by its number in its split, from 0, or a seeded sample of every set."""
    run, (tokenizer, _), found = loaded.run, open_model_tokenizer(loaded), list[dict[str, Any]]()
    selections = select_all(run.data, loaded.where, say)
    names = [each.of.name for each in selections]
    if source is not None and source not in names:
        raise UserError(f"there is no set {source!r}", "--source", f"it is one of {', '.join(names)}")
    for each in selections:
        if source not in (None, each.of.name) or (row is not None and source is None and found):
            continue
        of, rows = each.of, enumerate(read_rows(each.train))
        kind = choose_format(of.data, each.columns, tokenizer, of.where)
        if row is None:
            rng = random.Random(run.train.order_seed)
            drawn = heapq.nsmallest(sample or 1, ((rng.random(), *one) for one in rows))
            picked = sorted((number, columns) for _, number, columns in drawn)
        elif not (picked := list(itertools.islice(rows, row, row + 1))):
            count = sum(1 for _ in read_rows(each.train))
            raise UserError(f"{of.name} has {count:,} rows", "--row", f"the last one is --row {count - 1}")
        for number, columns in picked:
            place = partial(lambda parts, number, _: locate_row(parts, number), each.train, number)
            done = tokenize([columns], kind, tokenizer, run.data.length, place=place)
            why = "left out (nothing supervised within max_length)" * done.counts["unsupervised"]
            why = next(iter(done.left_out), why)
            cut = f", {done.counts['tokens_cut']:,} more are cut off" if done.counts["truncated"] else ""
            tokens = [
                {"id": id_, "text": tokenizer.decode([id_]), "loss": bool(flag and place)}
                for place, (id_, flag) in enumerate(zip(done.ids.tolist(), done.supervised.tolist(), strict=True))
            ]
            summary = why or f"{len(tokens):,} tokens, {sum(t['loss'] for t in tokens):,} trained on{cut}"
            found.append(
                {"source": of.name, "row": number, "format": kind.name, "description": summary, "tokens": tokens}
            )
    return found


def open_model_tokenizer(loaded: Loaded) -> tuple[Any, int]:
    """Return the model's tokenizer and the number of rows of its embedding."""
    from windlass.model import find_base

    base = find_base(loaded.run.model.model_name_or_path, loaded.where("model.model_name_or_path"))
    return open_tokenizer(base, loaded.run.model, loaded.where), base.dims["vocab"]


def open_tokenizer(base: Base, model: Model, where: Where) -> Any:
    """Open the tokenizer in the model's folder."""
    from transformers import AutoTokenizer

    place = where("model.model_name_or_path")
    if base.path is None:
        hint = "name the model's folder, or download it with `windlass fetch RUN`"
        raise UserError(f"no tokenizer at {model.model_name_or_path}", place, hint)
    try:
        return AutoTokenizer.from_pretrained(base.path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # a damaged file makes the library raise any kind of error
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        problem, hint = (
            f"{base.path} has no tokenizer that can be opened: {why}",
            "copy tokenizer.json and tokenizer_config.json there",
        )
        raise UserError(problem, place, hint) from None


def audit_data(loaded: Loaded, *, say: Say, audited: Callable[[dict[str, Any]], None]) -> None:
    """Run `windlass data`: prepare the data as training would. `audited` receives the audit even if it is then
    refused."""
    from windlass.files import write_json
    from windlass.run_folder import DATA

    run, (tokenizer, vocabulary) = loaded.run, open_model_tokenizer(loaded)

    def keep(audit: dict[str, Any]) -> None:
        if Path(run.train.output_dir).is_dir():
            write_json(Path(run.train.output_dir) / DATA, audit)
        audited(audit)

    prepare_data(run, tokenizer, where=loaded.where, vocabulary=vocabulary, say=say, audited=keep)
