"""`windlass best`: load the base once, evaluate every saved adapter on the same rows, and rank them by loss, or by how
often the chosen answer of pairs is preferred.
"""

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from windlass.data.prepare import prepare_data
from windlass.errors import UserError
from windlass.files import write_json
from windlass.observe.format import describe_served
from windlass.plan import Plan
from windlass.ranking import RankedAdapter, Ranking
from windlass.ranks import collectives
from windlass.ranks.rank import Rank
from windlass.run_folder import BASES, CHECKPOINTS, read_manifest
from windlass.runfile import RunFile
from windlass.runfile.objectives import ACCURACY, LOSS, explain_other_losses
from windlass.train.base_alone import BaseAlone
from windlass.train.batches import Batches, make_kept_batches, make_validation_batches
from windlass.train.checkpoint.folder import find_damage, list_checkpoints
from windlass.train.checkpoint.snapshot import load_adapter
from windlass.train.collate import Batch
from windlass.train.connect import create_process_group, require_device
from windlass.train.console import make_console
from windlass.train.fsdp import get_device
from windlass.train.head import Head
from windlass.train.kept import list_worse, measure_kept_sets
from windlass.train.load import describe_precision, load_base, open_base_tokenizer
from windlass.train.lora import attach_adapter
from windlass.train.loss import SourceLosses
from windlass.train.patches import Patches
from windlass.train.precision import in_float32
from windlass.train.preference import PairAnswers, Preference, measure_answers
from windlass.train.reference import require_first_adapter
from windlass.train.served import measure_share
from windlass.train.shared_base import SharedBase
from windlass.weights.same_base import read_recorded_base, require_same_base

BASE: Final = "base model"  # without an adapter, as the reference
REFERENCE: Final = "as it began"  # with the adapter that a run on pairs began with, instead
NOISE: Final = 1.96  # standard errors: 95 % of a normal distribution

# Per row: summed loss, supervised tokens. Per pair: loss, 1, whether the chosen answer is preferred.
RowFigures = np.ndarray[Any, Any]


