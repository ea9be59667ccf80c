"""All nodes of the run at once: they meet, compare, knock, write, measure, and agree on one verdict."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.errors import UserError
from windlass.launch.check import doors, fabric, pairs, shared
from windlass.launch.check.meeting import AbsentError, Meeting, Place, attend, place, resolve
from windlass.launch.check.result import FAIL, MEETING, Result, failed, on, passed, refused, unseen

if TYPE_CHECKING:
    from windlass.plan.script import AnyPlan
    from windlass.runfile import Loaded, LoadedScript

COUNT = "number of nodes"
NAME_SECONDS = 10.0  # for a name that is known late: every pod is there by then


@dataclass(frozen=True, slots=True)
class Met:
    """What all nodes found, the same on each of them; `speaks` on the one that prints."""

    results: tuple[Result, ...]
    speaks: bool


def check(
    loaded: Loaded | LoadedScript,
    plan: AnyPlan | None,
    mine: Sequence[Result],
    have: Mapping[str, str],
    environ: Mapping[str, str],
    root: Path,
    patience_seconds: float,
    say: Callable[[str], None],
) -> Met:
    """`mine`: what this node found by itself. It comes to the meeting whatever that was."""
    try:
        here = place(environ)
    except UserError as error:
        return Met((*mine, *refused(COUNT, error.problems)), True)
    name = f"node {here.rank} ({socket.gethostname()})"
    counted = count(here, loaded)
    if here.world == 1:
        return Met((*counted, *on(name, mine), unseen("between nodes", "there is one node")), True)
    try:
        meeting = attend(here, patience_seconds, say)
    except AbsentError as error:
        hint = "the pods must run at the same time and reach node 0's port: see the job's pods and its network policy"
        lost = failed(MEETING, f"{name} did not meet the others within {patience_seconds:.0f} s: {error}", hint)
        return Met((*counted, *on(name, mine), *on(name, [lost])), True)
    try:
        results = together(meeting, loaded, plan, mine, have, environ, root, name, patience_seconds)
    except AbsentError as error:
        lost = failed(MEETING, f"{name} lost the others while checking: {error}", "see what node 0 says")
        return Met((*counted, *on(name, mine), *on(name, [lost])), True)
    finally:
        meeting.close()
    return Met((*counted, *results), here.rank == 0)


def count(here: Place, loaded: Loaded | LoadedScript) -> list[Result]:
    """As many as the run file says: this process stands for a node, or for a rank where torchrun started it."""
    cluster = loaded.run.cluster
    if here.world in (cluster.nodes, loaded.run.ranks):
        return []
    hint = "set cluster.nodes to what was submitted, or submit what cluster.nodes says"
    said = f"{here.world} started, cluster.nodes is {cluster.nodes}"
    return [failed(COUNT, said, hint, loaded.where("cluster.nodes"))]


def together(
    meeting: Meeting,
    loaded: Loaded | LoadedScript,
    plan: AnyPlan | None,
    mine: Sequence[Result],
    have: Mapping[str, str],
    environ: Mapping[str, str],
    root: Path,
    name: str,
    patience_seconds: float,
) -> list[Result]:
    """The rounds, in an order in which each explains the failures of those after it."""
    door = doors.Door()
    try:
        said = {
            "name": name,
            "address": own_address(meeting, environ, root),
            "port": door.port,
            "results": [result.as_dict() for result in mine],
            "facts": shared.facts(loaded, plan, have, environ),
        }
        present = meeting.gather(said, patience_seconds)
        names = [node["name"] if node else f"node {rank}" for rank, node in enumerate(present)]
        found = [Result(**result) for result in local(present, names)]
        resolved = meeting.gather(master(meeting.place).as_dict())
        found += [Result(**row) for row in local([row and {"results": [row]} for row in resolved], names)]
        found += shared.compare([node and node["facts"] for node in present], names)
        knocks = meeting.gather(knock(meeting, present))
        volumes = meeting.gather(shared.volume(meeting, Path(loaded.run.folder)))
        absent = [rank for rank, node in enumerate(present) if node is None]
        left = [rank for rank, row in enumerate(volumes) if row is None and rank not in absent]
        found.append(attendance(absent, left, names, patience_seconds))
        # Whom nobody reaches because it is gone is no fault of the network's.
        reached = [row and {to: why for to, why in row["reach"].items() if int(to) not in left} for row in knocks]
        found.append(doors.reach(reached, names))
        found.append(doors.clocks([None if row is None else row["ahead"] for row in knocks], names))
        folder, where = loaded.run.folder, loaded.where(loaded.run.folder_key)
        found.append(shared.one_volume(volumes, names, folder, where))
        hanging = [r.name for r in found if r.verdict == FAIL and (r.name in (MEETING, "ports") or "SOCKET" in r.name)]
        return [*found, *speed(meeting, plan, "torch" in have, hanging, names, environ)]
    finally:
        door.close()


def master(here: Place) -> Result:
    """Ranks of every node ask for the master by its name, those of node 0 too."""
    try:
        return passed("master's name", f"{here.host} is {resolve(here.host, time.monotonic() + NAME_SECONDS)}")
    except AbsentError as error:
        return failed("master's name", str(error), "a headless service for the pods' names, or an address in its place")


def local(present: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Each node's own results, under its name; where all nodes say the very same, once."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for node, name in zip(present, names, strict=True):
        for result in node["results"] if node else []:
            key = tuple(result[part] for part in ("name", "verdict", "seen", "hint", "where"))
            rows.setdefault(key, []).append(name)
    there = sum(node is not None for node in present)
    parts = ("name", "verdict", "seen", "hint", "where")
    return [
        {**dict(zip(parts, key, strict=True)), "node": "all nodes" if len(said) == there > 1 else ", ".join(said)}
        for key, said in rows.items()
    ]


def attendance(absent: Sequence[int], left: Sequence[int], names: Sequence[str], patience_seconds: float) -> Result:
    lost = ((absent, f"did not join within {patience_seconds:.0f} s"), (left, "left while checking"))
    said = [f"{', '.join(names[rank] for rank in ranks)} {what}" for ranks, what in lost if ranks]
    if said:
        hint = "its pod is pending, crashed, or cannot reach node 0: see its log and events"
        return failed(MEETING, "; ".join(said), hint)
    return passed(MEETING, f"{len(names)} met: {', '.join(names)}")


def own_address(meeting: Meeting, environ: Mapping[str, str], root: Path) -> str:
    """Where the others reach this node: on the interface that the libraries are told to use, else where it met them."""
    for variable, exact in (("GLOO_SOCKET_IFNAME", True), ("NCCL_SOCKET_IFNAME", False)):
        everything = sorted(path.name for path in (root / "sys/class/net").glob("*"))
        pattern = environ.get(variable, "")
        for name in fabric.interfaces(pattern, everything, exact=exact) if pattern else []:
            if given := fabric.addresses(name, root):
                return given[0]
    return meeting.address


def knock(meeting: Meeting, present: Sequence[Any]) -> dict[str, Any]:
    """At every other node's door, and how far node 0's clock is from this one's, seen from node 0."""
    reached: dict[str, str] = {}
    ahead: float | None = 0.0 if meeting.place.rank == 0 else None
    for rank, node in enumerate(present):
        if node is not None and rank != meeting.place.rank:
            why, offset = doors.knock(node["address"], node["port"])
            reached[str(rank)] = why
            if rank == 0 and offset is not None:
                ahead = -offset
    return {"reach": reached, "ahead": ahead}


