"""Compare the plan's order of layouts with the measured one: two ranks in two network namespaces, over a throttled
link.

    python benchmarks/layouts.py              the table; exits with 1 where the orders differ
    python benchmarks/layouts.py --json       one JSON object
    python benchmarks/layouts.py --quick      fewer steps and sequences

Needs root and iproute2. The rule, fixed before anything is measured: of any two layouts whose predicted times differ by
TIE or more, the one predicted to be faster is measured to be faster; and `auto`'s choice is measured to be no slower
than any other by TIE. The processor has one factor, as after `windlass calibrate`: the measured time of a layout that
needs next to no network (CALIBRATED) relative to its planned one. The link's rate is its throttle: full-shard then
spends about fifty times as long on the network as on compute, like the published recipe on three nodes. Everything else
is the plan's.

All layouts train the same rows through the code of `windlass train`. Rounds are interleaved, and each layout's fastest
step counts: other work on the machine only ever adds to a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from launch_hosts import Hosts, hosts, why_not

from windlass import hardware, run_folder, runfile, tiny
from windlass import plan as planning
from windlass.files import read_json_lines
from windlass.plan import Plan
from windlass.plan.layout import Layout
from windlass.plan.machine import write_machine

TIE = 0.15
MEGABITS, TCP = 16, 0.95  # of the link, and the share of it that TCP's payload gets
LINK = MEGABITS / 8e3 * TCP  # GB/s
# What does not fit the kernel's buffers gloo sends before it receives, at half the rate of smaller messages; no fabric
# of a cluster is like that. So: room for messages, a queue that drops nothing, and a model whose gathers stay small.
TCP_WORDS = ("tcp_rmem=4096 33554432 67108864", "tcp_wmem=4096 33554432 67108864", "tcp_slow_start_after_idle=0")
PORT = 29517
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
QUICK = "--quick" in sys.argv
STEPS, ROUNDS = 2 if QUICK else 3, 2  # optimizer steps of a run, of which the first only warms up
SEQUENCES, LENGTH = 2 if QUICK else 4, 256  # of each rank and optimizer step
CALIBRATED = "resident"
BASE = (
    "layout.base_dtype=bf16",
    "train.per_device_train_batch_size=1",
    f"train.gradient_accumulation_steps={SEQUENCES}",
)
FP8 = "layout.base_dtype=fp8"
WHOLE = (f"train.per_device_train_batch_size={SEQUENCES}", "train.gradient_accumulation_steps=1")
WAYS: dict[str, tuple[str, ...]] = {
    "full-shard": ("layout.name=full-shard",),
    "full-shard, FP8": ("layout.name=full-shard", FP8),
    "full-shard, one pass": ("layout.name=full-shard", *WHOLE),
    "full-shard, FP8, one pass": ("layout.name=full-shard", FP8, *WHOLE),
    "no-reshard": ("layout.name=no-reshard",),
    "no-reshard, FP8": ("layout.name=no-reshard", FP8),
    "expert-parallel": ("layout.name=expert-parallel",),
    "expert-parallel, gathered once": ("layout.name=expert-parallel", "layout.reshard_after_forward=false"),
    "expert-parallel, one pass": ("layout.name=expert-parallel", *WHOLE),
    "resident": ("layout.name=resident",),
    "resident, FP8": ("layout.name=resident", FP8),
}
RUN = """\
model: {{model_name_or_path: {model}, torch_dtype: float32}}
lora: {{r: 8, lora_alpha: 16, lora_dropout: 0.0, target_modules: [q_proj, o_proj, gate_proj, up_proj, down_proj]}}
data:
  {{dataset_name_or_path: {data}, dataset_config_name: null, val_split: null, max_length: {length}, packing: true}}
train:
  output_dir: {out}
  max_steps: {steps}
  learning_rate: 0.001
  bf16: false
  eval_strategy: "no"
  save_strategy: "no"
  ddp_timeout: 300
cluster:
  nodes: 2
  gpus_per_node: 1
  gpu: cpu
  machine: {machine}
  network: {{name: throttled, gb_per_second: {link}}}
