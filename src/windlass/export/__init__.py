"""Export a run's best adapter in PEFT's format, or merged into its base in the published layout; proven either way."""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from windlass import __version__
from windlass.errors import RunError, UserError
from windlass.export import screen
from windlass.export.card import write_card
from windlass.export.deltas import read_deltas
from windlass.export.merge import BF16, COPIED, OWN, plan_merge, write_merge
from windlass.export.proof import GIB, compare_logits, prove_files
from windlass.export.source import (
    CONFIG,
    WEIGHTS,
    AdapterSource,
    choose_adapter,
    find_local_base,
    public_base_name,
    require_local_base,
)
from windlass.files import read_json, write_json
from windlass.model import Base
from windlass.model.quantization import (
    published_dtype,
)
from windlass.run_folder import BASES
from windlass.train.checkpoint.snapshot import require_intact, save_tensors
from windlass.train.wrapped import inner_name, outer_name, rename_config, rename_keys
from windlass.weights.same_base import RECORD as RECORD_OF_BASE
from windlass.weights.same_base import (
    bytes_to_digest,
    describe_files,
    describe_quantization,
    digest_files,
    read_recorded_base,
    require_same_base,
)

__all__ = ["ExportResult", "export", "push_to_hub"]

ADAPTER, MERGED, RECORD = "adapter", "merged", "export.json"
DTYPES: Final = {BF16: torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The adapter's files that are needed to use it. Optimizer, scheduler and random state belong to the run.
COMPANIONS: Final = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "*.model")
LOST: Final = 0.9  # below this share of the adapter a warning is printed
RESERVE: Final = 2**26  # bytes of disk reserved for tokenizer, config, card
SHOWN: Final = 8
Say = Callable[[str], None]
Progress = Callable[[str, int], Any]  # (stage, bytes) -> context manager that yields `advance`


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of an export."""

    folder: Path
    kind: str  # adapter or merged
    base: str
    record: dict[str, Any]


def export(
    path: Path,
    to: Path,
    *,
    merge: bool = False,
    dtype: str | None = None,
    base: str | None = None,
    called: str | None = None,
    model_class: str | None = None,
    workers: int | None = None,
    allow_other_base: bool = False,
    say: Say = print,
    progress: Progress = screen.show_progress,
) -> ExportResult:
    """Write and prove. `base`: the base's folder, `called`: its name; by default the adapter gives both. `model_class`:
    the class on which an adapter for a multimodal model is to be opened.

    A deviation is raised after everything is written: nothing is deleted.
    """
    source = choose_adapter(path)
    say(f"adapter   {source.folder}: {source.why}")
    require_intact(source.folder)
    name, kind = public_base_name(source, base, called), MERGED if merge else ADAPTER
    record = {
        "windlass": __version__,
        "kind": kind,
        "base": name,
        "adapter": source.folder.name,
        "why": source.why,
        "run": source.run_folder.name if source.run_folder else None,
    }
    try:
        if merge:
            if model_class:
                raise UserError("a merged model has its base's class", "--for", "leave it out")
            record |= _merge(source, base, to, name, dtype, workers, say, progress, allow_other_base=allow_other_base)
        else:
            record |= _export_adapter(source, base, to, name, dtype, model_class, say)
        write_json(to / RECORD, record)
    except OSError as error:
        problem = f"{error.filename or to} can't be written: {error.strerror or error}"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "make room and repeat the command" if full else "check that the folder can be written, and has room"
        raise (RunError if full else UserError)(problem, f"--to {to}", hint) from None
    if deviations := record["deviations"]:
        more = f"; and {len(deviations) - SHOWN} more" if len(deviations) > SHOWN else ""
        raise RunError(
            f"the export is not base + adapter: {'; '.join(deviations[:SHOWN])}{more}",
            str(to),
            f"nothing was deleted, {to / RECORD} lists all; don't use it: export into a new folder",
        )
    return ExportResult(to, kind, name, record)


def claim_folder(source: AdapterSource, base: Path | None, to: Path, kind: str, size: int = 0) -> None:
    """Claim a new or empty folder, an earlier export of an adapter, or an interrupted merge, which then starts over."""
    for taken, what in ((base, "the base model's folder"), (source.folder, "the adapter's folder")):
        if taken is not None and to.resolve() == taken.resolve():
            raise UserError(f"it is {what}", f"--to {to}", "name a new folder")
    to.mkdir(parents=True, exist_ok=True)
    there, earlier = sorted(path.name for path in to.iterdir()), read_json(to / RECORD)
    if there and (earlier.get("kind") != kind or (kind == MERGED and "deviations" in earlier)):
        what = f"a {earlier['kind']} model" if "kind" in earlier else f"{len(there)} other files ({there[0]} …)"
        raise UserError(f"the folder holds {what}", f"--to {to}", "name a new folder, or empty this one")
    for left in (to / "config.json", *to.glob("model*.safetensors*")) if kind == MERGED else ():
        left.unlink(missing_ok=True)
    free, needed = shutil.disk_usage(to).free, size + RESERVE
    if free < needed:
        problem = f"the export needs {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free there"
        raise UserError(problem, f"--to {to}", "free some, or name a folder on a larger volume")
    write_json(to / RECORD, {"kind": kind})


def _export_adapter(
    source: AdapterSource, base: str | None, to: Path, name: str, dtype: str | None, model_class: str | None, say: Say
) -> dict[str, Any]:
    """Write the adapter alone in PEFT's format: as saved or in 16 bits, with its base's name instead of a path."""
    # 1. If the base is available, the adapter must fit it.
    found = require_local_base(source, base) if base else find_local_base(source)
    if found is None:
        say("base      not on this machine: the adapter's names and shapes are not checked against it")
    else:
        say(f"base      {found.name}: {len(read_deltas(source, found).by_name)} of its parameters are adapted")

    openers = list_model_classes(found, model_class)

    # 2. Write.
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"an adapter can't be written as {dtype!r}", "--dtype", f"one of {', '.join(DTYPES)}")
    claim_folder(source, found.path if found else None, to, ADAPTER)
    config = {**source.config, "base_model_name_or_path": name, "inference_mode": True}
    expected = saved = load_file(source.weights)
    if found and found.wrapper:
        outer = partial(outer_name, place=found.wrapper.place)
        rename = inner_name if openers[0] == found.family.causal_lm else outer
        config, expected = {**config, **rename_config(config, saved, rename)}, rename_keys(saved, rename)
        say(f"named     for {openers[0]}; for {openers[1]}: --for {openers[1]}")
    # PEFT writes this list as a set, in varying order: sorted, two exports can be compared.
    if isinstance(config.get("target_modules"), list):
        config["target_modules"] = sorted(config["target_modules"])
    write_json(to / CONFIG, config)
    if dtype is None and expected.keys() == saved.keys():
        shutil.copyfile(source.weights, to / WEIGHTS)
    else:
        expected = {key: tensor.to(DTYPES[dtype]) if dtype else tensor for key, tensor in expected.items()}
        save_tensors(expected, to / WEIGHTS, {"format": "pt"})
    for folder in (source.folder, *([source.run_folder / "final"] if source.run_folder else [])):
        if companions := {path for pattern in COMPANIONS for path in folder.glob(pattern)}:
            for companion in companions:
                shutil.copyfile(companion, to / companion.name)
            break
    recorded = read_recorded_base(source.folder)
    if recorded:
        write_json(to / RECORD_OF_BASE, recorded | describe_files(to))
    other, trained_on = recorded.get("other_base", ""), describe_quantization(recorded.get("base_quantisation", {}))
    if trained_on:
        say(f"trained   on the base in {trained_on}")
    place = found.wrapper.place if found and found.wrapper else ""
    card = partial(write_card, source, to, name, merged=False, dtype=dtype, openers=openers, place=place)
    card(other_base=other, trained_on=trained_on)

    # 3. Open it again: the same tensors, each the one that was saved.
    after = load_file(to / WEIGHTS)
    deviations = []
    for key in sorted(expected.keys() | after.keys()):
        one, other = expected.get(key), after.get(key)
        if one is None or other is None or one.dtype != other.dtype or not torch.equal(one, other):
            deviations.append(f"{key} is not what was saved")
        elif not bool(other.isfinite().all()):
            deviations.append(f"{key} is not finite")
    if not deviations:
        say(f"proven    opened again: every tensor present, {'rounded once' if dtype else 'byte-equal'}")
    digests = {"base_digest": recorded.get("base_digest"), "other_base": recorded.get("other_base", "")}
    return {"dtype": dtype, "opened_by": openers[:1], **digests, "deviations": deviations}


def list_model_classes(base: Base | None, wanted: str | None) -> list[str]:
    """Return the classes of transformers that open the adapter: the one it is named for, and a wrapper's other one."""
    if base is None:
        if wanted:
            problem = "the names of its modules follow from the base model, which is not on this machine"
            raise UserError(problem, "--for", "name the folder that holds it: --base DIR")
        return []
    classes = [*([base.wrapper.architecture] if base.wrapper else []), base.family.causal_lm]
    if wanted and wanted not in classes:
        raise UserError(f"{base.name} is no {wanted}", "--for", f"known: {', '.join(classes)}")
    return sorted(classes, key=lambda name: name != wanted)


