"""Adapters to continue: what the plan takes from their files, and what it refuses by name before anything is loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from refusals import refused
from safetensors.torch import load_file, save_file

from windlass import tiny
from windlass.model import find_base
from windlass.plan import Plan, make_plan
from windlass.plan.layout import Layout
from windlass.runfile import read_run_file
from windlass.train.load import load_base
from windlass.train.lora import attach_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
LEAVES = ("q_a_proj", "o_proj")
RUN = """
model: {{model_name_or_path: {folder}/model, torch_dtype: float32}}
lora: {lora}
data: {{dataset_name_or_path: {folder}/data, val_fraction: 0.1, max_length: 16, packing: false}}
train: {{output_dir: {folder}/run, max_steps: 4, bf16: false}}
cluster: {{gpu: cpu}}
"""
Save = Callable[..., Path]
Continue = Callable[..., Plan]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("continued")
    tiny.write_model(folder / "model", experts=4)
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text('{"text": "mast keel"}\n' * 40)
    return folder


@pytest.fixture
def save(folder: Path, tmp_path: Path) -> Save:
    """Write an adapter's files as PEFT does."""

    def write(leaves: tuple[str, ...] = LEAVES, ranks: dict[str, int] | None = None, **config: Any) -> Path:
        settings = {"r": 4, "lora_alpha": 8, "target_modules": list(leaves), "task_type": "CAUSAL_LM", **config}
        settings = json.loads(json.dumps(LoraConfig(**settings).to_dict(), default=list))
        tensors = {}
        for p in find_base(f"{folder}/model", "model").parameters:
            name = p.name.removesuffix(".weight")
            if name.rpartition(".")[2] in leaves and p.linear:
                r = (ranks or {}).get(name, settings["r"])
                tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(r, p.shape[1])
                tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(p.shape[0], r)
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        return tmp_path

    return write


@pytest.fixture
def continued(folder: Path) -> Continue:
    def plan(adapter: Path, **lora: Any) -> Plan:
        run = folder / "run.yaml"
        run.write_text(RUN.format(folder=folder, lora=json.dumps({"adapter": str(adapter), **lora})))
        return make_plan(read_run_file(run))

    return plan


def test_the_adapter_alone_decides(save: Save, continued: Continue) -> None:
    settings: dict[str, Any] = {"r": 6, "lora_alpha": 3, "use_rslora": True, "alpha_pattern": {"o_proj": 12}}
    one = "model.layers.0.self_attn.q_a_proj"
    plan = continued(save(**settings, rank_pattern={one: 2}, ranks={one: 2}))
    lora = plan.run.lora
    assert (lora.r, lora.lora_alpha, lora.use_rslora, lora.alpha_pattern) == (6, 3, True, {"o_proj": 12})
    assert sorted(lora.target_modules) == ["o_proj", "q_a_proj"]
    assert {name.rpartition(".")[2] for name in plan.adapter.target_modules} == {*LEAVES}
    assert plan.adapter.r_by_module[one] == 2
    assert {plan.adapter.alphas.get(name, plan.adapter.alpha) for name in plan.adapter.target_modules} == {3, 12}
    assert any("lora.r 6" in line for line in plan.chosen)


def test_an_adapter_of_some_layers_is_continued_there_alone(save: Save, continued: Continue) -> None:
    folder = save(layers_to_transform=[1])
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if ".layers.1." in name}, file)
    plan = continued(folder)
    assert plan.run.lora.layers_to_transform == [1]
    assert {".layers.1." in name for name in plan.adapter.target_modules} == {True}


def test_keys_that_agree_with_the_adapter_are_accepted(save: Save, continued: Continue) -> None:
    keys: dict[str, Any] = {"r": 4, "lora_alpha": 8, "use_rslora": False, "bias": "none", "lora_dropout": 0.2}
    plan = continued(save(), **keys, target_modules=["o_proj", "q_a_proj"], dtype="bfloat16")
    assert plan.run.lora.lora_dropout == 0.2


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({"r": 16}, "lora.r"),
        ({"lora_alpha": 16}, "lora.lora_alpha"),
        ({"use_rslora": True}, "lora.use_rslora"),
        ({"use_dora": True}, "lora.use_dora"),
        ({"bias": "lora_only"}, "lora.bias"),
        ({"modules_to_save": ["embed_tokens"]}, "lora.modules_to_save"),
        ({"target_modules": ["o_proj"]}, "lora.target_modules"),
        ({"alpha_pattern": {"o_proj": 2}}, "lora.alpha_pattern"),
        ({"target_modules": "all-linear"}, "lora.target_modules"),
        ({"rank_pattern": {"o_proj": 2}}, "lora.rank_pattern"),
        ({"layers_to_transform": [0]}, "lora.layers_to_transform"),
        ({"experts": True}, "lora.experts"),
    ],
)
def test_a_key_that_differs_from_the_adapter_is_refused(
    save: Save, continued: Continue, keys: dict[str, Any], place: str
) -> None:
    with refused("other-adapter", place):
        continued(save(), **keys)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "LOHA"}, "of the kind LOHA"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices is"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa changed the base"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_by_name(
    save: Save, continued: Continue, config: dict[str, Any], words: str
) -> None:
    folder = save()
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with refused("unsupported-adapter", "adapter_config.json") as problems:
        continued(folder)
    assert words in problems[0].problem


def test_an_adapter_of_another_model_or_a_part_of_one_is_refused(save: Save, continued: Continue) -> None:
    folder = save()
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("o_proj", "wo"): tensor for name, tensor in tensors.items()}, file)
    with refused("incomplete-adapter", str(folder)):
        continued(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["wo", "q_a_proj"]}))
    with refused("other-adapter", "lora.adapter"):
        continued(folder)
    save_file({name: tensor for name, tensor in tensors.items() if ".layers.0." in name}, file)
    with refused("incomplete-adapter", str(folder)):
        continued(folder)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"layers.1.self_attn.o_proj": 3}},
        {"use_dora": True},
        {"bias": "lora_only", "layers_to_transform": [0]},
        {"init_lora_weights": "gaussian", "exclude_modules": ["o_proj"]},
    ],
    ids=lambda config: " ".join(config) or "plain",
)
def test_peft_adapters_are_continued_exactly(
    folder: Path, tmp_path: Path, continued: Continue, config: dict[str, Any]
) -> None:
    def load() -> Any:
        base = find_base(f"{folder}/model", "model")
        return load_base(base, Layout("resident", "", 1, 1, shard=1), dtype=torch.float32)[0].eval()

    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": list(LEAVES), **config}
    theirs = get_peft_model(load(), LoraConfig(**settings, task_type="CAUSAL_LM"))
    torch.manual_seed(0)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(str(tmp_path))
    plan = continued(tmp_path)
    ours = attach_adapter(load(), plan.run.lora, plan.adapter, seed=1).eval()
    ids = torch.arange(24)[None] + 20
    with torch.no_grad():
        one, other, plain = (model(input_ids=ids, use_cache=False).logits for model in (ours, theirs.eval(), load()))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)  # the same sums, in another order
    assert not torch.allclose(one, plain, atol=1e-4)
