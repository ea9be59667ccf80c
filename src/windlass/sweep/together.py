"""Train trials of a sweep together: their rows in one micro-batch, so that the base computes once for all of them.

Each trial runs the loop that it would run alone, in a thread of its own and on a copy of the model that shares the
base's weights. Exactly one thread runs at a time, in a fixed order, so all ranks make the same collectives. A loop that
asks for the loss of a micro-batch waits until all others ask for theirs; then one forward and one backward compute all
of them. Losses are sums over different rows and adapters, so each adapter gets its own gradient.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import transformers
from peft.tuners.lora import LoraLayer
from rich.console import Console
from torch import Tensor

from windlass.errors import RunError, UserError
from windlass.observe.flops import find_routers
from windlass.observe.watch.run import RunWatch
from windlass.plan import Plan
from windlass.ranks.rank import StopSignal
from windlass.sweep import slices
from windlass.sweep.copies import copy_model
from windlass.sweep.sliced_experts import SlicedExperts
from windlass.sweep.slices import Random, SlicedLinear, Slices, TrialSlice, set_state
from windlass.train.collate import Batch
from windlass.train.experts.experts import UnmergedExpertLora
from windlass.train.fsdp import get_device, reshard
from windlass.train.head import Head
from windlass.train.kernels import family_layers
from windlass.train.kernels.lora_linear import LoraLinear
from windlass.train.liveness import ExpertTokens
from windlass.train.loss import balance_router
from windlass.train.model import ROUTED, TrainedModel
from windlass.train.noise import add_noise
from windlass.train.patches import ModelPatches
from windlass.train.recompute import recompute_layers
from windlass.train.session import Session
from windlass.train.shared_base import LoadedModel, SharedBase
from windlass.train.sync import WaitTimer
from windlass.train.updater import Updater

LOG_WIDTH: Final = 240
PREFIX: Final = "base_model.model."  # of a module's name in PEFT's model
Losses = tuple[Tensor, Tensor | None]


@dataclass(eq=False)
class LossRequest:
    """What a loop waits for: the loss of a micro-batch."""

    model: TrainedModel
    batch: Batch
    balance_share: Tensor | None
    losses: Losses | None = None


class Turns(threading.Thread):
    """A trial's thread. It runs only within `resume`, until it requests a loss or ends."""

    def __init__(self, number: int, work: Callable[[], Any]) -> None:
        super().__init__(name=f"windlass trial {number}", daemon=True)
        self.number = number
        self.work = work
        self.device = get_device()
        self.go = threading.Semaphore(0)
        self.back = threading.Semaphore(0)
        self.random = Generators()
        self.request: LossRequest | None = None
        self.cancelled = ""
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        self.go.acquire()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            self.result = self.work()
        except BaseException as error:  # raised in the main thread
            self.error = error
        self.request = None
        self.ended = True
        self.back.release()

    def resume(self) -> None:
        """Let it run, with its own random numbers. Called in the main thread."""
        outside = Generators()
        self.random.restore()
        self.go.release()
        self.back.acquire()
        self.random = Generators()
        outside.restore()

    def wait_for_losses(self, model: TrainedModel, batch: Batch, balance_share: Tensor | None) -> Losses:
        """Return a micro-batch's losses. Called in its own thread."""
        request = LossRequest(model, batch, balance_share)
        self.request = request
        self.back.release()
        self.go.acquire()
        if self.cancelled:
            hint = "fix what is wrong with that trial; --resume continues the others from their checkpoints"
            raise RunError(self.cancelled, "sweep", hint, "trial-beside")
        assert request.losses is not None
        return request.losses


class Generators(Random):
    """The state of every generator that training draws from."""

    def __init__(self) -> None:
        super().__init__()
        self.python = random.getstate()
        self.numpy = np.random.get_state()

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        set_state(self.state)


