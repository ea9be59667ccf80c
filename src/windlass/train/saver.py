"""When a run saves: in the background as long as it trains, and waited for when it ends."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from windlass.errors import RunError
from windlass.files import commit_dir
from windlass.run_folder import CHECKPOINTS, log_event
from windlass.train import checkpoint, group

if TYPE_CHECKING:
    from windlass.train.checkpoint import Snapshot
    from windlass.train.loop import Loop

PATIENCE_SECONDS: Final = 5.0  # training waits so long for the checkpoint before, and then says why it waits


class Saver:
    """One checkpoint at a time, written by a thread on rank 0. A failure is reported, and harms neither training nor
    older checkpoints. `save`, `finish` and `best` are collectives."""

    def __init__(
        self,
        folder: Path,
        limit: int | None,
        facts: dict[str, Any],
        say: Callable[[str], None],
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.checkpoints, self.limit = folder, folder / CHECKPOINTS, limit
        self.facts = facts  # for the manifest of every checkpoint
        self.say = say
        self.saved = saved  # called after every checkpoint, from the thread that wrote it
        self.proven = False  # one file has been read back and compared with the ranks' tensors
        self.thread: threading.Thread | None = None
        self.failure = ""  # of the latest checkpoint
        self.unexpected: BaseException | None = None

    def save(self, loop: Loop, state: dict[str, Any], *, wait: bool) -> None:
        """Copy what is to be saved; training waits for the rest only if asked to, and the first time."""
        if differing := loop.replicas.differing():
            raise RunError(
                f"{len(differing)} adapter tensors differ between ranks, the first is {differing[0]}",
                str(self.folder),
                "nothing was saved; a rank with faulty memory or other library versions does this",
            )
        began = time.monotonic()
        manifest = {"epoch": loop.epoch, "eval_loss": loop.eval_loss, "evaluation_due": loop.evaluation_due}
        taken = checkpoint.snapshot(
            loop.step,
            model=loop.model,
            optimizer=loop.optimizer,
            scheduler=loop.scheduler,
            state=state,
            manifest={**self.facts, **manifest},
        )
        if taken is not None:
            self.begin(taken, time.monotonic() - began)
        if wait or not self.proven:
            failure = self.finish()
            if failure and wait:
                kept = checkpoint.saved(self.checkpoints)
                before = f"the checkpoint before is {kept[-1].name}" if kept else "there is no checkpoint before"
                raise RunError(
                    f"step {loop.step} could not be saved: {failure}",
                    str(self.checkpoints),
                    f"{before}; make room, then run again with --resume",
                )
            if not failure:
                checkpoint.read_back(loop.model, self.checkpoints / f"step-{loop.step}")
                self.proven = True

    def finish(self) -> str:
        """Wait for what is being written; why it failed, on every rank, or nothing."""
        failure: str = group.from_rank_0(self.close() if group.rank() == 0 else "")
        return failure

    def best(self) -> Path | None:
        """The best checkpoint, the same on every rank."""
        self.finish()
        found = checkpoint.best_of(checkpoint.saved(self.checkpoints)) if group.rank() == 0 else None
        fault = checkpoint.damage(found) if found is not None else ""
        answer: tuple[Path | None, str] = group.from_rank_0((found, fault))
        found, fault = answer
        if fault:
            raise RunError(
                f"the best checkpoint can't be used: {fault}",
                str(found),
                "the last one is intact: `windlass best` ranks those that are left",
            )
        return found

    def begin(self, taken: Snapshot, copying_seconds: float = 0.0) -> None:
        """Start writing, once the one before is written."""
        self.close()
        name = f"checkpoint of step {taken.step}"
        # Not a daemon: the interpreter would tear down its modules under it.
        self.thread = threading.Thread(target=self._write, args=(taken, copying_seconds), name=name)
        self.thread.start()

    def close(self) -> str:
        """Wait until it is written, also when a failure ends the run; returns why it failed. No collective."""
        began = time.monotonic()
        while self.thread is not None:
            self.thread.join(PATIENCE_SECONDS)
            if self.thread.is_alive():
                waited = time.monotonic() - began
                self.say(f"waiting for the {self.thread.name}: the storage has been writing for {waited:.0f} s")
            else:
                self.thread = None
        if self.unexpected is not None:
            raise self.unexpected
        return self.failure

    def _write(self, taken: Snapshot, copying_seconds: float) -> None:
        folder = self.checkpoints / f"step-{taken.step}"
        partial = folder.with_name(f".{folder.name}.partial")
        self.failure, began, size = "", time.monotonic(), 0
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            taken.write(partial)
            size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
            commit_dir(partial, folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            self.failure = error.strerror or str(error)
        except BaseException as error:  # a fault of ours: raised where it can stop the run
            self.unexpected = error
            return
        seconds = time.monotonic() - began
        if self.failure:
            self.say(f"step {taken.step:>5}  NOT saved: {self.failure} ({folder}); older checkpoints are unharmed")
            outcome: dict[str, Any] = {"ok": False, "error": self.failure}
        else:
            slow = f", in {seconds:.0f} s" if seconds > PATIENCE_SECONDS else ""
            self.say(f"step {taken.step:>5}  saved checkpoints/{folder.name}{slow}")
            outcome = {"ok": True}
        # On a full disk even these may fail: that costs a line, room or a pointer, and the checkpoint is there.
        with self._reported("how it was saved is not in the run folder's events"):
            # A resubmitted job gets the time that saving took.
            taken_seconds = round(copying_seconds + seconds, 3)
            log_event(self.folder, "save", taken.step, seconds=taken_seconds, bytes=size, **outcome)
            self.saved()
        if not self.failure:
            with self._reported("older checkpoints, or the pointer to the best, stay as they were"):
                checkpoint.point_to_best(self.folder)
                checkpoint.prune(self.checkpoints, self.limit)

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.say(f"{what}: {error}")
