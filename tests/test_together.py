"""`sweep.together`: trials that share micro-batches are what they would be alone, and know nothing of each other."""

import json
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_cost
import torch
import warm
import yaml
from refusals import refused
from safetensors.torch import load_file
from test_sweep import (
    ONE_RANK,
    RESIDENT,
    copy_material,
    count_steps,
    run,
    same_adapter,
    start,
    wait_for,
    write_sweep,
)
from text_run import WORDS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from windlass import tiny
from windlass.data.collate import PaddedCollator
from windlass.errors import SAVED, RunError
from windlass.files import read_json, read_json_lines
from windlass.observe.reader import Tail
from windlass.observe.recorder import Recorder
from windlass.observe.steps import KEPT
from windlass.plan import Plan, make_plan
from windlass.plan import together as plan_together
from windlass.plan.cost import estimate_cost
from windlass.plan.rows import RowLengths
from windlass.run_folder import FAILED, FINISHED, STOPPED, list_trials
from windlass.runfile import read_run_file
from windlass.sweep import sliced_experts, slices, together
from windlass.sweep.copies import copy_model
from windlass.train.collate import Batch, Collate
from windlass.train.load import load_base
from windlass.train.lora import attach_adapter
from windlass.train.model import TrainedModel
from windlass.train.shared_base import SharedBase
from windlass.train.updater import Updater

CLOSE = 2e-6
# Different ranks, targets, rates, seeds, data, widths and accumulation; dropout and noise in one, of experts too.
TRIALS: dict[str, dict[str, Any]] = {
    "first": {"lora.r": 8, "train.learning_rate": 1e-3, "train.seed": 7, "lora.lora_dropout": 0.0},
    "second": {"lora.target_modules": "all-linear", "lora.experts": True, "lora.lora_dropout": 0.1, "train.seed": 3},
    "third": {
        "lora.lora_alpha": 6,
        "lora.target_modules": "all-linear",
        "lora.experts": {"r": 2},
        "lora.lora_dropout": 0.0,
        "data.dataset_name_or_path": "other.txt",
        "train.max_grad_norm": 0.1,
        "train.neftune_noise_alpha": None,
        "train.gradient_accumulation_steps": 1,
        "train.max_steps": 3,
        "train.router_aux_loss_coef": 0.01,
    },
}
LAYOUTS = {
    "resident": RESIDENT,
    "full-shard": "layout: full-shard\n",
    "fp8": "layout: {name: full-shard, base_dtype: fp8}\n",
    "recomputed": "layout: {name: full-shard, activation_checkpointing: true}\n",
    "expert-parallel": "layout: {name: expert-parallel, expert_parallel: 2}\n",
    "packed": RESIDENT,
}
SIMPLER = ("resident", "full-shard", "fp8", "recomputed")  # than the others, which cover what these do
ONE = f"--override {ONE_RANK}"  # what several ranks add is no part of the test


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    tiny.write_model(folder / "model", files=2, experts=4)
    chance = random.Random(0)
    for name, shortest in (("data.txt", 9), ("other.txt", 3)):
        lines = [" ".join(chance.choices(WORDS.split(), k=chance.randint(shortest, 9))) for _ in range(60)]
        (folder / name).write_text("\n".join([*lines, ""]))
    return folder


def write(
    folder: Path,
    name: str,
    trials: dict[str, dict[str, Any]],
    more: str,
    count: int | str = 3,
    *,
    packing: bool = False,
) -> Path:
    path = write_sweep(folder, name, trials, more)
    text = path.read_text().replace("packing: false", f"packing: {str(packing).lower()}")
    path.write_text(f"{text}  together: {count}\n")
    return path


def assert_close_run(one: Path, other: Path) -> None:
    """Losses, gradient norms and evaluation losses of every step, and every checkpoint's adapter."""
    of_steps = [list(Tail(folder / "steps-rank0.jsonl").objects()) for folder in (one, other)]
    assert [step["rows"] for step in of_steps[0]] == [step["rows"] for step in of_steps[1]]
    assert all(ours.get("experts") == theirs.get("experts") for ours, theirs in zip(*of_steps, strict=True))
    for ours, theirs in zip(*of_steps, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "router_aux_loss"):
            assert (ours.get(name) or 0) == pytest.approx(theirs.get(name) or 0, rel=CLOSE, abs=CLOSE), name
    losses = [
        [event["eval_loss"] for event in read_json_lines(folder / "events.jsonl") if "eval_loss" in event]
        for folder in (one, other)
    ]
    assert losses[0]
    assert losses[0] == pytest.approx(losses[1], rel=CLOSE)
    for file in one.rglob("*.safetensors"):
        ours, theirs = load_file(file), load_file(other / file.relative_to(one))
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=CLOSE, msg=f"{file} {name}")
    for file in one.rglob("random.json"):
        assert read_json(file) == read_json(other / file.relative_to(one))


