"""Proof during the first steps of every run that the adapter trains: gradients reach it, it changes, replicas agree."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from windlass.errors import RunError
from windlass.observe.watch.detectors import LOOK, AlarmError
from windlass.ranks import collectives
from windlass.train.sync import ReplicaGroups, compute_fingerprints, to_local
from windlass.weights.expert_shards import AdapterShards, ExpertShard, view_by_expert

INTERVAL = 50  # updates between two comparisons of the adapter's values
CANCELLED = 1e-6  # of the sum of gradients' sizes: what rounding may leave where they cancel
TAIL = 0.1  # below this share of the run's learning rate an update may be too small to change a value


class Liveness:
    """Call `before_update` and `after_update` around every optimizer step; both do nothing once `is_done`.

    B starts at zero, so A has no gradient until B has moved: A is checked one step with a positive learning rate after
    B. If no B starts at zero (a continued adapter), all are checked at once. A resumed run is checked like a new one.
    Warm-up steps at rate 0 move nothing, prove nothing and don't count.
    """

    def __init__(self, model: nn.Module, replicas: ReplicaGroups, where: str) -> None:
        self.where = where  # for messages: the run folder
        self.replicas = replicas
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        largest = self._largest(list(self.named.values()))
        zero = [name for name, value in zip(self.named, largest, strict=True) if value == 0]
        phases = [zero, [name for name in self.named if name not in set(zero)]]
        self.phases = [names for names in phases if names]  # phases still to be proven, in order
        self.tokens = ExpertTokens(model, replicas)
        self.before: Tensor | None = None  # fingerprints taken by `before_update`
        self.last_seen: Tensor | None = None  # fingerprints from INTERVAL updates ago
        self.updates = 0
        self.graded = False  # the phase's gradients are proven; a step that moves it is still missing
        self._require(replicas.find_differing(), "they differ between ranks before the first step")

    @property
    def is_done(self) -> bool:
        return not self.phases

    def before_update(self, learning_rate: float) -> None:
        """Check the gradients, once they are averaged and before anything has moved."""
        if self.is_done:
            return
        names = self.phases[0]
        if not self.graded or learning_rate > 0:
            gradients = [self.named[name].grad for name in names]
            absent = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
            self._require(absent, "they have no gradient")
            values = self._largest([gradient for gradient in gradients if gradient is not None])
            largest = dict(zip(names, values, strict=True))
            infinite = [name for name, value in largest.items() if not math.isfinite(value)]
            self._require(infinite, "their gradient is not finite")
            zero = [name for name, value in largest.items() if value == 0]
            self._require(zero, "their gradient is exactly zero, so nothing they do reaches the loss")
            self._require(self.tokens.find_dead(self.named, names), "they had tokens and no gradient")
            self.graded = True
        self.tokens.step(moved=learning_rate > 0)
        self.before = self._fingerprints(names) if learning_rate > 0 else None

    def skip_update(self) -> None:
        """Note that this step is skipped: tokens that experts had in it yield no gradient."""
        self.tokens.step(moved=False)
        self.before = None

    def after_update(self, share: float) -> None:
        """Check that the optimizer's step has moved the tensors.

        `share`: of the run's learning rate, in this update. In 16 bits a small one is rounded away, as in a warm-up and
        where a resumed run's schedule ends: the next one is looked at.
        """
        if self.is_done or self.before is None:
            return
        still = self._find_equal(self.phases[0], self.before, self._fingerprints(self.phases[0]))
        small = [name for name in still if share < TAIL and self.named[name].dtype.itemsize < 4]
        self._require([name for name in still if name not in small], "they did not change in a step")
        self._require(self.replicas.find_differing(), "they differ between ranks after a step")
        if small:
            self.before = None
            return
        del self.phases[0]
        self.before = None
        self.graded = False
        if self.is_done:
            self.tokens.remove()

    def find_unchanged(self, share: float) -> str:
        """Return which tensors the last INTERVAL updates left unchanged, if they are at least half of the adapter.

        `share`: of the run's learning rate, in this update. In 16 bits a small update is rounded away.
        """
        if share < TAIL:
            self.updates = 0
            self.last_seen = None
            return ""
        self.updates += 1
        if self.updates % INTERVAL != 1:
            return ""
        names = list(self.named)
        before = self.last_seen
        self.last_seen = self._fingerprints(names)
        if before is None:
            return ""
        still = self._find_equal(names, before, self.last_seen)
        if len(still) * 2 < len(names):
            return ""
        return f"{len(still)} of the adapter's {len(names)} tensors: {collectives.list_first(still, ', ')}"

    def _find_equal(self, names: Sequence[str], before: Tensor, now: Tensor) -> list[str]:
        """Return the tensors whose fingerprints are the same as before on all ranks that have a part of them."""
        moved = self.replicas.all_reduce_max((now != before).int()).tolist()
        return [name for name, has_moved in zip(names, moved, strict=True) if not has_moved]

    def _fingerprints(self, names: Sequence[str]) -> Tensor:
        return compute_fingerprints([to_local(self.named[name]) for name in names])

    def _largest(self, tensors: Sequence[Tensor]) -> list[float]:
        """Return the largest absolute values over all ranks' parts, with one transfer from the device."""
        if not tensors:
            return []
        parts = [to_local(tensor.detach()).float() for tensor in tensors]
        largest = torch.stack([part.abs().max() if part.numel() else part.new_zeros(()) for part in parts])
        return list(map(float, self.replicas.all_reduce_max(largest.nan_to_num(nan=math.inf)).tolist()))

    def _require(self, names: Sequence[str], fault: str) -> None:
        """Stop with these names. They are equal on all ranks, because the values they are derived from are."""
        if names:
            tensors = f"{len(names)} adapter tensors are" if len(names) > 1 else "1 adapter tensor is"
            raise RunError(
                f"{tensors} not training: {fault}: {collectives.list_first(names, ', ')}",
                self.where,
                "nothing was saved; a module that the forward pass never uses, or a frozen path to it, does this",
                "not-training",
            )


