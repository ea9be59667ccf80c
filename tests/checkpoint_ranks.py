"""Runs in every rank of tests/test_checkpoint_resume.py: train_ranks.py with more faults."""

import errno
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import train_ranks
from run_records import read_records
from train_ranks import At, before

from windlass.errors import RunError
from windlass.train.loop import Loop


class Evaluating(At):
    """Sends SIGTERM to one rank in the middle of an evaluation."""

    def plant(self, loop: Loop) -> None:
        if self.rank == train_ranks.rank():
            before(loop.progress, "start_evaluation", lambda: self.act(loop) if loop.step == self.step else None)


def full_disk(loop: Loop) -> None:
    """From now on the system cuts files of a checkpoint short, until `emptied`."""

    def write(partial: Path) -> None:
        (partial / "adapter_model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    begin = type(loop.saver).start_writing

    def begun(taken: Any, copying_seconds: float) -> None:
        object.__setattr__(taken, "write", write)
        begin(loop.saver, taken, copying_seconds)

    loop.saver.start_writing = begun  # type: ignore[method-assign, assignment]


def emptied(loop: Loop) -> None:
    loop.saver.__dict__.pop("start_writing")


def spoilt(loop: Loop) -> None:
    """Turn the adapter against what it has learned, on all ranks alike."""
    for parameter in loop.updater.replicas.parameters:
        parameter.data.mul_(-3)


def terminate(_loop: Loop) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


train_ranks.FAULTS |= {
    "signal in evaluation": Evaluating(8, 1, terminate),
    "signal at 6": At(6, 1, terminate),
    "signal at 7": At(7, 0, terminate),
    "signal in the last step": At(12, 1, terminate),
    "disk full at 1": At(1, 0, full_disk),
    "disk full at 5": At(5, 0, full_disk),
    "disk emptied at 9": At(9, 0, emptied),
    "spoilt 0": At(12, 0, spoilt),
    "spoilt 1": At(12, 1, spoilt),
    "nan 10": At(10, 0, train_ranks.not_a_number),
}

plainly = train_ranks.ours


def ours(case: dict[str, Any], file: Path, here: Any) -> dict[str, Any]:
    """Copy and damage what the case names, then run it."""
    if "copy" in case and here.rank == 0:
        source, target = case["copy"]
        shutil.copytree(source, target, symlinks=True)
    for path, how in case.get("damage", {}).items() if here.rank == 0 else ():
        content = bytearray(Path(path).read_bytes())
        content[int(len(content) * (0.4 if "model/" in path else 0.5))] ^= 1
        changed = Path(f"{path}.changed")  # the other rank may be reading it
        changed.write_bytes(content if how == "flip" else content[: len(content) // 2])
        changed.replace(path)
    folder = Path(case["overrides"][0].partition("=")[2])
    compares = case["resume"] and here.rank == 0
    torch.distributed.barrier()  # the other rank may still be closing the case before
    before = read_records(folder) if compares else {}
    torch.distributed.barrier()
    outcome: dict[str, Any] = plainly(case, file, here)
    if compares:
        after = read_records(folder)
        outcome["changed"] = sorted(name for name in before.keys() | after if before.get(name) != after.get(name))
    return outcome


train_ranks.ours = ours

if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        train_ranks.main()
    except RunError as error:
        sys.exit(str(error))
