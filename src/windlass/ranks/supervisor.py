"""Start this machine's ranks as processes, signal them, wait for them, and explain why they failed. No torch."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, NoReturn

from windlass.errors import LOST_RANK, RANK_USER_INPUT, SAVED, Problem, RunError, UserError, Where
from windlass.hardware import count_usable_cpus
from windlass.ranks.job import LaunchedJob
from windlass.ranks.place import Node, parse_number, read_node
from windlass.ranks.rank import SIGNALS, STATUS_DIR, SUPERVISED, read_rank, read_status, signal_on_parent_death
from windlass.ranks.rendezvous import LOST
from windlass.runfile import Loaded, LoadedScript
from windlass.runfile.machines import GRACE_SECONDS
from windlass.variables import DEFAULTS

PATIENCE_SECONDS: Final = 20.0  # time for the other ranks to end once one has failed
LOST_SECONDS: Final = 20.0  # time for the ranks to notice that another node is lost, and then to end after a signal
SAME_SECONDS: Final = 1.0  # a signal sent to a process and its group arrives twice and counts once


def start_ranks(
    command: Sequence[str],
    ranks: int,
    environ: Mapping[str, str],
    *,
    grace_seconds: float = GRACE_SECONDS,
    patience_seconds: float = PATIENCE_SECONDS,
) -> int:
    """Run `command` once per rank on this machine alone. Returns the exit code; see `run_ranks`."""
    with tempfile.TemporaryDirectory(prefix="windlass-") as folder, reserve_port() as port:
        environs = make_environments(ranks, environ, Node(port=port))
        return run_ranks(
            command, environs, Path(folder), grace_seconds=grace_seconds, patience_seconds=patience_seconds
        )


def run_ranks(
    command: Sequence[str],
    environs: Sequence[Mapping[str, str]],
    status_dir: Path,
    *,
    grace_seconds: float = GRACE_SECONDS,
    patience_seconds: float = PATIENCE_SECONDS,
    scheduled: bool = False,
) -> int:
    """Run `command` once per environment, forward signals, wait, and report the cause if a rank failed. Returns the
    exit code. grace_seconds: for ranks to save after a signal. patience_seconds: for the others once one has failed.
    scheduled: a scheduler started this node, which may repeat a signal. These are plain processes because torchrun
    would turn every exit code into 1, kill ranks 30 s after SIGTERM whether they have saved or not, and orphan them on
    SIGUSR1."""
    starting = (
        start_process(
            command,
            {**environ, STATUS_DIR: str(status_dir)},
            status_dir / f"output-{environ['RANK']}" if local_rank else None,
        )
        for local_rank, environ in enumerate(environs)
    )
    end = wait_for_ranks(starting, grace_seconds, patience_seconds, second_kills=not scheduled, lost=status_dir / LOST)
    return _explain_end(end, [int(environ["RANK"]) for environ in environs], status_dir)


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """Reserve a port for the ranks' rendezvous, so that the system gives it to no other process. It is bound but not
    listening: with SO_REUSEADDR, rank 0's store, which sets it too, can still take it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("localhost", 0))
        yield int(holder.getsockname()[1])


