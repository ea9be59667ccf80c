"""A training run as every rank executes it: read `train_run` from top to bottom."""

import contextlib
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass import run_folder
from windlass.data.inputs import hash_text
from windlass.data.prepare import PreparedData, prepare_data
from windlass.data.trained_template import set_template
from windlass.errors import SAVED, Problem, UserError
from windlass.files import WriteGuard, commit_dir, write_json
from windlass.observe.background import BackgroundReport
from windlass.observe.flops import Flops, RateMeter
from windlass.observe.recorder import Recorder
from windlass.observe.watch.monitor import make_environment
from windlass.observe.watch.run import RunWatch
from windlass.plan import Plan
from windlass.ranks import collectives
from windlass.ranks.rank import Rank, StopSignal
from windlass.run_folder import (
    BASE_FIGURES,
    BASE_MODEL,
    CHECKPOINTS,
    DATA,
    FINAL,
    FINISHED,
    LOAD,
    MANIFEST,
    STOPPED,
    describe_files,
    update_manifest,
)
from windlass.train.base_alone import BaseAlone, BaseFigures, describe_base_forward
from windlass.train.batches import (
    RunLength,
    count_steps,
    make_batches,
    make_kept_batches,
    make_validation_batches,
    require_shared_memory,
)
from windlass.train.checkpoint.folder import find_intact_best
from windlass.train.checkpoint.resume import (
    begin_run,
    claim_run_folder,
    describe_run,
    explain_other_length,
    fingerprint_base,
    record_failure,
    require_base_of,
    require_same_data,
    require_steps_left,
    resolve_run,
    warn_of_unshared,
)
from windlass.train.checkpoint.saver import Saver
from windlass.train.checkpoint.snapshot import find_system_error, load_adapter, save_adapter
from windlass.train.connect import create_process_group, find_differences, require_device, require_same_plan
from windlass.train.console import Progress, make_console, print_header
from windlass.train.evaluate import Evaluator
from windlass.train.fsdp import get_device
from windlass.train.load import describe_precision, load_base, open_base_tokenizer
from windlass.train.long_rows import RowGroup
from windlass.train.loop import Loop
from windlass.train.lora import attach_adapter
from windlass.train.loss import router_loss_weight
from windlass.train.model import TrainedModel
from windlass.train.parallel import assert_sharded
from windlass.train.probe import write_probe
from windlass.train.reference import attach_reference
from windlass.train.samples import Samples, read_prompts
from windlass.train.session import PAUSED, Options, Session
from windlass.train.trackers import Trackers
from windlass.train.updater import Updater
from windlass.weights.same_base import CHAT_TEMPLATE, describe_base, describe_quantization

# Nodes differ: one may have the weights in its page cache, another read them from slow storage.
LOADING_SECONDS = 2 * 3600


def train_rank(
    plan: Plan,
    here: Rank,
    *,
    resume: bool = False,
    debug_freq: int | None = None,
    allow_other_base: bool = False,
) -> int:
    """Do one rank's part of the run. Returns 0, or 75 if a signal stopped it and everything is saved."""
    # 1. Connect to the other ranks. All must be about to run the same.
    session = connect(plan, here, resume=resume, debug_freq=debug_freq, allow_other_base=allow_other_base)
    require_same_plan(plan, session.identity)
    return train_run(plan, session)


def connect(
    plan: Plan, here: Rank, *, resume: bool = False, debug_freq: int | None = None, allow_other_base: bool = False
) -> Session:
    """Connect to the other ranks. Only rank 0 prints."""
    run = plan.run
    console = make_console(here)
    stop_signal = StopSignal()
    report = BackgroundReport(plan.folder)
    unwritten = WriteGuard(console.print)
    require_device(plan)
    create_process_group(here, run.train.ddp_timeout, make_environment(os.environ, run, plan.folder))
    collectives.check_links(get_device())
    collectives.set_timeout(max(LOADING_SECONDS, run.train.ddp_timeout))
    options = Options(resume or run.train.resume == "auto", debug_freq, allow_other_base)
    return Session(here, console, stop_signal, report, unwritten, fingerprint_base(plan.base), options)


