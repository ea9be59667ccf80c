"""Write the probe of a model that ranks store parts of, after the last step: a machine that exports may not hold it."""

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

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
from windlass.train.step import TrainedModel
from windlass.weights.same_base import describe_files

DUMMY: Final = [0, 0]  # input of a rank without a row, which still takes part in every gather


class RankedScorer:
    """The model as it is trained: rows are dealt to the ranks, and all get all results."""

    def __init__(self, model: TrainedModel) -> None:
        self.model = model

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        own = self._deal(rows)
        ids, width = self._pad(own)
        places = [number * width + i for number, row in enumerate(own) for i in range(len(row) - 1)]
        targets = [token for row in own for token in row[1:]]
        supervised, following = (torch.tensor(values, device=self.model.device) for values in (places, targets))
        inputs = {"input_ids": ids, "supervised": supervised, "targets": following}
        with torch.no_grad(), self.model.autocast:
            losses = self.model.causal_lm(**inputs, per_token=True)[0]
        parts = torch.split(-losses.float().cpu(), [len(row) - 1 for row in own])
        return self._collect([part.tolist() for part in parts], len(rows))

    def choose(self, rows: Sequence[list[int]]) -> list[int]:
        own = self._deal(rows)
        ids, width = self._pad(own)
        last = torch.tensor([number * width + len(row) - 1 for number, row in enumerate(own)], device=self.model.device)
        with torch.no_grad(), self.model.autocast:
            choices = self.model.causal_lm(input_ids=ids, supervised=last, targets=last, choose=True)
        return self._collect(choices.tolist(), len(rows))

    def _deal(self, rows: Sequence[list[int]]) -> list[list[int]]:
        return list(rows[collectives.get_rank() :: collectives.get_world_size()]) or [DUMMY]

    def _pad(self, rows: Sequence[list[int]]) -> tuple[Tensor, int]:
        width = max(map(len, rows))
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.model.device), width

    def _collect(self, own: list[Any], count: int) -> list[Any]:
        everyones = collectives.all_gather(own)
        return [everyones[number % len(everyones)][number // len(everyones)] for number in range(count)]


def write_probe(plan: Plan, model: TrainedModel, data: PreparedData, tokenizer: Any, say: Any) -> None:
    """Write the probe of the adapter that `windlass export` chooses: the best one, else the last. A collective."""
    if plan.adapter.in_full or plan.run.lora.bias != "none":
        say("probe     none: base weights were trained, and the base can't be computed without them")
        return
    if data.validation is None and plan.run.data.streaming:
        say("probe     none: no rows are held out of the stream")
        return
    best = collectives.run_on_rank_0(partial(_find_best, plan.folder / CHECKPOINTS))
    if best is not None:
        load_adapter(model.peft, best)
    table, name = (data.train, "train") if data.validation is None else (data.validation, "validation")
    rows = choose_rows(table)
    model.patches.disable_compiled()
    model.causal_lm.eval()
    probe = compute_probe(model.peft, rows, RankedScorer(model), tokenizer, say)
    collectives.run_on_rank_0(lambda: _write(plan, best or plan.folder / FINAL, name, probe, tokenizer))
    say(f"probe     {describe_probe({**probe, 'rows_from': f'the {name} set'})}")


def _find_best(checkpoints: Path) -> Path | None:
    return find_best([folder for folder in list_checkpoints(checkpoints) if not find_damage(folder)])


def _write(plan: Plan, adapter: Path, name: str, probe: dict[str, Any], tokenizer: Any) -> None:
    with suppress(UserError):  # the rows are read again: they may have moved
        add_chats(probe["rows"], plan.run, plan.where, tokenizer)
    facts = {
        "base": plan.base.name,
        "adapter": describe_files(adapter)["files"],
        "computed_in": "bfloat16" if plan.run.train.in_bf16 else plan.run.model.torch_dtype,
        "rows_from": f"the run's {name} rows",
        "mixture": "experts" in plan.base.dims,
    }
    write_atomic(plan.folder / PROBE, json.dumps({**facts, **probe}))