class TrialBase(SharedBase):
    """The base as one trial of a group sees it: a copy of the modules on the same weights."""

    def __init__(self, group: "TrialGroup", plan: Plan, signal: "SteadySignal") -> None:
        super().__init__()
        self.group = group
        self.plan = plan
        self.signal = signal
        self.undo = group.base.undo
        self.model: TrainedModel | None = None
        self.watch: RunWatch | None = None
        self.turns: Turns | None = None
        self.tokens: ExpertTokens | None = None

    def get(self, load: Callable[[], LoadedModel]) -> LoadedModel:
        model, certificate = self.group.base.get(load)
        reshard(model)  # the reference or the first evaluation of a trial before leaves weights gathered
        return copy_model(model), certificate

    def join(self, model: TrainedModel, updater: Updater, watch: RunWatch) -> None:
        assert self.turns is not None
        self.model = model
        self.tokens = updater.liveness.tokens
        self.watch = watch
        self.signal.model = model
        model.shared = self.turns.wait_for_losses
        # The whole group stands still, or none of it does.
        own = watch.heartbeat.position
        watch.heartbeat.position = lambda: replace(own(), progress=self.group.list_positions())


class SteadySignal(StopSignal):
    """A stop signal that all trials of a group see in the same micro-batch, so that they stop at the same step; an
    evaluation sees it at once."""

    def __init__(self, signal: StopSignal) -> None:
        self.signal = signal
        self.model: TrainedModel | None = None
        self.seen = signal.received

    def look(self) -> None:
        self.seen = self.signal.received

    @property
    def received(self) -> bool:  # type: ignore[override]
        evaluates = self.model is not None and not self.model.causal_lm.training
        return self.signal.received if evaluates else self.seen

    @property
    def training(self) -> bool:
        return self.signal.training

    @training.setter
    def training(self, value: bool) -> None:
        self.signal.training = value