def read_kept_figures(trial: Path) -> dict[tuple[int, str], float]:
    """Return figures of the kept set by step and name."""
    names = [f"{KEPT}old/{figure}" for figure in ("loss", "worse", "kl")]
    events = read_json_lines(trial / "events.jsonl")
    return {(event["step"], name): event[name] for event in events for name in names if name in event}


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.prove] if name in SIMPLER else []) for name in LAYOUTS]
)
def test_each_trial_is_what_it_would_be_alone(layout: str, material: Path, tmp_path: Path) -> None:
    """Losses, adapters, and what is measured of a set that should not get worse."""
    folder = copy_material(material, tmp_path)
    packing = keeps = layout == "packed"
    more = "--override train.eval_on_start=true"
    if packing:
        more += f" --override 'data.keep={{old: {{path: other.txt, split: \"train[:12]\"}}}}' {ONE}"
    printed = run(f"train {write(folder, 'together', TRIALS, LAYOUTS[layout], packing=packing)} {more}", folder)
    assert "trials 1, 2, 3 of 3 together" in printed
    run(f"train {write(folder, 'alone', TRIALS, LAYOUTS[layout], 1, packing=packing)} {more}", folder)
    for name in TRIALS:
        trials = [folder / way / "trials" / name for way in ("together", "alone")]
        assert_close_run(*trials)
        ours, theirs = map(read_kept_figures, trials)
        assert any(ours.values()) is keeps
        assert ours == pytest.approx(theirs, rel=CLOSE, abs=CLOSE)


LONGER = {name: {**settings, "train.max_steps": 14} for name, settings in TRIALS.items()}
LONGER["third"]["train.gradient_accumulation_steps"] = 2


@pytest.fixture(scope="module")
def whole(material: Path) -> Path:
    """A group that trained without a stop, in the folder of the others' material."""
    run(f"train {write(material, 'whole', LONGER, RESIDENT)} {ONE}", material)
    return material / "whole"


@pytest.mark.long
def test_a_stopped_group_goes_on_where_it_stopped(whole: Path, material: Path, tmp_path: Path) -> None:
    folder = copy_material(material, tmp_path)
    file = write(folder, "stopped", LONGER, RESIDENT)
    process = start(f"train {file} {ONE}", folder, warm.python())
    sweep = folder / "stopped"
    wait_for(lambda: count_steps(sweep / "trials" / "first") > 2, process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=800)
    assert process.returncode == SAVED, printed
    assert {*list_trials(sweep).values()} == {STOPPED}
    steps = {count_steps(sweep / "trials" / name) for name in TRIALS}
    assert len(steps) == 1, "all stop at the same step"
    run(f"train {file} --resume {ONE}", folder)
    for name in TRIALS:
        same_adapter(sweep / "trials" / name, whole / "trials" / name)
    assert {*list_trials(sweep).values()} == {FINISHED}


@pytest.mark.prove
def test_a_killed_group_ends_as_it_would(whole: Path, material: Path, tmp_path: Path) -> None:
    """Each trial goes on from its own last checkpoint; other rows beside its own are rounding only."""
    folder = copy_material(material, tmp_path)
    file = write(folder, "killed", LONGER, RESIDENT)
    sweep = folder / "killed"
    process = start(f"train {file} {ONE}", folder, warm.python())
    wait_for(lambda: count_steps(sweep / "trials" / "first") >= 7, process)
    process.kill()
    printed, _ = process.communicate(timeout=800)
    assert process.returncode == -signal.SIGKILL, printed
    run(f"train {file} --resume {ONE}", folder)
    assert {*list_trials(sweep).values()} == {FINISHED}
    for name in TRIALS:
        assert_close_run(whole / "trials" / name, sweep / "trials" / name)


