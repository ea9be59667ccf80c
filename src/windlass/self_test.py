"""`windlass check --self-test`: does this machine compute what windlass expects?

Parts of a training step are compared with plain torch on the CPU in float32, collectives with known results. Then a
tiny mixture trains for a few steps in each way that the devices support, compared with one process on the CPU. Each
rank writes results at once: if a kernel kills its process, the test it was in is known.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Mistral4Config, Mistral4ForCausalLM

from windlass import hardware, runfile, tiny
from windlass import plan as planning
from windlass.errors import UserError
from windlass.files import append_json_line, read_json_lines, write_json
from windlass.hardware import GIB
from windlass.launch.check.results import FAIL, STYLES, Report, Result, failed, passed, skipped, warned
from windlass.model.targets import view_by_expert
from windlass.observe.counters import describe_machine
from windlass.ranks import supervisor as ranks
from windlass.ranks.rank import Rank, read_rank
from windlass.run_folder import FINAL, is_finished
from windlass.settings import (
    FOUR_BITS,
)
from windlass.train import loss, parallel
from windlass.train.connect import create_process_group
from windlass.train.experts import experts
from windlass.train.kernels import compare, family_layers, products
from windlass.train.kernels.lora_linear import check_lora_linears
from windlass.train.run import train_rank
from windlass.weights import four_bits, quantized

LIMIT_SECONDS: Final = 170.0
COMMAND: Final = (sys.executable, "-m", "windlass.self_test")
CLOSE: Final = 0.02  # relative, of bfloat16 on a device to float32 on the CPU
# Relative, of a loss, a gradient's norm and a part's adapters: tokens change sides between near experts.
LOSS, NORM, ADAPTERS = 0.01, 0.1, 0.3
PLANNED, WORKSPACE = 1.25, 0.0625  # times what was planned, and GiB of cuBLAS's own: more is a warning
EXPERTS: Final = 8
BEGUN: Final = "did not end"
PACKED: Final = {"mxfp4": (32, torch.bfloat16), "published nf4": (64, torch.float32)}  # columns a scale, its dtype
REFERENCES: Final = ("bf16", "nf4")  # FP8 as published has the same values in 16 bits
CPU_ALONE: Final = "WINDLASS_SELF_TEST_CPU"  # the process that trains on the CPU: for so many ranks
SEND: Final = "and send self-test.json with your report"
WRONG: Final = f"what is trained here can't be trusted: try another node, driver or torch {SEND}"
MEANS: Final = {  # how the test's name begins: what to do
    "reference": f"the CPU itself, torch or transformers: see `windlass version` {SEND}",
    "FP8": f"set layout.base_dtype: bf16 {SEND}",
    "4 bits": f"set layout.base_dtype: bf16 {SEND}",
    "attention": f"set model.attn_implementation: eager {SEND}",
    "fused": f"training leaves out what differs: it is right, and slower; go on {SEND}",
    "experts": f"leave lora.experts out {SEND}",
    "collectives": f"ranks can't add up: links, driver or NCCL; see `windlass check run.yaml --here` {SEND}",
}
RUN: Final = """
model: {{model_name_or_path: {folder}/model}}
lora: {{r: 8, lora_alpha: 16, lora_dropout: 0, target_modules: all-linear, experts: {{r: 4}}}}
data: {{dataset_name_or_path: {folder}/rows.jsonl, dataset_config_name: null, val_split: null, max_length: 128}}
train: {{output_dir: {folder}/{name}, max_steps: 5, per_device_train_batch_size: 2, global_batch_size: {batch},
  optim: sgd, learning_rate: 0.3, warmup_ratio: 0, max_grad_norm: 100, bf16: true, logging_steps: 1,
  save_strategy: "no", eval_strategy: "no"}}