def speed(
    meeting: Meeting,
    plan: AnyPlan | None,
    torch: bool,
    hanging: Sequence[str],
    names: Sequence[str],
    environ: Mapping[str, str],
) -> list[Result]:
    """Measured only where it can work everywhere: a collective with a node missing hangs."""
    wrong = "" if torch and plan else "torch is not installed" if not torch else "there is no plan"
    able = meeting.gather(wrong)
    lacking = [f"{names[rank]}: {'gone' if said is None else said}" for rank, said in enumerate(able) if said != ""]
    if hanging or lacking or plan is None:
        why = "; ".join(lacking) or f"it would hang: {', '.join(dict.fromkeys(hanging))} failed"
        return [unseen("all-reduce", why), unseen("NCCL transport", why)]
    local_rank = environ.get("LOCAL_RANK", "0")
    measured = pairs.measure(meeting, int(local_rank) if local_rank.isdigit() else 0)
    said = meeting.gather(pairs.transport(plan, measured.log).as_dict())
    if gone := [names[rank] for rank, row in enumerate(said) if row is None]:  # what was measured tells of that alone
        hint = "see its log and events"
        return [failed(MEETING, f"{', '.join(gone)} left while speed was measured", hint)]
    transports = [Result(**row) for row in local([row and {"results": [row]} for row in said], names)]
    return [*pairs.judge(plan, measured, names), *transports]
