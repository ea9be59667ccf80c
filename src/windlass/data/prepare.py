"""From a run file's `data` section to the sets that are trained on, and the audit that says what they are."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.data import audit as auditing
from windlass.data import store
from windlass.data.cache import made_once
from windlass.data.order import Order, length_grouped, shuffled
from windlass.data.read import rows
from windlass.data.shapes import Shape, recognise
from windlass.data.source import Part, Source, find, locate, parse, resolve
from windlass.data.stream import endless
from windlass.data.tokens import Documents, tokenise
from windlass.errors import Problem, UserError, raise_all

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

    from windlass.data.collate import Collator
    from windlass.runfile import Data, RunFile

Where = Callable[[str], str]
Say = Callable[[str], None]

FORMAT = 2  # of the cached folder: raise it when what is written there changes
# Rows whose keys together make the columns: JSON lines need not all have the same.
HEAD_ROWS = 100
# Files up to so many bytes together are known by their content, larger ones by size, time of change and their ends.
HASHED_BYTES = 1 << 30
END_BYTES = 1 << 20
STREAM_AUDIT_ROWS = 10_000  # of a stream, so many rows are audited beforehand


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is trained on. `arguments` are the SFTConfig settings that these sets ask for."""

    train: Dataset | IterableDataset
    validation: Dataset | None
    audit: dict[str, Any]
    fingerprint: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
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
class Chosen:
    """Which rows are trained on and which are held out."""

    source: Source
    train: tuple[Part, ...]
    validation: tuple[Part, ...]
    fraction: float | None
    columns: tuple[str, ...]


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
    """Tokenise, or take from the cache; audit; raise a UserError for data that can't be trained on.

    Every rank calls this. Under a cache that ranks share, one of them tokenises and the others wait. `vocabulary` is
    the number of rows of the model's embedding; `batch` the rows of a micro-batch where the plan chose
    them; `audited` is given the audit before it is judged.
    """
    data, max_length = run.data, run.data.max_length
    chosen = choose(data, where, say)
    shape = recognise(data, chosen.columns, tokenizer, where)
    raise_all([*streamable(run, chosen, where), *unvalidated(run, chosen, where)])
    key = fingerprint(data, chosen, shape, tokenizer, max_length)
    folder = made_once(
        cache if cache is not None else Path(run.train.output_dir) / "tokens",
        key,
        lambda into: make(into, chosen, shape, tokenizer, data, max_length),
        say,
    )
    audit = json.loads((folder / "audit.json").read_text())
    lengths = np.load(folder / "train.lengths.npy")
    seed = run.train.order_seed
    batch = batch or run.train.least_batch
    taken = arguments(run, batch, bool(chosen.validation or chosen.fraction))
    flags = (("packing", auditing.PACKED), ("padding_free", auditing.PADDING_FREE))
    way = next((name for flag, name in flags if taken[flag]), auditing.LENGTH_GROUPED)
    audit["batching"] = auditing.batching(lengths, batch=batch, max_length=max_length, configured=way, seed=seed)
    audit["sampled_rows"] = STREAM_AUDIT_ROWS if data.streaming else None
    complete(audit, chosen, shape, key, max_length, bool(data.packing))
    audited(audit)
    least = run.watch.min_supervised_fraction
    raise_all(auditing.problems(audit, vocabulary=vocabulary, least_fraction=least, where=where))
    validation = store.load(folder / "validation.arrow") if "validation" in audit["splits"] else None
    if data.streaming:
        packed_to = max_length if data.packing else None
        stream = endless(lambda: rows(chosen.source, chosen.train), shape, tokenizer, max_length, packed_to, seed)
        return Prepared(stream, validation, audit, key, taken, batching=way, masked=run.masked)
    train = store.load(folder / "train.arrow")
    per_row = np.load(folder / "train.rows.npy")
    return Prepared(train, validation, audit, key, taken, per_row, batching=way, masked=run.masked)


