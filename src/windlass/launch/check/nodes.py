"""Checks between the nodes of a run: they join, compare, connect, write and measure, and agree on one verdict."""

import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.data import sources
from windlass.data.select import list_all_sets
from windlass.errors import UserError
from windlass.files import write_atomic
from windlass.hardware import read_text
from windlass.launch.check import bandwidth
from windlass.launch.check.machine import deepest_existing_dir
from windlass.launch.check.results import (
    FAIL,
    NO_PLAN,
    NODES,
    Context,
    Result,
    failed,
    passed,
    problems_to_results,
    skipped,
    warned,
)
from windlass.plan.script import ScriptPlan
from windlass.ranks.place import EXACT, list_choices, read_node
from windlass.ranks.rendezvous import Rendezvous, RendezvousError
from windlass.runfile import LoadedScript

COUNT = "number of nodes"
PORTS = "ports"
CLOCKS = "clocks"
VOLUME = "shared volume"
# A collective would hang on any of these.
NEEDED_TO_MEASURE = {NODES, PORTS, *(f"interface {variable}" for variable in EXACT)}
CONNECT_SECONDS = 5.0
SKEW_WARN_SECONDS = 1.0  # the order of events in two nodes' logs becomes unclear
SKEW_FAIL_SECONDS = 60.0  # locks, caches and certificates depend on timestamps
END_BYTES = 64 << 10  # read from each file's beginning and end: a comparison, not a proof
SEEN_SECONDS = 10.0  # NFS clients may show a folder as it was for some seconds
# What must be the same on every node, and what to do if it isn't.
SAME = {
    "run file": "mount one run file for all, with the same overrides",
    "windlass": "use one image for all nodes",
    "system": "use one image for all nodes, by digest",
    "image": "use one image for all nodes, by digest",
    "data": "mount the same volume, or copy the data set again",
    "model": "mount the same volume, or copy the checkpoint again",
    "variables": "set them in cluster.env",
}


def check_nodes(
    c: Context, mine: Sequence[Result], seconds: float, say: Callable[[str], None]
) -> tuple[list[Result], bool]:
    """Return all nodes' results, the same on each node, and whether this node prints them. `mine`: this node's own
    results; it joins whatever they are."""
    try:
        node = read_node(c.environ)
    except UserError as error:
        return [*mine, *problems_to_results(COUNT, error.problems)], True
    name = f"node {node.number} ({socket.gethostname()})"
    results = list[Result]()
    # This process is a node, or a rank if torchrun started it.
    if node.count not in (c.loaded.run.cluster.size[0], c.loaded.run.ranks):
        hint = "set cluster.nodes to what was submitted, or submit what cluster.nodes says"
        seen = f"{node.count} started, cluster.nodes is {c.loaded.run.cluster.size[0]}"
        results = [failed(COUNT, seen, hint, c.loaded.where("cluster.nodes"))]
    alone = [*results, *(replace(result, node=name) for result in mine)]
    if node.count == 1:
        return [*alone, *bandwidth.check_here(c), skipped("between nodes", "there is one node")], True
    rendezvous = Rendezvous(node)
    how = f"did not join within {seconds:.0f} s"
    try:
        rendezvous.join(seconds, partial=True, say=say)
        how = "lost the others while checking"
        return [*results, *compare_nodes(rendezvous, c, mine, name, seconds)], node.number == 0
    except RendezvousError as error:
        hint = "the pods must run at the same time and reach node 0's port: see the job's pods and its network policy"
        return [*alone, replace(failed(NODES, f"{name} {how}: {error}", hint), node=name)], True
    finally:
        rendezvous.close()


