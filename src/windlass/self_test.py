"""`windlass check --self-test`: does this machine compute what windlass expects?

Parts of a training step are compared with plain torch on the CPU in float32, collectives with known results. Then a
tiny mixture trains for a few steps in each way that the devices support, compared with one process on the CPU. Each
rank writes results at once: if a kernel kills its process, the test it was in is known.
"""

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
from contextlib import suppress
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

from windlass import hardware, tiny
from windlass.errors import UserError, require_writable
from windlass.files import append_json_line, read_json_lines, write_json
from windlass.hardware import GIB
from windlass.launch.check.results import FAIL, STYLES, CheckReport, Result, failed, passed, skipped, warned
from windlass.observe.counters import describe_machine
from windlass.observe.format import format_plural
from windlass.plan import make_plan
from windlass.plan.machine import write_machine
from windlass.ranks import supervisor
from windlass.ranks.place import Node
from windlass.ranks.rank import Rank, read_rank
from windlass.run_folder import ADAPTER, FINAL, STEPS, is_finished
from windlass.runfile import read_run_file
from windlass.settings import FOUR_BITS
from windlass.train import fsdp
from windlass.train.connect import create_process_group
from windlass.train.experts import experts
from windlass.train.head import ChunkedCrossEntropy
from windlass.train.kernels import compare, documents, family_layers, products
from windlass.train.kernels.lora_linear import check_lora_linears
from windlass.train.run import train_rank
from windlass.weights import four_bits, quantized
from windlass.weights.expert_shards import view_by_expert
from windlass.weights.reading import DTYPES

LIMIT_SECONDS: Final = 170.0
COMMAND: Final = (sys.executable, "-m", "windlass.self_test")
CLOSE: Final = 0.02  # relative, of bfloat16 on a device to float32 on the CPU
# Relative, to the CPU's: tokens change sides between near experts.
CLOSE_LOSS: Final = 0.01
CLOSE_NORM: Final = 0.1  # of the gradient
CLOSE_ADAPTERS: Final = 0.3  # of one kind
# A larger peak than so many times the planned one, and cuBLAS's own workspace, is a warning.
OVER_PLAN: Final = 1.25
WORKSPACE_GIB: Final = 0.0625
EXPERTS: Final = 8
BEGUN: Final = "did not end"
PACKED: Final = ("mxfp4", "published nf4", "nvfp4", "uint4")  # read, and never made
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
cluster: {{nodes: 1, gpus_per_node: {ranks}, gpu: {gpu}, machine: {machine}}}
"""


class NotApplicable(Exception):  # noqa: N818
    """Why a test does not apply here."""


class DiffersFromPlan(Exception):  # noqa: N818
    """A correct result that differs from the plan."""


# --- the process that a user starts ---


def run(environ: Mapping[str, str], file: Path, say: Callable[[str], None]) -> CheckReport:
    """Test this machine's GPUs, or its CPU with two ranks, and write the file."""
    began = time.monotonic()
    seen = hardware.read_gpus()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = format_plural(gpus, "GPU") if gpus else "this CPU with 2 ranks"
    say(f"testing {devices}: takes a minute, {LIMIT_SECONDS:.0f} s at most")
    if gpus:
        results = [passed("GPUs", f"{gpus} x {torch.cuda.get_device_name(0)}")]
    elif seen.gpus:
        problem = f"{len(seen.gpus)} GPUs, and torch {torch.__version__} can use none"
        results = [failed("GPUs", problem, "see `windlass check run.yaml --here`")]
    else:
        results = [skipped("GPUs", f"none tested: {seen.error}; below is this CPU")]
    with tempfile.TemporaryDirectory(prefix="windlass-self-test-") as name:
        folder = Path(name)
        tiny.write_model(folder / "model", hidden=256, experts=EXPERTS, vocab=1024, config={"initializer_range": 0.1})
        texts = (text for page in topics.values() for text in page.split("\n\n") if len(text) > 300)
        rows = [json.dumps({"text": text}) + "\n" for text in texts][: 2 * 5 * max(2, gpus)]
        (folder / "rows.jsonl").write_text("".join(rows))
        results += run_in_ranks(folder, gpus or 2, environ, began + LIMIT_SECONDS)
    report = CheckReport("self-test", tuple(results), seconds=time.monotonic() - began)
    facts = {key: value for key, value in describe_machine().items() if key != "host"}
    with require_writable(file, "start it in another folder"):
        write_json(file, {**report.as_dict(), "machine": facts})
    say(f"written to {file}")
    return report