layout: {{name: {layout}, base_dtype: {dtype}}}
cluster: {{nodes: 1, gpus_per_node: {ranks}{gpu}}}
"""


class Untested(Exception):  # noqa: N818
    """Why a test does not apply here."""


class Doubt(Exception):  # noqa: N818
    """A correct result that differs from the plan."""


# --- the process that a user starts ---


def run(environ: Mapping[str, str], file: Path, say: Callable[[str], None]) -> Report:
    """Test this machine's GPUs, or its CPU with two ranks, and write the file."""
    began, found = time.monotonic(), hardware.read_gpus()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    what = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "this CPU with 2 ranks"
    say(f"testing {what}: takes a minute, {LIMIT_SECONDS:.0f} s at most")
    results = [passed("GPUs", f"{gpus} x {torch.cuda.get_device_name(0)}")] if gpus else []
    if not gpus and found.gpus:
        why = f"{len(found.gpus)} GPUs, and torch {torch.__version__} can use none"
        results = [failed("GPUs", why, "see `windlass check run.yaml --here`")]
    elif not gpus:
        results = [skipped("GPUs", f"none tested: {found.error}; below is this CPU")]
    with tempfile.TemporaryDirectory(prefix="windlass-self-test-") as made:
        folder = Path(made)
        tiny.write_model(folder / "model", hidden=256, experts=EXPERTS, vocab=1024, config={"initializer_range": 0.1})
        texts = (text for page in topics.values() for text in page.split("\n\n") if len(text) > 300)
        rows = [json.dumps({"text": text}) + "\n" for text in texts][: 2 * 5 * max(2, gpus)]
        (folder / "rows.jsonl").write_text("".join(rows))
        results += run_in_ranks(folder, gpus or 2, environ, began + LIMIT_SECONDS)
    report = Report("self-test", tuple(results), seconds=time.monotonic() - began)
    facts = {key: value for key, value in describe_machine().items() if key != "host"}
    try:
        write_json(file, {**report.as_dict(), "machine": facts})
    except OSError as error:
        raise UserError(f"can't be written: {error.strerror}", str(file), "start it in another folder") from None
    say(f"written to {file}")
    return report


def run_in_ranks(folder: Path, count: int, environ: Mapping[str, str], until: float) -> list[Result]:
    """Run a rank on each device, and a process that trains the reference on the CPU."""
    with ranks.reserve_port() as port, ranks.reserve_port() as other:
        cpu = {**environ, "CUDA_VISIBLE_DEVICES": "", CPU_ALONE: str(count)}
        everyone = [
            *ranks.make_environments(1, cpu, other, alone=True),
            *ranks.make_environments(count, environ, port, alone=True),
        ]
        command = [*COMMAND, str(folder)]
        started = [ranks.start_process(command, each, folder / f"output-{n}") for n, each in enumerate(everyone)]
        while time.monotonic() < until and any(each.poll() is None for each in started):
            if any(each.poll() for each in started):  # the others wait for it
                until = min(until, time.monotonic() + 5)
            time.sleep(0.1)
        codes = [each.poll() for each in started]
        for each in started:
            each.kill()
            each.wait()
    return merge_results(folder, codes)


def merge_results(folder: Path, codes: Sequence[int | None]) -> list[Result]:
    """Return the worst result of each test. If a process died, the test that it was in has failed."""
    rows: dict[str, list[Result]] = {}
    for number, code in enumerate(codes):  # 0 is the CPU's, the ranks follow
        path = folder / f"results-{number}.jsonl"
        found = {line["name"]: Result(**line) for line in read_json_lines(path)} if path.exists() else {}
        if code:
            last = (folder / f"output-{number}").read_text(errors="replace").strip().splitlines()[-1:]
            name = next((name for name, result in found.items() if result.seen == BEGUN), "start")
            found[name] = failed(name, f"its process ended with {code}: {''.join(last)[-300:]}", _meaning(name))
        for name, result in found.items():
            if not (result.seen == BEGUN and any(codes)):  # then it waited for the one that died
                node = f"rank {number - 1}" if result.verdict == FAIL and number and len(codes) > 2 else ""
                rows.setdefault(name, []).append(replace(result, node=node))
    return [max(each, key=lambda result: list(STYLES).index(result.verdict)) for each in rows.values()]


def _meaning(name: str) -> str:
    return next((hint for begins, hint in MEANS.items() if name.startswith(begins)), WRONG)


# --- one rank ---


def run_tests(folder: Path) -> None:
    """Run all tests of this rank, or the CPU's part."""
    warnings.simplefilter("ignore")
    signal.alarm(math.ceil(LIMIT_SECONDS) + 10)  # ends this process even if the one that started it was killed
    here, alone = read_rank(os.environ), os.environ.get(CPU_ALONE)
    assert here is not None
    create_process_group(here, 60)
    device, world = parallel.get_device(), int(alone or here.world)
    every: dict[str, Callable[[], str]] = {
        f"reference on the CPU, {dtype}": partial(train_reference, here, folder, dtype, world) for dtype in REFERENCES
    }
    if not alone:
        every = list_tests(device) | list_collective_tests(device) | list_training_tests(here, folder)
    path = folder / f"results-{0 if alone else here.rank + 1}.jsonl"
    for name, test in every.items():
        append_json_line(path, asdict(failed(name, BEGUN, _meaning(name))))
        append_json_line(path, asdict(run_test(name, test)))
    torch.distributed.destroy_process_group()