def train_run(plan: Plan, session: Session) -> int:
    """Train a run on the base of this session, which other runs may share."""
    run = plan.run
    folder = plan.folder
    here = session.here
    console = session.console
    unwritten = session.unwritten
    allow_other_base = session.options.allow_other_base
    collectives.set_timeout(max(LOADING_SECONDS, run.train.ddp_timeout))

    with contextlib.ExitStack() as held:  # the lock of the run folder
        # 2. Claim the run folder: a new one, or an unfinished one to continue. A finished one is never touched.
        begin = partial(claim_run_folder, resume=session.options.resume, allow_other_base=allow_other_base)
        from_checkpoint = collectives.run_on_rank_0(lambda: begin(plan, session.identity, unwritten, held))
        print_header(console, plan, os.environ)
        if session.around is None:
            warn_of_unshared(plan, console)

        with record_failure(folder):
            # 3. Data, before the model: what is wrong with it shows in seconds and not after loading.
            here.phase("preparing the data")
            tokenizer = open_base_tokenizer(plan)
            data = prepare_on_all_ranks(plan, tokenizer, session, writes=from_checkpoint is None)
            for fact in data.audit["facts"]:
                console.print(f"data: {fact}")
            for note in data.audit["notes"]:
                console.print(f"warning: data: {note}", style="yellow")
            fingerprints = {"data": data.fingerprint, "inputs": data.inputs}
            require_same_data(from_checkpoint, fingerprints, plan, data.template)
            if from_checkpoint is not None:
                total = count_steps(plan, data, tokenizer.pad_token_id).total
                require_steps_left(from_checkpoint, total, plan)
                other_length = explain_other_length(from_checkpoint, total)
                if other_length:
                    console.print(other_length, style="yellow")
            set_template(tokenizer, data.template)

            # 4. The base model, sharded as the layout says: each rank reads its part, and proves it against the files,
            # and that an adapter was trained on the same weights. What a resumed run has recorded stays until then.
            model, certificate = load_model(plan, session, tokenizer)
            for note in certificate["notes"]:
                console.print(f"warning: base: {note}", style="yellow")
            collectives.set_timeout(run.train.ddp_timeout)
            digest = certificate["base_digest"]
            other = require_base_of(from_checkpoint, plan, digest, allow_other=allow_other_base, say=console.print)
            base = describe_base(plan.base, digest, other, certificate["quantisation"])
            if data.template:
                base |= {CHAT_TEMPLATE: dict(data.template)}
            line = describe_quantization(certificate["quantisation"] or {})
            if line:
                console.print(f"base      {line}; the files hold other weights than the adapter is trained on")
            if from_checkpoint is not None:
                begun = {**describe_run(plan, session.identity), **base}
                collectives.run_on_rank_0(partial(begin_run, plan, begun, from_checkpoint, unwritten))
                write_on_rank_0(session, folder / DATA, data.audit)
            write_on_rank_0(session, folder / LOAD, certificate)
            if here.rank == 0:
                with unwritten(folder / MANIFEST):
                    update_manifest(folder, **base)

            # 5. The adapter: the plan's modules and counts, the same on every rank, or stop.
            here.phase("attaching the adapter")
            # A run that began with an adapter continues from its own checkpoint, which has all of it.
            given = {"adapter": str(from_checkpoint)} if from_checkpoint and run.lora.adapter else {}
            trained = (*plan.adapter.in_full, *plan.adapter.biases) if run.train.evaluation != "no" else ()
            base_alone = BaseAlone(model, trained)
            model = attach_adapter(model, run.lora.model_copy(update=given), plan.adapter, run.train.seed)
            assert_sharded(model, plan.layout)

            # 6. Batches, optimizer, evaluation, checkpoints, and the loop that calls them.
            here.phase("setting up the loop")
            facts = {**describe_run(plan, session.identity), **base, **fingerprints}
            loop = make_loop(plan, session, model, data, tokenizer, base_alone, facts=facts)
            session.base.undo.callback(loop.model.patches.undo)
            if run.train.compile:
                session.base.undo.callback(torch.compiler.reset)  # the next run compiles as it would alone

        # 7. Train. The first steps prove that gradients reach every part of the adapter.
        with record_failure(folder):
            collectives.run_on_rank_0(loop.watch.serve)  # its port may be taken
        with loop.watch, record_failure(folder), contextlib.ExitStack() as stack:
            for part in (loop.saver, loop.progress, loop.trackers, loop.recorder):
                stack.callback(part.close)
            if run.objective.has_reference:
                here.phase("computing the reference")
                validation = {"validation": loop.evaluator.batches} if loop.evaluator else {}
                loop.stopped = not attach_reference(
                    plan,
                    loop.model,
                    {"train": loop.batches, **validation},
                    facts,
                    session.stop_signal,
                    resumed=from_checkpoint,
                    allow_other_base=allow_other_base,
                    say=console.print,
                )
            if not loop.stopped:
                loop.run(from_checkpoint)
            if not loop.stopped:
                loop.watch.finish()
                if from_checkpoint is None and not loop.updater.liveness.is_done:
                    warn_of_few_steps(loop, console)
            record_stop(loop, session)
        if loop.stopped or loop.paused:
            collectives.barrier()  # launchers take the first rank's exit for a failure and kill those still writing
            return SAVED if loop.stopped else PAUSED

        # 8. The adapter and its tokenizer, in the format that PEFT, vLLM and others open.
        here.phase("saving the adapter")
        with record_failure(folder):
            save_final(plan, model, tokenizer, base, console)
        if here.rank == 0:
            update_manifest(folder, state=FINISHED, steps=loop.step)
        console.print(f"adapter written to {folder / FINAL}")

        # 9. What a server's answers are compared with, if a machine that exports may not hold the model.
        if plan.layout.is_sharded:
            here.phase("computing the probe")
            write_probe(plan, loop.model, data, tokenizer, console.print)
        return 0