def _merge(
    source: AdapterSource,
    base_folder: str | None,
    to: Path,
    name: str,
    dtype: str | None,
    workers: int | None,
    say: Say,
    progress: Progress,
    *,
    allow_other_base: bool,
) -> dict[str, Any]:
    # 1. The adapter checked against the base, and every file of the result planned from headers.
    base = require_local_base(source, base_folder)
    deltas = read_deltas(source, base)
    plan = plan_merge(base, deltas, to, dtype or OWN)
    counts = ", ".join(f"{count} {how}" for how, count in Counter(entry.how for entry in plan.entries).items())
    if not any(bool(torch.any(deltas.factors(name).b)) for name in deltas.by_name):
        say("note      every lora_B is zero: the adapter was never trained, and the merged model is the base")
    say(f"base      {base.name}: {len(deltas.by_name)} parameters are adapted")
    quantization = read_recorded_base(source.folder).get("base_quantisation", {})
    if trained_on := describe_quantization(quantization):
        say(f"note      trained on the base in {trained_on}")
        say("note      merged into the published weights, which are nearer to the original")
        say(_compare_base_losses(source, base))
    digest = ""
    if read_recorded_base(source.folder):
        with progress("comparing", bytes_to_digest(base)) as advance:
            digest = digest_files(base, advance)
    where = "--base" if base_folder else str(source.folder / CONFIG)
    other_base = require_same_base(source.folder, base, digest, where, allow_other=allow_other_base, say=say)

    # 2. Write.
    claim_folder(source, base.path, to, MERGED, plan.size)
    say(f"writing   {plan.size / GIB:.2f} GiB in {len(plan.headers)} files: {counts}")
    if plan.dropped:
        say(f"dropped   {len(plan.dropped)} scales: the weights are 16-bit now, and scales mean nothing")
    if plan.left_out:
        say(f"left out  {', '.join(plan.left_out)}: they hold, or point to, weights without the adapter")
    with progress("merging", plan.size) as advance:
        write_merge(plan, base, deltas, to, advance, workers)
    out = None if plan.dtype == OWN else plan.dtype
    write_card(source, to, name, merged=True, dtype=out, other_base=other_base, trained_on=trained_on)

    # 3. Open it again and compare it with base and adapter.
    copied = sum(entry.out.end - entry.out.start for entry in plan.entries if entry.how == COPIED)
    with progress("proving", copied) as advance:
        proof = prove_files(base, deltas, plan, to, source.weights, advance)
    say(
        f"proven    {proof.tensors} tensors opened again; {proof.untouched} untouched are byte-equal "
        f"({proof.untouched_bytes / GIB:.2f} GiB); {proof.touched} touched computed again, {proof.elements:,} values"
    )
    if proof.kept is not None and proof.least_kept is not None:
        parameter, least = proof.least_kept
        say(f"kept      {proof.kept:.1%} of the adapter is in the rounded weights; least: {least:.1%} in {parameter}")
        if proof.kept < LOST:
            say("note      rounding took a part of the adapter: serve it unmerged, or merge with --dtype bf16")
    logits = {"skipped": "the files are wrong"} if proof.deviations else compare_logits(base, source, to)
    proof.logits = logits
    proof.deviations += [logits["deviation"]] if "deviation" in logits else []
    if "skipped" in logits:
        say(f"logits    not compared: {logits['skipped']}")
    else:
        say(
            f"logits    base + adapter to merged: KL {logits['kl']:.2e} nats a token (bound {logits['bound_kl']:.1e}; "
            f"the adapter itself {logits['adapter_kl']:.2e}), same top token {logits['same_top_token']:.1%}\n"
            f"          difference at most {logits['max_difference']:.3g}, of the median token "
            f"{logits['median_difference']:.3g} (bound on the {logits['judged']}: {logits['bound_difference']:.3g})"
        )
    digests = {"base_digest": digest or None, "other_base": other_base, "base_quantisation": quantization or None}
    return {"dtype": plan.dtype, **digests, **asdict(proof)}


