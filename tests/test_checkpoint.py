"""Checkpoints on disk: whole or not there, found by step, kept by worth. One process, a tiny adapter, real files."""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import resource
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.errors import RunError, UserError
from windlass.model.targets import ExpertShard
from windlass.train import checkpoint, resume
from windlass.train.checkpoint import MANIFEST, random_state, restore_random
from windlass.train.saver import Saver


def adapted() -> PeftModel:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return get_peft_model(base, LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False))


class Trained:
    """An adapter a step into training."""

    def __init__(self) -> None:
        self.model = adapted()
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))
        self.step()

    def step(self) -> None:
        self.model(torch.ones(1, 8)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def snapshot(self, step: int, **manifest: Any) -> checkpoint.Snapshot:
        taken = checkpoint.snapshot(
            step,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            state={"global_step": step},
            manifest=manifest,
        )
        assert taken is not None
        return taken


@pytest.fixture
def trained() -> Trained:
    return Trained()


def written(run: Path, trained: Trained, *steps: int, losses: dict[int, float] | None = None) -> list[str]:
    """Checkpoints of these steps; what was said."""
    said: list[str] = []
    saver = Saver(run, None, {}, said.append)
    for step in steps:
        saver.begin(trained.snapshot(step, eval_loss=(losses or {}).get(step)))
    saver.close()
    return said


def names(run: Path) -> list[str]:
    return [path.name for path in checkpoint.saved(run / "checkpoints")]


def test_what_was_saved_comes_back_bit_for_bit_though_training_went_on(tmp_path: Path, trained: Trained) -> None:
    made = trained.snapshot(1)
    expected = {key: value.clone() for key, value in made.adapter.items()}
    moments = [value["exp_avg"].clone() for value in trained.optimizer.state.values()]
    trained.step()  # the copy in host memory is its own
    saver = Saver(tmp_path, None, {}, print)
    saver.begin(made)
    saver.close()
    other = Trained()
    folder = tmp_path / "checkpoints" / "step-1"
    checkpoint.load_adapter(other.model, folder)
    checkpoint.load_optimizer(other.optimizer, other.scheduler, folder, other.model)
    assert all(torch.equal(load_file(folder / checkpoint.ADAPTER)[key], expected[key]) for key in expected)
    assert all(
        torch.equal(value["exp_avg"], moment)
        for value, moment in zip(other.optimizer.state.values(), moments, strict=True)
    )
    assert other.scheduler.state_dict()["last_epoch"] == 1


@pytest.mark.parametrize("here", [0, 1])
def test_parts_of_experts_travel_by_way_of_the_host(monkeypatch: pytest.MonkeyPatch, here: int) -> None:
    """Of two ranks on GPUs: between these, NCCL would open a channel for each pair."""
    devices: list[str] = []

    def seen(tensor: Tensor, _other: int) -> None:
        devices.append(tensor.device.type)

    class Halves:
        def of(self, _name: str) -> ExpertShard:
            return ExpertShard(2 * here, 2, 4)

    monkeypatch.setattr(checkpoint, "rank", lambda: here)
    monkeypatch.setattr(checkpoint, "holders", lambda _: {0: 0, 2: 1})
    monkeypatch.setattr(dist, "send", seen)
    monkeypatch.setattr(dist, "recv", seen)
    with FakeTensorMode():
        (made,) = checkpoint.gather_parts(Halves(), [("x.lora_A.weight", torch.empty(6, 8, device="cuda"))])  # type: ignore[arg-type]
    assert devices == ["cpu"]
    assert (made.device.type, tuple(made.shape)) == (("cpu", (12, 8)) if here == 0 else ("cuda", (6, 8)))


def test_a_copy_is_made_once(trained: Trained) -> None:
    """Of every tensor in the adapter and in the optimizer's state."""
    with Copies() as copies:  # type: ignore[no-untyped-call]
        made = trained.snapshot(1)
    tensors = [
        *made.adapter.values(),
        *(t for each in made.optimizer["state"].values() for t in each.values()),
    ]
    live = {p.data_ptr() for p in trained.model.parameters()}
    assert not live & {tensor.data_ptr() for tensor in tensors}
    assert copies.bytes == sum(tensor.nbytes for tensor in tensors)


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        if func.__name__.partition(".")[0] in ("_to_copy", "clone", "copy_"):
            self.bytes += found.nbytes
        return found


FILES = ["adapter_model.safetensors", "optimizer.pt", "scheduler.json", "random.json", "trainer_state.json", MANIFEST]


@pytest.mark.parametrize("how", ["flipped", "cut short", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_any_damage_to_any_file_is_found(tmp_path: Path, trained: Trained, name: str, how: str) -> None:
    written(tmp_path, trained, 1)
    folder = tmp_path / "checkpoints" / "step-1"
    assert checkpoint.damage(folder) == ""
    file = folder / name
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content if how == "flipped" else content[:-1])
    assert "manifest" in checkpoint.damage(folder) if name == MANIFEST else name in checkpoint.damage(folder)


def test_a_manifest_that_was_edited_is_damage(tmp_path: Path, trained: Trained) -> None:
    written(tmp_path, trained, 1)
    file = tmp_path / "checkpoints" / "step-1" / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), "eval_loss": 0.1}))
    assert checkpoint.damage(file.parent) == "manifest.json is not what was written"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write more into one file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [100, 1500, 3000, 6000])
