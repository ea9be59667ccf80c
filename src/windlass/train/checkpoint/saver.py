"""Save checkpoints: in the background while training, and waited for at the end."""

import shlex
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from windlass.errors import RunError, UserError
from windlass.files import WriteGuard, commit_dir
from windlass.ranks import collectives
from windlass.run_folder import CHECKPOINTS, log_event
from windlass.train.batches import RowError
from windlass.train.checkpoint.folder import list_checkpoints, name_checkpoint, point_to_best, prune_checkpoints
from windlass.train.checkpoint.snapshot import Snapshot, TrainerState, take_snapshot
from windlass.train.updater import Updater

PATIENCE_SECONDS: Final = 5.0  # after waiting this long for the previous checkpoint, training reports it


class Saver:
    """Writes one checkpoint at a time, in a thread on rank 0. A full disk is reported and harms neither training nor
    older checkpoints; any other failure ends the run."""

    def __init__(
        self,
        folder: Path,
        limit: int | None,
        facts: dict[str, Any],
        say: Callable[[str], None],
        saved: Callable[[], None],
        unwritten: WriteGuard,
        patience_seconds: float = PATIENCE_SECONDS,
        passing: Collection[int] = (),
    ) -> None:
        self.folder = folder
        self.checkpoints = folder / CHECKPOINTS
        self.limit = limit
        self.passing = passing  # steps whose checkpoints are kept only until there is a newer one
        self.facts = facts  # for the manifest of every checkpoint
        self.say = say
        self.patience_seconds = patience_seconds
        self.saved = saved  # called after every checkpoint, from the thread that wrote it
        self.unwritten = unwritten
        self.thread = ThreadPoolExecutor(1, "windlass save")
        self.writing: Future[str] | None = None
        self.step = 0  # of the latest checkpoint
        self.failure = ""  # why the latest checkpoint could not be written

    def save(self, state: TrainerState, updater: Updater, *, wait: bool) -> None:
        """Copy what is to be saved; wait for the write only if `wait`. A collective."""
        differing = updater.replicas.find_differing()
        if differing:
            raise RunError(
                f"{len(differing)} adapter tensors differ between ranks, the first is {differing[0]}",
                str(self.folder),
                "nothing was saved; a rank with faulty memory or other library versions does this",
                "adapters-differ",
            )
        began = time.monotonic()
        more = {"eval_loss": state.eval_loss, "evaluation_due": state.evaluation_due, "unlogged": state.unlogged}
        snapshot = take_snapshot(
            state.step,
            model=updater.model,
            optimizer=updater.optimizer,
            scheduler=updater.scheduler,
            state=state.as_dict(),
            manifest={**self.facts, "epoch": state.epoch, **more},
        )
        if snapshot is not None:
            self.start_writing(snapshot, time.monotonic() - began)
        if not wait:
            return
        failure = collectives.broadcast(self.close())
        if failure:
            older = list_checkpoints(self.checkpoints)
            before = f"the checkpoint before is {older[-1].name}" if older else "there is no checkpoint before"
            raise RunError(
                f"step {state.step} could not be saved: {failure}",
                str(self.checkpoints),
                f"{before}; make room, then run again with --resume",
                "save-failed",
            )

    def explain_row_error(self, error: RowError, step: int) -> UserError:
        """Return a stream's error with what to do about the row, and about the steps before it."""
        problem = error.problems[0]
        hint = f"{problem.hint}; `windlass data RUN --override data.streaming=false` reads every row"
        if step:
            folder = self.checkpoints / name_checkpoint(step)
            hint += f". Then go on from the adapter of step {step}: `windlass train RUN --override"
            moved = [f"train.output_dir={self.folder}-2", "--override", f"lora.adapter={folder}"]
            hint += f" {shlex.join(moved)}`"
        return UserError(f"{problem.problem} (met in step {step + 1} of the stream)", problem.where, hint, problem.code)

    def start_writing(self, snapshot: Snapshot, copying_seconds: float = 0.0) -> None:
        """Start writing, after the previous checkpoint is written."""
        self.close()
        self.step = snapshot.step
        self.writing = self.thread.submit(self._write, snapshot, copying_seconds)

    def close(self) -> str:
        """Wait until the checkpoint is written; return why it failed. Not a collective: a failure may end the run."""
        if self.writing is None:
            return self.failure
        began = time.monotonic()
        while wait([self.writing], self.patience_seconds).not_done:
            waited = f"the storage has been writing for {time.monotonic() - began:.0f} s"
            self.say(f"waiting for the checkpoint of step {self.step}: {waited}")
        writing = self.writing
        self.writing = None
        self.failure = writing.result()
        return self.failure

    def _write(self, snapshot: Snapshot, copying_seconds: float) -> str:
        """Write the checkpoint, and what follows from it; return why it could not be written."""
        step = snapshot.step
        folder = self.checkpoints / name_checkpoint(step)
        partial = folder.with_name(f".{folder.name}.partial")
        failure = ""
        size = 0
        began = time.monotonic()
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            snapshot.write(partial)
            size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
            commit_dir(partial, folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            failure = error.strerror or str(error)
            self.unwritten.report(self.checkpoints, error)
        seconds = time.monotonic() - began
        if failure:
            self.say(f"step {step:>5}  NOT saved: {failure} ({folder}); older checkpoints are unharmed")
        else:
            slow = f", in {seconds:.0f} s" if seconds > self.patience_seconds else ""
            self.say(f"step {step:>5}  saved checkpoints/{folder.name}{slow}")
        try:
            # A resubmitted job's grace period follows from the time that saving took.
            outcome: dict[str, Any] = {"ok": False, "error": failure} if failure else {"ok": True}
            log_event(self.folder, "save", step, seconds=round(copying_seconds + seconds, 3), bytes=size, **outcome)
            self.saved()
            if not failure:
                point_to_best(self.folder, self.passing)
                prune_checkpoints(self.checkpoints, self.limit, self.passing)
        except OSError as error:  # such as a full disk: a log line, space or a link is lost, not the checkpoint
            self.say(f"the run folder's events, its older checkpoints or its best pointer stay as they were: {error}")
        return failure
