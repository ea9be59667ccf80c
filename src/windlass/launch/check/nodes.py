"""Checks between the nodes of a run: they join, compare, connect, write and measure, and agree on one verdict."""

from __future__ import annotations

import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import __version__
from windlass.data import sources
from windlass.errors import UserError
from windlass.launch.check import bandwidth
from windlass.launch.check.machine import existing, read_text
from windlass.launch.check.results import FAIL, NODES, Result, failed, passed, refused, skipped, warned
from windlass.launch.interfaces import EXACT, choices
from windlass.launch.rendezvous import Node, Rendezvous, RendezvousError, this_node
from windlass.plan.script import ScriptPlan
from windlass.runfile import Loaded, LoadedScript

if TYPE_CHECKING:
    from windlass.plan.script import AnyPlan

COUNT, PORTS, CLOCKS, VOLUME, MASTER = "number of nodes", "ports", "clocks", "shared volume", "master's name"
# A collective would hang on any of these.
NEEDED_TO_MEASURE = {NODES, PORTS, *(f"interface {variable}" for variable in EXACT)}
NAME_SECONDS = 10.0  # for a name that resolves late: every pod is there by then
CONNECT_SECONDS = 5.0
CLOCK_READINGS = 5  # the quickest answer counts
SKEW_WARN_SECONDS = 1.0  # logs of two nodes no longer tell what came first
SKEW_FAIL_SECONDS = 60.0  # locks, caches and certificates go by times of change
END_BYTES = 64 << 10  # of each file, this much from its beginning and its end: it is compared, not proven
SEEN_SECONDS = 10.0  # NFS clients may show a folder as it was for some seconds


def check_nodes(
    loaded: Loaded | LoadedScript,
    plan: AnyPlan | None,
    mine: Sequence[Result],
    have: Mapping[str, str],
    environ: Mapping[str, str],
    root: Path,
    seconds: float,
    say: Callable[[str], None],
) -> tuple[list[Result], bool]:
    """What all nodes found, the same on each of them, and whether this one prints it. `mine`: what this node found by
    itself; it joins whatever that was."""
    try:
        node = this_node(environ)
    except UserError as error:
        return [*mine, *refused(COUNT, error.problems)], True
    name = f"node {node.rank} ({socket.gethostname()})"
    cluster, results = loaded.run.cluster, []
    # This process is a node, or a rank if torchrun started it.
    if node.world not in (cluster.nodes, loaded.run.ranks):
        hint = "set cluster.nodes to what was submitted, or submit what cluster.nodes says"
        seen = f"{node.world} started, cluster.nodes is {cluster.nodes}"
        results = [failed(COUNT, seen, hint, loaded.where("cluster.nodes"))]
    alone = [*results, *(replace(result, node=name) for result in mine)]
    if node.world == 1:
        return [*alone, skipped("between nodes", "there is one node")], True
    rendezvous = Rendezvous(node)
    try:
        rendezvous.join(seconds, partial=True, say=say)
    except RendezvousError as error:
        hint = "the pods must run at the same time and reach node 0's port: see the job's pods and its network policy"
        lost = failed(NODES, f"{name} did not join within {seconds:.0f} s: {error}", hint)
        return [*alone, replace(lost, node=name)], True
    try:
        found = compare_all(rendezvous, loaded, plan, mine, have, environ, root, name, seconds)
        return [*results, *found], node.rank == 0
    except RendezvousError as error:
        lost = failed(NODES, f"{name} lost the others while checking: {error}", "see what node 0 reports")
        return [*alone, replace(lost, node=name)], True
    finally:
        rendezvous.close()


def compare_all(
    rendezvous: Rendezvous,
    loaded: Loaded | LoadedScript,
    plan: AnyPlan | None,
    mine: Sequence[Result],
    have: Mapping[str, str],
    environ: Mapping[str, str],
    root: Path,
    name: str,
    seconds: float,
) -> list[Result]:
    """The rounds, in an order in which each explains the failures of those after it."""
    port = TimePort()
    try:
        word = {
            "name": name,
            "address": own_address(rendezvous, environ, root),
            "port": port.number,
            "results": [result.as_dict() for result in mine],
            "facts": facts(loaded, plan, have, environ),
        }
        present = rendezvous.gather(word, seconds)
        names = [node["name"] if node else f"node {rank}" for rank, node in enumerate(present)]
        results = merge([node and node["results"] for node in present], names)
        resolved = rendezvous.gather([check_master_name(rendezvous.node).as_dict()])
        results += merge(resolved, names)
        results += compare([node and node["facts"] for node in present], names)
        connections = rendezvous.gather(connect(rendezvous.node.rank, present))
        volumes = rendezvous.gather(share_volume(rendezvous, Path(loaded.run.folder)))
        absent = [rank for rank, node in enumerate(present) if node is None]
        left = [rank for rank, row in enumerate(volumes) if row is None and rank not in absent]
        results.append(check_presence(absent, left, names, seconds))
        # That nobody reaches a node that is gone is no fault of the network's.
        reached = [row and {to: why for to, why in row["reach"].items() if int(to) not in left} for row in connections]
        results.append(check_ports(reached, names))
        results.append(check_clocks([row and row["ahead"] for row in connections], names))
        folder, where = loaded.run.folder, loaded.where(loaded.run.folder_key)
        results.append(check_volume(volumes, names, folder, where))
        hanging = [result.name for result in results if result.verdict == FAIL and result.name in NEEDED_TO_MEASURE]
        return [*results, *measure_speed(rendezvous, plan, "torch" in have, hanging, names, environ)]
    finally:
        port.close()


