"""Tiny replicas of models in their published layout, with random weights: for the demo, the rehearsal and tests.

Model classes, names on disk and file format are the libraries' own; only the sizes are small.
"""

import copy
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.introspect.describe import find_model_class, find_wrapper_class
from windlass.model import Base
from windlass.model.compressed import METHOD, read_compressed
from windlass.model.family import FAMILIES
from windlass.model.files import PARAMS
from windlass.model.mistral_layout import CONSOLIDATED, ROTATED_ROWS, make_params, rename_module, rename_vision
from windlass.model.shrink import shrink_config
from windlass.weights import four_bits

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0  # largest finite e4m3 value
BLOCK: Final = 128  # side of the square blocks that share one scale
# NF4 scales that share a scale: 256 as published; fewer here, so that a tiny matrix has several.
NESTED_BLOCK: Final = 16

# compressed-tensors' schemes: the format, and its arguments for weights.
COMPRESSED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]},
    ),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}),
    "int4-channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "uint4": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False},
    ),
}
GROUP: Final = 16  # columns that share a scale in a replica's integers
NF4: Final = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# Weights that published FP8 checkpoints quantize: linear layers and routed experts. Routers, norms, embeddings,
# head and the vision part stay as they are.
QUANTIZED: Final = re.compile(r"\.(?:\w+_proj(?:_with_mqa)?|w[123])\.weight$|\.experts\.(?:gate_up_proj|down_proj)$")
NOT_QUANTIZED: Final = re.compile(r"^(?:model\.)?(?:vision_tower|multi_modal_projector)\.|lm_head")

# Mistral's own order of special tokens; <pad> is number 11 there, as Mistral4Config has it.
SPECIAL: Final = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
]
CHAT_TEMPLATE: Final = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}"
    "{%- elif message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}"
    "{%- else %}{% generation %}{{- message['content'] + eos_token }}{% endgeneration %}{%- endif %}"
    "{%- endfor %}"
)

SIZES: Final = {
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "experts": 8,
    "top_k": 2,
    "intermediate": 128,
    "moe_intermediate": 32,
    "vocab": 512,
}
EXTRA: Final[dict[str, dict[str, Any]]] = {  # of a family's config, besides the sizes
    "mistral": {"sliding_window": None},
    "llama": {"max_position_embeddings": 4096},
    "qwen3_moe": {"head_dim": 16, "norm_topk_prob": True},
}
MISTRAL3: Final = "Mistral3ForConditionalGeneration"
# Beginnings of a wrapper's names as save_pretrained writes them, and as the publisher's converter does.
NESTED: Final = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)


def write_model(
    directory: Path,
    family: str = "mistral4",
    *,
    wrapper: bool | None = None,
    quantization: str | None = None,
    files: int = 1,
    tied: bool = False,
    both_layouts: bool = False,
    tokenizer: bool = True,
    dtype: str = "bfloat16",
    config: dict[str, Any] | None = None,
    seed: int = 0,
    train: Callable[[Any], None] | None = None,
    texts: Sequence[str] | None = None,
    **sizes: int,
) -> Path:
    """Write config.json, safetensors and a tokenizer into `directory` and return it.

    wrapper: inside the multimodal Mistral3ForConditionalGeneration (default: for mistral4, as published).
    quantization: "none", "tensor" (FP8, a scale for each linear and expert), "block128" (a scale for each 128 x 128
    block), "nf4" (bitsandbytes', twice quantized) or a name of `COMPRESSED`; default: "tensor" for mistral4, as
    published, else "none".
    files: more than 1 is a sharded index.
    train: what trains the model, in float32, before it is stored; else it stays random. texts: what the tokenizer is
    trained on.
    both_layouts: Mistral's own layout next to it, of the same weights, for mistral4. config: further entries of the
    text model's config.
    sizes: of `SIZES`, where they differ.
    """
    unknown = sizes.keys() - SIZES.keys()
    if unknown:
        raise TypeError(f"no such size: {', '.join(sorted(unknown))}")
    row = FAMILIES[family]
    wrapped = family == "mistral4" if wrapper is None else wrapper
    scheme = quantization or ("tensor" if family == "mistral4" else "none")
    latent = "kv_rank" in row.sizes
    dims = {**SIZES, **sizes}
    dims["expert_intermediate"] = dims.pop("moe_intermediate")
    dims["kv_heads"] = dims["heads"] if latent else max(1, dims["heads"] // 2)
    if latent:
        dims |= {"q_rank": 32, "kv_rank": 16, "rope_dim": 8, "nope_dim": 8, "v_head_dim": 16}
    entries: dict[str, Any] = {
        **{size.keys[0]: dims[name] for name, size in row.sizes.items() if name in dims and size.keys},
        "tie_word_embeddings": tied,
        "pad_token_id": 11,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **EXTRA.get(family, {}),
        **(config or {}),
    }
    quantized = None
    if scheme == "nf4":
        quantized = NF4
    elif scheme in COMPRESSED:
        quantized = make_compressed_config(scheme)
    elif scheme != "none":  # as in published checkpoints: static activation scales with per-tensor weights
        by_block = scheme == "block128"
        skipped = ["model.vision_tower", "model.multi_modal_projector", "lm_head"] if wrapped else ["lm_head"]
        quantized = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic" if by_block else "static",
            "weight_block_size": [BLOCK, BLOCK] if by_block else None,
            "dequantize": False,
            "modules_to_not_convert": skipped,
        }
    storage = Storage(quantized, dtype, files, seed, both_layouts=both_layouts, train=train)
    if tokenizer:  # first: who trains the model may need it
        write_tokenizer(directory, dims["vocab"], texts)
    _write_model(directory, row.causal_lm, entries, MISTRAL3 if wrapped else "", storage)
    if both_layouts:
        (directory / "tekken.json").write_text(json.dumps({"config": {"pattern": "."}, "vocab": []}) + "\n")
    return directory


