"""Parse YAML text to plain values, with the line of every path.

PyYAML parses; its node tree has the lines. Values are built here because its constructors let the last of two equal
keys win, expand aliases without limit, and read 1e-4 as text.
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from windlass.errors import Problem, UserError
from windlass.runfile.names import find_close_names

MAX_BYTES = 128 * 1024
TABLES = (".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv")  # in which nobody writes a run
MAX_VALUES = 20_000  # with aliases written out
MAX_DEPTH = 32

Steps = tuple[str | int, ...]

# YAML 1.2's decimal numbers with 1.1's underscores. A leading zero (octal in 1.1) and hundreds of digits stay text.
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,17})")
_FLOAT = re.compile(r"(?=.*[.eE])[-+]?(\.[0-9][0-9_]*|(0|[1-9][0-9_]*)(\.[0-9_]*)?)([eE][-+]?[0-9]{1,4})?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "yes": True, "on": True}  # as in YAML 1.1
_WORDS |= dict.fromkeys(("false", "no", "off"), False)
# Control characters and lone surrogates can't be in a path, an argument or a report.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_TAGS = {"", *(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map"))}


class _Loader(yaml.SafeLoader):
    """Leaves the interpretation of plain text to `parse_scalar`."""

    yaml_implicit_resolvers = {}  # noqa: RUF012
    DEFAULT_SCALAR_TAG = ""  # type: ignore[misc]


def parse_scalar(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else text


def find_unprintable(text: str) -> str:
    """Return the first character that no setting may contain, as an escape; empty if there is none."""
    found = _UNPRINTABLE.search(text)
    return ascii(found.group())[1:-1] if found else ""


def join_steps(steps: Steps) -> str:
    """('lora', 'target_modules', 1) -> lora.target_modules[1]"""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


@dataclass
class YamlDocument:
    """The values of a YAML file, the line of each path, and errors of its form."""

    file: str
    value: Any = None
    lines: dict[Steps, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    count: int = 0

    def place(self, line: int, steps: Steps = ()) -> str:
        return f"{self.file}:{line}: {join_steps(steps)}" if steps else f"{self.file}:{line}"

    def build(self, node: yaml.Node, steps: Steps) -> Any:
        """Return the value of a node. MAX_DEPTH bounds recursion, MAX_VALUES bounds work."""
        line = node.start_mark.line + 1
        self.lines.setdefault(steps, line)
        self.count += 1
        if self.count > MAX_VALUES:
            what = f"contains more than {MAX_VALUES:,} values once its aliases are written out"
            raise UserError(what, self.place(line), "remove the aliases", "too-many-values")
        if len(steps) > MAX_DEPTH:
            raise UserError(f"is nested more than {MAX_DEPTH} levels deep", self.place(line), "flatten it", "too-deep")
        if node.tag not in _TAGS:
            what = f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not supported"
            self.problems.append(Problem(what, self.place(line, steps), "remove it", "yaml-tag"))
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*steps, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            if bad := find_unprintable(node.value):
                what = f"contains the character {bad}, which can't be printed"
                self.problems.append(Problem(what, self.place(line, steps), "remove it", "unprintable"))
                return ""
            return parse_scalar(node.value) if node.style is None and not node.tag else node.value
        items: dict[str, Any] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or find_unprintable(key.value):
                text = "a key must be plain text"
                raise UserError(text, self.place(line, steps), "write `key: value`", "key-not-text")
            path = (*steps, key.value)
            if key.value in items:
                what = f"is set twice, first at {self.place(self.lines[path])}"
                self.problems.append(Problem(what, self.place(line, path), "remove one of them", "duplicate-key"))
            self.lines.setdefault(path, line)
            items[key.value] = self.build(value, path)
        return items


def parse_document(text: str, file: str) -> YamlDocument:
    """Parse the text; raise if it isn't YAML. Duplicate keys and similar errors are collected in the document."""
    document = YamlDocument(file)
    try:
        root = yaml.compose(text, Loader=_Loader)
        document.value = None if root is None else document.build(root, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        code = "not-yaml"
        hint = "YAML wants `key: value` lines, indented alike, and quotes around text with `: `, `#` or brackets"
        if "another document" in what:
            code = "second-document"
            what = "a second document starts here"
            hint = "one run per file: remove the `---` line"
        elif mark and "\t" in "".join(text.splitlines()[mark.line : mark.line + 1]).partition("#")[0]:
            code = "tab"
            what = "a tab where YAML wants spaces"
            hint = "indent with spaces"
        place = f"{file}:{mark.line + 1}" if mark else file
        raise UserError(f"is not valid YAML: {what}", place, hint, code) from error
    except RecursionError:
        raise UserError(f"is nested more than {MAX_DEPTH} levels deep", file, "flatten it", "too-deep") from None
    except (ValueError, OverflowError) as error:  # escapes and directives with numbers beyond what Python takes
        problem = f"is not valid YAML: {error}"
        raise UserError(problem, file, "look for unusual escapes or % lines", "not-yaml") from error
    return document


def load_document(path: Path, absent: str = "`windlass init > run.yaml` writes one to start from") -> YamlDocument:
    """Read a run file. absent: the hint if there is none of this name, nor of one like it."""
    file = str(path)
    try:
        if path.exists() and not path.is_file():  # a pipe would block, /dev/zero would never end
            what = "is a folder" if path.is_dir() else "no regular file"
            raise UserError(what, file, "give a run file's path", "not-a-file")
        if path.suffix in TABLES and path.exists():
            hint = (
                f"`windlass plan MODEL --data {shlex.quote(file)} --save run.yaml` writes a run file that trains on it"
            )
            raise UserError("is a data file, not a run file", file, hint, "not-a-run-file")
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise UserError(f"is larger than {MAX_BYTES // 1024} KiB", file, "is this a data file?", "too-large")
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        there = [other.name for other in path.parent.glob("*.y*ml")]
        close = find_close_names(path.name, there) or sorted(there)[:3]
        hint = f"did you mean {', '.join(close)}?" if close else absent
        raise UserError("no such file", file, hint, "no-such-file") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        what = f"is not UTF-8 text (byte {error.object[error.start]:#04x})"
        raise UserError(what, f"{file}:{line}", "save it as UTF-8", "not-utf8") from error
    except (OSError, ValueError) as error:
        what = f"can't be read: {getattr(error, 'strerror', None) or error}"
        raise UserError(what, ascii(file)[1:-1], "check the path and its permissions", "unreadable") from error
    return parse_document(text, file)