"""


@dataclass(frozen=True)
class Outcome:
    way: str
    predicted: float
    measured: float
    predicted_mb: float  # sent by a rank in a step
    sent_mb: float  # the same by the kernel's count: loading's and the start's words are in it


def make(folder: Path) -> None:
    """Write a model that consists mostly of experts, in FP8 as published, and rows that are all full."""
    sizes = {"hidden": 128, "layers": 3, "heads": 4, "experts": 16, "top_k": 2, "moe_intermediate": 64, "vocab": 1024}
    tiny.write_model(folder / "model", "mistral4", config={"initializer_range": 0.1}, **sizes)  # type: ignore[arg-type]
    words = ("anchor", "heavy", "crew", "small", "turn", "windlass", "slowly", "chain", "deck", "rope", "tide")
    rows = (" ".join(words[(i * j) % len(words)] for j in range(1, 1600)) for i in range(1, 65))
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def plan_of(folder: Path, way: Sequence[str], factor: float, out: str = "run", name: str = "run") -> Plan:
    """Plan for a processor that takes `factor` times as long as the hardware table's."""
    link, memory = hardware.FABRICS["loopback"], hardware.FABRICS["memory"]
    table = hardware.derive_rates(hardware.GPUS["cpu"], link, hardware.Fabric("throttled", LINK), memory, 1)
    machine = folder / f"{name}-machine.json"
    write_machine(machine, "cpu", 1, {}, hardware.slow_down(table, factor))
    file = folder / f"{name}.yaml"
    text = RUN.format(
        model=json.dumps(str(folder / "model")),
        data=json.dumps(str(folder / "train.jsonl")),
        out=json.dumps(str(folder / out)),
        length=LENGTH,
        steps=STEPS,
        machine=json.dumps(str(machine)),
        link=LINK,
    )
    file.write_text(text)
    return planning.make_plan(runfile.read_run_file(file, [*BASE, *way]))


def rank(folder: Path) -> None:
    """Run every layout, round by round, in one of the two processes, as `windlass train` does."""
    import torch

    from windlass.ranks.rank import Rank, read_rank
    from windlass.train import run

    class CountingRank(Rank):
        """Notes the kernel's count at each phase: what follows the last step is no part of a step."""

        def phase(self, name: str) -> None:
            counted[name] = int(SENT.read_text())

    started = read_rank(os.environ)
    assert started is not None
    here = CountingRank(started.rank, started.local_rank, started.world)
    counted: dict[str, int] = {}
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    sent: dict[str, float] = {}
    for turn, (way, keys) in itertools.product(range(ROUNDS), WAYS.items()):
        plan = plan_of(folder, keys, 1.0, f"{turn} {way}", f"run-{here.rank}")  # each rank writes its own file
        before = int(SENT.read_text())
        if run.train_rank(plan, here):
            raise SystemExit(f"{way} did not finish")
        sent[way] = (counted["saving the adapter"] - before) / STEPS
        out = plan.folder
        took = [line["step_seconds"] for line in read_json_lines(out / run_folder.STEPS.format(rank=here.rank))]
        taken[way] += took[1:]
    torch.distributed.destroy_process_group()
    (folder / f"taken-{here.rank}.json").write_text(json.dumps({"seconds": taken, "sent": sent}))


def measure(folder: Path, machines: Hosts) -> dict[str, Any]:
    """Return both ranks' results; a step takes as long as on its slower rank."""
    throttle(machines)
    started = [
        machines.start(node, command(folder), environ(node, machines), folder / f"log-{node}") for node in (0, 1)
    ]
    for node, process in enumerate(started):
        if process.wait(timeout=1500):
            raise SystemExit((folder / f"log-{node}").read_text()[-3000:])
    found = [json.loads((folder / f"taken-{node}.json").read_text()) for node in (0, 1)]
    seconds = {way: min(map(max, *(one["seconds"][way] for one in found))) for way in WAYS}
    return {"seconds": seconds, "sent": found[0]["sent"]}


def command(folder: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), *["--quick"] * QUICK, "--rank", str(folder)]


def environ(node: int, machines: Hosts) -> dict[str, str]:
    output = {"RANK": node, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": machines.address(0), "MASTER_PORT": PORT}
    settings = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **{key: str(value) for key, value in output.items()}, **settings}


