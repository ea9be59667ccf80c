"""Unmerged adapters of routed experts: equal to PEFT's in values, gradients and files, with little memory."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from windlass.errors import UserError
from windlass.model.targets import Adapter, Target
from windlass.runfile import Lora
from windlass.train import lora
from windlass.train.checkpoint.snapshot import save_adapter
from windlass.train.experts import experts
from windlass.train.kernels import kept, on_cpu, products
from windlass.train.patches import Patches
from windlass.weights.expert_shards import view_by_expert

# PEFT and TRL still use names of transformers that its next major version drops.
# PEFT does not look for rank_pattern among expert parameters when it warns, only when it applies it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]

R, E = 3, 6
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 2**10,
}  # fmt: skip
GROUPED: dict[str, Any] = {"experts_implementation": "grouped_mm"}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
DENSE: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "gemma3_text": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=16)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)),  # rotates in float32
    # Rotates half of each head.
    "minimax_m2": lambda: MiniMaxM2ForCausalLM(
        MiniMaxM2Config(**SIZES, num_local_experts=E, head_dim=16, rope_parameters=HALF_ROTATED)
    ),
}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "mistral4": lambda: Mistral4ForCausalLM(Mistral4Config(**SIZES, **GROUPED, **LATENT, n_routed_experts=E)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **GROUPED, num_local_experts=E)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **GROUPED, num_experts=E, head_dim=16)),
}
BOTH = ("gate_up_proj", "down_proj")


def base(family: str = "mistral4", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return (FAMILIES | DENSE)[family]().to(dtype).requires_grad_(False)


def stacks(model: nn.Module, *leaves: str) -> tuple[str, ...]:
    wanted = tuple(f"experts.{leaf}" for leaf in leaves)
    return tuple(name for name, _ in model.named_parameters() if wanted and name.endswith(wanted))


def live(model: PeftModel, spread: float = 0.2) -> PeftModel:
    """Give B the values of a trained adapter: not zero."""
    dice = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=dice) * spread)
    return model


def peft_of(model: nn.Module, *leaves: str, **config: Any) -> PeftModel:
    """Build it with PEFT only."""
    names = list(stacks(model, *leaves))
    asked = LoraConfig(r=R, lora_alpha=2 * R, target_modules=["o_proj"], target_parameters=names, **config)
    return live(get_peft_model(model, asked))


def plan_of(model: nn.Module, found: tuple[str, ...], patterns: tuple[str, ...] = ("o_proj",), r: int = R) -> Adapter:
    """Return what the plan would say, counted from the shapes here. `r` is the experts' rank."""
    printed = []
    for pattern in patterns:
        linear = {name: m for name, m in model.named_modules() if name.endswith(f".{pattern}")}
        count = sum(R * sum(m.weight.shape) for m in linear.values())
        printed.append(Target(pattern, (pattern,), "attention", tuple(linear), count))
    modules = tuple(name for target in printed for name in target.modules)
    shapes = [model.get_parameter(name).shape for name in found]
    if found:
        count = sum(shape[0] * r * (shape[1] + shape[2]) for shape in shapes)
        printed.append(Target("experts", ("experts",), "experts", found, count))
    return Adapter(R, 2.0 * R, tuple(printed), modules, found, sum(target.parameters for target in printed), 4)


def section(**keys: Any) -> Lora:
    return Lora.model_validate({"r": R, "lora_alpha": 2 * R, "lora_dropout": 0, "target_modules": ["o_proj"], **keys})


def ours_of(model: nn.Module, *leaves: str, **keys: Any) -> PeftModel:
    plan = plan_of(model, stacks(model, *leaves))
    return live(lora.attach_adapter(model, section(**{"experts": True, **keys}), plan, 1))


