"""The loop in one process, where several ranks would only be slower."""

import contextlib
import hashlib
import io
import itertools
import json
import math
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
import warm
from refusals import refused
from rich.console import Console
from safetensors.torch import load_file
from text_run import WORDS, write_rows
from torch._C._distributed_c10d import TCPStore

from windlass import runfile, start, tiny
from windlass.data.hub import require_published
from windlass.errors import SAVED, UserError
from windlass.fetch import record_digest
from windlass.files import WriteGuard, read_json, read_json_lines, write_json
from windlass.observe.background import BackgroundReport
from windlass.observe.report.facts import find_served_share
from windlass.plan import make_plan
from windlass.plan.layout import Layout
from windlass.ranks.rank import Rank, StopSignal
from windlass.ranks.supervisor import reserve_port
from windlass.run_folder import ADAPTER, FAILED, REFERENCE, STOPPED, begin_manifest, read_manifest
from windlass.train import run, trackers, updater
from windlass.train.base_alone import BaseAlone
from windlass.train.checkpoint.folder import list_checkpoints, read_step
from windlass.train.checkpoint.resume import claim_run_folder, fingerprint_base
from windlass.train.checkpoint.snapshot import STATE, Snapshot, adapter_state
from windlass.train.connect import require_device
from windlass.train.kernels import compiled
from windlass.train.load import describe_precision, load_base, open_base_tokenizer
from windlass.train.loop import Loop
from windlass.train.lora import attach_adapter
from windlass.train.session import Session

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
RUN = """
model: {{model_name_or_path: {folder}/model, torch_dtype: float32}}
lora: {{r: 2, lora_alpha: 4, target_modules: all-linear}}
data: {{dataset_name_or_path: {folder}/data, dataset_config_name: null, max_length: 16}}
train:
  output_dir: {folder}/run
  max_steps: 4
  gradient_accumulation_steps: 2
  learning_rate: 0.01
  bf16: false
  logging_steps: 1
  eval_steps: 1
  save_steps: 1
  save_total_limit: null
cluster: {{gpu: cpu}}
"""

Make = Callable[..., Loop]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return the loop of a run with these settings of `train`, or of other sections: section__key."""
    tiny.write_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    chance = random.Random(0)
    for split, count in (("train", 12), ("validation", 3)):
        rows = [{"text": " ".join(chance.choices(WORDS.split(), k=8))} for _ in range(count)]
        write_rows(tmp_path / "data" / f"{split}.jsonl", rows)
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def made(**train: str) -> Loop:
        overrides = [f"{key.replace('__', '.') if '__' in key else f'train.{key}'}={train[key]}" for key in train]
        plan = make_plan(runfile.read_run_file(tmp_path / "run.yaml", overrides))
        job, folder, console = plan.run, tmp_path / "run", Console(quiet=True)
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        tokenizer = open_base_tokenizer(plan)
        session = Session(Rank(), console, StopSignal(), BackgroundReport(folder), WriteGuard(print))
        data = run.prepare_on_all_ranks(plan, tokenizer, session)
        model, _ = load_base(plan.base, plan.layout, **describe_precision(plan))
        base_alone = BaseAlone(model, ())
        adapted = attach_adapter(model, job.lora, plan.adapter, job.train.seed)
        return run.make_loop(
            plan, session, adapted, data, tokenizer, base_alone, facts={"base_digest": "", "base_config": ""}
        )

    yield made
    for number, handler in handlers.items():
        signal.signal(number, handler)


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / ADAPTER)


class Halved(torch.optim.SGD):
    """Like schedulefree: it refuses to step outside of training, and the weights to use differ (half of those)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, weight_decay=0.01)  # so that every tensor changes in every step
        for group in self.param_groups:
            group["train_mode"] = False

    def switch(self, train: bool) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] != train else ():
                parameter.data.mul_(2 if train else 0.5)
            group["train_mode"] = train

    def train(self) -> None:
        self.switch(True)

    def eval(self) -> None:
        self.switch(False)

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["train_mode"], "not in train mode"
        return super().step(closure)


