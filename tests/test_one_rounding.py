"""What an adapter adds in bfloat16 reaches the output: layers round the sum of base and adapter once."""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from windlass.settings import FOUR_BITS
from windlass.sweep import slices
from windlass.train.kernels.lora_linear import FusedAdapters, LoraLinear
from windlass.train.kernels.products import QuantizedLinear, multiply_one_by_one
from windlass.train.patches import Patches
from windlass.train.precision import in_float32
from windlass.weights import four_bits
from windlass.weights.quantized import StoredFormat

ROWS, INPUTS, OUTPUTS, R = 256, 64, 96, 4
SMALL = 2.0**-12  # standard deviation of B: an output that rounding swallows a third of, or more
Way = Callable[[Any], Callable[[Tensor], Tensor]]


def make_layer(*, bias: bool = False, dtype: torch.dtype = torch.bfloat16, stored: str = "", dora: bool = False) -> Any:
    """Return an adapted layer whose adapter is smaller than half a step of bfloat16."""
    torch.manual_seed(1)
    base: Any = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=bias)).to(dtype)
    if stored:
        base[0] = store(base[0], stored)
    model: Any = get_peft_model(base, LoraConfig(r=R, lora_alpha=2 * R, target_modules=["0"], use_dora=dora))
    nn.init.normal_(model.base_model.model[0].lora_B.default.weight, std=SMALL)
    model.base_model.model[0].lora_A.default.weight.data.mul_(0.5)
    return model


def store(linear: nn.Linear, kind: str) -> QuantizedLinear:
    """Return a layer of random codes in this format."""
    if kind == "fp8":
        layer = QuantizedLinear(linear, StoredFormat(torch.float8_e4m3fn, (32, 32), torch.bfloat16))
        layer.weight.data.copy_(torch.randn(OUTPUTS, INPUTS).to(torch.float8_e4m3fn).view(torch.uint8))
        layer.weight_scale.fill_(0.1)
        return layer
    scales = torch.uint8 if kind == "nvfp4" else torch.bfloat16
    block = FOUR_BITS[kind].block
    layer = QuantizedLinear(linear, StoredFormat(torch.uint8, (1, block), torch.bfloat16, kind, INPUTS, scales))
    codes, behind = four_bits.split_rows(layer.weight.data, INPUTS, scales)
    codes.random_(256)
    size = (0.06 if kind == "uint4" else 0.12) / max(FOUR_BITS[kind].numbers)  # zero points double its values
    behind.copy_(four_bits.make_behind(torch.full((OUTPUTS, math.ceil(INPUTS / block)), size), kind, torch.bfloat16))
    return layer


def find_lora(layer: Any) -> Any:
    return layer.base_model.model[0]


@torch.no_grad()
def share_kept(output: Tensor, layer: Any, x: Tensor) -> float:
    """Return how much of the adapter's exact change is in the output, by least squares."""
    lora = find_lora(layer)
    base = lora.get_base_layer()
    weight = base.dense(torch.float64) if isinstance(base, QuantizedLinear) else base.weight.double()
    exact = x.double() @ weight.t()
    if base.bias is not None:
        exact += base.bias.double()
    change = x.double() @ lora.lora_A.default.weight.double().t() @ lora.lora_B.default.weight.double().t() * 2
    return float(((output.detach().double() - exact) * change).sum() / change.square().sum())


def in_place(layer: Any) -> Callable[[Tensor], Tensor]:
    Patches().patch_adapted_linears(layer)
    assert type(find_lora(layer)) is LoraLinear
    return layer  # type: ignore[no-any-return]


def fused(layer: Any) -> Callable[[Tensor], Tensor]:
    in_place(layer)
    Patches().patch_adapters(FusedAdapters(layer.modules(), torch.bfloat16))
    return layer  # type: ignore[no-any-return]


def compiled(layer: Any) -> Callable[[Tensor], Tensor]:
    in_place(layer)
    traced: Callable[[Tensor], Tensor] = torch.compile(find_lora(layer).forward, backend="aot_eager", fullgraph=True)
    return traced


def together(layer: Any) -> Callable[[Tensor], Tensor]:
    in_place(layer)
    lora = find_lora(layer)
    shared = slices.Slices(2)
    half = ROWS // 2
    parts = [slices.TrialSlice(slice(0, 1), slice(start, start + half), slices.Random()) for start in (0, half)]
    shared.set((1, ROWS), parts)
    return slices.SlicedLinear(lora.get_base_layer(), [lora, lora], shared)


