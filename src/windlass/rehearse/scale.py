"""Scale a run down to this machine: fewer ranks, a tiny model config, and the run file with every difference listed."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from windlass.hardware import LocalMachine
from windlass.model import Base
from windlass.model.family import FAMILIES
from windlass.model.shrink import shrink_config
from windlass.plan.layout import Layout, list_divisors
from windlass.runfile import LayoutSection, RunFile, Secret
from windlass.runfile.rows import EvalSet, MixedSet, RowFormat

STEPS = 20  # optimizer steps of the rehearsal: enough that a fast machine is still training when it is stopped
EVERY = 4  # steps between two evaluations or saves, and steps of an epoch
STOP_AT = EVERY + 1  # SIGTERM comes after the first evaluation and save
MOST_ROWS = 2  # of a micro-batch: more would test nothing new
MOST_MICRO_BATCHES = 2  # of a step, likewise
PATIENCE_SECONDS = 120  # timeout of a collective between processes of one machine
FEW_RANKS = 4  # this many processes run in acceptable time even on two cores
RANK_GIB = 1.5  # of host memory: Python, torch, transformers; the replica is next to nothing
OTHER_NETWORK = ("NCCL_", "GLOO_", "MASTER_", "UCX_")  # variables that name another machine's interfaces

# Ids of the stand-in tokenizer, which has Mistral's order: tiny.SPECIAL.
STAND_IN_IDS = {"pad_token_id": 11, "bos_token_id": 1, "eos_token_id": 2}
STAND_IN_VOCAB = 1024
# FP8 with a scale per block.
WIDTH_OF_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}
USUAL_DEVIATION = 0.02  # transformers' default, if config.json has none
USUAL_HIDDEN = 4096  # the width that it fits


def scale_ranks(layout: Layout, here: LocalMachine) -> tuple[Layout, str]:
    """Return the run's layout if this machine can run its ranks, else one of the same kind on as many as it can; and
    the reason. This machine plays all nodes."""
    most = max(1, min(max(FEW_RANKS, here.cpus), int(here.memory_gib / RANK_GIB)))
    if layout.ranks <= most:
        return layout, ""
    # The fewest ranks that still shard, replicate and split experts as the run does.
    parallel = min(layout.expert_parallel, 2)
    shard = 1 if layout.shard == 1 else 2 if layout.expert_parallel in (1, layout.shard) else 2 * parallel
    replicate = min(layout.replicate, 2)
    # The remaining capacity goes to dimensions in which the run is larger.
    rest = max(1, most // (shard * replicate))
    if layout.shard > shard:
        shard = min(layout.shard, shard * rest)
    else:
        replicate = min(layout.replicate, replicate * rest)
    ranks = shard * replicate
    most = ranks // min(layout.readers, 2)  # several groups, if the run has several
    # As many nodes as the run has, or fewer, so that all have equally many ranks.
    nodes = next(n for n in range(min(layout.nodes, ranks), 0, -1) if ranks % n == 0)
    scaled = replace(
        layout,
        nodes=nodes,
        gpus_per_node=ranks // nodes,
        shard=shard,
        replicate=replicate,
        expert_parallel=shard if layout.expert_parallel == layout.shard > 1 else parallel,
        context_parallel=max(n for n in list_divisors(ranks) if n <= max(1, min(layout.context_parallel, most))),
    )
    return scaled, f"{here.cpus} cores and {here.memory_gib:.0f} GiB hold {ranks} of its kind"


def scale_config(base: Base, *, experts_over: int, vocab: int | None) -> dict[str, Any]:
    """Return the replica's text config: what code depends on keeps its kind, everything else shrinks.

    experts_over: ranks that must divide the experts. vocab: rows of the embedding, the model's own if its tokenizer is
    used; None: the stand-in's.
    """
    own = base.config
    unit = math.lcm(experts_over, 4 if own.get("n_group") else 1)
    # Usual families have one or two kinds of layers; for others, every kind that fits in four layers is kept.
    layers = min(2 if base.family.model_type in FAMILIES else 4, base.dims["layers"])
    config = shrink_config(own, layers=layers, experts=unit * math.ceil(8 / unit), vocab=vocab or STAND_IN_VOCAB)
    if (base.quantization or {}).get("weight_block_size"):  # two blocks in each direction
        config |= {key: min(width, own[key]) for key, width in WIDTH_OF_BLOCKS.items() if key in own}
    hidden = int(config.get("hidden_size") or config["n_embd"])
    # Products of narrower matrices have a smaller spread: without this, every answer would be the same. With much more,
    # 16-bit rounding would decide which expert a token visits, and a merged model would answer differently.
    deviation = float(config.get("initializer_range") or USUAL_DEVIATION) * math.sqrt(base.dims["hidden"] / hidden)
    config["initializer_range"] = min(deviation, USUAL_DEVIATION * math.sqrt(USUAL_HIDDEN / hidden))
    dropped = {"architectures", "quantization_config", "dtype", "torch_dtype", "_name_or_path", "transformers_version"}
    config |= dict.fromkeys(dropped & config.keys())
    return config if vocab else config | STAND_IN_IDS


@dataclass(frozen=True, slots=True)
class Material:
    """What was made for the rehearsal."""

    model: Path
    data: Path
    validation: bool  # a split of its own
    length: int
    rows: int  # for training
    layers: int  # of the replica


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs from the user's run file."""

    key: str
    yours: Any
    here: Any
    why: str


