"""When a run saves and stops: in the background as long as it trains, and waited for when it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.errors import RunError
from windlass.observe import steps
from windlass.train import checkpoint, group

if TYPE_CHECKING:
    from windlass.train.loop import Loop


class Saving:
    """The loop's checkpoints. Every method is a collective unless it says otherwise; rank 0 writes."""

    def __init__(
        self,
        folder: Path,
        limit: int | None,
        facts: dict[str, Any],
        say: Callable[[str], None],
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.facts = facts  # for the manifest of every checkpoint
        self.writer = checkpoint.Writer(folder, limit, say, self._ended)
        self.saved = saved  # called on rank 0 after every checkpoint, from the thread that wrote it
        self.proven = False  # one file has been read back and held against the ranks' tensors

    def save(self, loop: Loop, state: dict[str, Any], *, wait: bool) -> None:
        """Copy what is to be saved; training waits for the rest only when asked to, and the first time."""
        self._require_equal_replicas(loop)
        step, began = loop.step, time.monotonic()
        made = checkpoint.contents(
            step,
            model=loop.model,
            optimizer=loop.optimizer,
            scheduler=loop.scheduler,
            trainer_state=json.dumps(state, indent=2, sort_keys=True),
            manifest={
                **self.facts,
                "epoch": loop.epoch,
                "eval_loss": loop.eval_loss,
                "evaluation_due": loop.evaluation_due,
            },
        )
        if made is not None:
            self.writer.begin(made, time.monotonic() - began)
        if wait or not self.proven:
            failure = self.finish()
            if failure and wait:
                raise RunError(
                    f"step {step} could not be saved: {failure}",
                    str(self.checkpoints),
                    f"{self._kept()}; make room, then run again with --resume",
                )
            if not failure:
                checkpoint.read_back(loop.model, self.checkpoints / f"step-{step}")
                self.proven = True

    def finish(self) -> str:
        """Wait for what is being written; why it failed, on every rank, or nothing."""
        failure: str = group.from_rank_0(self.writer.finish() if group.rank() == 0 else "")
        return failure

    def close(self) -> None:
        """The run ends, perhaps by a failure: a checkpoint that is nearly there is not thrown away. No collective."""
        self.writer.finish()

    def _ended(self, step: int, seconds: float, size: int, problem: str) -> None:
        """What became of it, written down when it is known; a resubmitted job gets the time that saving took."""
        outcome: dict[str, Any] = {"ok": False, "error": problem} if problem else {"ok": True}
        steps.event(self.folder, "save", step, seconds=round(seconds, 3), bytes=size, **outcome)
        self.saved()

    def best(self) -> Path | None:
        """The best whole checkpoint, the same on every rank."""
        self.finish()
        found = checkpoint.best(self.checkpoints) if group.rank() == 0 else None
        if found is not None and (fault := checkpoint.damage(found)):
            raise RunError(
                f"the best checkpoint can't be used: {fault}",
                str(found),
                "the last one is whole: `windlass best` ranks those that are left",
            )
        path: Path | None = group.from_rank_0(found)
        return path

    def _kept(self) -> str:
        kept = checkpoint.saved(self.checkpoints)
        return f"the checkpoint before is {kept[-1].name}" if kept else "there is no checkpoint before"

    def _require_equal_replicas(self, loop: Loop) -> None:
        if differing := loop.replicas.differing():
            raise RunError(
                f"{len(differing)} adapter tensors differ between ranks, the first is {differing[0]}",
                str(self.folder),
                "nothing was saved; a rank with faulty memory or other library versions does this",
            )
