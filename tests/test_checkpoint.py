"""Checkpoints on disk: complete or absent, found by step, kept by loss. One process, a tiny adapter, real files."""

import fcntl
import json
import math
import os
import random
import resource
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import warm
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from windlass.errors import RunError, UserError
from windlass.files import WriteGuard, commit_dir
from windlass.run_folder import ADAPTER, MANIFEST, lock_run, read_manifest
from windlass.train.checkpoint import resume, snapshot
from windlass.train.checkpoint.folder import (
    find_damage,
    list_checkpoints,
    prune_checkpoints,
    remove_partial_checkpoints,
)
from windlass.train.checkpoint.saver import Saver
from windlass.train.checkpoint.snapshot import (
    ExpertGatherer,
    Snapshot,
    get_random_state,
    load_adapter,
    load_optimizer,
    save_adapter,
    set_random_state,
    take_snapshot,
)
from windlass.weights.expert_shards import ExpertShard


def adapted(layers: int = 2) -> PeftModel:
    torch.manual_seed(0)
    base = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    names = [str(number) for number in range(layers)]
    return get_peft_model(base, LoraConfig(r=2, target_modules=names, init_lora_weights=False))


class Trained:
    """An adapter after a training step."""

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

    def snapshot(self, step: int, **manifest: Any) -> Snapshot:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        taken = take_snapshot(step, **parts, state={"global_step": step}, manifest=manifest)
        assert taken is not None
        return taken


@pytest.fixture
def trained() -> Trained:
    return Trained()


def saver_in(folder: Path, limit: int | None = None, say: Callable[[str], None] = print, **options: Any) -> Saver:
    reported: list[str] = []  # not printed: a limit on file sizes holds for captured output too
    return Saver(folder, limit, {}, say, lambda: None, WriteGuard(reported.append), **options)


def written(run: Path, trained: Trained, *steps: int, losses: dict[int, float] | None = None) -> list[str]:
    """Write checkpoints of these steps; return what was printed."""
    printed: list[str] = []
    saver = saver_in(run, say=printed.append)
    for step in steps:
        saver.start_writing(trained.snapshot(step, eval_loss=(losses or {}).get(step)))
    saver.close()
    return printed


def names(run: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run / "checkpoints")]


def test_snapshot_is_bit_equal_after_training_continues(tmp_path: Path, trained: Trained) -> None:
    made = trained.snapshot(1)
    tensors = [*made.adapter.values(), *(t for each in made.optimizer["state"].values() for t in each.values())]
    assert not {p.data_ptr() for p in trained.model.parameters()} & {tensor.data_ptr() for tensor in tensors}
    expected = {key: value.clone() for key, value in made.adapter.items()}
    moments = [value["exp_avg"].clone() for value in trained.optimizer.state.values()]
    trained.step()
    saver = saver_in(tmp_path)
    saver.start_writing(made)
    saver.close()
    other, folder = Trained(), tmp_path / "checkpoints" / "step-1"
    load_adapter(other.model, folder)
    load_optimizer(other.optimizer, other.scheduler, folder, other.model)
    assert all(torch.equal(load_file(folder / ADAPTER)[key], expected[key]) for key in expected)
    found = [value["exp_avg"] for value in other.optimizer.state.values()]
    assert all(torch.equal(one, moment) for one, moment in zip(found, moments, strict=True))
    assert other.scheduler.state_dict()["last_epoch"] == 1
    assert (folder / ADAPTER).stat().st_mode & 0o044 == 0o044  # for whoever may read the folder


@pytest.mark.parametrize("here", [0, 1])
def test_expert_parts_are_gathered_through_the_host(monkeypatch: pytest.MonkeyPatch, here: int) -> None:
    """Of two ranks on GPUs: NCCL would open a channel between each pair."""
    devices: list[str] = []

    def seen(tensor: Tensor, _other: int) -> None:
        devices.append(tensor.device.type)

    monkeypatch.setattr(snapshot, "get_rank", lambda: here)  # of a process that is in no group
    monkeypatch.setattr(dist, "send", seen)
    monkeypatch.setattr(dist, "recv", seen)
    experts = ExpertGatherer(adapted())
    experts.parts = SimpleNamespace(of=lambda _name: ExpertShard(2 * here, 2, 4))  # type: ignore[assignment]
    experts.rank_of, experts.numel = {0: 0, 2: 1}, {"x.lora_A.weight": 48}
    with FakeTensorMode():
        made = experts.gather("x.lora_A.weight", torch.empty(6, 8, device="cuda"))
    assert devices == ["cpu"]
    assert (made.device.type, tuple(made.shape)) == (("cpu", (12, 8)) if here == 0 else ("cuda", (6, 8)))
    with pytest.raises(RunError, match=r"the optimizer's exp_avg of .* is not of its shape"):
        experts.gather("x.lora_A.weight", torch.empty(7), "exp_avg")


