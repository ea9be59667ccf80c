"""The rendered launch.sh on several machines at once: network namespaces, real ranks over gloo, a tiny model."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_hosts import Hosts, hosts, why_not
from launch_jobs import environ, plan_of, render, wait_for
from text_run import make_text_run

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"), pytest.mark.xdist_group("hosts")]


class Run:
    """One job on these machines: rendered, and started node by node."""

    def __init__(self, folder: Path, machines: Hosts, *overrides: str) -> None:
        self.machines, self.folder = machines, folder
        file = make_text_run(folder / "a demo")
        words = (
            *(
                f"cluster.nodes={machines.count}",
                "cluster.gpus_per_node=1",
                "cluster.network={name: bridge, gb_per_second: 0.2}",
            ),
            *("train.max_steps=4", "train.eval_steps=4", "train.save_steps=4", "train.ddp_timeout=60", *overrides),
        )
        self.out = folder / "a demo" / "run"
        self.out.mkdir()
        for name, text in render(plan_of(file, words), "script", overrides=words).items():
            (self.out / name).write_text(text)
        self.began = time.monotonic()

    def start(self, node: int, at: Path | None = None, **more: str) -> subprocess.Popen[str]:
        env = {
            "PET_NODE_RANK": str(node),
            "PET_NNODES": str(self.machines.count),
            "PET_MASTER_ADDR": self.machines.address(0),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            **more,
        }
        script, stand_ins = (at or self.out) / "launch.sh", environ(self.folder / "bin", **env)
        return self.machines.start(node, ["bash", str(script)], stand_ins, self.log_file(node))

    def log_file(self, node: int) -> Path:
        return self.folder / f"node-{node}.log"

    def log(self, node: int) -> str:
        return self.log_file(node).read_text()

    def until(self, node: int, text: str) -> None:
        wait_for(lambda: text in self.log(node), seconds=120)


@pytest.mark.fault("a node that never comes", "`windlass train`", "node 1 did not join within 2 s (node 0 did)")
@pytest.mark.fault("an interface that a node has not", "`windlass train`", "GLOO_SOCKET_IFNAME=net7 names no interface")
@pytest.mark.fault("another run file on a node", "`windlass train`", "node 1 (machine-1) has another run file")
@pytest.mark.long
def test_nodes_that_fail_to_rendezvous_name_each_other(tmp_path: Path) -> None:
    """Before any rank is started, which is fast: so every `make test` runs on several real machines."""
    with hosts(2) as machines:
        run = Run(tmp_path, machines)
        assert run.start(0, WINDLASS_WAIT_SECONDS="2").wait(200) == 1
        assert "node 1 did not join within 2 s (node 0 did)" in run.log(0)
        # A name that no interface has, or another run file, is the input's fault, on whichever node it is found.
        other = run.out.rename(tmp_path / "other")
        shutil.copytree(other, run.out)
        with (other / "run.yaml").open("a") as file:
            file.write("# another one\n")
        for more, at, what in (
            ({"GLOO_SOCKET_IFNAME": "net7"}, run.out, "node 1 (machine-1): GLOO_SOCKET_IFNAME=net7 names no interface"),
            ({}, other, "node 1 (machine-1) has another run file"),
        ):
            started = [run.start(0), run.start(1, at, **more)]
            assert [process.wait(200) for process in started] == [13, 13]
            assert what in run.log(0)
            assert what in run.log(1)


@pytest.mark.prove
def test_the_run_is_trained_across_machines(tmp_path: Path) -> None:
    count = 3
    with hosts(count) as machines:
        run = Run(tmp_path, machines)
        started = [run.start(node, WINDLASS_CHECK="yes") for node in range(count)]
        codes = [process.wait(280) for process in started]
        assert codes == [0] * count, "\n".join(run.log(node) for node in range(count))
        assert f"full-shard on {count} ranks" in run.log(0)
        assert f"all {count} nodes have joined" in run.log(count - 1)
        again = run.start(count - 1)  # as a platform starts one whose machine was lost at the end
        assert again.wait(60) == 0, run.log(count - 1)
        assert "nothing is left to train" in run.log(count - 1)
    assert (run.out / "final" / "adapter_model.safetensors").exists()
    assert json.loads((run.out / "manifest.json").read_text())["state"] == "finished"
    verdicts = json.loads((run.out / "check.json").read_text())
    assert "fail" not in json.dumps(verdicts).split('"'), "all checks were made, and none failed"


LONG = ("train.max_steps=5000", "train.eval_strategy=no", "train.save_steps=100000", "train.ddp_timeout=600")


@pytest.mark.prove
@pytest.mark.parametrize(
    ("count", "event", "seconds", "text"),
    [
        (3, Hosts.kill, 60, "node {0} (machine-{0}) is gone: its connection closed"),
        # Nothing tells the others: gloo would wait for train.ddp_timeout, here ten minutes.
        (2, Hosts.unplug, 180, "node {0} (machine-{0}) has not been heard from for 60 s"),
    ],
    ids=["power", "cable"],
)
def test_lost_machine_is_named_and_the_others_end_soon(
    tmp_path: Path, count: int, event: Callable[[Hosts, int], None], seconds: float, text: str
) -> None:
    with hosts(count) as machines:
        run = Run(tmp_path, machines, *LONG)
        started = [run.start(node) for node in range(count)]
        run.until(0, "step     1/5000")
        event(machines, count - 1)
        began = time.monotonic()
        assert [process.wait(200) for process in started[:2]] == [1, 1]
        assert time.monotonic() - began < seconds
        assert text.format(count - 1) in run.log(0)
        assert (text.format(0) if event is Hosts.unplug else f"node 0 says: {text.format(2)}") in run.log(1)


@pytest.mark.prove
def test_a_stop_signal_saves_on_all_nodes_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    """As with scancel, the signal goes to ranks, supervisors and everything next to them."""
    with hosts(2) as machines:
        run = Run(tmp_path, machines, *LONG, "train.max_steps=300")
        started = [run.start(node) for node in range(2)]
        run.until(0, "step     1/300")
        for pid in (*machines.pids(1), *machines.pids(0)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 15)
        assert [process.wait(120) for process in started] == [75, 75], run.log(0) + run.log(1)
        assert list((run.out / "checkpoints").iterdir())
        again = [run.start(node) for node in range(2)]
        run.until(0, "/300")
        assert "step     1/300" not in run.log(0)
        for process in again:
            process.terminate()