def limit_batch(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows per micro-batch and micro-batches per optimizer step, limited to the plan's."""
    return min(MOST_ROWS, batch["micro"]), min(MOST_MICRO_BATCHES, batch["accumulation"])


def scale_run(
    run: RunFile,
    plan: Mapping[str, Any],
    spread: Layout,
    material: Material,
    folder: Path,
    *,
    packs: bool,
) -> tuple[str, list[Change]]:
    """Return the rehearsal's run file, and its differences. `plan` resolves `auto`; `packs` is what the run's
    `data.packing` is."""
    tree: dict[str, Any] = run.model_dump(mode="json", exclude_defaults=True)
    changes: list[Change] = []
    scaled = _scale_keys(run, plan, spread, material, folder)
    scaled.append(("data.packing", packs, "as chosen for your run"))
    for key, value, why in scaled:
        section, _, name = key.partition(".")
        yours = tree.get(section, {}).get(name, getattr(getattr(run, section), name))
        if yours != value:
            tree.setdefault(section, {})[name] = value
            changes.append(Change(key, yours, value, why))

    usual = LayoutSection()
    cluster = run.cluster
    layout = {"name": spread.name, "shard": spread.shard, "replicate": spread.replicate}
    parallel = {"expert_parallel": spread.expert_parallel, "context_parallel": spread.context_parallel}
    layout |= {key: ranks for key, ranks in parallel.items() if ranks > 1}
    for key in ("reshard_after_forward", "base_dtype", "activation_checkpointing"):
        if getattr(spread, key) != getattr(usual, key):
            layout[key] = getattr(spread, key)
    here: dict[str, Any] = {"nodes": spread.nodes, "gpus_per_node": spread.gpus_per_node}
    here |= {"gpu": "cpu", "platform": "script"}
    if spread.nodes > 1:
        here["network"] = "ethernet-25"  # links inside a machine are faster
    here |= {key: getattr(cluster, key) for key in ("grace_seconds", "max_restarts") if key in cluster.changed}
    # Variables that are valid on this machine: no secret, no device, no folder of another machine.
    for name, value in cluster.env.items():
        if isinstance(value, Secret) or name.startswith(OTHER_NETWORK):
            continue
        if not value.startswith("/") or Path(value).exists():
            here.setdefault("env", {})[name] = value
    # Offload is left out: the engine refuses it if ranks compute in host memory.
    but = "; a CPU has nowhere to offload from" if spread.offload else ""
    for section, ours, why in (
        ("layout", layout, f"as the plan lays it out on your machines{but}"),
        ("cluster", here, "this machine is another"),
    ):  # replaced: what the user says there and is not here is dropped
        yours = getattr(run, section).model_dump(mode="json", exclude_defaults=True)
        tree[section] = ours
        keys = [key for key in dict.fromkeys((*yours, *ours)) if yours.get(key) != ours.get(key)]
        changes += [Change(f"{section}.{key}", yours.get(key), ours.get(key), why) for key in keys]
    head = "# Written by windlass rehearse: your run scaled down. rehearsal.json lists the differences.\n"
    return head + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), changes


