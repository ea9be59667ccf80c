"""The base in FP8: the same numbers as in 16 bits, in half the bytes; and in 4 bits: the nearest codes."""

import contextlib
import importlib.util
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_experts import live, same, step
from torch import Tensor, nn

import windlass.settings
from windlass import tiny
from windlass.errors import SlowerWarning
from windlass.model import Base, read_base
from windlass.model.targets import resolve_adapter
from windlass.plan import memory
from windlass.plan.layout import Layout
from windlass.runfile import Lora
from windlass.settings import FOUR_BITS
from windlass.train.kernels import products
from windlass.train.kernels.products import QuantizedLinear, grouped_linear
from windlass.train.load import load_base
from windlass.train.lora import attach_adapter
from windlass.train.patches import Patches
from windlass.weights import certificate, four_bits, quantized
from windlass.weights.quantized import StoredFormat, dequantize

# PEFT asks for an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
E4M3 = torch.float8_e4m3fn
TRITON = Path(sys.prefix) / "triton"  # out of torch's sight, which would take it for a GPU's
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_codes(*shape: int, seed: int = 0) -> Tensor:
    """Return every code but the two NaN."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return torch.where((codes & 0x7F) == 0x7F, 0, codes)


def random_scale(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 1e-3


def truth(codes: Tensor, scale: Tensor, sides: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Decode element by element, in float64 before the float32 product is rounded, without the loader's code."""
    rows = torch.arange(codes.shape[-2]) // sides[0]
    columns = torch.arange(codes.shape[-1]) // sides[1]
    wide = codes.view(E4M3).double() * scale[..., rows, :][..., columns].double()
    return wide.float().to(dtype)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_part_of_any_parameter_is_exact(data: st.DataObject) -> None:
    draw = data.draw
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    sides = (draw(st.integers(1, 45)), draw(st.integers(1, 45)))
    codes = random_codes(2, rows, columns)
    scale = random_scale(2, math.ceil(rows / sides[0]), math.ceil(columns / sides[1]))
    dtype = draw(st.sampled_from(DTYPES))
    (top, bottom), (left, right) = (
        sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in (rows, columns)
    )
    got = dequantize(codes[:, top:bottom, left:right], scale, StoredFormat(E4M3, sides, dtype), dtype, (top, left))
    assert got.dtype == dtype
    assert torch.equal(got, truth(codes, scale, sides, dtype)[:, top:bottom, left:right])


@pytest.mark.parametrize("kind", ["", "nf4"])
def test_dequantize_is_one_operator_for_compilers_and_fake_tensors(kind: str) -> None:
    codes, block = random_codes(2, 6, 48)[:, 2:, 16:], (1, 64) if kind else (5, 7)
    scale = random_scale(2, 6, 2).bfloat16() if kind else random_scale(2, 2, 7)
    for dtype in DTYPES:
        given = codes, scale, torch.uint8 if kind else E4M3, kind, *block, dtype, 2, 32 if kind else 16
        torch.library.opcheck(torch.ops.windlass.dequantize.default, given)


