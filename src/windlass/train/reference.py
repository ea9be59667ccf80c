"""The reference of DPO: the log-probabilities of every pair under the model as it is before step 1.

The base is frozen and the adapter has not moved yet, so that model is the one in memory: no second one is loaded. They
are computed once, each rank its share of the pairs, and kept in the run folder for when the run is resumed.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from windlass.data.cache import hash_file
from windlass.errors import RunError, UserError
from windlass.files import write_atomic
from windlass.observe.steps import format_clock
from windlass.plan import Plan
from windlass.ranks import collectives
from windlass.ranks.rank import StopSignal
from windlass.run_folder import ADAPTER, ADAPTER_CONFIG, REFERENCE, describe_files
from windlass.train.base_alone import describe_base_forward
from windlass.train.batches import Batches
from windlass.train.checkpoint.snapshot import load_adapter
from windlass.train.collate import Batch
from windlass.train.fsdp import list_fsdp_modules
from windlass.train.model import TrainedModel
from windlass.train.pairs import PairCollate
from windlass.train.precision import in_float32
from windlass.train.preference import PairAnswers, measure_answers

Say = Callable[[str], None]
TRAIN: Final = "train"  # the rows whose reference is computed as steps are
SAY_SECONDS: Final = 10.0  # between two lines of progress
# How far the first loss may be from that of no difference at all, in units of it: other kernels round otherwise.
EXACT: Final = 1e-5
IN_BF16: Final = 0.02


def attach_reference(
    plan: Plan,
    model: TrainedModel,
    batches: Mapping[str, Batches],
    facts: dict[str, Any],
    stop_signal: StopSignal,
    *,
    resumed: Path | None,
    allow_other_base: bool,
    say: Say,
) -> bool:
    """Give the batches the reference of their pairs: as the run folder has it, or computed now. Return False if a stop
    signal came first; what is computed by then is saved. A collective.

    batches: by the names that the file has. facts: with the digests of the base and of the rows.
    """
    path = plan.folder / REFERENCE
    identity = collectives.run_on_rank_0(lambda: describe_reference(plan, facts))
    read = partial(read_reference, path, identity, plan, resumed=resumed, allow_other_base=allow_other_base, say=say)
    tables = collectives.run_on_rank_0(read)
    for name, each in batches.items():
        tables.setdefault(name, torch.full((len(each.rows), 2), math.nan))
    incomplete = [name for name in batches if bool(tables[name].isnan().any())]
    given = plan.run.lora.adapter if resumed and incomplete else None
    if given:
        load_adapter(model.peft, collectives.run_on_rank_0(lambda: require_first_adapter(plan.folder, given)))
    for name in incomplete:
        stop_signal.training = True  # until now a signal ended the rank at once: nothing to save
        is_complete = compute_reference(model, batches[name], name, tables[name], stop_signal, say)
        if collectives.get_rank() == 0:
            write_atomic(path, save(tables, {"identity": json.dumps(identity)}))
        if not is_complete:
            return False
    for name, each in batches.items():
        require_finite(tables[name], name, path)
        assert isinstance(each.collate, PairCollate)
        each.collate = replace(each.collate, reference=tables[name])
    if resumed is None:
        require_start(plan, model, batches[TRAIN], path)
    noise = describe_noise(plan, model, batches[TRAIN])
    if noise:
        say(noise)
    return True


def require_first_adapter(run_folder: Path, given: str) -> Path:
    """Return the adapter that a run began with, which is its reference; an error if it is gone or has changed."""
    folder = Path(given)
    now = hash_adapter(folder)
    if not now:
        problem = "the adapter that the run began with, and whose answers are compared with, is not there"
        hint = "put it back, or start from the folder that the run was started in"
        raise UserError(problem, given, hint, "no-reference")
    then = read_identity(run_folder / REFERENCE, given).get("adapter")
    if now != then:
        problem = f"is not the adapter that {run_folder} began with, and whose answers are compared with"
        problem = problem if then else f"nothing says whether {run_folder} began with this adapter"
        hint = f"put back the adapter, and the {REFERENCE} that names it by its hash"
        raise UserError(problem, given, hint, "other-reference")
    return folder


def hash_adapter(folder: Path, *, bytewise: bool = False) -> str:
    """Return hashes of what an adapter computes, or of all bytes, as an older windlass; empty if a file is missing."""
    files = [folder / name for name in (ADAPTER, ADAPTER_CONFIG)]
    if not all(path.is_file() for path in files):
        return ""
    return " ".join(map(hash_file, files) if bytewise else describe_files(folder)["files"].values())


def describe_reference(plan: Plan, facts: dict[str, Any]) -> dict[str, str]:
    """Return what the log-probabilities depend on; without the adapter if it is gone, which a resumed run needs not."""
    lora = plan.run.lora
    adapter = hash_adapter(Path(lora.adapter)) if lora.adapter else "new"
    starts = f" {lora.init_lora_weights}, r {lora.r}" if lora.starts_from_weights and not lora.adapter else ""
    identity = {**describe_base_forward(plan, facts), "rows": facts["data"], "lora": f"{lora.dtype}{starts}"}
    return identity | ({"adapter": adapter} if adapter else {})


def read_identity(path: Path, given: str | None) -> dict[str, str]:
    """Return what a stored reference is of; empty if it can't be read. given: the adapter that the run began with."""
    try:
        with safe_open(path, "pt") as file:
            identity: dict[str, str] = json.loads((file.metadata() or {}).get("identity", "{}"))
    except (OSError, SafetensorError, ValueError):
        return {}
    if given and identity.get("adapter") == hash_adapter(Path(given), bytewise=True):
        identity["adapter"] = hash_adapter(Path(given))
    return identity


