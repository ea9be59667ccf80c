"""Send metrics to the trackers in train.report_to: TensorBoard, W&B, MLflow, trackio."""

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from windlass import run_folder
from windlass.files import WriteGuard
from windlass.observe.reader import Tail

Values = Mapping[str, float]
Log = Callable[[Values, int], None]
AXES = ("step", "time", "epoch")  # fields of a step line that trackers have themselves


def add_prefixes(values: Values) -> dict[str, float]:
    """Rename eval_loss -> eval/loss and everything else -> train/…."""
    return {f"eval/{n[5:]}" if n.startswith("eval_") else f"train/{n}": value for n, value in values.items()}


def open_tensorboard(folder: Path, _name: str | None, config: dict[str, Any]) -> tuple[Log, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    named = folder / "runs" / f"{time.strftime('%b%d_%H-%M-%S')}_{os.uname().nodename}"
    where = Path(os.environ.get("TENSORBOARD_LOGGING_DIR") or named).expanduser()
    if where != named and run_folder.find_sweep(folder):
        where /= folder.name  # or runs beside each other would be one curve
    others = threading.excepthook
    # Errors in its thread are raised again by the next call, and reported there.
    threading.excepthook = lambda failed: (
        None if type(failed.thread).__name__ == "_AsyncWriterThread" else others(failed)
    )
    writer = SummaryWriter(log_dir=str(where))
    writer.add_text("run", str(config))

    def log(values: Values, step: int) -> None:
        for name, value in add_prefixes(values).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def open_wandb(_folder: Path, name: str | None, config: dict[str, Any]) -> tuple[Log, Callable[[], None]]:
    import wandb

    # Trials that train together are several runs of one process.
    project = os.environ.get("WANDB_PROJECT", "huggingface")
    run = wandb.run or wandb.init(project=project, name=name, reinit="create_new")
    run.config.update(config, allow_val_change=True)
    run.define_metric("train/global_step")
    run.define_metric("*", step_metric="train/global_step", step_sync=True)
    return lambda values, step: run.log({**add_prefixes(values), "train/global_step": step}), run.finish


def open_mlflow(_folder: Path, name: str | None, config: dict[str, Any]) -> tuple[Log, Callable[[], None]]:
    import mlflow

    started = mlflow.active_run() is None
    if started:  # the address and the experiment come from MLflow's own variables
        mlflow.start_run(run_name=name)
    run_id = mlflow.active_run().info.run_id
    sections = ((section, keys) for section, keys in config.items() if isinstance(keys, dict))
    params = [(f"{section}.{key}", value) for section, keys in sections for key, value in keys.items()]
    params = [(key, value) for key, value in params if len(str(value)) <= 250]  # MLflow's limit per value
    for start in range(0, len(params), 100):  # and per call
        mlflow.log_params(dict(params[start : start + 100]), synchronous=False, run_id=run_id)

    def log(values: Values, step: int) -> None:
        # Fields of the step file get the prefix train/ here too; other names stay as they are.
        named = {f"train/{n}" if n.startswith("step/") else n: value for n, value in values.items()}
        mlflow.log_metrics(metrics=named, step=step, synchronous=False, run_id=run_id)

    return log, mlflow.end_run if started else lambda: None


def open_trackio(_folder: Path, name: str | None, config: dict[str, Any]) -> tuple[Log, Callable[[], None]]:
    import trackio

    run = trackio.init(project="huggingface", name=name, resume="allow", config=config)
    return lambda values, step: run.log({**add_prefixes(values), "train/global_step": step}), run.finish


UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.ENOTDIR}
OPEN = {"tensorboard": open_tensorboard, "wandb": open_wandb, "mlflow": open_mlflow, "trackio": open_trackio}


class Trackers:
    """Open trackers, on rank 0. `log` sends what the loop logs; `log_steps` sends every line of rank 0's step file."""

    def __init__(
        self,
        names: str | list[str],
        folder: Path,
        run_name: str | None,
        config: dict[str, Any],
        unwritten: WriteGuard,
        say: Callable[[str], None],
    ) -> None:
        self.say = say
        listed = [names] if isinstance(names, str) else names
        self.folder = folder
        self.unwritten = unwritten
        self.opened: dict[str, tuple[Log, Callable[[], None]]] = {}
        for name in listed:
            if name != "none":
                try:
                    self.opened[name] = OPEN[name](folder, run_name, config)
                except Exception as error:
                    self._lose(name, error)
        self.lines = Tail(folder / run_folder.STEPS.format(rank=0))
        self.lines.skip()  # lines from before a resume were sent then

    def log(self, values: Values, step: int) -> None:
        for name, (log, _) in list(self.opened.items()):
            try:
                log(values, step)
            except Exception as error:  # a full disk, or no answer: it has lost lines and would lose more
                self._lose(name, error)

    def log_steps(self) -> None:
        if not self.opened:
            return
        for record in self.lines.objects():
            by_source = {f"loss_{name}": value for name, value in (record.get("source_loss") or {}).items()}
            fields = {**record, **by_source, **(record.get("preference") or {})}
            numbers = {name: value for name, value in fields.items() if type(value) in (int, float)}
            values = {f"step/{name}": value for name, value in numbers.items() if name not in AXES}
            self.log(values, record["step"])

    def close(self) -> None:
        self.log_steps()
        for name, (_, close) in list(self.opened.items()):
            try:
                close()
            except Exception as error:
                self._lose(name, error)
        self.opened = {}

    def _lose(self, name: str, error: Exception) -> None:
        """Go on without a tracker: each library has exceptions of its own for a server that is not there."""
        self.opened.pop(name, None)
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            self.unwritten.report(self.folder / name, error)
        else:
            why = (str(error).splitlines() or [""])[0][:200]
            self.say(f"warning: {name}: {type(error).__name__}: {why}; training continues without it")
