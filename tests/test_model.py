"""Models against transformers' own: names and shapes of every family, stored tensors of every published layout."""

import json
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from refusals import refused
from safetensors.torch import load_file, save_file

from windlass import tiny
from windlass.data.tokenize import open_tokenizer
from windlass.errors import UserError
from windlass.model import PARTS, find_base, find_published_base, read_base
from windlass.model.base import read_published_configs
from windlass.model.config import describe
from windlass.model.family import FAMILIES, WRAPPERS
from windlass.model.stored import UNTIED
from windlass.plan.layout import Layout
from windlass.runfile import Model
from windlass.train.load import load_base

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SIZES: dict[str, dict[str, Any]] = {
    "mistral4": {
        "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "n_shared_experts": 2, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
        "v_head_dim": 7, "max_position_embeddings": 2**20,
    },
    "mistral": {},
    "ministral3": {"head_dim": 12, "max_position_embeddings": 262144},
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": MOE | {"head_dim": 12},
}  # fmt: skip
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in SIZES),
    ("mistral4", {"first_k_dense_replace": 2}),
    ("mistral4", {"attention_bias": True, "tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 6, "tie_word_embeddings": True}),
]


ROWS = {family.layer for family in FAMILIES.values()}


def config_of(model_type: str, **more: Any) -> Any:
    return transformers.CONFIG_MAPPING[model_type](**{**SMALL, **SIZES[model_type], **more})


def shapes(config: Any, causal_lm: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes in transformers' own model."""
    with torch.device("meta"):
        model: torch.nn.Module = getattr(transformers, causal_lm)(config)
    layer = type(model.get_submodule("model.layers.0")).__name__
    assert layer in [family.layer for family in FAMILIES.values() if family.causal_lm == causal_lm] or layer not in ROWS
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("model_type", "more"), VARIANTS, ids=lambda value: str(value)[:30])
def test_names_and_shapes_equal_those_of_transformers(model_type: str, more: dict[str, Any]) -> None:
    config = config_of(model_type, **more)
    base = describe(config.to_dict(), "config.json", "small")
    assert (base.name, base.path, base.family) == ("small", None, FAMILIES[model_type])
    assert {p.name: p.shape for p in base.parameters} == shapes(config, base.family.causal_lm)
    assert {p.part for p in base.parameters} <= set(PARTS)
    assert base.family.since
    assert SIZES.keys() == FAMILIES.keys()


# As the model cards and the libraries' own counts have them.
TOTALS = {
    "Mistral-Small-4-119B-2603": 118_972_826_624,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "phi-4": 14_659_507_200,
    "DeepSeek-V3": 671_026_419_200 - 58 * 256,  # but for the routers' corrections, which are no parameters
    "Qwen3-30B-A3B": 30_532_122_624,
}


def test_published_models_have_their_published_size() -> None:
    checked: dict[int, dict[str, tuple[int, ...]]] = {}  # several names share a config
    for name, config in read_published_configs().items():
        known = find_published_base(name.lower())
        assert known is not None
        assert (known.name, known.path) == (name, None)
        assert known.total == TOTALS.get(name, known.total)
        if id(config) not in checked:
            theirs = transformers.CONFIG_MAPPING[known.family.model_type].from_dict(dict(known.config))
            checked[id(config)] = shapes(theirs, known.family.causal_lm)
        assert {p.name: p.shape for p in known.parameters if not p.buffer} == checked[id(config)]
    assert find_published_base("Mistral-Small-5") is None


LAYOUTS: dict[str, dict[str, Any]] = {
    "published": {"family": "mistral4", "both_layouts": True},
    "dense-first": {"family": "mistral4", "config": {"first_k_dense_replace": 1}},
    "llama-tied": {"family": "llama", "tied": True, "files": 3},
    "qwen3_moe-blocks": {"family": "qwen3_moe", "quantization": "block128", "hidden": 192, "moe_intermediate": 160},
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layouts")
    return {name: tiny.write_model(root / name, tokenizer=False, **how) for name, how in LAYOUTS.items()}


def test_wrapper_scales_and_names(folders: dict[str, Path], tmp_path: Path) -> None:
    base = read_base(folders["published"])
    assert (base.wrapper, base.family) == (WRAPPERS["mistral3"], FAMILIES["mistral4"])
    assert "mlp" in {parameter.part for parameter in read_base(folders["dense-first"]).parameters}
    # Some dense layers, which the row of this family does not know: transformers is asked.
    dense = read_base(
        tiny.write_model(tmp_path / "dense", "qwen3_moe", config={"mlp_only_layers": [0]}, tokenizer=False)
    )
    assert [{p.part for p in dense.parameters if f".{i}.mlp." in p.name} for i in (0, 1)] == [
        {"mlp"}, {"experts", "router"},
    ]  # fmt: skip
    blocks = read_base(folders["qwen3_moe-blocks"])
    assert (2, 2) in {piece.scale.shape for p in blocks.parameters for piece in p.pieces if piece.scale}
    assert blocks.block == [128, 128]
    fused = [p for p in blocks.parameters if p.part == "experts"]
    assert {len(p.pieces) for p in fused} == {8, 16}
    assert fused[0].pieces[1].offset == (0, 160, 0)
    # The hub's cache has the model under a hash.
    snapshots = tmp_path / "models--mistralai--Mistral-7B-v0.1" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "0123abcd").symlink_to(folders["llama-tied"])
    assert find_base(str(snapshots / "0123abcd"), "run.yaml:2").name == "Mistral-7B-v0.1"


def rewrite(folder: Path, target: Path, rename: Callable[[str], str | None]) -> Path:
    """Write the same model under other names; None drops a tensor."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    renamed = {new: tensor.contiguous() for key, tensor in stored.items() if (new := rename(key))}
    save_file(renamed, target / "model.safetensors")
    return target


def test_newer_spellings_and_fused_experts_are_read_too(folders: dict[str, Path], tmp_path: Path) -> None:
    def newer(key: str) -> str:
        """Names used by transformers 5 in memory, and by the publisher's converter."""
        for old, new in (("language_model.lm_head", "lm_head"), ("language_model.model", "model.language_model")):
            if key.startswith(old):
                return key.replace(old, new, 1)
        return f"model.{key}"

    old, new = read_base(folders["published"]), read_base(rewrite(folders["published"], tmp_path / "new", newer))
    assert [(p.name, p.shape, p.part) for p in new.parameters] == [(p.name, p.shape, p.part) for p in old.parameters]
    assert {s.key for s in new.unread} == {newer(s.key) for s in old.unread}
    assert new.parameters[0].pieces[0].stored.key == "model.language_model.embed_tokens.weight"

    config = transformers.MixtralConfig(**SMALL, num_local_experts=4)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    save_file(transformers.MixtralForCausalLM(config).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{}")  # a single file takes precedence
    experts = next(p for p in read_base(tmp_path).parameters if p.part == "experts")
    assert experts.pieces[0].stored.key == "model.layers.0.mlp.experts.gate_up_proj"
    assert experts.pieces[0].offset == (0, 0, 0)


def test_tied_heads(folders: dict[str, Path], tmp_path: Path) -> None:
    head = "language_model.lm_head.weight"
    by_wrapper = rewrite(folders["published"], tmp_path / "tied", lambda key: None if key == head else key)
    with pytest.raises(UserError, match=r"missing weights \(1\): lm_head\.weight"):
        read_base(by_wrapper)
    config = json.loads((by_wrapper / "config.json").read_text())
    (by_wrapper / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    base = read_base(by_wrapper)
    assert base.config["tie_word_embeddings"] is True
    assert not any(p.part == "head" for p in base.parameters)
    assert len(base.notes) == 1


def test_known_models_are_found_without_weights_and_unknown_ones_refused() -> None:
    where = "run.yaml:2: model.model_name_or_path"
    for prefix in ("/data/input/Models/", "mistralai/", "", "no/such/"):
        base = find_base(f"{prefix}Mistral-Small-4-119B-2603", where)
        assert (base.path, base.total) == (None, 118_972_826_624)
        (note,) = base.notes
        assert note.startswith(f"no weights at {prefix}Mistral-Small-4-119B-2603: planned from the published config")
        assert note.endswith("check and train will refuse this path")
    for name, message in (
        ("/data/Mistral-Small-4-119B", "nearest known: Mistral-Small-4-119B-2603"),
        ("Qwen/Qwen3-30B-A3", "nearest known: Qwen3-30B-A3B"),
        ("~no-such-user-here/x", "can't be opened"),
        ("a\0b", "no published model of that name"),
        (__file__, "the folder can't be read: Not a directory"),
    ):
        with pytest.raises(UserError, match=message) as error:
            find_base(name, where)
        assert len(str(error.value)) < 1500


def write_tied(folder: Path, place: tuple[int, int] | None, name: str = "lm_head.weight") -> Path:
    """Write a model with a tied embedding and a stored head that is equal, but for one value."""
    tiny.write_model(folder, "llama", tied=True, tokenizer=False)
    stored = load_file(folder / "model.safetensors")
    stored[name] = stored["model.embed_tokens.weight"].clone()
    if place:
        stored[name][place] += 1
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.fault(
    "a stored head of other values than its embedding", "`windlass plan`", "a stored head that is not the embedding"
)
def test_a_stored_head_that_is_not_the_embedding_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would use it, and servers would not; equal ones are tied by both. In full when it is loaded."""
    assert "a stored head that is not the embedding" in UNTIED
    alone = Layout("resident", "test", 1, 1, shard=1, precision="no")
    ids = torch.arange(12)[None]
    for name, place in (("same", None), ("other", (300, 5))):
        folder = write_tied(tmp_path / name, place)
        true = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert (true.lm_head.weight is true.model.embed_tokens.weight) == (place is None)
        if place is None:
            base, reason = read_base(folder), "config.json ties the head to the embedding"
            assert {each.key: why for each, why in base.unread.items()} == {"lm_head.weight": reason}
            assert base.notes == (f"lm_head.weight is stored and not read: {reason}",)
            load_base(base, alone)
            continue
        with pytest.raises(UserError, match=rf"{UNTIED} \(1\): lm_head.weight"):
            read_base(folder)
        config = json.loads((folder / "config.json").read_text())  # what the hint says
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        model, _ = load_base(read_base(folder), alone, dtype=torch.float32)
        assert torch.equal(model(ids).logits, true(ids).logits)
    for module in ("stored", "files"):  # blocks small enough for plan's samples to miss the value
        monkeypatch.setattr(f"windlass.model.{module}.COMPARED_BYTES", 512)
    base = read_base(write_tied(tmp_path / "missed", (13, 5)))
    with pytest.raises(UserError, match=f"{UNTIED}: lm_head.weight"):
        load_base(base, alone)


@pytest.mark.fault("a model folder without a tokenizer", "`windlass check`", "transformers makes one of")
def test_a_tokenizer_of_special_tokens_alone_is_refused(tmp_path: Path) -> None:
    """transformers makes one for families whose tokenizer class needs no file."""
    folder = tiny.write_family(tmp_path / "qwen3", "qwen3", layers=1)
    model = Model.model_validate({"model_name_or_path": str(folder)})
    with refused("no-tokenizer", "model.model_name_or_path") as problems:
        open_tokenizer(read_base(folder), model, str)
    assert "has no tokenizer: transformers makes one of" in problems[0].problem
    tiny.write_tokenizer(folder)
    assert len(open_tokenizer(read_base(folder), model, str)) > 256


@pytest.mark.parametrize("linked", ["config.json", "model.safetensors"])
def test_a_link_to_nothing_is_called_one(tmp_path: Path, linked: str) -> None:
    folder = tiny.write_model(tmp_path / "m", "llama", tokenizer=False)
    (folder / linked).unlink()
    (folder / linked).symlink_to("../blobs/0a1b")
    with refused("dangling-link", linked) as problems:
        read_base(folder)
    assert problems[0].problem == "it is a link to ../blobs/0a1b, and nothing is there"


def test_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    folder = tiny.write_family(tmp_path / "m", "bamba", layers=1)
    transformers.BambaConfig.from_pretrained(folder).save_pretrained(tmp_path / "again")
    text = (tmp_path / "again" / "config.json").read_text()
    assert json.loads(text)["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    (folder / "config.json").write_text(text)
    alone = Layout("resident", "test", 1, 1, shard=1, precision="no")
    assert load_base(read_base(folder), alone)[0].config.time_step_limit == (0.0, float("inf"))


MEASURE = """
import re, sys, time
from pathlib import Path
from windlass.model import read_base
took = []
for _ in range(5):
    started = time.perf_counter()
    base = read_base(Path(sys.argv[1]))
    took.append(time.perf_counter() - started)
# Not ru_maxrss, which a process inherits from the one that started it.
mib = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
print(min(took), mib, base.total, int("torch" in sys.modules or "pydantic" in sys.modules))
"""


def write_sparse_base(folder: Path) -> int:
    """Write Mistral Small 4 as published (wrapper, FP8, 48 files) in sparse files; return their nominal bytes."""
    model = find_published_base("Mistral-Small-4-119B-2603")
    assert model is not None
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"vision_tower.patch_conv.weight": ("BF16", (1024, 3, 14, 14))}
    for parameter in model.parameters:
        key = f"language_model.{parameter.name}"
        quantized = parameter.part in ("attention", "shared_experts", "experts") and len(parameter.shape) > 1
        tensors[key] = ("F8_E4M3" if quantized else "BF16", parameter.shape)
        if quantized and parameter.part == "experts":
            tensors[f"{key}_scale_inv"] = ("BF16", (parameter.shape[0], 1, 1))
            tensors[f"{key}_activation_scale"] = ("BF16", (parameter.shape[0],))
        elif quantized:
            tensors[f"{key}_scale_inv"] = ("BF16", ())
            tensors[f"{key.removesuffix('weight')}activation_scale"] = ("BF16", ())
    config: dict[str, Any] = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    config |= {"text_config": model.config, "vision_config": {"model_type": "pixtral"}, "tie_word_embeddings": False}
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    (folder / "config.json").write_text(json.dumps(config))
    index = {}
    total = 0
    for shard in range(48):
        name = f"model-{shard + 1:05}-of-00048.safetensors"
        header = {}
        end = 0
        for key in list(tensors)[shard::48]:
            dtype, shape = tensors[key]
            start = end
            end += prod(shape) * (1 if dtype == "F8_E4M3" else 2)
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
            index[key] = name
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        total += end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return total


def test_119b_headers_are_read_quickly_in_little_memory(tmp_path: Path) -> None:
    assert write_sparse_base(tmp_path) > 119e9
    taken = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
    if taken > 2**26:
        pytest.skip("this file system has no sparse files")
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    seconds, mib, parameters, heavy = map(float, done.stdout.split())
    assert parameters == 118_972_826_624
    assert seconds < 0.3
    assert mib < 60
    assert not heavy
