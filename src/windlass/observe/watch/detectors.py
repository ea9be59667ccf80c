"""The watch's detectors: a list of rules over the last steps. Medians ignore noise.

A rule yields the message of an alarm and the rank it is about; None is the whole run.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from windlass.errors import RunError, make_pasteable
from windlass.observe import steps
from windlass.runfile import Watch

Records = Mapping[int, Mapping[str, Any]]  # a step's records by rank
LossCurve = Sequence[tuple[int, float]]  # step and value
Findings = Iterator[tuple[str, int | None]]

WINDOW: Final = 50  # steps to look back on
MIN_STEPS: Final = 20  # before losses, gradient norms and ranks' times are compared
RECENT: Final = 5  # steps whose median is the current value: one odd batch is no trend
RECENT_TIMES: Final = 10  # the same for times, which vary more
WARM_UP: Final = 5  # first steps, which are slow anyway
SIGMA: Final = 1.4826  # median absolute deviation -> standard deviation of a normal distribution
SAMPLES: Final = 64  # of memory, in a trace
MIN_GROWTH: Final = 0.05  # share of the memory that has to be gained within a trace
MIN_IMBALANCE: Final = 0.05  # share of the memory by which a rank has to exceed the others
MIN_DELAY: Final = 0.02  # seconds: shorter delays may come from the operating system
MIN_CHOICES: Final = 64  # per expert at an even share; with fewer, texts on one subject leave some experts unused
BALANCES: Final = 3  # expert balances in a row
NO_GRADIENT: Final = 5  # steps in a row: the first steps have proven that gradients reach the adapter
NO_CHANGE: Final = 10  # steps in a row with the same loss, the loss of guessing, or almost no gradient
FIRST: Final = 3  # steps whose median gradient norm is the reference: far too high a rate kills within a few
COLLAPSED: Final = 0.01  # share of it below which almost nothing is left; a run that converges lowers the loss too
NOT_FALLEN: Final = 0.9  # share of the first loss above which it has not fallen
GUESSING: Final = 0.01  # share of ln(vocabulary) within which a loss equals guessing
CLEARLY_BELOW: Final = 0.8  # share of ln(vocabulary) below which a loss is clearly better than guessing
FALLEN: Final = 0.25  # share of an answer's log-probability that it lost
LEAST_FALL: Final = 5.0  # nats of an answer: a smaller loss is no failure, however likely it was
UNIGRAM: Final = 0.03  # share of the unigram loss within which a loss equals it
LEAST_UNIGRAM: Final = 2.0  # labels with a lower one are so few that their frequencies may be all there is to learn
STUCK_STEPS: Final = 200  # a new model learns frequencies first
ROWS_SHOWN: Final = 64
# A power cap is how a busy GPU of these wattages normally runs; the others are faults of cooling or supply.
HARMLESS_THROTTLING: Final = ("software power cap", "sync boost")


@dataclass(frozen=True, slots=True)
class Alarm:
    kind: str
    step: int
    message: str
    rank: int | None = None  # None: the whole run
    level: str = "warn"  # the action it led to; `stop` makes the report's verdict bad
    time: float = field(default_factory=lambda: round(time.time(), 3))

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" rank {self.rank}"
        return f"{self.kind.replace('_', ' ')} at step {self.step}{rank}: {self.message}"


class AlarmError(RunError):
    """An alarm that ends the run. `logged`: it is in alarms.jsonl already."""

    def __init__(self, kind: str, problem: str, where: str, hint: str, *, logged: bool = False) -> None:
        super().__init__(problem, where, hint, "stopped-by-watch")
        self.kind = kind
        self.logged = logged


@dataclass
class Memory:
    """Memory of a rank's GPU, or else of its process: the last samples, and the whole run in constant space."""

    capacity_gib: float
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    whole_run: list[tuple[int, float]] = field(default_factory=list)  # every sample, then every second, every fourth …
    stride: int = 1
    seen: int = 0

    def add(self, step: int, gib: float) -> None:
        self.recent.append((step, gib))
        if self.seen % self.stride == 0:
            self.whole_run.append((step, gib))
        self.seen += 1
        if len(self.whole_run) > SAMPLES:
            self.whole_run = self.whole_run[::2]
            self.stride *= 2