def warn_of_few_steps(loop: Loop, console: Console) -> None:
    few = f"too few steps ({loop.step}) to see all of the adapter train: parts may be as they began"
    console.print(f"warning: {few}; set a larger train.max_steps", style="yellow")


def record_stop(loop: Loop, session: Session) -> None:
    """Record why a run has not come to its end, before trackers and the report: a stopped job may be killed by then."""
    folder = loop.plan.folder
    if collectives.get_rank() == 0 and (loop.stopped or loop.paused):
        update_manifest(folder, state=STOPPED if loop.stopped else run_folder.PAUSED.format(loop.step))
        if loop.stopped and session.around:
            update_manifest(session.around, state=STOPPED)
    if loop.stopped:
        saved = f"step {loop.step}" if loop.step else "what there is of the reference"
        session.console.print(f"stopped by a signal; {saved} is saved; --resume continues from it")


def save_final(
    plan: Plan, model: PeftModel, tokenizer: PreTrainedTokenizerBase, base: dict[str, Any], console: Console
) -> None:
    """Save the final adapter into a folder that exists in full or not at all. A collective; rank 0 writes."""
    if plan.run.train.load_best_model_at_end:
        best = collectives.run_on_rank_0(lambda: find_intact_best(plan.folder / CHECKPOINTS))
        if best is not None:
            load_adapter(model, best)
            console.print(f"the adapter is that of {best.name}, which evaluated best")
    final = plan.folder / FINAL
    unfinished = plan.folder / f".{FINAL}.partial"
    try:
        if collectives.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        save_adapter(model, unfinished)
        if collectives.get_rank() == 0:
            try:
                tokenizer.save_pretrained(unfinished)
            except Exception as error:  # tokenizers has one of its own for a full disk
                system_error = find_system_error(error, final / "tokenizer.json")
                if system_error is None:
                    raise
                raise system_error from None
            write_json(unfinished / BASE_MODEL, base | describe_files(unfinished))
            commit_dir(unfinished, final)
    except OSError as error:
        error.filename = str(error.filename or final).replace(str(unfinished), str(final))
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


# --- what the steps call ---