def read_reference(
    path: Path, identity: dict[str, str], plan: Plan, *, resumed: Path | None, allow_other_base: bool, say: Say
) -> dict[str, Tensor]:
    """Return the tables of the run folder; none if they have to be computed. Pairs that a stopped run had not reached
    are NaN."""
    given = plan.run.lora.adapter
    found = read_identity(path, given)
    lost = "" if found else "is damaged" if path.is_file() else "is missing"
    if lost and resumed and given:
        problem = f"the reference of the run's pairs {lost}, and the adapter that it began with has moved on"
        raise UserError(problem, str(path), "put the file back, or train into another folder", "no-reference")
    if lost:
        if path.is_file():
            say(f"reference {path} {lost}: it is computed again")
        return {}
    found = {"lora": "float32", **found}
    skipped = [name for name in ("lora", "adapter") if resumed and (given or name == "lora")]  # the checkpoint has it
    other = [name for name, value in identity.items() if name not in skipped and found.get(name) != value]
    if not other:
        return load_file(path)
    names = {
        "base": "another base",
        "config": "another config.json",
        "attention": "another attention implementation",
        "adapter": "another adapter to begin with",
        "lora": "another dtype or initialization of the adapter",
        "rows": "other rows",
        "precision": "other dtypes",
    }
    what = " and ".join(names[name] for name in other)
    # A resumed run has the same dtypes, but older versions evaluated in bfloat16 where layouts shard.
    accepted = {"precision", "base", "config"} if allow_other_base else {"precision"}
    if resumed and not accepted.issuperset(other):
        hint = "put the run's own file back, or train into another folder"
        raise UserError(f"is the reference of {what} than this run's", str(path), hint, "other-reference")
    began = ", under the adapter that the run began with on this base" if resumed else ""
    say(f"reference {path} is of {what}: it is computed again{began}")
    return {}


def compute_reference(
    model: TrainedModel, batches: Batches, name: str, table: Tensor, stop_signal: StopSignal, say: Say
) -> bool:
    """Fill in the log-probabilities of the answers of the rows that are NaN. Return False if a stop signal came first.
    A collective: each rank computes its share.

    The rows of the first epoch come in its order: step 1 then has the same micro-batches, and the same rounding.
    """
    assert batches.order is not None
    count = len(table)
    first = list(dict.fromkeys(batches.order(0).tolist()))
    order = np.array([*first, *np.setdiff1d(np.arange(count), first)])
    order = order[table[order, 0].isnan().numpy()]
    known = count - len(order)
    if known:
        say(f"reference {known:,} of {count:,} {name} pairs are there already")
    computed = torch.zeros(count, 2, device=model.device)
    began = told = time.monotonic()
    done = 0
    stop = None  # a signal up to the previous micro-batch: reading it then lets the device run ahead
    precision = model.autocast if name == TRAIN else model.evaluating()  # as the policy is computed
    was_training = model.causal_lm.training
    model.causal_lm.eval()
    with torch.no_grad(), model.adapters.unchanged(), precision:
        for host_batch in batches.in_order(order):
            if stop is not None and bool(stop):
                break
            answers = compute_answers(model, host_batch.to(model.device))
            computed[host_batch.rows] = answers.logps[: len(host_batch.rows)]
            stop = computed.new_tensor(float(stop_signal.received))
            if collectives.get_world_size() > 1:
                dist.all_reduce(stop)
            done += batches.micro * batches.readers
            now = time.monotonic()
            if now - told > SAY_SECONDS:
                left = format_clock((now - began) / done * max(0, len(order) - done))
                say(f"reference {min(known + done, count):,} of {count:,} {name} pairs, {left} left")
                told = now
    model.causal_lm.train(was_training)
    if collectives.get_world_size() > 1:
        dist.all_reduce(computed)
    table[order[:done]] = computed.cpu()[order[:done]]
    say(f"reference {min(known + done, count):,} {name} pairs in {now - began:.0f} s; kept in {REFERENCE}")
    return done >= len(order)