@pytest.mark.prove
def test_trials_are_halved_together(material: Path, tmp_path: Path) -> None:
    folder = copy_material(material, tmp_path)
    trials = {name: {**settings, "train.max_steps": 4} for name, settings in TRIALS.items()}
    del trials["third"]["data.dataset_name_or_path"]  # losses are compared on the same rows
    for name, count in (("together", 3), ("alone", 1)):
        file = write(folder, name, trials, RESIDENT, count)
        file.write_text(f"{file.read_text()}  keep: 2\n  at: [2]\n")
        run(f"train {file} {ONE}", folder)
    states, others = ([*list_trials(folder / name).values()] for name in ("together", "alone"))
    assert states == others
    assert states.count(FINISHED) == 2
    for trial, state in list_trials(folder / "alone").items():
        if state == FINISHED:
            assert_close_run(folder / "together" / "trials" / trial.name, trial)


@pytest.mark.long
def test_a_trial_that_diverges_leaves_the_others_as_they_are(whole: Path, material: Path, tmp_path: Path) -> None:
    folder = copy_material(material, tmp_path)
    diverges = {"train.learning_rate": 1e30, "train.max_grad_norm": 0, "train.warmup_ratio": 0}
    trials = {**LONGER, "second": LONGER["second"] | diverges}
    printed = run(f"train {write(folder, 'together', trials, RESIDENT)} {ONE}", folder, code=1)
    assert "an alarm ended 1 of 3 trials: second" in " ".join(printed.split())
    assert list(list_trials(folder / "together").values()) == [FINISHED, FAILED, FINISHED]
    for name in ("first", "third"):
        assert_close_run(folder / "together" / "trials" / name, whole / "trials" / name)


def test_a_trial_that_prepares_is_no_stall_of_the_others() -> None:
    group = together.TrialGroup.__new__(together.TrialGroup)
    watch: Any = SimpleNamespace(recorder=Recorder.__new__(Recorder))
    vars(watch.recorder).update(_file=None, _marks=[], step=0, progress=7)
    group.members = [SimpleNamespace(watch=watch), SimpleNamespace(watch=None)]  # type: ignore[list-item]
    for running, moves in ((None, False), (0, True), (1, True)):  # nobody; before its first step; before it is watched
        group.running = running
        assert (group.list_positions() != group.list_positions()) == moves
    group.running = 0
    watch.recorder._file = object()
    assert group.list_positions() == group.list_positions() == [7]


# --- one micro-batch, and faults planted in it ---


def make_members(material: Path, trials: Sequence[str]) -> tuple[SharedBase, list[together.TrialBase], list[Batch]]:
    """Return trials that are about to compute their first micro-batch, with B away from zero."""
    file = write(material, "unit", {name: TRIALS[name] for name in trials}, RESIDENT, len(trials))
    plan = make_plan(read_run_file(file, ["cluster.gpus_per_node=1"]))
    base = SharedBase(keeps=True)
    base.get(lambda: load_base(plan.base, plan.layout, dtype=torch.float32))
    assert base.loaded is not None
    members = []
    batches = []
    for number, trial in enumerate(plan.trials):
        model = attach_adapter(copy_model(base.loaded[0]), trial.run.lora, trial.adapter, number)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        member = make_member(base, trial, TrainedModel(trial, model, ("data",), lambda: 0.0))
        members.append(member)
        batches.append(make_batch(number))
    return base, members, batches


def make_member(base: SharedBase, plan: Plan, model: TrainedModel) -> together.TrialBase:
    class Alone:
        pass

    group: Any = Alone()
    group.base = base
    member = together.TrialBase(group, plan, together.SteadySignal.__new__(together.SteadySignal))
    model.causal_lm.train()
    member.model = model
    member.tokens = Updater(model.peft, plan.run.train, 1).liveness.tokens
    return member


def make_batch(number: int) -> Batch:
    chance = random.Random(number)
    rows = [
        {"input_ids": np.array([chance.randrange(20, 500) for _ in range(length)]), "row": place}
        for place, length in enumerate((5 + number, 9 - 2 * number))
    ]
    return Collate(PaddedCollator(0), mark_tokens=True)(rows)


SHARES = {"first": None, "second": None, "third": torch.tensor(0.5)}


