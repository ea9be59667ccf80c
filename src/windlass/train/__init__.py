"""`windlass train` and `windlass best`: called once by a user, and once in every rank that this starts. No torch.

Read run, then loop: they are what a training run does.

ranks       processes of this machine: started, signalled, waited for
rank        one of them: its number, its status, how signals and errors end it
run         what every rank does, in numbered steps
loop        the training loop
batches     which rows come when; micro-batches of this rank
loss        the loss, without the logits of a whole batch
optimizer   optimizers and schedules by name
sync        gradients: one all-reduce per step; liveness: proof that the adapter trains
checkpoint  what is saved, and read again; saver: when
resume      the run folder claimed for a new run or an unfinished one
console     what is seen of a run; trackers: TensorBoard, W&B, MLflow, trackio
load, reading, certificate      the base model, each weight proven against the files
parallel, lora, experts     layouts, adapters, and what is special about experts
quantized   the base in 8 or 4 bits; dequantize_kernel: a GPU reads it in one pass
best        the saved adapters of a run, evaluated and ranked
script      a run of kind: script
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from windlass.errors import SAVED, Problem, UserError, raise_all
from windlass.plan import Plan
from windlass.ranks import supervisor as ranks
from windlass.ranks.rank import Rank, read_rank, run_rank, translate_srun
from windlass.run_folder import MANIFEST, read_manifest
from windlass.runfile import Data, Loaded, RunFile
from windlass.runfile.machines import GRACE_SECONDS
from windlass.runfile.names import find_absent_trackers
from windlass.train.ranking import Ranking


def train(
    make_plan: Callable[[], Plan],
    *,
    arguments: Sequence[str],
    environ: MutableMapping[str, str],
    resume: bool,
    debug_freq: int | None = None,
    allow_other_base: bool = False,
    say: Callable[[UserError], None],
) -> int:
    """Start this machine's ranks, which run `python -m windlass ARGUMENTS`, or run as one of them. Returns the exit
    code."""

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):  # until the ranks run there is nothing to save
            signal.signal(number, lambda *_: sys.exit(SAVED))

    def checked() -> Plan:
        from windlass.data.inputs import find_absent_data, find_absent_files

        plan = make_plan()
        # Checked before loading: opening them would fail only once the model is there.
        where, absent = plan.where("train.report_to"), find_absent_trackers(plan.run.train.report_to)
        hints = ((name, f"{how}, or take it out") for name, how in absent.items())
        inputs = [*find_absent_data(plan.run.data, plan.where), *find_absent_files(plan.run, plan.where)]
        files = [problem for _, problem in inputs]
        raise_all([*(Problem(f"{name} is not installed", where, hint) for name, hint in hints), *files])
        return plan

    def work(here: Rank) -> int:
        here.phase("importing the training libraries")
        from windlass.train.run import train_rank

        here.phase("planning")
        return train_rank(checked(), here, resume=resume, debug_freq=debug_freq, allow_other_base=allow_other_base)

    return run_in_ranks(checked, work, arguments=arguments, environ=environ, say=say)


def best(
    make_plan: Callable[[], Plan],
    run_folder: Path,
    *,
    arguments: Sequence[str],
    environ: MutableMapping[str, str],
    base_dtypes: Sequence[str] = (),
    allow_other_base: bool = False,
    show: Callable[[Ranking], None],
    say: Callable[[UserError], None],
) -> int:
    """Evaluate every saved adapter of a run, in as many ranks as its layout has. Returns the exit code."""

    def work(here: Rank) -> int:
        from windlass.train.best import rank_checkpoints as evaluate

        return evaluate(make_plan(), here, run_folder, show, base_dtypes=base_dtypes, allow_other_base=allow_other_base)

    return run_in_ranks(make_plan, work, arguments=arguments, environ=environ, say=say)


def run_in_ranks(
    make_plan: Callable[[], Plan],
    work: Callable[[Rank], int],
    *,
    arguments: Sequence[str],
    environ: MutableMapping[str, str],
    say: Callable[[UserError], None],
) -> int:
    """Start this machine's ranks with the same command, or do one rank's work.

    Each rank makes the plan again: that takes little time compared with importing torch, and needs no file.
    """
    environ.update(translate_srun(environ))
    here = read_rank(environ)
    if here is None:
        plan = make_plan()  # here first: input errors show in one process, before torch is imported
        raise_all(plan.missing_weights)
        ranks.require_all_nodes(plan.layout.nodes, plan.where, environ)
        command, grace = [sys.executable, "-m", "windlass", *arguments], plan.run.cluster.grace_seconds
        return ranks.start_ranks(command, plan.layout.gpus_per_node, environ, grace_seconds=grace or GRACE_SECONDS)
    code = run_rank(here, lambda: work(here), print_error=say)
    if code:  # ranks that are gone would make a clean shutdown hang
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def plan_finished_run(
    run_folder: Path, *, eval_data: Path | None, ranks: int | None, base_dtypes: Sequence[str]
) -> Plan:
    """Plan the evaluation of a finished run, after checking that its model can be stored in each of these dtypes."""
    from windlass.plan import make_plan
    from windlass.settings import (
        IN_NAMES,
    )

    known = ("bf16", *IN_NAMES)
    if unknown := [kind for kind in base_dtypes if kind not in known]:
        raise UserError(f"no such dtype: {', '.join(unknown)}", "--base-dtype", f"known: {', '.join(known)}")
    plans = [
        make_plan(load_finished_run(run_folder, eval_data=eval_data, ranks=ranks, base_dtype=kind), None)
        for kind in (*base_dtypes, None)
    ]
    return plans[-1]


def load_finished_run(
    run_folder: Path, *, eval_data: Path | None, ranks: int | None, base_dtype: str | None = None
) -> Loaded:
    """Load a run's file from its manifest, changed to evaluate it again: on these ranks, with unpacked rows."""
    manifest = run_folder / MANIFEST
    try:
        tree: dict[str, Any] = read_manifest(run_folder)["run"]
        data = tree["data"]
        data |= {"packing": False, "streaming": False}
        if eval_data is not None:
            if not eval_data.exists():
                raise UserError("there is no such file or folder", str(eval_data), "name rows with --eval-data")
            data |= {"dataset_name_or_path": str(eval_data), "dataset_config_name": None, "val_fraction": None}
            data |= {"train_split": "train", "val_split": "train", "mix": [], "eval": {}}
        elif data.get("val_split") and not data.get("val_fraction"):
            data["train_split"] = data["val_split"]  # only these rows are tokenized
        tree["data"] = Data.model_validate(data).model_dump(exclude_defaults=True)  # a default was not requested
    except (KeyError, TypeError):
        hint = "name the folder that train.output_dir named"
        raise UserError("it is not a run folder: manifest.json can't be read", str(run_folder), hint) from None
    if ranks is not None:
        tree["cluster"] |= {"nodes": 1, "gpus_per_node": ranks}
        tree["layout"] = {"name": "auto", "base_dtype": (tree.get("layout") or {}).get("base_dtype")}
        tree.get("train", {}).pop("global_batch_size", None)  # it fits the run's ranks, and nothing is trained here
    if base_dtype is not None:
        tree["layout"] = (tree.get("layout") or {}) | {"base_dtype": base_dtype}
    try:
        run = RunFile.model_validate(tree)
    except ValueError as error:
        hint = "it was written by another version of windlass"
        raise UserError(f"the run in it can't be read: {error}", str(manifest), hint) from None
    sections = {name: section for name, section in tree.items() if isinstance(section, dict)}
    places = {f"{name}.{key}": f"{manifest}: run.{name}.{key}" for name, section in sections.items() for key in section}
    return Loaded(manifest, (), places, run)