def test_a_disk_that_is_full_harms_no_older_checkpoint(tmp_path: Path, trained: Trained, size: int) -> None:
    written(tmp_path, trained, 1)
    with files_of_at_most(size):
        said = written(tmp_path, trained, 2)
    assert "step     2  NOT saved: " in said[0]
    assert "older checkpoints are unharmed" in said[0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    assert checkpoint.damage(tmp_path / "checkpoints" / "step-1") == ""
    assert written(tmp_path, trained, 3) == ["step     3  saved checkpoints/step-3"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    assert "NOT saved: Not a directory" in written(tmp_path, trained, 1)[0]


def test_slow_storage_is_waited_for_and_said(tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.train.saver.PATIENCE_SECONDS", 0.05)
    made = trained.snapshot(1)
    object.__setattr__(made, "write", lambda partial: time.sleep(0.3))
    said: list[str] = []
    saver = Saver(tmp_path, None, {}, said.append)
    saver.begin(made)
    assert not said
    saver.begin(trained.snapshot(2))
    assert said[0].startswith("waiting for the checkpoint of step 1: the storage has been writing for")
    saver.close()


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_checkpoint import Trained
from windlass.train.saver import Saver
trained, saver = Trained(), Saver(Path(sys.argv[1]), 2, {}, print)
for step in range(1, 10**6):
    saver.begin(trained.snapshot(step % 7 + 1, eval_loss=float(step % 3)))
    if step == 3:
        print("writing", flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    """The same steps again and again, so that old ones are replaced and deleted too."""
    chance = random.Random(0)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), str(Path(__file__).parent)]
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        while "writing" not in process.stdout.readline():
            pass
        time.sleep(chance.random() * 0.2)
        process.kill()
        process.wait()
        process.stdout.close()
        found = checkpoint.saved(tmp_path / "checkpoints")
        assert found
        assert all(checkpoint.damage(folder) == "" for folder in found)
    checkpoint.sweep(tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").glob(".*"))


# --- which ones there are ---


def test_the_newest_are_kept_and_the_best_besides(tmp_path: Path, trained: Trained) -> None:
    losses = {1: 5.0, 2: 3.0, 3: 4.0, 10: math.nan, 20: 3.0}
    written(tmp_path, trained, *losses, losses=losses)
    assert names(tmp_path) == ["step-1", "step-2", "step-3", "step-10", "step-20"]
    assert (tmp_path / "best").resolve().name == "step-2"  # of equal ones the earliest
    checkpoint.prune(tmp_path / "checkpoints", 2)
    assert names(tmp_path) == ["step-2", "step-10", "step-20"]


def test_time_stamps_of_files_mean_nothing(tmp_path: Path, trained: Trained) -> None:
    written(tmp_path, trained, 9, 10)
    os.utime(tmp_path / "checkpoints" / "step-9", (2**33, 2**33))  # the clock was far ahead, then set back
    os.utime(tmp_path / "checkpoints" / "step-10", (0, 0))
    assert names(tmp_path) == ["step-9", "step-10"]


def test_the_best_pointer_changes_with_the_best_and_never_leads_nowhere(tmp_path: Path, trained: Trained) -> None:
    written(tmp_path, trained, 1, losses={})
    assert not (tmp_path / "best").exists()
    for step, loss in ((2, 2.0), (3, 1.0), (4, 1.5)):
        written(tmp_path, trained, step, losses={step: loss})
        assert (tmp_path / "best" / checkpoint.ADAPTER).exists()
    assert (tmp_path / "best").resolve().name == "step-3"


def test_a_damaged_one_is_set_aside_and_not_counted(tmp_path: Path, trained: Trained) -> None:
    written(tmp_path, trained, 1, 2)
    newest = tmp_path / "checkpoints" / "step-2"
    (newest / "optimizer.pt").write_bytes(b"")
    assert resume.newest_intact(tmp_path / "checkpoints", "here") == tmp_path / "checkpoints" / "step-1"
    assert names(tmp_path) == ["step-1"]
    assert (tmp_path / "checkpoints" / "damaged-step-2" / "optimizer.pt").exists()


def test_none_whole_is_an_error_and_not_a_new_beginning(tmp_path: Path, trained: Trained) -> None:
    written(tmp_path, trained, 1)
    (tmp_path / "checkpoints" / "step-1" / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"none of 1 checkpoints .* can be used; step-1: its manifest can't be read"):
        resume.newest_intact(tmp_path / "checkpoints", "here")


# --- the adapter's file ---


def test_a_file_that_differs_in_one_bit_from_the_adapter_is_found(tmp_path: Path, trained: Trained) -> None:
    checkpoint.save_adapter(trained.model, tmp_path)
    checkpoint.read_back(trained.model, tmp_path)
    state = load_file(tmp_path / checkpoint.ADAPTER)
    name = sorted(state)[1]
    state[name].view(torch.int32)[0, 0] ^= 1
    save_file(state, tmp_path / checkpoint.ADAPTER)
    with pytest.raises(RunError, match=f"1 tensors in .* are not those of rank 0: {name}"):
        checkpoint.read_back(trained.model, tmp_path)


def test_another_adapter_is_refused(tmp_path: Path, trained: Trained) -> None:
    checkpoint.save_adapter(trained.model, tmp_path)
    base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    other = get_peft_model(base, LoraConfig(r=2, target_modules=["0", "1", "2"]))
    with pytest.raises(RunError, match=r"holds another adapter than this run's: .*2\.lora_"):
        checkpoint.load_adapter(other, tmp_path)


def test_the_adapters_file_is_readable_for_whoever_may_read_the_folder(tmp_path: Path, trained: Trained) -> None:
    checkpoint.save_adapter(trained.model, tmp_path)
    assert (tmp_path / checkpoint.ADAPTER).stat().st_mode & 0o044 == 0o044


# --- random numbers ---


def draws() -> list[Any]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_every_generator_goes_on_where_it_was() -> None:
    draws()
    state = json.loads(json.dumps(random_state()))
    expected = draws()
    restore_random(state)
    assert draws() == expected


# --- the run folder ---


def test_a_folder_that_another_run_holds_is_refused(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another run is using"):
            resume.lock(tmp_path, "run.yaml:3: train.output_dir")
    resume.lock(tmp_path, "run.yaml:3: train.output_dir")  # free again once the other has ended
    assert resume._lock is not None
    resume._lock.close()
    resume._lock = None


def test_steps_that_will_be_run_again_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "steps-rank0.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    (tmp_path / "events.jsonl").write_text('{"step": 0, "kind": "start"}\n{"step": 3, "kind": "eval"}\n')
    resume.forget_after(tmp_path, 2)
    assert (tmp_path / "steps-rank0.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "events.jsonl").read_text() == '{"step": 0, "kind": "start"}\n'