def rank_checkpoints(
    plan: Plan,
    here: Rank,
    run_folder: Path,
    show: Callable[[Ranking], None],
    *,
    base_dtypes: Sequence[str] = (),
    allow_other_base: bool = False,
    by: str = LOSS,
    keep: float | None = None,
) -> int:
    """Do one rank's part; rank 0 shows the ranking. `base_dtypes`: further dtypes of the base to compare; `keep`: by
    how much the loss of the run's kept sets may exceed the base's."""
    run = plan.run
    if keep is not None and not run.data.keep:
        hint = "leave it out; a run with data.keep: {general: {path: general.jsonl}} has some"
        raise UserError("the run has no kept sets", "--keep", hint, "no-kept-sets")
    if by not in run.objective.measures:
        problem = f"adapters of this run aren't ranked by {by}"
        raise UserError(problem, "--by", f"known: {', '.join(run.objective.measures)}", "no-such-measure")
    every = list_saved(plan, run_folder)
    trials = len(plan.trials) > 1
    console = make_console(here)
    try:
        require_device(plan)
    except UserError as error:  # evaluating a small model on a CPU is fine
        console.print(f"warning: {error.problems[0].problem}: evaluating on the CPU", style="yellow")
    create_process_group(here, run.train.ddp_timeout)
    spare = Path(collectives.run_on_rank_0(tempfile.mkdtemp))  # what only reads leaves a run's tokens as they are
    with contextlib.ExitStack() as held:
        held.callback(shutil.rmtree, spare, ignore_errors=True)
        damages = collectives.run_on_rank_0(lambda: [find_damage(saved.folder) for saved in every])
        faults = dict(zip(every, damages, strict=True))
        intact = [saved for saved, fault in faults.items() if not fault]
        if not intact:
            folder = plan.trials[0].file.parent if plan.trials else run_folder
            problem = "there is no intact checkpoint"
            raise UserError(problem, str(folder / CHECKPOINTS), "let the run save one", "no-intact-checkpoint")
        untrained = REFERENCE if intact[0].began_with else BASE
        here.phase("preparing the data")
        tokenizer = open_base_tokenizer(plan)
        tokens = run_folder / "tokens"
        data = prepare_data(run, tokenizer, where=plan.where, cache=tokens, spare=spare, say=console.print)
        if data.validation is None or len(data.validation) < 2:
            problem = f"{'only 1 row is' if data.validation else 'no rows are'} held out to compare on"
            raise UserError(problem, str(run_folder), "name some with --eval-data FILE", "no-rows")
        batches = make_validation_batches(plan, data, tokenizer.pad_token_id)
        kept_batches = make_kept_batches(plan, data, tokenizer.pad_token_id) if keep is not None else None
        kept: dict[str, dict[str, float]] = {}
        served: dict[str, str] = {}  # what servers in bfloat16 lose of each adapter

        def evaluate(base_dtype: str, chosen: Sequence[Saved], suffix: str = "") -> dict[str, RowFigures]:
            """Return the losses of the base, stored in this dtype, and of these adapters on it."""
            here.phase(f"loading the model{suffix}")
            base = SharedBase(keeps=trials)
            layout = replace(plan.layout, base_dtype=base_dtype)
            model, certificate = base.get(lambda: load_base(plan.base, layout, **describe_precision(plan)))
            one_per_base = {read_recorded_base(saved.folder).get("base_digest"): saved.folder for saved in chosen}
            for folder in one_per_base.values():
                where = plan.where("model.model_name_or_path")
                digest = certificate["base_digest"]
                require_same_base(folder, plan.base, digest, where, allow_other=allow_other_base, say=console.print)
            losses: dict[str, RowFigures] = {}
            for folder, of_run in itertools.groupby(chosen, lambda saved: saved.folder.parent.parent):
                group = list(of_run)
                own = group[0].plan
                base_alone = BaseAlone(model, (*own.adapter.in_full, *own.adapter.biases))
                adapted = attach_adapter(model, own.run.lora, own.adapter, own.run.train.seed).eval()
                patches = Patches()
                base.undo.enter_context(patches)
                patches.patch_forward(adapted.get_base_model())
                compare = make_comparison(adapted, batches, own.run, group[0].began_with)
                if not losses:
                    with nullcontext() if group[0].began_with else adapted.disable_adapter():
                        losses[untrained + suffix] = compare()
                for saved in group:
                    here.phase(f"evaluating {saved.name}{suffix}")
                    load_adapter(adapted, saved.folder)
                    losses[saved.name + suffix] = compare()
                    if kept_batches is not None and not suffix:
                        autocast = torch.autocast(get_device().type, torch.bfloat16, enabled=run.train.in_bf16)
                        causal_lm = adapted.get_base_model()
                        figures = measure_kept_sets(kept_batches, causal_lm, base_alone, autocast=autocast)
                        kept[saved.name] = figures or {}
                    share = None if suffix else measure_share(batches, adapted.get_base_model(), base_alone)
                    if share is not None:
                        served[saved.name] = describe_served(*share)
                    console.print(f"{saved.name}{suffix}  evaluated")
                if trials:
                    base.restore(str(folder))
            return losses

        losses = evaluate(plan.layout.base_dtype, intact)
        too_much = find_worse(kept, keep) if keep is not None else {}
        within = [saved for saved in intact if saved.name not in too_much] or intact
        lowest = min(within, key=lambda saved: mean_loss(losses[saved.name]))
        on_bases = {plan.layout.base_dtype: [mean_loss(losses[untrained]), mean_loss(losses[lowest.name])]}
        for base_dtype in dict.fromkeys(base_dtypes):
            if base_dtype not in on_bases:
                others = evaluate(base_dtype, [lowest], f", base in {base_dtype.upper()}")
                on_bases[base_dtype] = list(map(mean_loss, others.values()))
                losses |= others
        if here.rank == 0:
            if len(on_bases) > 1:
                write_json(run_folder / BASES, {"adapter": lowest.name, "rows": len(batches.rows), "losses": on_bases})
            skipped = {saved.name: fault for saved, fault in faults.items() if fault}
            ranked = {name: rows for name, rows in losses.items() if name not in too_much}
            ranking = rank_candidates(ranked, {**skipped, **too_much}, by, kept)
            keys = find_other_losses([one.run for one in plan.trials or (plan,)]) if by == LOSS else []
            note = served.get(ranking.candidates[0].name, "")
            show(replace(ranking, caution=explain_other_losses(keys, run_folder), note=note))
    return 0


