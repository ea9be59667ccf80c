"""The recorder alone, in real ranks, and as a callback in a real TRL training, against independent counts."""

import gc
import importlib.util
import itertools
import json
import math
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import warm
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from windlass import run_folder, tiny
from windlass.errors import UserError
from windlass.files import read_json, read_json_lines
from windlass.hardware import read_gpus
from windlass.meter import LLMStepProfiler, nvml_gpu_stats, print_hw_summary
from windlass.model.family import FAMILIES
from windlass.observe import steps
from windlass.observe.counters import Counters, read_rss_gib
from windlass.observe.flops import count_flops
from windlass.observe.recorder import ExpertBalance, Recorder, count_tokens_in, mean_loss

# PEFT and TRL still use names that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")

ROOT = Path(__file__).parent.parent
PHASES = [f"{phase}_seconds" for phase in steps.PHASES]
IDS = torch.ones(2, 4, dtype=torch.int64)


def records(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return list(read_json_lines(folder / run_folder.STEPS.format(rank=rank)))


def record_step(recorder: Recorder, step: int, micro_batches: int = 1, **values: Any) -> None:
    """Call what a loop calls."""
    for _ in range(micro_batches):
        recorder.count_tokens({"input_ids": IDS, "labels": IDS})
        for phase in ("data", "forward", "backward"):
            recorder.mark(phase)
    recorder.mark("communication")
    recorder.mark("optimizer")
    recorder.end_step(step, **values)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(tmp_path, sample_every=4)
    recorder.start()
    yield recorder
    recorder.close()


# --- the recorder ---


def test_steps_and_pauses_sum_to_the_elapsed_time(recorder: Recorder, tmp_path: Path) -> None:
    for step in range(1, 5):
        time.sleep(0.01)
        record_step(recorder, step, 2, loss=2.0, grad_norm=torch.tensor(0.5), rows=[3, 4])
        if step == 2:
            for _ in range(1000):  # batches of an evaluation: progress for the heartbeat, and nothing that grows
                recorder.mark("pause")
            assert len(recorder._marks) == 2
            recorder.event("eval", step, eval_loss=1.5)
    recorder.close()
    recorder.close()
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert set(line) <= set(steps.FIELDS), "every field is documented"
        assert line["step_seconds"] == pytest.approx(sum(line[phase] for phase in PHASES), rel=1e-6)
        assert (line["loss"], line["grad_norm"], line["rows"], line["micro_batches"]) == (2.0, 0.5, [3, 4], 2)
        assert (line["sequences"], line["tokens"], line["padded_tokens"], line["supervised_tokens"]) == (4, 16, 0, 12)
        assert line["data_seconds"] >= 0.01
    wall = lines[-1]["time"] - lines[0]["time"]
    assert sum(line["step_seconds"] + line["pause_seconds"] for line in lines[1:]) == pytest.approx(wall, abs=0.05)
    events = list(read_json_lines(tmp_path / run_folder.EVENTS))
    assert [(event["kind"], event["step"]) for event in events] == [("start", 0), ("eval", 2)]
    assert recorder.position().progress == recorder.progress > 1000
    with pytest.raises(UserError, match="nothing is measured"):
        recorder.mark("data")


class Event:
    """A CUDA event that the GPU has not reached."""

    reached = False

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return Event.reached

    def elapsed_time(self, later: "Event") -> float:
        return 1000 * (later.at - self.at)


def test_steps_are_written_in_order_once_their_time_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "reached", False)
    recorder = Recorder(tmp_path, sample_every=0)
    monkeypatch.setattr(recorder, "now", Event)
    recorder.start()
    record_step(recorder, 1)
    record_step(recorder, 2)
    assert records(tmp_path) == [], "nothing waits, nothing is written too early"
    monkeypatch.setattr(Event, "reached", True)
    record_step(recorder, 3)
    assert [line["step"] for line in records(tmp_path)] == [1, 2, 3]
    record_step(recorder, 4, hold=True)
    assert len(records(tmp_path)) == 3, "the caller still has values for it"
    recorder.add_values(loss=7.5, step=9)
    assert (records(tmp_path)[3]["loss"], records(tmp_path)[3]["step"]) == (7.5, 4)
    record_step(recorder, 5, loss=math.nan, grad_norm=torch.tensor(math.inf))
    recorder.close()
    for line in (tmp_path / "steps-rank0.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (records(tmp_path)[-1]["non_finite"], records(tmp_path)[-1]["loss"]) == (["loss", "grad_norm"], None)


@pytest.mark.fault(
    "a full disk under a script's steps",
    "the profiler",
    "steps-rank0.jsonl can't be written: No space left on device (",
)
def test_a_full_disk_is_reported_once_and_the_loop_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "steps-rank0.jsonl").symlink_to("/dev/full")
    recorder = Recorder(tmp_path)
    recorder.start()
    for step in range(1, 40):
        record_step(recorder, step)
    recorder.close()
    reported = capsys.readouterr().err
    assert reported.startswith("rank 0: ")
    assert "steps-rank0.jsonl can't be written: No space left on device (" in reported
    assert reported.endswith("bytes are free there); training continues without it\n")
    assert reported.count("\n") == 1


