"""The inputs of a run: files and folders that are absent, and hashes by which its tokens are found again."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.data.cache import hash_file
from windlass.data.reading import SplitPart
from windlass.data.select import RowSet, list_all_sets
from windlass.data.sources import resolve_source
from windlass.errors import Problem, UserError, Where
from windlass.model.saved_adapter import find_adapter
from windlass.runfile import Data, RunFile

CACHE_VERSION = 18  # raise it when what is written into the cached folder changes
# Larger files are identified by a sample of their content and by their modification time.
HASHED_BYTES = 1 << 30
TEMPLATES = (".jinja", ".jinja2", ".json")


def find_absent_data(data: Data, where: Where) -> Iterator[tuple[str, Problem]]:
    """Yield each data set whose files can't be found, and why."""
    for row_set in list_all_sets(data, where):
        try:
            resolve_source(row_set.data, row_set.where)
        except UserError as error:
            yield row_set.data.dataset_name_or_path, error.problems[0]


def find_absent_files(run: RunFile, where: Where) -> Iterator[tuple[str, Problem]]:
    """Yield other absent inputs of the first step: chat templates, an adapter to continue from, prompts."""
    for row_set in list_all_sets(run.data, where):
        template = row_set.data.chat_template or ""
        if template.endswith(TEMPLATES) and not Path(template).expanduser().is_file():
            hint = "name a file that exists, a template such as chatml, or write the template itself"
            place = row_set.where("data.chat_template")
            yield template, Problem(f"there is no file {template}", place, hint, "no-such-file")
    if run.lora.adapter and find_adapter(run) is None:
        text = f"no adapter_config.json in {run.lora.adapter}"
        hint = "name a folder that PEFT or windlass saved"
        yield run.lora.adapter, Problem(text, where("lora.adapter"), hint, "no-adapter")
    if Path(run.folder).is_file():
        text = f"{run.folder} is a file"
        yield run.folder, Problem(text, where("train.output_dir"), "name a folder: the run creates it", "not-a-folder")
    if run.train.sample and run.train.sample.file:
        try:
            read_prompt_lines(run.train.sample.file, where("train.sample.file"))
        except UserError as error:
            yield run.train.sample.file, error.problems[0]


def fingerprint_inputs(data: Data, tokenizer: Path | None, where: Where) -> str:
    """Return a hash of the data section and of sizes and times of its files and the tokenizer's: cheap to compare."""
    files = [*tokenizer.glob("*token*"), *tokenizer.glob("*template*")] if tokenizer else []
    files += _list_row_files(data, where)
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(set(files))]
    return hash_text([data.model_dump(mode="json"), data.pairs, stats])


def fingerprint_rows(data: Data, where: Where) -> str:
    """Return a hash of names and sizes of the files of rows: the same for copies, and for every version's keys."""
    return hash_text([(path.name, path.stat().st_size) for path in sorted(set(_list_row_files(data, where)))])


def _list_row_files(data: Data, where: Where) -> list[Path]:
    sources = [resolve_source(row_set.data, row_set.where) for row_set in list_all_sets(data, where)]
    return [path for source in sources for paths in source.splits.values() for path in paths]


def describe_inputs(
    data: Data, sets: Sequence[RowSet], formats: Sequence[Mapping[str, Any]], tokenizer: Any
) -> dict[str, Any]:
    """Return everything that the tokens depend on: files, tokenizer, the identities of the formats, lengths."""
    encoder = [type(tokenizer).__name__, tokenizer.get_vocab(), repr(tokenizer.init_kwargs)]
    if tokenizer.is_fast:
        encoder = tokenizer.backend_tokenizer.to_str()
    files = {path: [path.name, path.stat().st_size, hash_file(path, HASHED_BYTES)] for path in {*_list_files(sets)}}

    def describe(parts: Sequence[SplitPart]) -> list[Any]:
        return [
            [part.source.format, part.split, part.start, part.stop, [files[path] for path in part.files]]
            for part in parts
        ]

    described = [
        {
            "name": rows.name,
            "train": describe(rows.train),
            "validation": describe(rows.validation),
            "held_out": rows.fraction,
            "evaluated": rows.evaluated,
            "kept": rows.kept,
            "format": identity,
        }
        for rows, identity in zip(sets, formats, strict=True)
    ]
    return {
        "sets": described,
        "listed": [bool(data.mix), bool(data.eval), bool(data.keep)],
        "tokenizer": [encoder, tokenizer.special_tokens_map, getattr(tokenizer, "chat_template", None)],
    }


def compute_cache_key(inputs: dict[str, Any], sets: Sequence[RowSet], mistral_file: Path | None) -> str:
    """Return a hash of the inputs, of the code that makes tokens from them and what they are compared with, and of when
    files changed that were hashed in part."""
    versions = [CACHE_VERSION, __version__, metadata.version("tokenizers"), metadata.version("transformers")]
    versions += [metadata.version("mistral-common"), hash_file(mistral_file)] if mistral_file else []
    stats = [path.stat() for path in _list_files(sets)]
    return hash_text([inputs, versions, [stat.st_mtime_ns for stat in stats if stat.st_size > HASHED_BYTES]])


def _list_files(sets: Sequence[RowSet]) -> list[Path]:
    return [path for rows in sets for part in (*rows.train, *rows.validation) for path in part.files]


def hash_text(facts: Any) -> str:
    """Return a short hash of what JSON can write."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def read_prompt_lines(file: str, place: str) -> list[str]:
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        hint = "name a file with one prompt per line"
        raise UserError(f"{file} can't be read: {why}", place, hint, "unreadable") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{file} contains no prompt", place, "write one prompt per line", "no-prompt")
    return prompts
