"""`windlass calibrate`: measure this machine as training uses it, with real ranks, and write its machine file.

GPUs are measured rate by rate. A CPU has one factor: the time of a step of a few whole layers in a short training run,
relative to what the plan computes for it from the hardware table.
"""

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from windlass import hardware, run_folder, tiny
from windlass.errors import RunError, UserError
from windlass.files import read_json, read_json_lines
from windlass.hardware import Rates
from windlass.observe.format import format_plural
from windlass.plan import make_plan
from windlass.plan.machine import build_rates, own_machine_file, write_machine
from windlass.ranks import supervisor
from windlass.ranks.place import LAUNCHERS, Node, translate_launcher
from windlass.runfile import read_run_file

# Range of measured / planned step times of calibrated plans, wider where the machine itself varies: on GPUs assumed; on
# CPUs tiny dense models and mixtures of experts, packed and not, took 0.7 to 1.3 of it.
RANGES = {"cpu": (0.67, 1.5), "cuda": (0.8, 1.4)}
STORAGE_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
LIMIT_SECONDS = 300.0  # limit of the whole calibration: a collective may hang
TABLE = "table.json"  # a machine file with the hardware table's rates
BUSY = 0.1  # share of the processors' time from which other processes are worth a warning


def calibrate(
    count: int | None, out: Path | None, environ: MutableMapping[str, str], say: Callable[[str], None]
) -> tuple[Path, dict[str, Any]] | None:
    """Measure with real ranks and write the file; return its path and content. On GPUs under torchrun this is one of
    the ranks, and returns None on those that don't write."""
    gpus = hardware.read_this_machine().gpus
    if gpus:
        import torch

        if not torch.cuda.is_available():
            hint = "see `windlass check RUN --here`; with CUDA_VISIBLE_DEVICES= (nothing) the CPU is calibrated"
            problem = f"{format_plural(len(gpus), 'GPU')} here, and torch {torch.__version__} can use none"
            raise UserError(problem, "windlass calibrate", hint, "no-usable-gpu")
    kind = _gpu_kind(gpus[0].name) if gpus else "cpu"
    environ.update(translate_launcher(environ))
    under_torchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environ.keys()
    if under_torchrun and not gpus and int(environ["WORLD_SIZE"]) > 1:
        hint = f"`windlass calibrate --ranks {environ['LOCAL_WORLD_SIZE']}`, without a launcher"
        what = "a launcher started several ranks, but a CPU's are started here"
        raise UserError(what, "windlass calibrate", hint, "started-by-launcher")
    if under_torchrun:
        count = int(environ["LOCAL_WORLD_SIZE"])
    count = count or len(gpus) or 1
    most = len(gpus) or os.cpu_count() or 1
    if count > most:
        name = "GPUs" if gpus else "processors"
        text = f"{count} ranks, but this machine has {most} {name}"
        raise UserError(text, "--ranks", f"give at most {most}", "too-many-ranks")
    path = out or own_machine_file(kind, count)
    began = time.monotonic()
    if not under_torchrun:
        say(f"measuring {kind} with {format_plural(count, 'rank')}, about {60 if gpus else 15} s")
    if not gpus:
        rates, conditions = _calibrate_cpu(count, path.absolute().parent, environ)
        if conditions["busy"]:
            others = f"other processes used {conditions['busy']:.0%} of the processors' time"
            say(f"! {others}: beside them, steps take longer than planned, up to {rates.high:.1f} times")
    else:
        storage = path.absolute().parent
        measured = measure_on_rank(storage) if under_torchrun else _start_ranks(count, storage, environ)
        if measured is None:
            return None
        rates = _combine_rates(measured, kind, count)
        conditions = measured["conditions"]
    conditions = {**conditions, "seconds": round(time.monotonic() - began, 1)}
    return path, write_machine(path, kind, count, conditions, rates)


def _gpu_kind(name: str) -> str:
    """Return the hardware table's name of a GPU, or the driver's own if it isn't there."""
    try:
        return hardware.find_gpu(name).name
    except UserError:
        return name