def make_compressed_config(scheme: str) -> dict[str, Any]:
    """Return the quantization_config that llm-compressor writes for one of `COMPRESSED`."""
    form, weights = COMPRESSED[scheme]
    is_eight = weights["num_bits"] == 8
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, "group_size": None, **weights},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        if is_eight
        else None,
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": METHOD,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def write_like(base: Base, sizes: dict[str, Any], directory: Path) -> Path:
    """Write a tiny replica of this model: its class, wrapper, quantization, dtype, names on disk. No tokenizer. sizes:
    the text model's config.json, with other numbers."""
    quantized = base.quantization
    if quantized and "published" in quantized:
        quantized = copy.deepcopy(quantized["published"])
        for group in quantized["config_groups"].values():
            if group["weights"].get("strategy") == "group":
                group["weights"]["group_size"] = GROUP  # of a small matrix's columns
    if quantized and quantized.get("weight_block_size"):
        quantized = {**quantized, "weight_block_size": [BLOCK, BLOCK]}
    known = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    stored = Counter(piece.stored.dtype for parameter in base.parameters for piece in parameter.pieces)
    # What most of the unquantized tensors are stored in.
    dtype = next((known[dtype] for dtype, _ in stored.most_common() if dtype in known), "bfloat16")
    # Converters write a wrapper's names in two ways.
    embedding = next(parameter for parameter in base.parameters if parameter.part == "embedding")
    renames = False
    if embedding.pieces:
        renames = embedding.pieces[0].stored.key.startswith("model.language_model.")

    def rename(key: str) -> str:
        for prefix, other in NESTED if renames else ():
            if key.startswith(prefix):
                return other + key.removeprefix(prefix)
        return key

    storage = Storage(quantized, dtype, 2, 0, rename)
    _write_model(directory, base.family.causal_lm, sizes, base.wrapper.architecture if base.wrapper else "", storage)
    return directory


class Storage(NamedTuple):
    quantized: Mapping[str, Any] | None  # its quantization_config
    dtype: str
    files: int
    seed: int
    rename: Callable[[str], str] = str  # from the names that transformers saves
    both_layouts: bool = False
    train: Callable[[Any], None] | None = None


def _write_model(directory: Path, causal_lm: str, sizes: dict[str, Any], wrapper: str, storage: Storage) -> None:
    """Write the library's own class with random weights, inside a wrapper if there is one."""
    import transformers

    config = text = getattr(transformers, causal_lm).config_class(**sizes)
    if wrapper:
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = getattr(transformers, wrapper).config_class(
            text_config=text,
            vision_config=transformers.PixtralVisionConfig(**vision, image_size=28),
            tie_word_embeddings=text.tie_word_embeddings,
        )
    _save_model(directory, getattr(transformers, wrapper or causal_lm), config, storage)