def run_in_ranks(folder: Path, count: int, environ: Mapping[str, str], until: float) -> list[Result]:
    """Run a rank on each device, and a process that trains the reference on the CPU."""
    with supervisor.reserve_port() as port, supervisor.reserve_port() as cpu_port:
        on_cpu = {**environ, "CUDA_VISIBLE_DEVICES": "", CPU_ALONE: str(count)}
        environments = [
            *supervisor.make_environments(1, on_cpu, Node(port=cpu_port)),
            *supervisor.make_environments(count, environ, Node(port=port)),
        ]
        codes = supervisor.run_processes([*COMMAND, str(folder)], environments, folder, until, grace=5)
    return merge_results(folder, codes)


def merge_results(folder: Path, codes: Sequence[int | None]) -> list[Result]:
    """Return the worst result of each test. If a process died, the test that it was in has failed."""
    by_test: dict[str, list[Result]] = {}
    for number, code in enumerate(codes):  # 0 is the CPU's, the ranks follow
        path = folder / f"results-{number}.jsonl"
        results: dict[str, Result] = {}
        if path.exists():
            results = {line["name"]: Result(**line) for line in read_json_lines(path)}
        if code:
            last_line = supervisor.read_last_line(folder / f"output-{number}")
            name = next((name for name, result in results.items() if result.seen == BEGUN), "start")
            problem = f"its process ended with {code}: {last_line[-300:]}"
            results[name] = failed(name, problem, _meaning(name))
        for name, result in results.items():
            if result.seen == BEGUN and any(codes):  # it waited for the one that died
                continue
            names_rank = result.verdict == FAIL and number > 0 and len(codes) > 2
            node = f"rank {number - 1}" if names_rank else ""
            by_test.setdefault(name, []).append(replace(result, node=node))
    worst_last = list(STYLES)
    return [max(results, key=lambda result: worst_last.index(result.verdict)) for results in by_test.values()]


def _meaning(name: str) -> str:
    return next((hint for begins, hint in MEANS.items() if name.startswith(begins)), WRONG)


# --- one rank ---


def run_tests(folder: Path) -> None:
    """Run all tests of this rank, or the CPU's part."""
    warnings.simplefilter("ignore")
    signal.alarm(math.ceil(LIMIT_SECONDS) + 10)  # ends this process even if the one that started it was killed
    here = read_rank(os.environ)
    assert here is not None
    create_process_group(here, 60)
    tests: dict[str, Callable[[], str]] = {}
    cpu_alone = os.environ.get(CPU_ALONE)
    if cpu_alone:
        path = folder / "results-0.jsonl"
        for dtype in REFERENCES:
            tests[f"reference on the CPU, {dtype}"] = partial(train_reference, here, folder, dtype, int(cpu_alone))
    else:
        path = folder / f"results-{here.rank + 1}.jsonl"
        device = fsdp.get_device()
        tests = list_tests(device) | list_collective_tests(device) | list_training_tests(here, folder)
    for name, test in tests.items():
        append_json_line(path, asdict(failed(name, BEGUN, _meaning(name))))
        append_json_line(path, asdict(run_test(name, test)))
    torch.distributed.destroy_process_group()


def run_test(name: str, test: Callable[[], str]) -> Result:
    try:
        return passed(name, test())
    except NotApplicable as why_not:
        return skipped(name, str(why_not))
    except UserError as refusal:
        if any(problem.code != "too-old" for problem in refusal.problems):
            raise
        return skipped(name, refusal.problems[0].problem)
    except DiffersFromPlan as difference:
        return warned(name, str(difference), SEND)
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
        "attention by document": partial(check_documents, device),
        "norm": partial(check_norm, device),
        "loss": partial(check_head_loss, device),
        "fused layers": partial(check_fused_layers, device),
        "FP8 decoding": partial(check_decoding, device, ""),
        **{f"4 bits decoding, {kind}": partial(check_decoding, device, kind) for kind in ("nf4", *PACKED)},
        **{f"grouped products, {dtype}": partial(check_grouped, device, dtype) for dtype in ("bf16", "FP8", "nf4")},
        "experts with adapters": partial(check_adapted_experts, device),
    }


def compare_with_cpu(
    device: torch.device, ours: Callable[..., Tensor], plain: Callable[..., Tensor], *shapes: tuple[int, ...]
) -> str:
    """Compare values and gradients in bfloat16 on the device with the plain function's in float32 on the CPU."""
    dice = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=dice).bfloat16() for shape in shapes]
    on_device = compare.compute_values(ours, [value.to(device) for value in inputs])
    on_cpu = compare.compute_values(plain, [value.float() for value in inputs])
    distances = [
        float((value.cpu().float() - expected).norm() / expected.norm().clamp(min=1e-12))
        for value, expected in zip(on_device, on_cpu, strict=True)
    ]
    if not max(distances) < CLOSE:
        raise ArithmeticError(f"{max(distances):.2g} away from torch's float32 on the CPU, {CLOSE:g} allowed")
    return f"within {max(distances):.1e} of torch's float32 on the CPU"


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
        name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
        raise NotApplicable(f"torch has none for {name}") from None


