"""Checkpoints: the adapter and all that is needed to resume as if nothing had happened. Small, so saved whole.

`checkpoints/step-N/` holds the adapter in PEFT's format, optimizer.pt, scheduler.json, random.json (of every rank),
trainer_state.json (log, counters), and manifest.json: what the run was, where it was in the data, how well it
evaluated, and the SHA-256 of every other file. A folder without a manifest that fits is no checkpoint.

adapter       the adapter's tensors: to a file, from a file, and the file held against all ranks' tensors
parts         of the experts' adapters, where experts are split over ranks: whole in files, in parts on ranks
contents      the rest: copied to host memory, written, read again
disk          what makes a folder whole: flushed, sealed, renamed into place
keep          which checkpoints there are: newest, best, to be deleted
writer        writes in the background while training goes on, and outlives a full disk
random_state  random numbers of Python, NumPy and torch
"""

from windlass.train.checkpoint.adapter import ADAPTER, load_adapter, read_back, save_adapter
from windlass.train.checkpoint.contents import (
    Contents,
    contents,
    load_optimizer,
    load_random,
    load_state,
    read_manifest,
)
from windlass.train.checkpoint.disk import appear, damage, flush, flush_one, save_tensors, sweep
from windlass.train.checkpoint.keep import best, best_of, evaluated, newest, point, prune, saved, set_aside, step_of
from windlass.train.checkpoint.random_state import preserved
from windlass.train.checkpoint.writer import Writer

__all__ = [
    "ADAPTER",
    "Contents",
    "Writer",
    "appear",
    "best",
    "best_of",
    "contents",
    "damage",
    "evaluated",
    "flush",
    "flush_one",
    "load_adapter",
    "load_optimizer",
    "load_random",
    "load_state",
    "newest",
    "point",
    "preserved",
    "prune",
    "read_back",
    "read_manifest",
    "save_adapter",
    "save_tensors",
    "saved",
    "set_aside",
    "step_of",
    "sweep",
]
