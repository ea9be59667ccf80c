"""Attention by document on a CPU equals attention under a mask, and is not used if a mask means something else."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from windlass.train.kernels import on_cpu
from windlass.train.patches import Patches

HEADS, SHARED, WIDTH = 4, 2, 8


class Layer(nn.Module):
    num_key_value_groups = HEADS // SHARED
    is_causal = True


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "BY_DOCUMENT_ELEMENTS", 0)


def mask_of(rows: list[list[int]]) -> Tensor:
    numbers = torch.tensor([[number for number, length in enumerate(row) for _ in range(length)] for row in rows])
    places = torch.arange(numbers.shape[1])
    return ((numbers[:, :, None] == numbers[:, None]) & (places <= places[:, None]))[:, None]


def inputs(rows: int, length: int) -> list[Tensor]:
    shapes = [(rows, heads, length, WIDTH) for heads in (HEADS, SHARED, SHARED)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def step(function: Any, given: list[Tensor], mask: Tensor) -> list[Tensor]:
    out, _ = function(Layer(), *given, mask, scaling=WIDTH**-0.5)
    return [out, *torch.autograd.grad(out.square().sum(), given)]


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_attention_by_document_equals_masked_attention(rows: list[list[int]]) -> None:
    """Compares outputs and gradients; padding consists of documents of one token each."""
    longest = max(map(sum, rows))
    padded = [row + [1] * (longest - sum(row)) for row in rows]
    mask, given = mask_of(padded), inputs(len(rows), longest)
    assert on_cpu.find_documents(mask) == padded
    for found, expected in zip(
        step(on_cpu.attend, given, mask), step(sdpa_attention_forward, given, mask), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_other_masks_are_left_to_the_kernel() -> None:
    documents = mask_of([[3, 5]])
    window = documents & (torch.arange(8)[:, None] - torch.arange(8) < 4)
    holed, later, wide = documents.clone(), documents.clone(), documents.expand(1, 2, 8, 8)
    holed[0, 0, 7, 5] = False  # a token that one of its own document does not see
    later[0, 0, 0, 1] = True  # and one that sees ahead
    numbers = torch.where(documents, 0.0, -torch.inf)
    for mask in (window, holed, later, wide, numbers, documents[..., 4:, :], documents[..., 3:]):
        assert on_cpu.find_documents(mask) is None
    given = inputs(1, 8)
    for mask in (window, holed):
        torch.testing.assert_close(step(on_cpu.attend, given, mask), step(sdpa_attention_forward, given, mask))


def test_a_model_computes_packed_rows_by_document(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": SHARED, "head_dim": WIDTH}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).double()
    ids = torch.randint(64, (2, 12))
    positions = torch.tensor([[*range(5), *range(7)], [*range(4), *range(4), *range(4)]])
    calls = list[tuple[int, int]]()

    def counted(*given: Any, **options: Any) -> Any:
        calls.append((len(given[1]), given[1].shape[2]))
        return sdpa_attention_forward(*given, **options)

    monkeypatch.setattr(on_cpu, "sdpa_attention_forward", counted)

    def logits() -> Tensor:
        found: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return found

    expected = logits()
    assert not calls
    patches = Patches()
    patches.patch_attention(model)
    torch.testing.assert_close(logits(), expected, rtol=1e-10, atol=1e-10)
    # Three documents of one length are one call, and there are few lengths: torch keeps code for each.
    assert calls == [(1, 64), (1, 64), (3, 64)] * 2
    monkeypatch.setattr(on_cpu, "BY_DOCUMENT_ELEMENTS", 12 * HEADS * WIDTH + 1)
    calls.clear()
    logits()
    assert calls == [(2, 12)] * 2
    eager = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, attn_implementation="eager"))
    patches.patch_attention(eager)
    assert eager.config._attn_implementation == "eager"
