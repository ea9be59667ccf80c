"""The training run, as every rank runs it: read `run` from top to bottom."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from windlass.data.prepare import Prepared, prepare
from windlass.errors import SAVED, Problem, UserError
from windlass.observe.flops import Rates
from windlass.observe.recorder import Recorder
from windlass.observe.report.background import BackgroundReport
from windlass.observe.watch import patrol
from windlass.observe.watch.run import RunWatch
from windlass.train import checkpoint as checkpoints
from windlass.train import folder as folders
from windlass.train import group, manifest
from windlass.train.batches import Batches, Collate
from windlass.train.console import Progress, header, quiet
from windlass.train.liveness import Liveness
from windlass.train.load import load
from windlass.train.loop import Loop
from windlass.train.lora import attach
from windlass.train.loss import router_loss_weight
from windlass.train.parallel import assert_sharded, device_of_this_rank, is_sharded
from windlass.train.rank import Interruption, Place
from windlass.train.ranks import clear_accelerate
from windlass.train.saving import Saving
from windlass.train.sync import Replicas
from windlass.train.trackers import Trackers

if TYPE_CHECKING:
    from rich.console import Console

    from windlass.plan import Plan
    from windlass.runfile import Model


def run(plan: Plan, here: Place, *, resume: bool = False, debug_freq: int | None = None) -> int:
    """One rank's part of the run. Returns the exit code: 0, or 75 when a signal stopped it and all is saved."""
    job, folder = plan.loaded.run, Path(plan.loaded.run.train.output_dir)

    # 1. Meet the other ranks; from here on only rank 0 speaks.
    console, interruption = quiet(here), Interruption()
    join(here, job.train.ddp_timeout, patrol.environment(os.environ, job, folder))
    agree_on(plan)

    # 2. Take the run folder: a new one, or an unfinished one to go on with. A finished one is never touched.
    from_checkpoint = folders.take(folder, plan, resume=resume or job.train.resume == "auto")
    header(console, plan)

    # 3. Data, before the model: what is wrong with it shows in seconds and not after loading.
    here.phase("preparing the data")
    tokenizer = tokenizer_of(plan)
    data = data_of(plan, tokenizer, console)
    folders.require_same_data(from_checkpoint, data.fingerprint, plan)

    # 4. The base model: each rank reads its own shard, and proves against the files what it holds.
    here.phase("loading the model")
    model, certificate = load(plan.base, plan.layout, **precision(job.model))
    folders.write(folder, "load.json", asdict(certificate))

    # 5. The adapter: the plan's modules and counts, the same on every rank, or stop.
    here.phase("attaching the adapter")
    model = attach(model, job.lora, plan.adapter, job.train.seed, plan.expert_path)
    assert_sharded(model, plan.layout)

    # 6. The loop, and what it calls by name.
    here.phase("setting up the loop")
    report = BackgroundReport(folder)  # report.html, written again after every checkpoint
    loop = loop_of(plan, here, model, data, tokenizer, console, interruption, report, debug_freq)

    # 7. Train. The first steps prove that gradients reach every part of the adapter.
    with loop.watch, folders.failing(folder), contextlib.ExitStack() as stack:
        for part in (loop.saving, loop.progress, loop.trackers, loop.recorder):
            stack.callback(part.close)
        loop.run(from_checkpoint)
    if loop.stopped:
        return stopped(folder, loop, console)

    # 8. The adapter and its tokenizer, in the format that PEFT, vLLM and others open.
    here.phase("saving the adapter")
    load_best(plan, loop.saving, model, console)
    save_final(folder / "final", model, tokenizer, console)
    folders.note(folder, state=manifest.FINISHED, steps=loop.step)
    return 0


def join(here: Place, timeout_seconds: float, recorders: Mapping[str, str] = MappingProxyType({})) -> None:
    """The process group: NCCL between GPUs, gloo between CPUs and for what is said in Python objects."""
    clear_accelerate(os.environ)
    os.environ |= {"RANK": str(here.rank), "LOCAL_RANK": str(here.local_rank), "WORLD_SIZE": str(here.world)}
    os.environ |= recorders
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(own_gpu(here.local_rank, torch.cuda.device_count()))
    here.phase("waiting for the other ranks")
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=datetime.timedelta(seconds=timeout_seconds)
        )
    if gpu:
        seen = torch.cuda.get_device_properties(torch.cuda.current_device())
        each_its_own(group.gather(str(getattr(seen, "uuid", ""))))


def own_gpu(local_rank: int, seen: int) -> int:
    """A scheduler may show every rank its own GPU alone, as number 0; or every rank all of the node's."""
    if local_rank >= seen > 1:
        raise UserError(
            f"rank {local_rank} of this node has no GPU of its own: it sees {seen}",
            "cluster.gpus_per_node",
            "start as many ranks on a node as it has GPUs",
        )
    return local_rank % seen


def each_its_own(gpus: list[str]) -> None:
    """Ranks that share a GPU would each take it for theirs, with half of its memory, and NCCL refuses them."""
    for rank, one in enumerate(gpus):
        if one.strip("0-") and (first := gpus.index(one)) != rank:  # some drivers give zeros alone
            raise UserError(
                f"rank {first} and rank {rank} see the same GPU, {one}",
                "cluster.gpus_per_node",
                "start as many ranks on a node as it has GPUs, and let each see its own or all of them",
            )


