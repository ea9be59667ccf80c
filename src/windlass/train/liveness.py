"""Proof at the first steps of every run that the adapter lives: gradients reach it, it changes, replicas agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from windlass.errors import RunError
from windlass.model.targets import ExpertShard, ExpertShards, by_expert
from windlass.train.sync import Replicas, fingerprints

SHOWN = 6  # names in a message; the count says how many there are


class Liveness:
    """Call `before_update` and `after_update` around every optimizer step until `done`.

    B starts at zero, so A has no gradient until B has moved: A is judged one step with a learning rate above 0
    later than B. Where no B starts at zero (a continued adapter, a resumed run), all are judged at once.
    Steps of a warm-up at rate 0 move nothing and prove nothing: they don't count.
    """

    def __init__(self, model: nn.Module, replicas: Replicas, where: str) -> None:
        self.where = where  # for messages: the run folder
        self.replicas = replicas
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.named.values())).device if self.named else torch.device("cpu")
        zero = self._zero(list(self.named.values()))
        starting = {name for name, empty in zip(self.named, zero, strict=True) if empty}
        first = [name for name in self.named if name in starting] or list(self.named)
        self.phases = [first, [name for name in self.named if name not in set(first)]]
        self.tokens = ExpertTokens(model, replicas)
        self.before: dict[str, int] = {}
        self.graded = False
        self._require(replicas.differing(), "they differ between ranks before the first step")

    @property
    def done(self) -> bool:
        return not any(self.phases)

    def before_update(self, learning_rate: float) -> None:
        """Gradients are averaged, nothing has moved yet."""
        if self.done:
            return
        if self.graded and learning_rate == 0:  # judged, and nothing is about to move
            self.tokens.step(moved=False)
            return
        names = self.phases[0]
        gradients = [self.named[name].grad for name in names]
        self._require(
            [name for name, gradient in zip(names, gradients, strict=True) if gradient is None], "they have no gradient"
        )
        present = [gradient for gradient in gradients if gradient is not None]
        finite = [math.isfinite(value) for value in self._largest(present)]
        self._require([n for n, ok in zip(names, finite, strict=True) if not ok], "their gradient is not finite")
        zero = [name for name, empty in zip(names, self._zero(present), strict=True) if empty]
        self._require(zero, "their gradient is exactly zero, so nothing they do reaches the loss")
        self._require(self.tokens.dead(self.named, names), "they had tokens and no gradient")
        self.tokens.step(moved=learning_rate > 0)
        self.graded = True
        if learning_rate > 0:
            self.before = self._prints(names)

    def after_update(self, learning_rate: float) -> None:
        """The optimizer has stepped."""
        if self.done or not self.before or learning_rate == 0:
            return
        names = list(self.before)
        after = self._prints(names)
        changed = self.replicas.most(torch.tensor([after[n] != self.before[n] for n in names]).int().to(self.device))
        self._require(
            [n for n, moved in zip(names, changed.tolist(), strict=True) if not moved], "they did not change in a step"
        )
        self._require(self.replicas.differing(), "they differ between ranks after a step")
        self.phases.pop(0)
        self.before, self.graded = {}, False
        while self.phases and not self.phases[0]:
            self.phases.pop(0)
        if self.done:
            self.tokens.remove()

    def _prints(self, names: Sequence[str]) -> dict[str, int]:
        prints = fingerprints([_local(self.named[name]) for name in names]).tolist()
        return dict(zip(names, prints, strict=True))

    def _largest(self, tensors: Sequence[Tensor]) -> list[float]:
        """Largest absolute values, of all parts where ranks hold parts; in one transfer from the device."""
        if not tensors:
            return []
        largest = torch.stack([_local(tensor.detach()).float().abs().max() for tensor in tensors])
        return [float(value) for value in self.replicas.most(largest.nan_to_num(nan=math.inf)).tolist()]

    def _zero(self, tensors: Sequence[Tensor]) -> list[bool]:
        return [value == 0 for value in self._largest(tensors)]

    def _require(self, names: Sequence[str], fault: str) -> None:
        """Stop with the names, the same on every rank: the values judged are the same everywhere."""
        if names:
            shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            raise RunError(
                f"{len(names)} adapter tensors are not training: {fault}: {shown}",
                self.where,
                "nothing was saved; a module that the forward pass never uses, or a frozen path to it, does this",
            )


class ExpertTokens:
    """Counts the tokens of each adapted expert that the loss depends on, to excuse the experts that had none.

    Tokens that don't reach the loss (padding, an unsupervised token in the last layer) give no gradient: only
    those whose output has one are counted.
    """

    def __init__(self, model: nn.Module, replicas: Replicas) -> None:
        self.replicas = replicas
        self.parts = ExpertShards(model)
        self.counts: dict[str, Tensor] = {}
        self.moved: dict[str, Tensor] = {}  # the experts whose B has moved: only their A can have a gradient
        self.excused: set[str] = set()
        self.handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if name.endswith(".experts") and hasattr(module, "parameter_name"):  # PEFT's wrapper, outermost of a nest
                device = next(p.device for p in module.parameters() if p.requires_grad)
                part = self.parts.of(name)
                experts = part.total if part else int(module.num_experts)
                self.counts[name] = torch.zeros(experts, dtype=torch.int64, device=device)
                self.handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))

    def _hook(self, name: str) -> Callable[..., None]:
        def watch(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
            index = (args[1] if len(args) > 1 else kwargs["top_k_index"]).detach()

            def count(gradient: Tensor) -> None:
                useful = index[gradient.detach().ne(0).flatten(0, -2).any(dim=-1)].flatten()
                self.counts[name] += torch.bincount(useful, minlength=len(self.counts[name]))

            if output.requires_grad:
                output.register_hook(count)  # type: ignore[no-untyped-call]

        return watch

    def dead(self, named: dict[str, nn.Parameter], names: Sequence[str]) -> list[str]:
        """Experts with useful tokens on some rank and yet a gradient of zero: `….experts.lora_B.default.weight[3]`."""
        found = []
        for place, counts in self.counts.items():
            if dist.is_initialized():
                dist.all_reduce(counts)
            due = counts.gt(0) & self.moved.get(place, counts).gt(0)
            self.excused |= {f"{place}[{i}]" for i, count in enumerate(counts.tolist()) if not count}
            for name in names:
                gradient = named[name].grad
                if name.startswith(f"{place}.") and gradient is not None:
                    dead = due & ~self._graded(name, gradient, len(counts))
                    found += [f"{name}[{i}]" for i in dead.nonzero().flatten().tolist()]
        return found

    def _graded(self, name: str, gradient: Tensor, experts: int) -> Tensor:
        """Which experts have any gradient, on whichever rank they are."""
        part = self.parts.of(name) or ExpertShard(0, experts, experts)
        graded = torch.zeros(experts, dtype=torch.int32, device=gradient.device)
        own = by_expert(name, gradient, part.count).ne(0).flatten(1).any(dim=1)
        graded[part.first : part.first + part.count] = own.int()
        return self.replicas.most(graded).bool()

    def step(self, *, moved: bool) -> None:
        """Start counting the next step; remember the experts that this one moved."""
        for place, counts in self.counts.items():
            if moved:
                self.moved[place] = counts
            self.counts[place] = torch.zeros_like(counts)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.counts.clear()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
