"""What a rank does with its GPU, as far as that can be tested without one."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from windlass import tiny
from windlass.errors import RunError, UserError
from windlass.launch.check.bandwidth import capture_nccl_log
from windlass.model import find_published_base, read_base
from windlass.observe.counters import Counters
from windlass.plan.layout import Layout
from windlass.ranks import collectives
from windlass.ranks.rank import Rank
from windlass.ranks.supervisor import set_allocator
from windlass.train import parallel
from windlass.train.checkpoint.snapshot import get_random_state, set_random_state
from windlass.train.connect import choose_gpu, create_process_group, require_own_gpus
from windlass.train.console import Progress


def test_rank_with_one_visible_gpu_uses_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers binds a rank to the GPU of its LOCAL_RANK, which is not visible: number 0 is."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        create_process_group(Rank(3, 3, 4), 99)
    finally:
        dist.destroy_process_group()
    assert (os.environ["LOCAL_RANK"], os.environ["RANK"], chosen) == ("0", "3", [0])


@pytest.mark.fault("two ranks that see one GPU", "`windlass train`", "rank 1 and rank 2 see the same GPU, b")
def test_more_ranks_than_gpus_are_refused() -> None:
    assert choose_gpu(7, 8) == 7
    with pytest.raises(UserError, match="rank 2 of this node has no GPU of its own: it sees 2"):
        choose_gpu(2, 2)
    require_own_gpus(["a", "b", "c"])
    require_own_gpus(["", ""])  # a torch that does not tell
    require_own_gpus(["0000-00", "0000-00"])  # nor does this driver
    with pytest.raises(UserError, match="rank 1 and rank 2 see the same GPU, b"):
        require_own_gpus(["a", "b", "b"])


class Device:
    """The CUDA functions of torch that are called here, for a machine without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state, self.kept, self.peak = torch.arange(16, dtype=torch.uint8), 0, 0
        for name in ("get_rng_state", "set_rng_state", "memory_stats", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state

    def memory_stats(self, _: Any) -> dict[str, int]:
        return {"allocated_bytes.all.current": self.kept, "allocated_bytes.all.peak": self.peak}

    def reset_peak_memory_stats(self, _: Any) -> None:
        self.peak = self.kept


def test_gpu_random_state_resumes_on_nodes_with_other_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    before, wanted = get_random_state(), device.state.clone()
    device.state = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    set_random_state(before)
    assert torch.equal(device.state, wanted)


def test_the_live_line_shows_the_highest_peak_and_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(Counters, "_find_gpu", lambda _: None)  # NVML, which is not there
    sampler = Counters(torch.device("cuda"))
    progress = Progress(Rank(), None, 1, lambda: sampler.peak_gib)  # type: ignore[arg-type]
    shown = []
    for peak in (5, 3, 7):
        device.peak = peak * 2**30
        sampler.sample()
        shown.append(progress.peak_gib())
    device.peak = 9 * 2**30  # of a step that was not sampled
    assert [*shown, progress.peak_gib()] == [5, 5, 7, 9]


def test_trials_that_train_together_all_see_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(Counters, "_find_gpu", lambda _: None)
    trials = [Counters(torch.device("cuda")) for _ in range(3)]
    for peak in (5, 3):
        device.peak = peak * 2**30  # of the micro-batch that all share; the first to read it resets it
        assert [trial.sample()["gpu_peak_gib"] for trial in trials] == [peak] * 3


def test_a_collective_that_hangs_raises_and_the_users_settings_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    with capture_nccl_log("nccl") as log:
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        assert os.environ["NCCL_DEBUG"] == "INFO"
        assert log() == ""
    assert os.environ["NCCL_DEBUG"] == "TRACE"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


@pytest.mark.parametrize(("version", "refused"), [("2.12.0", True), ("2.13.0+cpu", False), ("2.14.0", False)])
def test_quantized_base_needs_a_torch_that_shards_bytes(
    version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.setattr(collectives, "get_world_size", lambda: 2)
    base, layout = find_published_base("Llama-3.1-8B"), Layout("full-shard", "test", 1, 2, shard=2, base_dtype="fp8")
    assert base is not None
    monkeypatch.setattr(transformers.LlamaForCausalLM, "prepare_distribute_model", None)
    with pytest.raises(
        UserError if refused else TypeError, match="has no sharding of a quantized base" if refused else "NoneType"
    ):
        parallel.build_model(base, layout, torch.bfloat16)


def test_built_model_disables_cudnn_attention(tmp_path: Any) -> None:
    checkpoint = read_base(tiny.write_model(tmp_path / "tiny", experts=4, tokenizer=False))
    torch.backends.cuda.enable_cudnn_sdp(True)
    parallel.build_model(checkpoint, Layout("resident", "test", 1, 1, shard=1), torch.bfloat16)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    assert torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]


def test_allocator_uses_segments_unless_the_user_sets_it() -> None:
    environ: dict[str, str] = {}
    set_allocator(environ)
    assert set(environ.values()) == {"expandable_segments:True"}
    for name in environ:
        own = {name: "max_split_size_mb:64"}
        set_allocator(own)
        assert own == {name: "max_split_size_mb:64"}


def test_links_are_tested_before_weights_are_loaded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    collectives.check_links(torch.device("cpu"))
    collectives.set_timeout(99)  # a single process: nothing to wait for
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        collectives.check_links(torch.device("cpu"))
        collectives.set_timeout(99)
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 99
        monkeypatch.setattr(collectives, "get_world_size", lambda: 8)  # seven whose sums are lost
        with pytest.raises(RunError, match="8 ranks added up 1 each, and got 1"):
            collectives.check_links(torch.device("cpu"))
    finally:
        dist.destroy_process_group()
