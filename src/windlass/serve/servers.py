"""Servers as a table: what each does with each kind of module of each kind of model (servers.toml)."""

import datetime
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from windlass.model import Base
from windlass.observe.format import format_plural

PEFT: Final = "peft"
PER_EXPERT: Final = "per-expert"
FOLDED: Final = "folded"
MERGED: Final = "merged"
MISTRAL: Final = "mistral"  # Mistral's own layout of a merged model
APPLIED: Final = "applied"
UNTRIED: Final = "untried"
VLLM_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # its choices for --max-lora-rank
# Result -> what the server does with the modules that follow.
SAYS: Final = {
    "ignored": "ignores without a word",
    "refused": "refuses",
    "misscaled": "applies at the wrong scale",
    "crash": "crashes on",
    "untried": "was not tried with",
}


@dataclass(frozen=True, slots=True)
class Server:
    """A server, and which version of it was tried, when and how."""

    title: str
    version: str
    tried: datetime.date
    how: str
    commands: Sequence[str] = ()  # that serve {base} with {adapter} as {name}
    fetches: str = ""  # the command before them, if they open {base} as a folder alone
    template: str = ""  # the option that makes it write chats by another template than the base's


@dataclass(frozen=True, slots=True)
class ServerRow:
    """One row of servers.toml, whose head says what the fields mean."""

    server: str
    what: tuple[str, ...]
    result: str
    models: tuple[str, ...] = ()
    form: str = ""
    module: str = ""  # the experts' module in the server
    matrices: tuple[str, ...] = ()  # an expert's gate, down and up matrix there
    unless: str = ""
    seen: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ServerVerdict:
    """What a server does with some modules, or with a feature of the adapter."""

    row: ServerRow
    what: str
    modules: tuple[str, ...] = field(default=())
    enabled: bool = False  # the environment variable is set that makes the server apply them

    @property
    def is_served(self) -> bool:
        """Return whether the server applies them, as PEFT saves them or as windlass writes them."""
        return self.row.result == APPLIED or bool(self.row.form) or self.enabled

    @property
    def is_refused(self) -> bool:
        """Return whether the adapter must not be exported for the server."""
        return not self.is_served and self.row.result != UNTRIED

    def __str__(self) -> str:
        title = SERVERS[self.row.server].title
        count = f" ({format_plural(len(self.modules), 'module')})" if self.modules else ""
        note = f": {self.row.note}" if self.row.note else ""
        return f"{title} {SAYS[self.row.result]} {self.what}{count}{note}"


def list_ways_on(verdict: ServerVerdict, base: Base, run: str) -> str:
    """Return what to do about a part that the server doesn't apply. `run`: what to export, quoted."""
    row = verdict.row
    merge = f"windlass export {run} --to merged --merge"
    if find_row(row.server, base.family.model_type, MERGED).form == MISTRAL:
        merge += " --layout mistral"
    hint = f"merge it: `{merge}`"
    if row.unless:
        again = f"{row.unless} windlass export {run} --to DIR --for {row.server}"
        hint += f"; or serve with {row.unless} in the environment, and export so: `{again}`"
    return hint


def list_commands(
    server: str, base: str, config: Mapping[str, Any], verdicts: Sequence[ServerVerdict], *, own_template: bool = False
) -> list[str]:
    """Return the commands that serve an adapter, run in its folder; none for PEFT. `own_template`: the adapter was
    trained with another chat template than its base's, which servers use."""
    needed = max([int(config["r"]), *(config.get("rank_pattern") or {}).values()])
    rank = next((rank for rank in VLLM_RANKS if rank >= needed), needed)
    of = SERVERS[server]
    commands = [*of.commands]
    if of.fetches and "/" in base:  # a name on the hub
        folder = base.rpartition("/")[2]
        commands.insert(0, of.fetches.format(base=base, folder=folder))
        base = folder
    if commands and own_template:
        commands[-1] += f" {of.template}"
    names = {"base": base, "adapter": ".", "name": "adapter", "rank": rank}
    variables = dict.fromkeys(f"{verdict.row.unless} " for verdict in verdicts if verdict.enabled)
    return ["".join(variables) + command.format(**names) for command in commands]


def _read_table() -> tuple[dict[str, Server], tuple[ServerRow, ...]]:
    servers = {}
    rows = []
    for name, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
        for row in entry.pop("rows"):
            lists = {key: tuple(row.get(key, "").split()) for key in ("what", "models", "matrices")}
            rows.append(ServerRow(name, **{**row, **lists}))
        servers[name] = Server(**entry)
    return servers, tuple(rows)


SERVERS, ROWS = _read_table()


def find_row(server: str, model_type: str, *names: str) -> ServerRow:
    """Return the first row for a module by any of its names, or one that says that it was not tried."""
    for row in ROWS:
        if row.server == server and set(names) & set(row.what) and model_type in (row.models or (model_type,)):
            return row
    return ServerRow(server, (names[0],), UNTRIED)


def judge_adapter(
    server: str, base: Base, adapted: Sequence[str], features: Sequence[str], environment: Mapping[str, str]
) -> Iterator[ServerVerdict]:
    """Yield what the server does with each kind of the parameters (`adapted`, by name) and features of an adapter."""
    parts = {parameter.name: parameter.part for parameter in base.parameters}
    groups: dict[tuple[str, ServerRow], list[str]] = {}
    for name in adapted:
        part = parts[name]
        module = name.removesuffix(".weight")
        leaf = module.rpartition(".")[2]
        row = find_row(server, base.family.model_type, leaf, part)
        groups.setdefault((leaf if leaf in row.what else part, row), []).append(module)
    for feature in features:
        groups[feature, find_row(server, base.family.model_type, feature)] = []
    for (what, row), modules in groups.items():
        variable, _, value = row.unless.partition("=")
        enabled = bool(variable) and environment.get(variable) == value
        yield ServerVerdict(row, what, tuple(modules), enabled)
