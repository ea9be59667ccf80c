"""Runs in every rank of tests/test_long_rows.py: train_ranks.py with more faults, and the first step's gradients."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train_ranks
from torch import Tensor
from train_ranks import At, terminate

from windlass.errors import RunError
from windlass.train.long_rows import Cut
from windlass.train.loop import Loop
from windlass.train.recompute import LayerInputs


def lose_a_label(inputs: dict[str, Any]) -> None:
    """Drop the target of each piece's last token, which is on another rank or in another piece."""
    size = inputs["input_ids"].shape[1] // 2
    kept = (inputs["supervised"] + 1) % size != 0
    inputs |= {name: inputs[name][kept] for name in ("supervised", "targets")}


def restart_positions(inputs: dict[str, Any]) -> None:
    positions = inputs["position_ids"]
    inputs["position_ids"] = torch.arange(positions.shape[1]).expand_as(positions)


def join_documents(inputs: dict[str, Any]) -> None:
    row = inputs["row"]
    joined = tuple((of_row[0]._replace(stop=of_row[-1].stop, window=None),) for of_row in row.documents)
    inputs["row"] = row._replace(documents=joined)


class Plant:
    """Changes the loop, or what it calls, on every rank."""

    def __init__(self, change: Callable[[Loop], None]) -> None:
        self.plant = change


def change_parts(change: Callable[[dict[str, Any]], None]) -> Plant:
    def plant(_loop: Loop) -> None:
        original = Cut.__call__

        def faulty(*given: Any) -> Any:
            part = original(*given)
            change(part.inputs)
            return part

        Cut.__call__ = faulty  # type: ignore[method-assign, assignment]

    return Plant(plant)


def bring_another_tokens_input(_loop: Loop) -> None:
    """Of layers, in place of what was sent to host memory."""
    bring_back = LayerInputs.bring_back
    LayerInputs.bring_back = lambda self, copy: bring_back(self, copy).roll(1, 1)  # type: ignore


def double_gradients(loop: Loop) -> None:
    update = loop.updater.scale_and_clip
    loop.updater.scale_and_clip = lambda supervised: update(supervised / 2)  # type: ignore[method-assign]


def compute_in_double(loop: Loop) -> None:
    """Compute in float64 throughout, norms and the loss's softmax too, to see whether differences are rounding."""
    loop.model.causal_lm.double()
    softmax = torch.log_softmax

    def widen(tensor: Tensor) -> Tensor:
        return tensor.to(torch.float64 if tensor.is_floating_point() else torch.float32)

    torch.log_softmax = lambda logits, dim, **_: softmax(logits, dim, dtype=torch.float64)
    torch.Tensor.float = widen  # type: ignore[method-assign, assignment]


KEPT: dict[str, Tensor] = {}


def keep_first_gradients(loop: Loop) -> None:
    """Keep the summed gradients of the first step, by name."""
    reduce = loop.updater.replicas.reduce

    def reduced(sums: Tensor) -> Tensor:
        replicas = loop.updater.replicas
        if not KEPT and not replicas.split:
            for name, parameter in zip(replicas.names, replicas.parameters, strict=True):
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradient = gradient.double().clone()
                if dist.get_world_size() > 1:
                    dist.all_reduce(gradient)
                KEPT[name] = gradient
        return reduce(sums)

    loop.updater.replicas.reduce = reduced  # type: ignore[method-assign]


train_ranks.FAULTS |= {
    "label lost": change_parts(lose_a_label),
    "positions restart": change_parts(restart_positions),
    "documents mixed": change_parts(join_documents),
    "another token's input": Plant(bring_another_tokens_input),
    "gradient twice": Plant(double_gradients),
    "double": Plant(compute_in_double),
    "terminate 4": At(4, 1, terminate),
    "keep gradients": Plant(keep_first_gradients),
}
plainly = train_ranks.ours


def ours(case: dict[str, Any], file: Path, here: Any) -> dict[str, Any]:
    """Run a case, undo its faults, and save the gradients beside the run."""
    KEPT.clear()
    cut, bring_back = Cut.__call__, LayerInputs.bring_back
    softmax, to_float = torch.log_softmax, torch.Tensor.float
    try:
        outcome: dict[str, Any] = plainly({**case, "faults": [*case["faults"], "keep gradients"]}, file, here)
    finally:
        Cut.__call__ = cut  # type: ignore[method-assign]
        LayerInputs.bring_back = bring_back  # type: ignore[method-assign]
        torch.log_softmax, torch.Tensor.float = softmax, to_float  # type: ignore[method-assign]
    if here.rank == 0:
        (folder,) = (text.partition("=")[2] for text in case["overrides"] if text.startswith("train.output_dir="))
        torch.save(KEPT, Path(folder) / "gradients.pt")
    return outcome


train_ranks.ours = ours

if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        train_ranks.main()
    except RunError as error:
        sys.exit(str(error))
