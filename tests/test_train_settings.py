"""The run file's `train` section in TRL's words: every key used, none lost."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trl import SFTConfig

from windlass import plan as planning
from windlass.plan.cost import Batch
from windlass.runfile import Train, read
from windlass.train.folder import resolved
from windlass.train.settings import OURS, SAME, settings, warmup

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


def made(tmp_path: Path, data: dict[str, Any] | None = None, **keys: Any) -> SFTConfig:
    train = Train.model_validate({"output_dir": str(tmp_path), "bf16": False, **keys})
    layout = SimpleNamespace(activation_checkpointing=False)
    plan: Any = SimpleNamespace(
        loaded=SimpleNamespace(run=SimpleNamespace(train=train)), batch=Batch(3, 5, 64), layout=layout
    )
    return settings(plan, data or {}, cpu=True)


def test_every_key_of_train_is_used_or_said_to_be_ours() -> None:
    assert set(SAME) | set(OURS) == set(Train.model_fields)
    assert not set(SAME) & set(OURS)
    assert set(SAME) <= {field.name for field in fields(SFTConfig)}


OTHER: dict[str, Any] = {
    "num_train_epochs": 2.5, "max_steps": 7, "per_device_eval_batch_size": 4, "optim": "adafactor",
    "learning_rate": 3e-4, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6},
    "weight_decay": 0.2, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "max_grad_norm": 0.5,
    "bf16": True, "fp16": True, "logging_steps": 3, "eval_strategy": "epoch", "eval_steps": 11,
    "save_strategy": "epoch", "save_steps": 13, "save_total_limit": 2, "load_best_model_at_end": True,
    "report_to": ["tensorboard"], "seed": 5, "ddp_timeout": 99, "dataloader_num_workers": 2,
    "dataloader_pin_memory": False, "run_name": "x",
}  # fmt: skip
TOGETHER: dict[str, dict[str, Any]] = {
    "load_best_model_at_end": {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 200},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_min_lr"},
}


@pytest.mark.parametrize("key", SAME)
def test_a_key_reaches_trl_with_its_value(tmp_path: Path, key: str) -> None:
    if key in ("fp16", "report_to"):
        pytest.skip("needs a GPU, or a tracker that is installed")
    value = OTHER[key]
    config = made(tmp_path, **{**TOGETHER.get(key, {}), key: value})
    found = getattr(config, key)
    assert getattr(found, "value", found) == value


def test_batch_comes_from_the_plan_and_rows_from_the_data(tmp_path: Path) -> None:
    config = made(tmp_path, {"packing": True, "max_length": None}, per_device_train_batch_size=1)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (3, 5)
    assert (config.packing, config.max_length) == (True, None)


def test_the_run_folder_says_the_batch_that_the_plan_chose(tmp_path: Path) -> None:
    config = made(tmp_path, per_device_train_batch_size="auto")
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (3, 5)
    example = Path(__file__).parent.parent / "examples" / "mistral-small-4" / "train.yaml"
    plan = planning.make(read(example, ["train.per_device_train_batch_size=auto"]))
    told = resolved(plan)["train"]
    assert told["per_device_train_batch_size"] == plan.batch.micro > 1
    assert told["per_device_train_batch_size"] * told["gradient_accumulation_steps"] == 16


@pytest.mark.parametrize(
    ("keys", "steps"),
    [({"warmup_ratio": 0.05}, 5), ({"warmup_ratio": 1.0}, 100), ({"warmup_steps": 1}, 1), ({"warmup_ratio": 0.0}, 0)],
)
def test_warm_up_means_what_the_run_file_means(tmp_path: Path, keys: dict[str, Any], steps: int) -> None:
    config = made(tmp_path, **keys)
    assert config.get_warmup_steps(100) == steps
    assert warmup(Train.model_validate(keys)) == config.warmup_steps


def test_checkpointing_by_either_name(tmp_path: Path) -> None:
    assert made(tmp_path, gradient_checkpointing=True).activation_checkpointing
    assert not made(tmp_path).activation_checkpointing


def test_the_best_checkpoint_is_the_one_of_the_lowest_loss(tmp_path: Path) -> None:
    config = made(tmp_path, eval_strategy="steps")
    assert (config.metric_for_best_model, config.greater_is_better) == ("loss", False)
