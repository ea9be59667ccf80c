"""A valid run of a small complete model in its published layout, on two ranks and rows of text that Python carries;
and rows of any kind, prepared."""

import json
import pydoc_data.topics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from windlass import tiny
from windlass.data.prepare import PreparedData, prepare_data
from windlass.runfile import RunFile

WORDS = "anchor bark cable deck eddy fathom galley hull inlet jib keel lee mast north oar pier quay reef sail tide"
RUN = """
name: demo
model: {{model_name_or_path: {folder}/model}}
lora:
  r: 8
  lora_alpha: 16
  lora_dropout: 0.0
  target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
data:
  dataset_name_or_path: {folder}/data
  dataset_config_name: null
  text_field: text
  train_split: train
  val_split: validation
  max_length: 128
  packing: true
train:
  output_dir: {folder}/run
  max_steps: 60
  per_device_train_batch_size: 4
  per_device_eval_batch_size: 4
  gradient_accumulation_steps: 1
  learning_rate: 0.003
  warmup_ratio: 0.05
  max_grad_norm: 2
  bf16: false
  logging_steps: 5
  eval_steps: 20
  save_steps: 20
layout: full-shard
cluster:
  nodes: 1
  gpus_per_node: 2
  gpu: cpu
  machine: null
"""


def make_text_run(directory: Path, most: int | None = None) -> Path:
    """Write `model/`, `data/` with at most so many rows, and `run.yaml` into `directory`; returns the run file."""
    (directory / "data").mkdir(parents=True)
    # A wider start than usual, so that a random model is wrong enough for its loss to fall visibly.
    tiny.write_model(directory / "model", hidden=128, vocab=1024, config={"initializer_range": 0.2})
    pages = [page for _, page in sorted(pydoc_data.topics.topics.items())]
    texts = dict.fromkeys(text.strip() for page in pages for text in page.split("\n\n"))
    rows = [{"text": text} for text in texts if len(text) > 80][:most]
    write_rows(directory / "data" / "train.jsonl", (row for i, row in enumerate(rows) if i % 10))
    write_rows(directory / "data" / "validation.jsonl", rows[::10])
    run = directory / "run.yaml"
    run.write_text(RUN.format(folder=directory))
    return run


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def prepare_rows(
    folder: Path,
    rows: Sequence[Any],
    tokenizer: Any,
    train: dict[str, Any] | None = None,
    least: float = 0.0,
    more: dict[str, Any] | None = None,
    **section: Any,
) -> PreparedData:
    """Write the rows into `folder`, and prepare them for a run with these keys of `data` and `train`."""
    data = {"dataset_name_or_path": str(write_rows(folder / "a.jsonl", rows)), "max_length": 512, "packing": False}
    if "mix" in section:
        del data["dataset_name_or_path"]
    tree = {
        "model": {"model_name_or_path": str(folder / "model")},
        "data": data | section,
        "train": {"output_dir": str(folder / "out"), "max_steps": 5, **(train or {})},
        "watch": {"min_supervised_fraction": least},
    }
    options = {"where": lambda key: f"run.yaml:9: {key}", "say": print, **(more or {})}
    return prepare_data(RunFile.model_validate(tree), tokenizer, **options)
