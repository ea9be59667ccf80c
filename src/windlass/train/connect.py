"""Connect the ranks, and refuse those that would run different things."""

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from windlass.errors import RunError, UserError
from windlass.hardware import read_gpus
from windlass.plan import Plan
from windlass.ranks import collectives
from windlass.ranks.rank import Rank
from windlass.ranks.supervisor import remove_accelerate_settings, set_allocator
from windlass.run_folder import LIBRARIES, read_versions
from windlass.weights.same_base import read_forward_config

GPUS_PER_NODE = "cluster.gpus_per_node"


def require_device(plan: Plan) -> None:
    """Refuse to train on the CPU what was planned for GPUs: it would take weeks without a message."""
    if plan.machine.gpu.name != "cpu" and not torch.cuda.is_available():
        gpus = read_gpus(health=False)
        raise UserError(
            f"the run is planned for {plan.machine.gpu.name}, and torch {torch.__version__} finds no usable GPU "
            f"(driver {gpus.driver or gpus.error})",
            plan.where("cluster.gpu"),
            "see `windlass check RUN --here`; to train on the CPU set cluster.gpu: cpu",
            "no-usable-gpu",
        )


def create_process_group(
    here: Rank, timeout_seconds: float, recorders: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Create the process group: NCCL between GPUs, gloo between CPUs and for Python objects."""
    remove_accelerate_settings(os.environ)
    os.environ |= {"RANK": str(here.rank), "LOCAL_RANK": str(here.local_rank), "WORLD_SIZE": str(here.world)}
    os.environ |= recorders
    set_allocator(os.environ)
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        index = choose_gpu(here.local_rank, torch.cuda.device_count())
        torch.cuda.set_device(index)
        os.environ["LOCAL_RANK"] = str(index)  # transformers uses this GPU index when it shards
    here.phase("waiting for the other ranks")
    if not dist.is_initialized():
        if here.world > 1 and not os.environ.get("MASTER_ADDR"):
            problem = f"{here.world} ranks, and MASTER_ADDR is not set: they can't find each other"
            raise UserError(
                problem, "the environment", "set it to rank 0's host, on all ranks; torchrun does", "no-master-address"
            )
        os.environ.setdefault("MASTER_PORT", "29500")
        backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
        connected: Future[None] = Future()

        def connect() -> None:
            try:
                timeout = timedelta(seconds=timeout_seconds)
                connected.set_result(dist.init_process_group(backend, timeout=timeout))
            except BaseException as error:
                connected.set_exception(error)

        # Connecting waits in C++: a thread lets Python handle signals meanwhile.
        threading.Thread(target=connect, name="windlass connect", daemon=True).start()
        try:
            connected.result()
        except dist.DistError as error:
            raise explain_no_connection(here, error) from None
    if has_gpu:
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        require_own_gpus(collectives.all_gather(str(getattr(device, "uuid", ""))))


def explain_no_connection(here: Rank, error: Exception) -> RunError:
    """Return why this rank could not join the others."""
    place = f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ['MASTER_PORT']}"
    if "EADDRINUSE" in str(error):
        hint = "set MASTER_PORT to a free port, the same on all ranks (on nodes: PET_MASTER_PORT)"
        return RunError(f"another program has port {os.environ['MASTER_PORT']}", "MASTER_PORT", hint, "port-taken")
    why = str(error).partition("\n")[0]
    what = f"rank {here.rank} could not join the others at {place}: {why}"
    hint = f"start all {here.world} ranks, with one MASTER_ADDR and MASTER_PORT, which every node must be able to reach"
    return RunError(what, "MASTER_ADDR", hint, "no-connection")


def choose_gpu(local_rank: int, visible: int) -> int:
    """Return this rank's GPU: schedulers show a rank either its own GPU, as number 0, or all of the node's."""
    if local_rank >= visible > 1:
        raise UserError(
            f"rank {local_rank} of this node has no GPU of its own: it sees {visible}",
            GPUS_PER_NODE,
            "start as many ranks on a node as it has GPUs",
            "too-few-gpus",
        )
    return local_rank % visible


def require_own_gpus(gpus: list[str]) -> None:
    """Refuse ranks that share a GPU: each would plan with all of its memory, and NCCL refuses them."""
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        is_known = bool(gpu.strip("0-"))  # some drivers report only zeros
        if is_known and first != rank:
            raise UserError(
                f"rank {first} and rank {rank} see the same GPU, {gpu}",
                GPUS_PER_NODE,
                "start as many ranks on a node as it has GPUs, and let each see its own or all of them",
                "same-gpu",
            )


def require_same_plan(
    plan: Plan, identity: str, given: Mapping[str, Any] | None = None, chosen: Mapping[str, Any] | None = None
) -> None:
    """Refuse ranks whose plans, run files, adapters or weights differ.

    Layout and batch follow from the run file and from the node, so different nodes may get different ones. They decide
    which collectives a rank takes part in: ranks that differ would wait for ever. With other differences, ranks would
    train together on something that nobody requested. `given`, `chosen`: what else the run file says, the plan chose.
    """
    run = plan.run.model_dump(mode="json")
    choices = {
        **{f"layout.{name}": value for name, value in asdict(replace(plan.layout, reason="")).items()},
        "train.per_device_train_batch_size": plan.batch.micro,
        "train.gradient_accumulation_steps": plan.batch.accumulation,
        **(chosen or {}),
    }
    sections = ("model", "lora", "data", "train", "dpo", "orpo", "watch")
    keys = {f"{name}.{key}": value for name in sections for key, value in run[name].items()}
    versions = read_versions(LIBRARIES)
    libraries = {f"{name}'s version": version for name, version in versions.items() if name != "python"}
    config = {f"config.json's {key}": value for key, value in read_forward_config(plan.base).items()}
    facts = {**keys, **(given or {}), **choices, "the base model's fingerprint": identity, **config, **libraries}
    differing = find_differences(collectives.all_gather(facts))
    if not differing:
        return
    hint = "start all ranks with the same run file, and give all nodes the same copy of the base model"
    if differing.keys() <= libraries.keys():
        hint = "use one image, or one environment, on all nodes"
    elif differing.keys() <= choices.keys():
        *names, last = ["the layout", "the batch", *(chosen or {})]
        unset = f"{', '.join(names)} and {last}"
        hint = f"the nodes differ: set {unset} in the run file, so that the plan has nothing to choose"
    differences = "; ".join(f"{name} is {values}" for name, values in differing.items())
    raise UserError(f"the ranks plan different runs: {differences}", plan.where("cluster.gpu"), hint, "plans-differ")


def find_differences(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what differs between ranks, and who has what: `32 on rank 1, 8 on the others`."""
    differing = {}
    for name in dict.fromkeys(name for facts in by_rank for name in facts):
        ranks_of: dict[str, list[str]] = {}
        for rank, facts in enumerate(by_rank):
            ranks_of.setdefault(str(facts.get(name)), []).append(str(rank))
        if len(ranks_of) == 1:
            continue
        usual = max(ranks_of, key=lambda value: len(ranks_of[value]))
        parts = [f"{value} on {_name_ranks(ranks)}" for value, ranks in ranks_of.items() if value != usual]
        most = ranks_of[usual]
        parts.append(f"{usual} on {_name_ranks(most) if len(most) == 1 else 'the others'}")
        differing[name] = ", ".join(parts)
    return differing


def _name_ranks(ranks: list[str]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {collectives.list_first(ranks, ', ')}"