def compare_nodes(
    rendezvous: Rendezvous, c: Context, mine: Sequence[Result], name: str, seconds: float
) -> list[Result]:
    """Run the rounds of checks, in an order in which each explains failures of later ones."""
    # The others reach this node on the interface configured for the libraries, else where it joined.
    chosen = (address for choice in list_choices(c.environ, 1, c.root) for _, address in choice.addresses)
    folder = Path(c.loaded.run.folder)
    where = c.loaded.where(c.loaded.run.folder_key)
    with serve_time() as port:
        word = {
            "name": name,
            "address": next(chosen, rendezvous.address),
            "port": port,
            "results": [asdict(result) for result in mine],
            "facts": collect_facts(c),
        }
        present = rendezvous.gather(word, seconds)
        names = [node["name"] if node else f"node {rank}" for rank, node in enumerate(present)]
        results = merge_results([node and node["results"] for node in present], names)
        results += compare_facts({node["name"]: node["facts"] for node in present if node})
        others = {rank: node for rank, node in enumerate(present) if node and rank != rendezvous.node.number}
        answers = {str(rank): read_time(node["address"], node["port"]) for rank, node in others.items()}
        reports = rendezvous.gather(answers)
        volumes = rendezvous.gather(check_shared_volume(rendezvous, folder))

    absent = [names[rank] for rank, node in enumerate(present) if node is None]
    left = [names[rank] for rank, row in enumerate(volumes) if row is None and names[rank] not in absent]
    lost = ((absent, f"did not join within {seconds:.0f} s"), (left, "left while checking"))
    if seen := "; ".join(f"{', '.join(gone)} {what}" for gone, what in lost if gone):
        hint = "its pod is pending, crashed, or can't reach node 0: see its log and events"
        results.append(failed(NODES, seen, hint))
    else:
        results.append(passed(NODES, f"{len(names)} joined: {', '.join(names)}"))
    # That nobody reaches a node that left is not a network fault.
    reports = [row and {to: answer for to, answer in row.items() if names[int(to)] not in left} for row in reports]
    results += [check_ports(reports, names), check_clocks(reports, names)]
    if wrong := "; ".join(f"{name}: {row}" for name, row in zip(names, volumes, strict=True) if row):
        hint = "mount the same claim (ReadWriteMany) on every node, without long attribute caching (NFS: actimeo)"
        results.append(failed(VOLUME, wrong, hint, where))
    else:
        results.append(passed(VOLUME, f"written and renamed in {folder} by {names[0]}, seen by all"))
    hanging = [result.name for result in results if result.verdict == FAIL and result.name in NEEDED_TO_MEASURE]
    return [*results, *measure_speed(rendezvous, c, hanging, names)]


def merge_results(by_rank: Sequence[Sequence[dict[str, Any]] | None], names: Sequence[str]) -> list[Result]:
    """Merge the nodes' own results under their names; a result that all share appears once."""
    rows: dict[Result, list[str]] = {}
    for results, name in zip(by_rank, names, strict=True):
        for result in results or ():
            rows.setdefault(Result(**result), []).append(name)
    there = sum(results is not None for results in by_rank)
    return [
        replace(result, node="all nodes" if len(nodes) == there > 1 else ", ".join(nodes))
        for result, nodes in rows.items()
    ]


