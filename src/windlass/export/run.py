"""One export, from the choice of the adapter to the proof of what was written: read `export` from top to bottom."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass import __version__
from windlass.errors import RunError, UserError
from windlass.export import adapter as adapters
from windlass.export import card, logits, recipe, update, write
from windlass.export.choose import Chosen, base_name, base_of, choose
from windlass.export.proof import LOST, SHOWN, Proof, prove
from windlass.export.serve import Served, serve_check
from windlass.export.write import RECORD
from windlass.model import Base
from windlass.train.reading import NEEDS_SCALE

GIB = 2**30
Say = Callable[[str], None]
Progress = Callable[[str, int], Any]  # a stage and its bytes -> context manager that gives `advance`


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    kind: str  # adapter or merged
    base: str
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Names:
    """Of the base: the folder that holds it, and what to call it. Without them the adapter says both."""

    folder: str | None = None
    called: str | None = None


@contextmanager
def unseen(_stage: str, _size: int) -> Iterator[write.Advance]:
    yield lambda _count: None


def export(
    source: Path,
    to: Path,
    *,
    merge: bool = False,
    dtype: str | None = None,
    names: Names = Names(),
    workers: int | None = None,
    say: Say = print,
    progress: Progress = unseen,
) -> Exported:
    """Write and prove. A deviation raises after everything is written: nothing is deleted."""
    chosen = choose(source)
    say(f"adapter   {chosen.folder}: {chosen.why}")
    called = base_name(chosen, names.folder, names.called)
    if merge:
        record = _merge(chosen, base_of(chosen, names.folder), to, called, dtype, workers, say, progress)
    else:
        record = _adapter(chosen, names.folder, to, called, dtype, say)
    kind = "merged" if merge else adapters.ADAPTER
    if record["deviations"]:
        shown = record["deviations"][:SHOWN]
        more = f"; and {len(record['deviations']) - SHOWN} more" if len(record["deviations"]) > SHOWN else ""
        raise RunError(
            f"it is not what it should be: {'; '.join(shown)}{more}",
            str(to),
            f"nothing was deleted, {to / RECORD} lists all; don't use it: export into a new folder",
        )
    return Exported(to, kind, called, record)


def _adapter(chosen: Chosen, base: str | None, to: Path, called: str, dtype: str | None, say: Say) -> dict[str, Any]:
    # 1. Where the base is at hand, the adapter must be of it.
    try:
        checkpoint: Base | None = base_of(chosen, base)
    except UserError:
        if base:
            raise
        checkpoint = None
        say("base      not on this machine: the adapter's names and shapes are not held against it")
    if checkpoint is not None:
        updates = update.read(chosen, checkpoint)
        say(f"base      {checkpoint.name}: {len(updates.by_name)} of its parameters are adapted")
    # 2. Write, 3. read again.
    adapters.write(chosen, to, called, dtype)
    deviations = adapters.prove(chosen, to, dtype)
    card.write(chosen, to, called, kind="adapter", dtype=dtype)
    record = {**_facts(chosen, called, adapters.ADAPTER), "dtype": dtype, "deviations": deviations}
    _write_record(to, record)
    if not deviations:
        say(f"proven    opened again: every tensor present, {'rounded once' if dtype else 'byte-equal'}")
    return record


def _merge(
    chosen: Chosen,
    checkpoint: Base,
    to: Path,
    called: str,
    dtype: str | None,
    workers: int | None,
    say: Say,
    progress: Progress,
) -> dict[str, Any]:
    # 1. The adapter held against the base, and every file of the result worked out from headers.
    updates = update.read(chosen, checkpoint)
    recipe.check_target(to, checkpoint, chosen.folder)
    made = recipe.make(checkpoint, updates, to, dtype or recipe.OWN)
    if not update.alive(updates):
        say("note      every lora_B is zero: the adapter was never trained, and the merged model is the base")
    _say_plan(made, checkpoint, updates, say)

    # 2. Write, several files at a time; an earlier attempt is gone on with.
    resumed = write.begin(to, made, checkpoint, chosen.weights)
    coded = sum(e.source.end - e.source.start for e in made.entries() if e.how == recipe.MERGED and _is_coded(e))
    with progress("merging", made.size + coded) as advance:
        kept = write.Writer(made, checkpoint, updates, to, advance).write(workers or _workers(made))
    if resumed:
        say(f"resumed   {len(kept)} of {len(made.files)} files were finished")
    card.write(chosen, to, called, kind="merged", dtype=None if made.dtype == recipe.OWN else made.dtype)

    # 3. Open it again and hold it against base and adapter.
    size = sum(e.source.end - e.source.start for e in made.entries() if e.how == recipe.COPIED)
    with progress("proving", size) as advance:
        proof = prove(checkpoint, updates, made, to, chosen.weights, advance)
    proof.logits = logits.compare(checkpoint, chosen, to) if proof.passed else {"skipped": "the files are wrong"}
    proof.deviations += [proof.logits["deviation"]] if "deviation" in proof.logits else []
    _say_proof(proof, say)
    mark = {"fingerprint": write.fingerprint(made, checkpoint, chosen.weights)}
    record = {**_facts(chosen, called, "merged"), **mark, "dtype": made.dtype, **asdict(proof)}
    _write_record(to, record)
    write.finish(to)
    return record


def _is_coded(entry: recipe.Entry) -> bool:
    return entry.out.dtype in NEEDS_SCALE


def _workers(made: recipe.Recipe) -> int:
    """More than a few files at a time only make the disk seek."""
    return max(1, min(len(made.files), os.process_cpu_count() if hasattr(os, "process_cpu_count") else 2, 4))


def _say_plan(made: recipe.Recipe, checkpoint: Base, updates: update.Updates, say: Say) -> None:
    counts: dict[str, int] = {}
    for entry in made.entries():
        counts[entry.how] = counts.get(entry.how, 0) + 1
    words = ", ".join(f"{count} {how}" for how, count in counts.items())
    say(f"base      {checkpoint.name}: {len(updates.by_name)} parameters are adapted")
    say(f"writing   {made.size / GIB:.2f} GiB in {len(made.files)} files: {words}")
    if made.dropped:
        say(f"dropped   {len(made.dropped)} scales: the weights are 16-bit now, and scales mean nothing")
    if made.left_out:
        say(f"left out  {', '.join(made.left_out)}: they hold, or point to, weights without the adapter")


def _say_proof(proof: Proof, say: Say) -> None:
    say(
        f"proven    {proof.tensors} tensors opened again; {proof.untouched} untouched are byte-equal "
        f"({proof.untouched_bytes / GIB:.2f} GiB); {proof.touched} touched computed again, {proof.elements:,} values"
    )
    if proof.kept is not None and proof.least_kept is not None:
        name, least = proof.least_kept
        say(f"kept      {proof.kept:.1%} of the adapter is in the rounded weights; least: {least:.1%} in {name}")
        if proof.kept < LOST:
            say("note      rounding took a part of the adapter: serve it unmerged, or merge with --dtype bf16")
    if proof.logits is not None:
        logits.told(proof.logits, say)


def _facts(chosen: Chosen, called: str, kind: str) -> dict[str, Any]:
    return {
        "windlass": __version__,
        "kind": kind,
        "base": called,
        "adapter": chosen.folder.name,
        "why": chosen.why,
        "run": chosen.run_folder.name if chosen.run_folder else None,
    }


def _write_record(to: Path, record: dict[str, Any]) -> None:
    (to / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def served(source: Path, made: Exported, base: str | None) -> Served:
    """What servers do with what was exported."""
    chosen = choose(source)
    try:
        checkpoint: Base | None = base_of(chosen, base)
    except UserError:
        checkpoint = None
    return serve_check(chosen, checkpoint, made.folder, base=made.base, merged=made.kind == "merged")