def print_rates(content: Mapping[str, Any]) -> None:
    rates = content["rates"]
    conditions = content["conditions"]
    machine = f"{content['ranks']} x {content['kind']}"
    rows = {"machine": f"{machine}, {conditions['processor']}, load {conditions['load']:g}"}
    if content["kind"] == "cpu":
        rows["a step"] = f"{conditions['factor']:.2f} times as long as by the hardware table"
        rows["storage"] = f"{rates['storage_gb_per_second']:,.3g} GB/s"
        rows["other work"] = f"{conditions['busy']:.0%} of the processors' time"
    else:
        curves = {f"products, {name}": points for name, points in rates["products"].items()}
        curves |= {name: rates[name] for name in ("grouped", "attention")}
        rows |= {name: f"to {max(rate for *_, rate in points):,.3g} TFLOP/s" for name, points in curves.items()}
        for name in ("memory", "decode", "host_link", "storage"):
            rows[name] = f"{rates[f'{name}_gb_per_second']:,.3g} GB/s"
        operator = rates["operator_seconds"] * 1e6
        module = rates["module_seconds"] * 1e6
        rows["host"] = f"{operator:,.3g} us an operator, {module:,.3g} a module"
        for collective in rates["collectives"]:
            if collective["fabric"] == "link" and collective["ranks"] == content["ranks"]:
                text = f"{collective['latency_seconds'] * 1e6:,.0f} us, {collective['gb_per_second']:,.3g} GB/s"
                rows[collective["kind"]] = f"{text} over {collective['ranks']} ranks"
    rows["spread"] = f"{conditions['spread']:.0%}: the plan's range is {rates['low']:.2f} to {rates['high']:.2f} of it"
    for name, text in rows.items():
        print(f"{name:20} {text}")


# --- CPUs ------------------

VOCABULARY = 2048
LENGTH = 128
SEQUENCES = 4
STEPS = 24
RUN = """
model: {{model_name_or_path: "{folder}/model", torch_dtype: float32}}
lora: {{r: 8, lora_alpha: 16, lora_dropout: 0.0, target_modules: all-linear}}
data: {{dataset_name_or_path: "{folder}/rows.jsonl", val_split: null, max_length: {length}}}
train: {{output_dir: "{folder}/run", max_steps: {steps}, per_device_train_batch_size: {batch},
  gradient_accumulation_steps: 1, bf16: false, eval_strategy: "no", save_strategy: "no"}}
layout: resident
cluster: {{nodes: 1, gpus_per_node: {ranks}, gpu: cpu, machine: "{folder}/{table}"}}
"""