def _compare_base_losses(source: AdapterSource, base: Base) -> str:
    """Return held-out losses on the base as it was trained on, and as it is published."""
    run, kinds = source.run_folder, published_dtype(base) or "bf16"
    found = read_json(run / BASES) if run else {}
    if not found:
        return f"hint      windlass best {run or 'RUN'} --base-dtype {kinds}: both bases' held-out losses"
    losses = (f"{kind.upper()} {one:.4f}, with the adapter {two:.4f}" for kind, (one, two) in found["losses"].items())
    return f"held out  loss of {found['rows']} rows, by base ({found['adapter']}): {'; '.join(losses)}"


def push_to_hub(folder: Path, repository: str, *, private: bool = True, say: Callable[[str], None] = print) -> str:
    """Upload the folder with the hub's own client and token; a new repository is private. Returns its address."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    where, again = f"--push {repository}", f"the export in {folder} is complete: push it again"
    api = HfApi()
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    try:
        address = str(api.create_repo(repository, private=private, exist_ok=True))
        say(f"pushing {size / 2**30:.2f} GiB to {address}")
        api.upload_folder(repo_id=repository, folder_path=folder)
    except HFValidationError as error:
        raise UserError(str(error).split("\n")[0], where, "write it as organisation/name") from None
    except LocalTokenNotFoundError:
        raise UserError("this machine has no token for the hub", where, "run: hf auth login") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        token = "; run `hf auth login` with a token that may write there" * (status in (401, 403))
        raise RunError(f"the hub answered {status}{token}", where, again) from None
    except (httpx2.TransportError, OfflineModeIsEnabled, OSError) as error:
        raise RunError(f"the hub can't be reached ({type(error).__name__})", where, again) from None
    return address
