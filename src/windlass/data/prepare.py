"""From a run file's `data` section to the sets that are trained on, and the audit that describes them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.data import audit as auditing
from windlass.data.cache import Say, cached_folder
from windlass.data.formats import Format, choose_format
from windlass.data.order import Order, length_grouped, shuffled
from windlass.data.packing import load_rows, write_rows
from windlass.data.readers import read_rows
from windlass.data.sources import Part, Source, Where, find_split, locate_split, parse_split, resolve
from windlass.data.stream import stream_rows
from windlass.data.tokenize import Documents, tokenize
from windlass.errors import Problem, UserError, raise_all
from windlass.runfile.names import EVALUATED_SCHEDULES

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

    from windlass.data.collate import Collator
    from windlass.runfile import Data, Loaded, RunFile

CACHE_VERSION = 2  # raise it when what is written into the cached folder changes
# Rows whose keys together make the columns: JSON lines need not all have the same.
HEAD_ROWS = 100
# Files up to so many bytes together are known by their content, larger ones by size, time of change and their ends.
HASHED_BYTES = 1 << 30
END_BYTES = 1 << 20
STREAM_AUDIT_ROWS = 10_000  # of a stream, so many rows are audited beforehand


@dataclass(frozen=True, slots=True)
class Prepared:
    """The sets that are trained and evaluated on, and how to make batches of them."""

    train: Dataset | IterableDataset
    validation: Dataset | None
    audit: dict[str, Any]
    fingerprint: str
    lengths: np.ndarray[Any, np.dtype[np.int64]] | None = None
    """Tokens of each row of `train`; None when it is streamed."""
    batching: str = auditing.LENGTH_GROUPED
    masked: bool = False
    """Whether a mask has to separate packed documents: neither flash nor flex attention."""

    def collator(self, pad_token_id: int) -> Collator:
        """What makes a batch of rows of `train` or `validation`."""
        from windlass.data import collate  # imports torch

        if self.batching == auditing.PACKED and self.masked:
            return collate.PaddedPackingCollator(pad_token_id)
        if self.batching in (auditing.PACKED, auditing.PADDING_FREE):
            return collate.PaddingFreeCollator()
        return collate.PaddedCollator(pad_token_id)

    def order(self, *, seed: int, epoch: int, global_batch: int) -> Order:
        """The rows of `train` in the order of this epoch, the same for any number of ranks."""
        if self.lengths is None:
            raise ValueError("a streamed set has its own order")
        if self.batching == auditing.LENGTH_GROUPED:
            return length_grouped(self.lengths, global_batch, seed, epoch)
        return shuffled(len(self.lengths), seed, epoch)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows are trained on and which are held out."""

    source: Source
    train: tuple[Part, ...]
    validation: tuple[Part, ...]
    fraction: float | None
    columns: tuple[str, ...]

    @property
    def validated(self) -> bool:
        return bool(self.validation or self.fraction)


