"""Check that the files and folders named in the run file exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from windlass.data import mix, sources
from windlass.errors import Problem, UserError
from windlass.runfile import Loaded
from windlass.runfile.fields import SampleSection

TEMPLATES = (".jinja", ".jinja2", ".json")


def find_absent_data(loaded: Loaded) -> Iterator[tuple[str, Problem]]:
    """Yield each data set whose files can't be found, and why."""
    for each in mix.list_all_sets(loaded.run.data, loaded.where):
        try:
            sources.resolve_source(each.data, each.where)
        except UserError as error:
            yield each.data.dataset_name_or_path, error.problems[0]


def find_absent_files(loaded: Loaded) -> Iterator[tuple[str, Problem]]:
    """Yield other absent inputs of the first step: chat templates, an adapter to continue from, prompts."""
    run, where = loaded.run, loaded.where
    for each in mix.list_all_sets(run.data, where):
        template = each.data.chat_template or ""
        if template.endswith(TEMPLATES) and not Path(template).expanduser().is_file():
            hint = "name a file that exists, a template such as chatml, or write the template itself"
            yield template, Problem(f"there is no file {template}", each.where("data.chat_template"), hint)
    if run.lora.adapter and not (Path(run.lora.adapter) / "adapter_config.json").is_file():
        what = f"no adapter_config.json in {run.lora.adapter}"
        yield run.lora.adapter, Problem(what, where("lora.adapter"), "name a folder that PEFT or windlass saved")
    if Path(run.folder).is_file():
        what = f"{run.folder} is a file"
        yield run.folder, Problem(what, where("train.output_dir"), "name a folder: the run creates it")
    if run.train.sample and run.train.sample.file:
        try:
            read_prompt_lines(run.train.sample, where("train.sample.file"))
        except UserError as error:
            yield run.train.sample.file, error.problems[0]


def is_expected_here(loaded: Loaded, path: str, *, weights: bool) -> bool:
    """Return whether a path should be on this machine, not another: its folder is, or the run is local with weights."""
    return (weights and loaded.run.cluster.platform == "local") or Path(path).expanduser().parent.is_dir()


def read_prompt_lines(settings: SampleSection, place: str) -> list[str]:
    try:
        lines = Path(str(settings.file)).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(
            f"{settings.file} can't be read: {why}", place, "name a file with one prompt per line"
        ) from None
    if lines := [line for line in lines if line.strip()]:
        return lines
    raise UserError(f"{settings.file} contains no prompt", place, "write one prompt per line")
