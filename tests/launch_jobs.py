"""Plans to render, and stand-ins for the platforms' own programs."""

import importlib
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from windlass import plan as planning
from windlass.launch import submit
from windlass.launch.job import build_job
from windlass.plan import Plan
from windlass.plan.script import AnyPlan
from windlass.runfile import read_run_file
from windlass.runfile.accelerate import load_accelerate


def client_model(path: str) -> Any:
    """Return a class of a platform's own client. Imported only where used: these imports take seconds."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "mistral-small-4"


def render(plan: AnyPlan, to: str, *, overrides: Sequence[str] = (), accelerate: Path | None = None) -> dict[str, str]:
    """Render all files of one platform, or raise with everything that is wrong."""
    job = build_job(plan, overrides=overrides, accelerate=accelerate)
    submit.review(job, to)
    return submit.PLATFORMS[to].files(job)


def in_pods(*settings: str) -> tuple[str, ...]:
    """Set keys of pods in both sections that have them."""
    return tuple(f"cluster.{section}.{setting}" for setting in settings for section in ("kubernetes", "runai"))


# What a site says besides: every key that a launcher looks at.
SITE = (
    "cluster.image=registry.example/team/windlass@sha256:" + "0123456789abcdef" * 4,
    "cluster.volumes=[{claim: project-001, path: /data}]",
    "cluster.env={NCCL_SOCKET_IFNAME: net1, HF_TOKEN: {secret: hub, key: token}}",
    "cluster.cpu=16",
    "cluster.kubernetes.namespace=ml",
    "cluster.runai.project=research",
    "cluster.skypilot.mounts={/data: 's3://site/data'}",
    *in_pods("networks=[ssa]", "extended_resources={openshift.io/mellanoxnics: 1}"),
)
FULL = (
    *SITE,
    "cluster.memory_request=64Gi",
    "cluster.memory_limit=96Gi",
    "cluster.deadline_seconds=86400",
    "cluster.grace_seconds=300",
    "cluster.working_dir=/data/scripts",
    "cluster.kubernetes.queue=gpus",
    "cluster.kubernetes.service_account=trainer",
    "cluster.kubernetes.image_pull_secrets=[pull]",
    "cluster.kubernetes.node_selector={gpu: h200}",
    "cluster.kubernetes.affinity={nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: "
    "[{matchExpressions: [{key: gpu, operator: In, values: [h200, b200]}]}]}}}",
    *in_pods(
        "tolerations=[{key: nvidia.com/gpu}, {key: team, value: research, effect: NoSchedule}]",
        "topology_key=topology.kubernetes.io/zone",
        "user={uid: 2000, gid: 2000}",
    ),
)
# And every other option of a pod; labels and annotations that a person may write.
EVERY = (
    *FULL,
    "cluster.volumes=[{claim: project-001, path: /data}, {claim: base, path: /models, sub_path: a/b, read_only: true},"
    " {config_map: ca, path: /etc/ssl/site.crt, sub_path: ca.crt}, {secret: netrc, path: /secrets, read_only: true},"
    " {empty_dir: 200Gi, path: /scratch}, {empty_dir: 1Gi, medium: Memory, path: /ram}]",
    "cluster.cpu_limit=16",
    "cluster.memory_request=96Gi",
    "cluster.kubernetes.fs_group=0",
    "cluster.kubernetes.hugepages={2Mi: 4Gi}",
    "cluster.kubernetes.ephemeral_storage=100Gi",
    "cluster.kubernetes.runtime_class=nvidia",
    "cluster.kubernetes.queue_priority=urgent",
    "cluster.kubernetes.network_policy=all",
    "cluster.kubernetes.pod_monitor=true",
    *in_pods(
        "labels={cost-center: a1, no: 'true'}",
        "annotations={site/contact: 'ml@site, room 1'}",
        "supplemental_groups=[5000, 5001]",
        "priority_class=high",
        "topology=preferred",
        "image_pull_policy=IfNotPresent",
        "ttl_seconds=86400",
    ),
    "watch.prometheus_port=9400",
    "watch.prometheus_address=0.0.0.0",
)
GOLDEN = ROOT / "tests" / "golden" / "launch"
# Example, overrides of its own, Accelerate file.
RUNS: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "train": ("train.yaml", (), None),
    "train-with-fsdp": ("train.yaml", (), "fsdp.yaml"),
    "two-gpus": ("configs/mistral4small_2xH200.yaml", (), None),
    "third-form": ("mistral_fsdpv2.yaml", (), "config/fsdp_2xH200.yaml"),
}


@cache
def plan_of(path: Path, overrides: Sequence[str] = (), accelerate: Path | None = None) -> Plan:
    return planning.make_plan(read_run_file(path, overrides, load_accelerate(accelerate)))


def example(name: str, overrides: tuple[str, ...] = SITE) -> tuple[Plan, tuple[str, ...], Path | None]:
    """Return the plan of an example on the site, and its inputs."""
    path, own, accelerate = RUNS[name]
    file = EXAMPLES / accelerate if accelerate else None
    return plan_of(EXAMPLES / path, (*own, *overrides), file), (*own, *overrides), file


def compared(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing: UPDATE_GOLDEN=1 pytest tests/test_launch*.py"
    assert text == path.read_text(), f"{path} differs: if that is meant, UPDATE_GOLDEN=1 pytest tests/test_launch*.py"


def workload_of(manifest: str) -> str:
    """Return all objects but the ConfigMap: its files have their own golden files, and its name is their digest."""
    return re.sub(r"-[0-9a-f]{12}(?=}|$)", "-DIGEST", manifest.partition("\n---\n")[2], flags=re.MULTILINE)


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Return what did not survive a round trip through a client's model."""
    if isinstance(before, dict):
        after = after if isinstance(after, dict) else {}
        return [word for key, value in before.items() for word in lost(value, after.get(key), f"{path}.{key}")]
    if isinstance(before, list):
        after = after if isinstance(after, list) and len(after) == len(before) else [None] * len(before)
        return [word for i, (a, b) in enumerate(zip(before, after, strict=True)) for word in lost(a, b, f"{path}[{i}]")]
    return [] if before == after else [f"{path}: {before!r} -> {after!r}"]


def program(folder: Path, name: str, body: str) -> Path:
    """Write a program that runs `body` and records how it was called, word by word."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\nprintf '%s\\0' \"$@\" >>{folder}/{name}.calls\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def calls(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.calls"
    return path.read_text().split("\0")[:-1] if path.exists() else []


def environ(folder: Path, **more: str) -> dict[str, str]:
    """Return an environment with the stand-ins first, then this Python, then the system, and no variables that name
    a node."""
    gone = ("PET_", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_RANK", "JOB_COMPLETION_", "WINDLASS_", "NCCL_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(gone)}
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "WINDLASS_CHECK": "no", **more}


def wait_for(condition: Callable[[], Any], started: Sequence[Any] = (), seconds: float = 250) -> None:
    """Wait, and show the `log` of what was started if it does not happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "\n".join(["it did not happen", *(each.log for each in started)])
        time.sleep(0.02)
