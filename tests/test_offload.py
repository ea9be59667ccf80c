"""Inputs of recomputed layers in host memory: what goes there, what the plan expects of it, and what is refused.

That it changes no bit of training is in tests/test_long_rows.py; on two ranks, in tests/test_pairs.py ("offloaded").
"""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from transformers import AutoModelForCausalLM

from windlass import tiny
from windlass.plan import Plan, make_plan
from windlass.plan.longest import find_planned_longest_row
from windlass.plan.memory import list_training_moments
from windlass.plan.step_time import INPUTS, estimate_time
from windlass.plan.sweep import _set_layout
from windlass.runfile import read_run_file
from windlass.runfile.accelerate import read_accelerate
from windlass.runfile.importers import import_file
from windlass.train import recompute
from windlass.train.recompute import recompute_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
KEY = "train.offload_activations"
RECOMPUTED = "train.gradient_checkpointing=true"
FILE = """
model: {model_name_or_path: Mistral-Small-4-119B-2603}
data: {val_split: null, max_length: 16384, packing: false}
train: {eval_strategy: "no", max_steps: 10, per_device_train_batch_size: 1, gradient_accumulation_steps: 2}
layout: {name: full-shard, base_dtype: bf16}
cluster: {gpu: h200, gpus_per_node: 8}
"""
LAYERS, HIDDEN = 36, 4096


def planned(folder: Path, *overrides: str, accelerate: str = "") -> Plan:
    (folder / "run.yaml").write_text(FILE)
    (folder / "fsdp.yaml").write_text(f"distributed_type: FSDP\nfsdp_config: {{{accelerate}}}\n")
    file = read_accelerate(folder / "fsdp.yaml") if accelerate else None
    return make_plan(read_run_file(folder / "run.yaml", overrides, file), compare=False)


# --- what goes to host memory ------------------