@dataclass
class History:
    """The data that the rules read, in constant space however long the run is."""

    limits: Watch
    max_steps: int | None = None
    vocabulary: int | None = None  # of the model whose adapter is trained; None: a script's run, or unknown
    unigram_loss: float | None = None  # of the training set's labels: what their frequencies alone give
    pairs: bool = False  # rows are pairs, whose losses are of answers, not of tokens
    beta: float | None = None  # of DPO: rewards are what an answer's log-probability gained, times this
    joined: deque[Records] = field(default_factory=lambda: deque(maxlen=WINDOW + RECENT))
    memory: dict[int, Memory] = field(default_factory=dict)
    balances: deque[Records] = field(default_factory=lambda: deque(maxlen=BALANCES))
    least_loss: float = math.inf  # of a single step
    first_loss: float = math.inf
    first_norms: list[float] = field(default_factory=list)
    lowest_loss: tuple[float, float] | None = None  # the lowest median, with its deviation
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    kept: dict[str, float] = field(default_factory=dict)  # how much worse kept sets were in the last evaluation
    seen: int = 0

    def add(self, step: int, records: Records) -> None:
        """Add a step with the records of all ranks."""
        self.joined.append(records)
        self.seen += 1
        for rank, record in records.items():
            used = record.get("gpu_peak_gib", record.get("rss_gib"))
            if rank in self.memory and used is not None:
                self.memory[rank].add(step, used)
        if any("experts" in record for record in records.values()):
            self.balances.append(records)
        for loss in self.values("loss", 1):
            self.least_loss = min(self.least_loss, loss)
            self.first_loss = loss if self.first_loss == math.inf else self.first_loss
        if len(self.first_norms) < FIRST:
            self.first_norms += self.values("grad_norm", 1)
        before = self.values("loss", WINDOW + RECENT)[:-RECENT]
        if len(before) >= MIN_STEPS:
            now = median_and_deviation(before)
            self.lowest_loss = min(self.lowest_loss or now, now)
        seconds = slowest_step(records)
        if self.seen > WARM_UP and seconds:
            self.step_seconds.append(seconds)

    def values(self, name: str, last: int) -> list[Any]:
        """Return a field's last values from the first rank that has it: loss and gradient norm are the same on all."""
        values = []
        for records in list(self.joined)[-last:]:
            by_rank = [record[name] for record in records.values() if record.get(name) is not None]
            values += by_rank[:1]
        return values


