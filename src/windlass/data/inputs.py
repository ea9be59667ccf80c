"""Check that the files and folders named in the run file exist."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from windlass.data.select import list_all_sets
from windlass.data.sources import resolve_source
from windlass.errors import Problem, UserError, Where
from windlass.model.saved_adapter import find_adapter
from windlass.runfile import Data, RunFile

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
            yield (
                template,
                Problem(f"there is no file {template}", row_set.where("data.chat_template"), hint, "no-such-file"),
            )
    if run.lora.adapter and find_adapter(run) is None:
        text = f"no adapter_config.json in {run.lora.adapter}"
        yield (
            run.lora.adapter,
            Problem(text, where("lora.adapter"), "name a folder that PEFT or windlass saved", "no-adapter"),
        )
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
    return _hash_facts([data.model_dump(mode="json"), data.pairs, stats])


def fingerprint_rows(data: Data, where: Where) -> str:
    """Return a hash of names and sizes of the files of rows: the same for copies, and for every version's keys."""
    return _hash_facts([(path.name, path.stat().st_size) for path in sorted(set(_list_row_files(data, where)))])


def _list_row_files(data: Data, where: Where) -> list[Path]:
    sources = [resolve_source(row_set.data, row_set.where) for row_set in list_all_sets(data, where)]
    return [path for source in sources for paths in source.splits.values() for path in paths]


def _hash_facts(facts: object) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()


def is_expected_here(path: str) -> bool:
    """Return whether a path should be on this machine, not another: its folder is, or it is relative to this one."""
    parent = Path(path).expanduser().parent
    return parent.is_dir() or not parent.is_absolute()


def read_prompt_lines(file: str, place: str) -> list[str]:
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(
            f"{file} can't be read: {why}", place, "name a file with one prompt per line", "unreadable"
        ) from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{file} contains no prompt", place, "write one prompt per line", "no-prompt")
    return prompts
