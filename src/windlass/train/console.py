"""What a run prints: its header, a live line or plain lines. Libraries' own output is silenced."""

import logging
import math
import os
import resource
import sys
import textwrap
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Final

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from windlass.errors import SlowerWarning
from windlass.model.targets import Adapter
from windlass.observe.counters import describe_machine
from windlass.observe.format import describe_gain, describe_kept, describe_served, format_plural
from windlass.observe.steps import format_clock
from windlass.plan import Plan
from windlass.ranks.rank import Rank
from windlass.run_folder import LIBRARIES, read_versions
from windlass.train.step import Step
from windlass.variables import find_unread
from windlass.versions import TESTED, find_newer

LABEL: Final = 10  # width of the header's labels
LOG_WIDTH: Final = 80  # of a log's lines, if it is no terminal
WINDOW: Final = 20  # steps over which speed and time left are averaged


def make_console(here: Rank) -> Console:
    """Return the run's console on stderr, which prints on rank 0 only.

    Libraries' progress bars and warnings are switched off: windlass checks and reports what matters in them.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Importing it takes a second.
    os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "DATASETS_VERBOSITY": "error"}
    for name in ("accelerate", "peft", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    width = None if sys.stderr.isatty() else 240  # a log has no width to break lines at
    console = Console(stderr=True, width=width, highlight=False, emoji=False, markup=False, quiet=here.rank != 0)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore")
        warnings.simplefilter("always", SlowerWarning)
        warnings.showwarning = lambda text, *_, **__: console.print(f"warning: {text}", style="yellow")
    return console


def print_header(console: Console, plan: Plan, environ: Mapping[str, str]) -> None:
    """Print model, adapter, layout, batch, machine, versions and folder."""
    layout = plan.layout
    adapter = plan.adapter
    batch = plan.batch
    train = plan.run.train
    total = sum(math.prod(parameter.shape) for parameter in plan.base.parameters)
    share = f"{adapter.trainable:,} parameters ({adapter.trainable / total:.3%})"
    ranks = format_plural(layout.ranks, "rank")
    placed = f"{layout.name} on {ranks}: {layout.reason}"
    if train.compile:
        placed += "; layers compiled"
    unit = train.unit
    tokens = f"{batch.length} tokens{' an answer' if batch.sides > 1 else ''}"
    sequences = f"{format_plural(plan.schedule.global_sequences, unit)} of up to {tokens}"
    if train.per_device_train_batch_size == "auto":
        sequences += "; the fastest micro-batch that fits"
    rows = {
        "model": f"{plan.base.name}: {plan.base.family.causal_lm}, {total:,} parameters",
        "adapter": f"r={adapter.r}, {share}: {', '.join(describe_targets(adapter))}",
        "layout": placed,
        "batch": f"{batch.micro} x {ranks} x {batch.accumulation} accumulated = {sequences}",
        "chosen": "; ".join(plan.chosen),
        "machine": describe_hardware(),
        "versions": ", ".join(f"{name} {version}" for name, version in read_versions(LIBRARIES).items()),
        "folder": train.output_dir,
    }
    width = console.width if console.is_terminal else LOG_WIDTH
    for name, value in rows.items():
        lines = textwrap.wrap(value, width - LABEL, break_long_words=False, break_on_hyphens=False)
        for number, line in enumerate(lines):  # none for what is empty
            label = name if number == 0 else ""
            console.print(Text(f"{label:{LABEL}}", style="bold") + Text(line))
    for warning in adapter.warnings:
        console.print(Text(f"warning: lora.target_modules {warning}", style="yellow"))
    for note in find_newer(read_versions(TESTED)):
        console.print(Text(f"note: {note}", style="yellow"))
    for name, problem in find_unread(environ).items():
        console.print(Text(f"warning: {name} in the environment: {problem}", style="yellow"))


def describe_targets(adapter: Adapter) -> list[str]:
    """Return which modules have adapters, and how many: `k_proj and v_proj in text x 4`."""
    texts = []
    # Keys and values of latent attention share a module: `k_proj and v_proj`.
    for (_, part), group in groupby(adapter.targets, lambda target: (target.names, target.part)):
        targets = list(group)
        modules = sum(len(target.modules) for target in targets)
        texts.append(f"{' and '.join(target.pattern for target in targets)} in {part} x {modules}")
    return texts


def describe_hardware() -> str:
    machine = describe_machine()
    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        per_rank = "1 thread per rank" if threads == 1 else f"{threads} threads per rank"
        return f"{machine['processor']}, {machine['memory_gib']} GiB, {per_rank}, gloo"
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in machine["gpus"])
    network = ", ".join(machine["infiniband"]) or "no InfiniBand"
    return f"{gpus}, driver {machine['driver']}, CUDA {machine['cuda']}, {network}"


class Progress:
    """Shows progress on rank 0; on every rank it records the current phase, for the message if the rank is killed."""

    def __init__(self, here: Rank, console: Console, logging_steps: int, sampled_gib: Callable[[], float]) -> None:
        self.here = here
        self.console = console
        self.logging_steps = logging_steps
        self.sampled_gib = sampled_gib  # the recorder's peak, because its samples reset torch's own counter
        self.live: Live | None = None
        self.window: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # seconds and tokens of recent steps
        self.total = 0
        self.began = 0.0

    def start(self, total: int) -> None:
        self.total = total
        if self.here.rank == 0 and self.console.is_terminal:
            self.live = Live(Text("first step …"), console=self.console, refresh_per_second=4, transient=True)
            self.live.start()

    def start_step(self, step: int) -> None:
        self.here.phase(f"training step {step}")
        self.began = time.monotonic()

    def end_step(self, step: Step) -> None:
        if self.here.rank:
            return
        self.window.append((time.monotonic() - self.began, step.job_tokens))
        seconds, tokens = map(sum, zip(*self.window, strict=True))
        left = format_clock((self.total - step.step) * seconds / len(self.window))
        line = Text(f"step {step.step:>5}/{self.total}  loss {step.loss:.4f}  norm {step.grad_norm:.3f}")
        rewards = step.figures.get("preference")
        if rewards:
            line += Text(f"  margin {rewards['rewards/margins']:.3f}  accuracy {rewards['rewards/accuracies']:.0%}")
        line += Text(f"  lr {step.learning_rate:.2e}  {tokens / seconds:,.0f} tokens/s")
        for more in (f"  {left} left", f"  {self.peak_gib():.1f} GiB"):
            if not self.console.is_terminal or len(line) + len(more) < self.console.width:
                line += Text(more)
        if self.live is not None:
            self.live.update(line)
        if step.skipped:
            self.console.print(Text(f"step {step.step}: non-finite, skipped", style="yellow"))
        if step.step == 1 or step.step % self.logging_steps == 0 or step.step == self.total:
            self.console.print(line)

    def start_evaluation(self, step: int) -> None:
        self.here.phase(f"evaluating after step {step}")

    def end_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.here.rank:
            return
        gain = describe_gain(metrics.get("eval_gain"))
        line = f"step {step:>5}  evaluation loss {metrics['eval_loss']:.4f}{f', {gain}' if gain else ''}"
        accuracy = metrics.get("eval_rewards/accuracies")
        if accuracy is not None:
            line += f"  margin {metrics['eval_rewards/margins']:.3f}  accuracy {accuracy:.0%}"
        kept = describe_kept(metrics)
        self.console.print(f"{line}  {kept}" if kept else line)

    def end_share(self, share: float, error: float) -> None:
        said = describe_served(share, error)
        if said:
            self.console.print(f"note: {said}", style="yellow")

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def peak_gib(self) -> float:
        """Return this rank's peak memory: of the GPU, or resident in the host without one."""
        if torch.cuda.is_available():
            return max(torch.cuda.max_memory_allocated() / 2**30, self.sampled_gib())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
