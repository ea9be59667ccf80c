"""`windlass calibrate`: measure this machine as training uses it, with real ranks, and write its machine file."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from windlass import hardware
from windlass.errors import RunError, UserError
from windlass.hardware import KINDS, NARROW, Collective, Points, Rates
from windlass.plan.machine import own_machine_file, write_machine
from windlass.ranks import supervisor as ranks
from windlass.ranks.rank import translate_srun

# Measured / planned step time of calibrated plans (benchmarks/cpu_plan.py: 0.84 to 1.32, and short runs warm up in the
# middle of it), wider where the machine itself varies.
LOW, HIGH = 0.8, 1.4
STORAGE_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
LIMIT_SECONDS = 300.0  # limit of the whole calibration: a collective may hang


def calibrate(
    count: int | None, out: Path | None, environ: MutableMapping[str, str], say: Callable[[str], None]
) -> tuple[Path, dict[str, Any]] | None:
    """Measure with real ranks and write the file; return its path and content. Under torchrun this is one of the
    ranks, and returns None on those that don't write."""
    gpus = hardware.read_this_machine().gpus
    kind = _gpu_kind(gpus[0].name) if gpus else "cpu"
    environ.update(translate_srun(environ))
    under_torchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environ.keys()
    count = int(environ["LOCAL_WORLD_SIZE"]) if under_torchrun else count or len(gpus) or 1
    most, what = (len(gpus), "GPUs") if gpus else (os.cpu_count() or 1, "processors")
    if count > most:
        raise UserError(f"{count} ranks, but this machine has {most} {what}", "--ranks", f"give at most {most}")
    path, began = out or own_machine_file(kind, count), time.monotonic()
    storage = path.absolute().parent
    if under_torchrun:
        measured = measure_on_rank(storage)
    else:
        say(f"measuring {kind} with {count} rank{'s' * (count > 1)}, about {15 if kind == 'cpu' else 60} s")
        measured = _start(count, storage, environ)
    if measured is None:
        return None
    conditions = {**measured["conditions"], "seconds": round(time.monotonic() - began, 1)}
    return path, write_machine(path, kind, count, conditions, _combine_rates(measured, kind, count))


