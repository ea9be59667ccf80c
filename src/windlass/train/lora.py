"""The adapter: PEFT builds it from the plan's exact module names; then it is checked against the plan."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import set_seed

from windlass.errors import Problem, UserError, raise_all
from windlass.model.files import read_header
from windlass.model.targets import Adapter
from windlass.model.wrapped import inner_name, rename_config
from windlass.runfile import Lora
from windlass.train.fsdp import get_device, shard_like
from windlass.train.initial import ADAPTER_NAME, init_from_weights
from windlass.train.patches import Patches, patch_peft
from windlass.weights.expert_shards import AdapterShards, get_expert_shard
from windlass.weights.quantized import get_formats


@contextmanager
def ignore_peft_warnings() -> Iterator[None]:
    """Ignore PEFT's warnings that mean nothing here."""
    with warnings.catch_warnings():
        # Until a PEFT is required that warns of none: 0.21 looks for rank_pattern among modules only, although it
        # applies it to expert parameters too.
        warnings.filterwarnings("ignore", message=r".*(rank|alpha)_pattern keys did not match")
        # Until a PEFT is required that reads the name of transformers 5.23: up to 0.21 it reads the earlier one.
        warnings.filterwarnings("ignore", message=r".*is_gradient_checkpointing", category=FutureWarning)
        yield


def attach_adapter(model: nn.Module, lora: Lora, adapter: Adapter, seed: int) -> PeftModel:
    """Wrap `model` in its adapter: equal values on every rank, only the adapter trainable, as planned.

    If experts are split over ranks, each rank has its own experts' part of their adapter; the rest is on every rank.
    """
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if lora.use_dora and (sharded or any(get_formats(module) for module in model.modules())):
        raise AssertionError("DoRA was planned with base weights that this rank has only in part, or quantized")
    stacks = [p for name, p in model.named_parameters() if ".experts." in name and p.ndim == 3]
    if adapter.target_parameters and lora.bias != "none" and any(get_expert_shard(stack) for stack in stacks):
        raise AssertionError("biases of the base were planned to be trained with adapters of split experts")
    # PEFT draws A on the CPU: the same seed gives every rank the same adapter. Dropout deliberately continues from it,
    # so ranks draw the same masks for different rows, as with transformers' Trainer.
    set_seed(seed)
    config = make_peft_config(lora, adapter)
    with patch_peft(), ignore_peft_warnings():
        peft_model = get_peft_model(model, config, autocast_adapter_dtype=lora.dtype == "float32")
    if lora.adapter:  # load the saved tensors; of split experts, this rank's part
        parts = AdapterShards(peft_model)
        _, mapping = read_inner_config(Path(lora.adapter))
        saved = load_peft_weights(lora.adapter, "cpu", mapping)
        of_rank = {name: parts.cut(name, tensor) for name, tensor in saved.items()}
        outcome = set_peft_model_state_dict(peft_model, shard_like(peft_model, of_rank))
        odd = [*(name for name in outcome.missing_keys if "lora_" in name), *outcome.unexpected_keys]
        if odd:
            raise UserError(
                f"{lora.adapter} is not a complete adapter of this model: {odd[0]}",
                "lora.adapter",
                "name a folder that final/ or checkpoints/step-N of a run with the same model and lora section left",
                "incomplete-adapter",
            )
    if lora.starts_from_weights and not lora.adapter:
        init_from_weights(peft_model, str(lora.init_lora_weights))
    Patches().patch_adapted_linears(peft_model)
    if adapter.target_parameters:
        Patches().patch_experts(peft_model)
        # PEFT refuses dropout with experts: the saved configuration says 0, so that PEFT opens it.
        if lora.lora_dropout:
            for module in peft_model.modules():
                if isinstance(module, LoraLayer):
                    module.lora_dropout.update({ADAPTER_NAME: nn.Dropout(lora.lora_dropout)})
    unfreeze_modules(peft_model, lora, adapter)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            # PEFT puts it on the base weight's device; an offloaded base computes elsewhere.
            parameter.data = parameter.data.to(get_device(), getattr(torch, lora.dtype))
    require_planned(peft_model, adapter)
    return peft_model


def read_inner_config(folder: Path) -> tuple[Any, dict[str, str] | None]:
    """Return PEFT's configuration of a saved adapter with the language model's own names, and the `key_mapping` to
    them."""
    config = PeftConfig.from_pretrained(str(folder))
    file = folder / "adapter_model.safetensors"
    keys = list(read_header(file)) if file.is_file() else []
    if all(inner_name(key) == key for key in keys):
        return config, None
    for name, value in rename_config(config.to_dict(), keys, inner_name).items():
        setattr(config, name, value)
    return config, {r"(?<![^.])language_model\.": ""}


