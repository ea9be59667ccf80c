"""The profiler in a real TRL training, and each of its parts against something counted independently."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from meter_script import Script
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from windlass import tiny
from windlass.observe import steps
from windlass.observe.meter import LLMStepProfiler, batch, clock, experts, host, nvml, nvml_gpu_stats, print_hw_summary
from windlass.observe.meter.flops import count

# PEFT and TRL still use names that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")

ROOT = Path(__file__).parent.parent
PHASES = [f"{phase}_seconds" for phase in steps.PHASES]


def read(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return list(steps.lines(folder / steps.STEPS.format(rank=rank)))


@dataclass
class Trained:
    folder: Path
    records: list[dict[str, Any]]
    logs: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    trainer: Any


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model"), wrapper=False, quantization="none", dtype="float32")


@pytest.fixture(scope="module")
def trained(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Twelve steps of TRL on a small mixture, with accumulation, evaluations, saves and a log every third step."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = AutoTokenizer.from_pretrained(small)
    rows = [{"prompt": "up " * (1 + i % 5), "completion": "and down " * (1 + i % 3)} for i in range(64)]
    profiler = LLMStepProfiler(
        debug_freq=4, seq_len=64, report_meta={"model": {"name": "small"}}, script_name="script", report=False
    )
    trainer = SFTTrainer(
        model=transformers.Mistral4ForCausalLM.from_pretrained(small),
        args=SFTConfig(
            output_dir=str(folder),
            max_steps=12,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=3,
            eval_strategy="steps",
            eval_steps=6,
            save_steps=6,
            report_to=[],
            use_cpu=True,
            bf16=False,
            max_length=64,
            activation_checkpointing=False,
            gradient_checkpointing=None,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["o_proj"]),
        callbacks=[profiler],
    )
    trainer.train()
    return Trained(folder, read(folder), trainer.state.log_history, rows, trainer)


@pytest.fixture(scope="module")
def plainly(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """transformers' own Trainer, told nothing but the callback; an exception ends its script after the third step."""
    folder = tmp_path_factory.mktemp("plain")
    script = textwrap.dedent(f"""
        import transformers
        from transformers import Trainer, TrainerCallback, TrainingArguments
        from windlass.observe.meter import LLMStepProfiler

        class Fault(TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                if state.global_step == 3:
                    raise MemoryError("planted")

        rows = [{{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}}] * 8
        arguments = TrainingArguments(
            {str(folder)!r}, max_steps=8, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False, per_device_train_batch_size=2,
        )
        model = transformers.Mistral4ForCausalLM.from_pretrained({str(small)!r})
        Trainer(model, arguments, train_dataset=rows, callbacks=[LLMStepProfiler(), Fault()]).train()
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "MemoryError: planted" in done.stderr, done.stderr
    return folder


def test_without_any_argument_in_a_plain_trainer(plainly: Path) -> None:
    assert [record["step"] for record in read(plainly)] == [1, 2, 3]
    assert [record["tokens"] for record in read(plainly)] == [8, 8, 8]
    assert all(record["forward_seconds"] > 0 for record in read(plainly))
    assert "experts" in read(plainly)[0]


def test_a_script_that_an_exception_ends_has_a_report(plainly: Path) -> None:
    made = json.loads((plainly / "report.json").read_text())["runs"][0]
    assert made["headline"]["steps"] == 3
    assert made["state"] == "running or ended without a word"
    assert (plainly / "report.html").stat().st_size > 10_000


def test_every_step_is_there_with_its_times(trained: Trained) -> None:
    assert [record["step"] for record in trained.records] == list(range(1, 13))
    for record in trained.records:
        assert set(record) <= set(steps.FIELDS), "every field is documented"
        assert record["step_seconds"] == pytest.approx(sum(record[phase] for phase in PHASES), rel=1e-6)
        assert all(record[phase] >= 0 for phase in PHASES)
        assert record["forward_seconds"] > 0
        assert record["backward_seconds"] > 0
        assert record["optimizer_seconds"] > 0
        assert record["micro_batches"] == 2
        assert record["sequences"] == 4
        assert record.get("rss_gib", 1) > 0.05, "sampled within its budget, so not in every step"


def test_wall_time_is_accounted_for(trained: Trained) -> None:
    """Steps and pauses together are the time between the first and the last step's end."""
    records = trained.records
    wall = records[-1]["time"] - records[0]["time"]
    told = sum(record["step_seconds"] + record["pause_seconds"] for record in records[1:])
    assert told == pytest.approx(wall, abs=0.03)


def test_loss_gradient_norm_and_rate_are_the_trainers(trained: Trained) -> None:
    logged = [log for log in trained.logs if "loss" in log]
    assert len(logged) == 4
    for log in logged:
        at = next(record for record in trained.records if record["step"] == log["step"])
        assert at["grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-6)
        assert at["learning_rate"] == pytest.approx(log["learning_rate"], rel=1e-6)
        window = [r["loss"] for r in trained.records if log["step"] - 3 < r["step"] <= log["step"]]
        assert sum(window) / 3 == pytest.approx(log["loss"], rel=1e-4)


def test_tokens_are_the_batches(trained: Trained) -> None:
    """The same batches again, counted by hand."""
    loader = iter(trained.trainer.get_train_dataloader())
    for record in trained.records:
        seen = list(itertools.islice(loader, 2))
        ids = sum(each["input_ids"].numel() for each in seen)
        useful = sum(int(each["attention_mask"].sum()) for each in seen)
        learned = sum(int((each["labels"][:, 1:] != -100).sum()) for each in seen)
        assert (record["tokens"], record["padded_tokens"], record["supervised_tokens"]) == (
            useful,
            ids - useful,
            learned,
        )
        assert record["masked_tokens"] == useful - learned


def test_pauses_hold_evaluations_and_saves(trained: Trained) -> None:
    paused = {record["step"]: record["pause_seconds"] for record in trained.records}
    quiet = [seconds for step, seconds in paused.items() if step not in (1, 4, 7, 10)]
    assert paused[7] > 2 * max(quiet), "the evaluation and the save after step 6"
    events = list(steps.lines(trained.folder / steps.EVENTS))
    assert [(e["kind"], e["step"]) for e in events] == [
        ("start", 0),
        ("eval", 6),
        ("save", 6),
        ("eval", 12),
        ("save", 12),
        ("end", 12),
    ]
    for event in (e for e in events if e["kind"] == "save"):
        checkpoint = trained.folder / f"checkpoint-{event['step']}"
        assert event["bytes"] == sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        assert event["seconds"] > 0
    assert next(e["seconds"] for e in events if e["kind"] == "save") < paused[7]
    evaluated = [log["eval_loss"] for log in trained.logs if "eval_loss" in log]
    assert [e["eval_loss"] for e in events if e["kind"] == "eval"] == evaluated


def test_experts_are_looked_at_every_debug_freq_steps(trained: Trained) -> None:
    looked = {record["step"]: record["experts"] for record in trained.records if "experts" in record}
    assert list(looked) == [1, 5, 9]
    for look in looked.values():
        assert look["experts"] == 8
        assert len(look["busiest"]) == len(look["idlest"]) == 2, "one per layer"
        assert all(busy >= 1 >= idle for busy, idle in zip(look["busiest"], look["idlest"], strict=True))


def test_no_hook_stays_on_the_model(trained: Trained) -> None:
    left = [name for name, module in trained.trainer.model.named_modules() if module._forward_pre_hooks]
    assert not left


def test_what_holds_for_the_run_is_written_once(trained: Trained) -> None:
    about = json.loads((trained.folder / "meter-rank0.json").read_text())
    assert about["script_name"] == "script"
    assert about["report_meta"] == {"model": {"name": "small"}}
    assert about["hardware"]["versions"]["torch"] == torch.__version__
    assert about["unmeasured"]["gpu_*, pcie_*, nvlink_*"] == "the run is on cpu"
    assert about["arithmetic"]["flops_per_token"] > 0


@pytest.mark.parametrize("family", ["llama", "mistral4", "mixtral"])
def test_flops_are_what_torch_counts(family: str, tmp_path: Path) -> None:
    model = getattr(transformers, f"{tiny.CLASSES[family]}ForCausalLM").from_pretrained(
        tiny.write(tmp_path, family, wrapper=False, quantization="none", dtype="float32", tokenizer=False),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"]))
    model.enable_input_require_grads()  # else the first layer, half of this small model, needs fewer gradients
    length = 48
    ids = torch.randint(20, 400, (2, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    # Eager attention computes the whole square, of which the count takes the causal half.
    expected = count(model, 2 * length, recomputes=False).model * ids.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)


def test_flops_of_a_part_of_the_experts_are_the_same() -> None:
    """Under expert parallelism a rank holds some of the experts; a token costs what it costs."""

    class Router(nn.Module):
        num_experts, top_k = 8, 2

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 4))

    def mixture(held: int) -> nn.Module:
        model = nn.Module()
        model.gate = Router()
        model.experts = nn.ParameterDict({"up": torch.zeros(held, 16, 4)})
        block = nn.Module()
        block.mlp = model
        return block

    assert count(mixture(8), 0, recomputes=False).model == count(mixture(4), 0, recomputes=False).model


def test_expert_balance_of_a_planted_router() -> None:
    class Router(nn.Module):
        num_experts, top_k = 4, 1

        def __init__(self, chosen: list[int]) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 2))
            self.chosen = torch.tensor(chosen).reshape(-1, 1)

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return hidden, hidden, self.chosen

    model = nn.ModuleList([Router([0, 0, 0, 0]), Router([0, 1, 2, 3]), Router([1, 1, 2, 3])])
    balance = experts.Balance(model)
    balance.start()
    # A later hook that renumbers, as expert parallelism appends one, must not be seen.
    for router in model:
        router.register_forward_hook(lambda _module, _inputs, output: (*output[:2], output[2] * 0))
        router(torch.zeros(4, 2))
    assert balance.stop() == {
        "experts": 4,
        "busiest": [4.0, 1.0, 2.0],
        "idlest": [0.0, 1.0, 0.0],
        "unused": [3, 0, 1],
    }
    model[0](torch.zeros(4, 2))
    assert balance.stop() is None, "nothing is counted between looks"