def find_worse(kept: Mapping[str, Mapping[str, float]], bound: float) -> dict[str, str]:
    """Return the adapters with a kept set that got worse by more than `bound`, and which."""
    found = {}
    for adapter, figures in kept.items():
        worse = list_worse(figures)
        listed = [f"{name} got worse by {value:.4f}" for name, value in worse.items() if not value <= bound]
        if listed:
            found[adapter] = f"{', '.join(listed)}: more than --keep {bound:g}"
    return found


@dataclass(frozen=True, eq=False)
class Saved:
    """A checkpoint of a run, or of a trial of a sweep."""

    folder: Path
    name: str  # in the ranking
    plan: Plan
    began_with: Path | None  # the adapter that a preference run is compared with


def list_saved(plan: Plan, run_folder: Path) -> list[Saved]:
    """Return the checkpoints of the run, or of a sweep's trials: of each run, the newest first."""
    runs = {trial.file.parent: trial for trial in plan.trials} or {run_folder: plan}
    saved = []
    for folder, own in runs.items():
        began_with = find_first_adapter(folder) if own.run.objective.has_reference else None
        for checkpoint in list_checkpoints(folder / CHECKPOINTS)[::-1]:
            name = f"{folder.name}/{checkpoint.name}" if plan.trials else checkpoint.name
            saved.append(Saved(checkpoint, name, own, began_with))
    return saved


def find_other_losses(runs: Sequence[RunFile]) -> list[str]:
    """Return the objective's keys in which runs differ."""
    name = runs[0].train.objective
    sections = [getattr(run, name, None) for run in runs]
    fields = type(sections[0]).model_fields if sections[0] is not None else ()
    return [f"{name}.{key}" for key in fields if len({getattr(section, key) for section in sections}) > 1]


def find_first_adapter(run_folder: Path) -> Path | None:
    """Return the adapter that a run began with, which is its reference; None for a new one."""
    given = (read_manifest(run_folder)["run"].get("lora") or {}).get("adapter")
    return require_first_adapter(run_folder, given) if given else None


def make_comparison(
    model: PeftModel, batches: Batches, run: RunFile, began_with: Path | None
) -> Callable[[], RowFigures]:
    """Return a function that measures all rows. The reference of pairs is measured here; its adapter stays loaded."""
    causal_lm = model.get_base_model()
    autocast = torch.autocast(get_device().type, torch.bfloat16, enabled=run.train.in_bf16)
    if not run.objective.of_pairs:
        return lambda: measure_rows(batches, 2, partial(row_losses, causal_lm), autocast)
    preference = Preference(run, SourceLosses((), get_device()))

    def measure(reference: RowFigures | None = None) -> RowFigures:
        compare = partial(pair_figures, causal_lm, preference, reference)
        return measure_rows(batches, 5, compare, in_float32(causal_lm))

    reference: RowFigures | None = None
    if began_with is not None:
        load_adapter(model, began_with)
        reference = measure()[:, 3:]
    elif run.objective.has_reference:
        with model.disable_adapter():
            reference = measure()[:, 3:]
    return lambda: measure(reference)[:, :3]