def throttle(machines: Hosts) -> None:
    """Add a token bucket to what each machine sends."""
    for node in range(machines.count):
        bucket = ["root", "tbf", "rate", f"{MEGABITS}mbit", "burst", "256kb", "limit", "64mb"]
        name = f"{machines.prefix}{node}"
        within = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *bucket]
        subprocess.run(within, check=True, timeout=20)
        words = (f"net.ipv4.{key}" for key in TCP_WORDS)
        subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", *words], check=True, timeout=20)


def wrong_pairs(rows: Sequence[Outcome]) -> tuple[int, list[tuple[Outcome, Outcome]]]:
    """Return how many pairs the prediction separates, and those measured in the other order."""
    output = [
        (one, other) for one, other in itertools.permutations(rows, 2) if one.predicted * (1 + TIE) <= other.predicted
    ]
    return len(output), [(one, other) for one, other in output if one.measured >= other.measured]


def proof() -> dict[str, Any]:
    """Return everything that the table is made of."""
    with tempfile.TemporaryDirectory(prefix="layouts-") as name:
        folder = Path(name)
        make(folder)
        with hosts(2) as machines:
            found = measure(folder, machines)
        factor = found["seconds"][CALIBRATED] / plan_of(folder, WAYS[CALIBRATED], 1.0).cost.step_seconds
        costs = {way: plan_of(folder, keys, factor).cost for way, keys in WAYS.items()}
        rows = [
            Outcome(way, c.step_seconds, found["seconds"][way], c.wire_gb_per_step * 1e3, found["sent"][way] / 1e6)
            for way, c in costs.items()
        ]
        auto = plan_of(folder, ("layout.name=auto", "train.per_device_train_batch_size=auto"), factor)
        free = plan_of(folder, ("layout.name=auto", "layout.base_dtype=null"), factor)
        shutil.rmtree(folder / "model")
    pairs, wrong = wrong_pairs(rows)
    rows.sort(key=lambda row: row.predicted)
    return {
        "factor": factor,
        "rows": [vars(row) for row in rows],
        "pairs": pairs,
        "wrong": [f"{one.way} before {other.way}" for one, other in wrong],
        "auto": way_of(free.layout),
        "auto_batch": f"{auto.layout.name} {auto.batch.micro} x {auto.batch.accumulation}",
        "load": os.getloadavg()[0],
    }


def way_of(layout: Layout) -> str:
    """Return the layout's name in the table."""
    once = layout.name in ("hybrid", "expert-parallel") and not layout.reshard_after_forward
    return layout.name + ", gathered once" * once + ", FP8" * (layout.base_dtype == "fp8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer steps and sequences")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank(options.rank)
    if why_not() or not shutil.which("tc"):
        raise SystemExit(why_not() or "tc is not installed (iproute2)")
    answer = proof()
    if options.json:
        print(json.dumps(answer))
    else:
        show(answer)
    sys.exit(bool(answer["wrong"]))


def show(answer: Mapping[str, Any]) -> None:
    print(
        f"{time.strftime('%Y-%m-%d')}, two ranks over gloo, {MEGABITS} Mbit/s between them; load {answer['load']:.1f};"
        f" calibrated: {answer['factor']:.2f} times as long as by the hardware table"
    )
    print(f"{'way':30} {'predicted s':>12} {'measured s':>11} {'ratio':>6} {'predicted MB':>13} {'sent MB':>8}")
    for row in answer["rows"]:
        times = f"{row['predicted']:12.2f} {row['measured']:11.2f} {row['predicted'] / row['measured']:6.2f}"
        print(f"{row['way']:30} {times} {row['predicted_mb']:13.1f} {row['sent_mb']:8.1f}")
    print(f"auto takes {answer['auto']}; with the micro-batch left open, {answer['auto_batch']}")
    right = answer["pairs"] - len(answer["wrong"])
    print(f"{right} of {answer['pairs']} pairs that differ by {TIE:.0%} or more are in the predicted order")
    for pair in answer["wrong"]:
        print(f"predicted {pair}, measured the other way round")


if __name__ == "__main__":
    main()