def make_rows() -> Tensor:
    return torch.randn(1, ROWS, INPUTS, generator=torch.Generator().manual_seed(2)).bfloat16()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's, of its own tracing
@pytest.mark.parametrize(("autocast", "bias"), [(True, False), (False, True)], ids=["autocast", "bf16 with a bias"])
@pytest.mark.parametrize("way", [in_place, fused, together, compiled])
def test_a_small_adapter_reaches_the_output(way: Way, bias: bool, autocast: bool) -> None:
    x = make_rows()
    layer = make_layer(bias=bias, dtype=torch.float32 if autocast else torch.bfloat16)
    if autocast:  # exact values have what autocast rounds
        find_lora(layer).base_layer.bfloat16().float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        by_peft = layer(x)
        output = way(layer)(x)
    assert output.dtype == torch.bfloat16
    assert share_kept(output, layer, x) == pytest.approx(1, abs=0.1)
    assert share_kept(by_peft, layer, x) < 0.8, "two roundings swallow none of it: the adapter is too large"


@pytest.mark.parametrize(
    ("stored", "way", "bias"),
    [*((kind, in_place, False) for kind in ("fp8", *FOUR_BITS)), ("fp8", fused, True), ("nf4", together, True)],
)
def test_on_weights_in_codes(stored: str, way: Way, bias: bool) -> None:
    x = make_rows()
    layer = make_layer(stored=stored, bias=bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert share_kept(layer(x), layer, x) < 0.8
        assert share_kept(way(layer)(x), layer, x) == pytest.approx(1, abs=0.1)


def test_an_evaluation_of_dora_rounds_once() -> None:
    """Also what its magnitudes change, which is as small."""
    x = make_rows()
    layer = make_layer(dora=True).eval()
    lora = find_lora(layer)
    lora.lora_magnitude_vector.default.weight.data.mul_(1 + 2.0**-11)
    exact = copy.deepcopy(layer).double()(x.double()).detach()
    with torch.no_grad():
        plain = x.double() @ lora.base_layer.weight.double().t()
        change = exact - plain
        by_peft = layer(x).double()
        ours = in_place(layer)(x).double()
    shares = [float(((output - plain) * change).sum() / change.square().sum()) for output in (by_peft, ours)]
    assert shares[1] == pytest.approx(1, abs=0.1)
    assert shares[0] < 0.8


@pytest.mark.parametrize(("bias", "stored"), [(True, ""), (False, "nf4")])
def test_gradients_are_pefts(bias: bool, stored: str) -> None:
    """In float32, where both round alike: of x, A and B, and of a trained bias."""
    x = torch.randn(2, 7, INPUTS, generator=torch.Generator().manual_seed(2))
    layer = make_layer(bias=bias, dtype=torch.float32, stored=stored)
    if bias:
        find_lora(layer).base_layer.bias.requires_grad_(True)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]

    def compute() -> list[Tensor]:
        given = x.clone().requires_grad_()
        output = layer(given)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), [given, *trained])]

    theirs = compute()
    in_place(layer)
    with mock.patch.object(Linear, "forward", side_effect=AssertionError("PEFT's forward")):
        ours = compute()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_in_bfloat16_are_as_near_to_float32s_as_pefts() -> None:
    """The backward rounds each product once, by PEFT as here."""
    x = make_rows()[0]

    def compute(layer: Any, dtype: torch.dtype) -> list[Tensor]:
        given = x.to(dtype).requires_grad_()
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        return list(torch.autograd.grad(layer(given).float().square().sum(), [given, *trained]))

    layer = make_layer()
    exact = compute(copy.deepcopy(layer).double(), torch.float64)
    by_peft = compute(copy.deepcopy(layer), torch.bfloat16)
    ours = compute(in_place(layer), torch.bfloat16)
    for true, theirs, found in zip(exact, by_peft, ours, strict=True):
        errors = [float((gradient.double() - true).norm() / true.norm()) for gradient in (found, theirs)]
        assert errors[0] < 1.05 * errors[1] < 0.02