def test_schedule_free_optimizers_save_their_evaluation_weights(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(train: Any, named: Any, _steps: int) -> Halved:
        return Halved([parameter for _, parameter in named if parameter.requires_grad], lr=train.learning_rate)

    monkeypatch.setattr(updater, "create_optimizer", create)  # schedulefree is not installed
    settings = {"lr_scheduler_type": "constant", "eval_strategy": "no"}
    loop = make(**settings)
    train_step, trained = loop.train_step, dict[int, float]()

    def recorded_step(micro_batches: Any) -> Any:
        done = train_step(micro_batches)
        trained[loop.step] = sum(float(p.detach().abs().sum()) for p in loop.updater.replicas.parameters)
        return done

    loop.train_step = recorded_step  # type: ignore[method-assign]
    loop.run()
    for number in range(1, 5):
        saved = adapter(tmp_path / "run" / "checkpoints" / f"step-{number}")
        assert sum(float(t.abs().sum()) for t in saved.values()) == pytest.approx(trained[number] / 2)
    last = adapter(tmp_path / "run" / "checkpoints" / "step-4")
    assert all(torch.equal(last[name], tensor) for name, tensor in adapter_state(loop.model.peft).items())
    resumed = make(**settings)
    resumed.run(tmp_path / "run" / "checkpoints" / "step-2")
    assert all(torch.equal(last[name], tensor) for name, tensor in adapter_state(resumed.model.peft).items())


def test_slow_checkpoint_has_the_log_of_its_own_step(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, write = make(), Snapshot.write

    def wait_and_write(taken: Snapshot, partial: Path) -> None:
        """Wait until training has logged the next step, except for the first, which training waits for, and the
        last."""
        until, logged = time.monotonic() + 20, len(loop.log_history)
        while 1 < taken.step < 4 and len(loop.log_history) == logged and time.monotonic() < until:
            time.sleep(0.01)
        write(taken, partial)

    monkeypatch.setattr(Snapshot, "write", wait_and_write)
    loop.run()
    for folder in list_checkpoints(tmp_path / "run" / "checkpoints"):
        steps = [line["step"] for line in read_json(folder / STATE)["log_history"]]
        assert max(steps) == read_step(folder)
    assert sorted({line["step"] for line in loop.log_history}) == [1, 2, 3, 4]


def test_skipped_evaluation_is_not_repeated_when_disabled(make: Make, tmp_path: Path) -> None:
    loop = make()
    loop.stop_signal.received = True
    loop.run()
    folder = tmp_path / "run" / "checkpoints" / "step-1"
    assert loop.stopped
    assert read_manifest(folder)["evaluation_due"]
    resumed = make(eval_strategy="no")
    resumed.run(folder)
    assert resumed.step == 4
    assert not read_manifest(folder.with_name("step-2"))["evaluation_due"]


@pytest.mark.fault(
    "an adapter so small that servers in bfloat16 round it away",
    "`windlass train`, after the last step",
    "bfloat16 keeps",
)
@pytest.mark.parametrize(("rate", "share"), [("1e-6", 0.0), ("0.05", 1.0)])
def test_a_run_says_what_servers_in_bfloat16_lose_of_its_adapter(
    make: Make, tmp_path: Path, rate: str, share: float
) -> None:
    """After the last step, and in its report: where an adapter is smaller than what its layers' outputs round away."""
    loop = make(learning_rate=rate)
    loop.progress.console = Console(record=True, file=io.StringIO())
    loop.run()
    measured = [event for event in read_json_lines(tmp_path / "run" / "events.jsonl") if event["kind"] == "served"]
    assert [event["step"] for event in measured] == [4]
    assert measured[0]["share"] == pytest.approx(share, abs=0.2)
    is_lost = share == 0
    assert ("bfloat16 keeps" in loop.progress.console.export_text()) is is_lost
    assert math.isnan(find_served_share(measured)) is not is_lost


def test_a_run_ends_well_where_its_share_does_not_fit_into_memory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def fill_memory(_model: Any) -> Iterator[None]:
        raise torch.OutOfMemoryError("full")
        yield

    monkeypatch.setattr("windlass.train.served.in_float32", fill_memory)
    make().run()
    kinds = [event["kind"] for event in read_json_lines(tmp_path / "run" / "events.jsonl")]
    assert "served" not in kinds
    assert kinds[-1] == "end"


def test_balancing_loss_is_optional_and_not_evaluated(make: Make, tmp_path: Path) -> None:
    """The mean over tokens of rows of different lengths: equal for every batch size."""
    texts = [{"text": " ".join(WORDS.split()[:count])} for count in (3, 5, 8)]
    write_rows(tmp_path / "data" / "validation.jsonl", texts)
    losses: list[float] = []
    without = 0.0
    for size, weight in ((1, "null"), (2, "null"), (3, "0.5")):
        (tmp_path / "run" / "steps-rank0.jsonl").unlink(missing_ok=True)
        loop = make(
            per_device_eval_batch_size=str(size), router_aux_loss_coef=weight, save_strategy="no", max_steps="1"
        )
        loop.run()
        (event,) = [e for e in read_json_lines(tmp_path / "run" / "events.jsonl") if e["kind"] == "eval"][-1:]
        losses.append(event["eval_loss"])
        (line,) = read_json_lines(tmp_path / "run" / "steps-rank0.jsonl")
        assert ("router_aux_loss" in line) == (weight != "null")
        if weight != "null":
            assert line["router_aux_loss"] > 0.9
            assert line["loss"] == pytest.approx(without + 0.5 * line["router_aux_loss"], rel=1e-5)
        without = line["loss"]
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)


def test_a_port_that_is_taken_is_recorded_as_the_runs_failure(make: Make, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ["--override", f"watch.prometheus_port={taken.getsockname()[1]}"]
        command = [warm.python(), "-m", "windlass", "train", str(tmp_path / "run.yaml"), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    manifest = read_manifest(tmp_path / "run")
    assert (manifest["state"], "can't listen on" in manifest["failure"]) == ("failed", True)


@pytest.mark.fault("a tracker whose server is not there", "`windlass train`", "training continues without it")
def test_a_tracker_that_fails_ends_no_run(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library has exceptions of its own: when it is opened, when it is sent to, when it is closed."""

    def fail(*_: Any) -> None:
        raise chosen("no answer\nand more")

    def work(*_: Any) -> None: ...

    ways = ((fail, work, work), (work, fail, work), (work, work, fail))
    for chosen, (opens, log, close) in itertools.product((LookupError, ConnectionRefusedError), ways):
        monkeypatch.setitem(trackers.OPEN, "tensorboard", lambda *_, o=opens, x=(log, close): o() or x)
        said: list[str] = []
        opened = trackers.Trackers("tensorboard", tmp_path, None, {}, WriteGuard(print), said.append)
        opened.log({"loss": 1.0}, 1)
        opened.close()
        assert said == [f"warning: tensorboard: {chosen.__name__}: no answer; training continues without it"]


def test_a_tracker_gets_the_losses_of_sets_and_the_figures_of_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: dict[str, float] = {}
    monkeypatch.setitem(trackers.OPEN, "wandb", lambda *_: (lambda values, _: logged.update(values), lambda: None))
    opened = trackers.Trackers("wandb", tmp_path, None, {}, WriteGuard(print), print)
    line = {"step": 1, "loss": 2.0, "source_loss": {"wiki": 3.0}, "preference": {"rewards/margins": 0.5}}
    (tmp_path / "steps-rank0.jsonl").write_text(json.dumps(line) + "\n")
    opened.close()  # with what was not sent yet
    assert logged == {"step/loss": 2.0, "step/loss_wiki": 3.0, "step/rewards/margins": 0.5}


@pytest.mark.fault(
    "a job that is killed while its trackers close", "`windlass stop`", "stopped by a signal; step 1 is saved"
)
@pytest.mark.takes("trains a step, loads a model")
def test_a_stop_is_recorded_before_trackers_and_the_report(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a sweep, which a trial's stop is."""
    seen: list[str] = []

    def see(*_: Any) -> None:
        seen.append(read_manifest(tmp_path / "run")["state"])

    monkeypatch.setattr(BackgroundReport, "start", lambda _: None)
    monkeypatch.setattr(BackgroundReport, "finish", see)
    monkeypatch.setitem(trackers.OPEN, "tensorboard", lambda *_: (lambda *_: None, see))
    plan = make_plan(runfile.read_run_file(tmp_path / "run.yaml", ["train.report_to=tensorboard"]))
    console = Console(record=True, file=io.StringIO(), width=200)
    session = Session(Rank(), console, StopSignal(), BackgroundReport(plan.folder), WriteGuard(print))
    session.stop_signal.received = True
    assert run.train_run(plan, session) == SAVED
    assert seen == [STOPPED] * 2
    assert "stopped by a signal; step 1 is saved; --resume continues from it" in console.export_text()

    sweep, trial = tmp_path / "sweep", tmp_path / "sweep" / "trials" / "first"
    trial.mkdir(parents=True)
    for folder in (sweep, trial):
        begin_manifest(folder, {})
    loop: Any = SimpleNamespace(stopped=True, paused=False, step=2)
    loop.plan = SimpleNamespace(folder=trial)
    run.record_stop(loop, replace(session, around=sweep))
    assert [read_manifest(folder)["state"] for folder in (sweep, trial)] == [STOPPED] * 2


@pytest.mark.parametrize("micro", [1, 3])
def test_rows_that_only_fill_a_batch_are_not_balanced(micro: int, make: Make, tmp_path: Path) -> None:
    """Three rows, alone and beside a filler: in a micro-batch of its own, or among them."""
    write_rows(tmp_path / "data" / "train.jsonl", [{"text": " ".join(WORDS.split()[:count])} for count in (3, 5, 8)])
    steps = []
    for rows in (3, 4):
        (tmp_path / "run" / "steps-rank0.jsonl").unlink(missing_ok=True)
        batch = {"per_device_train_batch_size": str(rows if micro > 1 else 1), "router_aux_loss_coef": "0.5"}
        batch["gradient_accumulation_steps"] = str(1 if micro > 1 else rows)
        make(**batch, lora__lora_dropout="0", save_strategy="no", max_steps="1", eval_strategy="no").run()
        (step,) = read_json_lines(tmp_path / "run" / "steps-rank0.jsonl")
        assert len(step["rows"]) == 3
        steps.append([step[name] for name in ("loss", "grad_norm", "router_aux_loss")])
    assert steps[1] == pytest.approx(steps[0], rel=1e-5)


def test_resume_keeps_files_and_machine_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = tmp_path / "run", tmp_path / "model"
    tiny.write_model(model)
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path))
    plan = make_plan(runfile.read_run_file(tmp_path / "run.yaml", ["data.dataset_name_or_path=org/set"]))

    # Weights of another model of the same shape, under the same name.
    before = fingerprint_base(plan.base)

    def claim(identity: str, *, resume: bool) -> Path | None:
        with contextlib.ExitStack() as held:
            return claim_run_folder(plan, identity, WriteGuard(print), held, resume=resume)

    assert claim(before, resume=False) is None
    (folder / "steps-rank0.jsonl").write_text('{"step": 1}\n')
    require_published(
        model, {name: hashlib.sha256((model / name).read_bytes()).hexdigest() for name in ["model.safetensors"]}, print
    )
    assert fingerprint_base(plan.base) == before
    record_digest(model, print)
    stored = max((piece.stored for p in plan.base.parameters for piece in p.pieces), key=lambda s: s.end - s.start)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(stored.start + 1000)
        (byte,) = file.read(1)
        file.seek(stored.start + 1000)
        file.write(bytes([byte ^ 1]))
    alone = Layout("one-gpu", "for this test", 1, 1, shard=1, precision="no")
    with pytest.raises(UserError, match=r"its weights have changed since they were fetched: digest \w+ then, \w+ now"):
        load_base(plan.base, alone)
    tiny.write_model(model, seed=1)
    with pytest.raises(
        UserError, match=r"model.safetensors: is not the file whose SHA-256 was compared with the hub's"
    ):
        fingerprint_base(plan.base)
    (model / "windlass-published.json").unlink()
    after = fingerprint_base(plan.base)
    (model / "tokenization_own.py").write_text("")
    assert fingerprint_base(plan.base) not in (before, after), "code that tokenizes belongs to the base"
    (model / "tokenization_own.py").unlink()
    with pytest.raises(UserError, match="the base model's files are not those this run began with"):
        claim(after, resume=True)
    write_json(folder / "manifest.json", read_json(folder / "manifest.json") | {"versions": {"torch": "2.0.0"}})
    assert claim(before, resume=True) is None
    assert f"this run began with torch 2.0.0 and continues with {torch.__version__}" in capsys.readouterr().err

    # A GPU that torch can't use would otherwise mean weeks on the CPU.
    require_device(plan)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu = make_plan(
        runfile.read_run_file(tmp_path / "run.yaml", ["data.dataset_name_or_path=org/set", "cluster.gpu=h200"])
    )
    with pytest.raises(UserError, match=r"planned for h200, and torch .* finds no usable GPU"):
        require_device(gpu)


def test_a_reference_without_steps_is_a_run_that_was_stopped_not_one_that_failed(tmp_path: Path) -> None:
    """Where the first step didn't fit into memory, other settings are tried in the same folder."""
    tiny.write_model(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path))
    rows = "data.dataset_name_or_path=org/set"
    plan, other = (
        make_plan(runfile.read_run_file(tmp_path / "run.yaml", [rows, *more])) for more in ([], ["lora.r=64"])
    )
    identity = fingerprint_base(plan.base)
    for state, refusals in ((STOPPED, ("unfinished-run", "changed-setting")), (FAILED, ())):
        with contextlib.ExitStack() as held:
            claim_run_folder(plan, identity, WriteGuard(print), held, resume=False)
        manifest = tmp_path / "run" / "manifest.json"
        (tmp_path / "run" / REFERENCE).write_bytes(b"")
        write_json(manifest, read_json(manifest) | {"state": state})
        for resume, refusal in zip((False, True), refusals or (None, None), strict=True):
            with contextlib.ExitStack() as held:
                if refusal:
                    held.enter_context(refused(refusal))
                claim_run_folder(other, identity, WriteGuard(print), held, resume=resume)
        shutil.rmtree(tmp_path / "run")


def test_a_signal_before_the_ranks_are_started_ends_the_command() -> None:
    def plan() -> Any:
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(SystemExit) as caught:
            start.train(plan, start.RankCommand([], {}, print), resume=False)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGUSR1, before[1])
    assert caught.value.code == SAVED


