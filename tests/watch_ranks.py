"""Runs in every rank of tests/test_watch_run.py: runs with a planted fault, one after the other, in one start."""

import ctypes
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from windlass import plan as planning
from windlass import runfile
from windlass.errors import UserError
from windlass.ranks.rank import Rank, read_rank, run_rank
from windlass.train import run
from windlass.train.loop import Loop

vars(run)["write_probe"] = lambda *_: None  # as many passes as a run here has

HELD: list[Any] = []  # what a leak holds


def rank() -> int:
    return int(os.environ["RANK"])


def plant(loop: Loop, act: Callable[[Loop, int], None]) -> None:
    """Plant the fault, before every step."""
    original = loop.train_step

    def train_step(micro_batches: Any) -> Any:
        act(loop, loop.step + 1)
        return original(micro_batches)

    loop.train_step = train_step  # type: ignore[method-assign]


def sleeper(loop: Loop, step: int) -> None:
    """Slow in forward."""
    if step == 1:
        loop.model.causal_lm.register_forward_pre_hook(lambda *_: time.sleep(0.15))


def poison(loop: Loop, step: int) -> None:
    """One batch whose gradient is a thousand times too large."""
    if step == 26:
        time.sleep(1.5)  # the monitor's round, before the last step
    if step == 23:
        norm = loop.model.causal_lm.model.norm

        def blown(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
            handle.remove()
            output.register_hook(lambda gradient: gradient * 1000)  # type: ignore[no-untyped-call]
            return output

        handle = norm.register_forward_hook(blown)


def leak(_loop: Loop, step: int) -> None:
    HELD.append(bytearray(os.urandom(1 << 20)) * 24)
    time.sleep(0.01)


def rising(loop: Loop, step: int) -> None:
    """Grow surer of what is wrong: the loss rises a little in each step."""
    if step == 26:
        grown = [1.0]

        def grow(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
            grown[0] *= 1.15
            return output * grown[0]

        loop.model.causal_lm.model.norm.register_forward_hook(grow)


def blown_up(loop: Loop, step: int) -> None:
    if step == 6:
        norm = loop.model.causal_lm.model.norm

        def nan(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return output * float("nan")

        handle = norm.register_forward_hook(nan)


def hang(_loop: Loop, step: int) -> None:
    if step == 4:
        asleep_for_good()


def asleep_for_good() -> None:
    while True:
        time.sleep(1)


def grip(_loop: Loop, step: int) -> None:
    if step == 4:
        held_in_c()


def held_in_c() -> None:
    """Call a C function as if it were Python's own: no other thread of this process runs meanwhile."""
    ctypes.PyDLL(None).sleep(7)


SCRAPED: dict[str, str] = {}


def scrape(loop: Loop, step: int) -> None:
    if step == 22:
        time.sleep(1.5)  # the monitor's round
        address = f"http://127.0.0.1:{os.environ['SCRAPED_PORT']}/metrics"
        with urllib.request.urlopen(address, timeout=5) as page:
            SCRAPED["type"], SCRAPED["text"] = page.headers["Content-Type"], page.read().decode()


FAULTS: dict[str, tuple[int | None, Callable[[Loop, int], None]]] = {
    "sleeper": (1, sleeper),
    "poison": (1, poison),
    "leak": (1, leak),
    "rising": (None, rising),
    "nan": (1, blown_up),
    "hang": (1, hang),
    "grip": (1, grip),
    "scrape": (0, scrape),
}


def one(case: dict[str, Any], file: Path, here: Rank) -> dict[str, Any]:
    def loop_of(*arguments: Any, **others: Any) -> Loop:
        loop = original(*arguments, **others)
        for name in case["faults"]:
            at, act = FAULTS[name]
            if at in (None, rank()):
                plant(loop, act)
        return loop

    original, run.make_loop = run.make_loop, loop_of
    try:
        return {"code": run.train_rank(planning.make_plan(runfile.read_run_file(file, case["overrides"])), here)}
    except UserError as error:
        return {"error": str(error), "where": error.problems[0].where}
    finally:
        run.make_loop = original
        HELD.clear()


def main() -> None:
    file, cases, out = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    here = read_rank(os.environ)
    assert here is not None
    torch.set_num_threads(1)
    outcomes: dict[str, Any] = {}
    for name, case in cases.items():
        print(f"--- {name}", file=sys.stderr, flush=True)
        outcomes[name] = one(case, file, here)
        out.with_name(f"{out.name}-{here.rank}").write_text(json.dumps({**outcomes, "scraped": SCRAPED}))


if __name__ == "__main__":
    from windlass.errors import print_error

    def work() -> int:
        main()
        return 0

    here = read_rank(os.environ)
    assert here is not None
    os._exit(run_rank(here, work, print_error=print_error))