def check_documents(device: torch.device) -> str:
    if device.type == "cpu":
        raise NotApplicable("our kernel is for GPUs")
    try:
        distance = documents.compare_documents(device)
    except documents.ABSENT as error:
        raise NotApplicable(f"packed rows are masked: {str(error).splitlines()[0]}") from None
    if not distance < documents.CLOSE:
        raise ArithmeticError(f"{distance:.2g} away from each document by itself, {documents.CLOSE:g} allowed")
    return f"within {distance:.1e} of each document by itself"


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
    head = compare.make_numbers(torch.device("cpu"), 999, 64).bfloat16()
    targets = torch.arange(77) * 7

    def ours(hidden: Tensor) -> Tensor:
        total, _ = ChunkedCrossEntropy.apply(hidden, head.to(device), targets.to(device))  # type: ignore[no-untyped-call]
        return total  # type: ignore[no-any-return]

    def plain(hidden: Tensor) -> Tensor:
        return functional.cross_entropy(hidden @ head.float().t(), targets, reduction="sum")

    return compare_with_cpu(device, ours, plain, (77, 64))


def check_fused_layers(device: torch.device) -> str:
    """Test what training uses in place of the layers of a mixture with latent attention: used only if values are
    equal."""
    with torch.device("meta"):
        sizes = {"hidden_size": 64, "n_routed_experts": 8, "num_hidden_layers": 1, "vocab_size": 64}
        model = Mistral4ForCausalLM(Mistral4Config(**sizes, q_lora_rank=32, kv_lora_rank=32))
    modules = list(model.modules())
    names = vars(sys.modules[type(model).__module__])
    rotations = [(names[name], ours) for name, ours in family_layers.POSITIONS.items() if name in names]
    is_equal = {
        "norms": any(family_layers.fuse_norm(module, device) for module in modules),
        "routers": any(family_layers.fuse_router(module, device) for module in modules),
        "keys": all(family_layers.check_keys(module, device) for module in modules if hasattr(module, "expand_kv")),
        "rotary positions": all(family_layers.check_rotation(plain, ours, device) for plain, ours in rotations),
        "adapted linear layers": check_lora_linears(device),
    }
    differing = [name for name, equal in is_equal.items() if not equal]
    if differing:
        raise ArithmeticError(f"{', '.join(differing)} differ from plain operations on this device")
    return f"{', '.join(is_equal)} equal plain operations to {compare.CLOSE:g}"


def make_codes(kind: str, device: torch.device) -> tuple[quantized.StoredFormat, Tensor, Tensor, Tensor]:
    """Return a stack of weights in FP8 or 4 bits on the device, as a module has it, and its values in float32 on the
    CPU."""
    cpu = torch.device("cpu")
    count = 5
    rows = 48
    columns = 384
    values = compare.make_numbers(cpu, count, rows, columns).bfloat16().float()
    if not kind:
        coding = quantized.StoredFormat(torch.float8_e4m3fn, (16, 128), torch.bfloat16)
        codes = values.to(coding.codes)
        scale = compare.make_numbers(cpu, count, 3, 3).abs() + 0.1
        decoded = codes.float() * scale.repeat_interleave(16, 1).repeat_interleave(128, 2)[..., :columns]
        return coding, codes.view(torch.uint8).to(device), scale.to(device), decoded
    form = FOUR_BITS[kind.split()[-1]]
    block = form.block
    dtype = DTYPES[form.kept] if kind in PACKED and form.kept else torch.bfloat16
    coding = quantized.StoredFormat(torch.uint8, (1, block), torch.bfloat16, kind.split()[-1], columns, dtype)
    codes = torch.empty(count, rows, four_bits.row_bytes(columns, block, dtype, coding.kind), dtype=torch.uint8)
    code_bytes, behind = four_bits.split_rows(codes, columns, dtype)
    if kind not in PACKED:
        four_bits.quantize(values, kind, codes)
    else:
        code_bytes.copy_(torch.arange(code_bytes.numel()).view_as(code_bytes) % 251)
        first = values[..., ::block]  # of each block
        scales = first.round().exp2() if kind == "mxfp4" else first.abs() + 0.1
        behind.copy_(four_bits.make_behind(scales, coding.kind, dtype))
    scales, zeros, _ = four_bits.read_scales(behind, coding.kind, block, (0, 0, rows, columns))
    indices = torch.stack([code_bytes >> 4, code_bytes & 15], -1).flatten(-2).long()
    units = four_bits.code_table(coding.kind, cpu)[indices]
    if zeros is not None:
        units -= zeros.float().repeat_interleave(block, -1)[..., :columns]
    decoded = units * scales.float().repeat_interleave(block, -1)[..., :columns]
    return coding, codes.to(device), torch.empty(0), decoded