def merge(by_rank: Sequence[Sequence[dict[str, Any]] | None], names: Sequence[str]) -> list[Result]:
    """Each node's own results, under its name; once if all nodes report the very same."""
    rows: dict[Result, list[str]] = {}
    for results, name in zip(by_rank, names, strict=True):
        for result in results or ():
            rows.setdefault(Result(**result), []).append(name)
    there = sum(results is not None for results in by_rank)
    return [
        replace(result, node="all nodes" if len(nodes) == there > 1 else ", ".join(nodes))
        for result, nodes in rows.items()
    ]


def check_presence(absent: Sequence[int], left: Sequence[int], names: Sequence[str], seconds: float) -> Result:
    lost = ((absent, f"did not join within {seconds:.0f} s"), (left, "left while checking"))
    seen = [f"{', '.join(names[rank] for rank in ranks)} {what}" for ranks, what in lost if ranks]
    if seen:
        hint = "its pod is pending, crashed, or can't reach node 0: see its log and events"
        return failed(NODES, "; ".join(seen), hint)
    return passed(NODES, f"{len(names)} joined: {', '.join(names)}")


def check_master_name(node: Node) -> Result:
    """Ranks of every node look node 0 up by its name, those of node 0 too. Pods' names resolve once pods are ready."""
    deadline = time.monotonic() + NAME_SECONDS
    while True:
        try:
            address = socket.getaddrinfo(node.host, None, type=socket.SOCK_STREAM)[0][4][0]
            return passed(MASTER, f"{node.host} is {address}")
        except OSError as error:
            if time.monotonic() > deadline:
                hint = "a headless Service for the pods' names, or an address instead of the name"
                return failed(MASTER, f"{node.host!r} does not resolve: {error.strerror or error}", hint)
        time.sleep(0.5)


# --- who reaches whom, and whose clock is off -----------------------------------------------------------------------


def own_address(rendezvous: Rendezvous, environ: Mapping[str, str], root: Path) -> str:
    """Where the others reach this node: on the interface configured for the libraries, else where it joined."""
    chosen = (address for choice in choices(environ, 1, root) for _, address in choice.addresses)
    return next(chosen, rendezvous.address)


class TimePort:
    """A port of this node that answers every byte with the time."""

    def __init__(self, address: str = "", clock: Callable[[], float] = time.time) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=64)
        self.number = int(self._server.getsockname()[1])
        self._clock = clock
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                peer, _ = self._server.accept()
                threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with suppress(OSError), peer:
            peer.settimeout(CONNECT_SECONDS)
            while peer.recv(1):
                peer.sendall(f"{self._clock():.6f}\n".encode())

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()


def read_time(address: str, port: int, clock: Callable[[], float] = time.time) -> tuple[str, float | None]:
    """Why a node can't be reached (empty if it can), and how far its clock is ahead of this one's."""
    answers: list[tuple[float, float]] = []  # how long each took, and how far ahead the other clock was
    try:
        with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as end, end.makefile("rb") as lines:
            for _ in range(CLOCK_READINGS):
                asked, began = clock(), time.perf_counter()
                end.sendall(b"?")
                theirs = float(lines.readline())
                took = time.perf_counter() - began
                answers.append((took, theirs - asked - took / 2))
    except TimeoutError:
        return "no answer", None
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error or "it closed the connection"), None
    return "", min(answers)[1]


def connect(me: int, present: Sequence[Any]) -> dict[str, Any]:
    """To every other node, and how far this clock is ahead of node 0's."""
    reach: dict[str, str] = {}
    ahead: float | None = None if me else 0.0
    for rank, node in enumerate(present):
        if node is not None and rank != me:
            reach[str(rank)], offset = read_time(node["address"], node["port"])
            if rank == 0 and offset is not None:
                ahead = -offset
    return {"reach": reach, "ahead": ahead}