def median_and_deviation(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the standard deviation estimated from the median absolute deviation."""
    middle = median(numbers)
    return middle, SIGMA * median(abs(number - middle) for number in numbers)


def slowest_step(records: Records) -> float:
    """Return the step time of the slowest rank, which all others wait for."""
    return max((record.get("step_seconds") or 0.0 for record in records.values()), default=0.0)


def find_worst_rank(by_rank: Mapping[int, float]) -> tuple[int, float, float]:
    """Return the rank with the largest value, that value, and the median of the others."""
    worst = max(by_rank, key=lambda rank: by_rank[rank])
    return worst, by_rank[worst], median(value for rank, value in by_rank.items() if rank != worst)


def describe_rows(records: Records) -> str:
    """Return the step's rows of the data set, rank by rank."""
    listed = []
    for rank, record in sorted(records.items()):
        rows = record.get("rows") or []
        more = f" and {len(rows) - ROWS_SHOWN} more" if len(rows) > ROWS_SHOWN else ""
        listed.append(f"rank {rank}, rows {', '.join(map(str, rows[:ROWS_SHOWN])) or 'unknown'}{more}")
    return "; ".join(listed)


# --- the rules ---


def loss_divergence(history: History) -> Findings:
    yield from risen_loss(history)
    yield from unigram_level(history)


def risen_loss(history: History) -> Findings:
    """Find a loss that rose; that of pairs above the first one: few pairs in the wrong order make up most of it."""
    recent = MIN_STEPS if history.pairs else RECENT
    now = history.values("loss", recent)
    if history.lowest_loss is None or len(now) < recent:
        return
    middle, deviation = history.lowest_loss
    limit = middle + max(history.limits.deviations * deviation, 0.1 * abs(middle))
    if history.pairs:
        limit = max(limit, 1.1 * history.first_loss)
    if median(now) > limit:
        was = f"it was {middle:.4g} with a deviation of {deviation:.2g}, the limit is {limit:.4g}"
        yield f"median of the last {recent} steps {median(now):.4g}; {was}", None


def falling_likelihood(history: History) -> Findings:
    """Find that both answers of the pairs become unlikely, and lose more together than the chosen one gains."""
    if not history.beta:
        return
    found = [pairs for pairs in history.values("preference", WINDOW) if None not in pairs.values()]
    if len(found) < WINDOW:
        return
    gained = {}
    began = {}
    for answer in ("chosen", "rejected"):
        gained[answer] = median(pairs[f"rewards/{answer}"] / history.beta for pairs in found)
        before = median(pairs[f"logps/{answer}"] - pairs[f"rewards/{answer}"] / history.beta for pairs in found)
        began[answer] = before
        if gained[answer] > -max(LEAST_FALL, FALLEN * abs(before)):
            return
    if -gained["chosen"] > gained["chosen"] - gained["rejected"]:
        falls = [f"of the {each} from {began[each]:.4g} to {began[each] + gained[each]:.4g}" for each in began]
        yield f"in {WINDOW} steps the answers' log-probability fell since step 1, {' and '.join(falls)}", None


def unigram_level(history: History) -> Findings:
    """Find a loss that rose to the level of the labels' frequencies, or stays there: all else is forgotten."""
    level = history.unigram_loss
    losses = history.values("loss", WINDOW)
    if level is None or level < LEAST_UNIGRAM or len(losses) < WINDOW:
        return
    if abs(median(losses) - level) > UNIGRAM * level:
        return
    falls = median(losses[WINDOW // 2 :]) < 0.99 * median(losses[: WINDOW // 2])
    if not falls and (history.least_loss < CLEARLY_BELOW * level or history.seen >= STUCK_STEPS):
        what = f"median of the last {WINDOW} steps {median(losses):.4g}: the frequencies of the tokens alone"
        yield f"{what} give {level:.4g}", None


def gradient_spike(history: History) -> Findings:
    *before, now = history.values("grad_norm", WINDOW + 1) or [0.0]
    if len(before) < MIN_STEPS or now not in history.values("grad_norm", 1):
        return
    middle, deviation = median_and_deviation(before)
    limit = max(history.limits.gradient_factor * middle, middle + history.limits.deviations * deviation)
    if history.pairs:  # most have hardly any gradient left, and one in the wrong order twice as much as at first
        limit = max(limit, 2 * history.limits.gradient_factor * median(history.first_norms))
    if now > limit:
        rows = describe_rows(history.joined[-1])
        yield f"norm {now:.4g}, the median before was {middle:.4g}, the limit is {limit:.4g}; {rows}", None


def non_finite(history: History) -> Findings:
    records = history.joined[-1]
    names = sorted({name for record in records.values() for name in record.get("non_finite") or ()})
    skipped = any(record.get("skipped") for record in records.values())
    if names or skipped:
        values = ", ".join(names) or "gradient"
        if skipped:
            values += ", update skipped"
        yield f"{values}; {describe_rows(records)}", None


def dead_adapter(history: History) -> Findings:
    """Find an adapter that no longer affects the loss, or that nothing changes any more."""
    for record in history.joined[-1].values():
        text = record.get("unchanged")
        if text:
            cure = "they are rounded away: set lora.dtype: float32, or a higher train.learning_rate"
            yield f"the last 50 updates changed nothing in {text}; {cure}", None
    if history.vocabulary is None:
        return
    norms = history.values("grad_norm", NO_CHANGE)
    losses = history.values("loss", NO_CHANGE)
    rates = history.values("learning_rate", NO_CHANGE)
    guessing = math.log(history.vocabulary)
    last = history.values("grad_norm", NO_GRADIENT)
    if len(last) == NO_GRADIENT and not any(last):
        yield f"the gradient is exactly zero in {NO_GRADIENT} steps in a row, so nothing it does reaches the loss", None
    elif len(losses) < NO_CHANGE:
        return
    elif (
        history.least_loss < CLEARLY_BELOW * guessing
        and not history.pairs
        and all(abs(x - guessing) <= GUESSING * guessing for x in losses)
    ):
        message = f"the loss of the last {NO_CHANGE} steps is {guessing:.4g}, ln(vocabulary): the model guesses;"
        yield f"{message} its lowest was {history.least_loss:.4g}", None
    elif max(norms, default=math.inf) < COLLAPSED * median(history.first_norms or [0]) and (
        median(losses) > NOT_FALLEN * history.first_loss
    ):
        message = f"the gradient norm of the last {NO_CHANGE} steps is {median(norms):.2g}"
        yield f"{message}, {median(history.first_norms):.2g} in the first, and the loss has not fallen", None
    elif min(rates, default=0) > 0 and not history.pairs and len({f"{loss:.6g}" for loss in losses}) == 1:
        yield f"the loss is {losses[0]:.6g} in {NO_CHANGE} steps in a row, though the learning rate is not 0", None


def straggler(history: History) -> Findings:
    """Find the first phase in which one rank takes longer; the others are late in later phases because of it."""
    recent = list(history.joined)[-MIN_STEPS:]
    ranks = sorted(recent[-1])
    if len(recent) < MIN_STEPS or len(ranks) < 2:
        return
    step_seconds = median(map(slowest_step, recent))

    def own_seconds(record: Mapping[str, Any], phase: str) -> float:
        waiting = record.get("wait_seconds") or 0.0 if phase == "forward" else 0.0  # for other ranks
        return (record.get(f"{phase}_seconds") or 0.0) - waiting

    for phase in ("data", "forward", "backward", "optimizer", "other"):
        by_rank = {rank: median(own_seconds(records[rank], phase) for records in recent) for rank in ranks}
        worst, seconds, others = find_worst_rank(by_rank)
        if seconds - others > max(history.limits.straggler_share * step_seconds, MIN_DELAY):
            times = f"{seconds:.3g} s, the others {others:.3g} s of a step of {step_seconds:.3g} s"
            yield f"slow in {phase}: {times}", worst
            return


def memory_growth(history: History) -> Findings:
    for rank, memory in history.memory.items():
        limit = history.limits.memory_fraction * memory.capacity_gib
        for points in (list(memory.recent), memory.whole_run):
            slope = fit_growth(points, MIN_GROWTH * memory.capacity_gib)
            if slope is None:
                continue
            step, used = points[-1]
            full_at = step + (limit - used) / slope
            if history.max_steps is None or full_at < history.max_steps:
                message = f"{used:.2f} GiB and {slope * 1024:.3g} MiB more per step: {limit:.1f} of"
                message += f" {memory.capacity_gib:.1f} GiB would be used at step {max(full_at, step):.0f}"
                yield message, rank
                break


def fit_growth(points: LossCurve, at_least: float) -> float | None:
    """Return GiB per step if memory grew by `at_least` and no slower at the end: caches level off, leaks don't."""
    if len(points) < SAMPLES // 2:
        return None
    size = len(points) // 4
    quarters = [points[i * size : (i + 1) * size] for i in range(4)]
    middles = [(median(step for step, _ in part), median(value for _, value in part)) for part in quarters]
    gains = [after[1] - before[1] for before, after in pairwise(middles)]
    gained = middles[3][1] - middles[0][1]
    if gained < at_least or min(gains) < 0.5 * gained / 3 or gains[-1] < 0.8 * gained / 3:
        return None
    return gained / (middles[3][0] - middles[0][0])


def memory_imbalance(history: History) -> Findings:
    used = {r: median(v for _, v in memory.recent) for r, memory in history.memory.items() if len(memory.recent) >= 5}
    if len(used) < 2 or len(used) < len(history.memory):
        return
    worst, gib, others = find_worst_rank(used)
    enough = gib - others > MIN_IMBALANCE * history.memory[worst].capacity_gib
    if gib > history.limits.memory_ratio * others and enough:
        yield f"{gib:.2f} GiB, the others {others:.2f} GiB", worst


def throughput(history: History) -> Findings:
    recent = [seconds for seconds in map(slowest_step, list(history.joined)[-RECENT_TIMES:]) if seconds]
    if len(history.step_seconds) < WINDOW or len(recent) < RECENT_TIMES:
        return
    usual = median(history.step_seconds)
    now = median(recent)
    if now * history.limits.throughput_fraction > usual:
        records = history.joined[-1].values()
        phases = {p: sum(r.get(f"{p}_seconds") or 0.0 for r in records) for p in steps.PHASES}
        message = f"median step {now:.3g} s over the last {RECENT_TIMES}, {usual:.3g} s before: {usual / now:.0%} of"
        yield f"{message} the speed; most of it goes into {max(phases, key=lambda p: phases[p])}", None


def throttling(history: History) -> Findings:
    recent = list(history.joined)[-MIN_STEPS:]
    for rank in recent[-1]:
        samples = [r[rank]["gpu_throttle"] for r in recent if r[rank].get("gpu_throttle") is not None]
        faults = [set(sample) - set(HARMLESS_THROTTLING) for sample in samples]
        faults = [reasons for reasons in faults if reasons]
        if len(samples) >= 5 and len(faults) * 2 >= len(samples):
            yield f"{', '.join(sorted(set().union(*faults)))} in {len(faults)} of {len(samples)} samples", rank


def dead_experts(history: History) -> Findings:
    if len(history.balances) < BALANCES or history.balances[-1] is not history.joined[-1]:
        return
    unused: list[int] = []  # per layer, the fewest unused experts in any balance of any rank
    for records in history.balances:
        for record in records.values():
            balance = record.get("experts")
            if not balance or (record.get("tokens") or 0) < MIN_CHOICES * balance["experts"]:
                return
            unused = [min(pair) for pair in zip(unused or balance["unused"], balance["unused"], strict=True)]
    layers = [str(layer) for layer, number in enumerate(unused) if number]
    if layers:
        message = f"layers {', '.join(layers)}: up to {max(unused)} experts unused by any rank in {BALANCES} samples"
        yield message, None


def eval_loss(history: History) -> Findings:
    patience = history.limits.eval_patience
    if len(history.evaluations) <= patience:
        return
    best_step, best = min(history.evaluations[:-patience], key=lambda evaluation: evaluation[1])
    last = [loss for _, loss in history.evaluations[-patience:]]
    if min(last) > best and all(a <= b for a, b in pairwise(last)):
        message = f"{patience} evaluations in a row without a fall: {', '.join(f'{loss:.4g}' for loss in last)}"
        yield f"{message}; the best was {best:.4g} at step {best_step}", None


def kept_worse(history: History) -> Findings:
    bound = history.limits.keep_tolerance
    worse = {name: value for name, value in history.kept.items() if bound is not None and value > bound}
    if worse:
        listed = ", ".join(f"{name} by {value:.4f}" for name, value in worse.items())
        yield f"got worse than watch.keep_tolerance {bound:g} allows: {listed}", None


# --- the list ---

LOOK: Final = "look at these rows: `windlass data RUN --prepared-row 0` shows row 0"
HINTS: Final = {  # each kind but `disk` and `failed` is a key of the run file's `watch` section
    "loss_divergence": "lower train.learning_rate, and continue from an earlier checkpoint",
    "falling_likelihood": "set dpo.sft_weight: 0.1, a larger dpo.beta or a lower train.learning_rate",
    "gradient_spike": f"{LOOK}; lower train.learning_rate if it repeats",
    "non_finite": f"{LOOK}; lower train.learning_rate",
    "dead_adapter": "change train.learning_rate, and start again in a new train.output_dir: "
    "what was saved since is of no use",
    "straggler": "look for other processes or slow storage on this rank's node: `windlass check RUN --here`",
    "memory_growth": "something keeps tensors from step to step; save before memory ends",
    "memory_imbalance": "look for other processes on this GPU and for uneven sequences",
    "throughput": "the report shows which phase grew, and on which rank",
    "throttling": "check this node's cooling and power supply",
    "dead_experts": "lower train.learning_rate; adapters on these experts are not trained",
    "eval_loss": "the adapter overfits: take the best checkpoint: `windlass best RUN_DIR`",
    "kept_worse": "take a checkpoint from before: `windlass best RUN_DIR --keep 0.02`; "
    "or lower train.learning_rate or lora.r",
    "sockets": "see `windlass check RUN --in-pod`, NCCL_IB_HCA and the pod's RDMA resource",
    "stall": "the stacks of all ranks are in the run folder",
    "disk": "make room on this storage; `windlass best RUN_DIR` and --resume need the checkpoints",
    "failed": "",
}
EVERY_TIME: Final = ("gradient_spike", "non_finite", "stall", "disk", "failed")  # others are logged once in a while
# Rules by what they read. A rule's name is the kind of its alarms; other kinds are raised elsewhere.
STEP_RULES: Final = (
    *(loss_divergence, falling_likelihood, gradient_spike, non_finite, dead_adapter, straggler),
    *(memory_growth, memory_imbalance, throughput, throttling, dead_experts),
)
EVALUATION_RULES: Final = (eval_loss, kept_worse)


def make_hint(kind: str, folder: Path) -> str:
    """Return a hint for an alarm, with commands that name this run."""
    run = folder / "run.yaml"  # `windlass submit` puts it there
    return make_pasteable(HINTS.get(kind, ""), RUN_DIR=str(folder), **({"RUN": str(run)} if run.exists() else {}))
