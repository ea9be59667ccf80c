"""Read another tool's configuration: a YAML or JSON file, or a shell script that starts the tool."""

import re
import shlex
from pathlib import Path
from typing import Any, Final

from windlass.errors import UserError, raise_all
from windlass.runfile.document import join_steps, load_document, parse_scalar
from windlass.runfile.importers.imported import as_list
from windlass.runfile.names import IMPORTED, TOOLS

OBJECTIVE: Final = "the command"  # that TRL's name says


def read_configuration(path: Path) -> tuple[str, dict[str, Any], dict[str, int]]:
    """Return the tool if the file names it, its settings, and their lines."""
    if path.suffix in (".sh", ".bash") and path.is_file():
        return _read_script(path, path.read_text(encoding="utf-8", errors="replace"))
    document = load_document(path, absent=f"name a configuration of {', '.join(TOOLS.values())}")
    if not isinstance(document.value, dict):
        hint = "give another tool's YAML, JSON or shell script"
        raise UserError("contains no `key: value` settings", str(path), hint, "no-settings")
    raise_all(document.problems)
    return "", document.value, {join_steps(steps): line for steps, line in document.lines.items()}


def _read_script(path: Path, text: str) -> tuple[str, dict[str, Any], dict[str, int]]:
    """Return the options of the first command that starts a tool."""
    without_comments = "\n".join(re.sub(r"^\s*#.*", "", line) for line in text.splitlines())
    for line in re.sub(r"\\\s*\n", " ", without_comments).splitlines():
        for tool in TOOLS:
            if start := re.search(IMPORTED[tool]["command"], line):
                options = _read_options(path, text, tool, start[0], line[start.end() :])
                return tool, options, {key: _find_line(text, f"--{key}") for key in options}
    hint = "windlass reads `swift sft`, `llamafactory-cli train` and `trl sft` or `dpo` with their options"
    raise UserError("starts no training tool that windlass knows", str(path), hint, "no-tool")


def _read_options(path: Path, text: str, tool: str, command: str, line: str) -> dict[str, Any]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        where = f"{path}:{_find_line(text, command)}"
        raise UserError(f"is not a shell command: {error}", where, "close the quotes", "not-shell") from None
    options: dict[str, Any] = {}
    if re.search(r"\bpt\b", command):  # ms-swift's pretraining
        options["loss_scale"] = "all"
    if re.search(r"\brlhf\b", command):  # ms-swift's default
        options["rlhf_type"] = "dpo"
    if tool == "trl" and (objective := re.search(r"\b(?:dpo|orpo)", command)):
        options[OBJECTIVE] = objective[0]
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            options[key] = parse_scalar(value) if equals else True
        elif not key:
            hint = f"import that file: `windlass import {word} --from {tool}`"
            raise UserError(f"takes its settings from {word}", str(path), hint, "settings-elsewhere")
        elif options[key] is True:
            options[key] = parse_scalar(word)
        else:
            options[key] = [*as_list(options[key]), parse_scalar(word)]
    for key, value in options.items():
        if any("$" in str(item) for item in as_list(value)):
            where = f"{path}:{_find_line(text, f'--{key}')}: {key}"
            raise UserError("is a shell expression", where, "write its value instead", "shell-expression")
    return options


def _find_line(text: str, key: str) -> int:
    return next((number for number, line in enumerate(text.splitlines(), 1) if key in line), 1)