def compute_alone(members: Sequence[together.TrialBase], batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
    found = []
    for member, batch in zip(members, batches, strict=True):
        model = member.model
        assert model is not None
        torch.manual_seed(1)
        total, _ = model.compute_loss(batch, get_share(member))
        total.backward()  # type: ignore[no-untyped-call]
        found.append({"loss": total.detach(), **take_gradients(model)})
    return found


def get_share(member: together.TrialBase) -> Tensor | None:
    assert member.plan.loaded.trial is not None
    return SHARES[member.plan.loaded.trial.name]


def compute_together(
    base: SharedBase, members: Sequence[together.TrialBase], batches: Sequence[Batch]
) -> list[dict[str, Tensor]]:
    forward = together.Forward(base, members)
    torch.manual_seed(1)
    requests = {
        number: together.LossRequest(member.model, batch, get_share(member))
        for number, (member, batch) in enumerate(zip(members, batches, strict=True))
        if member.model is not None
    }
    forward.run(requests, {number: slices.Random() for number in requests})
    return [
        {"loss": request.losses[0].detach(), **take_gradients(request.model)}
        for request in requests.values()
        if request.losses
    ]


def take_gradients(model: TrainedModel) -> dict[str, Tensor]:
    gradients = {name: p.grad.clone() for name, p in model.peft.named_parameters() if p.grad is not None}
    model.peft.zero_grad()
    return gradients


def find_differences(ours: Sequence[dict[str, Tensor]], theirs: Sequence[dict[str, Tensor]]) -> list[str]:
    found = []
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert own.keys() == other.keys()
        found += [
            f"{number} {name}" for name in own if not torch.allclose(own[name], other[name], rtol=CLOSE, atol=CLOSE)
        ]
    return found


@pytest.fixture(scope="module")
def members(material: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(material)
        return make_members(material, [*TRIALS])


def test_one_forward_gives_each_trial_its_own_losses_and_gradients(members: Any) -> None:
    """Bit for bit the same, whatever another trial's adapter and rows are."""
    base, trials, batches = members
    alone = compute_alone(trials, batches)
    assert all(len(found) > 10 for found in alone)
    first, *others = compute_together(base, trials, batches)
    assert find_differences([first, *others], alone) == []
    inputs = batches[2].inputs["input_ids"]
    changed = replace(batches[2], inputs={**batches[2].inputs, "input_ids": inputs.flip(0, 1)})
    again, *_, third = compute_together(base, trials, [*batches[:2], changed])
    assert find_differences([third], others[1:])
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.fixture(scope="module")
def alike(material: Path) -> Any:
    """Trials of different r that have adapters on the same layers, one with dropout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(material)
        return make_members(material, ["second", "third"])


def test_equal_parts_are_added_to_at_once(alike: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all trials have adapters, also of different r, on rows of different length; values as alone."""
    base, trials, batches = alike
    alone = compute_alone(trials, batches)
    chosen = []
    original = slices.are_equal_parts

    def watch(*given: Any) -> bool:
        chosen.append(original(*given))
        return chosen[-1]

    monkeypatch.setattr(slices, "are_equal_parts", watch)
    assert find_differences(compute_together(base, trials, batches), alone) == []
    assert all(chosen)
    assert chosen


def test_equal_parts_need_no_more_kernels_for_more_trials() -> None:
    names: Counter[str] = Counter()

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            outcome = function(*args, **(kwargs or {}))
            if function.overloadpacket.__name__ not in ("slice", "split", "unbind", "detach", "select", "alias"):
                names[function.overloadpacket.__name__] += 1
            return outcome

    def count(trials: int) -> Counter[str]:
        names.clear()
        x = torch.randn(trials, 5, 8, requires_grad=True)
        weights = [torch.randn(shape, requires_grad=True) for shape in ((4, 8), (6, 4)) for _ in range(trials)]
        parts = [slices.TrialSlice(slice(i, i + 1), slice(0, 5), slices.Random()) for i in range(trials)]
        adapters = [
            slices.TrialAdapter(rows, 2.0, torch.nn.Identity(), a, b)
            for rows, a, b in zip(parts, weights[:trials], weights[trials:], strict=True)
        ]
        assert slices.are_equal_parts(adapters, (trials, 5))
        with Count():  # type: ignore[no-untyped-call]
            added = slices.LowRankOfEqualParts.apply(x, (trials, 5), adapters, x.dtype, *weights)  # type: ignore[no-untyped-call]
            torch.autograd.grad(added.sum(), weights)
        return names.copy()

    assert count(2) == count(6)


def test_adapters_of_other_dtypes_compute_in_their_own(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(material)
    trials = {"narrow": {"lora.dtype": "bfloat16"}, "wide": {"lora.dtype": "float32"}}
    monkeypatch.setattr(f"{__name__}.TRIALS", trials)
    monkeypatch.setattr(f"{__name__}.SHARES", dict.fromkeys(trials))
    base, members, batches = make_members(material, [*trials])
    both, alone = (compute(members, batches) for compute in (partial(compute_together, base), compute_alone))
    assert find_differences(both[1:], alone[1:]) == []
    assert float(both[0]["loss"]) == pytest.approx(float(alone[0]["loss"]), rel=1e-4)


def test_offsets_of_products_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 refuses others."""
    given: list[torch.Tensor] = []
    monkeypatch.setattr(sliced_experts, "grouped_linear", lambda _rows, _experts, _name, ends: given.append(ends))
    trials = sliced_experts.SlicedExperts({}, slices.Slices(3))
    trials.product(torch.nn.Module(), "down_proj", torch.ones(16, 2), Tensor.detach, torch.arange(17))
    assert given[0].tolist() == [4, 8, 12, 16]
    assert given[0].is_contiguous()


# --- turns ---


def test_threads_run_one_at_a_time_with_their_own_random_numbers() -> None:
    drawn: dict[int, list[float]] = {0: [], 1: []}

    def work(number: int) -> None:
        torch.manual_seed(number)
        for _ in range(3):
            drawn[number].append(float(torch.rand(())))
            threads[number].wait_for_losses(*[None] * 3)  # type: ignore[arg-type]

    threads = [together.Turns(number, lambda number=number: work(number)) for number in range(2)]  # type: ignore[misc]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    while not all(thread.ended for thread in threads):
        for thread in threads:
            thread.resume()
            if thread.request is not None:
                thread.request.losses = torch.zeros(()), None
    assert torch.equal(before, torch.get_rng_state())
    for number, values in drawn.items():
        torch.manual_seed(number)
        assert values == [float(torch.rand(())) for _ in range(3)]


def test_an_error_of_one_trial_ends_the_others_too() -> None:
    signal_ = SimpleNamespace(received=False, training=False)
    session: Any = SimpleNamespace(stop_signal=signal_, base=SharedBase())
    plans: Any = [None, None]
    group = together.TrialGroup(plans, ["one", "two"], session)
    ended: list[str] = []

    def wait() -> None:
        try:
            group.members[0].turns.wait_for_losses(*[None] * 3)  # type: ignore[union-attr, arg-type]
        except RunError as error:
            ended.append(error.problems[0].problem)
            raise

    def fail() -> None:
        raise RunError("no space left", "here", "make room", "disk-full")

    with refused("disk-full", "here", RunError):
        group.train([wait, fail])
    assert ended == ["trial two, with which it trained together, failed"]


def test_all_trials_of_a_group_see_a_stop_signal_in_the_same_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    received = SimpleNamespace(received=False, training=False)
    session: Any = SimpleNamespace(stop_signal=received, base=SharedBase())
    plans: Any = [None, None]
    group = together.TrialGroup(plans, ["one", "two"], session)
    seen: list[list[bool]] = [[], []]

    def compute(live: Sequence[together.Turns]) -> None:
        for thread in live:
            assert thread.request is not None
            thread.request.losses = torch.zeros(()), None

    def work(number: int) -> None:
        for micro_batch in range(3):
            if (number, micro_batch) == (1, 1):
                received.received = True  # the first trial has looked already
            seen[number].append(group.signals[number].received)
            group.members[number].turns.wait_for_losses(*[None] * 3)  # type: ignore[union-attr, arg-type]

    monkeypatch.setattr(group, "compute", compute)
    group.train([partial(work, number) for number in range(2)])
    assert seen == [[False, False, True]] * 2


def test_documents_of_rows_laid_end_to_end_are_numbered_on() -> None:
    def row(*lengths: int) -> dict[str, Any]:
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
        edges = torch.tensor([0, *lengths]).cumsum(0)
        return {"input_ids": numbers, "seq_idx": numbers, "cu_seq_lens_q": edges, "max_length_q": max(lengths)}

    combined = slices.combine_documents([row(2, 3), row(1), row(4, 1)])
    whole = row(2, 3, 1, 4, 1)
    assert combined["seq_idx"].tolist() == whole["seq_idx"].tolist()
    assert combined["cu_seq_lens_k"].tolist() == whole["cu_seq_lens_q"].tolist()
    assert combined["max_length_q"] == 4


# --- the plan ---


def test_a_micro_batch_of_a_group_has_the_rows_of_all_its_trials() -> None:
    members = []
    for micro in (1, 4):
        given = test_cost.work(1, 1, micro=micro)
        run: Any = None  # which the cost doesn't depend on
        cost = estimate_cost(given, advise=False)
        members.append(plan_together.Member(f"of {micro}", run, given, RowLengths(1024), 1, cost))
    assert plan_together.estimate_together(members).batch.micro == 5


@pytest.mark.fault("more trials together than there are", "`windlass plan`", "is 3, and there are 2 trials")
@pytest.mark.fault("trials that can't train together", "`windlass plan`", "no two trials can train together")
@pytest.mark.parametrize(
    ("trials", "count", "code", "says"),
    [
        ({"one": {"lora.r": 4}, "two": {"lora.r": 2}}, 3, "few-trials", "is 3, and there are 2 trials"),
        (
            {"one": {"lora.use_dora": True}, "two": {"lora.use_dora": True, "lora.r": 2}},
            2,
            "not-together",
            "no two trials can train together",
        ),
        ({"one": {"lora.r": 4}, "two": {"lora.r": 2}}, 0, "wrong-value", ""),
    ],
)
def test_what_can_not_train_together_is_refused(
    trials: dict[str, Any], count: int, code: str, says: str, material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(material)
    with refused(code, "sweep.together") as problems:
        make_plan(read_run_file(write(material, "refused", trials, RESIDENT, count)))
    assert says in problems[0].problem


def test_the_plan_groups_trials_and_says_why_one_is_alone(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(material)
    trials: dict[str, dict[str, Any]] = {
        "a": {"lora.r": 4},
        "b": {"lora.use_dora": True, "lora.r": 2},
        "c": {"lora.r": 2},
        "d": {"data.packing": True},
        "e": {"lora.r": 16},
    }
    plan = make_plan(read_run_file(write(material, "groups", trials, RESIDENT, 2)))
    assert [group.names for group in plan.groups] == [("a", "c"), ("b",), ("d",), ("e",)]
    assert "use_dora" in plan.groups[1].reason
    first = plan.groups[0]
    assert first.gpu_gib > max(trial.cost.gpu_gib for trial in plan.trials[:1])
    assert plan.seconds is not None
    assert plan.seconds["steps"] == pytest.approx(sum(group.seconds or 0 for group in plan.groups))
    assert json.loads(json.dumps(plan.as_dict()))["groups"][0]["names"] == ["a", "c"]


def test_auto_takes_what_is_fastest(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short micro-batches wait for the host, so together they take less; one after the other is the default."""
    monkeypatch.chdir(material)
    trials = {name: {"lora.r": r} for name, r in (("a", 4), ("b", 2), ("c", 8))}
    plan = make_plan(read_run_file(write(material, "auto", trials, RESIDENT, "auto")))
    assert [group.names for group in plan.groups] == [("a", "b", "c")]
    (group,) = plan.groups
    assert group.seconds is not None
    assert group.seconds_alone is not None
    assert group.seconds < group.seconds_alone
    plan = make_plan(read_run_file(write_sweep(material, "default", trials, RESIDENT)))
    assert [len(group.names) for group in plan.groups] == [1, 1, 1]


@pytest.mark.long
def test_trials_on_pairs_are_what_they_would_be_alone(material: Path, tmp_path: Path) -> None:
    folder = copy_material(material, tmp_path)
    lines = (folder / "data.txt").read_text().splitlines()
    pairs = [
        {"prompt": line, "chosen": f" {other}", "rejected": f" {' '.join(reversed(other.split()))} {line}"}
        for line, other in zip(lines, [*lines[1:], lines[0]], strict=True)
        if len({*other.split()}) > 1
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    trials: dict[str, dict[str, Any]] = {
        "first": {"lora.lora_dropout": 0.0, "dpo.beta": 0.3},
        "second": {"lora.r": 8, "dpo.beta": 0.1, "lora.target_modules": "all-linear"},
    }
    for name, count in (("together", 2), ("alone", 1)):
        path = write(folder, name, trials, RESIDENT, count)
        document = yaml.safe_load(path.read_text())
        document["data"] = {"dataset_name_or_path": "pairs.jsonl", "max_length": 128, "val_fraction": 0.1}
        document["train"] |= {"objective": "dpo", "neftune_noise_alpha": None}
        path.write_text(json.dumps(document))
        run(f"train {path} {ONE}", folder)
    for name in trials:
        assert_close_run(folder / "together" / "trials" / name, folder / "alone" / "trials" / name)
    for command in ("report together", "best together"):
        assert "dpo.beta: another value is another loss" in " ".join(run(command, folder).split())