@pytest.mark.takes("PEFT imports its tuners when it first wraps a whole model")
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
def test_a_small_adapter_changes_a_whole_models_answers() -> None:
    """In bfloat16 as in float32; by PEFT most of it is lost on the way."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=3, **sizes)).eval()
    model: Any = get_peft_model(base, LoraConfig(r=R, target_modules="all-linear", init_lora_weights=False))
    ids = torch.randint(97, (8, 64))

    @torch.no_grad()
    def measure(precision: AbstractContextManager[Any]) -> Tensor:
        with precision:
            change: Tensor = model(ids).logits.double()
            with model.disable_adapter():
                change -= model(ids).logits.double()
        return change

    def share(of: Tensor) -> float:
        return float((of * exact).sum() / exact.square().sum())

    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(SMALL / 8 / parameter.std())
    exact = measure(nullcontext())
    by_peft = share(measure(torch.autocast("cpu", torch.bfloat16)))
    Patches().patch_adapted_linears(model)
    ours = share(measure(torch.autocast("cpu", torch.bfloat16)))
    assert by_peft < 0.7
    assert ours == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("rows", [[5, 0, 17, 3], [16, 16, 0, 0], [0, 0, 0, 1], [1, 30, 2, 33]])
def test_experts_add_to_what_their_adapters_gave(rows: list[int]) -> None:
    """One by one, with rounded numbers of rows: nothing is added twice, and the sum is rounded once."""
    torch.manual_seed(0)
    edges = torch.tensor(rows).cumsum(0).int()
    x = torch.randn(sum(rows), INPUTS).bfloat16()
    weight = torch.randn(4, OUTPUTS, INPUTS).bfloat16()
    added = (torch.randn(sum(rows), OUTPUTS) * 2.0**-6).bfloat16()
    exact = torch.cat([part.double() @ w.double().t() for part, w in zip(torch.split(x, rows), weight, strict=True)])
    plain = multiply_one_by_one(x, weight, None, edges, None, transposed=True).double()
    total = multiply_one_by_one(x, weight, None, edges, None, added.clone(), transposed=True).double()
    change = added.double()
    assert bool(((total - exact - change).abs() <= exact.abs() * 2.0**-8 + 2.0**-8).all())

    def share(output: Tensor) -> float:
        return float(((output - exact) * change).sum() / change.square().sum())

    if len(x) > 1:
        assert share(total) == pytest.approx(1, abs=0.1)
        assert share(plain + change) == pytest.approx(1, abs=0.1)
        assert share((plain + change).bfloat16().double()) < share(total) - 0.05, "rounded twice"


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, INPUTS)
        self.layers = nn.ModuleList([nn.Linear(INPUTS, INPUTS) for _ in range(2)])
        self.head = nn.Linear(INPUTS, 11)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        output: Tensor = self.head(hidden)
        return output


def test_float32_for_the_comparison_of_pairs() -> None:
    """Weights in bfloat16 compute as in float32, and are as they were afterwards."""
    torch.manual_seed(0)
    model = Layered().bfloat16()
    ids = torch.randint(11, (2, 9))
    stored = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), in_float32(model):
        output = model(ids)
        with pytest.raises(IndexError):
            model(ids + 11)
    assert all(parameter.data_ptr() == stored[name] for name, parameter in model.named_parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(output, model.float()(ids))


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")  # of the backward, which none of this runs
@pytest.mark.parametrize(("stored", "reshards"), [(torch.bfloat16, True), (torch.float32, False)])
def test_float32_where_fsdp_gathers_in_bfloat16(stored: torch.dtype, reshards: bool, tmp_path: Path) -> None:
    """It casts what a layer is given, too, if the weights are stored in float32; steps are as before."""
    torch.manual_seed(0)
    model: Any = Layered().bfloat16().to(stored)
    ids = torch.randint(11, (2, 9))
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(ids)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if stored == torch.float32 else None)
        for module in (model.embed, *model.layers, model.head, model):
            fully_shard(module, mp_policy=policy, reshard_after_forward=reshards)
        before = model(ids)
        for _ in range(2):  # gathered now, and gathered again
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), in_float32(model):
                output = model(ids)
            assert torch.equal(output, exact)
        after = model(ids)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        assert before.dtype == torch.bfloat16
        assert torch.equal(before, after)
        assert not torch.equal(before.float(), exact)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert {parameter.dtype for parameter in model.parameters()} == {stored}
    finally:
        torch.distributed.destroy_process_group()
