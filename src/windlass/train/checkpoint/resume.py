"""Claim the run folder, for a new run or for the checkpoint that an unfinished one continues from."""

import contextlib
import hashlib
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console

from windlass import run_folder
from windlass.errors import Problem, RunError, UserError, raise_all
from windlass.files import (
    FULL,
    WriteGuard,
    explain_write_error,
    read_json,
    read_table_lines,
    sample_file,
    write_atomic,
    write_json,
)
from windlass.model import Base
from windlass.model.files import PUBLISHED
from windlass.observe.format import format_plural
from windlass.plan import Plan
from windlass.plan.finished import find_differences, require_own_folder
from windlass.ranks import collectives
from windlass.run_folder import ADAPTER, MANIFEST, REFERENCE, read_manifest
from windlass.runfile.recorded import record_run
from windlass.train.checkpoint.folder import find_damage, list_checkpoints, read_step, remove_partial_checkpoints
from windlass.train.checkpoint.snapshot import STATE, require_intact
from windlass.weights.same_base import CHAT_TEMPLATE, FETCH_AGAIN, FLAG, require_same_base

BOOT = Path("/proc/sys/kernel/random/boot_id")
SEEN_SECONDS = 90.0  # that a network file system may take to show other nodes a file


def claim_run_folder(
    plan: Plan,
    identity: str,
    unwritten: WriteGuard,
    held: contextlib.ExitStack,
    *,
    resume: bool,
    allow_other_base: bool = False,
) -> Path | None:
    """Claim the run folder on rank 0, locked until `held` is closed. Return the checkpoint to continue from, if any."""
    folder = plan.folder
    where = plan.where("train.output_dir")
    checkpoints = folder / run_folder.CHECKPOINTS
    run_folder.ensure_dir(checkpoints, where)
    held.enter_context(run_folder.lock_run(folder, where) or contextlib.nullcontext())
    remove_partial_checkpoints(checkpoints)
    before = read_manifest(folder)
    state = before.get("state")
    has_steps = any(path.stat().st_size for path in run_folder.find_step_files(folder).values())
    has_reference = (folder / REFERENCE).is_file() and state != run_folder.FAILED
    begun = bool(list_checkpoints(checkpoints)) or (bool(state) and (has_steps or has_reference))
    require_own_folder(plan, unfinished=resume or not begun)
    usable = find_newest_intact(checkpoints, where) if begun else None
    now = describe_run(plan, identity)
    if begun:  # a run that failed before its first step has nothing to compare with
        then = read_manifest(usable) if usable else before
        require_same_run(then, now, plan, allow_other_base=allow_other_base)
        _warn_of_other_versions(then.get("versions", {}), now["versions"])
    if usable:  # its data and its base may yet be refused, and then what is recorded holds
        run_folder.update_manifest(folder, state=run_folder.RUNNING, failure=None)
    else:
        begin_run(plan, now, None, unwritten)
    return usable


def warn_of_unshared(plan: Plan, console: Console) -> None:
    """Say which ranks don't see the run folder. A collective."""
    unshared = ", ".join(map(str, find_unshared(plan.folder)))
    if unshared:
        console.print(
            f"warning: ranks {unshared} don't see {plan.folder}: alarms compare ranks and are off, "
            "and the run can't be resumed there\nhint: set train.output_dir to a volume that all nodes mount",
            style="yellow",
        )


def find_unshared(folder: Path) -> list[int]:
    """Return the ranks that don't see the run folder of rank 0, as on disks of their own. A collective."""

    def read() -> Any:
        with contextlib.suppress(OSError):
            list(folder.iterdir())  # a network file system looks again for what was not there
        return read_manifest(folder).get("began")

    began, host = collectives.run_on_rank_0(lambda: (read(), identify_host()))
    until = time.monotonic() + SEEN_SECONDS * (identify_host() != host)  # a host sees its own files at once
    while not (seen := read() == began) and time.monotonic() < until:
        time.sleep(0.1)
    return [rank for rank, sees in enumerate(collectives.all_gather(seen)) if not sees]


def identify_host() -> str:
    """Return what no other machine has: names may be alike."""
    return BOOT.read_text().strip() if BOOT.is_file() else platform.node()


def begin_run(plan: Plan, facts: dict[str, Any], resumed: Path | None, unwritten: WriteGuard) -> None:
    """Record on rank 0 that this run begins in its folder, or goes on there from a checkpoint."""
    folder = plan.folder
    with unwritten(folder / run_folder.PLAN):
        write_json(folder / run_folder.PLAN, plan.as_dict())
    run_folder.begin_manifest(folder, facts)
    drop_steps_after(folder, read_step(resumed) if resumed else 0)


