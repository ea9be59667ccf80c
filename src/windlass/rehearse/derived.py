"""The user's run file in small: every key that differs, with both values and why. All others are the same."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from windlass.rehearse.spread import Spread
from windlass.runfile import LayoutSection, RunFile, Secret

STEPS = 20  # optimizer steps of the whole rehearsal: enough that a fast machine is still at it when it is stopped
EVERY = 4  # steps between two evaluations or saves, and steps of an epoch
STOP_AT = EVERY + 1  # SIGTERM comes after the first evaluation and save
MOST_ROWS, MOST_PASSES = 2, 2  # of a micro-batch, of an optimizer step: what is summed once is summed always
PATIENCE_SECONDS = 120  # of a collective: between processes of one machine
OTHERS_NETWORK = ("NCCL_", "GLOO_", "MASTER_", "UCX_")  # variables that name another machine's interfaces


@dataclass(frozen=True, slots=True)
class Change:
    """One key that is not as the user has it."""

    key: str
    yours: Any
    here: Any
    why: str


@dataclass(frozen=True, slots=True)
class Material:
    """What was made for the rehearsal."""

    model: Path
    data: Path
    validation: bool  # a split of its own
    length: int
    rows: int  # for training
    layers: int  # of the twin


@dataclass
class Derived:
    """The rehearsal's run file and its differences."""

    run: RunFile
    tree: dict[str, Any] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def set(self, key: str, here: Any, why: str) -> None:
        """Put a value where the user has another one, and say so."""
        section, _, name = key.partition(".")
        yours = getattr(getattr(self.run, section), name)
        if yours != here:
            self.tree.setdefault(section, {})[name] = here
            self.changes.append(Change(key, yours, here, why))

    def replace(self, section: str, here: dict[str, Any], why: str) -> None:
        """A whole section: what the user says there and is not here falls away, and that is said too."""
        yours = getattr(self.run, section).model_dump(mode="json", exclude_unset=True)
        self.tree[section] = here
        for key in dict.fromkeys((*yours, *here)):
            if yours.get(key) != here.get(key):
                self.changes.append(Change(f"{section}.{key}", yours.get(key), here.get(key), why))

    def text(self) -> str:
        head = "# Written by `windlass rehearse`: the run in small. The differences are listed in rehearsal.json.\n"
        return head + yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True)


def derive(
    run: RunFile, plan: Mapping[str, Any], spread: Spread, material: Material, folder: Path, nodes: int = 1
) -> Derived:
    """`plan`: plan.json of the user's run, which says what `auto` and an Accelerate file came to."""
    made = Derived(run, run.model_dump(mode="json", exclude_unset=True))
    layout = plan["layout"]
    _model(made, material)
    _targets(made, plan["adapter"]["targets"], material.layers)
    _data(made, material)
    _training(made, plan["batch"], folder, spread)
    _machines(made, layout, spread, nodes)
    return made


def _model(made: Derived, material: Material) -> None:
    run = made.run
    made.set("model.model_name_or_path", str(material.model), "the twin")
    if run.model.torch_dtype == "float16":
        made.set("model.torch_dtype", "float32", "CPUs have no arithmetic in float16")
    if "flash" in (run.model.attn_implementation or "") or "/" in (run.model.attn_implementation or ""):
        made.set("model.attn_implementation", "sdpa", "the kernels run on GPUs alone")
    if run.lora.adapter:
        made.set("lora.adapter", None, "it has the shapes of the model, not of the twin")


def _targets(made: Derived, targets: Sequence[Mapping[str, Any]], layers: int) -> None:
    """Names of layers that the twin does not have are left out: the same modules are adapted in all that it has."""

    def there(module: str) -> bool:
        found = re.search(r"\.layers\.(\d+)\.", module)
        return found is None or int(found[1]) < layers

    leaves: dict[str, list[str]] = {}  # of each pattern that would match nothing
    for target in targets:
        if target["matched"] and target["part"] != "experts":
            leaves.setdefault(target["pattern"], [])
            names = target["matched"] if not any(map(there, target["matched"])) else []
            leaves[target["pattern"]] += dict.fromkeys(name.rpartition(".")[2] for name in names)
    asked = made.run.lora.target_modules
    patterns = [asked] if isinstance(asked, str) else asked
    kept = list(dict.fromkeys(name for one in patterns for name in (leaves.get(one) or [one])))
    if kept != patterns:
        made.set("lora.target_modules", kept, f"the twin has layers 0 to {layers - 1}")