def make_small_config(
    family: str, config: Mapping[str, Any] = MappingProxyType({}), *, layers: int = 4, vocab: int = 512
) -> Any:
    """Return a tiny config of any family that transformers has. config: of the language model, or of a model around."""
    import transformers

    outer = transformers.CONFIG_MAPPING[family]()
    full = outer.to_dict()
    text = outer.get_text_config().to_dict()
    text |= {key: value for key, value in config.items() if key in text}
    small = {**shrink_config(text, layers=layers, vocab=vocab), **config}
    if "text_config" in full:
        small = {**full, "text_config": small}
        if isinstance(full.get("vision_config"), dict):
            small["vision_config"] = shrink_config(full["vision_config"], layers=1)
        small |= {key: value for key, value in config.items() if key in full and key not in text}
    try:
        return type(outer).from_dict({**small, "architectures": None})
    except Exception as error:  # whatever a config class objects to
        problem = f"transformers' {type(outer).__name__} refuses the small sizes: {' '.join(str(error).split())}"
        hint = "give the language model's sizes that fit as config"
        raise UserError(problem, family, hint, "config-refused") from None


def write_family(
    directory: Path,
    family: str,
    *,
    config: Mapping[str, Any] = MappingProxyType({}),
    layers: int = 4,
    vocab: int = 512,
    tokenizer: bool = False,
    quantized: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tiny model of any family that transformers can build, as it saves it. config: of the language model;
    quantized: its quantization_config."""
    small = make_small_config(family, config, layers=layers, vocab=vocab)
    find = find_wrapper_class if "text_config" in small.to_dict() else find_model_class
    _save_model(directory, find(small, {}, family), small, Storage(quantized, "float32", 1, 0))
    if tokenizer:
        write_tokenizer(directory, vocab)
    return directory


def _save_model(directory: Path, model_class: Any, config: Any, storage: Storage) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(storage.seed)
        model = model_class._from_config(config, dtype=getattr(torch, storage.dtype))
        if storage.train:
            storage.train(model.float())
            model.to(getattr(torch, storage.dtype))
        state = model.state_dict()
        for name, tensor in state.items():
            if tensor.is_floating_point() and (
                "norm" in name or tensor.ndim < 2
            ):  # the same everywhere: swapped ones would go unseen
                tensor.data.add_(torch.randn_like(tensor), alpha=0.02)
    names = {tensor.data_ptr(): name for name, tensor in reversed(state.items())}  # a tied one once
    state = {name: state[name] for name in names.values()}
    table = {**config.to_dict(), "architectures": [model_class.__name__], "dtype": storage.dtype}
    if storage.quantized:
        table["quantization_config"] = dict(storage.quantized)
    (directory / "config.json").write_text(json.dumps(table, indent=2, default=str) + "\n")
    stored = {
        storage.rename(key): weight.contiguous() for key, weight in revert_weight_conversion(model, state).items()
    }
    if storage.both_layouts:
        _save_mistral_layout(directory, table, stored, quantized=bool(storage.quantized))
    if storage.quantized:
        stored = dict(_quantize(stored, storage.quantized))
    _save(stored, directory, storage.files)


def _save_mistral_layout(
    directory: Path, config: Mapping[str, Any], stored: dict[str, Tensor], *, quantized: bool
) -> None:
    """Write Mistral's own layout, with a scale for each matrix of each expert; what it stores is what transformers'
    layout then rounds, as Mistral's converter does."""
    tensors: dict[str, Tensor] = {}

    def add(name: str, weight: Tensor) -> Tensor:
        if not quantized:
            tensors[name] = weight.clone()
            return weight
        codes, scale = _to_fp8(weight, None)
        stem = name.removesuffix("weight")
        tensors.update(
            {
                name: codes,
                f"{stem}qscale_weight": scale,
                f"{stem}qscale_act": torch.tensor(0.0625, dtype=torch.bfloat16),
            }
        )
        return (codes.float() * scale.float()).to(weight.dtype)

    for key, weight in stored.items():
        text = key.removeprefix("language_model.")
        module, _, leaf = text.rpartition(".")
        if re.match("vision_tower|multi_modal_projector", key):
            name = rename_vision(key)
            tensors[name] = weight.clone()
            if ROTATED_ROWS.fullmatch(name):
                heads = config["vision_config"]["num_attention_heads"]
                tensors[name] = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        elif module.endswith(".experts"):
            layer = rename_module(module.removesuffix(".mlp.experts"))
            matrices = ("w1", "w3") if leaf == "gate_up_proj" else ("w2",)
            for expert, matrix in enumerate(weight):
                for name, part in zip(matrices, matrix.chunk(len(matrices)), strict=True):
                    part.copy_(add(f"{layer}.experts.{expert}.{name}.weight", part))
        elif QUANTIZED.search(key):
            stored[key] = add(f"{rename_module(module)}.{leaf}", weight)
        else:
            tensors[f"{rename_module(module)}.{leaf}"] = weight.clone()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / CONSOLIDATED, metadata={"format": "pt"})
    (directory / PARAMS).write_text(json.dumps(make_params(config), indent=2) + "\n")