# --- the parts ---


def test_tokens_of_batches_without_masks_or_labels() -> None:
    def counted(**batch: torch.Tensor) -> list[float] | None:
        counts = count_tokens_in(batch)
        return None if counts is None else counts.tolist()

    assert counted(input_ids=torch.zeros(1, 10, dtype=torch.int64)) == [10, 0, 10]
    mask, labels = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[5, 6, -100], [5, -100, -100]])
    assert counted(input_ids=mask, attention_mask=mask, labels=labels) == [3, 3, 1]
    # Packed: the shorter row is filled up with documents of one token each.
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]])
    assert counted(input_ids=torch.zeros(2, 5, dtype=torch.int64), position_ids=positions)[:2] == [7, 3]  # type: ignore[index]
    assert counted(pixel_values=mask) is None
    losses, counts = [torch.tensor(1.0), torch.tensor(4.0)], [torch.tensor([9, 0, 1.0]), torch.tensor([9, 0, 2.0])]
    assert mean_loss(losses, counts, summed=False) == 3
    assert mean_loss(losses, counts, summed=True) == 5
    assert mean_loss(losses, [], summed=False) == 2.5


@pytest.mark.parametrize("family", ["llama", "mistral4"])
def test_flops_are_what_torch_counts(family: str, tmp_path: Path) -> None:
    model = getattr(transformers, FAMILIES[family].causal_lm).from_pretrained(
        tiny.write_model(tmp_path, family, wrapper=False, quantization="none", dtype="float32", tokenizer=False),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"]))
    model.enable_input_require_grads()  # else the first layer, half of this small model, needs fewer gradients
    length = 48
    ids = torch.randint(20, 400, (2, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    # Eager attention computes the full square, of which the count takes the causal half.
    expected = count_flops(model, recomputes=False).model(2 * length) * ids.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)


class Router(nn.Module):
    num_experts, top_k = 4, 1

    def __init__(self, chosen: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))
        self.chosen = torch.tensor(chosen).reshape(-1, 1)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return hidden, hidden, self.chosen


def test_flops_of_a_rank_with_a_part_of_the_experts_are_the_same() -> None:
    def mixture(stored: int) -> nn.Module:
        layer = nn.Module()
        layer.gate, layer.experts = Router([0]), nn.ParameterDict({"up": torch.zeros(stored, 16, 4)})
        model = nn.Module()
        model.mlp = layer
        return model

    assert count_flops(mixture(4), recomputes=False).weights == count_flops(mixture(2), recomputes=False).weights > 0


def test_expert_balance_of_planted_routers() -> None:
    model = nn.ModuleList([Router([0, 0, 0, 0]), Router([0, 1, 2, 3]), Router([1, 1, 2, 3])])
    balance = ExpertBalance(model)
    balance.start()
    # A later hook that renumbers, as expert parallelism appends one, must not be counted.
    for router in model:
        router.register_forward_hook(lambda _module, _inputs, output: (*output[:2], output[2] * 0))
        router(torch.zeros(4, 2))
    with torch.no_grad():  # an evaluation between two steps
        model[2].chosen = torch.tensor([[0]])
        model[2](torch.zeros(1, 2))
    counts = {"busiest": [4.0, 1.0, 2.0], "idlest": [0.0, 1.0, 0.0], "unused": [3, 0, 1]}
    assert balance.stop() == {"experts": 4, **counts}
    model[0](torch.zeros(4, 2))
    assert balance.stop() is None, "nothing is counted in between"


def test_infiniband_counters_are_read_in_words(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        counters = tmp_path / name / "ports" / "1" / "counters"
        counters.mkdir(parents=True)
        (counters.parent / "state").write_text(state + "\n")
        (counters / "port_xmit_data").write_text("1000\n")
        (counters / "port_rcv_data").write_text("0\n")
    node = Counters(torch.device("cpu"), tmp_path)
    assert [port.parent.parent.parent.name for port in node.ports] == ["mlx5_0"]
    (node.ports[0] / "port_xmit_data").write_text(str(1000 + 250_000_000))
    (node.ports[0] / "port_rcv_data").write_text("500000000")
    sample = node.sample()
    assert (sample["infiniband_sent_gb"], sample["infiniband_received_gb"]) == pytest.approx((1.0, 2.0))


@pytest.mark.skipif(not read_gpus(health=False).error, reason="this machine has NVML")
def test_no_nvml_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert nvml_gpu_stats() == []
    print_hw_summary()
    shown = capsys.readouterr().out
    assert "none (NVML does not start" in shown or "none (nvidia-ml-py is not installed" in shown
    assert f"torch {torch.__version__}" in shown


# --- the callback ---


@dataclass
class Trained:
    folder: Path
    records: list[dict[str, Any]]
    logs: list[dict[str, Any]]
    trainer: Any


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"), wrapper=False, quantization="none", dtype="float32")


@pytest.fixture(scope="module")
def trained(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Twelve steps of TRL on a small mixture, with accumulation, evaluations, saves and a log every third step."""
    folder = tmp_path_factory.mktemp("run")
    rows = [{"prompt": "up " * (1 + i % 5), "completion": "and down " * (1 + i % 3)} for i in range(64)]
    profiler = LLMStepProfiler(4, 64, report_meta={"model": {"name": "small"}}, script_name="script", report=False)
    trainer = SFTTrainer(
        model=transformers.Mistral4ForCausalLM.from_pretrained(small),
        args=SFTConfig(
            str(folder),
            max_steps=12,
            logging_steps=3,
            eval_strategy="steps",
            eval_steps=6,
            save_steps=6,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_length=64,
            report_to=[],
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            gradient_checkpointing=None,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]),
        processing_class=AutoTokenizer.from_pretrained(small),
        peft_config=LoraConfig(r=4, target_modules=["o_proj"]),
        callbacks=[profiler],
    )
    trainer.train()
    return Trained(folder, records(folder), trainer.state.log_history, trainer)


def test_the_callback_records_every_step_of_a_trainer(trained: Trained) -> None:
    assert [line["step"] for line in trained.records] == list(range(1, 13))
    for line in trained.records:
        assert set(line) <= set(steps.FIELDS)
        assert (line["micro_batches"], line["sequences"]) == (2, 4)
        assert min(line["forward_seconds"], line["backward_seconds"], line["optimizer_seconds"]) > 0
    about = read_json(trained.folder / "meter-rank0.json")
    assert (about["script_name"], about["report_meta"]) == ("script", {"model": {"name": "small"}})
    assert about["hardware"]["versions"]["torch"] == torch.__version__
    assert about["unmeasured"]["gpu_*, pcie_*, nvlink_*"] == "the run is on cpu"
    assert about["arithmetic"]["flops_per_token"] > 0
    sampled = {line["step"]: line["experts"] for line in trained.records if "experts" in line}
    assert list(sampled) == [1, 5, 9], "every debug_freq steps"
    for balance in sampled.values():
        assert (balance["experts"], len(balance["busiest"]), len(balance["idlest"])) == (8, 2, 2)
        assert all(high >= 1 >= low for high, low in zip(balance["busiest"], balance["idlest"], strict=True))
    assert not [name for name, module in trained.trainer.model.named_modules() if module._forward_pre_hooks]

    logged = [log for log in trained.logs if "loss" in log]
    assert len(logged) == 4
    for log in logged:
        line = trained.records[log["step"] - 1]
        assert line["grad_norm"] == pytest.approx(log["grad_norm"], rel=1e-6)
        assert line["learning_rate"] == pytest.approx(log["learning_rate"], rel=1e-6)
        window = [r["loss"] for r in trained.records[log["step"] - 3 : log["step"]]]
        assert sum(window) / 3 == pytest.approx(log["loss"], rel=1e-4)


def test_tokens_evaluations_and_saves(trained: Trained) -> None:
    loader = iter(trained.trainer.get_train_dataloader())  # the same batches again, counted by hand
    for line in trained.records:
        seen = list(itertools.islice(loader, 2))
        ids = sum(each["input_ids"].numel() for each in seen)
        useful = sum(int(each["attention_mask"].sum()) for each in seen)
        supervised = sum(int((each["labels"][:, 1:] != -100).sum()) for each in seen)
        found = (line["tokens"], line["padded_tokens"], line["supervised_tokens"], line["masked_tokens"])
        assert found == (useful, ids - useful, supervised, useful - supervised)

    paused = {line["step"]: line["pause_seconds"] for line in trained.records}
    events = list(read_json_lines(trained.folder / run_folder.EVENTS))
    kinds = [(event["kind"], event["step"]) for event in events]
    assert kinds == [("start", 0), ("eval", 6), ("save", 6), ("eval", 12), ("save", 12), ("end", 12)]
    for event in (e for e in events if e["kind"] == "save"):
        written = (trained.folder / f"checkpoint-{event['step']}").rglob("*")
        assert event["bytes"] == sum(path.stat().st_size for path in written if path.is_file())
        assert event["seconds"] > 0
    assert next(e["seconds"] for e in events if e["kind"] == "save") < paused[7]
    evaluated = [log["eval_loss"] for log in trained.logs if "eval_loss" in log]
    assert [e["eval_loss"] for e in events if e["kind"] == "eval"] == evaluated


PLAIN = """
    import sys
    import transformers
    from windlass.meter import LLMStepProfiler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Fault(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                raise MemoryError("planted")

    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 8
    arguments = TrainingArguments(
        sys.argv[1], max_steps=8, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False, per_device_train_batch_size=2,
    )
    model = transformers.Mistral4ForCausalLM.from_pretrained(sys.argv[2])
    Trainer(model, arguments, train_dataset=rows, callbacks=[LLMStepProfiler(), Fault()]).train()
"""


def test_a_plain_trainer_that_an_exception_ends_has_its_steps_and_a_report(small: Path, tmp_path: Path) -> None:
    command = [warm.python(), "-c", textwrap.dedent(PLAIN), str(tmp_path), str(small)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert "MemoryError: planted" in done.stderr, done.stderr
    assert [(line["step"], line["tokens"]) for line in records(tmp_path)] == [(1, 8), (2, 8), (3, 8)]
    assert "experts" in records(tmp_path)[0]
    (run,) = read_json(tmp_path / "report.json")["runs"]
    assert run["headline"]["steps"] == 3
    assert run["state"] == "running, or ended without saying so"
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_imports_of_the_published_script() -> None:
    cold = "import sys, windlass.meter; assert not {'torch', 'rich'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", cold], timeout=60, check=True)
    path = ROOT / "examples" / "mistral-small-4" / "llm_train_utils.py"
    spec = importlib.util.spec_from_file_location("llm_train_utils", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.LLMStepProfiler is LLMStepProfiler
    assert module._nval_gpu_stats is module._nvaml_gpu_stats is nvml_gpu_stats
    make: Callable[..., Any] = LLMStepProfiler
    make()
    make(debug_freq=None, seq_len=None, output_dir=None, report_meta=None, script_name=None)


@pytest.mark.takes("2,000 steps, most of them with traced memory")
def test_recording_is_cheap_and_needs_no_more_memory_with_more_steps(tmp_path: Path) -> None:
    """Python's own memory and the process's, after a third of the steps; the cost of the median step."""
    recorder = Recorder(tmp_path)
    recorder.start()
    for step in range(1, 501):
        record_step(recorder, step, loss=1.0)
    costs = sorted(line["meter_seconds"] for line in records(tmp_path)[-200:])
    assert costs[100] < 0.005, "seconds; 0.0001 on a quiet machine"
    tracemalloc.start()  # it makes everything slow
    used: list[tuple[int, float]] = []
    for step in range(501, 2001):
        record_step(recorder, step, loss=1.0)
        if step in (1000, 2000):
            gc.collect()
            used.append((tracemalloc.get_traced_memory()[0], read_rss_gib()))
    tracemalloc.stop()
    recorder.close()
    assert used[1][0] - used[0][0] < 50_000
    assert used[1][1] - used[0][1] < 0.02
    assert [line["step"] for line in records(tmp_path)] == list(range(1, 2001))