def batch(seed: int = 1, rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(1, 64, (rows, 20), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def step(model: PeftModel, *, checkpointing: bool = False, rows: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and the gradients of one backward."""
    model.train()
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    output = model(**batch(rows=rows))
    output.loss.backward()
    return output.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(one: Tensor, other: Tensor) -> float:
    one, other = (tensor.detach().float() for tensor in (one, other))
    return float((one - other).norm() / other.norm().clamp(min=1e-12))


def same(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert apart(found[0], wanted[0]) < 1e-5
    assert found[1].keys() == wanted[1].keys()
    worst = {name: apart(found[1][name], wanted[1][name]) for name in wanted[1]}
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize(
    ("family", "rows", "checkpointing", "as_on_gpu"),
    [
        ("mistral4", 2, False, False),
        ("mixtral", 2, True, False),
        ("qwen3_moe", 64, False, False),
        ("mistral4", 2, True, True),
        ("mixtral", 64, False, True),
    ],
)
def test_values_and_gradients_equal_pefts(
    family: str, rows: int, checkpointing: bool, as_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few tokens per expert, and with many; with adapters stacked as a CPU does it, and as a GPU."""
    if as_on_gpu:
        monkeypatch.setattr(on_cpu, "is_on_cpu", lambda tensor: False)
    found = step(ours_of(base(family), *BOTH), checkpointing=checkpointing, rows=rows)
    assert sum(".experts." in name for name in found[1]) == 2 * 2 * 2
    same(found, step(peft_of(base(family), *BOTH), checkpointing=checkpointing, rows=rows))


@pytest.mark.parametrize("leaf", BOTH)
def test_merge_of_a_single_parameter_and_another_scale(leaf: str) -> None:
    ours = ours_of(base(), leaf, experts={"targets": [leaf]}, use_rslora=True)
    same(step(ours), step(peft_of(base(), leaf, use_rslora=True)))


def stack_of(model: PeftModel) -> Any:
    """Return the adapted experts of a layer."""
    return next(module for name, module in model.named_modules() if name.endswith(".experts"))


def one_stack(model: PeftModel, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return output and gradients of one layer's experts on given tokens, so that no router rounds them elsewhere."""
    dice = torch.Generator().manual_seed(2)
    x = torch.randn(30, 32, generator=dice).to(dtype).requires_grad_()
    index = torch.tensor([[0, 1], [4, 1], [3, 0]]).repeat(10, 1)  # 2 and 5 have no token
    weights = torch.rand(30, 2, generator=dice).to(dtype).requires_grad_()
    stack = stack_of(model)
    y = stack(x, index, weights)
    own = [p for p in stack.parameters() if p.requires_grad]
    return [y, *torch.autograd.grad(y, [x, weights, *own], torch.randn(y.shape, generator=dice).to(dtype))]


def test_bfloat16_error_is_no_larger_than_pefts() -> None:
    true = one_stack(peft_of(base(), *BOTH))
    theirs = one_stack(peft_of(base(dtype=torch.bfloat16), *BOTH), torch.bfloat16)
    found = one_stack(ours_of(base(dtype=torch.bfloat16), *BOTH), torch.bfloat16)
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in theirs]
    for one, other, exact in zip(found, theirs, true, strict=True):
        assert apart(one, exact) < min(max(2 * apart(other, exact), 1e-6), 0.05)


@pytest.mark.parametrize("part", [1, 5, 17])
def test_rows_multiplied_in_parts_are_those_multiplied_at_once(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """Where experts have no token, and where one has more rows than a part, too."""
    edges = torch.tensor([0, 0, 3, 3, 12, 13, 13], dtype=torch.int32)
    monkeypatch.setattr(on_cpu, "PART_NUMBERS", 32 * part)
    parts = list(on_cpu.split_by_expert(edges, 32))
    assert len(parts) == {1: 5, 5: 3, 17: 1}[part]
    assert [row for rows, _, _ in parts for row in range(13)[rows]] == list(range(13))
    assert [expert for _, chosen, _ in parts for expert in range(6)[chosen]] == list(range(6))
    assert [rows.start + end for rows, _, ends in parts for end in ends.tolist()] == edges[1:].tolist()

    found = one_stack(ours_of(base(dtype=torch.bfloat16), *BOTH), torch.bfloat16)
    monkeypatch.setattr(on_cpu, "PART_NUMBERS", 10**9)
    at_once = one_stack(ours_of(base(dtype=torch.bfloat16), *BOTH), torch.bfloat16)
    assert all(torch.equal(one, other) for one, other in zip(found, at_once, strict=True))


@pytest.mark.parametrize(("tokens", "top_k"), [(30, 2), (30, 1), (0, 2)])
def test_taking_rows_by_expert_and_back_is_indexing_with_its_gradient(tokens: int, top_k: int) -> None:
    """With expert parallelism a rank may receive no token at all."""
    order = torch.randint(0, E, (tokens * top_k,), generator=torch.Generator().manual_seed(1)).argsort()
    token, back = order // top_k, order.argsort()
    x = torch.randn(tokens, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(tokens * top_k, 5)
    take: Callable[..., Tensor] = experts.TakeRows.apply
    rows = take(x, token, back)
    assert torch.equal(rows, x[token])
    found = take(rows, back, order)
    assert torch.equal(found, x.repeat_interleave(top_k, 0))
    (gradient,) = torch.autograd.grad((found * weights).sum(), x)
    torch.testing.assert_close(gradient, weights.double().view(tokens, top_k, 5).sum(1))


@pytest.mark.parametrize("left", [0.0, math.nan])
def test_an_expert_without_a_token_has_a_gradient_of_zero(monkeypatch: pytest.MonkeyPatch, left: float) -> None:
    """Also where a kernel leaves uninitialized memory in its part of the gradients."""

    def unwritten(one: Tensor, other: Tensor, *, offs: Tensor) -> Tensor:
        product = grouped_mm(one, other, offs=offs)
        if one.ndim == other.ndim == 2:
            product[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = left
        return product

    monkeypatch.setattr(experts, "grouped_mm", unwritten)
    model = ours_of(base(), *BOTH)
    names = [name for name, p in stack_of(model).named_parameters() if p.requires_grad]
    for name, gradient in zip(names, one_stack(model)[3:], strict=True):
        none = view_by_expert(f".{name}", gradient, E).flatten(1).eq(0).all(dim=1)
        assert none.tolist() == [False, False, True, False, False, True], name


def test_unsupported_experts_are_refused() -> None:
    model = ours_of(base(), *BOTH)
    stack_of(model).get_base_layer().has_post_expert_norm = True
    with pytest.raises(AssertionError, match="the plan adapts Mistral4Experts"):
        Patches().patch_experts(model)


def saved_bytes(model: PeftModel) -> int:
    """Return the bytes that autograd keeps for the backward, without parameters; shared memory counts once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch())
    return sum(found.values())


def test_backward_keeps_only_low_rank_products() -> None:
    without = get_peft_model(base(), LoraConfig(r=R, lora_alpha=2 * R, target_modules=["o_proj"]))
    tokens, layers = 2 * 20, 2
    narrow = layers * 2 * tokens * 2 * 4 * 4  # x A: two stacks, top-2, r 3 filled up to 16 bytes
    hidden = layers * tokens * 32 * 4  # what the rows are made of again; no copy by expert, no expert's weight
    extra = saved_bytes(ours_of(base(), *BOTH)) - saved_bytes(live(without))
    assert hidden < extra <= narrow + hidden
    assert saved_bytes(peft_of(base(), *BOTH)) - saved_bytes(ours_of(base(), *BOTH)) > 2 * E * (48 * 32 + 24 * 32) * 4


@pytest.mark.parametrize(("family", "dtype"), [("mistral4", torch.float32), ("mixtral", torch.bfloat16)])
def test_kept_products_are_computed_once_and_gradients_are_the_same(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    compute = products.multiply_frozen

    def counted(*given: Any, **options: Any) -> Tensor:
        calls.append(options["transposed"])
        return compute(*given, **options)

    monkeypatch.setattr(products, "multiply_frozen", counted)
    found = {}
    for keeps_products, forwards in ((None, 1), (False, 2), (True, 1)):
        model = ours_of(base(family, dtype), *BOTH)
        model.train()
        if keeps_products is not None:
            model.enable_input_require_grads()
            options = {"use_reentrant": False, "context_fn": partial(kept.checkpoint_contexts, products=keeps_products)}
            model.gradient_checkpointing_enable(options)
        calls.clear()
        model(**batch()).loss.backward()
        assert (calls.count(True), calls.count(False)) == (forwards * 2 * 2, 2 * 2)  # two products of two layers
        found[keeps_products] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in found[None].items():
        assert torch.equal(found[False][name], gradient), name
        assert torch.equal(found[True][name], gradient), name
    assert kept.KeptValues.current is None


def test_other_products_are_not_reported_as_kept() -> None:
    model = ours_of(base(), *BOTH)
    layer: Any = stack_of(model).get_base_layer()
    rows, edges = torch.randn(4, 32, dtype=torch.float64), torch.tensor([4] * E, dtype=torch.int32)
    forward, _ = kept.checkpoint_contexts(products=True)
    with forward, pytest.raises(UserError, match=r"in float32, what they are given in float64: .* can't be kept"):
        products.grouped_linear(rows, layer, "gate_up_proj", edges)
    layer.has_post_expert_norm = True
    forward, _ = kept.checkpoint_contexts(products=True)
    with forward, pytest.raises(UserError, match="the products of Mistral4Experts can't be kept"):
        experts.experts_forward(layer, rows, edges, rows)


# --- dropout ---


class Every(nn.Module):
    """A dropout that can be recomputed: it drops every third value."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.arange(x.numel()).view(x.shape) % 3 != 0) * 1.5


@pytest.mark.parametrize("name", BOTH)
def test_dropout_applies_only_to_the_adapter(name: str) -> None:
    """Compares one product with the definition, expert by expert: y = x W + s (drop(x) A) B."""
    stack = stack_of(ours_of(base(), *BOTH, lora_dropout=0.25)).get_base_layer()
    wrapper = stack.adapters[name]
    assert wrapper.lora_dropout["default"].p == 0.25
    wrapper.lora_dropout["default"] = Every()
    a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
    weight = getattr(stack, name).detach()
    edges = torch.tensor([0, 4, 4, 9, 10, 17, 20], dtype=torch.int32)
    x = torch.randn(20, weight.shape[2], requires_grad=True)
    y = experts.expert_product(stack, name, x, lambda rows: rows * 1, edges)
    sent = torch.randn(y.shape)
    found = torch.autograd.grad(y, [x, a, b], sent)
    down, up = view_by_expert(".lora_A.", a, E), view_by_expert(".lora_B.", b, E)
    rows = [slice(first, last) for first, last in pairwise(edges.tolist())]
    dropped = Every()(x)
    wanted = torch.cat([x[r] @ weight[e].T + 2 * (dropped[r] @ down[e].T) @ up[e] for e, r in enumerate(rows)])
    assert apart(y, wanted) < 1e-5
    for one, other in zip(found, torch.autograd.grad(wanted, [x, a, b], sent), strict=True):
        assert apart(one, other) < 1e-5


def test_dropout_drops_in_training_and_checkpointing_draws_it_again(tmp_path: Path) -> None:
    model, other = (ours_of(base(), *BOTH, lora_dropout=0.5) for _ in range(2))
    torch.manual_seed(3)
    logits, gradients = step(model)
    with torch.no_grad(), model.eval().disable_adapter():
        assert apart(model(**batch()).logits, base()(**batch()).logits) < 1e-6
    assert apart(logits, model(**batch()).logits) > 1e-3
    torch.manual_seed(3)
    again, recomputed = step(other, checkpointing=True)
    assert torch.equal(logits, again)
    assert all(apart(recomputed[name], gradients[name]) < 1e-5 for name in gradients)
    # What is saved opens in PEFT, which refuses dropout beside experts.
    save_adapter(model, tmp_path)
    opened = PeftModel.from_pretrained(base(), str(tmp_path)).eval()
    assert apart(model.eval()(**batch()).logits, opened(**batch()).logits) < 1e-5