def test_waits_are_taken_out_of_their_phase() -> None:
    at = clock.HostMark
    spans = clock.Spans([("start", at(0)), ("data", at(1)), ("forward", at(4)), ("backward", at(10))])
    spans.waits = [(2, at(2), at(2.5)), (3, at(5), at(9))]
    assert spans.seconds() == {"data": 1, "forward": 2.5, "backward": 2, "communication": 4.5}
    saved = clock.Spans([("start", at(0)), ("pause", at(9)), ("data", at(10))], [(1, at(1), at(8))])
    assert saved.seconds() == {"pause": 9, "data": 1}, "who waits for a save is not slow in the step after it"


def test_steps_are_written_in_order_once_their_time_is_known(tmp_path: Path) -> None:
    """On a GPU a step's events pass later than the host gets there: nothing waits, nothing is written too early."""

    class Later(clock.HostMark):
        done = False

        def passed(self) -> bool:
            return Later.done

    profiler = LLMStepProfiler(debug_freq=0, output_dir=tmp_path, report=False)
    script = Script(tmp_path, profiler)
    script.tell("on_train_begin")
    profiler.now = lambda: Later(time.perf_counter())
    script.step()
    script.step()
    assert [len(read(tmp_path)), len(profiler.pending)] == [0, 2]
    Later.done = True
    script.step()
    assert [record["step"] for record in read(tmp_path)] == [1, 2, 3]
    script.tell("on_train_end")