def unvalidated(run: RunFile, chosen: Chosen, where: Where) -> list[Problem]:
    """Evaluation that was asked for, and nothing to evaluate on. What only stands by default is switched off."""
    if chosen.validation or chosen.fraction:
        return []
    train = run.train
    asked = [key for key in ("eval_strategy", "eval_steps", "load_best_model_at_end") if key in train.model_fields_set]
    if train.eval_strategy == "no" or not asked:
        return []
    return [
        Problem(
            f"train.{asked[0]} wants evaluation, and the data have no validation rows; "
            f"their splits: {', '.join(chosen.source.splits)}",
            where(f"train.{asked[0]}"),
            "hold some out with data.val_fraction: 0.05, name data.val_split, or set train.eval_strategy: no",
        )
    ]


def streamable(run: RunFile, chosen: Chosen, where: Where) -> list[Problem]:
    """A stream has no end to count epochs by and none to hold rows out of."""
    if not run.data.streaming:
        return []
    problems = []
    if (run.train.max_steps or 0) < 1:
        problems.append(
            Problem(
                "a streamed set has no length, so epochs can't be counted",
                where("train.max_steps"),
                "set train.max_steps",
            )
        )
    if chosen.fraction:
        problems.append(
            Problem(
                "rows are held out of a set that is read whole, not of a stream",
                where("data.val_fraction"),
                "give a validation split, or a slice: val_split: train[:1%] and train_split: train[1%:]",
            )
        )
    return problems


def arguments(run: RunFile, batch: int, validated: bool) -> dict[str, Any]:
    """SFTConfig's part in this: take the rows as they are. `packing` is what makes its collator read seq_lengths.

    Rows may be laid end to end without it where attention is computed per document, not over a square mask.
    """
    taken: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
    if not validated:
        taken["eval_strategy"] = "no"
    if run.data.streaming:
        # Each rank reads the stream and keeps its own batches of it. Accelerate's default for streams, one rank that
        # reads and sends, joins the ranks' batches first and fails where their lengths differ.
        taken["accelerator_config"] = {"dispatch_batches": False}
    flat = "flash" in (run.model.attn_implementation or "") and batch > 1
    return {**taken, "packing": bool(run.data.packing), "padding_free": bool(run.data.packing) or flat}


def choose(data: Data, where: Where, say: Say) -> Chosen:
    """The source with its splits settled, and its columns."""
    source = resolve(data, where)
    if source.format == "hub":
        from windlass.data.hub import fetched

        source = fetched(data, where, say)
    splits = list(source.splits)
    train = settled(parse(data.train_split, where("data.train_split")), splits, where("data.train_split"))
    validation: tuple[Part, ...] = ()
    fraction = data.val_fraction
    if data.val_split:
        parts = parse(data.val_split, where("data.val_split"))
        asked = "val_split" in data.model_fields_set
        if all(locate(part.split, splits) for part in parts):
            validation, fraction = settled(parts, splits, where("data.val_split")), None
        elif asked and not fraction:
            settled(parts, splits, where("data.val_split"))
    head = list(itertools.islice(rows(source, train), HEAD_ROWS))
    if not head:
        others = ", ".join(split for split in splits if split != train[0].split)
        hint = f"name another split: the set has {others}" if others else "name a slice that has rows"
        raise UserError(f"{source.name}: {data.train_split} has no rows", where("data.train_split"), hint)
    columns = tuple(dict.fromkeys(key for row in head for key in row))
    return Chosen(source, train, validation, fraction, columns)


def settled(parts: Sequence[Part], splits: Sequence[str], place: str) -> tuple[Part, ...]:
    return tuple(Part(find(part.split, splits, place), part.start, part.stop) for part in parts)


def make(
    into: Path, chosen: Chosen, shape: Shape, tokenizer: PreTrainedTokenizerBase, data: Data, max_length: int
) -> None:
    """Everything of one fingerprint into a folder: both sets, their lengths, and the audit."""
    limit = STREAM_AUDIT_ROWS if data.streaming else None
    train = tokenise(itertools.islice(rows(chosen.source, chosen.train), limit), shape, tokenizer, max_length)
    validation = None
    if chosen.validation:
        validation = tokenise(rows(chosen.source, chosen.validation), shape, tokenizer, max_length)
    elif chosen.fraction:
        train, validation = held_out(train, chosen.fraction)
    found: dict[str, Any] = {"splits": {}, "samples": []}
    for name, documents in (("train", train), ("validation", validation)):
        if documents is None:
            continue
        found["splits"][name] = auditing.of_split(documents, tokenizer.eos_token_id)
        per_row = store.write(documents, into / f"{name}.arrow", capacity=max_length if data.packing else None)
        np.save(into / f"{name}.rows.npy", per_row)
        np.save(into / f"{name}.lengths.npy", documents.lengths)
    found["samples"] = auditing.samples(train, tokenizer, "train")
    if validation is not None:
        found["overlap"] = auditing.overlap(train, validation)
    (into / "audit.json").write_text(json.dumps(found))


