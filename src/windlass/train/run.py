"""A training run as every rank executes it: read `run` from top to bottom."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from windlass.data.packing import Order
from windlass.data.prepare import PreparedData, open_tokenizer, prepare_data
from windlass.errors import SAVED, Problem, UserError
from windlass.files import WriteGuard, commit_dir, write_json
from windlass.hardware import read_gpus
from windlass.observe.background import BackgroundReport
from windlass.observe.flops import Rates
from windlass.observe.recorder import Recorder
from windlass.observe.watch.monitor import make_environment
from windlass.observe.watch.run import RunWatch
from windlass.plan import Plan
from windlass.ranks import collectives as group
from windlass.ranks.rank import Rank, StopSignal
from windlass.ranks.supervisor import remove_accelerate_settings, set_allocator
from windlass.run_folder import (
    BASE_MODEL,
    CHECKPOINTS,
    DATA,
    FINAL,
    FINISHED,
    LIBRARIES,
    LOAD,
    MANIFEST,
    STOPPED,
    read_versions,
    update_manifest,
)
from windlass.train.batches import Batches, Collate, RunLength
from windlass.train.checkpoint.folder import find_intact_best
from windlass.train.checkpoint.resume import (
    claim_run_folder,
    describe_run,
    fingerprint_base,
    record_failure,
    require_base_of,
    require_same_data,
    resolve_run,
)
from windlass.train.checkpoint.saver import Saver
from windlass.train.checkpoint.snapshot import load_adapter, save_adapter
from windlass.train.console import Progress, make_console, print_header
from windlass.train.evaluate import Evaluator
from windlass.train.load import load_base
from windlass.train.loop import Loop
from windlass.train.lora import DTYPES, attach_adapter
from windlass.train.loss import router_loss_weight
from windlass.train.parallel import assert_sharded, get_device
from windlass.train.samples import Samples, read_prompts
from windlass.train.step import TrainedModel, Updater
from windlass.train.trackers import Trackers
from windlass.weights.same_base import describe_base, describe_files, describe_quantization, read_forward_config

# Nodes differ: one may have the weights in its page cache, another read them from slow storage.
LOADING_SECONDS = 2 * 3600


@dataclass(frozen=True)
class Session:
    """What a rank has from its start to its end."""

    here: Rank
    console: Console  # prints on rank 0 only
    stop_signal: StopSignal
    report: BackgroundReport  # report.html, written again after every checkpoint


def train_rank(
    plan: Plan, here: Rank, *, resume: bool = False, debug_freq: int | None = None, allow_other_base: bool = False
) -> int:
    """Do one rank's part of the run. Returns 0, or 75 if a signal stopped it and everything is saved."""
    job, folder = plan.run, plan.folder

    # 1. Connect to the other ranks; only rank 0 prints. All must be about to run the same.
    console = make_console(here)
    session = Session(here, console, StopSignal(), BackgroundReport(folder))
    unwritten = WriteGuard(console.print)
    require_device(plan)
    create_process_group(here, job.train.ddp_timeout, make_environment(os.environ, job, folder))
    group.check_links(get_device())
    group.set_timeout(max(LOADING_SECONDS, job.train.ddp_timeout))
    identity = fingerprint_base(plan.base)
    require_same_plan(plan, identity)

    with contextlib.ExitStack() as held:  # the lock of the run folder
        # 2. Claim the run folder: a new one, or an unfinished one to continue. A finished one is never touched.
        resume = resume or job.train.resume == "auto"
        from_checkpoint = group.run_on_rank_0(
            lambda: claim_run_folder(plan, identity, unwritten, held, resume=resume, allow_other_base=allow_other_base)
        )
        print_header(console, plan, os.environ)

        with record_failure(folder):
            # 3. Data, before the model: what is wrong with it shows in seconds and not after loading.
            here.phase("preparing the data")
            tokenizer = open_base_tokenizer(plan)
            data = prepare_on_all_ranks(plan, tokenizer, console, unwritten)
            for note in data.audit["notes"]:
                console.print(f"warning: data: {note}", style="yellow")
            require_same_data(from_checkpoint, data.fingerprint, plan)

            # 4. The base model: each rank reads its own shard, and proves it against the files. An adapter that is
            # trained on must have been trained on the same weights.
            here.phase("loading the model")
            model, certificate = load_base(plan.base, plan.layout, **describe_precision(plan))
            if here.rank == 0:
                with unwritten(folder / LOAD):
                    write_json(folder / LOAD, certificate)
            group.set_timeout(job.train.ddp_timeout)
            digest = certificate["base_digest"]
            other = require_base_of(from_checkpoint, plan, digest, allow_other=allow_other_base, say=console.print)
            base = describe_base(plan.base, digest, other, certificate["quantisation"])
            if line := describe_quantization(certificate["quantisation"] or {}):
                console.print(f"base      {line}; the files hold other weights than the adapter is trained on")
            if here.rank == 0:
                with unwritten(folder / MANIFEST):
                    update_manifest(folder, **base)

            # 5. The adapter: the plan's modules and counts, the same on every rank, or stop.
            here.phase("attaching the adapter")
            model = attach_adapter(model, job.lora, plan.adapter, job.train.seed)
            assert_sharded(model, plan.layout)

            # 6. The loop, and what it calls by name.
            here.phase("setting up the loop")
            facts = {**describe_run(plan, identity), **base, "data": data.fingerprint}
            loop = make_loop(plan, session, model, data, tokenizer, facts=facts, debug_freq=debug_freq)

        # 7. Train. The first steps prove that gradients reach every part of the adapter.
        with loop.watch, record_failure(folder), contextlib.ExitStack() as stack:
            for part in (loop.saver, loop.progress, loop.trackers, loop.recorder):
                stack.callback(part.close)
            loop.run(from_checkpoint)
            if not loop.stopped:
                loop.watch.finish()
                if from_checkpoint is None and not loop.updater.liveness.is_done:
                    what = f"too few steps ({loop.step}) to see all of the adapter train: parts may be as they began"
                    console.print(f"warning: {what}; set a larger train.max_steps", style="yellow")
        if loop.stopped:
            if here.rank == 0:
                update_manifest(folder, state=STOPPED)
            console.print(f"stopped by a signal; step {loop.step} is saved; --resume continues from it")
            group.barrier()  # launchers take the first rank's exit for a failure and soon kill those still writing
            return SAVED

        # 8. The adapter and its tokenizer, in the format that PEFT, vLLM and others open.
        here.phase("saving the adapter")
        with record_failure(folder):
            save_final(plan, model, tokenizer, base, console)
        if here.rank == 0:
            update_manifest(folder, state=FINISHED, steps=loop.step)
        console.print(f"adapter written to {folder / FINAL}")
        return 0


