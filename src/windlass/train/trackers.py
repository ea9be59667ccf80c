"""Metrics to the trackers that train.report_to names: TensorBoard, W&B, MLflow, trackio."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from windlass import run_folder
from windlass.observe.reader import Tail

Values = Mapping[str, float]
AXES = ("step", "time", "epoch")  # of a line of the step file: what trackers have of their own
# Of a whole run, not of a step.
TOTALS = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss")


def prefixed(values: Values) -> dict[str, float]:
    """eval_loss -> eval/loss, everything else -> train/…"""
    return {f"eval/{n[5:]}" if n.startswith("eval_") else f"train/{n}": value for n, value in values.items()}


def tensorboard(folder: Path, _name: str | None, config: dict[str, Any]) -> tuple[Callable[..., None], ...]:
    from torch.utils.tensorboard import SummaryWriter

    where = os.environ.get("TENSORBOARD_LOGGING_DIR")
    stamp = time.strftime("%b%d_%H-%M-%S")
    into = Path(where).expanduser() if where else folder / "runs" / f"{stamp}_{os.uname().nodename}"
    writer = SummaryWriter(log_dir=str(into))
    writer.add_text("run", str(config))

    def log(values: Values, step: int) -> None:
        for name, value in prefixed(values).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def wandb(_folder: Path, name: str | None, config: dict[str, Any]) -> tuple[Callable[..., None], ...]:
    import wandb

    if wandb.run is None:
        wandb.init(project=os.environ.get("WANDB_PROJECT", "huggingface"), name=name)
    run = wandb.run
    run.config.update(config, allow_val_change=True)
    run.define_metric("train/global_step")
    run.define_metric("*", step_metric="train/global_step", step_sync=True)

    def log(values: Values, step: int) -> None:
        for total in values.keys() & TOTALS:
            run.summary[total] = values[total]
        run.log({**prefixed({n: v for n, v in values.items() if n not in TOTALS}), "train/global_step": step})

    return log, run.finish


def mlflow(_folder: Path, name: str | None, config: dict[str, Any]) -> tuple[Callable[..., None], ...]:
    import mlflow

    started = mlflow.active_run() is None
    if started:  # where to, and under which experiment, is in MLflow's own variables
        mlflow.start_run(run_name=name)
    sections = {
        f"{s}.{key}": value for s, keys in config.items() if isinstance(keys, dict) for key, value in keys.items()
    }
    params = {key: value for key, value in sections.items() if len(str(value)) <= 250}  # MLflow's limit
    for start in range(0, len(params), 100):  # and of one call
        mlflow.log_params(dict(list(params.items())[start : start + 100]), synchronous=False)

    def log(values: Values, step: int) -> None:
        # The step file's fields are of training here too; the other names go to MLflow as they are.
        named = {f"train/{n}" if n.startswith("step/") else n: value for n, value in values.items()}
        mlflow.log_metrics(metrics=named, step=step, synchronous=False)

    return log, mlflow.end_run if started else lambda: None


def trackio(_folder: Path, name: str | None, config: dict[str, Any]) -> tuple[Callable[..., None], ...]:
    import trackio

    trackio.init(project="huggingface", name=name, resume="allow", config=config)

    def log(values: Values, step: int) -> None:
        trackio.log({**prefixed({n: v for n, v in values.items() if n not in TOTALS}), "train/global_step": step})

    return log, trackio.finish


OPEN = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio}


class Trackers:
    """Opened on rank 0. `log` sends what the loop logs; `log_steps` every line of rank 0's step file."""

    def __init__(self, names: str | list[str], folder: Path, run_name: str | None, config: dict[str, Any]) -> None:
        listed = [names] if isinstance(names, str) else names
        self.opened = [OPEN[name](folder, run_name, config) for name in listed if name != "none"]
        self.lines = Tail(folder / run_folder.STEPS.format(rank=0))
        self.lines.skip()  # of before a resume: they were sent then

    def log(self, values: Values, step: int) -> None:
        for log, _ in self.opened:
            log(values, step)

    def log_steps(self) -> None:
        for record in self.lines.objects() if self.opened else ():
            numbers = {
                f"step/{name}": value
                for name, value in record.items()
                if name not in AXES and isinstance(value, int | float) and not isinstance(value, bool)
            }
            self.log(numbers, record["step"])

    def close(self) -> None:
        for _, close in self.opened:
            close()
        self.opened = []
