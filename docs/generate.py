"""Write the generated pages: one per command from its help, the reference, and the marked blocks of other pages.
`make docs` writes them; a test fails if a committed page differs."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import os
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from windlass.cli import app, main
from windlass.plan.show import format_rough

ROOT = Path(__file__).parent.parent
COMMANDS = ROOT / "docs" / "commands"


@functools.cache
def windlass(*arguments: str) -> str:
    """Return what the command prints, at 100 columns and without colour."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}),
        mock.patch.object(sys, "argv", ["windlass"]),
        mock.patch.object(sys.modules["__main__"], "__package__", ""),  # else the usage is `python -m pytest …`
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(SystemExit),
    ):
        main(arguments)
    return "\n".join(line.rstrip() for line in (out.getvalue() + err.getvalue()).strip().splitlines())


def commands() -> list[str]:
    return sorted(command.name or command.callback.__name__ for command in app.registered_commands if command.callback)


def command_page(name: str) -> str:
    origin = f"Generated from `windlass {name} --help` by `make docs`."
    return f"# windlass {name}\n\n{origin}\n\n```\n{windlass(name, '--help')}\n```\n"


def run_file_page() -> str:
    """List every key of the run file, as `windlass explain KEY` describes it."""
    from windlass.runfile.reference import SECTIONS, describe, list_documented

    text = (
        "# The run file\n\nEvery key, generated from its definition by `make docs`. `windlass explain KEY` prints the"
    )
    text += " same in the terminal,\n`windlass schema` the JSON Schema for editors.\n"
    top = [key for key in list_documented() if "." not in key and key not in SECTIONS]
    for title, names in (("At the top", top), *((name, [name]) for name in SECTIONS)):
        text += f"\n## {title}\n"
        for key in (key for key in list_documented() if key.partition(".")[0] in names):
            first, *rest = describe(key)
            if key in SECTIONS:
                text += f"\n{textwrap.fill(first, 118)}\n"
                continue
            items = [textwrap.fill(line, 116, initial_indent="- ", subsequent_indent="  ") for line in rest]
            listed = "\n".join(items)
            text += f"\n### {key}\n\n{textwrap.fill(first, 118, break_on_hyphens=False)}\n\n{listed}\n"
    return text


def run_folder_page() -> str:
    """List exit codes and the run folder's files, from the comments next to their names in the source."""
    from windlass import errors, run_folder

    def rows(module: object, form: str) -> str:
        source = Path(str(getattr(module, "__file__", ""))).read_text(encoding="utf-8")
        return "\n".join(f"| {m[1]} | {m[2]} |" for m in re.finditer(form, source, re.MULTILINE))

    codes = rows(errors, r"^[A-Z_]+ = (\d+)  # (.*)$")
    files = rows(run_folder, r'^[A-Z]+: Final = ("[\w{}.-]+")  # (.*)$').replace('"', "`")
    origin = "Generated from the source by `make docs`."
    return f"""# Exit codes and the run folder

{origin}

## Exit codes

| code | means |
|---|---|
| 0 | success |
{codes}

## Files of the run folder

`train.output_dir` holds them; the lines of the step files are described in [the report](../report.md).

| file | what it is |
|---|---|
{files}
"""


def index_page() -> str:
    links = "".join(f"- [windlass {name}]({name}.md)\n" for name in commands())
    return f"# Commands\n\n{links}\n```\n{windlass('--help')}\n```\n"


def with_output(text: str) -> str:
    """Fill the block that follows each mark of a page, up to `<!-- end -->`.

    `<!-- windlass … -->`: what the command prints; `<!-- windlass …: TITLE | TITLE -->`: only these tables, and lines
    that begin with a title. `<!-- layouts FILE: NAME | NAME -->`, `<!-- families -->`, `<!-- servers -->`,
    `<!-- source -->` and `<!-- versions -->`: the result of the function of that name.
    """

    def block(match: re.Match[str]) -> str:
        kind, argument, titles = match["kind"], match["argument"] or "", (match["titles"] or "").split(" | ")
        mark = match[0].partition("\n")[0]
        return f"{mark}\n{MARKS[kind](argument.strip(), titles)}\n<!-- end -->"

    kinds = "|".join(MARKS)
    pattern = rf"<!-- (?P<kind>{kinds})(?P<argument> [^:\n]*?)?(: (?P<titles>[^\n]*?))? -->\n.*?<!-- end -->"
    return re.sub(pattern, block, text, flags=re.DOTALL)


def printed(argument: str, titles: list[str]) -> str:
    """Return the command and its output."""
    shown = windlass(*shlex.split(argument))
    parts = [table(shown, title) for title in titles] if titles[0] else [shown]
    return f"```\n$ windlass {argument}\n" + "\n…\n".join(parts) + "\n```"


def table(shown: str, title: str) -> str:
    """Return the lines from a title to the blank line below the rows. A line that is no title stands alone; with `…`
    at its end, also what follows up to the next title."""
    lines = shown.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title.removesuffix("…").rstrip()))
    blanks = [number for number in range(start, len(lines)) if not lines[number]] + [len(lines)] * 2
    if title.endswith("…"):
        return "\n".join(lines[start : blanks[0] - 1])
    if start + 1 < len(lines) and lines[start + 1]:
        return lines[start]
    return "\n".join(lines[start : blanks[1]])