@torch.no_grad()
def measure_rows(
    batches: Batches, columns: int, measure: Callable[[Batch], Tensor], precision: AbstractContextManager[Any]
) -> RowFigures:
    """Return figures of every row, on every rank. `measure` returns those of a micro-batch's rows, then of fillers."""
    device = get_device()
    figures = np.zeros((len(batches.rows), columns))
    with precision:
        for batch in batches.epoch(0):
            measured = measure(batch.to(device))
            figures[batch.rows] = measured[: len(batch.rows)].double().cpu()
    total: RowFigures = sum(collectives.all_gather(figures))  # each row is nonzero on one rank only
    return total


def row_losses(causal_lm: Any, batch: Batch) -> Tensor:
    """Return every row's summed loss and its supervised tokens."""
    hidden = causal_lm(**batch.inputs).last_hidden_state
    losses = Head(causal_lm).figures(hidden, batch.targets)[0].double().cpu()
    return sum_rows(losses, batch)


def sum_rows(losses: Tensor, batch: Batch) -> Tensor:
    """Return the sum and the number of each row's losses."""
    figures = torch.stack([losses, torch.ones_like(losses)], 1).double()
    return torch.zeros(len(batch.rows), 2).double().index_add(0, batch.sequences, figures)


def pair_figures(causal_lm: Any, preference: Preference, reference: RowFigures | None, batch: Batch) -> Tensor:
    """Return of every pair: its loss, 1, whether the chosen answer is preferred, and both log-probabilities."""
    assert batch.pairs is not None
    hidden = causal_lm(**batch.inputs).last_hidden_state
    answers = measure_answers(Head(causal_lm).log_probs(hidden, batch.targets), batch.pairs)
    if reference is not None:
        answers = PairAnswers(*(each[: len(batch.rows)] for each in answers))  # fillers come after
        answers = answers._replace(reference=torch.from_numpy(reference[batch.rows]).to(answers.logps))
    outcome = preference.compare(answers)
    columns = [outcome.losses, torch.ones_like(outcome.losses), outcome.preferred, *answers.logps.unbind(1)]
    return torch.stack(columns, 1)


def mean_loss(rows: RowFigures) -> float:
    """Return the loss per supervised token, or per pair."""
    return float(rows[:, 0].sum() / rows[:, 1].sum())


def rank_candidates(
    measured: Mapping[str, RowFigures],
    skipped: dict[str, str],
    by: str = LOSS,
    kept: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> Ranking:
    """Rank by mean loss per token or pair, or by the share of pairs in the wrong order, with the interval of each
    difference to the best, and each adapter's kept set that got worse most."""
    losses = measured
    if by == ACCURACY:
        losses = {name: np.stack([1 - rows[:, 2], rows[:, 1]], 1) for name, rows in measured.items()}
    means = {name: mean_loss(rows) for name, rows in losses.items()}
    order = sorted(means, key=lambda name: (means[name], mean_loss(measured[name]), name))
    lowest = losses[order[0]]
    tokens = lowest[:, 1]
    ranked = []
    for name in order:
        difference = means[name] - means[order[0]]
        # Rows differ in length: a row's residual is its difference minus the mean difference for that many tokens.
        residuals = losses[name][:, 0] - lowest[:, 0] - difference * tokens
        few = len(tokens) / max(len(tokens) - 3, 1)  # widens the interval of few rows as Student's t does, within 2 %
        half = NOISE * np.sqrt(np.square(residuals).sum() * few) / tokens.sum()
        low = float(difference - half)
        high = float(difference + half)
        rows = measured[name]
        preferred = float(rows[:, 2].mean()) if rows.shape[1] > 2 else None
        figures = kept.get(name, {})
        worse = list_worse(figures)
        worst = max(worse, key=worse.__getitem__, default="")
        of_kept = (worse.get(worst), figures.get(f"{worst}/kl"))
        ranked.append(RankedAdapter(name, mean_loss(rows), difference, low, high, low > 0, preferred, *of_kept))
    return Ranking(tuple(ranked), len(lowest), int(tokens.sum()), skipped, by)
