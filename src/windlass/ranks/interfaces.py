"""The network interfaces that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose: a wrong one hangs without a message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import FAILED, RANK_USER_INPUT
from windlass.hardware import list_interface_addresses

EXACT = {"GLOO_SOCKET_IFNAME": True, "NCCL_SOCKET_IFNAME": False}  # variable: whether it takes names only, not prefixes


@dataclass(frozen=True, slots=True)
class Choice:
    """The interfaces that one variable chooses on this node, and any problem with them. If a name exists on no node,
    the user's setting is wrong."""

    variable: str
    pattern: str
    addresses: tuple[tuple[str, str], ...]  # (interface, its first address)
    problem: str
    code: int


def match_interfaces(pattern: str, names: Sequence[str], *, exact: bool) -> list[str]:
    """Match names by NCCL's rules: prefixes; `=` for exact names; `^` to exclude. gloo's names are always exact."""
    exclude, exact = pattern.startswith("^"), exact or "=" in pattern[:2]
    wanted = [name for name in pattern.lstrip("^=").split(",") if name]
    return [n for n in names if any(n == w or (not exact and n.startswith(w)) for w in wanted) != exclude]


def list_choices(environ: Mapping[str, str], nodes: int, root: Path = Path("/")) -> Iterator[Choice]:
    names = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    for variable, exact in EXACT.items():
        if not (pattern := environ.get(variable, "")):
            continue
        chosen, setting = match_interfaces(pattern, names, exact=exact), f"{variable}={pattern}"
        states = {name: root / "sys/class/net" / name / "operstate" for name in chosen}
        up = [name for name, state in states.items() if not state.is_file() or state.read_text().strip() != "down"]
        addresses = tuple((name, found[0]) for name in up if (found := list_interface_addresses(name, root)))
        problem, code = "", 0
        if not chosen:
            problem = f"{setting} names no interface of this node; it has {', '.join(names) or 'none'}"
            code = RANK_USER_INPUT
        elif nodes > 1 and set(chosen) == {"lo"}:
            problem, code = f"{setting} reaches no other node", RANK_USER_INPUT
        elif not addresses:
            problem, code = f"{setting}: {', '.join(chosen)} {'has no IP address' if up else 'is down'}", FAILED
        yield Choice(variable, pattern, addresses, problem, code)