def layouts(argument: str, names: list[str]) -> str:
    """Return some rows of `plan --compare` as a table."""
    plan = json.loads(windlass("plan", argument, "--compare", "--json"))
    found = {row["name"]: row for row in plan["layouts"]}
    head = "| layout | nodes | GiB of each GPU | GB sent by each GPU a step | tokens/s, estimated |\n"
    head += "|---|---|---|---|---|\n"
    per_node = plan["layout"]["gpus_per_node"]
    return head + "\n".join(
        f"| {name.partition(', on ')[0]} | {row['ranks'] // per_node} | {row['gpu_gib']:,.1f}"
        f" | {row['wire_gb_per_step']:,.1f}"
        f" | {format_rough(row['tokens_per_second_low'])} to {format_rough(row['tokens_per_second_high'])} |"
        for name, row in ((name, found[name]) for name in names)
    )


def families(_argument: str, _titles: list[str]) -> str:
    from windlass.model.family import FAMILIES, WRAPPERS

    known = ", ".join(f"`{name}`" for name in FAMILIES)
    wrappers = " or ".join(f"`{name}`" for name in WRAPPERS)
    return textwrap.fill(f"{known}; and as the language model inside {wrappers}", 118)


def source(_argument: str, _titles: list[str]) -> str:
    """List the packages, from the top of the import rules to the bottom, each with the first sentence of its
    docstring."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(rule["layers"] for rule in rules if rule["id"] == "layers")
    lines = ["src/windlass/"]
    for name in re.findall(r"\w+", " ".join(layers)):
        package = ROOT / "src" / "windlass" / name
        path = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
        purpose = first_paragraph(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))).split(". ")[0]
        begin = f"  {name + ('/' if package.is_dir() else '.py'):16}"
        lines += textwrap.wrap(begin + purpose.removesuffix("."), 118, subsequent_indent=" " * len(begin))
    return "\n".join(["```", *lines, "```"])


def first_paragraph(doc: str | None) -> str:
    return " ".join((doc or "").split("\n\n")[0].split())


def servers(_argument: str, _titles: list[str]) -> str:
    """List what each server does with each kind of module."""
    from windlass.serve.servers import ROWS, SERVERS

    blocks = []
    for name, server in SERVERS.items():
        rows = [row for row in ROWS if row.server == name]
        lines = [
            f"**{server.title}** ({server.version}, {server.tried}; {server.how})\n",
            "| model | part of the adapter | as PEFT saves it | `--for` writes | known from |",
            "|---|---|---|---|---|",
        ]
        for row in rows:
            result = f"{row.result}; applied with `{row.unless}`" if row.unless else row.result
            parts = ", ".join(f"`{part}`" if part.endswith(("_proj", "_mqa")) else part for part in row.what)
            note = f" ({row.note})" if row.note else ""
            form = row.form or ("as it is" if row.result == "applied" else "refused")
            lines.append(f"| {', '.join(row.models) or 'any'} | {parts} | {result}{note} | {form} | {row.seen} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def read_pins(end: str) -> dict[str, str]:
    """Return the versions of `make test-versions` at one end, OLDEST or NEWEST."""
    line = next(each for each in (ROOT / "Makefile").read_text().splitlines() if each.startswith(f"{end} :="))
    return dict(pin.split("==") for pin in line.partition(":=")[2].split())


def versions(_: str, __: list[str]) -> str:
    """Return the table of libraries: what pip admits, and what `make test-versions` and `make test` ran with."""
    from windlass.versions import TESTED

    oldest, newest = read_pins("OLDEST"), read_pins("NEWEST")
    rows = (
        f"| {name} | {supported} | {oldest[name]} | {ran} | {newest[name]} |"
        for name, (supported, ran) in TESTED.items()
    )
    heading = "| library | range | oldest tested | all tests | newest tested |\n|---|---|---|---|---|"
    return "\n".join((heading, *rows))


MARKS: dict[str, Callable[[str, list[str]], str]] = {
    "windlass": printed,
    "layouts": layouts,
    "families": families,
    "source": source,
    "servers": servers,
    "versions": versions,
}


def pages() -> dict[Path, str]:
    """Return every generated page and its text."""
    sys.path.insert(0, str(ROOT / "tests"))
    import faults

    made = {COMMANDS / f"{name}.md": command_page(name) for name in commands()}
    for page_with_output in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs" / f"{name}.md" for name in ("layouts", "plan-example", "export", "faq")),
    ):
        made[page_with_output] = with_output(page_with_output.read_text(encoding="utf-8"))
    reference = ROOT / "docs" / "reference"
    made |= {reference / "run-file.md": run_file_page(), reference / "run-folder.md": run_folder_page()}
    return {**made, COMMANDS / "README.md": index_page(), ROOT / "docs" / "faults.md": faults.page()}


def descriptions() -> dict[Path, str]:
    """Return what transformers builds for published models without a row in family.py, so that they are planned
    without torch."""
    from windlass.introspect.describe import derive
    from windlass.model.base import read_published_configs
    from windlass.model.derived import SHIPPED
    from windlass.model.description import hash_config
    from windlass.model.family import FAMILIES, WRAPPERS

    made = {}
    for name, config in read_published_configs().items():
        if not {config["model_type"]} & (FAMILIES.keys() | WRAPPERS.keys()):
            found = derive({**config, "quantization_config": None}, name) | {"config": hash_config(config)}
            made[SHIPPED / f"{hash_config(config)}.json"] = json.dumps(found) + "\n"
    return made


def write() -> None:
    COMMANDS.mkdir(parents=True, exist_ok=True)
    for path, text in {**pages(), **descriptions()}.items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    write()
