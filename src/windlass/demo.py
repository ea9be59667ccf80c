"""The main job in small: a tiny Mistral 4 in its published layout, text that Python carries, a run file."""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

from windlass.errors import UserError

RUN = """\
# A tiny Mistral 4 in the published layout (multimodal wrapper, FP8 experts), trained on two ranks of this machine.
name: demo

model:
  model_name_or_path: {model}

lora:
  r: 8
  lora_alpha: 16
  lora_dropout: 0.0
  target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]

data:
  dataset_name_or_path: {data}
  dataset_config_name: null
  text_field: text
  train_split: train
  val_split: validation
  max_length: 128
  packing: true

train:
  output_dir: {output}
  max_steps: 60
  per_device_train_batch_size: 4
  per_device_eval_batch_size: 4
  gradient_accumulation_steps: 1
  learning_rate: 0.003
  warmup_ratio: 0.05
  bf16: false
  logging_steps: 5
  eval_steps: 20
  save_steps: 20

layout: full-shard

cluster:
  nodes: 1
  gpus_per_node: 2
  gpu: cpu
"""


def make(directory: Path) -> Path:
    """Write `model/`, `data/` and `run.yaml` into `directory`; returns the run file. Nothing there is overwritten."""
    from windlass import tiny

    run = directory / "run.yaml"
    if run.exists():
        raise UserError("a demo is there already", str(run), f"windlass train {run}, or give another --dir")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # A wider start than usual, so that a random model is wrong enough for its loss to fall visibly.
        config = {"initializer_range": 0.2}
        tiny.write(directory / "model", "mistral4", hidden=128, layers=2, vocab=1024, config=config)
        _write_data(directory / "data")
        run.write_text(
            RUN.format(
                model=json.dumps(str(directory / "model")),
                data=json.dumps(str(directory / "data")),
                output=json.dumps(str(directory / "run")),
            ),
            encoding="utf-8",
        )
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", str(directory), "give another --dir") from None
    return run


def _write_data(folder: Path) -> None:
    """Paragraphs of Python's own help pages, every tenth held out for evaluation."""
    pages = (page for _, page in sorted(pydoc_data.topics.topics.items()))
    texts = (text.strip() for page in pages for text in page.split("\n\n"))
    paragraphs = list(dict.fromkeys(text for text in texts if len(text) > 80))  # pages repeat each other
    folder.mkdir(exist_ok=True)
    for split, rows in (
        ("train", [text for i, text in enumerate(paragraphs) if i % 10]),
        ("validation", paragraphs[::10]),
    ):
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in rows)
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