def linear(dtype: torch.dtype, *, bias: bool = False) -> tuple[QuantizedLinear, nn.Linear]:
    """Return the same layer twice: in FP8, and in `dtype`."""
    form = StoredFormat(E4M3, (16, 16), dtype)
    plain = nn.Linear(40, 24, bias=bias, dtype=dtype)
    in_fp8 = QuantizedLinear(plain, form)
    in_fp8.weight.copy_(random_codes(24, 40))
    in_fp8.weight_scale.copy_(random_scale(2, 3))
    plain.weight.data = truth(in_fp8.weight, in_fp8.weight_scale, form.block, dtype)
    plain.weight.requires_grad_(False)
    return in_fp8, plain


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, tracing
@pytest.mark.parametrize("gradients", [False, True])
def test_an_adapted_quantized_linear_is_one_graph_with_and_without_gradients(gradients: bool) -> None:
    """Compiled layers are evaluated between steps: one that breaks there would run eagerly from then on."""
    layer, _ = linear(torch.float32)
    x = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(2))
    added = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3))
    traced = torch.compile(lambda x, added: layer(x, added * 2), backend="eager", fullgraph=True)
    with torch.set_grad_enabled(gradients):
        assert torch.equal(traced(x, added.requires_grad_(gradients)), layer(x, added * 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_quantized_linear_equals_the_16_bit_layer(dtype: torch.dtype, bias: bool) -> None:
    found = []
    for layer in linear(dtype, bias=bias):
        x = torch.randn(2, 5, 40, dtype=dtype, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        found.append((y, x.grad, None if layer.bias is None else layer.bias.grad))
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_a_linear_layer_keeps_its_codes_under_autocast_casts_and_backward() -> None:
    in_fp8, plain = linear(torch.float32)
    x = torch.randn(5, 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(in_fp8(x), plain(x))
        assert in_fp8(x).dtype == torch.bfloat16
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        in_fp8(x.requires_grad_())
    assert [tensor.data_ptr() for tensor in kept] == [in_fp8.weight.data_ptr(), in_fp8.weight_scale.data_ptr()]
    before = in_fp8.weight.clone()
    assert torch.equal(in_fp8.to(torch.bfloat16).weight, before)


SHAPE = (5, 40, 48)
OFFSETS = torch.tensor([3, 3, 10, 12, 12], dtype=torch.int32)  # of five experts two have no token


def experts(dtype: torch.dtype, kind: str = "") -> tuple[nn.Module, nn.Module]:
    """Return five experts twice: in FP8 with ragged blocks, or in 4 bits, and in `dtype`."""
    stored, plain = nn.Module(), nn.Module()
    if kind:
        form = StoredFormat(torch.uint8, (1, 64), dtype, kind, SHAPE[-1])
        quantized.to_quantized_param(stored, "gate_up_proj", torch.empty(SHAPE), form)
        weight = stored.get_parameter("gate_up_proj").data
        four_bits.quantize(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)), kind, weight)
        true = dequantize(*form.parts(weight, torch.empty(0)), form, dtype)
    else:
        form = StoredFormat(E4M3, (16, 32), dtype)
        quantized.to_quantized_param(stored, "gate_up_proj", torch.empty(SHAPE), form)
        codes, scale = random_codes(*SHAPE), random_scale(5, 3, 2)
        stored.get_parameter("gate_up_proj").copy_(codes)
        stored.get_buffer("gate_up_proj_scale").copy_(scale)
        true = truth(codes, scale, form.block, dtype)
    plain.gate_up_proj = nn.Parameter(true, requires_grad=False)
    return stored, plain


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute 16 of 40 columns at a time in 16 bits, including a ragged chunk."""
    monkeypatch.setattr(windlass.settings, "DEQUANTIZED_COLUMNS", 8)
    monkeypatch.setattr(windlass.settings, "DEQUANTIZED_BYTES", 5 * 48 * 2 * 16)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, ""), (torch.float32, ""), (torch.float32, "nf4")])
@pytest.mark.parametrize("way", ["multiply_one_by_one", "multiply_all"])
def test_grouped_products_equal_16_bit_ones(
    dtype: torch.dtype, kind: str, way: str, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "expert_products", getattr(products, way))
    found = []
    for module in experts(dtype, kind):
        x = torch.randn(12, 48, dtype=dtype, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y = grouped_linear(x, module, "gate_up_proj", OFFSETS)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
    for one, other in zip(*found, strict=True):
        # A matrix product of another width may add up in another order.
        size = float(other.abs().max()) if kind else 1.0
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * size if way == "multiply_all" else 0)
    if dtype == torch.bfloat16:  # wide inputs, as of a norm under autocast, are multiplied in the weights' dtype
        one, other = (
            grouped_linear(torch.randn(12, 48).fill_(0.3), m, "gate_up_proj", OFFSETS) for m in experts(dtype)
        )
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if way == "multiply_all" else 0)


@pytest.mark.parametrize("way", ["multiply_one_by_one", "multiply_all"])
def test_dequantized_bytes_match_the_plan(way: str, small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    alive: list[weakref.ref[torch.UntypedStorage]] = []

    def counted(codes: Tensor, *rest: Any) -> Tensor:
        assert all(one() is None for one in alive), "two at once"
        values = dequantize(codes, *rest)
        sizes.append(values.nbytes)
        alive.append(weakref.ref(values.untyped_storage()))
        return values

    monkeypatch.setattr(products, "dequantize", counted)
    monkeypatch.setattr(products, "expert_products", getattr(products, way))
    x = torch.randn(12, 48, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.grad(grouped_linear(x, experts(torch.bfloat16)[0], "gate_up_proj", OFFSETS).sum(), x)
    if way == "multiply_all":
        assert max(sizes) == memory.dequantized_bytes(SHAPE, 1, 2) <= windlass.settings.DEQUANTIZED_BYTES
        assert sum(sizes) == 2 * 2 * math.prod(SHAPE)
    else:  # only experts with tokens, forward and backward
        assert sizes == [2 * 40 * 48] * 2 * 3


# --- as on a GPU ---


def test_kernel_is_used_only_if_equal_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(codes: Tensor, *rest: Any) -> Tensor:
        values = quantized.dequantize_by_torch(codes, *rest)
        values.view(torch.int16)[1, 7, 100] += 1
        return values

    asked = torch.device("cpu"), E4M3, torch.bfloat16
    quantized.kernel_is_exact.cache_clear()
    with pytest.warns(SlowerWarning, match="weights in FP8 take two passes to read instead of one: "):
        assert not quantized.kernel_is_exact(*asked)  # there is no Triton, or no GPU for it
    for way, right in ((quantized.dequantize_by_torch, True), (off_by_one, False)):
        quantized.kernel_is_exact.cache_clear()
        monkeypatch.setattr(quantized, "dequantize_by_kernel", way)
        with contextlib.nullcontext() if right else pytest.warns(SlowerWarning, match="1 of 169344 values differ"):
            assert quantized.kernel_is_exact(*asked) is right
    quantized.kernel_is_exact.cache_clear()


KERNEL = """
import math, torch
from windlass.weights import dequantize_kernel
from windlass.weights.dequantize_kernel import dequantize_fp8
dice = torch.Generator().manual_seed(0)
every = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
for dtype in (torch.float32, torch.bfloat16):
    for bits in (True, False):
        dequantize_kernel.has_float8 = lambda device: not bits
        for kind in (torch.float8_e4m3fn, torch.float8_e5m2)[: 1 + bits]:  # all codes, with a GPU's float8 and without
            found, wanted = dequantize_fp8(every, torch.ones(1, 1, 1), kind, (1, 256), dtype, (0, 0)), every.view(kind)
            number = ~wanted.float().isnan()  # the interpreter's own float8 has other NaN
            assert torch.equal(found[number], wanted.to(dtype)[number]), (kind, bits)
            assert not bits or found[~number].isnan().all(), kind
    for sides in ((16, 128), (7, 5)):
        codes = torch.randint(0, 256, (3, 40, 1100), dtype=torch.uint8, generator=dice)
        codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)
        shape = 3, math.ceil(40 / sides[0]), math.ceil(1100 / sides[1])
        scale = torch.rand(shape, generator=dice) * 1e-3
        if dtype == torch.bfloat16:  # Triton's interpreter cuts off what a GPU rounds: nothing to round, then
            scale = torch.exp2(torch.randint(-9, 9, shape, generator=dice).float())
        down, across = torch.arange(40) // sides[0], torch.arange(1100) // sides[1]
        numbers = codes.view(torch.float8_e4m3fn).double()
        wanted = (numbers * scale[:, down][..., across].double()).float().to(dtype)
        for top, bottom, left, right in ((3, 37, 5, 999), (5, 5, 0, 10)):
            part = slice(None), slice(top, bottom), slice(left, right)
            found = dequantize_fp8(codes[part], scale, torch.float8_e4m3fn, sides, dtype, (top, left))
            assert torch.equal(found, wanted[part]), (dtype, sides, part)
            one = dequantize_fp8(codes[part][1], scale[1], torch.float8_e4m3fn, sides, dtype, (top, left))
            assert torch.equal(one, found[1])
"""
KERNEL += """
from windlass.settings import FOUR_BITS
from windlass.weights import four_bits
from windlass.weights.dequantize_kernel import dequantize_four_bits
far = torch.empty(3 * 2**30 + 64, dtype=torch.uint8)  # four rows of it are touched: more than 2^31 elements apart
table, scale = four_bits.code_table("nf4", far.device), torch.ones(4, 4, 1, dtype=torch.bfloat16)
for shape, strides in (((4, 1, 16), (2**30, 16, 1)), ((1, 4, 16), (64, 2**30, 1))):
    part = far.as_strided(shape, strides).copy_(torch.randint(0, 120, shape, dtype=torch.uint8, generator=dice))
    found = dequantize_fp8(part, torch.ones(shape[0], 1, 1), torch.float8_e4m3fn, (4, 16), torch.float32, (0, 0))
    assert torch.equal(found, part.view(torch.float8_e4m3fn).float())
    found = dequantize_four_bits(part, scale[: shape[0]], None, table, 64, torch.float32, 0)
    assert torch.equal(found, four_bits.decode_codes(part, scale[: shape[0]], 64, "nf4")), shape
rows = torch.empty(3, 41, four_bits.row_bytes(1100, 64), dtype=torch.uint8)
values = torch.randn(3, 41, 1100, generator=torch.Generator().manual_seed(0)).bfloat16().float()
four_bits.quantize(values, "nf4", rows)
codes, scale = four_bits.split_rows(rows, 1100)
wanted = four_bits.decode_codes(codes, scale, 64, "nf4")
for top, bottom, left, right in ((3, 37, 128, 998), (5, 5, 0, 128)):
    part = codes[:, top:bottom, left // 2:right // 2]
    found = dequantize_four_bits(part, scale[:, top:bottom], None, table, 64, torch.float32, left)
    assert torch.equal(found, wanted[:, top:bottom, left:right]), (top, left)
    part = codes[1, top:bottom, left // 2:right // 2]
    one = dequantize_four_bits(part, scale[1, top:bottom], None, table, 64, torch.float32, left)
    assert torch.equal(one, found[1])
for kind, side, dtype in (("mxfp4", 32, torch.bfloat16), ("nf4", 64, torch.float32)):  # as published: read, never made
    rows = torch.randint(0, 256, (2, 41, four_bits.row_bytes(2112, side, dtype)), dtype=torch.uint8, generator=dice)
    codes, scale = four_bits.split_rows(rows, 2112, dtype)
    numbers = torch.rand(scale.shape, generator=dice)
    scale.copy_((20 * numbers - 10).round().exp2() if side == 32 else numbers)
    units = torch.tensor(FOUR_BITS[kind].numbers)[torch.stack([codes >> 4, codes & 15], -1).flatten(-2).long()]
    wanted = units * scale.float().repeat_interleave(side, -1)
    assert torch.equal(four_bits.decode_codes(codes, scale, side, kind), wanted), kind
    part, table = codes[:, 3:37, 64:999], four_bits.code_table(kind, codes.device)
    found = dequantize_four_bits(part, scale[:, 3:37], None, table, side, torch.float32, 128)
    assert torch.equal(found.view(torch.int32), wanted[:, 3:37, 128:1998].view(torch.int32)), kind
for kind, side, dtype in (("nvfp4", 16, torch.uint8), ("int4", 32, torch.float16), ("uint4", 64, torch.bfloat16)):
    behind = four_bits.make_behind(torch.rand(2, 41, 2112 // side, generator=dice) + 0.1, kind, dtype)
    codes = torch.randint(0, 256, (2, 41, 1056), dtype=torch.uint8, generator=dice)
    wanted, table = four_bits.decode_codes(codes, behind, side, kind), four_bits.code_table(kind, codes.device)
    scale, zeros, left = four_bits.read_scales(behind, kind, side, (3, 128, 34, 1870))
    assert (zeros is None) == (kind != "uint4")
    found = dequantize_four_bits(codes[:, 3:37, 64:999], scale, zeros, table, side, torch.float32, left)
    assert torch.equal(found, wanted[:, 3:37, 128:1998]), kind
"""
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from windlass.weights import dequantize_kernel as kernel
tiles = {"high": kernel.ROWS, "wide": kernel.COLUMNS}
pointers = {"codes": "*u8", "scale": "*fp32", "table": "*fp32", "values": "*bf16"}
strides = ("expert_stride", "row_stride", "rows", "columns")
for architecture, exponents, side in ((80, (4, 5), 32), (90, (0, 0), 64)):
    scales = ("*bf16", "*fp32")[: 1 + (side == 64)]
    versions = [
        (kernel._four_bits_kernel, {"side": side, "shifted": shifted}, {"scale": scale, "zeros": scale})
        for scale in scales
        for shifted in (False, True)
    ]
    for number, exponent in enumerate(exponents):
        given = {"scale_rows": 1, "scale_columns": 1} if number == 0 else {}
        given |= {"one": number == 0, "exponent": exponent}
        versions.append((kernel._fp8_kernel, given, {} if exponent else {"codes": "*fp8e4nv"}))
    for function, given, kinds in versions:
        names, given = function.arg_names, given | tiles  # a number that is 1 is a constant for Triton
        kinds = pointers | kinds | dict.fromkeys(given, "constexpr")
        signature = {name: kinds.get(name, "i32") for name in names}
        wide = [name for name in names if kinds.get(name, "").startswith("*") or name in strides]
        known = {(names.index(name),): [["tt.divisibility", 16]] for name in wide}
        source = ASTSource(function, signature, given, known)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
        assert made.asm["cubin"]
        ptx = made.asm["ptx"]
        assert ".ftz" not in ptx and "fma.rn.f32" not in ptx, given  # denormals stay, and all is rounded once
        assert "st.global.v4" in ptx, given
        if given.get("exponent") == 0:
            for wanted in ("cvt.rn.f16x2.e4m3x2", "mul.f32", "cvt.rn.bf16x2.f32", "ld.global.v4"):
                assert wanted in ptx, wanted
"""


@pytest.mark.long
@pytest.mark.parametrize("script", [KERNEL, COMPILED], ids=["interpreted", "compiled"])
def test_kernel_equals_torch_bit_for_bit(script: str, tmp_path: Path) -> None:
    """By Triton's interpreter, and compiled as far as possible here. Only a GPU can show that its bits are these."""
    if importlib.util.find_spec("triton") is None and not TRITON.exists():
        pytest.skip(
            f"Triton comes with torch's CUDA builds; without one `make test` installs it in {TRITON}, if it can"
        )
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(TRITON))))
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": str(int(script is not COMPILED))}
    environ["PYTHONPATH"] = path
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


# --- its adapter ---


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return read_base(tiny.write_model(tmp_path_factory.mktemp("fp8") / "published", experts=4, tokenizer=False))


def adapted(base: Base, base_dtype: str, **printed: object) -> dict[str, Tensor]:
    """Return the adapter before the first step, on a BF16 base."""
    layout = Layout("resident", "test", 1, 1, shard=1, base_dtype=base_dtype)
    lora = Lora.model_validate({"r": 4, "lora_dropout": 0, "target_modules": "all-linear", **printed})
    attached = attach_adapter(load_base(base, layout)[0], lora, resolve_adapter(lora, base, lambda key: key), seed=1)
    return {name: tensor for name, tensor in attached.named_parameters() if tensor.requires_grad}


def test_adapter_equals_one_trained_on_16_bits(published: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT rounds initial values to the base's dtype: in bytes nothing would be left of them."""
    wide, narrow = (adapted(published, base, experts={"r": 2}) for base in ("bf16", "fp8"))
    assert wide.keys() == narrow.keys()
    assert any("experts" in name for name in wide)
    for name, tensor in wide.items():
        assert torch.equal(tensor, narrow[name]), name
        assert tensor.any() or "lora_B" in name
    original = QuantizedLinear.__init__

    def forgetful(self: QuantizedLinear, plain: nn.Linear, form: StoredFormat) -> None:
        """The planted fault."""
        original(self, plain, form)
        del self.compute_dtype

    monkeypatch.setattr(QuantizedLinear, "__init__", forgetful)
    rounded = adapted(published, "fp8", experts={"r": 2})
    assert any(not torch.equal(tensor, rounded[name]) for name, tensor in wide.items())
    for base_dtype in ("fp8", "nf4"):
        with pytest.raises(AssertionError, match="or quantized"):
            adapted(published, base_dtype, use_dora=True)


def test_fused_adapters_have_the_gradients_of_separate_ones(published: Base) -> None:
    """A GPU's code path, forced on a CPU."""
    layout = Layout("resident", "test", 1, 1, shard=1, base_dtype="fp8")
    lora = Lora.model_validate({"r": 4, "lora_dropout": 0, "target_modules": "all-linear", "experts": {"r": 2}})
    base = load_base(published, layout, dtype=torch.float32)[0]
    model = live(attach_adapter(base, lora, resolve_adapter(lora, published, lambda key: key), seed=1), 0.05)
    separate = step(model)
    model.zero_grad()
    with Patches() as patches:
        adapters = patches.fuse_layers(model, always=True)
        layers = [layer.get_base_layer() for group in adapters.groups for layer in group.layers]
        assert any(isinstance(layer, QuantizedLinear) for layer in layers)
        with adapters.unchanged():
            same(step(model), separate)


# --- 4 bits ---

# bitsandbytes 0.50.2's quantize_4bit of `patterned()`, nf4 in blocks of 64: codes, and each block's scale.
GOLDEN = (
    "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c1"
    "81d61c4fa2e81d50b3f92e71d50b3f81e61c4fa2e81d50c3f92e71d50b3f92e6"
)
GOLDEN_SCALES = [1.0, 1.546875]


def patterned() -> Tensor:
    """Return two rows of numbers that BF16 can express."""
    steps = ((torch.arange(128) * 37 % 101) - 50).view(2, 64).float()
    return (steps * torch.tensor([[0.02], [-0.031]])).bfloat16().float()


def test_nf4_equals_bitsandbytes() -> None:
    rows = torch.empty(2, four_bits.row_bytes(64, 64), dtype=torch.uint8)
    four_bits.quantize(patterned(), "nf4", rows)
    codes, scale = four_bits.split_rows(rows, 64)
    assert bytes(codes.flatten().tolist()).hex() == GOLDEN
    assert scale.flatten().tolist() == GOLDEN_SCALES


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_4_bit_codes_are_nearest_and_any_part_decodes_equally(data: st.DataObject) -> None:
    draw = data.draw
    kind, columns = "nf4", 4 * draw(st.integers(1, 40))
    coding = StoredFormat(torch.uint8, (1, FOUR_BITS[kind].block), torch.float32, kind, columns)
    values = torch.randn(2, 5, columns, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    values *= draw(st.sampled_from([1e-30, 1.0, 0.0]))
    rows = torch.empty(2, 5, four_bits.row_bytes(columns, coding.block[1]), dtype=torch.uint8)
    changed, size = four_bits.quantize(values, kind, rows).tolist()
    codes, scale = coding.parts(rows, torch.empty(0))
    whole = dequantize(codes, scale, coding, torch.float32)
    assert changed == pytest.approx(float((whole - values).square().sum(dtype=torch.float64)), rel=1e-9)
    assert size == 0 or math.sqrt(changed / size) < 0.13
    for row, true in zip(rows.flatten(0, 1), values.flatten(0, 1), strict=True):
        assert certificate.is_nearest(row, true.double(), coding)
    left = 2 * draw(st.integers(0, columns // 2 - 1))
    part = dequantize(codes[:, 2:4, left // 2 :], scale, coding, torch.float32, (2, left))
    assert torch.equal(part, whole[:, 2:4, left:])
    place = draw(st.integers(0, columns // 2 - 1))
    if size:  # the fault that the certificate is for
        rows[1, 3, place] ^= 0x22
        assert not certificate.is_nearest(rows[1, 3], values[1, 3].double(), coding)


def test_4_bit_errors_equal_the_plans() -> None:
    values = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0))
    for kind, four in ((kind, four) for kind, four in FOUR_BITS.items() if four.error):  # mxfp4 is never made
        rows = torch.empty(256, four_bits.row_bytes(4096, four.block), dtype=torch.uint8)
        changed, size = four_bits.quantize(values, kind, rows).tolist()
        assert math.sqrt(changed / size) == pytest.approx(four.error, abs=5e-4)
        assert rows.numel() / values.numel() == four.bytes
