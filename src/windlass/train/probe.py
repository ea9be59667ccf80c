"""Write the probe of a model that ranks store parts of, after the last step: a machine that exports may not hold it."""

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from windlass.data.cache import Say
from windlass.data.prepare import PreparedData
from windlass.errors import UserError
from windlass.files import write_atomic
from windlass.plan import Plan
from windlass.ranks import collectives
from windlass.run_folder import CHECKPOINTS, FINAL, PROBE
from windlass.serve.hypotheses import compute_probe
from windlass.serve.probe import describe_probe
from windlass.serve.rows import add_chats, choose_rows
from windlass.train.checkpoint.folder import find_best, find_damage, list_checkpoints
from windlass.train.checkpoint.snapshot import load_adapter
from windlass.train.kernels.products import as_served
from windlass.train.model import TrainedModel


def write_probe(plan: Plan, model: TrainedModel, data: PreparedData, tokenizer: Any, say: Say) -> None:
    """Write the probe of the adapter that `windlass export` chooses: the best one, else the last. A collective."""
    if plan.adapter.in_full or plan.run.lora.bias != "none":
        say("probe     none: weights of the base were trained, and the ranks have no others to compare with")
        say(f"          `windlass export {plan.folder} --to FOLDER` computes it where the model fits into memory")
        return
    if data.validation is None and plan.run.data.streaming:
        say("probe     none: no rows are held out of the stream")
        return
    best = collectives.run_on_rank_0(lambda: _find_best(plan.folder / CHECKPOINTS))
    if best is not None:
        load_adapter(model.peft, best)
    table, name = (data.train, "train") if data.validation is None else (data.validation, "validation")
    model.patches.undo()  # the forward returns logits again
    model.causal_lm.eval()
    with model.autocast:
        probe = compute_probe(
            model.peft,
            choose_rows(table),
            tokenizer,
            base=plan.base,
            adapter=best or plan.folder / FINAL,
            computed_in="bfloat16" if plan.run.train.in_bf16 else plan.run.model.torch_dtype,
            rows_from=f"the run's {name} rows",
            say=say,
            rounding=partial(as_served, model.device),
        )
    if collectives.get_rank() == 0:
        with suppress(UserError):  # the data set is read again, and may have moved
            add_chats(probe["rows"], plan.run, plan.where, tokenizer)
        write_atomic(plan.folder / PROBE, json.dumps(probe))
    say(f"probe     {describe_probe(probe)}")


def _find_best(checkpoints: Path) -> Path | None:
    return find_best([folder for folder in list_checkpoints(checkpoints) if not find_damage(folder)])