def run_test(name: str, test: Callable[[], str]) -> Result:
    try:
        return passed(name, test())
    except Untested as why:
        return skipped(name, str(why))
    except Doubt as doubt:
        return warned(name, str(doubt), SEND)
    except Exception as error:
        text = str(error) if isinstance(error, ArithmeticError) else f"{type(error).__name__}: {error}"
        return failed(name, " ".join(text.split())[-400:], _meaning(name))


# --- parts of a step against plain torch ---


def list_tests(device: torch.device) -> dict[str, Callable[[], str]]:
    """Return the tests by name; each returns its finding in a few words. ArithmeticError: values differ."""
    return {
        "product of matrices": partial(compare_with_cpu, device, torch.matmul, torch.matmul, (96, 256), (256, 128)),
        "attention, flash": partial(check_attention, device, SDPBackend.FLASH_ATTENTION),
        "attention, efficient": partial(check_attention, device, SDPBackend.EFFICIENT_ATTENTION),
        "attention, masked": partial(check_attention, device, None),
        "norm": partial(check_norm, device),
        "loss": partial(check_head_loss, device),
        "fused layers": partial(check_fused_layers, device),
        "FP8 decoding": partial(check_decoding, device, ""),
        **{f"4 bits decoding, {kind}": partial(check_decoding, device, kind) for kind in (*FOUR_BITS, *PACKED)},
        **{f"grouped products, {dtype}": partial(check_grouped, device, dtype) for dtype in ("bf16", "FP8", "nf4")},
        "experts with adapters": partial(check_adapted_experts, device),
    }


def compare_with_cpu(
    device: torch.device, ours: Callable[..., Tensor], plain: Callable[..., Tensor], *shapes: tuple[int, ...]
) -> str:
    """Compare values and gradients in bfloat16 on the device with the plain function's in float32 on the CPU."""
    dice = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=dice).bfloat16() for shape in shapes]
    found = compare.compute_values(ours, [each.to(device) for each in inputs])
    wanted = compare.compute_values(plain, [each.float() for each in inputs])
    pairs = zip((each.cpu().float() for each in found), wanted, strict=True)
    apart = max(float((one - other).norm() / other.norm().clamp(min=1e-12)) for one, other in pairs)
    if not apart < CLOSE:
        raise ArithmeticError(f"{apart:.2g} away from torch's float32 on the CPU, {CLOSE:g} allowed")
    return f"within {apart:.1e} of torch's float32 on the CPU"


def check_attention(device: torch.device, backend: SDPBackend | None) -> str:
    """Test causal attention with this backend; without one, documents separated by a mask, with torch's choice."""
    position = torch.arange(160)
    allowed = position[:, None] >= position
    if backend is None:
        allowed &= position[:, None] // 40 == position // 40

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if backend is None:
            return functional.scaled_dot_product_attention(q, k, v, allowed.to(q.device))
        with sdpa_kernel([backend]):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
        product: Tensor = scores.softmax(-1) @ v
        return product

    try:
        return compare_with_cpu(device, ours, plain, *[(2, 4, 160, 64)] * 3)
    except RuntimeError as error:
        if not str(error).startswith(("No available kernel", "No viable backend")):
            raise
        raise Untested(
            f"torch has none for {torch.cuda.get_device_name() if device.type == 'cuda' else 'a CPU'}"
        ) from None


def check_norm(device: torch.device) -> str:
    weight = compare.make_numbers(device, 512).bfloat16()

    def ours(x: Tensor) -> Tensor:
        product: Tensor = family_layers.RmsNorm.apply(x, weight, 1e-6)  # type: ignore[no-untyped-call]
        return product

    def plain(x: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight.cpu().float(), 1e-6)

    return compare_with_cpu(device, ours, plain, (3, 33, 512))