def make_environments(ranks: int, environ: Mapping[str, str], node: Node) -> list[dict[str, str]]:
    inherited = {name: value for name, value in environ.items() if not name.startswith("PET_")}  # torchrun's settings
    inherited.setdefault("OMP_NUM_THREADS", str(max(1, count_usable_cpus() // ranks)))
    inherited.setdefault("TOKENIZERS_PARALLELISM", "false")  # true makes forked workers deadlock
    shared = {
        "WORLD_SIZE": str(node.count * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": node.host,
        "MASTER_PORT": str(node.port),
        SUPERVISED: "1",
    }
    return [
        {**inherited, **shared, "RANK": str(node.number * ranks + local_rank), "LOCAL_RANK": str(local_rank)}
        for local_rank in range(ranks)
    ]


def remove_accelerate_settings(environ: MutableMapping[str, str]) -> None:
    """Remove settings with which Accelerate would shard a model a second time; the run file sets the precision."""
    others = ("USE_FSDP", "MIXED_PRECISION", "DYNAMO_BACKEND", "GRADIENT_ACCUMULATION_STEPS")
    for key in list(environ):
        if key.startswith("FSDP_") or key in (f"ACCELERATE_{name}" for name in others):
            del environ[key]


def set_allocator(environ: MutableMapping[str, str]) -> None:
    """Set the allocator as in submitted jobs, also under torchrun: batches of different shapes fragment memory
    otherwise. Call before CUDA starts. A setting of the user's, by either name, is left alone."""
    names = [name for name in DEFAULTS if name.endswith("ALLOC_CONF")]
    if not any(name in environ for name in names):
        environ.update({name: DEFAULTS[name] for name in names})


def start_process(
    command: Sequence[str],
    environ: Mapping[str, str],
    output: Path | None = None,
    parent_death_signal: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a rank. Without `output` it shares this terminal; output written to a file is shown only if the rank fails.
    Each rank has a session of its own: Ctrl-C reaches it once, through the signals forwarded below."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(output.open("wb")) if output else None
        return subprocess.Popen(
            list(command),
            env=environ,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=lambda: signal_on_parent_death(parent_death_signal),
        )


def run_processes(
    command: Sequence[str], environs: Sequence[Mapping[str, str]], folder: Path, until: float, grace: float = 0.0
) -> list[int | None]:
    """Run a process in each environment and kill those that are left at `until`, or `grace` seconds after one failed.
    Return their exit codes, None for those that were killed. Their output is in `folder`, by number: output-0."""
    processes = [start_process(command, environ, folder / f"output-{i}") for i, environ in enumerate(environs)]
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):  # the others wait for it
            until = min(until, time.monotonic() + grace)
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.wait()
    return codes


def read_last_line(output: Path) -> str:
    return "".join(output.read_text(errors="replace").strip().splitlines()[-1:])


def to_exit_code(code: int) -> int:
    """Return the exit code: a rank that a signal ended without a message had not begun, since `run_rank` handles
    signals."""
    return SAVED if code in (-signal.SIGTERM, -signal.SIGUSR1) else code


class End(NamedTuple):
    """How this machine's ranks ended, in the order in which they were started."""

    codes: list[int]
    first: int | None  # the one that failed first; None if all ended well
    cut_short: str  # why ranks were ended before they had saved

    @property
    def interrupted_save(self) -> bool:
        return bool(self.cut_short) and not {to_exit_code(code) for code in self.codes} <= {0, SAVED}


def wait_for_ranks(
    starting: Iterable[subprocess.Popen[bytes]],
    grace_seconds: float,
    patience_seconds: float,
    *,
    second_kills: bool = True,
    stop: threading.Event | None = None,
    lost: Path | None = None,
) -> End:
    """Start ranks and wait until all have ended. Ranks start in here, so that a signal always reaches those that run.
    If one fails, the others get a bounded time. On a signal, they save. A second signal kills them, if `second_kills`:
    not below a launcher, which signals all ranks because one of them has ended. stop: an event that acts like a signal.
    lost: a file that exists once another node is lost; ranks notice by themselves, or would wait for it for ever."""
    processes: list[subprocess.Popen[bytes]] = []
    signalled: float | None = None
    cut_short = ""

    def forward(_number: int = signal.SIGTERM, _frame: FrameType | None = None) -> None:
        nonlocal signalled, cut_short
        if signalled is None:
            signalled = time.monotonic()
            signal_all(processes, signal.SIGTERM)
        elif second_kills and time.monotonic() - signalled > SAME_SECONDS:
            cut_short = "a second signal ended the ranks before they had saved"
            signal_all(processes, signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    first: int | None = None
    deadline: float | None = None
    lost_at: float | None = None
    late = f"the ranks had not saved {grace_seconds:g} s after the signal"
    killed = False
    saving = False
    try:
        for process in starting:
            processes.append(process)
            if signalled is not None:
                signal_all([process], signal.SIGTERM)
        while None in (codes := [process.poll() for process in processes]):
            if stop is not None and stop.is_set() and signalled is None:
                forward()
            if first is None or codes[first] == -signal.SIGABRT:
                first = find_first_failure(codes)
            if lost_at is None and lost is not None and lost.exists():
                lost_at = time.monotonic()
            if lost_at is not None and deadline is None and time.monotonic() > lost_at + LOST_SECONDS:
                forward()
                late = f"another node was lost {2 * LOST_SECONDS:.0f} s before, and the ranks had not ended"
                saving = True
                deadline = time.monotonic() + LOST_SECONDS
            if deadline is None and (first is not None or signalled is not None):
                saving = signalled is not None
                deadline = time.monotonic() + (grace_seconds if saving else patience_seconds)
            if deadline is not None and time.monotonic() > deadline:
                if saving and (first is None or to_exit_code(codes[first] or 0) == SAVED):
                    cut_short = late
                signal_all(processes, signal.SIGKILL if killed or saving else signal.SIGTERM)
                killed = True
                deadline = time.monotonic() + 5.0
            time.sleep(0.05)
    finally:
        signal_all(processes, signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)
    codes_at_end = [process.returncode for process in processes]
    return End(codes_at_end, find_first_failure(codes_at_end) if first is None else first, cut_short)


def find_first_failure(codes: Sequence[int | None]) -> int | None:
    """Return the first rank that did not end well. One that saved or was killed explains those that lost it, which
    fail or are aborted by a library."""
    ended = [(code != SAVED, code > 0, code == -signal.SIGABRT, rank) for rank, code in enumerate(codes) if code]
    return min(ended)[-1] if ended else None


def signal_all(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def _explain_end(end: End, ranks: Sequence[int], status_dir: Path) -> int:
    """Return the exit code, or raise the root cause of a failure: ranks that only lost their peer fail after it."""
    resume = "resume from the last checkpoint with --resume"
    if end.first is None:
        return 0
    if end.interrupted_save:
        hint = f"{resume}; cluster.grace_seconds is the time that ranks get"
        raise RunError(end.cut_short, "windlass train", hint, "interrupted-save")
    first = ranks[end.first]
    code = to_exit_code(end.codes[end.first])
    if code == SAVED:  # the others have saved too, or lost this one
        message = read_status(status_dir, f"stopped-{first}")
        if message:
            print(message, file=sys.stderr, flush=True)
        return SAVED
    written = ((rank, read_status(status_dir, f"error-{rank}")) for rank in ranks)
    errors = [{"rank": rank, **json.loads(text)} for rank, text in written if text]
    worded = [error for error in errors if "problems" in error]
    causes = [error for error in worded if error["problems"][0]["code"] != LOST_RANK]
    if causes:
        _raise_first(causes)
    if code < 0:
        phase = read_status(status_dir, f"phase-{first}") or "starting"
        hint = f"a SIGKILL that nobody sent is most often the kernel out of memory (see dmesg); {resume}"
        problem = f"rank {first} was killed by {signal.Signals(-code).name} while {phase}"
        if code != -signal.SIGKILL:  # a library that aborts says why
            words = read_status(status_dir, f"output-{first}")[-4000:].strip()
            problem += f"; it printed:\n{words}" if words else ""
            hint = resume
        raise RunError(problem, "windlass train", hint, "killed-rank")
    tracebacks = [error for error in errors if "problems" not in error]
    explained = {error["rank"] for error in errors}
    failed = [rank for rank, code in zip(ranks, end.codes, strict=True) if code > 0 and code != SAVED]
    silent = [rank for rank in failed if rank not in explained]
    if tracebacks:
        error = min(tracebacks, key=lambda error: error["time"])
        text = f"rank {error['rank']} failed:\n{error['traceback']}"
    elif silent:
        code = end.codes[ranks.index(silent[0])]
        text = f"rank {silent[0]} ended with {code}:\n{read_status(status_dir, f'output-{silent[0]}')[-4000:]}"
    else:
        _raise_first(worded)
    print(text, file=sys.stderr, flush=True)
    return 1


def _raise_first(errors: Sequence[Mapping[str, Any]]) -> NoReturn:
    error = min(errors, key=lambda error: error["time"])
    kind = UserError if error["code"] == RANK_USER_INPUT else RunError
    raise kind.of([Problem(**problem) for problem in error["problems"]])


def default_overrides(
    loaded: Loaded | LoadedScript, environ: Mapping[str, str], gpus: int, job: LaunchedJob | None = None
) -> list[str]:
    """Return overrides for what the run file leaves open: from the job or the launcher that started this process, else
    this machine's GPUs. CUDA_VISIBLE_DEVICES limits the GPUs that a process started here may use."""
    cluster = loaded.run.cluster
    layout = loaded.run.layout
    if cluster.nodes != "auto" or cluster.gpus_per_node != "auto" or layout.ranks is not None:
        return []
    if job is not None:
        return [f"cluster.nodes={job.nodes}", f"cluster.gpus_per_node={job.ranks_per_node}"]
    world = parse_number(environ.get("WORLD_SIZE", ""))
    local_world = parse_number(environ.get("LOCAL_WORLD_SIZE", ""))
    if "RANK" in environ and world >= 0 and local_world > 0:
        return [f"cluster.nodes={max(1, world // local_world)}", f"cluster.gpus_per_node={local_world}"]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = min(gpus, sum(name.strip() not in ("", "-1") for name in visible.split(",")))
    nodes = 1 if read_rank(environ) else read_node(environ, planned=1).count
    overrides = [f"cluster.nodes={nodes}"] if nodes > 1 else []
    return [*overrides, f"cluster.gpus_per_node={gpus}"] if gpus > 1 else overrides


def require_all_nodes(planned: int, where: Where, environ: Mapping[str, str]) -> None:
    """Refuse to start on another number of nodes than planned: one of several would wait for the others, and too few
    would train another run."""
    nodes = read_node(environ, planned).count
    if planned != nodes:
        noun = "node" if planned == 1 else "nodes"
        hint = "add --ranks N to use this machine alone, or start it with `windlass submit RUN`"
        what = f"the run is planned for {planned} {noun}, and this is {nodes}"
        raise UserError(what, where("cluster.nodes"), hint, "other-nodes")
