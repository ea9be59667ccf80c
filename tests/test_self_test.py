"""`windlass check --self-test`: on this CPU everything applicable passes, and planted faults are named."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from windlass import self_test, tiny
from windlass.files import append_json_line
from windlass.launch.check.results import FAIL, PASS, SKIPPED, WARN, failed, passed
from windlass.plan import Plan
from windlass.plan.machine import own_machine_file
from windlass.ranks.rank import Rank
from windlass.train import head
from windlass.train.experts import experts
from windlass.train.kernels import family_layers, products
from windlass.weights import quantized

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")  # as its own process does: torch's, of kernels that it lacks


def verdicts(*names: str) -> dict[str, str]:
    tests = self_test.list_tests(CPU)
    return {name: self_test.run_test(name, tests[name]).verdict for name in names or tests}


def test_each_part_passes_on_a_cpu_or_says_that_it_was_not_tested() -> None:
    found = verdicts()
    assert found.pop("attention, efficient") == SKIPPED
    assert found.pop("attention by document") == SKIPPED
    assert set(found.values()) == {PASS}
    assert len(found) == 16


def doubled(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def off_by_one(codes: Tensor, *rest: Any) -> Tensor:
    values = WAY(codes, *rest)
    values.view(torch.int16)[0, 1, 2] += 1
    return values


WAY = quantized.dequantize_by_torch


@pytest.mark.parametrize(
    ("owner", "name", "broken", "test"),
    [
        (quantized, "dequantize_by_torch", off_by_one, "FP8 decoding"),
        (quantized, "dequantize_by_torch", off_by_one, "4 bits decoding, nf4"),
        (products, "grouped_linear", doubled(products.grouped_linear), "grouped products, bf16"),
        (products, "expert_products", doubled(products.expert_products), "grouped products, nf4"),
        (experts, "stack_by_expert", lambda a, b, n, *_: (a.view(n, -1, 64), b.view(n, -1, 48)), "experts with"),
        (family_layers, "expand_kv", lambda _, kv_nope, k_rot: (kv_nope, k_rot), "fused layers"),
        (torch.ops.windlass, "rms_norm_backward", doubled(torch.ops.windlass.rms_norm_backward), "norm"),
        (head, "_times_weight", doubled(head._times_weight), "loss"),
        (
            functional,
            "scaled_dot_product_attention",
            doubled(functional.scaled_dot_product_attention),
            "attention, masked",
        ),
    ],
)
@pytest.mark.fault("a kernel that computes something else", "`windlass check --self-test`", "4 bits decoding, nf4")
def test_a_broken_part_is_named(owner: Any, name: str, broken: Any, test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, broken)
    (full,) = (each for each in self_test.list_tests(CPU) if each.startswith(test))
    result = self_test.run_test(full, self_test.list_tests(CPU)[full])
    assert result.verdict == FAIL, result
    assert "self-test.json" in result.hint


def test_collectives_of_one_rank_and_of_a_broken_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ((name, test),) = self_test.list_collective_tests(CPU).items()
        assert self_test.run_test(name, test).verdict == SKIPPED
        monkeypatch.setattr(dist, "get_world_size", lambda _=None: 2)  # the other one's numbers are lost
        for kind in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
            monkeypatch.setattr(dist, kind, lambda *_, **__: None)
        lost = self_test.run_test(name, test)
        assert "all-reduce, all-gather, reduce-scatter, all-to-all gave wrong numbers" in lost.seen
    finally:
        dist.destroy_process_group()


def test_the_worst_rank_is_named_and_one_that_died_by_the_test_it_was_in(tmp_path: Path) -> None:
    def written(number: int, *results: Any) -> None:
        (tmp_path / f"output-{number}").write_text("first\nCUDA error: an illegal memory access\n")
        for result in results:
            append_json_line(tmp_path / f"results-{number}.jsonl", asdict(result))

    begun = failed("norm", self_test.BEGUN, "")
    written(0, passed("reference", "fine"))
    written(1, passed("loss", "right"), begun)
    written(2, failed("loss", "wrong", ""), begun)
    written(3)
    died = self_test.merge_results(tmp_path, [0, None, -6, 1])
    assert [(result.title, result.verdict) for result in died] == [
        ("reference", PASS), ("loss on rank 1", FAIL), ("norm on rank 1", FAIL), ("start on rank 2", FAIL)
    ]  # fmt: skip
    assert died[2].seen == "its process ended with -6: CUDA error: an illegal memory access"
    slow = self_test.merge_results(tmp_path, [0, None])
    assert [result.seen for result in slow] == ["fine", "right", "did not end"]


def steps(*losses: float, **more: float) -> list[dict[str, float]]:
    return [{"loss": loss, "grad_norm": 1.0, **more} for loss in losses]


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (steps(2.0, 1.9), PASS, "loss within 0.00%"),
        (steps(2.0, 1.8), FAIL, "loss here and on the CPU: 2 and 2, 1.8 and 1.9; 1% apart"),
        (steps(2.0), FAIL, "ValueError"),
        (steps(2.0, 1.9, apart=0.5), FAIL, "an adapter is 50% away from the CPU's"),
        (steps(2.0, 1.9, gpu_peak_gib=1.9), WARN, "peak 1.90 GiB, planned 1.00"),
    ],
)
def test_training_is_compared_with_the_cpu_and_the_plan(
    found: Any, verdict: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "train_here", lambda *_: (found, 1.0))
    monkeypatch.setattr(self_test, "largest_adapter_difference", lambda *_: found[0].get("apart", 0.1))
    monkeypatch.setattr(self_test, "is_finished", lambda folder: folder.name == "reference-bf16")
    monkeypatch.setattr(self_test, "read_steps", lambda _: steps(2.0, 1.9))
    tests = self_test.list_training_tests(Rank(world=8), tmp_path)
    result = self_test.run_test("training", tests["training, expert-parallel, fp8"])
    assert result.verdict == verdict
    assert words in result.seen


def test_the_plan_needs_neither_the_gpus_table_nor_this_hosts_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_model(tmp_path / "model", experts=self_test.EXPERTS)
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c"}\n' * 40)
    monkeypatch.setenv("HOME", str(tmp_path))
    own = own_machine_file("cpu", 1)
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    plans: list[Plan] = []
    monkeypatch.setattr(self_test, "train_rank", lambda plan, _: plans.append(plan))
    monkeypatch.setattr(self_test, "read_steps", lambda _: [])
    seen = SimpleNamespace(name="NVIDIA A10G", total_memory=22 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: seen)
    for name in ("cpu", "NVIDIA A10G", "NVIDIA H100 80GB HBM3"):
        seen.name = name
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=name != "cpu": on_gpu)
        self_test.train_here(Rank(world=1), tmp_path, "run", "resident", "bf16", 1)
    assert [plan.machine.gpu.name for plan in plans] == ["cpu", "NVIDIA A10G", "h100"]
    assert plans[1].machine.gpu.memory_gib == 22


def test_expert_adapters_with_scaled_gradients_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a small part of the gradient: its norm doesn't show it."""
    monkeypatch.setattr(self_test, "is_finished", lambda _: True)
    learned = {f"layers.{i}.{part}.lora_B.weight": torch.ones(50) for i in range(2) for part in ("q_proj", "experts")}
    for run, factor in (("one", 1.5), ("other", 1.0)):
        (tmp_path / run / "final").mkdir(parents=True)
        tensors = {name: each * (factor if "experts" in name else 1.0) for name, each in learned.items()}
        save_file(tensors, tmp_path / run / "final" / "adapter_model.safetensors")
    assert self_test.largest_adapter_difference(tmp_path / "one", tmp_path / "other") == pytest.approx(0.5)
    assert self_test.largest_adapter_difference(tmp_path / "other", tmp_path / "other") == 0