def _calibrate_cpu(count: int, storage: Path, environ: Mapping[str, str]) -> tuple[Rates, dict[str, Any]]:
    """Train a small mixture of experts, and return the hardware table's rates, all slowed down by one factor."""
    import psutil  # type: ignore[import-untyped]

    link, network, memory = (hardware.FABRICS[name] for name in ("loopback", "ethernet-25", "memory"))
    sheet = hardware.derive_rates(hardware.GPUS["cpu"], link, network, memory, 1)
    threads = int(supervisor.make_environments(count, environ, Node())[0]["OMP_NUM_THREADS"])
    with tempfile.TemporaryDirectory(prefix="windlass-calibrate-") as name:
        folder = Path(name)
        run = _write_run(folder, count)
        write_machine(folder / TABLE, "cpu", count, {}, sheet)
        psutil.cpu_percent()
        began = time.monotonic()
        before = _children_seconds()
        _train(run, environ)
        busy = psutil.cpu_percent() / 100 * psutil.cpu_count()
        others = max(busy - (_children_seconds() - before) / (time.monotonic() - began), 0.0)
        planned = make_plan(read_run_file(run)).cost.step_seconds
        steps = [
            step
            for rank in range(count)
            for step in list(read_json_lines(folder / "run" / run_folder.STEPS.format(rank=rank)))[STEPS // 4 :]
        ]
        facts = read_json(folder / "run" / run_folder.METER.format(rank=0))["hardware"]
    # With one thread a rank: the processor's time, which other processes hardly change.
    seconds = [step["step_seconds"] for step in steps]
    if threads == 1:
        seconds = [step["step_seconds"] * step["cpu_cores"] for step in steps if "cpu_cores" in step]
    low, middle, high = statistics.quantiles(seconds, n=4)
    factor = middle / planned
    spread = (high - low) / middle / 2
    crowding = max((others + count * threads) / psutil.cpu_count(), 1.0)  # how much longer steps take beside others
    date = time.strftime("%Y-%m-%d")
    rates = replace(
        hardware.slow_down(sheet, factor),
        storage_gb_per_second=measure_storage(storage, STORAGE_BYTES["cpu"]),
        basis=f"calibrated on {count} x cpu, {date}",
        low=RANGES["cpu"][0] / (1 + spread),
        high=RANGES["cpu"][1] * (1 + spread) * crowding,
    )
    return rates, {
        "host": facts["host"],
        "processor": facts["processor"],
        "date": date,
        "torch": facts["versions"]["torch"],
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "factor": round(factor, 3),
        "spread": round(spread, 3),
        "busy": round(others / psutil.cpu_count(), 3) if crowding > 1 + BUSY else 0.0,
    }


def _write_run(folder: Path, count: int) -> Path:
    """Write the model, rows that are all full, and the run file."""
    sizes = {"hidden": 192, "layers": 3, "experts": 16, "top_k": 4, "moe_intermediate": 96, "vocab": VOCABULARY}
    tiny.write_model(folder / "model", "qwen3_moe", **sizes)  # type: ignore[arg-type]
    draw = random.Random(0)
    rows = [[draw.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(STEPS * SEQUENCES * count)]
    text = "".join(json.dumps({"input_ids": row}) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")
    path = folder / "run.yaml"
    path.write_text(RUN.format(folder=folder, length=LENGTH, steps=STEPS, batch=SEQUENCES, ranks=count, table=TABLE))
    return path


def _train(run: Path, environ: Mapping[str, str]) -> None:
    kept = {name: value for name, value in environ.items() if not name.startswith(LAUNCHERS)}
    command = [sys.executable, "-m", "windlass", "train", str(run)]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("hint:")]
        last = lines[-1].strip() if lines else f"exit code {done.returncode}"
        what = f"its training run failed: {last}"
        raise RunError(what, "windlass calibrate", "try --ranks 1, then more", "run-failed")


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- GPUs ------------------


def _start_ranks(count: int, storage: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Start one process per rank; return what rank 0 writes."""
    with tempfile.TemporaryDirectory(prefix="windlass-calibrate-") as name, supervisor.reserve_port() as port:
        folder = Path(name)
        result = folder / "rates.json"
        command = [sys.executable, "-m", "windlass.calibrate", str(result), str(storage)]
        environments = supervisor.make_environments(count, environ, Node(port=port))
        codes = supervisor.run_processes(command, environments, folder, time.monotonic() + LIMIT_SECONDS)
        if any(codes) or not result.exists():
            failed = next((rank for rank, code in enumerate(codes) if code), 0)
            last_line = supervisor.read_last_line(folder / f"output-{failed}")
            text = f"rank {failed} failed: {last_line or 'it did not end'}"
            raise RunError(text, "windlass calibrate", "run it with --ranks 1, then with more", "rank-failed")
        return read_json(result)


def _combine_rates(measured: Mapping[str, Any], kind: str, count: int) -> Rates:
    """Return measured rates with their range."""
    basis = f"calibrated on {count} x {kind}, {measured['conditions']['date']}"
    spread = measured["conditions"]["spread"]
    low, high = RANGES["cuda"]
    return build_rates({**measured["rates"], "basis": basis, "low": low / (1 + spread), "high": high * (1 + spread)})


@dataclass(frozen=True, slots=True)
class Sizes:
    rows: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096, 16384)
    widths: tuple[int, ...] = (64, 256, 1024, 2048, 4096, 8192)
    lengths: tuple[int, ...] = (128, 512, 2048, 8192)
    heads: tuple[int, ...] = (64, 128)
    attention_tokens: int = 16384
    decoded_side: int = 16384  # large enough that the host is ahead of the GPU
    elements: int = 1 << 28  # of an elementwise operation, and bytes of a copy
    message_bytes: int = 256 << 20
    storage_bytes: int = STORAGE_BYTES["cuda"]


def measure_on_rank(storage: Path, sizes: Sizes = Sizes()) -> dict[str, Any] | None:
    """Measure on all ranks at the same time, as they train; rank 0 returns their common result."""
    import torch
    import torch.distributed as dist

    from windlass import measure
    from windlass.compat import grouped_product
    from windlass.observe.counters import describe_machine
    from windlass.weights import quantized

    rank, world, local, per_node = (
        int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    dtype = torch.bfloat16  # of most checkpoints

    def reference() -> float:
        """Time a product now and then, to see changes of the machine's state."""
        return measure.measure_products(device, dtype, [(sizes.rows[3], sizes.widths[3])])[0][2]

    def decode() -> float:
        side = sizes.decoded_side
        codes = torch.randint(0, 120, (side, side), dtype=torch.uint8, device=device)
        format = quantized.StoredFormat(torch.float8_e4m3fn, (side, side), dtype)
        scale = torch.ones(1, 1, device=device)
        seconds = measure.time_call(lambda: quantized.dequantize(codes, scale, format, dtype), device)
        return codes.numel() / seconds / 1e9

    dist.barrier()
    rates: dict[str, Any] = {"products": {}}
    with torch.no_grad():
        states = [reference()]
        for kind in (torch.bfloat16, torch.float32):
            points = measure.measure_products(device, kind, product(sizes.rows, sizes.widths))
            rates["products"][str(kind).removeprefix("torch.")] = points
        states.append(reference())
        narrower = product(sizes.rows[:-1], sizes.widths[:-1])
        rates["grouped"] = measure.measure_grouped(device, dtype, narrower, grouped_product)
        states.append(reference())
        rates["memory_gb_per_second"] = measure.measure_memory(device, sizes.elements)
        rates["decode_gb_per_second"] = decode()
        rates["host_link_gb_per_second"] = measure.measure_copy(device, sizes.elements)
    for key, backward in (("attention", False), ("attention_backward", True)):
        pairs = product(sizes.lengths, sizes.heads)
        rates[key] = measure.measure_attention(device, dtype, pairs, sizes.attention_tokens, backward=backward)
    rates |= measure_host_rates(device)
    rates["sync_seconds"] = measure.time_call(torch.zeros(1, device=device).item, device)
    states.append(reference())
    rates["storage_gb_per_second"] = measure_storage(storage, sizes.storage_bytes) if local == 0 else None
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (rates, states))
    collectives = measure_groups(device, world, per_node, sizes.message_bytes)
    dist.destroy_process_group()
    if rank:
        return None
    middle = sorted(state for _, states in everyone for state in states)
    facts = describe_machine()
    conditions = {
        **{key: facts[key] for key in ("host", "processor", "gpus", "driver") if facts.get(key)},
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "spread": round((middle[-1] - middle[0]) / middle[len(middle) // 2] / 2, 3),
    }
    merged = _mean_over_ranks([rates for rates, _ in everyone])
    return {"rates": {**merged, "collectives": collectives}, "conditions": conditions}


def measure_host_rates(device: Any) -> dict[str, float]:
    """Measure the host's time per operator and per module call, by the plan's own counts: layers as in training,
    with so few tokens that nothing else takes time. A chain of one kind of operator would take half as long."""
    import torch
    import transformers

    from windlass import measure
    from windlass.model import config, targets
    from windlass.plan.operators import count_dispatch
    from windlass.plan.workload import read_shape
    from windlass.runfile import Lora
    from windlass.train.lora import attach_adapter
    from windlass.train.patches import Patches

    few = 2  # layers
    many = 8
    tokens = 8
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    base = config.describe({"model_type": "llama", "num_hidden_layers": many, "vocab_size": 64, **sizes}, "llama")
    lora = Lora(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear")
    adapter = targets.resolve_adapter(lora, base, str)
    described = transformers.LlamaConfig.from_dict(dict(base.config))
    with torch.device(device):
        model = transformers.LlamaForCausalLM(described).to(torch.bfloat16).requires_grad_(False)
        ids = torch.zeros(1, tokens, dtype=torch.long)
    layers = attach_adapter(model, lora, adapter, 0).get_base_model().train().model
    adapters = Patches().fuse_layers(layers, torch.bfloat16)
    all_layers = layers.layers
    forwards = dict[int, float]()
    backwards = dict[int, float]()
    for count in (few, many):
        layers.layers = all_layers[:count]
        turns = []
        for _ in range(3 * measure.TURNS):
            with adapters.unchanged():
                measure.synchronize(device)
                began = time.perf_counter()
                with torch.autocast(device.type, torch.bfloat16):
                    states = layers(ids, use_cache=False).last_hidden_state.sum()
                middle = time.perf_counter()
                states.backward()
                turns.append((middle - began, time.perf_counter() - middle))
            model.zero_grad()
        forwards[count] = statistics.median(forward for forward, _ in turns)
        backwards[count] = statistics.median(backward for _, backward in turns)
    forward = (forwards[many] - forwards[few]) / (many - few)
    backward = (backwards[many] - backwards[few]) / (many - few)
    shape = read_shape(base, adapter)
    ahead = count_dispatch(shape, shape.layers[0], "forward", tokens, separate=False)
    back = count_dispatch(shape, shape.layers[0], "backward", tokens, separate=False)
    operator = max(backward / back.operators, 1e-7)
    module = max((forward - operator * ahead.operators) / ahead.modules, 1e-7)
    return {"operator_seconds": operator, "module_seconds": module}


def measure_groups(device: Any, world: int, per_node: int, large_bytes: int) -> list[dict[str, Any]]:
    """Measure groups of several sizes of a node's ranks, and of all ranks if they are on several nodes."""
    import torch.distributed as dist

    from windlass import measure

    collectives = []
    sizes = {2**i for i in range(1, 10) if 2**i < per_node}
    if per_node > 1:
        sizes.add(per_node)
    for size in sorted(sizes):
        if per_node % size:
            continue
        for first in range(0, world, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= dist.get_rank() < first + size:
                mine = group
        collectives += measure.measure_collectives(device, mine, "link", size, large_bytes)
    if world > per_node:
        collectives += measure.measure_collectives(device, None, "network", per_node, large_bytes)
    return [asdict(collective) for collective in collectives]


def measure_storage(folder: Path, size: int) -> float:
    """Return GB/s of a file that is not in the page cache."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    with tempfile.NamedTemporaryFile(dir=existing, prefix=".windlass-") as file:
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
        return [_mean_over_ranks(list(elements)) for elements in zip(*values, strict=True)]
    return sum(values) / len(values)


if __name__ == "__main__":
    measured = measure_on_rank(Path(sys.argv[2]))
    if measured:
        Path(sys.argv[1]).write_text(json.dumps(measured))