def check_decoding(device: torch.device, kind: str) -> str:
    """Test decoding bit for bit; on a GPU with our kernel, which is not used where it differs from torch's passes."""
    coding, codes, scale, expected = make_codes(kind, device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantized.kernel_is_exact.cache_clear()
        codes, scale = coding.parts(codes, scale)
        decoded = quantized.dequantize(codes, scale, coding, torch.bfloat16).cpu()
    differing = int((decoded != expected.bfloat16()).sum())
    if differing:
        raise ArithmeticError(f"{differing} of {expected.numel()} values differ from torch's on the CPU")
    if device.type == "cuda" and caught:
        raise ArithmeticError(f"right, but {caught[0].message}")
    way = "our kernel" if device.type == "cuda" else "torch: our kernel is for GPUs"
    return f"equal to torch's on the CPU, bit for bit, by {way}"


def check_grouped(device: torch.device, dtype: str) -> str:
    """Test each expert's rows times its own matrix; one expert has none."""
    ends = torch.tensor([7, 7, 40, 41, 64])
    module: Any = nn.Module()
    coding, codes, scale, matrices = make_codes("nf4" if dtype == "nf4" else "", device)
    if dtype == "bf16":
        matrices = compare.make_numbers(torch.device("cpu"), 5, 48, 384).bfloat16().float()
        module.weight = matrices.to(device, torch.bfloat16)
    else:
        module.weight = codes
        module.weight_scale = scale
        module.formats = {"weight": coding}

    def ours(x: Tensor) -> Tensor:
        return products.grouped_linear(x, module, "weight", ends.to(device, torch.int32))

    def plain(x: Tensor) -> Tensor:
        rows = torch.tensor_split(x, ends[:-1])
        return torch.cat([part @ matrix.t() for part, matrix in zip(rows, matrices, strict=True)])

    return compare_with_cpu(device, ours, plain, (64, 384))


def check_adapted_experts(device: torch.device) -> str:
    """Test unmerged adapters of r = 3, which grouped kernels need padded."""
    edges = torch.tensor([0, 7, 7, 40, 41, 64])
    r = 3
    scaling = 0.5

    def ours(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        arguments = x, x.detach(), lambda rows: rows, edges.to(device, torch.int32), a, b, scaling
        total: Tensor = experts._LowRank.apply(*arguments)  # type: ignore[no-untyped-call]
        return total

    def plain(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a_by_expert = view_by_expert(".lora_A.", a, 5)
        b_by_expert = view_by_expert(".lora_B.", b, 5)
        parts = enumerate(torch.tensor_split(x, edges[1:-1]))
        return torch.cat([scaling * (part @ a_by_expert[i].t()) @ b_by_expert[i] for i, part in parts])

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
    world = dist.get_world_size(group)
    rank = dist.get_rank(group)
    size = 1 << 20
    if world == 1:
        raise NotApplicable("one rank sends nothing")
    everyone = torch.arange(1.0, world + 1, device=device)
    mine = everyone[rank].expand(size).clone()
    parts = everyone[:, None].expand(world, size)
    gathered = torch.zeros(world * size, device=device)
    scattered = torch.zeros(size, device=device)
    received = torch.zeros(world * (rank + 1), device=device)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    dist.reduce_scatter_tensor(scattered, (parts + rank).flatten(), group=group)  # the sum of all ranks' numbers
    counts = [*range(1, world + 1)]
    sent = mine[:1].expand(sum(counts)).contiguous()
    dist.all_to_all_single(received, sent, [rank + 1] * world, counts, group=group)
    dist.all_reduce(mine, group=group)
    total = world * (world + 1) / 2
    differences = {
        "all-reduce": mine - total,
        "all-gather": gathered.view(world, size) - parts,
        "reduce-scatter": scattered - world * (rank + 1) - total + world,
        "all-to-all": received.view(world, -1) - everyone[:, None],
    }
    wrong = [name for name, difference in differences.items() if difference.any()]
    if wrong:
        raise ArithmeticError(f"{', '.join(wrong)} gave wrong numbers")
    return f"{', '.join(differences)} right with {size * 4 >> 20} MiB a rank"


# --- a tiny model ---


def train_here(
    here: Rank, folder: Path, name: str, layout: str, dtype: str, count: int
) -> tuple[list[dict[str, Any]], float]:
    """Train in this process as one of its ranks, as `windlass train` does. Returns its steps and the planned GiB."""
    path = folder / f"{name}-{here.rank}.yaml"
    figures: Any = "cpu"
    if torch.cuda.is_available():  # of a GPU that is not in the table, a plan needs only the memory
        seen = torch.cuda.get_device_properties(0)
        figures = {"name": seen.name, "memory_gib": seen.total_memory / GIB}
        figures |= {"bf16_tflops": 100, "memory_gb_per_second": 1000}
        with suppress(UserError):
            figures = hardware.find_gpu(seen.name).name
    gpu = hardware.find_gpu(figures)
    link = hardware.FABRICS["memory"]
    machine = path.with_suffix(".json")  # instead of this host's own, which may be wrong
    write_machine(machine, gpu.name, here.world, {}, hardware.derive_rates(gpu, link, link, link, 1))
    text = RUN.format(
        folder=folder,
        name=name,
        batch=2 * count,
        layout=layout,
        dtype=dtype,
        ranks=here.world,
        gpu=json.dumps(figures),
        machine=machine,
    )
    path.write_text(text)
    plan = make_plan(read_run_file(path))
    gc.collect()  # what an earlier one left
    train_rank(plan, here)
    rows = [row for row in plan.cost.rows if (row.phase, row.place) == ("step", "gpu")]
    uncounted = ("reserve", "fragmentation")  # by torch
    return read_steps(folder / name), sum(row.bytes for row in rows if row.item not in uncounted) / GIB


def largest_adapter_difference(run: Path, reference: Path) -> float:
    """Return the largest difference between two runs' adapters of any kind. SGD keeps the error of gradients' sizes."""
    while not is_finished(run):  # rank 0 writes
        time.sleep(0.1)
    adapter = load_file(run / FINAL / ADAPTER)
    expected = load_file(reference / FINAL / ADAPTER)
    by_kind: dict[str, list[str]] = {}
    for name in sorted(expected):
        if ".lora_B." in name:  # from zero, in steps of the gradient
            by_kind.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(name)
    distances = []
    for names in by_kind.values():
        b = torch.cat([adapter[name].flatten() for name in names])
        expected_b = torch.cat([expected[name].flatten() for name in names])
        distances.append(float((b - expected_b).norm() / expected_b.norm()))
    return max(distances)


def read_steps(folder: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(folder / STEPS.format(rank=0)))


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
        raise NotApplicable(f"{here.world} ranks can't share {EXPERTS} experts")
    steps, planned = train_here(here, folder, f"{layout}-{dtype}", layout, dtype, here.world)
    reference = folder / f"reference-{dtype if dtype in REFERENCES else REFERENCES[0]}"
    while not is_finished(reference):  # this process is ended if it never is
        time.sleep(0.1)
    expected = read_steps(reference)
    distance: dict[str, float] = {}
    for field, close in (("loss", CLOSE_LOSS), ("grad_norm", CLOSE_NORM)):
        pairs = [(step[field], on_cpu[field]) for step, on_cpu in zip(steps, expected, strict=True)]
        distances = [abs(value / on_cpu - 1) for value, on_cpu in pairs]
        distance[field] = max(distances)
        if not all(value <= close for value in distances):  # NaN is not
            values = ", ".join(f"{value:.4g} and {on_cpu:.4g}" for value, on_cpu in pairs)
            raise ArithmeticError(f"{field} here and on the CPU: {values}; {close:.0%} apart at most are noise")
    learned = largest_adapter_difference(folder / f"{layout}-{dtype}", reference)
    if not learned <= CLOSE_ADAPTERS:
        raise ArithmeticError(f"an adapter is {learned:.0%} away from the CPU's; {CLOSE_ADAPTERS:.0%} at most is noise")
    seen = f"loss within {distance['loss']:.2%} of the CPU's in {len(steps)} steps"
    seen += f", gradients' norm {distance['grad_norm']:.1%}, adapters {learned:.1%}"
    peak = max((step.get("gpu_peak_gib", 0.0) for step in steps), default=0.0)
    if not peak:
        return seen
    seen += f"; peak {peak:.2f} GiB, planned {planned:.2f}"
    if peak > OVER_PLAN * planned + WORKSPACE_GIB:
        raise DiffersFromPlan(f"{seen}: more than {OVER_PLAN:.0%} of it")
    return seen


if __name__ == "__main__":
    run_tests(Path(sys.argv[1]))
