"""Read a run folder's files, even partial or damaged ones: use what is there, name what is missing.

Of all ranks but the first only sums, medians and thinned curves are kept.
"""

import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from windlass import run_folder
from windlass.errors import UserError
from windlass.files import read_json
from windlass.observe import steps
from windlass.observe.reader import NAN, OBJECTS, Columns, Tail, as_list, as_number, drop_nan, get_path, median
from windlass.observe.watch.heartbeat import describe_start, read_beats

OPTIONAL: Final = (run_folder.MANIFEST, run_folder.PLAN, run_folder.LOAD, run_folder.DATA)
NOT_OF_SCRIPTS: Final = (run_folder.LOAD, run_folder.DATA)
ALL: Final = tuple(name for name in steps.FIELDS if name not in (*OBJECTS, "rows"))
# Fields kept of every rank; all fields are kept of the first one.
CURVES: Final = (
    *("step_seconds", "mfu", "gpu_utilization", "gpu_power_watts", "gpu_peak_gib", "gpu_reserved_gib", "rss_gib"),
)
PHASE_FIELDS: Final = tuple(f"{phase}_seconds" for phase in steps.PHASES)
SUMS: Final = (*PHASE_FIELDS, *CURVES, "tokens", "padded_tokens", "supervised_tokens", "gpu_temperature_celsius")

LONG: Final = 16 * 2**20  # bytes from which a step file is sampled, unless it is the first rank's

Series = tuple[list[float | None], list[float | None], list[float | None]]  # mean, minimum and maximum of each stretch


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics over the steps in which a field was measured."""

    count: int
    total: float
    most: float

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else NAN


@dataclass
class RankData:
    """The data kept of one rank."""

    length: int
    stats: dict[str, Stats]
    step_seconds: float  # these two are medians
    per_second: float
    curves: dict[str, Series]
    throttled: list[str]  # a reason for each sample that had one


@dataclass
class RunData:
    folder: Path
    name: str
    rank_count: float  # of the last try: an earlier one may have had more
    files: dict[str, dict[str, Any]]  # plan.json and the others, if present
    absent: list[str]  # what is missing, and why
    meters: dict[int, dict[str, Any]]
    first: Columns = field(default_factory=lambda: Columns(ALL))  # the lowest rank's
    ranks: dict[int, RankData] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)  # rows of the first rank's steps at which a curve's points begin, end
    items: list[float] = field(default_factory=list)  # tokens, or other counted items, of all ranks, step by step
    job_rate: list[float] = field(default_factory=list)  # the same per second
    events: list[dict[str, Any]] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    watched: bool = False  # if true, no logged alarm means that there was none
    silent_seconds: float = NAN  # since the last heartbeat of any rank
    starting: str = ""  # a sentence if it has not shown a sign of life since it was started or resumed

    def get(self, file: str, *path: str) -> Any:
        return get_path(self.files.get(file), *path)

    def stats(self, name: str) -> Stats:
        """Return a field's statistics over all ranks."""
        by_rank = [rank.stats[name] for rank in self.ranks.values()]
        most = max(drop_nan(stats.most for stats in by_rank), default=NAN)
        return Stats(sum(stats.count for stats in by_rank), math.fsum(stats.total for stats in by_rank), most)


