"""Writes checkpoints while training goes on. A failure is said and harms neither training nor older checkpoints."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from windlass.train.checkpoint.contents import Contents
from windlass.train.checkpoint.disk import appear
from windlass.train.checkpoint.keep import point, prune

# step, seconds it took, bytes written, why it failed (empty: it did not)
Ended = Callable[[int, float, int, str], None]
PATIENCE_SECONDS = 5.0  # training waits so long for the checkpoint before, and then says why it waits


class Writer:
    """One checkpoint at a time, in a thread of its own."""

    def __init__(
        self, run_folder: Path, limit: int | None, say: Callable[[str], None], ended: Ended = lambda *_: None
    ) -> None:
        self.run_folder = run_folder
        self.checkpoints = run_folder / "checkpoints"
        self.limit = limit
        self.say = say
        self.ended = ended  # called from the thread that wrote
        self.thread: threading.Thread | None = None
        self.failure: str = ""  # of the latest checkpoint; empty when it is whole
        self.unexpected: BaseException | None = None

    def begin(self, contents: Contents, copying_seconds: float = 0.0) -> None:
        """Start writing; waits for the one before."""
        self.finish()
        name = f"checkpoint of step {contents.step}"
        # Not a daemon: the interpreter would tear down its modules under it.
        self.thread = threading.Thread(target=self._write, args=(contents, copying_seconds), name=name)
        self.thread.start()

    def finish(self) -> str:
        """Wait until it is written; returns why it failed, or nothing."""
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

    def _write(self, contents: Contents, copying_seconds: float) -> None:
        folder = self.checkpoints / f"step-{contents.step}"
        partial = folder.with_name(f".{folder.name}.partial")
        self.failure, began, size = "", time.monotonic(), 0
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            contents.write(partial)
            size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
            appear(partial, folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            self.failure = error.strerror or str(error)
            self.say(f"step {contents.step:>5}  NOT saved: {self.failure} ({folder}); older checkpoints are unharmed")
            self._tell(contents.step, copying_seconds + time.monotonic() - began, size)
            return
        except BaseException as error:  # a fault of ours: told where it can stop the run
            self.unexpected = error
            return
        seconds = time.monotonic() - began
        slow = f", in {seconds:.0f} s" if seconds > PATIENCE_SECONDS else ""
        self.say(f"step {contents.step:>5}  saved checkpoints/{folder.name}{slow}")
        self._tell(contents.step, copying_seconds + seconds, size)
        self._tidy()

    def _tell(self, step: int, seconds: float, size: int) -> None:
        """On a disk that is full even that may fail; it must not harm the training."""
        try:
            self.ended(step, seconds, size, self.failure)
        except OSError as error:
            self.say(f"step {step:>5}  how it was saved is not in the run folder's events: {error}")

    def _tidy(self) -> None:
        """What follows from a new checkpoint. It failing costs room, or a pointer: the checkpoint is there."""
        try:
            point(self.run_folder, self.checkpoints)
            prune(self.checkpoints, self.limit)
        except OSError as error:
            self.say(f"older checkpoints, or the pointer to the best, stay as they were: {error}")