def _warn_of_other_versions(then: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name, version in now.items():
        before = then.get(name, version)
        if before != version:
            changed = f"this run began with {name} {before} and continues with {version}"
            print(f"warning: {changed}: its steps may differ slightly", file=sys.stderr, flush=True)


def find_newest_intact(checkpoints: Path, where: str) -> Path | None:
    """Return the newest undamaged checkpoint. Damaged ones are reported and renamed."""
    newest_first = list_checkpoints(checkpoints)[::-1]
    if not newest_first:
        print("no checkpoint was saved: starting with the first step", file=sys.stderr, flush=True)
        return None
    damages = {folder: find_damage(folder) for folder in newest_first}
    intact = next((folder for folder in newest_first if not damages[folder]), None)
    if intact is None:
        newest = newest_first[0]
        raise UserError(
            f"none of the checkpoints in {checkpoints} can be used; {newest.name}: {damages[newest]}",
            where,
            "remove the folder to start over",
            "no-intact-checkpoint",
        )
    for folder in newest_first[: newest_first.index(intact)]:
        # Renamed, so that it is neither used nor counted.
        aside = folder.with_name(f"damaged-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        print(f"skipped {folder}: {damages[folder]}; kept as {aside.name}", file=sys.stderr, flush=True)
    return intact


def drop_steps_after(folder: Path, step: int) -> None:
    """Drop what an interrupted run logged about steps that will be run again."""
    logs = list(run_folder.find_step_files(folder).values())
    events = folder / run_folder.EVENTS
    if events.exists():
        logs.append(events)
    for path in logs:
        kept = (line.rstrip() + b"\n" for line, value in read_table_lines(path) if value.get("step", 0) <= step)
        write_atomic(path, b"".join(kept))


def require_same_run(
    before: Mapping[str, Any], now: Mapping[str, Any], plan: Plan, *, allow_other_base: bool, also: Collection[str] = ()
) -> None:
    """Refuse to go on with another run than has begun. `also`: keys that a resumed run may change, and not this one."""
    elsewhere = f"train into another folder than {plan.folder}"
    problems = find_differences(before, plan, elsewhere, also)
    if before.get("base", now["base"]) != now["base"] and not allow_other_base:
        problem = "the base model's files are not those this run began with"
        hint = f"put it back, or {elsewhere}, or add {FLAG}"
        problems.append(Problem(problem, plan.where("model.model_name_or_path"), hint, "other-base"))
    raise_all(problems)


def require_same_data(
    resumed: Path | None, data: Mapping[str, str], plan: Plan, template: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse changed data: other rows under the same name would take the same places. `data`: as `facts` record it;
    `template`: the chat template that wrote them, if one did."""
    then: Mapping[str, Any] = read_manifest(resumed) if resumed else data
    if then.get("data") == data["data"]:
        return
    problem = "the data are not those this run began with, though the run file names the same"
    hint = "put the files (and the tokenizer) back as they were, or train into another folder"
    code = "other-data"
    if then.get("inputs") == data["inputs"]:
        code = "other-tokens"
        problem = "the same files make other tokens than when this run began"
        hint = (
            "a chat template that writes the date needs the tokens of then: put the folder `tokens` of the run back, "
        )
        if plan.run.data.streaming:
            hint = "a stream can't be resumed on another day where the chat template writes the date: fix the date in "
            hint += "data.template_kwargs, "
        hint += "or train into another folder"
    elif resumed and template and (began := then.get(CHAT_TEMPLATE)) and began["text"] != template["text"]:
        code = "other-template"
        problem = f"the chat template, {template['source']}, is not the one that this run began with"
        hint = f"put it back (`chat_template` in {resumed / MANIFEST} has it), or train into another folder"
    raise UserError(problem, plan.where("data.dataset_name_or_path"), hint, code)


def require_steps_left(resumed: Path, total: int, plan: Plan) -> None:
    """Refuse a run that is to end before the step that it has reached."""
    step = read_step(resumed)
    if step > total:
        key = "max_steps" if plan.run.train.max_steps > 0 else "num_train_epochs"
        command = f"windlass export {shlex.quote(str(resumed))} --to FOLDER"
        hint = f"make it longer, or take what {resumed.name} has: `{command}`"
        raise UserError(
            f"the run has {format_plural(total, 'step')} now, and has reached step {step}",
            plan.where(f"train.{key}"),
            hint,
            "no-steps-left",
        )


def explain_other_length(resumed: Path, total: int) -> str:
    """Return what a changed number of steps means for the learning rate; empty if it is unchanged."""
    before = read_json(resumed / STATE).get("max_steps", total)
    if before == total:
        return ""
    then = f"the run had {format_plural(before, 'step')} when step {read_step(resumed)} was saved, and has {total} now"
    return f"warning: {then}: from here on, warm-up and decay of the learning rate are those of {total} steps"


def require_base_of(
    resumed: Path | None, plan: Plan, digest: str, *, allow_other: bool, say: Callable[[str], None]
) -> str:
    """Refuse another base than the adapter was trained on; return a description of one that was accepted instead."""
    given = plan.run.lora.adapter
    adapter = resumed or (Path(given) if given else None)
    if adapter is None:
        return ""
    if not resumed and (adapter / ADAPTER).is_file():
        require_intact(adapter)
    where = plan.where("model.model_name_or_path")
    return require_same_base(adapter, plan.base, digest, where, allow_other=allow_other, say=say)


def fingerprint_base(base: Base) -> str:
    """Return a fingerprint of the base model's files: names, sizes, headers, samples of weights, and code. Equal on
    every rank.

    This is what can be known before loading; afterwards the digest covers all weights. A file whose SHA-256 was
    compared with the published one when it was fetched must be unchanged.
    """
    digest = hashlib.blake2b(digest_size=16)
    fetched = read_json(base.path / PUBLISHED) if base.path else {}
    pieces = (piece for parameter in base.parameters for piece in parameter.pieces)
    files = {stored.file for piece in pieces for stored in piece.tensors}
    for path in sorted(files, key=lambda path: path.name):
        sample = sample_file(path)
        digest.update(sample)
        if path.name in fetched and fetched[path.name] != hashlib.blake2b(sample).hexdigest():
            problem = "is not the file whose SHA-256 was compared with the hub's when it was fetched"
            raise UserError(problem, str(path), FETCH_AGAIN.format(folder=base.path), "not-as-fetched")
    for code in sorted(base.path.glob("*.py")) if base.path else ():
        digest.update(code.name.encode() + code.read_bytes())
    return digest.hexdigest()


def describe_run(plan: Plan, identity: str) -> dict[str, Any]:
    """Return the facts about this run that are recorded for later."""
    return {
        "run": resolve_run(plan),
        "base": identity,
        "versions": run_folder.read_versions(run_folder.LIBRARIES),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "ranks": plan.layout.ranks,
        "layout": plan.as_dict()["layout"],
        "sequences": plan.schedule.global_sequences,  # per optimizer step
        "git": run_folder.read_git_state(),
    }


def resolve_run(plan: Plan) -> dict[str, Any]:
    """Return the run file with what the plan chose or derived: micro-batch, accumulation, recomputing, offloading."""
    run = record_run(plan.run)
    chosen = {"per_device_train_batch_size": plan.batch.micro, "gradient_accumulation_steps": plan.batch.accumulation}
    if plan.run.train.gradient_checkpointing == "auto":
        chosen["gradient_checkpointing"] = bool(plan.layout.activation_checkpointing)
    if plan.run.train.offload_activations == "auto":
        chosen["offload_activations"] = bool(plan.layout.offload_activations)
    return {**run, "train": {**run["train"], **chosen}}


def describe_failure(error: Exception) -> str:
    """Return in one line why rank 0 ended."""
    explained = error if isinstance(error, UserError) else collectives.explain_lost_rank(error)
    if explained:
        problem = explained.problems[0]
        place = "" if problem.where in ("", "windlass train") else f"{problem.where}: "
        return f"{place}{problem.problem}"
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


@contextlib.contextmanager
def record_failure(folder: Path) -> Iterator[None]:
    """Record in the manifest that an error ended the run; otherwise it would still say `running`."""
    try:
        yield
    except Exception as error:
        if collectives.get_rank() == 0:
            try:
                run_folder.update_manifest(folder, state=run_folder.FAILED)  # at once: a report may be reading
                with contextlib.suppress(OSError):  # a full disk, on which the manifest can't grow
                    run_folder.update_manifest(folder, failure=describe_failure(error))
            except OSError as other:
                print(explain_write_error(folder / run_folder.MANIFEST, other), file=sys.stderr, flush=True)
        if not isinstance(error, OSError) or error.errno not in FULL:
            raise
        kept = list_checkpoints(folder / run_folder.CHECKPOINTS)
        newest = f"it continues from {kept[-1].name}" if kept else "no checkpoint was saved"
        hint = f"make room, then run again with --resume: {newest}"
        raise RunError(
            explain_write_error(Path(error.filename or folder), error), str(folder), hint, "disk-full"
        ) from error