def unfreeze_modules(peft_model: PeftModel, lora: Lora, adapter: Adapter) -> None:
    """Train base weights themselves, sharded as they are.

    PEFT's files have them under their own names. PEFT itself would train unsharded copies and keep the originals.
    """
    model = peft_model.get_base_model()
    for name in adapter.in_full:
        owner = model.get_submodule(name.rpartition(".")[0])
        if get_formats(owner):
            what = f"{name} is stored in fewer bits, and can't be trained"
            raise UserError(what, "lora.modules_to_save", "set layout.base_dtype: bf16", "not-trainable-in-full")
        owner.weight.requires_grad_(True)
        if isinstance(owner, nn.Embedding):  # keep the layers' compute dtype
            owner.register_forward_hook(partial(_cast_output, model.config.dtype))
    peft_model.peft_config[ADAPTER_NAME].modules_to_save = lora.modules_to_save or None


def _cast_output(dtype: torch.dtype, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output.to(dtype)


def make_peft_config(lora: Lora, adapter: Adapter) -> LoraConfig:
    """Return PEFT's configuration for the run file's lora section, with exact names. Experts may have a rank of
    their own."""
    lora = lora.stored
    r_by_module = adapter.r_by_module
    r_of = {name: r_by_module.get(name, lora.r) for name in adapter.target_modules}
    ranks = {name: r for name, r in r_of.items() if r != lora.r}
    alphas = dict(adapter.alphas)
    if lora.experts:
        for suffix in {".".join(name.split(".")[-2:]) for name in adapter.target_parameters}:  # experts.down_proj
            ranks[suffix.replace(".", r"\.")] = lora.experts.r or lora.r
            alphas[suffix.replace(".", r"\.")] = lora.experts.lora_alpha or lora.lora_alpha
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        # PEFT refuses dropout with experts: see `UnmergedExpertLora`.
        lora_dropout=0.0 if adapter.target_parameters else lora.lora_dropout,
        target_modules=list(adapter.target_modules),
        target_parameters=list(adapter.target_parameters) or None,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        bias=lora.bias,
        task_type=lora.task_type,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        init_lora_weights=True if lora.starts_from_weights else lora.init_lora_weights,
    )


def read_adapter_sizes(model: PeftModel) -> dict[str, int]:
    """Return what PEFT has built: full name of each adapted module or expert parameter -> its trainable parameters."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            place = ".".join(part for part in name.removeprefix("base_model.model.").split(".") if part != "base_layer")
            leaf = getattr(module, "parameter_name", None)  # set for a fused expert parameter, which is no module
            trained = (p for n, p in module.named_parameters() if not n.startswith("base_layer.") and p.requires_grad)
            part = getattr(module, "part", None)  # a rank's part of split experts is as large as any other's
            ways = part.total // part.count if part else 1
            sizes[f"{place}.{leaf}" if leaf else place] = ways * sum(p.numel() for p in trained)
    return sizes


def require_planned(model: PeftModel, adapter: Adapter) -> None:
    """Check that the adapter is the plan's: the same modules and the same number of trainable parameters per target."""
    sizes = read_adapter_sizes(model)
    planned = {module for target in adapter.targets for module in target.modules}
    wrong = [f"the plan adapts {name}, the model has no adapter there" for name in sorted(planned - sizes.keys())]
    wrong += [f"the model has an adapter on {name}, the plan has none" for name in sorted(sizes.keys() - planned)]
    for target in adapter.targets:
        count = sum(sizes.get(module, 0) for module in target.modules)
        if count != target.parameters and planned == sizes.keys():
            wrong.append(f"{target.pattern}: {count:,} trainable parameters, the plan says {target.parameters:,}")
    others = sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name)
    trainable = sum(sizes.values()) + others  # base weights and biases, if they are trained
    if not wrong and trainable != adapter.trainable:
        wrong.append(f"{trainable:,} trainable parameters, the plan says {adapter.trainable:,}")
    hint = "the plan and the model disagree, a bug in windlass: report it with the output of `windlass plan RUN --json`"
    raise_all([Problem(difference, "lora.target_modules", hint, "plan-disagrees") for difference in wrong[:8]])