def agree_on(plan: Plan) -> None:
    """Layout and batch follow from the run file and what a node is; unlike nodes may come to different ones.

    Everything that decides which collectives a rank takes part in: where ranks differ, they would wait for ever.
    """
    mine = {
        **{f"layout.{name}": value for name, value in asdict(replace(plan.layout, reason="")).items()},
        "train.per_device_train_batch_size": plan.batch.micro,
        "train.gradient_accumulation_steps": plan.batch.accumulation,
        "the path of experts' adapters": plan.expert_path,
    }
    plans = group.gather(mine)
    other = next((rank for rank, theirs in enumerate(plans) if theirs != plans[0]), None)
    if other is not None:
        one, two = plans[0], plans[other]
        differs = [f"{name} {one[name]} and {two[name]}" for name in mine if one[name] != two[name]]
        raise UserError(
            f"rank 0 and rank {other} plan different runs: {', '.join(differs)}",
            plan.loaded.where("cluster.gpu"),
            "the nodes are unlike: name the layout and the batch in the run file, so that none has to choose",
        )


def tokenizer_of(plan: Plan) -> PreTrainedTokenizerBase:
    job = plan.loaded.run
    tokenizer = AutoTokenizer.from_pretrained(plan.base.path, trust_remote_code=job.model.trust_remote_code)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def data_of(plan: Plan, tokenizer: PreTrainedTokenizerBase, console: Console) -> Prepared:
    """Tokenised once, audited, the audit written before it is judged."""
    job = plan.loaded.run
    return prepare(
        job,
        tokenizer,
        where=plan.loaded.where,
        vocabulary=plan.base.dims["vocab"],
        batch=plan.batch.micro,
        say=console.print,
        audited=lambda audit: folders.write(Path(job.train.output_dir), "data.json", audit),
    )


def precision(model: Model) -> dict[str, Any]:
    return {
        "dtype": getattr(torch, model.torch_dtype),
        "attn_implementation": model.attn_implementation or "sdpa",
    }


def loop_of(
    plan: Plan,
    here: Place,
    model: PeftModel,
    data: Prepared,
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
    interruption: Interruption,
    report: BackgroundReport,
    debug_freq: int | None,
) -> Loop:
    """Everything that the plan and the run file decide, put together."""
    job, train, folder = plan.loaded.run, plan.loaded.run.train, Path(plan.loaded.run.train.output_dir)
    replicas, device = Replicas(model), device_of_this_rank()
    report_to = train.report_to if here.rank == 0 else "none"
    rates = Rates(
        device,
        seq_len=plan.batch.length,
        flops_per_token=plan.cost.flops_per_token,
        recompute_flops_per_token=plan.cost.recompute_flops_per_token,
    )
    recorder = Recorder(
        folder,
        here.rank,
        here.world,
        device,
        sample_every=train.logging_steps if debug_freq is None else debug_freq,
        model=model,
        rates=rates,
        about={"script_name": "windlass train"},
    )

    def on_stall(problem: Problem) -> None:
        here.note("error", json.dumps({"problems": [problem.as_dict()], "code": 1, "time": 0}))
        here.note("code", "1")

    watch = RunWatch(
        folder,
        here.rank,
        here.world,
        job.watch,
        recorder,
        name=job.name or folder.resolve().name,
        network=str(job.cluster.network),
        stall_seconds=job.watch.stall_seconds or train.ddp_timeout / 2,
        say=console.print,
        on_stall=on_stall,
        report=report.finish,
    )
    facts = {**folders.facts(plan), "data": data.fingerprint}
    collator = data.collator(tokenizer.pad_token_id)
    collate = Collate(collator, mark_tokens=bool(router_loss_weight(model.get_base_model())))
    options: dict[str, Any] = {"workers": train.dataloader_num_workers, "pin": train.dataloader_pin_memory}
    validation = None
    if train.eval_strategy != "no" and data.validation is not None:
        rows, size = np.arange(len(data.validation)), train.per_device_eval_batch_size
        validation = Batches(
            data.validation, Collate(collator), size, order=lambda _: rows, round_rows=size * here.world, **options
        )
    seed, sequences = train.order_seed, plan.schedule.global_sequences
    # By seed and epoch alone: the same rows on any number of ranks. A stream has its own order.
    order = None if data.lengths is None else lambda epoch: data.order(seed=seed, epoch=epoch, global_batch=sequences)
    return Loop(
        job,
        model,
        Batches(data.train, collate, plan.batch.micro, order=order, round_rows=sequences, **options),
        validation,
        accumulation=plan.batch.accumulation,
        checkpointing=train.gradient_checkpointing or plan.layout.activation_checkpointing,
        gather_once=is_sharded(plan.layout) and not plan.layout.reshard_after_forward,
        replicas=replicas,
        liveness=Liveness(model, replicas, train.output_dir),
        interruption=interruption,
        recorder=recorder,
        watch=watch,
        saving=Saving(folder, train.save_total_limit, facts, say=console.print, saved=report.start),
        progress=Progress(here, console, train.logging_steps, lambda: recorder.counters.peak_gib),
        trackers=Trackers(report_to, folder, train.run_name, folders.resolved(plan)),
    )


def stopped(folder: Path, loop: Loop, console: Console) -> int:
    folders.note(folder, state=manifest.STOPPED)
    console.print(f"stopped by a signal; step {loop.step} is saved; --resume continues from it")
    group.barrier()  # launchers take the first rank's end for a failure, and soon kill those still writing
    return SAVED


def load_best(plan: Plan, saving: Saving, model: PeftModel, console: Console) -> None:
    """Where train.load_best_model_at_end asks for it, in place of the last step's."""
    if plan.loaded.run.train.load_best_model_at_end and (best := saving.best()):
        checkpoints.load_adapter(model, best)
        console.print(f"the adapter is that of {best.name}, which evaluated best")


def save_final(folder: Path, model: PeftModel, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    if group.rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    checkpoints.save_adapter(model, partial)
    if group.rank() == 0:
        tokenizer.save_pretrained(partial)
        checkpoints.appear(partial, folder)
    group.barrier()
    console.print(f"adapter written to {folder}")