def check_head_loss(device: torch.device) -> str:
    """Test the chunked cross entropy, in chunks that don't divide the tokens."""
    head, targets = compare.make_numbers(torch.device("cpu"), 999, 64).bfloat16(), torch.arange(77) * 7

    def ours(hidden: Tensor) -> Tensor:
        total: Tensor = loss.ChunkedCrossEntropy.apply(hidden, head.to(device), targets.to(device))  # type: ignore[no-untyped-call]
        return total

    def plain(hidden: Tensor) -> Tensor:
        return functional.cross_entropy(hidden @ head.float().t(), targets, reduction="sum")

    return compare_with_cpu(device, ours, plain, (77, 64))


def check_fused_layers(device: torch.device) -> str:
    """Test what training uses in place of the layers of a mixture with latent attention: used only if values are
    equal."""
    with torch.device("meta"):
        sizes = {"hidden_size": 64, "n_routed_experts": 8, "num_hidden_layers": 1, "vocab_size": 64}
        model = Mistral4ForCausalLM(Mistral4Config(**sizes, q_lora_rank=32, kv_lora_rank=32))
    modules, names = list(model.modules()), vars(sys.modules[type(model).__module__])
    positions = {name: ours for name, ours in family_layers.POSITIONS.items() if name in names}
    same = {
        "norms": any(family_layers.fuse_norm(module, device) for module in modules),
        "routers": any(family_layers.fuse_router(module, device) for module in modules),
        "keys": all(family_layers.check_keys(module, device) for module in modules if hasattr(module, "expand_kv")),
        "rotary positions": all(
            family_layers.check_rotation(names[name], ours, device) for name, ours in positions.items()
        ),
        "adapted linear layers": check_lora_linears(device),
    }
    if differing := [name for name, equal in same.items() if not equal]:
        raise ArithmeticError(f"{', '.join(differing)} differ from plain operations on this device")
    return f"{', '.join(same)} equal plain operations to {compare.CLOSE:g}"


def make_codes(kind: str, device: torch.device) -> tuple[quantized.Format, Tensor, Tensor, Tensor]:
    """Return a stack of weights in FP8 or 4 bits on the device, as a module has it, and its values in float32 on the
    CPU."""
    cpu, (count, rows, columns) = torch.device("cpu"), (5, 48, 320)
    values = compare.make_numbers(cpu, count, rows, columns).bfloat16().float()
    if kind:
        block, dtype = PACKED.get(kind) or (FOUR_BITS[kind].block, torch.bfloat16)
        coding = quantized.Format(torch.uint8, (1, block), torch.bfloat16, kind.split()[-1], columns, dtype)
        codes = torch.empty(count, rows, four_bits.row_bytes(columns, block, dtype), dtype=torch.uint8)
        bytes_of, scales = four_bits.split_rows(codes, columns, dtype)
        if kind in FOUR_BITS:
            four_bits.quantize(values, kind, codes)
        else:  # read, and never made
            bytes_of.copy_(torch.arange(bytes_of.numel()).view_as(bytes_of) % 251)
            scales.copy_(values[..., ::block].abs() if dtype == torch.float32 else values[..., ::block].round().exp2())
        units = four_bits.code_table(coding.kind, cpu)[
            torch.stack([bytes_of >> 4, bytes_of & 15], -1).flatten(-2).long()
        ]
        wanted = units * scales.float().repeat_interleave(block, -1)[..., :columns]
        return coding, codes.to(device), torch.empty(0), wanted
    coding = quantized.Format(torch.float8_e4m3fn, (16, 128), torch.bfloat16)
    codes, scale = values.to(coding.codes), compare.make_numbers(cpu, count, 3, 3).abs() + 0.1
    wanted = codes.float() * scale.repeat_interleave(16, 1).repeat_interleave(128, 2)[..., :columns]
    return coding, codes.view(torch.uint8).to(device), scale.to(device), wanted


def check_decoding(device: torch.device, kind: str) -> str:
    """Test decoding bit for bit; on a GPU with our kernel, which is not used where it differs from torch's passes."""
    coding, codes, scale, wanted = make_codes(kind, device)
    with warnings.catch_warnings(record=True) as doubts:
        warnings.simplefilter("always")
        quantized.kernel_is_exact.cache_clear()
        codes, scale = coding.parts(codes, scale)
        found = quantized.dequantize(codes, scale, coding, torch.bfloat16).cpu()
    if differing := int((found != wanted.bfloat16()).sum()):
        raise ArithmeticError(f"{differing} of {wanted.numel()} values differ from torch's on the CPU")
    if device.type == "cuda" and doubts:
        raise ArithmeticError(f"right, but {doubts[0].message}")
    way = "our kernel" if device.type == "cuda" else "torch: our kernel is for GPUs"
    return f"equal to torch's on the CPU, bit for bit, by {way}"


