"""The network interfaces that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose: a wrong one hangs without a message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import FAILED, RANK_USER_INPUT
from windlass.hardware import list_interface_addresses

EXACT = {"GLOO_SOCKET_IFNAME": True, "NCCL_SOCKET_IFNAME": False}  # variable: whether it takes names only, not prefixes


@dataclass(frozen=True, slots=True)
class InterfaceChoice:
    """The interfaces that one variable chooses on this node, and any problem with them. If a name exists on no node,
    the user's setting is wrong."""

    variable: str
    pattern: str
    addresses: tuple[tuple[str, str], ...]  # (interface, its first address)
    problem: str
    code: int  # to end with if there is one


def match_interfaces(pattern: str, names: Sequence[str], *, exact: bool) -> list[str]:
    """Match names by NCCL's rules: prefixes; `=` for exact names; `^` to exclude. gloo's names are always exact."""
    exclude = pattern.startswith("^")
    exact = exact or "=" in pattern[:2]
    wanted = [name for name in pattern.lstrip("^=").split(",") if name]
    return [n for n in names if any(n == w or (not exact and n.startswith(w)) for w in wanted) != exclude]


def list_choices(environ: Mapping[str, str], nodes: int, root: Path = Path("/")) -> Iterator[InterfaceChoice]:
    names = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    for variable, exact in EXACT.items():
        pattern = environ.get(variable, "")
        if not pattern:
            continue
        chosen = match_interfaces(pattern, names, exact=exact)
        setting = f"{variable}={pattern}"
        states = {name: root / "sys/class/net" / name / "operstate" for name in chosen}
        up = [name for name, state in states.items() if not state.is_file() or state.read_text().strip() != "down"]
        addresses = tuple((name, found[0]) for name in up if (found := list_interface_addresses(name, root)))
        problem = ""
        code = RANK_USER_INPUT
        if not chosen:
            problem = f"{setting} names no interface of this node; it has {', '.join(names) or 'none'}"
        elif nodes > 1 and set(chosen) == {"lo"}:
            problem = f"{setting} reaches no other node"
        elif not addresses:
            problem = f"{setting}: {', '.join(chosen)} {'has no IP address' if up else 'is down'}"
            code = FAILED
        yield InterfaceChoice(variable, pattern, addresses, problem, code)