def test_a_step_waits_for_the_log_that_follows(tmp_path: Path) -> None:
    profiler = LLMStepProfiler(output_dir=tmp_path, report=False)
    script = Script(tmp_path, profiler)
    script.tell("on_train_begin")
    script.control.should_log = True
    script.step()
    assert read(tmp_path) == []
    script.tell("on_log", logs={"loss": 7.5, "grad_norm": 0.25})
    assert [(r["loss"], r["grad_norm"]) for r in read(tmp_path)] == [(7.5, 0.25)]
    profiler.note(loss=1.5, grad_norm=2.5, learning_rate=0.5, skipped=True)
    script.step()
    script.tell("on_log", logs={"loss": 7.5, "grad_norm": 0.25})
    last = read(tmp_path)[-1]
    assert (last["loss"], last["grad_norm"], last["learning_rate"], last["skipped"]) == (1.5, 2.5, 0.5, True)
    script.tell("on_train_end")


def test_a_number_that_is_none_is_valid_json(tmp_path: Path) -> None:
    profiler = LLMStepProfiler(output_dir=tmp_path, report=False)
    script = Script(tmp_path, profiler)
    script.tell("on_train_begin")
    profiler.note(loss=math.nan, grad_norm=math.inf)
    script.step()
    line = (tmp_path / "steps-rank0.jsonl").read_text()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["non_finite"] == ["loss", "grad_norm"]
    assert record["loss"] is None
    script.tell("on_train_end")


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from meter_script import Script  # type: ignore[import-not-found]
from windlass.observe.meter import LLMStepProfiler
script = Script(Path(sys.argv[1]), LLMStepProfiler(report=False))
script.tell("on_train_begin")
while True:
    script.step()
    print(script.state.global_step, flush=True)