class ExpertTokens:
    """Sums the gradients of each adapted expert's output over its tokens, to excuse experts that have none.

    Tokens that don't reach the loss (padding, an unsupervised token in the last layer) have no gradient. Those that the
    chosen and the rejected answer of a pair begin with have opposite ones in the last layer, which cancel.
    """

    def __init__(self, model: nn.Module, replicas: ReplicaGroups) -> None:
        self.replicas = replicas
        self.parts = AdapterShards(model)
        self.pulls: dict[str, Tensor] = {}  # of each expert: sums of what its tokens' gradients are, and of their sizes
        self.moved: dict[str, Tensor] = {}  # experts whose B has moved: only their A can have a gradient
        self.handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            # The outermost of PEFT's nested wrappers.
            if name.endswith(".experts") and hasattr(module, "parameter_name"):
                device = next(p.device for p in module.parameters() if p.requires_grad)
                part = self.parts.of(name)
                experts = part.total if part else int(module.num_experts)
                self.pulls[name] = torch.zeros(2, experts, dtype=torch.float64, device=device)
                self.handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))

    def _hook(self, name: str) -> Callable[..., None]:
        def watch(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
            index = (args[1] if len(args) > 1 else kwargs["top_k_index"]).detach().flatten(0, -2)

            if output.requires_grad:
                output.register_hook(partial(self.add, name, index))  # type: ignore[no-untyped-call]

        return watch

    def add(self, place: str, index: Tensor, gradient: Tensor) -> None:
        """Add the gradients of these experts' outputs, along a direction that none is perpendicular to by chance."""
        rows = gradient.detach().flatten(0, -2)
        direction = torch.arange(1, rows.shape[1] + 1, device=rows.device).cos().to(rows.dtype)
        along = (rows @ direction).double()[:, None].expand_as(index).flatten()
        self.pulls[place].index_add_(1, index.flatten(), torch.stack([along, along.abs()]))

    def find_dead(self, named: dict[str, nn.Parameter], names: Sequence[str]) -> list[str]:
        """Return experts with useful tokens on some rank but a zero gradient: `….experts.lora_B.default.weight[3]`."""
        dead_experts = []
        for place, pulls in self.pulls.items():
            if dist.is_initialized():
                dist.all_reduce(pulls)
            pulled = self._is_pulled(pulls)
            due = pulled & self.moved.get(place, pulled)
            for name in names:
                gradient = named[name].grad
                if name.startswith(f"{place}.") and gradient is not None:
                    part = self.parts.of(name) or ExpertShard(0, len(due), len(due))
                    graded = torch.zeros_like(due, dtype=torch.int64)  # filled on the ranks that have the expert
                    has_gradient = view_by_expert(name, gradient, part.count).ne(0).flatten(1).any(dim=1)
                    graded[part.first : part.first + part.count] = has_gradient.long()
                    dead = due & self.replicas.all_reduce_max(graded).eq(0)
                    dead_experts += [f"{name}[{number}]" for number in dead.nonzero().flatten().tolist()]
        return dead_experts

    def step(self, *, moved: bool) -> None:
        """Start counting the next step; remember the experts that this one moved."""
        for place, pulls in self.pulls.items():
            if moved:
                self.moved[place] = self._is_pulled(pulls)
            self.pulls[place] = torch.zeros_like(pulls)

    def _is_pulled(self, pulls: Tensor) -> Tensor:
        return pulls[0].abs() > CANCELLED * pulls[1]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.pulls.clear()


def stop_non_finite(policy: str, step: int, faulty: list[int], rows: list[int]) -> None:
    """Stop and name the ranks and rows, unless watch.non_finite skips such steps. A collective."""
    everyones: list[list[int]] = collectives.all_gather(rows)
    if policy == "stop":
        where = "; ".join(f"rank {rank}, rows {', '.join(map(str, everyones[rank]))}" for rank in faulty)
        where = where or "on no single rank: the sum over all ranks overflowed"
        raise AlarmError(
            "non_finite",
            f"non-finite loss or gradient at step {step}: {where}",
            "watch.non_finite",
            f"nothing of this step was saved; {LOOK}; lower train.learning_rate, or set watch.non_finite: skip to "
            "leave such steps out",
        )
