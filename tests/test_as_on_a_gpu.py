"""The branches taken only on a GPU, run with tensors that have a device, a shape and strides but no memory.

Checks what kernels require of shapes, dtypes and strides, not what they compute. Autograd's engine needs a real device,
so backwards are called by hand.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_experts import BOTH, base, ours_of, stack_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from windlass import settings
from windlass.train.experts import experts
from windlass.train.kernels import products
from windlass.weights import quantized
from windlass.weights.quantized import StoredFormat

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch that is built with CUDA; a GPU it needs not"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]
E4M3 = torch.float8_e4m3fn
HIDDEN, TOKENS = 32, 30


def on_a_gpu(stack: nn.Module, sides: tuple[int, int] | None) -> None:
    """Return a layer's adapted experts as if moved to a GPU; in FP8 with blocks of `sides` if given."""
    for module in stack.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if sides and parameter.ndim == 3:
                del module._parameters[name]
                weight = torch.empty(parameter.shape, device="cuda")
                quantized.to_quantized_param(module, name, weight, StoredFormat(E4M3, sides, torch.bfloat16))
            else:
                moved = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
                module._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)


@pytest.mark.parametrize("major", [9, 8])
@pytest.mark.parametrize("sides", [None, (48, 32), (16, 8)], ids=["bf16", "fp8", "fp8 in blocks"])
@pytest.mark.parametrize("tokens", [TOKENS, 2])
def test_experts_and_their_adapters(
    sides: tuple[int, int] | None, tokens: int, major: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward with r=3 padded, in several chunks; offsets go to the host where they must."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))
    monkeypatch.setattr(settings, "DEQUANTIZED_COLUMNS", 8)
    monkeypatch.setattr(settings, "DEQUANTIZED_BYTES", 6 * HIDDEN * 2 * 16)
    ways: list[str] = []

    def by_expert(
        x: Tensor, codes: Tensor, *rest: Tensor, transposed: bool
    ) -> Tensor:  # asks for values: there are none
        ways.append("by expert")
        return x.new_empty(x.shape[0], codes.shape[1] if transposed else codes.shape[2])

    monkeypatch.setattr(products, "multiply_one_by_one", by_expert)
    stack = stack_of(ours_of(base(dtype=torch.bfloat16), *BOTH))
    with FakeTensorMode():
        on_a_gpu(stack, sides)
        x = torch.empty(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        index = torch.empty(tokens, 2, device="cuda", dtype=torch.long)
        y = stack(x, index, torch.empty(tokens, 2, device="cuda"))
    assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "cuda")
    few = tokens * 2 < 6
    assert len(ways) == (2 if sides and (few or major < 9) else 0)


def test_the_backward_of_an_adapter() -> None:
    """With r=3 padded, two experts, in the strides that grouped products return."""
    with FakeTensorMode():
        bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        a, b = torch.empty(6, HIDDEN, device="cuda"), torch.empty(48, 6, device="cuda")
        edges, rows, sent = (
            torch.empty(3, device="cuda").int(),
            torch.empty(10, HIDDEN, **bf16),
            torch.empty(10, 48, **bf16),
        )
        ctx: Any = SimpleNamespace(
            save_for_backward=lambda *saved: setattr(ctx, "saved_tensors", saved),
            needs_input_grad=[True] * 7,
        )
        experts._LowRank.forward(ctx, rows, rows, lambda same: same, edges, a, b, 2.0)
        assert ctx.saved_tensors[-1].shape == (10, 8)
        grad_x, *_, grad_a, grad_b, _ = experts._LowRank.backward(ctx, sent)
    for gradient, of in ((grad_x, rows), (grad_a, a), (grad_b, b)):
        assert (gradient.shape, gradient.dtype, gradient.device.type) == (of.shape, of.dtype, "cuda")
        assert gradient.is_contiguous()


@pytest.mark.parametrize("sides", [(48, 32), (16, 8)])
def test_the_backward_of_products_in_chunks(sides: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(settings, "DEQUANTIZED_COLUMNS", 8)
    monkeypatch.setattr(settings, "DEQUANTIZED_BYTES", 6 * 48 * 2 * 16)  # two chunks of 32 columns
    with FakeTensorMode():
        module = nn.Module()
        coding = StoredFormat(E4M3, sides, torch.bfloat16)
        quantized.to_quantized_param(module, "weight", torch.empty(6, 48, HIDDEN, device="cuda"), coding)
        dy, ends = torch.empty(12, 48, device="cuda", dtype=torch.bfloat16), torch.empty(6, device="cuda").int()
        codes, scale = module.get_parameter("weight"), module.get_buffer("weight_scale")
        dx = products.multiply_all(dy, codes, scale, ends, coding, transposed=False)
    assert (dx.shape, dx.dtype, dx.device.type) == ((12, HIDDEN), torch.bfloat16, "cuda")


def test_unsupported_grouped_stride_is_detected() -> None:
    """The planted fault: an r that is not padded."""
    with FakeTensorMode():
        x, offsets = torch.empty(12, 32, device="cuda", dtype=torch.bfloat16), torch.empty(6, device="cuda").int()
        narrow = torch.empty(6, 32, 3, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
            torch.nn.functional.grouped_mm(x, narrow, offs=offsets)