"""


def test_a_killed_run_keeps_every_step_it_made(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED.format(tests=str(ROOT / "tests")), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        told = next(int(line) for line in process.stdout if int(line) >= 50)
        process.send_signal(signal.SIGKILL)
    made = [record["step"] for record in read(tmp_path)]
    assert made[:told] == list(range(1, told + 1))


RANK = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch, torch.distributed as dist
from meter_script import Script  # type: ignore[import-not-found]
from windlass.observe.meter import LLMStepProfiler
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{{folder}}/meet", rank=rank, world_size=2)
script = Script(folder, LLMStepProfiler(report=False), rank, 2)
script.tell("on_train_begin")
def exchange():
    time.sleep(0.05 * rank)  # the planted straggler
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        time.sleep(0.02)
for _ in range(5):
    script.step(exchange)
script.tell("on_train_end")
assert dist.Work.wait.__name__ == "wait", "the clock is taken out again"
dist.barrier()  # and everything is bound as before
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""


def test_waiting_for_a_slow_rank_is_communication_and_its_own_time_is_not(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK.format(tests=str(ROOT / "tests")), str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in (0, 1)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    fast, slow = read(tmp_path, 0)[1:], read(tmp_path, 1)[1:]
    assert all(0.02 < record["communication_seconds"] < 0.09 for record in fast)
    assert all(0.015 < record["backward_seconds"] < 0.05 for record in fast), "its own 20 ms, not the wait"
    assert all(record["backward_seconds"] > 0.045 for record in slow)
    assert sum(r["communication_seconds"] for r in slow) < sum(r["communication_seconds"] for r in fast) / 2


class Issuing:
    """A process group that does its work where it is asked to, as NCCL does with a blocking collective."""

    def barrier(self) -> None:
        time.sleep(0.02)


def test_a_collective_that_blocks_where_it_is_issued_is_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, seen = "the loop's", []
    monkeypatch.setattr(clock, "ISSUED", ("barrier",))
    monkeypatch.setattr("torch.distributed.ProcessGroup", Issuing)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    waits = clock.Waits(clock.host_mark, lambda start, end: seen.append(start.until(end)), lambda: stream)
    waits.install()
    try:
        Issuing().barrier()
        stream = "FSDP's own, beside the loop's"
        Issuing().barrier()
    finally:
        waits.remove()
    assert len(seen) == 1, "what another stream does is no wait of the loop"
    assert seen[0] >= 0.02
    assert Issuing.barrier.__name__ == "barrier"


def steps_made(folder: Path, number: int) -> Iterator[int]:
    script = Script(folder, LLMStepProfiler(output_dir=folder, report=False))
    script.tell("on_train_begin")
    for at in range(number):
        script.step()
        yield at
    script.tell("on_train_end")


@pytest.mark.parametrize(
    "number", [3_000, pytest.param(1_000_000, marks=[pytest.mark.prove, pytest.mark.timeout(1800)])]
)
def test_memory_does_not_grow_with_the_steps(number: int, tmp_path: Path) -> None:
    """Growth from a third of the way on, of Python's own memory and of the process."""
    start = (0, 0.0)
    tracing = number < 100_000
    if tracing:
        tracemalloc.start()
    try:
        for at in steps_made(tmp_path, number):
            if at in (number // 3, number - 2):
                gc.collect()
                now = (tracemalloc.get_traced_memory()[0] if tracing else 0, host.rss_gib())
                if at == number // 3:
                    start = now
    finally:
        if tracing:
            tracemalloc.stop()
    assert now[0] - start[0] < 50_000
    assert now[1] - start[1] < 0.02
    with (tmp_path / "steps-rank0.jsonl").open() as lines:
        assert sum(1 for _ in lines) == number


def test_measuring_is_cheap(tmp_path: Path) -> None:
    """The median step's own spans: a fifth of a millisecond here; 1 % of a step of a tenth of a second is 1."""
    for _ in steps_made(tmp_path, 200):
        pass
    costs = sorted(record["meter_seconds"] for record in read(tmp_path))
    assert costs[100] < 0.001


def test_batches_without_masks_or_labels() -> None:
    packed = torch.zeros(1, 10, dtype=torch.int64)
    assert batch.counts({"input_ids": packed}).tolist() == [10, 0, 10]  # type: ignore[union-attr]
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    labels = torch.tensor([[5, 6, -100], [5, -100, -100]])
    counted = batch.counts({"input_ids": mask, "attention_mask": mask, "labels": labels})
    assert counted is not None
    assert counted.tolist() == [3, 3, 1]
    assert batch.counts({"pixel_values": mask}) is None


def test_infiniband_counters_are_read_in_words(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        counters = tmp_path / name / "ports" / "1" / "counters"
        counters.mkdir(parents=True)
        (counters.parent / "state").write_text(state + "\n")
        (counters / "port_xmit_data").write_text("1000\n")
        (counters / "port_rcv_data").write_text("0\n")
    ports = host.infiniband_ports(tmp_path)
    assert [port.parent.parent.parent.name for port in ports] == ["mlx5_0"]
    node = host.Host(ports)
    (ports[0] / "port_xmit_data").write_text(str(1000 + 250_000_000))
    (ports[0] / "port_rcv_data").write_text("500000000")
    sample = node.sample()
    assert (sample["infiniband_sent_gb"], sample["infiniband_received_gb"]) == (1.0, 2.0)


@pytest.mark.skipif(not nvml.why_absent(), reason="this machine has NVML")
def test_no_nvml_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert nvml_gpu_stats() == []
    print_hw_summary()
    shown = capsys.readouterr().out
    assert "none (NVML does not start" in shown or "none (nvidia-ml-py is not installed" in shown
    assert f"torch {torch.__version__}" in shown


def test_the_published_scripts_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "examples" / "mistral-small-4" / "llm_train_utils.py"
    spec = importlib.util.spec_from_file_location("llm_train_utils", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.LLMStepProfiler is LLMStepProfiler
    assert module._nval_gpu_stats is module._nvaml_gpu_stats is nvml_gpu_stats
    LLMStepProfiler()
    LLMStepProfiler(debug_freq=None, seq_len=None, output_dir=None, report_meta=None, script_name=None)  # type: ignore[arg-type]
