"""The recipe's settings in the terms of other trainers, each in its own environment."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

# No look at a hub, no reports home, and LLaMA-Factory takes torch as it is.
ENVIRON = {"DISABLE_VERSION_CHECK": "1", "USE_HF": "1", "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"}


@dataclass(frozen=True)
class Asked:
    targets: Sequence[str]
    length: int
    r: int
    alpha: int
    rate: float
    seed: int
    batch: int
    accumulation: int
    packs: bool


def command(kind: str, python: str, made: Path, out: Path, asked: Asked) -> list[str]:
    """Return the command of every rank, with its settings written to `out`; model and rows are those of `made`."""
    rows = [json.loads(line)["text"] for line in (made / "data" / "train.jsonl").read_text().splitlines()]
    settings = {**of_trainer(out, asked), **SETTINGS[kind](made / "model", rows, out, asked)}
    if kind == "swift":
        words = ((f"--{key}", *map(str, each if isinstance(each, list) else [each])) for key, each in settings.items())
        return [python, "-m", "swift.cli.pt", *(word for pair in words for word in pair)]
    (out / "run.yaml").write_text(json.dumps(settings))
    return {
        "llamafactory": [python, "-m", "llamafactory.cli", "train", str(out / "run.yaml")],
        "axolotl": [python, "-m", "axolotl.cli.train", str(out / "run.yaml")],
    }[kind]


def merge_command(kind: str, python: str, model: Path, adapter: Path, to: Path) -> list[str]:
    """Return the command by which a trainer merges an adapter; `to` is the folder that it writes."""
    if kind == "swift":
        words = ["--model", model, "--model_type", AutoConfig.from_pretrained(model).model_type, "--template", "dummy"]
        words += ["--adapters", adapter, "--load_args", "false", "--merge_lora", "true", "--output_dir", to]
        return [python, "-m", "swift.cli.export", *map(str, words)]
    settings = {"model_name_or_path": str(model), "adapter_name_or_path": str(adapter), "finetuning_type": "lora"}
    file = to.with_suffix(".yaml")
    file.write_text(json.dumps({**settings, "template": "default", "export_dir": str(to), "export_device": "cpu"}))
    return [python, "-m", "llamafactory.cli", "export", str(file)]


def of_trainer(out: Path, asked: Asked) -> dict[str, Any]:
    """Return the settings that all of them pass to transformers' Trainer under its own names."""
    return {
        "output_dir": str(out / "final"),
        "num_train_epochs": 1,
        "gradient_accumulation_steps": asked.accumulation,
        "learning_rate": asked.rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "lora_alpha": asked.alpha,
        "lora_dropout": 0.0,
        "bf16": False,
        "fp16": False,
        "seed": asked.seed,
        "logging_steps": 1,
    }


PLAIN = {"use_cpu": True, "save_steps": 100000, "report_to": "none"}


def of_llamafactory(model: Path, rows: Sequence[str], out: Path, asked: Asked) -> dict[str, Any]:
    # It begins rows with BOS only where the tokenizer's settings have add_bos_token.
    tokenizer = AutoTokenizer.from_pretrained(model)
    bos = tokenizer.bos_token if tokenizer("a").input_ids[0] == tokenizer.bos_token_id else ""
    write(out / "rows.jsonl", ({"text": bos + row} for row in rows))
    about = {"file_name": str(out / "rows.jsonl"), "columns": {"prompt": "text"}}
    (out / "dataset_info.json").write_text(json.dumps({"rows": about}))
    return {
        **PLAIN,
        "per_device_train_batch_size": asked.batch,
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "lora",
        "model_name_or_path": str(model),
        "dataset": "rows",
        "dataset_dir": str(out),
        "cutoff_len": asked.length,
        "packing": asked.packs,
        "template": "default",
        "lora_rank": asked.r,
        "lora_target": ",".join(asked.targets),
        "disable_gradient_checkpointing": True,
    }


def of_swift(model: Path, rows: Sequence[str], out: Path, asked: Asked) -> dict[str, Any]:
    write(out / "rows.jsonl", ({"messages": [{"role": "assistant", "content": row}]} for row in rows))
    return {
        **PLAIN,
        "per_device_train_batch_size": asked.batch,
        "model": str(model),
        "model_type": AutoConfig.from_pretrained(model).model_type,
        "template": "dummy",
        "dataset": str(out / "rows.jsonl"),
        "split_dataset_ratio": 0,
        "max_length": asked.length,
        "tuner_type": "lora",
        "lora_rank": asked.r,
        "target_modules": list(asked.targets),
        "torch_dtype": "float32",
        "gradient_checkpointing": False,
        "packing": False,
        "add_version": False,
    }


def of_axolotl(model: Path, rows: Sequence[str], out: Path, asked: Asked) -> dict[str, Any]:
    write(out / "rows.jsonl", ({"text": row} for row in rows))
    taken = {"path": str(out / "rows.jsonl"), "ds_type": "json", "type": "completion", "field": "text"}
    return {
        "base_model": str(model),
        "datasets": [taken],
        "dataset_prepared_path": str(out / "prepared"),
        "val_set_size": 0,
        "adapter": "lora",
        "lora_r": asked.r,
        "lora_target_modules": list(asked.targets),
        # Its Triton kernels run on GPUs alone.
        "lora_mlp_kernel": False,
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
        "sequence_len": asked.length,
        "sample_packing": False,
        "pad_to_sequence_len": False,
        "micro_batch_size": asked.batch,
        "num_epochs": 1,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "optimizer": "adamw_torch",
        "attn_implementation": "sdpa",
        "tf32": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
    }


SETTINGS: Mapping[str, Callable[[Path, Sequence[str], Path, Asked], dict[str, Any]]] = {
    "llamafactory": of_llamafactory,
    "swift": of_swift,
    "axolotl": of_axolotl,
}


def write(path: Path, rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