def prepare(
    run: RunFile,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache: Path | None = None,
    where: Where = str,
    vocabulary: int | None = None,
    batch: int | None = None,
    say: Say = lambda _: None,
    audited: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Prepared:
    """Tokenize, or take from the cache; audit; raise a UserError for data that can't be trained on.

    Every rank calls this. In a cache that ranks share, one of them tokenizes and the others wait. `vocabulary` is the
    number of rows of the model's embedding; `batch` the rows of a micro-batch where the plan chose them; `audited` is
    given the audit before it is judged.
    """
    data, max_length, packing, seed = run.data, run.data.max_length, bool(run.data.packing), run.train.order_seed

    # 1. Which rows there are and how they become text.
    selection = select_rows(data, where, say)
    kind = choose_format(data, selection.columns, tokenizer, where)
    raise_all(check_selection(run, selection, where))

    # 2. Tokens: from the cache, or made now.
    key = fingerprint(data, selection, kind, tokenizer)
    cache = cache if cache is not None else Path(run.train.output_dir) / "tokens"
    folder = cached_folder(cache, key, lambda into: write_tokens(into, data, selection, kind, tokenizer), say)

    # 3. The audit, and what it finds wrong.
    batch = batch or run.train.least_batch
    # Rows may be laid end to end unpacked where attention is computed per document, not over a square mask.
    flat = "flash" in (run.model.attn_implementation or "") and batch > 1
    batching = auditing.PACKED if packing else auditing.PADDING_FREE if flat else auditing.LENGTH_GROUPED
    lengths = np.load(folder / "train.lengths.npy")
    audit = json.loads((folder / "audit.json").read_text())
    audit |= {
        "batching": auditing.compare_batching(
            lengths, batch=batch, max_length=max_length, configured=batching, seed=seed
        ),
        "sampled_rows": STREAM_AUDIT_ROWS if data.streaming else None,
        "source": {"name": selection.source.name, "config": selection.source.config, "how": selection.source.how},
        "shape": {"name": kind.name, "said": kind.description, "columns": list(selection.columns)},
        "fingerprint": key,
        "max_length": max_length,
        "packing": packing,
        "held_out": selection.fraction,
    }
    audit["notes"] = [*kind.notes, *auditing.find_warnings(audit)]
    if not selection.validated:
        audit["notes"].append("there are no validation rows, so nothing is evaluated: data.val_fraction holds some out")
    audited(audit)
    least = run.watch.min_supervised_fraction
    raise_all(auditing.find_problems(audit, vocabulary=vocabulary, least_fraction=least, where=where))

    # 4. The sets themselves.
    validation = load_rows(folder / "validation.arrow") if "validation" in audit["splits"] else None
    if data.streaming:
        train = stream_rows(
            lambda: read_rows(selection.source, selection.train),
            kind,
            tokenizer,
            max_length,
            max_length if packing else None,
            seed,
        )
        return Prepared(train, validation, audit, key, batching=batching, masked=run.masked)
    per_row = np.load(folder / "train.rows.npy")
    train = load_rows(folder / "train.arrow")
    return Prepared(train, validation, audit, key, per_row, batching=batching, masked=run.masked)


def select_rows(data: Data, where: Where, say: Say) -> Selection:
    """The source with its splits settled, and its columns."""
    source = resolve(data, where)
    if source.format == "hub":
        from windlass.data.hub import fetch_source

        source = fetch_source(data, where, say)
    splits = list(source.splits)

    def settle(spec: str, place: str) -> tuple[Part, ...]:
        parts = parse_split(spec, place)
        return tuple(Part(find_split(part.split, splits, place), part.start, part.stop) for part in parts)

    train = settle(data.train_split, where("data.train_split"))
    validation: tuple[Part, ...] = ()
    fraction = data.val_fraction
    if data.val_split:
        place = where("data.val_split")
        present = all(locate_split(part.split, splits) for part in parse_split(data.val_split, place))
        if present or ("val_split" in data.model_fields_set and not fraction):
            validation, fraction = settle(data.val_split, place), None
    head = list(itertools.islice(read_rows(source, train), HEAD_ROWS))
    if not head:
        others = ", ".join(split for split in splits if split != train[0].split)
        hint = f"name another split: the set has {others}" if others else "name a slice that has rows"
        raise UserError(f"{source.name}: {data.train_split} has no rows", where("data.train_split"), hint)
    return Selection(source, train, validation, fraction, tuple(dict.fromkeys(key for row in head for key in row)))


def check_selection(run: RunFile, selection: Selection, where: Where) -> list[Problem]:
    """What the run wants of its rows and can't have: epochs of a stream, evaluation without validation rows."""
    problems, train = [], run.train
    if run.data.streaming and (train.max_steps or 0) < 1:
        problem = "a streamed set has no length, so epochs can't be counted"
        problems.append(Problem(problem, where("train.max_steps"), "set train.max_steps"))
    if run.data.streaming and selection.fraction:
        problem = "rows are held out of a set that is read in full, not of a stream"
        hint = "give a validation split, or a slice: val_split: train[:1%] and train_split: train[1%:]"
        problems.append(Problem(problem, where("data.val_fraction"), hint))
    # Evaluation that is on by default is switched off where there is nothing to evaluate on.
    keys = ("eval_strategy", "eval_steps", "load_best_model_at_end")
    asked = [f"train.{key}" for key in keys if key in train.model_fields_set]
    asked += ["train.lr_scheduler_type"] * (train.lr_scheduler_type in EVALUATED_SCHEDULES)
    if not selection.validated and train.eval_strategy != "no" and asked:
        splits = ", ".join(selection.source.splits)
        problem = f"{asked[0]} wants evaluation, and the data have no validation rows; their splits: {splits}"
        hint = "hold some out with data.val_fraction: 0.05, name data.val_split, or set train.eval_strategy: no"
        problems.append(Problem(problem, where(asked[0]), hint))
    return problems


def write_tokens(
    into: Path, data: Data, selection: Selection, kind: Format, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Everything of one fingerprint into a folder: both sets, their lengths, and the audit."""
    source, limit = selection.source, STREAM_AUDIT_ROWS if data.streaming else None
    rows = itertools.islice(read_rows(source, selection.train), limit)
    sets = {"train": tokenize(rows, kind, tokenizer, data.max_length)}
    if selection.validation:
        held_out = read_rows(source, selection.validation)
        sets["validation"] = tokenize(held_out, kind, tokenizer, data.max_length)
    elif selection.fraction:
        sets["train"], sets["validation"] = hold_out(sets["train"], selection.fraction)
    audit: dict[str, Any] = {"splits": {}, "samples": auditing.sample_documents(sets["train"], tokenizer, "train")}
    for name, documents in sets.items():
        audit["splits"][name] = auditing.audit_split(documents, tokenizer.eos_token_id)
        capacity = data.max_length if data.packing else None
        np.save(into / f"{name}.rows.npy", write_rows(documents, into / f"{name}.arrow", capacity=capacity))
        np.save(into / f"{name}.lengths.npy", documents.lengths)
    if "validation" in sets:
        audit["overlap"] = auditing.overlap(sets["train"], sets["validation"])
    (into / "audit.json").write_text(json.dumps(audit))


def hold_out(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """Training and validation. Chosen by the rows' own hashes: no seed, and a row and its duplicates stay together."""
    count = len(documents.hashes)
    wanted = min(max(1, round(fraction * count)), count - 1) if count > 1 else 0
    chosen = documents.hashes <= np.sort(documents.hashes)[wanted - 1] if wanted else np.zeros(count, np.bool_)
    train, validation = documents.take(np.flatnonzero(~chosen)), documents.take(np.flatnonzero(chosen))
    kept = len(validation.lengths)
    # What was dropped was dropped before the split.
    train.counts = {**documents.counts, "rows": documents.counts["rows"] - kept}
    validation.counts = {**dict.fromkeys(documents.counts, 0), "rows": kept}
    return train, validation


def fingerprint(data: Data, selection: Selection, kind: Format, tokenizer: Any) -> str:
    """All that the tokens depend on: the files, the tokenizer, the rendering, the lengths, and the cache's version."""
    import tokenizers

    splits, parts = selection.source.splits, (*selection.train, *selection.validation)
    if tokenizer.is_fast:
        encoder = tokenizer.backend_tokenizer.to_str()
    else:
        named = [type(tokenizer).__name__, tokenizer.get_vocab(), repr(tokenizer.init_kwargs)]
        encoder = json.dumps(named, sort_keys=True)
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    identity = f"{encoder}\0{special}\0{getattr(tokenizer, 'chat_template', None)}"
    facts = {
        "format": CACHE_VERSION,
        "files": identify_files(path for part in parts for path in splits[part.split]),
        "kind": selection.source.format,
        "splits": [repr(selection.train), repr(selection.validation), selection.fraction],
        "shape": kind.identity,
        "tokenizer": hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(),
        "tokenizers": tokenizers.__version__,
        "max_length": data.max_length,
        "packing": bool(data.packing),
        "streaming": data.streaming,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()


def identify_files(paths: Iterable[Path]) -> list[list[Any]]:
    """Name, size and content of each file; a folder stands for the files in it."""
    files: list[Path] = []
    for path in dict.fromkeys(paths):
        files += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    sizes = [path.stat().st_size for path in files]
    found: list[list[Any]] = []
    for path, size in zip(files, sizes, strict=True):
        digest = hashlib.blake2b(digest_size=16)
        with path.open("rb") as file:
            if sum(sizes) <= HASHED_BYTES or size <= 2 * END_BYTES:
                while block := file.read(END_BYTES):
                    digest.update(block)
            else:
                digest.update(str(path.stat().st_mtime_ns).encode())
                digest.update(file.read(END_BYTES))
                file.seek(-END_BYTES, 2)
                digest.update(file.read(END_BYTES))
        found.append([path.name, size, digest.hexdigest()])
    return found


def audit_data(loaded: Loaded, *, say: Say, audited: Callable[[dict[str, Any]], None]) -> None:
    """`windlass data`: prepare the data as training would. `audited` is given the audit even if it is then refused."""
    from transformers import AutoTokenizer

    from windlass.files import write_json
    from windlass.model import find_base
    from windlass.run_folder import DATA

    run, place = loaded.run, loaded.where("model.model_name_or_path")
    base = find_base(run.model.model_name_or_path, place)
    if base.path is None:
        hint = "the audit counts tokens: give the model's folder"
        raise UserError(f"no tokenizer at {run.model.model_name_or_path}", place, hint)
    tokenizer = AutoTokenizer.from_pretrained(base.path, trust_remote_code=run.model.trust_remote_code)

    def keep(audit: dict[str, Any]) -> None:
        if Path(run.train.output_dir).is_dir():
            write_json(Path(run.train.output_dir) / DATA, audit)
        audited(audit)

    prepare(run, tokenizer, where=loaded.where, vocabulary=base.dims["vocab"], say=say, audited=keep)