def require_finite(table: Tensor, name: str, path: Path) -> None:
    """Stop if a pair's log-probability is not a finite number: the base or the row is wrong."""
    wrong = (~table.isfinite()).any(1).nonzero().flatten().tolist()
    if wrong:
        problem = f"{name} pair {wrong[0] + 1}: a log-probability in the reference is not a finite number"
        problem += f"; so it is of {len(wrong):,} of {len(table):,} pairs" if len(wrong) > 1 else ""
        hint = "pairs are counted as in `tokens` in the run folder, without those left out: look at its text"
        raise RunError(problem, str(path), hint, "not-finite")


def compute_answers(model: TrainedModel, batch: Batch) -> PairAnswers:
    """Return the log-probabilities of a micro-batch's answers."""
    assert batch.pairs is not None
    hidden = model.causal_lm(**batch.inputs).last_hidden_state
    return measure_answers(model.head.log_probs(hidden, batch.targets), batch.pairs)


def describe_noise(plan: Plan, model: TrainedModel, batches: Batches) -> str:
    """Say how far bfloat16 puts the margin of a step from float32's, by the first micro-batch. A collective.

    Empty in float32, and where that is not to be had: it doesn't fit into memory, and of shards, whose ranks would wait
    for one that runs out of it.
    """
    exact = not plan.run.train.in_bf16 and model.causal_lm.dtype == torch.float32
    if exact or list_fsdp_modules(model.causal_lm):
        return ""
    batch = next(iter(batches.epoch(0))).to(model.device)
    margins = []
    model.causal_lm.eval()
    with suppress(torch.OutOfMemoryError), torch.no_grad(), model.adapters.unchanged(), model.eager():
        for precision in (model.autocast, in_float32(model.causal_lm)):
            with precision:
                chosen, rejected = compute_answers(model, batch).logps[: len(batch.rows)].double().unbind(1)
            margins.append(chosen - rejected)
    model.causal_lm.train()
    own = (margins[0] - margins[1]).square().tolist() if len(margins) == 2 else [math.nan]
    squares = [*chain.from_iterable(collectives.all_gather(own))]
    if any(map(math.isnan, squares)):
        return ""
    # Of policy and reference, which are rounded on their own, in the mean of a step's pairs.
    error = plan.run.dpo.beta * math.sqrt(2 * mean(squares) / batches.round_rows)
    return f"margins   of a step are within {2 * error:.4f} of float32's (95 %): bfloat16's noise"


def require_start(plan: Plan, model: TrainedModel, batches: Batches, path: Path) -> None:
    """Stop unless the first micro-batch of step 1 has the loss of no difference to the reference. A collective."""
    preference = model.preference
    assert preference is not None
    batch = next(iter(batches.epoch(0))).to(model.device)
    model.causal_lm.eval()
    with torch.no_grad(), model.adapters.unchanged(), model.autocast:
        answers = compute_answers(model, batch)
        found = preference.compare(answers).losses
        expected = preference.compare(answers._replace(reference=answers.logps)).losses
    model.causal_lm.train()
    bound = IN_BF16 if plan.run.train.in_bf16 or model.causal_lm.dtype != torch.float32 else EXACT
    off = (found - expected).abs()[: len(batch.rows)]
    problem = None
    if not bool((off <= bound * expected[: len(off)].abs().clamp(min=1)).all()):
        place = int(off.nan_to_num(math.inf).argmax())
        chosen, rejected = answers.logps[place].tolist()
        known = answers.reference[place].tolist()
        problem = f"training pair {batch.rows[place] + 1}: the loss begins at {found[place]:.6f}, "
        problem += f"and without a step it is {expected[place]:.6f}; "
        problem += f"log-probabilities of chosen and rejected are {chosen:.4f} and {rejected:.4f}, "
        problem += f"and {known[0]:.4f} and {known[1]:.4f} in the reference"
        if torch.allclose(answers.logps[place].flip(0), answers.reference[place], rtol=1e-3):
            problem += ": they are swapped"
    problems = [each for each in collectives.all_gather(problem) if each]
    if problems:
        hint = f"remove {path} and start again; if it stays so, `windlass bug-report {plan.folder}`"
        raise RunError(problems[0], str(path), hint, "wrong-reference")