def _data(made: Derived, material: Material) -> None:
    data, why = made.run.data, "the first rows, written out"
    made.set("data.dataset_name_or_path", str(material.data), why)
    if "dataset_config_name" in data.model_fields_set:
        made.set("data.dataset_config_name", None, why)
    made.set("data.train_split", "train", why)
    held_out = data.val_fraction is not None and not material.validation
    made.set("data.val_split", "validation" if material.validation else None, why)
    if held_out:
        made.set("data.val_fraction", max(data.val_fraction or 0, round(min(0.5, 8 / material.rows), 3)), "of few rows")
    elif data.val_fraction is not None:
        made.set("data.val_fraction", None, "the validation split is there")
    made.set("data.max_length", material.length, "shorter sequences take less time")


def sequences(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Rows of a micro-batch and passes of an optimizer step, of those that the plan has."""
    return min(MOST_ROWS, batch["micro"]), min(MOST_PASSES, batch["accumulation"])


def _training(made: Derived, batch: Mapping[str, Any], folder: Path, spread: Spread) -> None:
    train = made.run.train
    less = "one is like another"
    made.set("train.output_dir", str(folder), "the rehearsal's own run folder")
    made.set("train.max_steps", STEPS, "enough to evaluate, save, stop and resume")
    micro, passes = sequences(batch)
    made.set("train.per_device_train_batch_size", micro, less)
    made.set("train.per_device_eval_batch_size", min(MOST_ROWS, train.per_device_eval_batch_size), less)
    if train.global_batch_size:
        made.set("train.global_batch_size", micro * spread.ranks * passes, less)
        if "gradient_accumulation_steps" in train.model_fields_set:
            made.set("train.gradient_accumulation_steps", passes, less)
    else:
        made.set("train.gradient_accumulation_steps", passes, less)
    often = {"eval_steps": EVERY, "save_steps": EVERY}
    if train.save_steps > train.eval_steps:
        often["eval_steps"] = EVERY // 2
    elif train.eval_steps > train.save_steps:
        often["save_steps"] = EVERY // 2
    for key, value in often.items():
        made.set(f"train.{key}", value, "in the run's own order, sooner")
    made.set("train.logging_steps", 1, "every step is looked at")
    if train.warmup_steps:
        made.set("train.warmup_steps", min(train.warmup_steps, STEPS // 4), f"of {STEPS} steps")
    if train.fp16:
        made.set("train.fp16", False, "CPUs have no arithmetic in float16")
    made.set("train.report_to", "none", "a rehearsal is no run to be tracked")
    made.set("train.run_name", None, "a rehearsal is no run to be tracked")
    made.set("train.dataloader_num_workers", min(1, train.dataloader_num_workers), less)
    made.set("train.ddp_timeout", min(PATIENCE_SECONDS, train.ddp_timeout), "what hangs is seen sooner")
    made.set("watch.prometheus_port", None, "the port may be taken on this machine")


def _machines(made: Derived, layout: Mapping[str, Any], spread: Spread, nodes: int) -> None:
    section: dict[str, Any] = {"name": layout["name"], "shard": spread.shard, "replicate": spread.replicate}
    if spread.expert_parallel > 1:
        section["expert_parallel"] = spread.expert_parallel
    usual = LayoutSection()
    for key in ("reshard_after_forward", "base_dtype", "activation_checkpointing"):
        if layout[key] != getattr(usual, key):
            section[key] = layout[key]
    # The engine refuses to offload where ranks compute in the host's memory.
    but = "; a CPU has nowhere to offload from" if layout["offload"] else ""
    made.replace("layout", section, f"as the plan lays it out on your machines{but}")
    cluster = made.run.cluster
    kept: dict[str, Any] = {"nodes": nodes, "gpus_per_node": spread.ranks // nodes, "gpu": "cpu", "platform": "script"}
    if nodes > 1:
        kept["network"] = "ethernet-25"  # what a machine has to itself is faster
    env = {name: value for name, value in cluster.env.items() if _meant_here(name, value)}
    if env:
        kept["env"] = env
    for key in ("grace_seconds", "max_restarts"):
        if key in cluster.model_fields_set:
            kept[key] = getattr(cluster, key)
    made.replace("cluster", kept, "this machine is another")


def _meant_here(name: str, value: str | Secret) -> bool:
    """Whether a variable means something on this machine: no secret, no device, no folder that is elsewhere."""
    if isinstance(value, Secret) or name.startswith(OTHERS_NETWORK):
        return False
    return not value.startswith("/") or Path(value).exists()


def shown(value: Any) -> str:
    """A value in a table."""
    if value is None:
        return "unset"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
