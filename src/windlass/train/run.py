"""The training run, as every rank runs it: read `run` from top to bottom."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback

from windlass.data.prepare import Prepared, prepare
from windlass.errors import SAVED, UserError
from windlass.observe.meter import LLMStepProfiler
from windlass.observe.meter.page import Page
from windlass.observe.watch import hook as watch
from windlass.train import checkpoint as checkpoints
from windlass.train import folder as folders
from windlass.train import group, manifest
from windlass.train.liveness import Liveness
from windlass.train.load import load
from windlass.train.loop import Loop
from windlass.train.lora import attach
from windlass.train.order import Order, numbered
from windlass.train.parallel import assert_sharded, is_sharded, keep_out_of_ddp
from windlass.train.progress import Progress
from windlass.train.rank import Interruption, Place
from windlass.train.ranks import clear_accelerate
from windlass.train.saving import Saving
from windlass.train.screen import header, quiet
from windlass.train.settings import settings
from windlass.train.sync import Replicas

if TYPE_CHECKING:
    from rich.console import Console

    from windlass.plan import Plan
    from windlass.runfile import Model


def run(plan: Plan, here: Place, *, resume: bool = False, debug_freq: int | None = None) -> int:
    """One rank's part of the run. Returns the exit code: 0, or 75 when a signal stopped it and all is saved."""
    job, folder = plan.loaded.run, Path(plan.loaded.run.train.output_dir)

    # 1. Meet the other ranks; from here on only rank 0 speaks.
    console, interruption = quiet(here), Interruption()
    join(here, job.train.ddp_timeout, watch.environment(os.environ, job, folder))
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

    # 6. The loop: TRL's, with one all-reduce per step, checks of every step, and our checkpoints.
    here.phase("setting up the loop")
    page = Page(folder)  # report.html, made anew after every checkpoint
    meter = meter_of(plan, debug_freq)
    progress = Progress(here, console)
    saving = saving_of(plan, data, say=console.print, saved=page.start)
    loop = loop_of(plan, model, data, tokenizer, saving=saving, meter=meter, progress=progress, stop=interruption)

    # 7. Train, and be watched. The first steps prove that every part of the adapter lives.
    watchman = watch.Watchman(job, loop, note=here.note, say=console.print, ranks=here.world, report=page.finish)
    with watchman, folders.failing(folder), closing(saving), closing(progress), closing(meter):
        loop.train(resume_from_checkpoint=str(from_checkpoint) if from_checkpoint else None)
    if loop.stopped:
        return stopped(folder, loop, console)

    # 8. The adapter and its tokenizer, in the format that PEFT, vLLM and others open.
    here.phase("saving the adapter")
    load_best(plan, saving, model, console)
    save_final(folder / "final", model, tokenizer, console)
    folders.note(folder, state=manifest.FINISHED, steps=loop.state.global_step)
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


def meter_of(plan: Plan, debug_freq: int | None) -> LLMStepProfiler:
    """Measures every step; what costs a synchronisation, every `debug_freq` steps."""
    job = plan.loaded.run
    return LLMStepProfiler(
        job.train.logging_steps if debug_freq is None else debug_freq,
        seq_len=plan.batch.length,
        output_dir=job.train.output_dir,
        script_name="windlass train",
        flops_per_token=plan.cost.flops_per_token,
        recompute_flops_per_token=plan.cost.recompute_flops_per_token,
        report=False,  # the page is made by `run`, which knows of alarms and stops
        saves=False,  # written down by `Saving`
    )


def saving_of(plan: Plan, data: Prepared, *, say: Callable[[str], None], saved: Callable[[], None]) -> Saving:
    job, facts = plan.loaded.run, {**folders.facts(plan), "data": data.fingerprint}
    return Saving(Path(job.train.output_dir), job.train.save_total_limit, facts, say=say, saved=saved)


def loop_of(
    plan: Plan,
    model: PeftModel,
    data: Prepared,
    tokenizer: PreTrainedTokenizerBase,
    *,
    saving: Saving,
    meter: LLMStepProfiler,
    progress: Progress,
    stop: Interruption,
) -> Loop:
    """Everything above, handed to the loop."""
    job = plan.loaded.run
    replicas = Replicas(model)
    keep_out_of_ddp(model)
    loop = Loop(
        model=model,
        args=settings(plan, data.arguments, cpu=not torch.cuda.is_available()),
        train_dataset=numbered(data.train),
        eval_dataset=data.validation if job.train.eval_strategy != "no" else None,
        processing_class=tokenizer,
        callbacks=[saving, meter, progress],
        meter=meter,
        replicas=replicas,
        liveness=Liveness(model, replicas, job.train.output_dir),
        order=order_of(plan, data),
        saving=saving,
        interruption=stop,
        non_finite=job.watch.non_finite,
        rows_apart=job.masked,
        gather_once=is_sharded(plan.layout) and not plan.layout.reshard_after_forward,
    )
    loop.remove_callback(PrinterCallback)
    progress.loop = loop
    return loop


def order_of(plan: Plan, data: Prepared) -> Order | None:
    """Rows by seed and epoch alone; a stream has its own order."""
    if data.lengths is None:
        return None
    sequences, seed = plan.schedule.global_sequences, plan.loaded.run.train.order_seed
    return Order(lambda epoch: data.order(seed=seed, epoch=epoch, global_batch=sequences), len(data.lengths), sequences)


def stopped(folder: Path, loop: Loop, console: Console) -> int:
    folders.note(folder, state=manifest.STOPPED)
    console.print(f"stopped by a signal; step {loop.state.global_step} is saved; --resume continues from it")
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