def read_run(folder: Path, points: int = 480) -> RunData:
    """Read everything the report needs, with curves of at most `points`. Refuse a folder without any step file."""
    paths = run_folder.find_step_files(folder) if folder.is_dir() else {}
    if not paths:
        problem = "holds no steps-rank*.jsonl" if folder.is_dir() else "is not a folder"
        hint = "give a run folder: the output_dir of a run that has begun"
        raise UserError(problem if folder.exists() else "is not there", str(folder), hint, "not-a-run")

    absent: list[str] = []
    files = {}
    for name in OPTIONAL:
        value = read_json(folder / name)
        if value:
            files[name] = value
        elif not (name in NOT_OF_SCRIPTS and get_path(files.get(run_folder.MANIFEST), "kind") == "script"):
            absent.append(f"{name} is {'damaged' if (folder / name).exists() else 'absent'}")
    meters = {rank: read_json(folder / run_folder.METER.format(rank=rank)) for rank in paths}
    counts = [as_number(get_path(file, "ranks")) for file in (files.get(run_folder.MANIFEST), *meters.values())]
    rank_count = max(min(paths) + 1, next((count for count in counts if count >= 1), max(paths) + 1))
    run = RunData(folder, folder.resolve().name or str(folder), rank_count, files, absent, meters)
    first = run.first
    sampled = 0
    for rank, path in paths.items():
        tail = Tail(path)
        columns = Columns(("step", *SUMS)) if run.ranks else first
        sparse = bool(run.ranks) and path.stat().st_size > LONG
        for records in tail.chunks([tail.sample_lines(points)] if sparse else None):
            columns.add(records)
        # Scale a sampled rank's counts to the number of steps in its last line.
        scale = columns["step"][-1] / columns.length if sparse and columns.length else 1.0
        sampled += sparse
        if tail.damaged:
            count = "a line" if len(tail.damaged) == 1 else f"{len(tail.damaged)} lines"
            absent.append(f"{count} of {path.name} can't be read, the first is line {tail.damaged[0]}")
        if columns is first:
            run.cuts = choose_cuts(first.length, points)
        ends = [*(first["step"][cut] for cut in run.cuts[:-1]), math.inf]
        rank_cuts = [bisect_left(columns["step"], end) for end in ends]  # a killed or sampled rank has fewer steps
        run.ranks[rank] = summarize_rank(columns, scale, rank_cuts)
        if rank < rank_count and not len(first["job_tokens"]):
            rank_items = align_column(columns, first.unit, first["step"])
            run.items = [a + b for a, b in zip(run.items, rank_items, strict=True)] if run.items else list(rank_items)
    if sampled:
        lines = f"step files of more than {LONG >> 20} MiB some lines at {points} places were read"
        absent.append(f"of {sampled} ranks' {lines}: their sums are estimates, and short peaks may be missing")
    run.items = list(first["job_tokens"]) or run.items
    run.job_rate = [n / s if s > 0 else NAN for n, s in zip(run.items, first["step_seconds"], strict=False)]
    run.events = list(Tail(folder / run_folder.EVENTS).objects())
    run.alarms = list(Tail(folder / run_folder.ALARMS).objects())
    run.samples = list(Tail(folder / run_folder.SAMPLES).objects())
    newest = max((beat["time"] for beat in read_beats(folder).values()), default=NAN)
    run.watched = newest == newest or (folder / run_folder.ALARMS).is_file()
    meter = run_folder.METER.format(rank=0)
    has_events = (folder / run_folder.EVENTS).is_file()
    needed = {meter: any(meters.values()), run_folder.EVENTS: has_events, run_folder.ALARMS: run.watched}
    absent += [f"{name} is absent" for name, there in needed.items() if not there]
    run.meters = {rank: meter for rank, meter in meters.items() if meter}
    run.silent_seconds = max(time.time() - newest, 0.0) if run.watched else NAN
    run.starting = describe_start(folder, [newest, *(line.get("time") for line in (*run.events, *run.alarms))])
    return run


def summarize_rank(columns: Columns, scale: float, cuts: Sequence[int]) -> RankData:
    unit, per_second = steps.unit_fields(columns.unit)
    stats = {}
    for name in (*SUMS, unit):
        values = drop_nan(columns[name])
        stats[name] = Stats(round(len(values) * scale), math.fsum(values) * scale, max(values, default=NAN))
    curves = {name: thin_curve(columns[name], cuts) for name in CURVES if len(columns[name])}
    throttled = [reason for sample in columns.objects["gpu_throttle"].values() for reason in as_list(sample)]
    medians = (median(columns["step_seconds"]), median(columns[per_second]))
    return RankData(round(columns.length * scale), stats, *medians, curves, throttled)


def align_column(columns: Columns, name: str, by: Sequence[float]) -> Sequence[float]:
    """Return a rank's field at the first rank's steps: a killed rank may have fewer."""
    values = columns[name]
    rank_steps = columns["step"]
    at = dict(zip(rank_steps, values, strict=True)) if len(values) else {}
    return [at.get(step, NAN) for step in by]


def choose_cuts(length: int, points: int) -> list[int]:
    """Return where the stretches of a thinned curve begin; the last entry is the end."""
    count = min(length, points)
    return [length * i // count for i in range(count)] + [length] if count else [0]


def thin_curve(values: Sequence[float], cuts: Sequence[int]) -> Series:
    """Reduce a curve to few points that still show every spike: each stretch's mean, minimum and maximum."""
    stretches = [drop_nan(values[start:end]) for start, end in itertools.pairwise(cuts)]
    ways: tuple[Any, ...] = (fmean, min, max)
    middle, least, most = ([round_value(way(stretch)) if stretch else None for stretch in stretches] for way in ways)
    return middle, least, most


def round_value(value: float) -> float | None:
    """Round to five digits: more than a screen shows."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def finite_numbers(values: Iterable[Any]) -> list[float]:
    """Return the finite numbers among arbitrary values."""
    return drop_nan(map(as_number, values))