def _quantize(weights: dict[str, Tensor], quantized: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield every stored tensor, with the scales of quantized ones."""
    method = quantized.get("quant_method")
    if method == METHOD:
        yield from _compress(weights, quantized)
        return
    for key, weight in weights.items():
        if not QUANTIZED.search(key) or NOT_QUANTIZED.search(key):
            yield key, weight
        elif method != "fp8":
            encode, dimensions, side = (_to_nf4, 2, 64) if method == "bitsandbytes" else (_to_mxfp4, 3, 32)
            fits = weight.ndim == dimensions and weight.shape[1] % side == 0
            for suffix, tensor in encode(weight).items() if fits else [("", weight)]:
                yield f"{key}{suffix}", tensor
        else:
            codes, scale = _to_fp8(weight, (BLOCK, BLOCK) if quantized.get("weight_block_size") else None)
            yield key, codes
            yield f"{key}_scale_inv", scale
            if quantized.get("activation_scheme") == "static":
                fused = not key.endswith(".weight")
                name = f"{key}_activation_scale" if fused else f"{key.removesuffix('weight')}activation_scale"
                yield name, torch.full((weight.shape[0],) if fused else (), 0.0625, dtype=torch.bfloat16)


def _compress(weights: dict[str, Tensor], quantized: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as llm-compressor stores them: experts one by one, each matrix with its own scales."""
    terms, _ = read_compressed(quantized, "")
    (group,) = quantized["config_groups"].values()
    for key, weight in weights.items():
        if not QUANTIZED.search(key) or NOT_QUANTIZED.search(key):
            yield key, weight
            continue
        for name, matrix in _split_experts(key, weight):
            if terms["quant_method"] == "fp8":
                by_row = (1, None) if group["weights"]["strategy"] == "channel" else None
                codes, scale = _to_fp8(matrix, terms["weight_block_size"] or by_row)
                yield name, codes
                yield f"{name}_scale", scale
            else:
                packed = _to_compressed(matrix.float(), terms["quant_method"], terms["group_size"] or matrix.shape[1])
                for end, tensor in packed.items():
                    yield f"{name}{end}", tensor


def _to_compressed(weight: Tensor, kind: str, block: int) -> dict[str, Tensor]:
    """Quantize to 4 bits as compressed-tensors packs them; a row's groups of `block` columns have a scale each."""
    rows, columns = weight.shape
    blocks = weight.view(rows, -1, block)
    if kind == "nvfp4":
        factor = FP8_MAX * 6 / weight.abs().amax().clamp(min=1e-6)
        scale = (blocks.abs().amax(-1) / 6 * factor).to(FP8)
        units = blocks / (scale.float() / factor).clamp(min=1e-12)[..., None]
        codes = (units[..., None] - four_bits.code_table(kind, weight.device)).abs().argmin(-1)
        pairs = codes.to(torch.uint8).view(rows, -1, 2)
        packed = pairs[..., 0] | pairs[..., 1] << 4
        return {"_packed": packed, "_scale": scale, "_global_scale": factor.reshape(1)}
    zeros = torch.zeros(blocks.shape[:2])
    scale = blocks.abs().amax(-1) / 7
    if kind == "uint4":
        scale = (blocks.amax(-1) - blocks.amin(-1)) / 15
    scale = scale.clamp(min=1e-6).to(torch.bfloat16)
    if kind == "uint4":
        zeros = (-8 - blocks.amin(-1) / scale.float()).round().clamp(-8, 7)
    codes = (blocks / scale.float()[..., None] + zeros[..., None]).round().clamp(-8, 7)
    stored = {"_packed": _pack_words(codes.view(rows, columns)), "_scale": scale}
    if kind == "uint4":
        stored["_zero_point"] = _pack_words(zeros.T).T.contiguous()
    return {**stored, "_shape": torch.tensor([rows, columns])}


def _pack_words(codes: Tensor) -> Tensor:
    """Pack whole numbers from -8 to 7 along rows, eight in a word, the first in its lowest bits."""
    padded = nn.functional.pad(codes, (0, -codes.shape[1] % 8), value=-8).long() + 8
    words = (padded.view(len(codes), -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    return words.to(torch.int32)


def _split_experts(key: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    stem, _, leaf = key.rpartition(".")
    if weight.ndim < 3:
        yield key, weight
        return
    names = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
    for expert, matrix in enumerate(weight):
        for name, part in zip(names, matrix.chunk(len(names)), strict=True):
            yield f"{stem}.{expert}.{name}.weight", part


def _to_nf4(weight: Tensor) -> dict[str, Tensor]:
    """Quantize as bitsandbytes does: blocks of 64 values with 8-bit scales, of which some share a scale."""
    codes, scale = four_bits.encode_rows(weight.float(), "nf4")
    mean = scale.mean()
    centred = scale.flatten() - mean
    blocks = nn.functional.pad(centred, (0, -len(centred) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    nested_scale = blocks.abs().amax(-1).clamp(min=1e-12)
    units = (centred / nested_scale.repeat_interleave(NESTED_BLOCK)[: len(centred)] + 1) * 127.5
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(mean)}
    return {
        "": (codes[..., ::2] << 4 | codes[..., 1::2]).view(-1, 1),
        ".absmax": units.round().to(torch.uint8),
        ".quant_map": four_bits.code_table("nf4", weight.device).clone(),
        ".nested_absmax": nested_scale,
        ".nested_quant_map": torch.linspace(-1, 1, 256),
        ".quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _to_mxfp4(weight: Tensor) -> dict[str, Tensor]:
    """Quantize as gpt_oss stores experts [expert, in, out]: 32 inputs of an output share a power of two."""
    blocks = weight.float().transpose(1, 2).reshape(len(weight), weight.shape[2], -1, 32)
    power = torch.frexp(blocks.abs().amax(-1, keepdim=True))[1] - 3  # the largest number is 6
    numbers = four_bits.code_table("mxfp4", weight.device)
    codes = (torch.ldexp(blocks, -power)[..., None] - numbers).abs().argmin(-1).to(torch.uint8)
    scales = (power.squeeze(-1) + 127).to(torch.uint8)
    return {"_blocks": codes[..., ::2] | codes[..., 1::2] << 4, "_scales": scales}


def _to_fp8(weight: Tensor, sides: Sequence[int | None] | None) -> tuple[Tensor, Tensor]:
    """Return codes and scale with weight = code x scale: one scale per block of these sides, or one per matrix."""
    *outer, rows, columns = weight.shape
    high, wide = ((side or size) for side, size in zip(sides or (None, None), (rows, columns), strict=True))
    padded = nn.functional.pad(weight.float(), (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(*outer, padded.shape[-2] // high, high, -1, wide)
    scale = blocks.abs().amax((-3, -1)) / FP8_MAX
    if sides is None or None in sides:
        scale = scale.to(torch.bfloat16)
    codes = (blocks / scale.float()[..., :, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    scale = scale if sides or outer else scale.view(())
    return codes.view(padded.shape)[..., :rows, :columns].contiguous(), scale


def _save(stored: dict[str, Tensor], directory: Path, files: int) -> None:
    """One model.safetensors, or `files` of them with their index."""
    if files == 1:
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
        return
    total = sum(tensor.nbytes for tensor in stored.values())
    seen = 0
    where: dict[str, str] = {}
    for key, tensor in stored.items():  # a linear and its scale may be in different files, as they are in real ones
        where[key] = f"model-{min(files, 1 + seen * files // total):05}-of-{files:05}.safetensors"
        seen += tensor.nbytes
    for name in dict.fromkeys(where.values()):
        part = {key: stored[key] for key in stored if where[key] == name}
        save_file(part, directory / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@functools.lru_cache(maxsize=8)
def _train_bpe(vocab: int, texts: tuple[str, ...]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", SPECIAL.index("<s>"))]
    )
    return bpe


def write_tokenizer(directory: Path, vocab: int = 512, texts: Iterable[str] | None = None) -> Path:
    """Write a byte-level BPE tokenizer of `vocab` tokens, trained on these texts or on those that every Python has."""
    from pydoc_data.topics import topics

    from transformers import PreTrainedTokenizerFast

    least = len(SPECIAL) + 256
    if vocab < least:
        raise ValueError(f"a byte-level vocabulary has at least {least} tokens, not {vocab}")
    # The text is small; a larger model vocabulary keeps unused rows.
    bpe = _train_bpe(min(vocab, 4096), tuple(texts or (topics[name] for name in sorted(topics))))
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=131072,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    return directory
