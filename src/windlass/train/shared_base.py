"""The base that the trials of a sweep share: loaded once, and put back as it was loaded after every trial."""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from windlass.errors import RunError
from windlass.observe.watch.run import RunWatch
from windlass.ranks import collectives
from windlass.train.fsdp import get_device, reshard
from windlass.train.model import TrainedModel
from windlass.train.patches import Attribute, list_attributes, restore_attributes
from windlass.train.updater import Updater

CHUNK: Final = 2**22  # numbers that are added up at a time
HINT: Final = (
    "finished trials before it are as they would be alone; report it with the output of `windlass bug-report RUN`"
)

LoadedModel = tuple[transformers.PreTrainedModel, dict[str, Any]]  # the model and its certificate


class SharedBase:
    """Loads the base when the first run asks for it. `keeps`: for the runs after it, too."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.keeps = keeps
        self.undo = ExitStack()  # what a run replaced outside of the model
        self.loaded: LoadedModel | None = None
        self.record: ModelRecord | None = None

    def get(self, load: Callable[[], LoadedModel]) -> LoadedModel:
        if self.loaded is None:
            self.loaded = load()
            self.record = ModelRecord(self.loaded[0]) if self.keeps else None
        return self.loaded

    def join(self, model: TrainedModel, updater: Updater, watch: RunWatch) -> None:
        """Take note of a run that is about to train. It trains alone."""

    def restore(self, after: str) -> None:
        """Take a run's adapter, hooks and replacements off the base, and prove that it is as it was. A collective."""
        self.undo.close()
        if self.record is not None:
            wrong = self.record.restore()
            collectives.raise_together(wrong, after, HINT, "base-changed", RunError)
        gc.collect()  # the adapter and its optimizer
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class ModelRecord:
    """A model's modules with all their attributes, and a checksum of its weights."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model
        self.owners: list[Any] = [*model.modules()]
        configs = [module.config for module in self.owners if hasattr(module, "config")]
        self.owners += {id(config): config for config in configs}.values()
        self.attributes: list[list[Attribute]] = [list(list_attributes(owner)) for owner in self.owners]
        self.classes = [type(owner) for owner in self.owners]
        self.parameters = [list(getattr(owner, "_parameters", ())) for owner in self.owners]
        self.checksums = compute_checksums(model)

    def restore(self) -> list[str]:
        """Set every attribute as it was; return what is still different."""
        reshard(self.model)
        for owner, cls, attributes in zip(self.owners, self.classes, self.attributes, strict=True):
            restore_attributes(owner, cls, attributes)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        wrong = [
            f"{type(owner).__name__} has other parameters than when it was loaded"
            for owner, names in zip(self.owners, self.parameters, strict=True)
            if list(getattr(owner, "_parameters", ())) != names
        ]
        now = compute_checksums(self.model)
        return wrong + [
            f"{name} is not as it was loaded" for name, sum_ in self.checksums.items() if now.get(name) != sum_
        ]


@torch.no_grad()
def compute_checksums(model: nn.Module) -> dict[str, int]:
    """Return a checksum of this rank's part of every weight and buffer. It finds any change, and values that move."""
    odd = torch.arange(1, 2 * CHUNK, 2, device=get_device())
    sums = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        sums[name] = add_up(own.detach(), odd)
    return sums


def add_up(tensor: Tensor, odd: Tensor) -> int:
    """Return the sum of a tensor's bytes as whole numbers, each times an odd number of its own, modulo 2^64."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    size = next(size for size in width if raw.numel() % size == 0 and raw.storage_offset() % size == 0)
    total = torch.zeros((), dtype=torch.int64, device=odd.device)
    for number, chunk in enumerate(raw.view(width[size]).split(CHUNK)):  # type: ignore[no-untyped-call]
        numbers = chunk.to(odd.device, torch.int64)
        weights = odd[: len(chunk)]
        # CUDA has no dot product of whole numbers; on a CPU it takes a tenth of the time.
        added = (numbers * weights).sum() if odd.is_cuda else torch.dot(numbers, weights)
        total = total * 31 + added + number
    return int(total)