def save_final(
    plan: Plan, model: PeftModel, tokenizer: PreTrainedTokenizerBase, base: dict[str, Any], console: Console
) -> None:
    """Save the final adapter into a folder that exists in full or not at all. A collective; rank 0 writes."""
    job, folder = plan.run, plan.folder
    wanted = job.train.load_best_model_at_end
    if wanted and (best := group.run_on_rank_0(lambda: find_intact_best(folder / CHECKPOINTS))):
        load_adapter(model, best)
        console.print(f"the adapter is that of {best.name}, which evaluated best")
    final, partial = folder / FINAL, folder / f".{FINAL}.partial"
    try:
        if group.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        save_adapter(model, partial)
        if group.get_rank() == 0:
            try:
                tokenizer.save_pretrained(partial)
            except Exception as error:  # a library error, such as tokenizers' own for a full disk
                if number := re.search(r"os error (\d+)", str(error)):
                    raise OSError(int(number[1]), os.strerror(int(number[1])), str(final / "tokenizer.json")) from None
                raise
            write_json(partial / BASE_MODEL, base | describe_files(partial))
            commit_dir(partial, final)
    except OSError as error:
        error.filename = str(error.filename or final).replace(str(partial), str(final))
        shutil.rmtree(partial, ignore_errors=True)
        raise


