"""Replacements of other libraries' code are all undone; test_source.py: none is made outside train/patches.py."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from test_experts import BOTH, base, batch, live
from test_lora import peft_alone
from torch import Tensor
from transformers import masking_utils
from transformers.models.llama import modeling_llama
from transformers.models.mistral4 import modeling_mistral4

from windlass.train.head import Head
from windlass.train.patches import PARTS, ModelPatches, Patches, patch_peft

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"),
]


def state_of(model: PeftModel) -> list[Any]:
    """Return what a replacement could change: attributes and classes of modules, functions of libraries, settings."""
    modules = [(name, type(module), {**vars(module)}) for name, module in model.named_modules()]
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    libraries = [{**vars(owner)} for owner in (masking_utils, modeling_llama, modeling_mistral4)]
    methods = [{**vars(owner)} for owner in (LoraLayer, ParamWrapper)]
    config = model.get_base_model().config
    return [modules, hooks, libraries, methods, config._experts_implementation, config._attn_implementation]


def gradients_of(model: PeftModel) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model.train().zero_grad()
    model(**batch()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def adapted(family: str) -> PeftModel:
    if family == "llama":
        return peft_alone("llama")
    return live(get_peft_model(base(), LoraConfig(r=2, target_modules=["o_proj"], target_parameters=[*BOTH])))


@pytest.mark.parametrize("family", ["llama", "mistral4"])
@pytest.mark.parametrize("compiles", [False, True])
def test_all_replacements_are_undone(family: str, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(family)
    fuse = Patches.fuse_layers
    monkeypatch.setattr(Patches, "fuse_layers", lambda *given, **options: fuse(*given, **options, always=True))
    model.get_base_model().set_attn_implementation("sdpa")
    before, expected = state_of(model), gradients_of(model)
    with Patches() as of_experts:
        of_experts.patch_experts(model)
        patches = ModelPatches(model.get_base_model(), dtype=None, compiles=compiles, noise_alpha=5.0)
        assert bool(patches.compiled) is compiles
        if compiles:
            patches.disable_compiled()
        ids = batch()["input_ids"]
        with patches.adapters.unchanged():
            outputs = model.get_base_model()(ids[:1], torch.arange(ids.shape[1] - 1), several=False)
        Head(model.get_base_model()).loss(outputs.last_hidden_state, ids[0, 1:])[0].backward()  # type: ignore[no-untyped-call]
        assert patches.adapters.groups
        assert state_of(model)[0] != before[0]
        patches.undo()
    assert state_of(model) == before
    found = gradients_of(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_replacements_in_peft_are_undone_even_if_it_fails() -> None:
    before = [{**vars(owner)} for owner in (LoraLayer, ParamWrapper)]

    def fail() -> None:
        with patch_peft():
            assert [{**vars(owner)} for owner in (LoraLayer, ParamWrapper)] != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [{**vars(owner)} for owner in (LoraLayer, ParamWrapper)] == before


@pytest.mark.parametrize("part", PARTS)
def test_each_fused_part_can_be_left_out(part: str) -> None:
    def names_of(parts: tuple[str, ...]) -> list[str]:
        model = peft_alone("mistral4")
        with Patches() as patches:
            adapters = patches.fuse_layers(model, parts=parts, always=True)
            groups = [f"group of {len(group.layers)}" for group in adapters.groups]
            replaced = [name for module in model.modules() for name in vars(module) if name in ("forward", "expand_kv")]
            changed = [name for name, value in vars(modeling_mistral4).items() if value is not originals[name]]
            return sorted([*groups, *replaced, *changed])

    originals = {**vars(modeling_mistral4)}
    assert names_of(tuple(name for name in PARTS if name != part)) != names_of(PARTS)