def load_model(
    plan: Plan, session: Session, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the base model and its certificate; loaded once for all runs of the session."""
    session.here.phase("loading the model")
    load = partial(load_base, plan.base, plan.layout, **describe_precision(plan), tokens=len(tokenizer))
    return session.base.get(load)


def write_on_rank_0(session: Session, path: Path, value: dict[str, Any]) -> None:
    if session.here.rank == 0:
        with session.unwritten(path):
            write_json(path, value)


def prepare_on_all_ranks(
    plan: Plan, tokenizer: PreTrainedTokenizerBase, session: Session, *, writes: bool = False
) -> PreparedData:
    """Tokenize once; check that all ranks have the same rows. `writes`: the audit, before it is judged."""
    data = prepare_data(
        plan.run,
        tokenizer,
        cache=session.around and session.around / "tokens",
        where=plan.where,
        vocabulary=plan.base.dims["vocab"],
        batch=plan.batch.micro,
        say=session.console.print,
        audited=partial(write_on_rank_0, session, plan.folder / DATA) if writes else None,
    )
    differing = find_differences(collectives.all_gather({"inputs": data.inputs, "tokens": data.fingerprint}))
    if "tokens" in differing:
        code = "data-differs"
        problem = f"the ranks have different data, though the run file names the same: {differing['tokens']}"
        hint = "give all nodes the same files and the same tokenizer"
        if "inputs" not in differing:
            code = "tokens-differ"
            problem = f"the ranks make different tokens of the same files: {differing['tokens']}"
            hint = "a chat template that writes the date needs the same date on all nodes, or one folder for tokens: "
            hint += "put train.output_dir on a shared volume"
        raise UserError(problem, plan.where("data.dataset_name_or_path"), hint, code)
    return data


def make_loop(
    plan: Plan,
    session: Session,
    model: PeftModel,
    data: PreparedData,
    tokenizer: PreTrainedTokenizerBase,
    base_alone: BaseAlone,
    *,
    facts: dict[str, Any],
) -> Loop:
    """Assemble the loop from the plan and the run file. facts: recorded in every checkpoint."""
    train = plan.run.train
    here = session.here
    console = session.console
    recorder = make_recorder(plan, here, model, session.options.debug_freq)
    watch = RunWatch(
        plan.run,
        recorder,
        vocabulary=plan.base.dims["vocab"],
        unigram_loss=data.audit["splits"]["train"].get("unigram_loss"),
        say=console.print,
        report=session.report.finish,
        on_stall=partial(report_stall, here),
    )
    progress = Progress(here, console, train.logging_steps, lambda: recorder.counters.peak_gib)
    weighs_router = bool(router_loss_weight(model.get_base_model(), train.router_aux_loss_coef))
    group = RowGroup.create(plan.layout.context_parallel, train.ddp_timeout)
    cut = None
    if group:
        cut = group.cut
        group.draw_apart(train.seed)
    require_shared_memory(plan)
    batches = make_batches(plan, data, tokenizer.pad_token_id, mark_tokens=weighs_router, cut=cut)
    length = RunLength.of(train, batches, plan.batch.accumulation)
    updater = Updater(model, train, length.total)
    trained = TrainedModel(plan, model, batches.names, recorder.now, group)
    evaluator = None
    samples = None
    if train.eval_strategy != "no" and data.validation is not None:
        validation = make_validation_batches(plan, data, tokenizer.pad_token_id, cut)
        evaluator = Evaluator(
            run=plan.run,
            batches=validation,
            model=trained,
            stop_signal=session.stop_signal,
            recorder=recorder,
            progress=progress,
            base=base_alone,
            base_figures=find_base_figures(plan, session, data, facts, recorder.unwritten),
            kept=make_kept_batches(plan, data, tokenizer.pad_token_id),
        )
        if train.sample is not None:
            samples = Samples(
                prompts=read_prompts(train.sample, tokenizer, data.validation, plan.run.data.length, plan.where),
                settings=train.sample,
                tokenizer=tokenizer,
                max_length=plan.run.data.length,
                tokens=plan.batch.tokens // plan.layout.context_parallel,
                model=trained,
                stop_signal=session.stop_signal,
                recorder=recorder,
                progress=progress,
            )
    is_saved = partial(length.is_due, strategy=train.save_strategy, every_steps=train.save_steps)
    saver = Saver(
        plan.folder,
        train.save_total_limit,
        facts,
        say=console.print,
        saved=session.report.start,
        unwritten=recorder.unwritten,
        passing=[step for step in session.pauses if not is_saved(step)],
    )
    session.base.join(trained, updater, watch)
    report_to = train.report_to if here.rank == 0 else "none"
    say = partial(console.print, style="yellow")
    trackers = Trackers(report_to, plan.folder, train.run_name, resolve_run(plan), recorder.unwritten, say)
    return Loop(
        plan=plan,
        model=trained,
        updater=updater,
        batches=batches,
        length=length,
        evaluator=evaluator,
        stop_signal=session.stop_signal,
        recorder=recorder,
        watch=watch,
        saver=saver,
        progress=progress,
        trackers=trackers,
        samples=samples,
        pause_at=session.pause_at,
    )


def find_base_figures(
    plan: Plan, session: Session, data: PreparedData, facts: dict[str, Any], unwritten: WriteGuard
) -> BaseFigures | None:
    """Return where figures of the base alone are kept; None if the objective compares with the model before step 1."""
    run = plan.run
    if run.objective.has_reference:
        return None
    settings = run.orpo.model_dump() if run.objective.of_pairs else {}
    rows = data.audit["row_hashes"]["validation"]
    identity = hash_text([describe_base_forward(plan, facts), run.train.objective, settings, rows, data.evaluated])
    folder = session.around or plan.folder
    return BaseFigures(folder / BASE_FIGURES, identity, unwritten)


def report_stall(here: Rank, problem: Problem) -> None:
    """Report a stall as the error of this rank, which ends without returning."""
    here.report("error", json.dumps({"problems": [problem.as_dict()], "code": 1, "time": 0}))
    here.report("code", "1")


def make_recorder(plan: Plan, here: Rank, model: PeftModel, debug_freq: int | None) -> Recorder:
    """Create the recorder of steps. debug_freq: from the command line, how often it samples every counter."""
    device = get_device()
    flops = Flops(plan.cost.flops_per_token, recompute_weights=plan.cost.recompute_flops_per_token)
    return Recorder(
        plan.folder,
        here.rank,
        here.world,
        device,
        sample_every=plan.run.train.logging_steps if debug_freq is None else debug_freq,
        model=model,
        rates=RateMeter(device, flops, plan.batch.length),
        about={"script_name": "windlass train"},
    )
