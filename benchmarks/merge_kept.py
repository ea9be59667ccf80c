"""What is left of an adapter after a merge into a bfloat16 base: PEFT's merge_and_unload and windlass's.

    python benchmarks/merge_kept.py MODEL ADAPTER CHATS [--rows 60] [--scales 1 0.3 0.1 0.03]

CHATS is a JSONL file with `messages`, of which the last rows are used. Smaller adapters are the same one with B scaled.
The gain is by how much the adapter lowers the loss of the answers' tokens; kept is the merged model's share of it, KL
its distance from base + adapter. All compute in float32, so the rounded weights are all that differs.
"""

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "adapter", "chats"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--scales", type=float, nargs="+", default=[1, 0.3, 0.1, 0.03])
    given = parser.parse_args()
    logging.disable_progress_bar()
    rows = read_rows(given.chats, given.model, given.rows)
    base, base_loss = predict(load(given.model), rows)
    print("| B x | gain, nats a token | PEFT kept | PEFT KL | windlass kept | windlass KL | adapter's own KL |")
    print("|---" * 7 + "|")
    for scale in given.scales:
        with tempfile.TemporaryDirectory() as directory:
            adapter, merged = Path(directory, "adapter"), Path(directory, "merged")
            adapter.mkdir()
            shutil.copy(given.adapter / "adapter_config.json", adapter)
            factors = load_file(given.adapter / "adapter_model.safetensors").items()
            scaled = {key: value * scale if "lora_B" in key else value for key, value in factors}
            save_file(scaled, adapter / "adapter_model.safetensors")
            export(adapter, merged, merge=True, dtype="bf16", base=str(given.model), say=lambda _: None)
            true, loss = predict(PeftModel.from_pretrained(load(given.model), str(adapter)), rows)
            theirs = PeftModel.from_pretrained(load(given.model, torch.bfloat16), str(adapter)).merge_and_unload()
            cells = [f"{scale:g}", f"{base_loss - loss:.3f}"]
            for model in (theirs.float(), load(merged)):
                logits, merged_loss = predict(model, rows)
                cells += [f"{(base_loss - merged_loss) / (base_loss - loss):.0%}", f"{kl_divergence(true, logits):.1e}"]
        print("|", " | ".join([*cells, f"{kl_divergence(true, base):.1e}"]), "|", flush=True)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def read_rows(chats: Path, model: Path, count: int) -> list[tuple[Tensor, int]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = []
    for line in chats.read_text().splitlines()[-count:]:
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        rows.append((torch.tensor([tokenizer.apply_chat_template(messages, return_dict=False)]), len(prompt)))
    return rows


@torch.no_grad()
def predict(model: Any, rows: list[tuple[Tensor, int]]) -> tuple[Tensor, float]:
    """Return the logits of all answers' tokens, and their mean loss."""
    logits = torch.cat([model.eval()(input_ids=row).logits[0, start - 1 : -1] for row, start in rows])
    return logits, float(torch.nn.functional.cross_entropy(logits, torch.cat([row[0, start:] for row, start in rows])))


if __name__ == "__main__":
    main()
