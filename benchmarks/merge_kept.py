"""What is left of an adapter after a merge into a bfloat16 base: PEFT's merge_and_unload and windlass's.

    python benchmarks/merge_kept.py MODEL ADAPTER CHATS [--rows 60] [--scales 1 0.3 0.1 0.03]

CHATS is a JSONL file with `messages`; its last rows are used. A smaller adapter is the same one with its B scaled. The
adapter's gain is how much lower the loss of the answers' tokens is than the base's; kept is the merged model's share of
it, KL its distance from base + adapter on the same tokens. Every model computes in float32, so rounding the merged
weights to bfloat16 is all that differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from windlass.export import export
from windlass.train.logits import kl_divergence

Rows = list[tuple[Tensor, int]]  # tokens of a chat, and where its answer begins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--scales", type=float, nargs="+", default=[1, 0.3, 0.1, 0.03])
    given = parser.parse_args()
    logging.disable_progress_bar()
    rows = read_rows(given.chats, given.model, given.rows)
    base, base_loss = predict(load(given.model), rows)
    print("| B x | gain, nats a token | PEFT kept | PEFT KL | windlass kept | windlass KL | adapter's own KL |")
    print("|---|---|---|---|---|---|---|")
    for scale in given.scales:
        with tempfile.TemporaryDirectory() as directory:
            adapter, merged = Path(directory, "adapter"), Path(directory, "merged")
            adapter.mkdir()
            shutil.copy(given.adapter / "adapter_config.json", adapter)
            factors = load_file(given.adapter / "adapter_model.safetensors")
            factors = {key: value * scale if "lora_B" in key else value for key, value in factors.items()}
            save_file(factors, adapter / "adapter_model.safetensors")
            options: dict[str, Any] = {"base": str(given.model), "dtype": "bf16", "allow_other_base": True}
            export(adapter, merged, merge=True, say=lambda _: None, **options)
            true, loss = predict(PeftModel.from_pretrained(load(given.model), str(adapter)), rows)
            theirs = PeftModel.from_pretrained(load(given.model, torch.bfloat16), str(adapter)).merge_and_unload()
            cells = []
            for model in (theirs.float(), load(merged)):
                logits, merged_loss = predict(model, rows)
                cells += [f"{(base_loss - merged_loss) / (base_loss - loss):.0%}", f"{kl_divergence(true, logits):.1e}"]
        own = f"{kl_divergence(true, base):.1e}"
        print(f"| {scale:g} | {base_loss - loss:.3f} | {' | '.join(cells)} | {own} |", flush=True)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def read_rows(chats: Path, model: Path, count: int) -> Rows:
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = []
    for line in chats.read_text().splitlines()[-count:]:
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        rows.append((torch.tensor([tokenizer.apply_chat_template(messages, return_dict=False)]), len(prompt)))
    return rows


@torch.no_grad()
def predict(model: Any, rows: Rows) -> tuple[Tensor, float]:
    """Return the logits of all answers' tokens, and their mean loss."""
    logits = torch.cat([model.eval()(input_ids=row).logits[0, start - 1 : -1] for row, start in rows])
    return logits, float(torch.nn.functional.cross_entropy(logits, torch.cat([row[0, start:] for row, start in rows])))


if __name__ == "__main__":
    main()