class TrialGroup:
    """Trials that train together."""

    def __init__(self, plans: Sequence[Plan], names: Sequence[str], session: Session) -> None:
        self.session = session
        self.base = session.base
        self.names = names
        self.signals = [SteadySignal(session.stop_signal) for _ in plans]
        self.members = [TrialBase(self, plan, signal) for plan, signal in zip(plans, self.signals, strict=True)]
        self.computes: Forward | None = None
        self.running: int | None = None  # the trial whose turn it is

    def list_positions(self) -> list[Any]:
        positions: list[Any] = [
            member.watch.recorder.position().progress for member in self.members if member.watch is not None
        ]
        # A trial that prepares (the reference of pairs may take hours) or writes its adapter is not watched alone.
        running = None if self.running is None else self.members[self.running]
        if running and not (running.watch and running.watch.recorder.is_running):
            positions.append(time.monotonic())
        return positions

    def make_session(self, number: int) -> Session:
        """Return what a trial has for itself: its copy of the model, and a console that names it."""
        console = name_console(self.session.console, self.names[number])
        return replace(self.session, console=console, base=self.members[number], stop_signal=self.signals[number])

    def train(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the trials' work to their ends; return what each returned. An error of one ends all."""
        threads = [Turns(number, work) for number, work in enumerate(works)]
        for member, thread in zip(self.members, threads, strict=True):
            member.turns = thread
        live = threads
        while live:
            for thread in live:
                self.running = thread.number
                thread.resume()
                self.running = None
                if thread.error is not None:
                    self.cancel(threads, thread)
                    raise thread.error
            live = [thread for thread in live if not thread.ended]
            for signal in self.signals:
                signal.look()
            if live:
                self.compute(live)
        return [thread.result for thread in threads]

    def cancel(self, threads: Sequence[Turns], failed: Turns) -> None:
        """End the other trials, which close their files and finish writing their checkpoints."""
        for thread in threads:
            if thread.is_alive() and thread.request is not None:
                thread.cancelled = f"trial {self.names[failed.number]}, with which it trained together, failed"
                thread.resume()

    def compute(self, live: Sequence[Turns]) -> None:
        """Compute the losses that the loops wait for, and their gradients."""
        if self.computes is None:
            self.computes = Forward(self.base, self.members)
        requests = {thread.number: thread.request for thread in live if thread.request is not None}
        self.computes.run(requests, {thread.number: thread.random for thread in live})


class Forward:
    """The model that computes the rows of all trials of a group."""

    def __init__(self, base: SharedBase, members: Sequence[TrialBase]) -> None:
        assert base.loaded is not None
        self.members = members
        self.model = copy_model(base.loaded[0])
        self.head = Head(self.model)
        self.slices = Slices(len(members))
        trained = [member.model for member in members]
        first = next(model for model in trained if model is not None)
        plan = members[0].plan
        self.autocast = first.autocast
        for name in replace_layers(self.model, trained, self.slices):
            count = partial(self.count_tokens, name)
            self.model.get_submodule(name).register_forward_hook(count, with_kwargs=True)
        narrow = torch.bfloat16 if plan.run.train.in_bf16 else None
        patches = ModelPatches(self.model, dtype=narrow, by_document=plan.by_document)
        base.undo.callback(patches.undo)
        if first.device.type == "cuda":
            for owner, name, value in list(family_layers.find_replacements(self.model, first.device)):
                patches.patches.replace(owner, name, value)
        for layer, (router, _) in enumerate(find_routers(self.model)):
            router.register_forward_hook(partial(self.count_choices, layer), prepend=True)
        self.waits = WaitTimer(self.model, first.waits.now, split_experts=plan.layout.expert_parallel > 1)
        recompute_layers(self.model, plan)
        self.model.get_input_embeddings().register_forward_hook(self.add_noise)
        self.model.train()

    def add_noise(self, module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Add each trial's noise to its embeddings."""
        for member, part in zip(self.members, self.slices.parts, strict=True):
            alpha = member.plan.run.train.neftune_noise_alpha
            if part is not None and alpha:
                with part.random.use():
                    noisy = add_noise(alpha)(module, inputs, part.of(output))
                output = output.clone()
                part.of(output).copy_(noisy)
        return output

    def count_choices(self, layer: int, module: Any, inputs: Any, output: Any) -> None:
        """Count how often each trial's tokens choose each expert, in its sampled steps."""
        for member, part in zip(self.members, self.slices.parts, strict=True):
            balance = member.watch.recorder.balance if member.watch is not None else None
            if part is not None and balance is not None and balance.hooks:
                balance.count(layer, module, inputs, output, partial(take_part, part, self.slices.shape))

    def count_tokens(self, name: str, _: Any, args: Any, kwargs: Mapping[str, Tensor], output: Tensor) -> None:
        """Count the tokens that each trial sends to experts, as long as it proves that its adapter trains."""
        index = args[1] if len(args) > 1 else kwargs["top_k_index"]
        for member, part in zip(self.members, self.slices.parts, strict=True):
            if part is not None and member.tokens is not None and member.tokens.handles:
                count = partial(add_part, member.tokens, f"{PREFIX}{name}", index.detach(), part, self.slices.shape)
                output.register_hook(count)  # type: ignore[no-untyped-call]

    def run(self, requests: Mapping[int, LossRequest], randoms: Mapping[int, Random]) -> None:
        """Compute the requests' losses, and add the gradients of all to their adapters."""
        inputs = [request.batch.inputs for request in requests.values()]
        shape, parts = slices.place_parts(inputs, [randoms[number] for number in requests])
        of_trials = dict(zip(requests, parts, strict=True))
        self.slices.set(shape, [of_trials.get(number) for number in range(self.slices.trials)])
        arguments = slices.combine(inputs, parts, shape)
        balanced = [number for number, request in requests.items() if request.balance_share is not None]
        if balanced:
            arguments |= ROUTED
        self.waits.on = any(request.model.waits.on for request in requests.values())
        targets = [request.batch.targets for request in requests.values()]
        with self.autocast:
            outputs = self.model(**arguments)
            log_probs = self.head.log_probs(outputs.last_hidden_state, torch.cat(targets))
            balances = {
                number: self.balance_router(
                    outputs.router_logits.layers, of_trials[number], requests[number].batch.mask
                )
                for number in balanced
            }
        self.waits.on = False
        del outputs  # or hidden states and routers' logits would live through the backward
        total = torch.zeros((), device=log_probs.device)
        of_requests = torch.split(log_probs, [len(of_request) for of_request in targets])
        for (number, request), of_request in zip(requests.items(), of_requests, strict=True):
            loss = sum_trial_losses(request, of_request)
            balance = balances.get(number)
            if balance is not None and request.balance_share is not None:
                loss = loss + request.balance_share * balance
            request.model.waits.marks = [*self.waits.marks] if request.model.waits.on else []
            request.losses = loss.detach().requires_grad_(), None if balance is None else balance.detach()
            total = total + loss
        self.waits.marks = []
        total.backward()  # type: ignore[no-untyped-call]

    def balance_router(self, router_logits: Sequence[Tensor], part: TrialSlice, mask: Tensor | None) -> Tensor:
        """Return the router's balancing loss of one trial's tokens."""
        of_trial = [take_part(part, self.slices.shape, logits).flatten(0, 1) for logits in router_logits]
        return balance_router(of_trial, self.model.config.get_text_config(), mask)


def take_part(part: TrialSlice, shape: tuple[int, int], of_tokens: Tensor) -> Tensor:
    return part.of(of_tokens.view(*shape, -1))


def add_part(
    tokens: ExpertTokens, place: str, index: Tensor, part: TrialSlice, shape: tuple[int, int], gradient: Tensor
) -> None:
    if place in tokens.pulls:
        own_index, own_gradient = (part.of(tensor.view(*shape, -1)).flatten(0, 1) for tensor in (index, gradient))
        tokens.add(place, own_index, own_gradient)


def sum_trial_losses(request: LossRequest, log_probs: Tensor) -> Tensor:
    """Return the summed loss of one trial's targets, or of their pairs: what `TrainedModel.sum_losses` returns."""
    model = request.model
    if model.preference is not None:
        return model.preference.compute(log_probs, request.batch)
    if request.batch.sources is not None:
        model.sources.add(request.batch.sources, -log_probs.detach())
    return -log_probs.sum()


def replace_layers(
    model: transformers.PreTrainedModel, trained: Sequence[TrainedModel | None], of_trials: Slices
) -> list[str]:
    """Let the model's layers add all trials' adapters, each to its own rows. Returns where experts have some."""
    linears: dict[str, list[Any]] = {}
    stacks: dict[str, dict[str, list[Any]]] = {}  # by module, then by parameter
    for number, one in enumerate(trained):
        for name, module in one.causal_lm.named_modules() if one is not None else ():
            if type(module) is UnmergedExpertLora:
                of_stack = stacks.setdefault(name.partition(".base_layer")[0], {})
                of_stack.setdefault(module.parameter_name, [None] * len(trained))[number] = module
            elif type(module) is LoraLinear and not module.lora_variant and not module.fan_in_fan_out:
                linears.setdefault(name, [None] * len(trained))[number] = module
            elif isinstance(module, LoraLayer):
                problem = f"{name} has an adapter of a kind that trials can't train together"
                raise UserError(problem, "sweep.together", "set sweep.together: 1", "not-together")
    for name, layers in linears.items():
        model.set_submodule(name, SlicedLinear(model.get_submodule(name), layers, of_trials))
    for name, adapters in stacks.items():
        vars(model.get_submodule(name))["sliced"] = SlicedExperts(adapters, of_trials)
    return [*stacks]


class NamedLines:
    """A stream whose lines begin with a trial's name."""

    def __init__(self, name: str, stream: Any) -> None:
        self.name = name
        self.stream = stream

    def write(self, text: str) -> None:
        lines = text.splitlines(keepends=True)
        self.stream.write("".join(f"{self.name}: {line}" for line in lines))

    def flush(self) -> None:
        self.stream.flush()


def name_console(console: Console, name: str) -> Console:
    """Return a console for a trial that trains beside others: without a live line, and each line names it."""
    lines: Any = NamedLines(name, console.file)
    quiet = console.quiet
    return Console(
        file=lines, width=LOG_WIDTH, force_terminal=False, highlight=False, emoji=False, markup=False, quiet=quiet
    )