@contextmanager
def serve_time(clock: Callable[[], float] = time.time) -> Iterator[int]:
    """Serve this node's time on a port to everyone who connects."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=64)

    def answer() -> None:
        with suppress(OSError):  # shut down
            while True:
                with server.accept()[0] as peer, suppress(OSError):
                    peer.sendall(f"{clock():.6f}\n".encode())

    threading.Thread(target=answer, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        server.close()


def read_time(address: str, port: int) -> tuple[str, float | None]:
    """Return why a node can't be reached (empty if it can), and how far its clock is ahead of this one's."""
    began = time.time()
    try:
        with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as end, end.makefile("rb") as lines:
            theirs = float(lines.readline())
    except TimeoutError:
        return "no answer", None
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or "it closed the connection"), None
    return "", theirs - (began + time.time()) / 2


def check_ports(reports: Sequence[Mapping[str, Any] | None], names: Sequence[str]) -> Result:
    """Check connections from each node to each other. A node that nobody reaches is named before pairs are."""
    if not any(reports):
        return skipped(PORTS, "no node reports whom it reaches")
    seen = []
    for to, name in enumerate(names):
        answers = {rank: row[str(to)][0] for rank, row in enumerate(reports) if row and str(to) in row}
        why = next(filter(None, answers.values()), "")
        cut_off = [names[rank] for rank, problem in answers.items() if problem]
        if len(cut_off) == len(answers) > 1:
            seen.append(f"no other node reaches {name} ({why})")
        elif cut_off:
            seen.append(f"{' and '.join(cut_off)} can't reach {name} ({why})")
    if not seen:
        return passed(PORTS, f"every one of {len(names)} nodes reaches every other")
    hint = "a firewall or network policy between the pods, or the wrong interface: ranks connect to ports of any number"
    return failed(PORTS, "; ".join(seen), hint)


def check_clocks(reports: Sequence[Mapping[str, Any] | None], names: Sequence[str]) -> Result:
    """Compare each node's clock with node 0's."""
    rows = {name: row.get("0", ("", None))[1] for name, row in zip(names, reports, strict=True) if row}
    behind = {name: offset for name, offset in rows.items() if offset is not None}
    if not behind:
        return skipped(CLOCKS, "no node's clock could be compared with node 0's")
    name, offset = max(behind.items(), key=lambda item: abs(item[1]))
    if abs(offset) <= SKEW_WARN_SECONDS:
        return passed(CLOCKS, f"within {abs(offset) * 1000:.0f} ms of node 0's")
    seen = f"{name} is {abs(offset):.3f} s {'behind' if offset > 0 else 'ahead of'} node 0"
    return (failed if abs(offset) > SKEW_FAIL_SECONDS else warned)(CLOCKS, seen, "run chrony or ntpd on that node")


def collect_facts(c: Context) -> dict[str, Any]:
    """Return by the keys of SAME a text to compare, or several by name; None for what can't be read."""
    model = data = None
    if c.plan is not None and not isinstance(c.plan, ScriptPlan) and c.plan.base.path:
        model = file_digest([*sorted(c.plan.base.path.glob("*.safetensors")), c.plan.base.path / "config.json"])
    if isinstance(c.loaded, LoadedScript):
        data = file_digest([Path(c.loaded.run.script.path)]) if c.loaded.run.script.path else None
    else:
        with suppress(UserError):
            sets = [
                sources.resolve_source(each.data, each.where)
                for run in c.loaded.runs
                for each in list_all_sets(run.run.data, run.where)
            ]
            if all(found.format != "hub" for found in sets):
                data = file_digest(path for found in sets for paths in found.splits.values() for path in paths)
    release = dict(line.split("=", 1) for line in read_text(Path("/etc/os-release")).splitlines() if "=" in line)
    return {
        "run file": hashlib.blake2b(c.loaded.run.model_dump_json().encode(), digest_size=12).hexdigest(),
        "windlass": __version__,
        "system": release.get("PRETTY_NAME", "").strip('"'),
        "image": dict(c.have),
        "data": data,
        "model": model,
        "variables": {k: v for k, v in c.environ.items() if k.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))},
    }


def file_digest(paths: Iterable[Path]) -> str | None:
    """Hash names, sizes and ends of files; a folder stands for the files in it. None if one can't be read."""
    found = hashlib.blake2b(digest_size=12)
    try:
        for path in dict.fromkeys(paths):
            for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
                size = file.stat().st_size
                with file.open("rb") as opened:
                    found.update(f"{file.name}\0{size}\0".encode() + opened.read(END_BYTES))
                    opened.seek(max(0, size - END_BYTES))
                    found.update(opened.read(END_BYTES))
    except OSError:
        return None
    return found.hexdigest()