FILES = ["adapter_model.safetensors", "optimizer.pt", "scheduler.json", "random.json", "trainer_state.json", MANIFEST]


def test_any_damage_to_any_file_is_found(tmp_path: Path, trained: Trained) -> None:
    written(tmp_path, trained, 1)
    folder = tmp_path / "checkpoints" / "step-1"
    assert find_damage(folder) == ""
    assert sorted(path.name for path in folder.iterdir() if path.name in FILES) == sorted(FILES)
    for file in list(folder.iterdir()):
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damaged in (bytes(flipped), content[:-1], None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            assert ("manifest" if file.name == MANIFEST else file.name) in find_damage(folder)
        file.write_bytes(content)
    (folder / MANIFEST).write_text(json.dumps({**read_manifest(folder), "eval_loss": 0.1}))
    assert find_damage(folder) == "manifest.json is not what was written"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write more into one file, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [100, 3000])
def test_full_disk_leaves_older_checkpoints_intact(tmp_path: Path, trained: Trained, size: int) -> None:
    written(tmp_path, trained, 1)
    with files_of_at_most(size):
        printed = written(tmp_path, trained, 2)
    assert "step     2  NOT saved: " in printed[0]
    assert "older checkpoints are unharmed" in printed[0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    assert find_damage(tmp_path / "checkpoints" / "step-1") == ""
    assert written(tmp_path, trained, 3) == ["step     3  saved checkpoints/step-3"]


@pytest.mark.fault("storage that changes bits of a checkpoint", "`windlass train`", "are not what was written: ")
def test_faulty_storage_is_detected(tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trained.snapshot(1)
    object.__setattr__(made, "write", lambda partial: time.sleep(0.3))
    printed: list[str] = []
    saver = saver_in(tmp_path, say=printed.append, patience_seconds=0.05)
    saver.start_writing(made)
    assert not printed
    saver.start_writing(trained.snapshot(2))
    assert printed[0].startswith("waiting for the checkpoint of step 1: the storage has been writing for")
    saver.close()

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").write_text("a file")
    assert "NOT saved: Not a directory" in written(tmp_path / "other", trained, 1)[0]

    def flip(tensors: dict[str, Tensor], path: Path, metadata: Any) -> None:
        name = sorted(tensors)[1]
        tensors[name].view(torch.int32)[0, 0] ^= 1
        save_file(tensors, path, metadata)
        tensors[name].view(torch.int32)[0, 0] ^= 1

    monkeypatch.setattr(snapshot, "save_file", flip)  # the fault
    with pytest.raises(RunError, match=r"1 tensors in .* are not what was written: .*lora_B"):
        written(tmp_path, trained, 3)
    assert names(tmp_path) == ["step-1", "step-2"]


UNSHARED = """
import sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from windlass.run_folder import begin_manifest
from windlass.train.checkpoint import resume
rank = int(sys.argv[2])
store = dist.FileStore(sys.argv[1] + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
resume.identify_host = lambda: "node" + sys.argv[2]
resume.SEEN_SECONDS = 0.5
for own in (False, True):
    folder = Path(sys.argv[1]) / ("run" + str(rank) * own)
    folder.mkdir(exist_ok=True)
    if rank == 0:
        begin_manifest(folder, {})
    print(resume.find_unshared(folder), flush=True)
dist.destroy_process_group()
"""


def test_ranks_that_do_not_see_the_run_folder_are_found(tmp_path: Path) -> None:
    command = [warm.python(), "-c", UNSHARED, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    assert [rank.communicate(timeout=300)[0].split() for rank in ranks] == [["[]", "[1]"]] * 2


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_checkpoint import Trained, saver_in
trained = Trained()
saver = saver_in(Path(sys.argv[1]), limit=2)
for step in range(1, 10**6):
    saver.start_writing(trained.snapshot(step % 7 + 1, eval_loss=float(step % 3)))
    if step == 3:
        print("writing", flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    """The same steps again and again, so that old ones are also replaced and deleted."""
    chance = random.Random(0)
    command = [warm.python(), "-c", textwrap.dedent(KILLED), str(tmp_path), str(Path(__file__).parent)]
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        while "writing" not in process.stdout.readline():
            pass
        time.sleep(chance.random() * 0.2)
        process.kill()
        process.wait()
        process.stdout.read()  # until its end has closed it
        process.stdout.close()
        found = list_checkpoints(tmp_path / "checkpoints")
        assert found
        assert all(find_damage(folder) == "" for folder in found)
    remove_partial_checkpoints(tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").glob(".*"))


# --- which ones there are ---


def test_a_kill_while_a_replaced_checkpoint_is_deleted_leaves_the_new_one(tmp_path: Path) -> None:
    def die(path: Path, **_: Any) -> None:
        if path.exists():
            raise KeyboardInterrupt

    for name, text in (("old", "1"), ("new.partial", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("windlass.files.shutil.rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            commit_dir(tmp_path / "new.partial", tmp_path / "old")
    assert (tmp_path / "old" / "file").read_text() == "2"


def test_newest_and_best_checkpoints_are_kept(tmp_path: Path, trained: Trained) -> None:
    losses = {1: 5.0, 2: 3.0, 3: 4.0, 10: math.nan, 20: 3.0}
    for step, best in ((1, "step-1"), (2, "step-2"), (3, "step-2"), (10, "step-2"), (20, "step-2")):
        written(tmp_path, trained, step, losses=losses)  # of equal ones the earliest
        assert (tmp_path / "best").resolve().name == best
        assert (tmp_path / "best" / ADAPTER).exists()
    os.utime(tmp_path / "checkpoints" / "step-3", (2**33, 2**33))  # the clock was far ahead, then set back
    assert names(tmp_path) == ["step-1", "step-2", "step-3", "step-10", "step-20"]
    prune_checkpoints(tmp_path / "checkpoints", 2)
    assert names(tmp_path) == ["step-2", "step-10", "step-20"]


def test_damaged_checkpoints_are_renamed_and_none_intact_is_an_error(tmp_path: Path, trained: Trained) -> None:
    written(tmp_path, trained, 1, 2)
    assert not (tmp_path / "best").exists(), "none was evaluated"
    newest = tmp_path / "checkpoints" / "step-2"
    (newest / "optimizer.pt").write_bytes(b"")
    assert resume.find_newest_intact(tmp_path / "checkpoints", "here") == tmp_path / "checkpoints" / "step-1"
    assert names(tmp_path) == ["step-1"]
    assert (tmp_path / "checkpoints" / "damaged-step-2" / "optimizer.pt").exists()
    (tmp_path / "checkpoints" / "step-1" / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"none of the checkpoints .* can be used; step-1: its manifest can't be read"):
        resume.find_newest_intact(tmp_path / "checkpoints", "here")


@pytest.mark.fault(
    "a checkpoint with another run's adapter", "`windlass train --resume`", "contains another adapter than this run's: "
)
def test_resume_with_another_adapter_is_refused(tmp_path: Path, trained: Trained) -> None:
    save_adapter(trained.model, tmp_path)
    with pytest.raises(RunError, match=r"contains another adapter than this run's: .*2\.lora_"):
        load_adapter(adapted(3), tmp_path)


def draws() -> list[Any]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_random_generators_resume_their_state() -> None:
    draws()
    state = json.loads(json.dumps(get_random_state()))
    expected = draws()
    set_random_state(state)
    assert draws() == expected


def test_a_run_folder_is_locked_and_forgets_the_steps_that_will_be_run_again(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another run is using"):
            lock_run(tmp_path, "run.yaml:3: train.output_dir")
    free = lock_run(tmp_path, "run.yaml:3: train.output_dir")  # once the other has ended
    assert free is not None
    free.close()
    (tmp_path / "steps-rank0.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    (tmp_path / "events.jsonl").write_text('{"step": 0, "kind": "start"}\n{"step": 3, "kind": "eval"}\n')
    resume.drop_steps_after(tmp_path, 2)
    assert (tmp_path / "steps-rank0.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "events.jsonl").read_text() == '{"step": 0, "kind": "start"}\n'
    header = '{"form": 5, "columns": ["step"], "derived": {}}\n'
    (tmp_path / "steps-rank0.jsonl").write_text(f"{header}[5, 1]\n[5, 2]\n[5, 3]\n{header}[5, 2]")
    resume.drop_steps_after(tmp_path, 2)
    assert (tmp_path / "steps-rank0.jsonl").read_text() == f"{header}[5, 1]\n[5, 2]\n{header}[5, 2]\n"