def check_grouped(device: torch.device, dtype: str) -> str:
    """Test each expert's rows times its own matrix; one expert has none."""
    ends = torch.tensor([7, 7, 40, 41, 64])
    module: Any = nn.Module()
    coding, codes, scale, matrices = make_codes({"nf4": "nf4"}.get(dtype, ""), device)
    if dtype == "bf16":
        matrices = compare.make_numbers(torch.device("cpu"), 5, 48, 320).bfloat16().float()
        module.weight = matrices.to(device, torch.bfloat16)
    else:
        module.weight, module.weight_scale, module.formats = codes, scale, {"weight": coding}

    def ours(x: Tensor) -> Tensor:
        return products.grouped_linear(x, module, "weight", ends.to(device, torch.int32))

    def plain(x: Tensor) -> Tensor:
        rows = torch.tensor_split(x, ends[:-1])
        return torch.cat([each @ matrix.t() for each, matrix in zip(rows, matrices, strict=True)])

    return compare_with_cpu(device, ours, plain, (64, 320))


def check_adapted_experts(device: torch.device) -> str:
    """Test unmerged adapters of rank 3, which grouped kernels need padded."""
    edges, r, scaling = torch.tensor([0, 7, 7, 40, 41, 64]), 3, 0.5

    def ours(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        base = x.new_zeros(64, 48)
        given = base, x, x.detach(), lambda rows: rows, edges.to(device, torch.int32), a, b, scaling
        added: Tensor = experts._LowRank.apply(*given)  # type: ignore[no-untyped-call]
        return added

    def plain(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        down, up = view_by_expert(".lora_A.", a, 5), view_by_expert(".lora_B.", b, 5)
        rows = enumerate(torch.tensor_split(x, edges[1:-1]))
        return torch.cat([scaling * (each @ down[i].t()) @ up[i] for i, each in rows])

    return compare_with_cpu(device, ours, plain, (64, 64), (5 * r, 64), (48, 5 * r))


# --- between ranks ---


def list_collective_tests(device: torch.device) -> dict[str, Callable[[], str]]:
    """Return tests over all ranks, and over each dimension of a mesh, which has its own communicator."""
    world = dist.get_world_size()
    groups: dict[str, Any] = {f"all {world} ranks": None}
    if world > 2 and world % 2 == 0:
        mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
        groups |= {f"{mesh[name].size()} ranks of {name}": mesh.get_group(name) for name in ("replicate", "shard")}
    return {f"collectives, {name}": partial(check_exchange, device, group) for name, group in groups.items()}


def check_exchange(device: torch.device, group: Any) -> str:
    """Test a collective against its known result, not against another collective."""
    world, rank, size = dist.get_world_size(group), dist.get_rank(group), 1 << 20
    if world == 1:
        raise Untested("one rank sends nothing")
    everyone = torch.arange(1.0, world + 1, device=device)
    mine, parts = everyone[rank].expand(size).clone(), everyone[:, None].expand(world, size)
    gathered, scattered, received = (torch.zeros(n, device=device) for n in (world * size, size, world * (rank + 1)))
    dist.all_gather_into_tensor(gathered, mine, group=group)
    dist.reduce_scatter_tensor(scattered, (parts + rank).flatten(), group=group)  # the sum of all ranks' numbers
    counts = [each + 1 for each in range(world)]
    sent = mine[:1].expand(sum(counts)).contiguous()
    dist.all_to_all_single(received, sent, [rank + 1] * world, counts, group=group)
    dist.all_reduce(mine, group=group)
    total = world * (world + 1) / 2
    off = {
        "all-reduce": mine - total,
        "all-gather": gathered.view(world, size) - parts,
        "reduce-scatter": scattered - world * (rank + 1) - total + world,
        "all-to-all": received.view(world, -1) - everyone[:, None],
    }
    if wrong := [name for name, difference in off.items() if difference.any()]:
        raise ArithmeticError(f"{', '.join(wrong)} gave wrong numbers")
    return f"{', '.join(off)} right with {size * 4 >> 20} MiB a rank"


# --- a tiny model ---


def train_here(
    here: Rank, folder: Path, name: str, layout: str, dtype: str, count: int
) -> tuple[list[dict[str, Any]], float]:
    """Train in this process as one of its ranks, as `windlass train` does. Returns its steps and the planned GiB."""
    path, cpu = folder / f"{name}-{here.rank}.yaml", "" if torch.cuda.is_available() else ", gpu: cpu"
    given = {"folder": folder, "name": name, "layout": layout, "dtype": dtype, "ranks": here.world, "gpu": cpu}
    path.write_text(RUN.format(**given, batch=2 * count))
    plan = planning.make_plan(runfile.read_run_file(path))
    gc.collect()  # what an earlier one left
    train_rank(plan, here)
    only_there = ("reserve", "fragmentation")  # nothing that torch counts
    rows = (row for row in plan.cost.rows if (row.phase, row.place) == ("step", "gpu") and row.item not in only_there)
    return read_steps(folder / name), sum(row.bytes for row in rows) / GIB


def largest_adapter_difference(one: Path, other: Path) -> float:
    """Return the largest difference between two runs' adapters of any kind. SGD keeps the error of gradients' sizes."""
    while not is_finished(one):  # rank 0 writes
        time.sleep(0.1)
    ours, theirs = (load_file(folder / FINAL / "adapter_model.safetensors") for folder in (one, other))
    kinds: dict[str, list[str]] = {}
    for name in sorted(theirs):
        if ".lora_B." in name:  # from zero, in steps of the gradient
            kinds.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(name)
    both = [
        [torch.cat([each[name].flatten() for name in names]) for each in (ours, theirs)] for names in kinds.values()
    ]
    return max(float((a - b).norm() / b.norm()) for a, b in both)


def read_steps(folder: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(folder / "steps-rank0.jsonl"))


def train_reference(here: Rank, folder: Path, dtype: str, count: int) -> str:
    steps, _ = train_here(here, folder, f"reference-{dtype}", "resident", dtype, count)
    return f"loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f} in {len(steps)} steps of one process"


def list_training_tests(here: Rank, folder: Path) -> dict[str, Callable[[], str]]:
    layouts = ("full-shard", "expert-parallel") if here.world > 1 else ("resident",)
    cases = [(layout, dtype) for layout in layouts for dtype in ("bf16", "fp8", "nf4")]
    return {
        f"training, {layout}, {dtype}": partial(compare_training, here, folder, layout, dtype)
        for layout, dtype in cases
    }


def compare_training(here: Rank, folder: Path, layout: str, dtype: str) -> str:
    """Compare each step's loss and gradient norm with the CPU's, and peak memory with the plan."""
    if layout == "expert-parallel" and EXPERTS % here.world:
        raise Untested(f"{here.world} ranks can't share {EXPERTS} experts")
    steps, planned = train_here(here, folder, f"{layout}-{dtype}", layout, dtype, here.world)
    by_cpu = folder / f"reference-{dtype if dtype in REFERENCES else REFERENCES[0]}"
    while not is_finished(by_cpu):  # this process is ended if it never is
        time.sleep(0.1)
    wanted, apart = read_steps(by_cpu), {}
    for what, close in (("loss", LOSS), ("grad_norm", NORM)):
        each = [abs(a[what] / b[what] - 1) for a, b in zip(steps, wanted, strict=True)]
        apart[what] = max(each)
        if not all(one <= close for one in each):  # NaN is not
            values = ", ".join(f"{a[what]:.4g} and {b[what]:.4g}" for a, b in zip(steps, wanted, strict=True))
            raise ArithmeticError(f"{what} here and on the CPU: {values}; {close:.0%} apart at most are noise")
    learned = largest_adapter_difference(folder / f"{layout}-{dtype}", by_cpu)
    if not learned <= ADAPTERS:
        raise ArithmeticError(f"an adapter is {learned:.0%} away from the CPU's; {ADAPTERS:.0%} at most is noise")
    seen = (
        f"loss within {apart['loss']:.2%} of the CPU's in {len(steps)} steps, gradients' norm {apart['grad_norm']:.1%}"
        f", adapters {learned:.1%}"
    )
    if not (peak := max((step.get("gpu_peak_gib", 0.0) for step in steps), default=0.0)):
        return seen
    seen += f"; peak {peak:.2f} GiB, planned {planned:.2f}"
    if peak > PLANNED * planned + WORKSPACE:
        raise Doubt(f"{seen}: more than {PLANNED:.0%} of it")
    return seen


if __name__ == "__main__":
    run_tests(Path(sys.argv[1]))