def compare_facts(by_node: Mapping[str, Mapping[str, Any]]) -> list[Result]:
    """Return one result for each fact. Nodes in the minority are named; in a tie, the first node's side is usual."""
    results = []
    for key, hint in SAME.items():
        title = f"same {key}"
        found = {name: each[key] for name, each in by_node.items()}
        blind = [name for name, value in found.items() if value is None]
        if len(blind) == len(found):
            results.append(skipped(title, "no node could read it"))
            continue
        odd = [f"{', '.join(blind)} can't read it, the others can"] if blind else []
        several = {name: value if isinstance(value, dict) else {"": value} for name, value in found.items()}
        items = sorted({item for value in several.values() for item in value})
        for item in () if blind else items:
            texts = {name: value.get(item, "none") for name, value in several.items()}
            usual = max(texts.values(), key=list(texts.values()).count)  # in a tie the first
            odd += [f"{name} has {item and f'{item}='}{text}" for name, text in texts.items() if text != usual]
        seen = "; ".join(odd[:5]) + (f" and {len(odd) - 5} more" if len(odd) > 5 else "")
        if odd:  # nodes of two kinds may need different variables, so these only warn
            results.append((warned if key == "variables" else failed)(title, seen, hint))
        else:
            first = next(iter(found.values()))
            seen = f"{len(items)} names, all the same" if isinstance(first, dict) else str(first)
            results.append(passed(title, seen))
    return results


def check_shared_volume(rendezvous: Rendezvous, folder: Path) -> str:
    """Check that every node sees a file that node 0 writes and renames. Return what went wrong here."""
    place = deepest_existing_dir(folder)
    token = secrets.token_hex(8)
    wrong = ""
    path = place / f".windlass-{token}"
    if rendezvous.node.number == 0:
        try:
            write_atomic(path, token)
        except OSError as error:
            wrong = f"node 0 can't write in {place}: {error.strerror or error}"
    wrong, name, token = rendezvous.gather([wrong, str(path), token])[0]
    deadline = time.monotonic() + SEEN_SECONDS
    seen = False
    while not (wrong or seen) and time.monotonic() < deadline:
        with suppress(OSError):
            seen = Path(name).read_text() == token
        time.sleep(0.0 if seen else 0.2)
    rendezvous.gather(None)  # all have checked
    if rendezvous.node.number == 0 and not wrong:
        path.unlink(missing_ok=True)
    return wrong or ("" if seen else f"what node 0 wrote in {place} does not show here")


def measure_speed(rendezvous: Rendezvous, c: Context, hanging: Sequence[str], names: Sequence[str]) -> list[Result]:
    """Measure only if it can work everywhere: a collective with a node missing hangs."""
    wrong = "torch is not installed" if "torch" not in c.have else NO_PLAN if c.plan is None else ""
    able = rendezvous.gather(wrong)
    lacking = [f"{names[rank]}: {'gone' if word is None else word}" for rank, word in enumerate(able) if word != ""]
    if hanging or lacking or c.plan is None:
        why = "; ".join(lacking) or f"it would hang: {', '.join(dict.fromkeys(hanging))} failed"
        return [skipped("all-reduce", why)]
    local_rank = c.environ.get("LOCAL_RANK", "0")
    speeds = rendezvous.gather(bandwidth.measure_gpus(c.environ.get("LOCAL_RANK")), bandwidth.GROUP_SECONDS * 2)
    gpus = bandwidth.check_gpu_speed(c.plan, speeds, names)
    if gpus.verdict == FAIL:
        return [gpus, skipped("all-reduce", f"it would hang: {gpus.name} failed")]
    measured = bandwidth.measure_bandwidth(rendezvous, int(local_rank) if local_rank.isdigit() else 0)
    transports = rendezvous.gather([asdict(bandwidth.check_transport(c.plan, measured.log))])
    # If a node has left, the measurements show only that.
    if gone := [names[rank] for rank, row in enumerate(transports) if row is None]:
        return [failed(NODES, f"{', '.join(gone)} left while speed was measured", "see its log and events")]
    speeds = [*bandwidth.check_speed(c.plan, measured, names), *bandwidth.check_groups(c.plan, measured, names)]
    return [gpus, *speeds, *merge_results(transports, names)]
