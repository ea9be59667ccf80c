"""What is seen while it trains: one live line, or plain lines where nobody watches."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text
from transformers import TrainerCallback

from windlass.observe.steps import clock
from windlass.train.rank import Place

if TYPE_CHECKING:
    from windlass.train.loop import Loop, Step

WINDOW = 20  # steps that the speed and the time left are averaged over


class Progress(TrainerCallback):  # type: ignore[misc]
    """Told by the Trainer what happens; rank 0 shows it, every rank notes what it is doing."""

    def __init__(self, here: Place, console: Console) -> None:
        self.here = here
        self.console = console
        self.loop: Loop | None = None
        self.live: Live | None = None
        self.seconds: deque[float] = deque(maxlen=WINDOW)
        self.tokens: deque[int] = deque(maxlen=WINDOW)
        self.began = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.here.rank == 0 and self.console.is_terminal:
            self.live = Live(Text("first step …"), console=self.console, refresh_per_second=4, transient=True)
            self.live.start()

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.here.phase(f"training step {state.global_step + 1}")
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        assert self.loop is not None
        assert self.loop.latest is not None
        if self.here.rank:
            return
        step, seconds = self.loop.latest, time.monotonic() - self.began
        self.seconds.append(seconds)
        self.tokens.append(step.job_tokens)
        line = self._line(step, state)
        if self.live is not None:
            self.live.update(line)
        if step.skipped:
            self.console.print(Text(f"step {step.step}: non-finite, left out", style="yellow"))
        if step.step == 1 or step.step % max(1, int(args.logging_steps)) == 0 or step.step == state.max_steps:
            self.console.print(line)

    def on_prediction_step(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.here.phase(f"evaluating after step {state.global_step}")

    def on_evaluate(self, _args: Any, state: Any, _control: Any, metrics: dict[str, float], **_: Any) -> None:
        if self.here.rank == 0:
            self.console.print(f"step {state.global_step:>5}  evaluation loss {metrics.get('eval_loss', math.nan):.4f}")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.close()

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _line(self, step: Step, state: Any) -> Text:
        left = (state.max_steps - step.step) * sum(self.seconds) / len(self.seconds)
        speed = sum(self.tokens) / sum(self.seconds)
        return Text(
            f"step {step.step:>5}/{state.max_steps}  loss {step.loss:.4f}  grad norm {step.grad_norm:.3f}"
            f"  lr {step.learning_rate:.2e}  {speed:,.0f} tokens/s  {self._most_gib():.1f} GiB  {clock(left)} left"
        )

    def _most_gib(self) -> float:
        """Most that this rank held: of the GPU, or resident in the host where there is none."""
        if torch.cuda.is_available():
            sampler = getattr(self.loop.meter, "sampler", None) if self.loop else None
            since = torch.cuda.max_memory_allocated() / 2**30  # the sampler begins anew with every sample
            return max(since, sampler.most_gib if sampler else 0.0)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