# --- 1. connect, agree ---


def require_device(plan: Plan) -> None:
    """Refuse to train on the CPU what was planned for GPUs: it would take weeks without a message."""
    if plan.machine.gpu.name != "cpu" and not torch.cuda.is_available():
        raise UserError(
            f"the run is planned for {plan.machine.gpu.name}, and torch {torch.__version__} finds no usable GPU "
            f"(driver {(found := read_gpus(health=False)).driver or found.error})",
            plan.where("cluster.gpu"),
            "see `windlass check RUN --here`; to train on the CPU set cluster.gpu: cpu",
        )


def create_process_group(
    here: Rank, timeout_seconds: float, recorders: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Create the process group: NCCL between GPUs, gloo between CPUs and for Python objects."""
    remove_accelerate_settings(os.environ)
    os.environ |= {"RANK": str(here.rank), "LOCAL_RANK": str(here.local_rank), "WORLD_SIZE": str(here.world)}
    os.environ |= recorders
    set_allocator(os.environ)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(index := choose_gpu(here.local_rank, torch.cuda.device_count()))
        os.environ["LOCAL_RANK"] = str(index)  # transformers uses this GPU index when it shards
    here.phase("waiting for the other ranks")
    if not dist.is_initialized():
        if here.world > 1 and not os.environ.get("MASTER_ADDR"):
            what = f"{here.world} ranks, and MASTER_ADDR is not set: they can't find each other"
            raise UserError(what, "the environment", "set it to rank 0's host, on all ranks; torchrun does")
        os.environ.setdefault("MASTER_PORT", "29500")
        connected: Future[None] = Future()

        def connect() -> None:
            try:
                backend, timeout = "cpu:gloo,cuda:nccl" if gpu else "gloo", timedelta(seconds=timeout_seconds)
                connected.set_result(dist.init_process_group(backend, timeout=timeout))
            except BaseException as error:
                connected.set_exception(error)

        # Connecting waits in C++: a thread lets Python handle signals meanwhile.
        threading.Thread(target=connect, name="windlass connect", daemon=True).start()
        connected.result()
    if gpu:
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        require_own_gpus(group.all_gather(str(getattr(device, "uuid", ""))))


def choose_gpu(local_rank: int, visible: int) -> int:
    """Return this rank's GPU: schedulers show a rank either its own GPU, as number 0, or all of the node's."""
    if local_rank >= visible > 1:
        raise UserError(
            f"rank {local_rank} of this node has no GPU of its own: it sees {visible}",
            "cluster.gpus_per_node",
            "start as many ranks on a node as it has GPUs",
        )
    return local_rank % visible


def require_own_gpus(gpus: list[str]) -> None:
    """Refuse ranks that share a GPU: each would plan with all of its memory, and NCCL refuses them."""
    for rank, one in enumerate(gpus):
        if one.strip("0-") and (first := gpus.index(one)) != rank:  # some drivers report only zeros
            raise UserError(
                f"rank {first} and rank {rank} see the same GPU, {one}",
                "cluster.gpus_per_node",
                "start as many ranks on a node as it has GPUs, and let each see its own or all of them",
            )


def require_same_plan(plan: Plan, identity: str) -> None:
    """Refuse ranks whose plans, run files, adapters or weights differ.

    Layout and batch follow from the run file and from the node, so different nodes may get different ones. They decide
    which collectives a rank takes part in: ranks that differ would wait for ever. With other differences, ranks would
    train together on something that nobody requested.
    """
    run = plan.run.model_dump(mode="json")
    of_node = {
        **{f"layout.{name}": value for name, value in asdict(replace(plan.layout, reason="")).items()},
        "train.per_device_train_batch_size": plan.batch.micro,
        "train.gradient_accumulation_steps": plan.batch.accumulation,
    }
    of_files = {
        f"{name}.{key}": run[name][key] for name in ("model", "lora", "data", "train", "watch") for key in run[name]
    }
    libraries = {f"{name}'s version": one for name, one in read_versions(LIBRARIES).items() if name != "python"}
    config = {f"config.json's {key}": value for key, value in read_forward_config(plan.base).items()}
    plans = group.all_gather({**of_files, **of_node, "the base model's fingerprint": identity} | config | libraries)
    if differing := find_differences(plans):
        differs = "; ".join(f"{name} is {values}" for name, values in differing.items())
        hint = "the nodes differ: set the layout and the batch in the run file, so that the plan has nothing to choose"
        if not differing.keys() <= of_node.keys():
            hint = "start all ranks with the same run file, and give all nodes the same copy of the base model"
        if differing.keys() <= libraries.keys():
            hint = "use one image, or one environment, on all nodes"
        raise UserError(f"the ranks plan different runs: {differs}", plan.where("cluster.gpu"), hint)


def find_differences(plans: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what differs between ranks, and who has what: `32 on rank 1, 8 on the others`."""
    differing = {}
    for name in dict.fromkeys(name for plan in plans for name in plan):
        ranks_of: dict[str, list[str]] = {}
        for rank, plan in enumerate(plans):
            ranks_of.setdefault(str(plan.get(name)), []).append(str(rank))
        usual = max(ranks_of, key=lambda value: len(ranks_of[value]))
        if len(ranks_of) > 1:
            odd = [
                f"{value} on rank{'s' * (len(ranks) > 1)} {group.list_first(ranks, ', ')}"
                for value, ranks in ranks_of.items()
                if value != usual
            ]
            alone = len(ranks_of[usual]) == 1
            differing[name] = ", ".join([*odd, f"{usual} on {f'rank {ranks_of[usual][0]}' if alone else 'the others'}"])
    return differing


# --- 3. to 8. ---


def open_base_tokenizer(plan: Plan) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = open_tokenizer(plan.base, plan.loaded)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def prepare_on_all_ranks(
    plan: Plan, tokenizer: PreTrainedTokenizerBase, console: Console, unwritten: WriteGuard
) -> PreparedData:
    """Tokenize once and write the audit before it is judged; check that all ranks have the same rows."""
    job = plan.run

    def write_audit(audit: dict[str, Any]) -> None:
        if group.get_rank() == 0:
            with unwritten(path := Path(job.train.output_dir) / DATA):
                write_json(path, audit)

    data = prepare_data(
        job,
        tokenizer,
        where=plan.where,
        vocabulary=plan.base.dims["vocab"],
        batch=plan.batch.micro,
        say=console.print,
        audited=write_audit,
    )
    if differing := find_differences([{"data": one} for one in group.all_gather(data.fingerprint)]):
        raise UserError(
            f"the ranks have different data, though the run file names the same: fingerprint {differing['data']}",
            plan.where("data.dataset_name_or_path"),
            "give all nodes the same files and the same tokenizer",
        )
    return data


def describe_precision(plan: Plan) -> dict[str, Any]:
    model, trained = plan.run.model, DTYPES[plan.run.lora.dtype]
    return {
        "dtype": getattr(torch, model.torch_dtype),
        "attn_implementation": model.attn_implementation or plan.base.family.usual_attention,
        "dtypes": dict.fromkeys(plan.adapter.in_full, trained),
    }


def make_loop(
    plan: Plan,
    session: Session,
    model: PeftModel,
    data: PreparedData,
    tokenizer: PreTrainedTokenizerBase,
    *,
    facts: dict[str, Any],
    debug_freq: int | None = None,
) -> Loop:
    """Assemble the loop from the plan and the run file. facts: recorded in every checkpoint."""
    train = plan.run.train
    here = session.here
    console = session.console
    recorder = make_recorder(plan, here, model, debug_freq)
    watch = RunWatch(
        plan.run,
        recorder,
        vocabulary=plan.base.dims["vocab"],
        say=console.print,
        report=session.report.finish,
        on_stall=partial(report_stall, here),
    )
    progress = Progress(here, console, train.logging_steps, lambda: recorder.counters.peak_gib)
    weighs_router = bool(router_loss_weight(model.get_base_model(), train.router_aux_loss_coef))
    batches = make_batches(plan, data, tokenizer.pad_token_id, mark_tokens=weighs_router)
    length = RunLength.of(train, batches, plan.batch.accumulation)
    updater = Updater(model, train, length.total)
    trained = TrainedModel(plan, model, batches.names, recorder.now)
    evaluator = None
    if train.eval_strategy != "no" and data.validation is not None:
        validation = make_validation_batches(plan, data, tokenizer.pad_token_id)
        evaluator = Evaluator(validation, trained, session.stop_signal, recorder, progress)
        if train.sample is not None:
            evaluator.samples = Samples(
                read_prompts(train.sample, tokenizer, data.validation, plan.run.data.max_length, plan.where),
                train.sample,
                tokenizer,
                plan.run.data.max_length,
                train.per_device_eval_batch_size,
                trained,
                session.stop_signal,
                recorder,
                progress,
            )
    return Loop(
        plan,
        trained,
        updater,
        batches,
        length,
        evaluator,
        session.stop_signal,
        recorder,
        watch,
        Saver(
            plan.folder,
            train.save_total_limit,
            facts,
            say=console.print,
            saved=session.report.start,
            unwritten=recorder.unwritten,
        ),
        progress,
        Trackers(
            train.report_to if here.rank == 0 else "none",
            plan.folder,
            train.run_name,
            resolve_run(plan),
            recorder.unwritten,
        ),
    )


def report_stall(here: Rank, problem: Problem) -> None:
    """Report a stall as the error of this rank, which ends without returning."""
    here.report("error", json.dumps({"problems": [problem.as_dict()], "code": 1, "time": 0}))
    here.report("code", "1")


def make_recorder(plan: Plan, here: Rank, model: PeftModel, debug_freq: int | None) -> Recorder:
    """Create the recorder of steps. debug_freq: from the command line, how often it samples every counter."""
    device = get_device()
    rates = Rates(
        device,
        seq_len=plan.batch.length,
        flops_per_token=plan.cost.flops_per_token,
        recompute_flops_per_token=plan.cost.recompute_flops_per_token,
    )
    return Recorder(
        plan.folder,
        here.rank,
        here.world,
        device,
        sample_every=plan.run.train.logging_steps if debug_freq is None else debug_freq,
        model=model,
        rates=rates,
        about={"script_name": "windlass train"},
    )


def make_batches(plan: Plan, data: PreparedData, pad_token_id: int, *, mark_tokens: bool) -> Batches:
    """Return the micro-batches to train on. Their order follows from seed and epoch alone: equal on any number of
    ranks. A stream has its own order."""
    train = plan.run.train
    sequences = plan.schedule.global_sequences

    def order(epoch: int) -> Order:
        return data.order(seed=train.order_seed, epoch=epoch, global_batch=sequences)

    return Batches(
        data.train,
        Collate(data.collator(pad_token_id, on_cpu=get_device().type == "cpu"), mark_tokens=mark_tokens),
        plan.batch.micro,
        order=None if data.lengths is None else order,
        round_rows=sequences,
        workers=train.dataloader_num_workers,
        pin=train.dataloader_pin_memory,
        names=data.sources,
    )


def make_validation_batches(plan: Plan, data: PreparedData, pad_token_id: int) -> Batches:
    """Return the batches to evaluate on: every validation row, in its order."""
    assert data.validation is not None
    train = plan.run.train
    rows = np.arange(len(data.validation))
    return Batches(
        data.validation,
        Collate(data.collator(pad_token_id, on_cpu=get_device().type == "cpu")),
        train.per_device_eval_batch_size,
        order=lambda _: rows,
        round_rows=train.per_device_eval_batch_size * group.get_world_size(),
        workers=train.dataloader_num_workers,
        pin=train.dataloader_pin_memory,
        names=data.evaluated,
    )