def held_out(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """Training and validation. Chosen by the rows' own hashes: no seed, and a row and its duplicates stay together."""
    count = len(documents.hashes)
    wanted = min(max(1, round(fraction * count)), count - 1) if count > 1 else 0
    limit = np.sort(documents.hashes)[wanted - 1] if wanted else None
    chosen = documents.hashes <= limit if limit is not None else np.zeros(count, np.bool_)
    train, validation = documents.take(np.flatnonzero(~chosen)), documents.take(np.flatnonzero(chosen))
    train.counts = dict(documents.counts)  # what was dropped was dropped before the parting
    validation.counts = dict.fromkeys(documents.counts, 0) | {"rows": len(validation.lengths)}
    train.counts["rows"] -= len(validation.lengths)
    return train, validation


def complete(audit: dict[str, Any], chosen: Chosen, shape: Shape, key: str, max_length: int, packing: bool) -> None:
    """What the audit says besides the counts."""
    audit |= {
        "source": {"name": chosen.source.name, "config": chosen.source.config, "how": chosen.source.how},
        "shape": {"name": shape.name, "said": shape.said, "columns": list(chosen.columns)},
        "fingerprint": key,
        "max_length": max_length,
        "packing": packing,
        "held_out": chosen.fraction,
    }
    audit["notes"] = [*shape.notes, *auditing.warnings(audit)]
    if not (chosen.validation or chosen.fraction):
        audit["notes"].append("there are no validation rows, so nothing is evaluated: data.val_fraction holds some out")


def fingerprint(data: Data, chosen: Chosen, shape: Shape, tokenizer: PreTrainedTokenizerBase, max_length: int) -> str:
    """All that the tokens depend on: the files, the tokenizer, the rendering, the lengths, and this code's format."""
    import tokenizers

    parts = {
        "format": FORMAT,
        "files": identities(
            path for part in (*chosen.train, *chosen.validation) for path in chosen.source.splits[part.split]
        ),
        "kind": chosen.source.format,
        "splits": [repr(chosen.train), repr(chosen.validation), chosen.fraction],
        "shape": shape.identity,
        "tokenizer": tokenizer_identity(tokenizer),
        "tokenizers": tokenizers.__version__,
        "max_length": max_length,
        "packing": bool(data.packing),
        "streaming": data.streaming,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=12).hexdigest()


def tokenizer_identity(tokenizer: Any) -> str:
    if tokenizer.is_fast:
        found = tokenizer.backend_tokenizer.to_str()
    else:
        found = json.dumps(
            [type(tokenizer).__name__, tokenizer.get_vocab(), repr(tokenizer.init_kwargs)], sort_keys=True
        )
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.blake2b(f"{found}\0{special}\0{template}".encode(), digest_size=16).hexdigest()


def identities(paths: Iterator[Path]) -> list[list[Any]]:
    """Name, size and content of each file; a folder stands for the files in it."""
    files: list[Path] = []
    for path in dict.fromkeys(paths):
        files += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    sizes = [path.stat().st_size for path in files]
    whole = sum(sizes) <= HASHED_BYTES
    return [[path.name, size, content(path, size, whole)] for path, size in zip(files, sizes, strict=True)]


def content(path: Path, size: int, whole: bool) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if whole or size <= 2 * END_BYTES:
            while block := file.read(END_BYTES):
                digest.update(block)
        else:
            digest.update(str(path.stat().st_mtime_ns).encode())
            digest.update(file.read(END_BYTES))
            file.seek(-END_BYTES, 2)
            digest.update(file.read(END_BYTES))
    return digest.hexdigest()