def _start(count: int, storage: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Start one process per rank; return what rank 0 writes."""
    with tempfile.TemporaryDirectory(prefix="windlass-calibrate-") as folder, ranks.reserve_port() as port:
        result = Path(folder) / "rates.json"
        started = [
            ranks.start_process(
                [sys.executable, "-m", "windlass.calibrate", str(result), str(storage)],
                environment,
                Path(folder) / f"output-{rank}",
            )
            for rank, environment in enumerate(ranks.make_environments(count, environ, port, alone=True))
        ]
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline and any(each.poll() is None for each in started):
            if any(each.poll() for each in started):  # the others would wait for it
                break
            time.sleep(0.1)
        codes = [each.poll() for each in started]
        for each in started:
            each.kill()
            each.wait()
        if any(codes) or not result.exists():
            failed = next((rank for rank, code in enumerate(codes) if code), 0)
            last = (Path(folder) / f"output-{failed}").read_text(errors="replace").strip().splitlines()[-1:]
            what = f"rank {failed} failed: {''.join(last) or 'it did not end'}"
            raise RunError(what, "windlass calibrate", "run it with --ranks 1, then with more")
        return dict(json.loads(result.read_text()))


def _gpu_kind(name: str) -> str:
    """Return the hardware table's name of a GPU, or the driver's own if it isn't there."""
    try:
        return hardware.find_gpu(name).name
    except UserError:
        return name


def _combine_rates(measured: Mapping[str, Any], kind: str, count: int) -> Rates:
    """Combine measured rates with data sheets' for what one node can't measure."""
    found = dict(measured["rates"])
    collectives = [Collective(**each) for each in found.pop("collectives")]
    gpu = hardware.GPUS.get(kind) or hardware.GPUS["h100"]
    link = hardware.find_fabric(gpu.link)
    sheet = hardware.Machine(gpu, link, link, hardware.find_fabric(gpu.host_link), 1, None).rates
    for name in ("link", "network"):
        missing = set(KINDS) - {c.kind for c in collectives if c.fabric == name}
        collectives += [c for c in sheet.collectives if c.fabric == name and c.kind in missing]
    spread = measured["conditions"]["spread"]
    date = measured["conditions"]["date"]
    busy = found.pop("busy")  # everything that the processor does takes so much longer
    found |= {key: found[key] * busy for key in ("operator_seconds", "module_seconds")}
    found |= {key: found[key] / busy for key in ("memory_gb_per_second", "decode_gb_per_second")}
    products, narrow = (
        {dtype: _points(rows, busy) for dtype, rows in found.pop(key).items()} for key in ("products", "narrow")
    )
    return replace(
        sheet,
        products=products,
        narrow=narrow,
        grouped=_points(found.pop("grouped"), busy),
        attention=_points(found.pop("attention"), busy),
        attention_backward=_points(found.pop("attention_backward"), busy),
        **found,
        basis=f"calibrated on {count} x {kind}, {date}",
        collectives=tuple(collectives),
        low=LOW / (1 + spread),
        high=HIGH * (1 + spread),
    )


def _points(rows: list[list[float]], busy: float) -> Points:
    return tuple((a, b, c / busy) for a, b, c in rows)


def print_rates(content: Mapping[str, Any]) -> None:
    """Print what was measured, in a dozen lines."""
    rates, conditions = content["rates"], content["conditions"]
    curves = {f"products, {name}": rows for name, rows in rates["products"].items()}
    curves |= {name: rates[name] for name in ("grouped", "attention")}
    rows = {
        "machine": f"{content['ranks']} x {content['kind']}, {conditions['processor']}, load {conditions['load']:g}",
        **{name: f"to {max(rate for *_, rate in points):,.3g} TFLOP/s" for name, points in curves.items()},
        **{
            name: f"{rates[f'{name}_gb_per_second']:,.3g} GB/s" for name in ("memory", "decode", "host_link", "storage")
        },
        "host": f"{rates['operator_seconds'] * 1e6:,.3g} us an operator, {rates['module_seconds'] * 1e6:,.3g} a module",
    }
    for each in rates["collectives"]:
        if each["fabric"] == "link" and each["ranks"] == content["ranks"]:
            text = f"{each['latency_seconds'] * 1e6:,.0f} us, {each['gb_per_second']:,.3g} GB/s"
            rows[each["kind"]] = f"{text} over {each['ranks']} ranks"
    rows["other work"] = f"{1 - 1 / conditions['busy']:.0%} of the processors' time; the rates are what is left"
    rows["spread"] = f"{conditions['spread']:.0%}: the plan's range is {rates['low']:.2f} to {rates['high']:.2f} of it"
    for name, text in rows.items():
        print(f"{name:20} {text}")


# --- one rank ------------------


def measure_on_rank(storage: Path) -> dict[str, Any] | None:
    """Measure on all ranks at the same time, as they train; rank 0 returns their common result."""
    import torch
    import torch.distributed as dist
    from transformers.integrations.moe import _grouped_linear

    from windlass import measure
    from windlass.observe.counters import describe_machine
    from windlass.train import lora
    from windlass.train.kernels import products
    from windlass.weights import quantized

    measure_host = partial(
        measure_host_rates, attach=lora.attach_adapter
    )  # imported before: that takes longer than to measure
    rank, world, local = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    cpu = device.type == "cpu"
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if cpu else "nccl")
    rows = (1, 8, 64, 512, 4096) if cpu else (1, 16, 64, 256, 1024, 4096, 16384)
    widths = (32, 64, 128, 256, 512, 1024) if cpu else (64, 256, 1024, 2048, 4096, 8192)
    lengths, heads = ((32, 128, 512), (16, 64, 128)) if cpu else ((128, 512, 2048, 8192), (64, 128))
    dtype = torch.bfloat16  # of most checkpoints, in which a CPU computes too

    def reference() -> float:
        """Time a product before and after, to see changes of the machine's state."""
        return measure.measure_products(device, dtype, [(rows[3], widths[3])])[0][2]

    def one_by_one(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return products.multiply_one_by_one(x, weights, None, ends, None, transposed=True)

    def decode() -> float:
        side = 512 if cpu else 8192
        codes = torch.randint(0, 120, (side, side), dtype=torch.uint8, device=device)
        format = quantized.Format(torch.float8_e4m3fn, (side, side), dtype)
        scale = torch.ones(1, 1, device=device)
        return (
            codes.numel() / measure.time_call(lambda: quantized.dequantize(codes, scale, format, dtype), device) / 1e9
        )

    if cpu:  # once one as large was freed, as in training, glibc no longer pages every smaller tensor in anew
        torch.zeros(31 << 20, dtype=torch.uint8)
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    with torch.no_grad():
        states = [reference()]
        found: dict[str, Any] = {
            key: {
                str(each).removeprefix("torch."): measure.measure_products(device, each, product(rows, widths), columns)
                for each in (torch.bfloat16, torch.float32)
            }
            for key, columns in (("products", None), ("narrow", NARROW))
        }
        states.append(reference())
        narrower = product(rows[:-1], widths[:-1])
        found["grouped"] = measure.measure_grouped(device, dtype, narrower, one_by_one if cpu else _grouped_linear)
        states.append(reference())
        found["memory_gb_per_second"] = measure.measure_memory(device, 1 << (18 if cpu else 28))
        found["decode_gb_per_second"] = decode()
        found["host_link_gb_per_second"] = measure.measure_copy(device, 1 << (24 if cpu else 28))
    for key, backward in (("attention", False), ("attention_backward", True)):
        tokens = 1024 if cpu else 16384
        found[key] = measure.measure_attention(device, dtype, product(lengths, heads), tokens, backward=backward)
    found |= measure_host(device)
    found["sync_seconds"] = measure.measure_sync(device)
    # Medians of short turns don't show how often other work takes the processor away; a step of training does.
    busy = (time.perf_counter() - began) / (time.process_time() - used) if cpu and torch.get_num_threads() == 1 else 1.0
    found["busy"] = max(1.0, busy)
    states.append(reference())
    found["storage_gb_per_second"] = measure_storage(storage, STORAGE_BYTES[device.type]) if local == 0 else None
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (found, states))
    collectives = measure_groups(device, world, per_node)
    dist.destroy_process_group()
    if rank:
        return None
    middle, facts = sorted(value for _, each in everyone for value in each), describe_machine()
    conditions = {
        **{key: facts[key] for key in ("host", "processor", "gpus", "driver") if facts.get(key)},
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "spread": round((middle[-1] - middle[0]) / middle[len(middle) // 2] / 2, 3),
    }
    merged = _mean_over_ranks([each for each, _ in everyone])
    conditions["busy"] = round(merged["busy"], 3)
    return {"rates": {**merged, "collectives": collectives}, "conditions": conditions}


def measure_host_rates(device: Any, attach: Callable[..., Any]) -> dict[str, float]:
    """Measure the host's time per operator and per module call, by the plan's own counts: layers as in training,
    with so few tokens that nothing else takes time. A chain of one kind of operator would take half as long."""
    import torch
    import transformers

    from windlass import measure
    from windlass.model import config, targets
    from windlass.plan.step_time import count_dispatch
    from windlass.plan.workload import read_shape
    from windlass.runfile import Lora
    from windlass.train.kernels.lora_linear import fuse_layers

    few, many, tokens = 2, 8, 8
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    base = config.describe({"model_type": "llama", "num_hidden_layers": many, "vocab_size": 64, **sizes}, "llama")
    lora = Lora(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear")
    adapter = targets.resolve_adapter(lora, base, str)
    described = transformers.LlamaConfig.from_dict(dict(base.config))
    with torch.device(device):
        model = transformers.LlamaForCausalLM(described).to(torch.bfloat16).requires_grad_(False)
        ids = torch.zeros(1, tokens, dtype=torch.long)
    layers = attach(model, lora, adapter, 0).get_base_model().train().model
    adapters, every, now = fuse_layers(layers, torch.bfloat16), layers.layers, measure.choose_clock(device)
    taken = dict[int, list[tuple[float, float]]]()
    for count in (few, many):
        layers.layers, taken[count] = every[:count], []
        for _ in range(3 * measure.TURNS):
            with adapters.unchanged():
                measure.synchronize(device)
                began = now()
                with torch.autocast(device.type, torch.bfloat16):
                    states = layers(ids, use_cache=False).last_hidden_state.sum()
                middle = now()
                states.backward()
                taken[count].append((middle - began, now() - middle))
            model.zero_grad()
    medians = {count: [statistics.median(each) for each in zip(*turns, strict=True)] for count, turns in taken.items()}
    forward, backward = ((more - less) / (many - few) for more, less in zip(medians[many], medians[few], strict=True))
    shape, separate = read_shape(base, adapter), device.type == "cpu"
    ahead, back = (
        count_dispatch(shape, shape.layers[0], phase, tokens, separate=separate) for phase in ("forward", "backward")
    )
    operator = max(backward / back.operators, 1e-7)
    return {
        "operator_seconds": operator,
        "module_seconds": max((forward - operator * ahead.operators) / ahead.modules, 1e-7),
    }


def measure_groups(device: Any, world: int, per_node: int) -> list[dict[str, Any]]:
    """Measure groups of several sizes of a node's ranks, and of all ranks if they are on several nodes."""
    import torch.distributed as dist

    from windlass import measure

    found = []
    for size in sorted({2**i for i in range(1, 10) if 2**i < per_node} | ({per_node} if per_node > 1 else set())):
        own = None
        for first in range(0, world, size) if per_node % size == 0 else ():
            group = dist.new_group(list(range(first, first + size)))
            own = group if first <= dist.get_rank() < first + size else own
        if own is not None:
            found += measure.measure_collectives(device, own, "link", size)
    if world > per_node:
        found += measure.measure_collectives(device, None, "network", per_node)
    return [asdict(each) for each in found]


def measure_storage(folder: Path, size: int) -> float:
    """Return GB/s of a file that is not in the page cache."""
    place = next(each for each in (folder, *folder.parents) if each.is_dir())
    with tempfile.NamedTemporaryFile(dir=place, prefix=".windlass-") as file:
        file.write(os.urandom(1 << 20) * (size >> 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        with Path(file.name).open("rb", buffering=0) as reading:
            while reading.read(16 << 20):
                pass
        return size / (time.perf_counter() - began) / 1e9


def _mean_over_ranks(values: list[Any]) -> Any:
    """Return the ranks' mean of each number; ranks without one don't count."""
    values = [value for value in values if value is not None]
    first = values[0]
    if isinstance(first, dict):
        return {key: _mean_over_ranks([value[key] for value in values]) for key in first}
    if isinstance(first, (list, tuple)):
        return [_mean_over_ranks(list(each)) for each in zip(*values, strict=True)]
    return sum(values) / len(values)


if __name__ == "__main__":
    measured = measure_on_rank(Path(sys.argv[2]))
    if measured:
        Path(sys.argv[1]).write_text(json.dumps(measured))
