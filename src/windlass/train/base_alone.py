"""The base without its adapter: for its loss, which every evaluation is compared with."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from windlass.data.inputs import hash_text
from windlass.files import WriteGuard, read_json, write_json
from windlass.plan import Plan
from windlass.ranks import collectives
from windlass.settings import FOUR_BITS
from windlass.train.fsdp import reshard


class BaseAlone:
    """Switches an adapter off, and what is trained of the base itself back to what was loaded.

    Create it before an adapter is attached, which may load trained weights into the base. Adapters of every kind leave
    all other weights as they are: PiSSA's and OLoRA's subtract their initial values themselves (train/initial.py).
    """

    def __init__(self, model: nn.Module, trained: Iterable[str]) -> None:
        """trained: names of the base's parameters that will be trained."""
        self.model = model
        self.trained: list[nn.Parameter] = [model.get_parameter(name) for name in trained]
        self.originals = [_own_part(parameter).cpu().clone() for parameter in self.trained]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this, the model computes what the base computes. Without collectives of its own."""
        layers = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
        before = [layer._disable_adapters for layer in layers]
        values = [_own_part(parameter).cpu().clone() for parameter in self.trained]
        # Not by PEFT's `disable_adapter`, which changes what requires a gradient, and keeps trained biases.
        for layer in layers:
            layer._disable_adapters = True
        try:
            self._write(self.originals)
            yield
        finally:
            self._write(values)
            for layer, disabled in zip(layers, before, strict=True):
                layer._disable_adapters = disabled

    def _write(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.trained, values, strict=True):
            _own_part(parameter).copy_(value)
        if self.trained:
            reshard(self.model)  # weights that stay gathered would be those from before


def _own_part(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a parameter."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def describe_base_forward(plan: Plan, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return everything that the base's log-probabilities of given tokens depend on. facts: of `describe_base`."""
    run = plan.run
    # bf16 and fp8 hold the same weights.
    stored = [plan.layout.base_dtype] if plan.layout.base_dtype in FOUR_BITS else []
    precision = [*stored, run.model.torch_dtype, "bf16" if run.train.in_bf16 else run.model.torch_dtype]
    if run.objective.of_pairs:
        precision.append("evaluated in float32")  # train/precision.py
        if plan.layout.is_sharded and run.train.in_bf16 and run.model.torch_dtype == "float32":
            precision.append("gathered in bfloat16")
    return {
        "base": facts["base_digest"],
        "config": hash_text(facts["base_config"]),
        "precision": ", ".join(precision),
        "attention": run.model.attn_implementation or plan.base.family.usual_attention,
    }


class BaseFigures:
    """What evaluations of the base alone gave, in a file that resumed runs read again, and others on the same base."""

    def __init__(self, path: Path, identity: str, unwritten: WriteGuard) -> None:
        """identity: of everything that the figures depend on."""
        self.path = path
        self.identity = identity
        self.unwritten = unwritten

    def read(self) -> dict[str, float] | None:
        """Return the figures; None if they are not known yet. A collective."""
        figures: Any = collectives.run_on_rank_0(lambda: read_json(self.path).get(self.identity))
        return figures if isinstance(figures, dict) else None

    def write(self, figures: dict[str, float]) -> None:
        if collectives.get_rank() == 0:
            with self.unwritten(self.path):
                write_json(self.path, {**read_json(self.path), self.identity: figures})