def check_ports(reports: Sequence[Mapping[str, str] | None], names: Sequence[str]) -> Result:
    """From each node to each other. A node that nobody reaches is named before pairs are."""
    if not any(reports):
        return skipped(PORTS, "no node reports whom it reaches")
    broken = {(a, int(b)): why for a, row in enumerate(reports) if row for b, why in row.items() if why}
    if not broken:
        return passed(PORTS, f"every one of {len(names)} nodes reaches every other")
    seen = []
    for b in dict.fromkeys(b for _, b in broken):
        callers = [a for a, row in enumerate(reports) if row and str(b) in row]
        cut_off = [a for a in callers if (a, b) in broken]
        why = broken[cut_off[0], b]
        if len(cut_off) == len(callers) > 1:
            seen.append(f"no other node reaches {names[b]} ({why})")
        else:
            seen.append(f"{' and '.join(names[a] for a in cut_off)} can't reach {names[b]} ({why})")
    hint = "a firewall or network policy between the pods, or the wrong interface: ranks connect to ports of any number"
    return failed(PORTS, "; ".join(seen), hint)


def check_clocks(offsets: Sequence[float | None], names: Sequence[str]) -> Result:
    """Each node's clock against node 0's."""
    known = {name: offset for name, offset in zip(names, offsets, strict=True) if offset is not None}
    if len(known) < 2:
        return skipped(CLOCKS, "no node's clock could be compared with node 0's")
    name = max(known, key=lambda name: abs(known[name]))
    skew = abs(known[name])
    seen = f"{name} is {skew:.3f} s {'ahead of' if known[name] > 0 else 'behind'} {names[0]}"
    if skew > SKEW_WARN_SECONDS:
        return (failed if skew > SKEW_FAIL_SECONDS else warned)(CLOCKS, seen, "run chrony or ntpd on that node")
    return passed(CLOCKS, f"within {skew * 1000:.0f} ms of {names[0]}'s")


# --- the same files, libraries and settings -------------------------------------------------------------------------

SAME_HINTS = {
    "run file": "mount one run file for all, with the same overrides",
    "windlass": "use one image for all nodes",
    "system": "use one image for all nodes, by digest",
    "data": "mount the same volume, or copy the data set again",
    "model": "mount the same volume, or copy the checkpoint again",
}


def facts(
    loaded: Loaded | LoadedScript, plan: AnyPlan | None, have: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, Any]:
    """What must be the same on every node, as texts to compare; None for what can't be read."""
    model = None
    if plan is not None and not isinstance(plan, ScriptPlan) and plan.base.path:
        model = file_digest([*sorted(plan.base.path.glob("*.safetensors")), plan.base.path / "config.json"])
    data = None
    if isinstance(loaded, LoadedScript):
        data = file_digest([Path(loaded.run.script.path)]) if loaded.run.script.path else None
    else:
        with suppress(UserError):
            found = sources.resolve(loaded.run.data, loaded.where)
            if found.format != "hub":
                data = file_digest(path for paths in found.splits.values() for path in paths)
    release = dict(line.split("=", 1) for line in read_text(Path("/etc/os-release")).splitlines() if "=" in line)
    return {
        "run file": digest([loaded.run.model_dump_json().encode()]),
        "windlass": __version__,
        "image": dict(have),
        "system": release.get("PRETTY_NAME", "").strip('"'),
        "data": data,
        "model": model,
        "variables": {k: v for k, v in environ.items() if k.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))},
    }


def digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def file_digest(paths: Iterable[Path]) -> str | None:
    """Names, sizes and ends of files; a folder stands for the files in it. None if one can't be read."""
    parts: list[bytes] = []
    try:
        for path in dict.fromkeys(paths):
            for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
                size = file.stat().st_size
                with file.open("rb") as opened:
                    head = opened.read(END_BYTES)
                    opened.seek(max(0, size - END_BYTES))
                    parts += [file.name.encode(), str(size).encode(), head, opened.read(END_BYTES)]
    except OSError:
        return None
    return digest(parts)


def compare(all_facts: Sequence[Mapping[str, Any] | None], names: Sequence[str]) -> list[Result]:
    """One result for each fact. The nodes in the minority are named."""
    present = {name: fact for name, fact in zip(names, all_facts, strict=True) if fact is not None}
    results = []
    for key, hint in SAME_HINTS.items():
        title, values = f"same {key}", {name: fact.get(key) for name, fact in present.items()}
        blind = [name for name, value in values.items() if value is None]
        if len(blind) == len(values):
            results.append(skipped(title, "no node could read it"))
        elif blind:
            results.append(failed(title, f"{', '.join(blind)} can't read it, the others can", hint))
        elif odd := minority(values):
            seen = "; ".join(f"{name} has {values[name]}" for name in odd)
            results.append(failed(title, f"{seen}, the others don't", hint))
        else:
            results.append(passed(title, str(next(iter(values.values())))))
    # Nodes of two kinds may need different variables, so these only warn.
    for title, key, form, absent, otherwise, hint, noun in (
        ("same image", "image", "{} has {} {}", "none", failed, "use one image for all nodes, by digest", "packages"),
        ("same variables", "variables", "{} has {}={}", "unset", warned, "set them in cluster.env", "variables"),
    ):
        every = sorted({item for fact in present.values() for item in fact[key]})
        odd = []
        for item in every:
            values = {name: fact[key].get(item, absent) for name, fact in present.items()}
            odd += [form.format(name, item, values[name]) for name in minority(values)]
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        seen = f"{'; '.join(odd[:5])}{more}" if odd else f"{len(every)} {noun}, all the same"
        results.append(otherwise(title, seen, hint) if odd else passed(title, seen))
    return results