def test_other_options_beside_the_self_test_are_refused(tmp_path: Path) -> None:
    command = [warm.python(), "-m", "windlass", "check", "run.yaml", "--self-test"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, "or --self-test alone" in done.stderr) == (2, True)


BROKEN = """
import os, sys, torch
from windlass import self_test
from windlass.train.experts import experts
original = experts.stack_by_expert
def broken(*given):
    if "WINDLASS_SELF_TEST_CPU" in os.environ:
        return original(*given)
    os.abort()
experts.stack_by_expert = broken
self_test.run_tests(self_test.Path(sys.argv[1]))
"""


@pytest.mark.prove
@pytest.mark.parametrize("dies", [False, True])
def test_self_test_as_a_whole(dies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user starts it, on this CPU: without fault, and with a kernel that ends its process."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    if dies:
        monkeypatch.setattr(self_test, "COMMAND", (sys.executable, str(script)))
    report = self_test.run(dict(os.environ), tmp_path / "self-test.json", lambda _: None)
    written = json.loads((tmp_path / "self-test.json").read_text())
    assert written["verdict"] == report.verdict
    assert report.exit_code == dies
    failing = {result.title.partition(" on ")[0] for result in report.failures}
    trained = {name for name in (result.name for result in report.results) if name.startswith("training")}
    if not dies:
        assert len(trained) == 6
        assert report.results[0].verdict == SKIPPED
    else:
        assert "experts with adapters" in failing
        assert not trained