@pytest.mark.fault("50 starts at once on one machine", "`windlass train`", "each has a port of its own")
@pytest.mark.long
def test_simultaneous_starts_use_separate_ports() -> None:
    """Until rank 0 listens, nobody else gets the port; then it can."""

    def start(stores: list[Any]) -> None:
        with reserve_port() as port, socket.socket() as other:
            together.wait(60)  # all have chosen theirs
            other.bind(("localhost", 0))
            stores.append(TCPStore("localhost", port, 1, is_master=True))

    together, stores = threading.Barrier(50), list[Any]()
    threads = [threading.Thread(target=start, args=(stores,)) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({store.port for store in stores}) == 50, "each has a port of its own"


def test_a_step_that_was_left_out_is_not_in_the_logged_mean(make: Make) -> None:
    loop = make(logging_steps="2", max_steps="2", eval_strategy="no", save_strategy="no", watch__non_finite="skip")
    factors = [math.nan]  # of the first forward
    norm = loop.model.causal_lm.model.norm
    norm.register_forward_hook(lambda _module, _args, output: output * factors.pop() if factors else output)
    loop.run()
    first, second = read_json_lines(loop.plan.folder / "steps-rank0.jsonl")
    assert first["skipped"]
    assert losses(loop) == pytest.approx([second["loss"]])


# --- compiled layers ---


def losses(loop: Loop) -> list[float]:
    return [values["loss"] for values in loop.log_history if "loss" in values]


def printed(loop: Loop) -> Console:
    loop.progress.console = Console(record=True, file=io.StringIO(), width=240)
    return loop.progress.console


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch's own, within its compiler
@pytest.mark.fault("no C++ compiler", "`windlass train`", "layers run eagerly on all ranks")
def test_without_a_compiler_layers_run_eagerly_and_the_reason_is_printed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/nonexistent"))
    torch._dynamo.reset()
    quiet = {"eval_strategy": "no", "save_strategy": "no", "max_steps": "3"}
    eager = make(**quiet)
    eager.run()  # before the other is made, which seeds anew: dropout draws from one generator
    loop = make(compile="true", **quiet)
    console = printed(loop)
    loop.run()
    text = console.export_text()
    assert "layers run eagerly on all ranks" in text
    assert "/nonexistent" in text
    assert loop.model.compiled is None
    assert losses(loop) == losses(eager)  # what was tried has changed nothing


@pytest.mark.filterwarnings("ignore")  # torch's own, within its compiler
@pytest.mark.prove
def test_compiled_layers_equal_eager_and_give_up_if_there_are_too_many_graphs(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    eager = make(output_dir=str(tmp_path / "eager"))
    eager.run()
    loop = make(compile="true")
    console = printed(loop)
    loop.run()
    assert loop.model.compiled, console.export_text()
    assert "proven equal to eager" in console.export_text()
    assert losses(loop) == pytest.approx(losses(eager), rel=1e-5)
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "GRAPHS", 1)
    limited = make(compile="true")
    console = printed(limited)
    limited.run()
    assert limited.model.compiled is None
    assert "FailOnRecompileLimitHit" in console.export_text()
    assert losses(limited) == pytest.approx(losses(eager), rel=1e-5)