@pytest.mark.parametrize("offload", [False, True])
def test_only_inputs_leave_and_nothing_else_keeps_them(
    offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks and rotary positions, which all layers share, are never copied."""
    tiny.write_family(tmp_path, "gemma3_text", config={"sliding_window": 4})
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    plan = planned(tmp_path, RECOMPUTED, f"{KEY}={str(offload).lower()}")
    recompute_layers(model, plan)
    copied: list[torch.Tensor] = []
    copy = recompute.HostCopy

    def counted(*given: Any) -> Any:
        copied.append(given[0])
        return copy(*given)

    monkeypatch.setattr(recompute, "HostCopy", counted)
    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, given: inputs.append(weakref.ref(given[0].untyped_storage())))
    loss = model(input_ids=torch.arange(24).view(2, 12), use_cache=False).logits.sum()
    gc.collect()
    alive = [storage() is not None for storage in inputs]
    assert len(inputs) == len(model.model.layers) > 2
    assert len(copied) == len(inputs) * offload
    assert alive == [not offload] * len(inputs)
    loss.backward()


# --- what the plan expects ------------------


def test_a_gpu_has_two_layer_inputs_and_its_node_the_others(tmp_path: Path) -> None:
    off, on = (planned(tmp_path, RECOMPUTED, f"{KEY}={value}") for value in ("false", "true"))
    size = 16384 * HIDDEN * 2
    for moment in ("loss's backward", "backward of a layer", "backward of the first layer", "last layer's gather"):
        kept = [
            list_training_moments(replace(made.search.work, layout=made.layout, batch=made.batch))[moment][0].bytes
            for made in (off, on)
        ]
        others = {"backward of the first layer": 1, "last layer's gather": LAYERS - 1}.get(moment, LAYERS)
        assert kept[0] - kept[1] == pytest.approx((others - 2) * size, abs=0.1 * size)
    assert off.cost.peak == on.cost.peak == "last layer's gather"
    saved = off.cost.gpu_gib - on.cost.gpu_gib
    assert saved == pytest.approx((LAYERS - 3) * size * 1.05 / 2**30, abs=0.1 * size / 2**30)
    (row,) = [row for row in on.cost.rows if row.item == "layer inputs"]
    assert (row.place, row.phase, row.bytes) == ("host", "step", 8 * LAYERS * size)  # a power of two already
    odd = planned(tmp_path, RECOMPUTED, f"{KEY}=true", "data.max_length=16385")
    (row,) = [row for row in odd.cost.rows if row.item == "layer inputs"]
    assert row.bytes == 8 * LAYERS * 2 * size  # as torch rounds what it pins


def test_transfers_take_no_time_as_long_as_layers_compute(tmp_path: Path) -> None:
    off, on = (planned(tmp_path, RECOMPUTED, "data.packing=true", f"{KEY}={value}") for value in ("false", "true"))
    flows = [flow for flow in on.cost.flows if flow.kind in INPUTS]
    assert [(flow.bytes, flow.per_step) for flow in flows] == [(LAYERS * 16384 * HIDDEN * 2, 2)] * 2
    assert {flow.fabric for flow in flows} == {on.machine.host_link.name}
    assert on.cost.transfer_seconds > 0
    assert on.cost.step_seconds == off.cost.step_seconds
    slow = replace(on.search.work.machine.rates, host_link_gb_per_second=0.5)
    work = replace(on.search.work, layout=on.layout, batch=on.batch)
    work = replace(work, machine=replace(work.machine, measured=slow))
    step = estimate_time(work).step_seconds - estimate_time(replace(work, layout=off.layout)).step_seconds
    one_way = LAYERS * 16384 * HIDDEN * 2 / 0.5e9
    assert 4 * one_way > step > 2 * one_way  # of 2 micro-batches: what the GPU does not hide of both ways


def test_auto_offloads_only_if_it_does_not_fit_otherwise(tmp_path: Path) -> None:
    assert not planned(tmp_path).layout.offload_activations
    row = find_planned_longest_row(planned(tmp_path))
    assert row.offloaded_tokens > row.recomputed_tokens > 0
    long = (f"data.max_length={row.offloaded_tokens}", "layout.context_parallel=1")
    made = planned(tmp_path, *long)
    assert made.layout.offload_activations
    assert made.layout.activation_checkpointing
    assert made.cost.fits
    assert "layer inputs are in host memory, it doesn't fit without" in made.layout.reason
    kept = planned(tmp_path, *long, f"{KEY}=false")
    assert not kept.layout.offload_activations
    assert not kept.cost.fits
    assert f"{KEY}: true" in kept.cost.remedy
    small = planned(tmp_path, *long, "cluster.host_memory_gib=200")
    assert not small.layout.offload_activations  # the node's memory would not take it


def test_a_node_with_too_little_memory_is_named(tmp_path: Path) -> None:
    made = planned(tmp_path, RECOMPUTED, f"{KEY}=true", "cluster.host_memory_gib=80")
    assert not made.cost.fits
    assert "of 80.0 a host" in made.cost.remedy


def test_it_implies_recomputing(tmp_path: Path) -> None:
    assert planned(tmp_path, f"{KEY}=true").layout.activation_checkpointing
    made = planned(tmp_path, accelerate="fsdp_activation_checkpointing_offload: true")
    assert (made.layout.offload_activations, made.layout.activation_checkpointing) == (True, True)


def test_a_cpu_only_copies_and_the_plan_says_so(tmp_path: Path) -> None:
    cpu = ("cluster={gpu: cpu, gpus_per_node: 2}", "layout=full-shard", RECOMPUTED)
    off, on = (planned(tmp_path, *cpu, f"{KEY}={value}") for value in ("false", "true"))
    assert on.cost.gpu_gib == off.cost.gpu_gib
    assert [any(KEY in note for note in plan.notes) for plan in (off, on)] == [False, True]


@pytest.mark.parametrize("written", ["auto", "false"])
def test_all_trials_of_a_sweep_do_alike(written: str, tmp_path: Path) -> None:
    layout = planned(tmp_path, f"{KEY}=true").layout
    trials = read_run_file(tmp_path / "run.yaml", ["sweep={lora.r: [4, 8]}", f"{KEY}={written}"]).trials
    for trial in trials:
        same = _set_layout(trial, layout)
        assert same.trial
        assert same.run.train.offload_activations is (written == "auto")
        assert same.trial.tree["train"]["offload_activations"] is (written == "auto")
        assert same.trial.tree["train"]["max_steps"] == 10


# --- what is refused ------------------


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        ("nothing-to-offload", ("train.gradient_checkpointing=false",)),
        ("not-with-compiled", ("train.gradient_checkpointing=true", "train.compile=true")),
    ],
)
def test_settings_without_inputs_to_offload_are_refused(code: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    with refused(code, f"{KEY}=true") as problems:
        planned(tmp_path, f"{KEY}=true", *overrides)
    assert problems[0].hint
    with refused(code, "fsdp_activation_checkpointing_offload"):
        planned(tmp_path, *overrides, accelerate="fsdp_activation_checkpointing_offload: true")


# --- other tools' files ------------------

TRL = "model_name_or_path: m\nuse_peft: true\ndataset_name: d\n"
AXOLOTL = "base_model: m\nadapter: lora\ndatasets: [{path: rows.jsonl, type: chat_template}]\n"


@pytest.mark.parametrize(
    ("tool", "theirs", "expected"),
    [
        ("trl", f"{TRL}activation_offloading: true\n", True),
        ("trl", f"{TRL}activation_offloading: false\n", None),
        ("axolotl", f"{AXOLOTL}activation_offloading: legacy\ngradient_checkpointing: false\n", True),
        ("axolotl", f"{AXOLOTL}gradient_checkpointing: offload\n", True),
        ("axolotl", f"{AXOLOTL}gradient_checkpointing: true\n", None),
        ("trl", f"{TRL}activation_offloading: true\ntorch_compile: true\n", None),
    ],
)
def test_other_tools_keys_are_translated(tool: str, theirs: str, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(theirs)
    made = import_file(tmp_path / "theirs.yaml", tool)
    assert made.settings.get(KEY) == expected
    if expected:
        assert made.settings["train.gradient_checkpointing"] is True
        assert "activation_offloading" not in made.no_effect