def _scale_keys(
    run: RunFile, plan: Mapping[str, Any], spread: Layout, material: Material, folder: Path
) -> list[tuple[str, Any, str]]:
    """Yield key, value here, and reason. A value that equals the user's is no change."""
    model = run.model
    lora = run.lora
    data = run.data
    train = run.train
    attention = model.attn_implementation or ""
    layers = material.layers
    half = "CPUs have no arithmetic in float16"
    less = "a few show what many do"
    rows = "the first rows, written out"
    sooner = "in the run's own order, sooner"
    untracked = "a rehearsal is not tracked"
    unvalidated = "there are no validation rows"
    validated = material.validation or data.val_fraction is not None or bool(data.eval)
    micro, accumulation = limit_batch(plan["batch"])
    # A share of validation rows is held out of few rows, unless the set has a validation split.
    fraction = None if material.validation else data.val_fraction
    if fraction is not None:
        fraction = max(fraction, round(min(0.5, 8 / material.rows), 3))
    written = iter(str(material.data / str(i)) for i in range(len(data.mix) + len(data.eval) + len(data.keep) + 1))
    several = bool(data.mix or data.eval or data.keep)

    def elsewhere(part: MixedSet | EvalSet) -> dict[str, Any]:
        complete = data.of(part)
        kept = {key: getattr(part, key) for key in ("weight", "rows", "epochs") if getattr(part, key, None) is not None}
        for key in RowFormat.model_fields:
            if key != "dataset_config_name" and getattr(complete, key) != getattr(data, key):
                kept[key] = getattr(complete, key)
        return {**kept, "path": next(written), "split": "train"}

    path = data.dataset_name_or_path if data.mix else next(written) if several else str(material.data)
    mixed = [{**elsewhere(part), "name": part.title} for part in data.mix]
    evaluated = {name: elsewhere(part) for name, part in data.eval.items()}
    kept = {name: elsewhere(part) for name, part in data.keep.items()}
    config = "auto" if data.dataset_config_name == "auto" else None
    targets = _scale_targets(lora.target_modules, plan["adapter"]["targets"], layers)
    kernels = "flash" in attention or "/" in attention
    half_steps = EVERY // 2
    warmup = min(train.warmup_steps or 0, STEPS // 4) or train.warmup_steps
    batch = micro * spread.readers * accumulation if train.global_batch_size else None
    follows = train.global_batch_size is not None and train.gradient_accumulation_steps == "auto"
    return [
        ("model.model_name_or_path", str(material.model), "the tiny replica"),
        ("model.torch_dtype", "float32" if model.torch_dtype == "float16" else model.torch_dtype, half),
        ("model.attn_implementation", "sdpa" if kernels else model.attn_implementation, "its kernels need a GPU"),
        ("lora.adapter", None, "it has the shapes of the model, not of the replica"),
        ("lora.target_modules", targets, f"the replica has layers 0 to {layers - 1}"),
        ("data.dataset_name_or_path", path, rows),
        ("data.mix", mixed, rows),
        ("data.eval", evaluated, rows),
        ("data.keep", kept, rows),
        ("data.dataset_config_name", config, rows),
        ("data.train_split", "train", rows),
        ("data.val_split", "validation" if material.validation else None, rows),
        ("data.val_fraction", fraction, "of few rows" if fraction else "the validation split is there"),
        ("data.max_length", material.length, "shorter sequences take less time"),
        *((("train.offload_activations", True, "as planned"),) if plan["layout"]["offload_activations"] else ()),
        ("train.output_dir", str(folder), "the rehearsal's own run folder"),
        ("train.max_steps", STEPS, "enough to evaluate, save, stop and resume"),
        ("train.per_device_train_batch_size", micro, less),
        ("train.per_device_eval_batch_size", min(MOST_ROWS, train.per_device_eval_batch_size), less),
        ("train.global_batch_size", batch, less),
        ("train.gradient_accumulation_steps", "auto" if follows else accumulation, less),
        *(() if validated else (("train.eval_strategy", "no", unvalidated), ("train.sample", None, unvalidated))),
        ("train.eval_steps", half_steps if train.save_steps > train.eval_steps else EVERY, sooner),
        ("train.save_steps", half_steps if train.eval_steps > train.save_steps else EVERY, sooner),
        ("train.logging_steps", 1, "every step is checked"),
        ("train.warmup_steps", warmup, f"of {STEPS} steps"),
        ("train.fp16", False, half),
        ("train.report_to", "none", untracked),
        ("train.run_name", None, untracked),
        ("train.dataloader_num_workers", min(1, train.dataloader_num_workers), less),
        ("train.ddp_timeout", min(PATIENCE_SECONDS, train.ddp_timeout), "what hangs is seen sooner"),
        ("watch.prometheus_port", None, "the port may be taken on this machine"),
    ]


def _scale_targets(patterns: str | list[str], targets: list[Mapping[str, Any]], layers: int) -> str | list[str]:
    """Drop names of layers that the replica lacks: the same modules are adapted in all that it has."""

    def present(module: str) -> bool:
        found = re.search(r"\.layers\.(\d+)\.", module)
        return found is None or int(found[1]) < layers

    leaves: dict[str, list[str]] = {}  # of each pattern that would match nothing
    for target in targets:
        if target["matched"] and target["part"] != "experts":
            names = [] if any(map(present, target["matched"])) else target["matched"]
            leaves.setdefault(target["pattern"], []).extend(name.rpartition(".")[2] for name in names)
    listed = [patterns] if isinstance(patterns, str) else patterns
    kept = list(dict.fromkeys(name for one in listed for name in (leaves.get(one) or [one])))
    return patterns if kept == listed else kept
