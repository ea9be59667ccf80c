"""The run's machine: its row of the hardware table, with the measured rates of a machine file if there is one."""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from windlass import __version__, hardware
from windlass.errors import Problem, UserError, Where, raise_all, require_writable
from windlass.files import read_json, write_json
from windlass.hardware import Collective, Gpu, Machine, Rates
from windlass.runfile import Cluster

AGAIN = "measure again: `windlass calibrate --out FILE`"
FOLDER = Path("~/.cache/windlass/machines")


def find_machine(cluster: Cluster, where: Where) -> Machine:
    """Look up the run file's hardware in the hardware table; settings left out are taken from this machine."""
    nodes, ranks = cluster.size
    if nodes > 1 and cluster.network is None:
        hint = f"give cluster.network: one of {', '.join(hardware.FABRICS)}, or {{name, gb_per_second}}"
        text = f"{nodes} nodes, but no cluster.network between them"
        raise UserError(text, where("cluster.nodes"), hint, "no-network")
    gpu = hardware.find_gpu(_as_written(cluster.gpu) or hardware.read_gpu_name(), where("cluster.gpu"))
    host_memory_gib = cluster.host_memory_gib
    if gpu.name == "cpu":  # its ranks share the memory of their machine
        if not isinstance(cluster.gpu, BaseModel):
            host_memory_gib = host_memory_gib or hardware.read_this_machine().memory_gib
            gpu = replace(gpu, memory_gib=host_memory_gib / ranks)
        host_memory_gib = host_memory_gib or gpu.memory_gib * ranks
    measured, notes = _find_measured_rates(cluster, gpu, where)
    return Machine(
        gpu=gpu,
        measured=measured,
        notes=notes,
        link=hardware.find_fabric(_as_written(cluster.link) or gpu.link, where("cluster.link")),
        network=hardware.find_fabric(_as_written(cluster.network) or gpu.link, where("cluster.network")),
        host_link=hardware.find_fabric(gpu.host_link, where("cluster.gpu")),
        nics_per_node=cluster.nics_per_node,
        host_memory_gib=host_memory_gib,
    )


def _as_written(value: str | BaseModel | None) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value


def is_this_machine(cluster: Cluster) -> bool:
    """Return whether a run is started on this machine, as far as its file says: it names no other kind of GPU."""
    if cluster.platform != "local":
        return False
    here = hardware.read_gpu_name()
    try:
        return hardware.find_gpu(_as_written(cluster.gpu) or here) == hardware.find_gpu(here)
    except UserError:  # a kind that the table doesn't have
        return False


def _find_measured_rates(cluster: Cluster, gpu: Gpu, where: Where) -> tuple[Rates | None, tuple[str, ...]]:
    """Read the machine file that the run file names, or this host's own; None if there is neither. Also return notes:
    the host's own file is left out if another version wrote it."""
    nodes, ranks = cluster.size
    if cluster.machine:
        return read_machine(Path(cluster.machine), gpu, ranks, where("cluster.machine")), ()
    own_file = own_machine_file(gpu.name, ranks)
    if nodes > 1 or not own_file.is_file():  # several nodes might disagree
        return None, ()
    version = read_json(own_file).get("windlass", __version__)
    if version != __version__:
        renew = f"`windlass calibrate --ranks {ranks}` renews it"
        return None, (f"{own_file} was written by windlass {version} and is not used: {renew}",)
    return read_machine(own_file, gpu, ranks, str(own_file)), ()


def own_machine_file(kind: str, ranks: int) -> Path:
    """Return the path of this host's machine file, which exists if the host was calibrated."""
    return FOLDER.expanduser() / f"{platform.node()}-{ranks}-{kind}.json"


def write_machine(path: Path, kind: str, ranks: int, conditions: Mapping[str, Any], rates: Rates) -> dict[str, Any]:
    content = {"windlass": __version__, "kind": kind, "ranks": ranks, "conditions": dict(conditions)}
    content |= {"rates": json.loads(json.dumps(asdict(rates)))}
    content["digest"] = _digest(content)
    with require_writable(path, "give another --out FILE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    return content


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps({key: content[key] for key in content if key != "digest"}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def read_machine(path: Path, gpu: Gpu, ranks: int, where: str) -> Rates:
    """Read measured rates; raise one error with everything that is wrong. `where`: the setting that names the file."""
    file = str(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"can't be read as a machine file: {getattr(error, 'strerror', None) or error}"
        raise UserError(
            f"{file} {what}", where, "write one on such a machine: `windlass calibrate --out FILE`", "unreadable"
        ) from None
    raise_all([*_problems(content, file, gpu, ranks)])
    return build_rates(content["rates"])


def build_rates(values: Mapping[str, Any]) -> Rates:
    """Return rates that are read from JSON, in which tuples are lists."""
    points = {key: tuple(map(tuple, values[key])) for key in ("grouped", "attention", "attention_backward")}
    products = {dtype: tuple(map(tuple, rows)) for dtype, rows in values["products"].items()}
    collectives = tuple(Collective(**collective) for collective in values["collectives"])
    return Rates(**{**values, **points, "products": products, "collectives": collectives})


def _problems(content: Any, file: str, gpu: Gpu, ranks: int) -> Iterator[Problem]:
    """Yield a problem if this version did not write the file, or if it was measured on another machine."""
    if not isinstance(content, dict) or not {"windlass", "kind", "ranks", "rates", "digest"} <= content.keys():
        yield Problem("is not a machine file", file, "write one: `windlass calibrate --out FILE`", "not-machine-file")
    elif content["windlass"] != __version__:
        text = f"was written by windlass {content['windlass']}, this is {__version__}"
        yield Problem(text, f"{file}: windlass", AGAIN, "other-version")
    elif content["kind"] != gpu.name:
        hint = "set cluster.gpu to what was measured, or cluster.machine to a file of this kind"
        problem = f"was measured on {content['kind']}, the run is planned for {gpu.name}"
        yield Problem(problem, f"{file}: kind", hint, "measured-otherwise")
    elif gpu.name == "cpu" and content["ranks"] != ranks:
        hint = f"`windlass calibrate --ranks {ranks} --out FILE`"
        what = f"was measured with {content['ranks']} ranks on the processor, the run has {ranks}, which share it"
        yield Problem(what, f"{file}: ranks", hint, "measured-otherwise")
    elif content["digest"] != _digest(content):
        yield Problem(
            "was edited after it was measured: its digest is another one", f"{file}: digest", AGAIN, "edited-file"
        )
