"""The example of a real model, `make real`, in TRL + PEFT: same rows, steps and adapter; right answers counted alike.

    make real && python benchmarks/smollm2.py [--dir real-run]

TRL trains on as many rows a step as windlass packs into its sequences, on one process with all cores, at the run file's
rate and r. Then one function counts, by plain transformers + PEFT in float32 and greedily, how many held-out answers
are right to the character: of the untrained model, of windlass's adapter and of TRL's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from windlass.files import read_json, read_json_lines

BATCH = 8  # prompts at once while answers are counted


def read_rows(path: Path) -> list[dict[str, list[dict[str, str]]]]:
    """Return a split's chats as TRL's prompts and completions: it trains on the completions alone, as windlass does."""
    chats = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats]


def load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


SHARED = ("max_steps", "learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm", "seed")


def train(run: Any, rows_a_step: int, rows: list[Any], out: Path) -> tuple[Any, float]:
    """Return TRL's trained model, and the seconds that its steps took."""
    model, lora = run["model"]["model_name_or_path"], run["lora"]
    config = LoraConfig(r=lora["r"], lora_alpha=lora["lora_alpha"], target_modules="all-linear", task_type="CAUSAL_LM")
    settings = SFTConfig(
        **{name: run["train"][name] for name in SHARED},
        warmup_steps=math.ceil(run["train"]["warmup_ratio"] * run["train"]["max_steps"]),
        output_dir=str(out),
        per_device_train_batch_size=rows_a_step,
        max_length=run["data"]["max_length"],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        logging_steps=5,
    )
    trainer = SFTTrainer(
        model=get_peft_model(load_model(model), config),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    began = time.perf_counter()
    trainer.train()
    return trainer.model, time.perf_counter() - began


@torch.no_grad()
def count_right(model: Any, tokenizer: Any, rows: list[Any]) -> int:
    """Return how many answers equal the row's own to the character."""
    tokenizer.padding_side = "left"
    right = 0
    for first in range(0, len(rows), BATCH):
        asked = rows[first : first + BATCH]
        texts = [
            tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in asked
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        found = model.eval().generate(**batch, max_new_tokens=64, do_sample=False)[:, batch.input_ids.shape[1] :]
        answers = tokenizer.batch_decode(found, skip_special_tokens=True)
        expected = [row["completion"][0]["content"] for row in asked]
        right += sum(answer.strip() == text for answer, text in zip(answers, expected, strict=True))
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("real-run"), help="where `make real` left its results")
    folder = parser.parse_args().dir
    run = read_json(folder / "run" / "manifest.json")["run"]
    model = run["model"]["model_name_or_path"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows, held_out = (read_rows(folder / "data" / f"{split}.jsonl") for split in ("train", "validation"))
    steps = list(read_json_lines(folder / "run" / "steps-rank0.jsonl"))
    rows_a_step = round(steps[-1]["epoch"] * len(rows) / len(steps))
    torch.set_num_threads(os.cpu_count() or 1)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}; {len(held_out)} held-out rows")
    untrained = count_right(load_model(model), tokenizer, held_out)
    print(f"untrained: {untrained} right", flush=True)
    ours = PeftModel.from_pretrained(load_model(model), folder / "adapter")
    seconds = sum(step["step_seconds"] for step in steps)
    print(f"windlass: {count_right(ours, tokenizer, held_out)} right, {seconds:.0f} s of steps", flush=True)
    theirs, seconds = train(run, rows_a_step, rows, folder / "trl")
    print(f"TRL: {count_right(theirs, tokenizer, held_out)} right, {seconds:.0f} s of {rows_a_step} rows each")


if __name__ == "__main__":
    main()
