"""Runs in every rank of tests/test_long_rows.py: attention against torch's own, and whole runs, outcomes as JSON."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass import plan as planning
from windlass import runfile
from windlass.errors import UserError
from windlass.observe.background import BackgroundReport
from windlass.ranks.rank import read_rank
from windlass.train import connect, run
from windlass.train.long_rows import Cut
from windlass.train.loop import Loop
from windlass.train.recompute import LayerInputs

vars(run)["write_probe"] = lambda *_: None  # as many passes as a run here has


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


CUT_FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "label lost": lose_a_label,
    "positions restart": restart_positions,
    "documents mixed": join_documents,
}


INPUT_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {  # of layers, in place of what was sent to host memory
    "another token's input": lambda tensor: tensor.roll(1, 1),
    "input rounded": lambda tensor: tensor.bfloat16().to(tensor.dtype),
}


def plant(fault: str, loop: Loop) -> None:
    if fault in CUT_FAULTS:
        original = Cut.__call__

        def faulty(*given: Any) -> Any:
            part = original(*given)
            CUT_FAULTS[fault](part.inputs)
            return part

        Cut.__call__ = faulty  # type: ignore[method-assign, assignment]
    elif fault in INPUT_FAULTS:
        bring_back = LayerInputs.bring_back
        LayerInputs.bring_back = lambda self, copy: INPUT_FAULTS[fault](bring_back(self, copy))  # type: ignore
    elif fault == "gradient twice":
        update = loop.updater.scale_and_clip
        loop.updater.scale_and_clip = lambda supervised: update(supervised / 2)  # type: ignore[method-assign]
    elif fault.startswith("terminate"):
        step = int(fault.split()[1])
        train_step = loop.train_step

        def stopped(batches: Iterator[Any]) -> Any:
            if loop.step + 1 == step and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return train_step(batches)

        loop.train_step = stopped  # type: ignore[method-assign, assignment]
    else:
        assert fault == "double"
        compute_in_double(loop)


def compute_in_double(loop: Loop) -> None:
    """Compute in float64 throughout, norms and the loss's softmax too, to see whether differences are rounding."""
    loop.model.causal_lm.double()
    softmax = torch.log_softmax

    def widen(tensor: Tensor) -> Tensor:
        return tensor.to(torch.float64 if tensor.is_floating_point() else torch.float32)

    torch.log_softmax = lambda logits, dim, **_: softmax(logits, dim, dtype=torch.float64)
    torch.Tensor.float = widen  # type: ignore[method-assign, assignment]


def keep_first_gradients(loop: Loop, kept: dict[str, Tensor]) -> None:
    """Keep the summed gradients of the first step, by name."""
    reduce = loop.updater.replicas.reduce

    def reduced(sums: Tensor) -> Tensor:
        replicas = loop.updater.replicas
        if not kept and not replicas.split:
            for name, parameter in zip(replicas.names, replicas.parameters, strict=True):
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradient = gradient.double().clone()
                if dist.get_world_size() > 1:
                    dist.all_reduce(gradient)
                kept[name] = gradient
        return reduce(sums)

    loop.updater.replicas.reduce = reduced  # type: ignore[method-assign]


def train(case: dict[str, Any], file: Path, gradients: Path) -> dict[str, Any]:
    here = read_rank(os.environ)
    assert here is not None
    kept: dict[str, Tensor] = {}
    make_loop, cut, bring_back = run.make_loop, Cut.__call__, LayerInputs.bring_back
    softmax, to_float = torch.log_softmax, torch.Tensor.float

    def loop_of(*arguments: Any, **others: Any) -> Loop:
        loop = make_loop(*arguments, **others)
        for fault in case["faults"]:
            plant(fault, loop)
        keep_first_gradients(loop, kept)
        return loop

    run.make_loop = loop_of
    seen: dict[str, Any] = {}
    try:
        plan = planning.make_plan(runfile.read_run_file(file, case["overrides"]))
        seen["code"] = run.train_rank(plan, here, resume=case["resume"])
    except UserError as error:
        seen["error"] = str(error)
    finally:
        run.make_loop = make_loop
        Cut.__call__ = cut  # type: ignore[method-assign]
        LayerInputs.bring_back = bring_back  # type: ignore[method-assign]
        torch.log_softmax, torch.Tensor.float = softmax, to_float  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if here.rank == 0:
        torch.save(kept, gradients)
    return seen


def main() -> None:
    root, cases, out = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    here = read_rank(os.environ)
    assert here is not None
    torch.set_num_threads(1)
    connect.create_process_group(here, 60)
    for name in ("start", "finish"):
        setattr(BackgroundReport, name, lambda _: None)
    outcomes = {}
    for name, case in cases.items():
        print(f"--- {name}", file=sys.stderr, flush=True)
        outcomes[name] = train(case, root / case["file"], out / f"{name}.pt")
    (out / f"rank{here.rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
