"""The Trainer's events around a real small model, as cheap as it goes: for scale, kills and ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from windlass.observe.meter import LLMStepProfiler


class Script:
    """Tells a profiler what the Trainer would, in its order."""

    def __init__(self, folder: Path, profiler: LLMStepProfiler, rank: int = 0, ranks: int = 1) -> None:
        self.profiler = profiler
        self.model = Tiny()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.args = SimpleNamespace(
            output_dir=str(folder),
            process_index=rank,
            world_size=ranks,
            device="cpu",
            gradient_checkpointing=False,
            torch_compile=False,
        )
        self.state = SimpleNamespace(global_step=0, epoch=0.0)
        self.control = SimpleNamespace(should_log=False, should_training_stop=False)
        self.ids = torch.ones(2, 4, dtype=torch.int64)

    def tell(self, event: str, **named: Any) -> None:
        getattr(self.profiler, event)(
            self.args, self.state, self.control, model=self.model, optimizer=self.optimizer, **named
        )

    def step(self, extra: Callable[[], None] = lambda: None) -> None:
        self.tell("on_step_begin")
        loss = self.model(input_ids=self.ids, labels=self.ids)["loss"]
        loss.backward()
        extra()
        self.tell("on_pre_optimizer_step")
        self.optimizer.step()
        self.tell("on_optimizer_step")
        self.optimizer.zero_grad()
        self.state.global_step += 1
        self.tell("on_step_end")


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * input_ids.float()).mean() ** 2}