def minority(values: Mapping[str, Any]) -> list[str]:
    """Names whose value is not the most common one; of equally common ones, the first node's counts."""
    texts = list(map(str, values.values()))
    usual = max(texts, key=lambda text: (texts.count(text), -texts.index(text)))
    return [name for name, value in values.items() if str(value) != usual]


# --- one volume -----------------------------------------------------------------------------------------------------


def share_volume(rendezvous: Rendezvous, folder: Path) -> dict[str, str]:
    """A file that node 0 makes and renames, as every node sees it. Returns what went wrong here, by step."""
    writer = rendezvous.node.rank == 0
    place, token = existing(folder), secrets.token_hex(8)
    wrong = attempt(lambda: (place / f".windlass-{token}.part").write_text(token)) if writer else ""
    word = rendezvous.gather({"wrong": wrong, "token": token, "folder": str(place)})[0]
    if word is None or word["wrong"]:
        return {"written": word["wrong"] if word else "node 0 is gone"}
    place, token = Path(word["folder"]), word["token"]
    before, after = place / f".windlass-{token}.part", place / f".windlass-{token}"
    found = {} if becomes_true(before.exists) else {"seen": f"what node 0 wrote in {place} does not show here"}
    rendezvous.gather(None)  # all have looked
    wrong = attempt(lambda: before.rename(after)) if writer else ""
    wrong = rendezvous.gather(wrong)[0]
    if wrong:
        found = {"renamed": wrong}
    elif not found and not becomes_true(lambda: not before.exists() and after.read_text() == token):
        found = {"renamed": f"node 0's rename in {place} does not show here"}
    rendezvous.gather(None)
    if writer:
        attempt(lambda: before.unlink(missing_ok=True))
        attempt(lambda: after.unlink(missing_ok=True))
    return found


def attempt(action: Callable[[], Any]) -> str:
    try:
        action()
    except OSError as error:
        return f"{error.strerror or error}"
    return ""


def becomes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        with suppress(OSError):
            if condition():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def check_volume(reports: Sequence[Mapping[str, str] | None], names: Sequence[str], folder: str, where: str) -> Result:
    wrong = [f"{name}: {'; '.join(row.values())}" for name, row in zip(names, reports, strict=True) if row]
    if wrong:
        hint = "mount the same claim (ReadWriteMany) on every node, without long attribute caching (NFS: actimeo)"
        return failed(VOLUME, "; ".join(wrong), hint, where)
    return passed(VOLUME, f"written and renamed in {folder} by {names[0]}, seen by all")


# --- speed ----------------------------------------------------------------------------------------------------------


def measure_speed(
    rendezvous: Rendezvous,
    plan: AnyPlan | None,
    torch: bool,
    hanging: Sequence[str],
    names: Sequence[str],
    environ: Mapping[str, str],
) -> list[Result]:
    """Only if it can work everywhere: a collective with a node missing hangs."""
    wrong = "" if torch and plan else "torch is not installed" if not torch else "there is no plan"
    able = rendezvous.gather(wrong)
    lacking = [f"{names[rank]}: {'gone' if word is None else word}" for rank, word in enumerate(able) if word != ""]
    if hanging or lacking or plan is None:
        why = "; ".join(lacking) or f"it would hang: {', '.join(dict.fromkeys(hanging))} failed"
        return [skipped("all-reduce", why), skipped("NCCL transport", why)]
    local_rank = environ.get("LOCAL_RANK", "0")
    measured = bandwidth.measure(rendezvous, int(local_rank) if local_rank.isdigit() else 0)
    transports = rendezvous.gather([bandwidth.check_transport(plan, measured.log).as_dict()])
    # What was measured with a node gone shows that alone.
    if gone := [names[rank] for rank, row in enumerate(transports) if row is None]:
        return [failed(NODES, f"{', '.join(gone)} left while speed was measured", "see its log and events")]
    return [*bandwidth.check_speed(plan, measured, names), *merge(transports, names)]
