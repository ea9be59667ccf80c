"""What bfloat16 keeps of an adapter: its gain over the base on chats, and the margins of pairs, against float32.

    python benchmarks/bfloat16.py MODEL ADAPTER CHATS.jsonl            B scaled by 1, 0.3, 0.1 and 0.03
    python benchmarks/bfloat16.py MODEL ADAPTER CHATS.jsonl --rows 20 --scales 1 0.1

A gain is nats per answer token. As PEFT computes it, a layer's output is rounded before the adapter's is added;
windlass rounds the sum. Autocast: weights and what runs between the layers in float32, products in bfloat16. A pair is
a chat's answer against the next chat's; its margin is how much more the adapter favours the answer than the base does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from windlass.train.fsdp import get_device
from windlass.train.patches import Patches

Rows = list[tuple[list[int], int]]  # tokens, and where the answer begins
WAYS = {
    "float32": (torch.float32, False, False),
    "PEFT, autocast": (torch.float32, True, False),
    "PEFT, all in bfloat16": (torch.bfloat16, False, False),
    "windlass, autocast": (torch.float32, True, True),
    "windlass, all in bfloat16": (torch.bfloat16, False, True),
}


def read_rows(tokenizer: Any, chats: list[list[dict[str, str]]]) -> Rows:
    rows = []
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
        tokens = tokenizer.apply_chat_template(chat[:2], return_dict=False)
        end = len(tokens) - tokens[::-1].index(tokenizer.eos_token_id)
        rows.append((tokens[:end], len(prompt)))
    return rows


@torch.no_grad()
def sum_answers(model: Any, rows: Rows, *, autocast: bool) -> torch.Tensor:
    """Return the log-probability of each row's answer."""
    sums = []
    for tokens, start in rows:
        ids = torch.tensor([tokens], device=model.device)
        with torch.autocast(model.device.type, torch.bfloat16) if autocast else nullcontext():
            logits = model(ids, use_cache=False).logits
        scores = logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[start - 1 :, 0]
        sums.append(scores.double().sum())
    return torch.stack(sums).cpu()


def measure(model: str, adapter: str, scale: float, answers: Rows, others: Rows) -> Iterator[tuple[str, Any, Any]]:
    """Yield each way with what the adapter adds to the log-probability of each answer, and of each other answer."""
    for way, (dtype, autocast, once) in WAYS.items():
        base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(get_device())
        peft_model = PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False).eval()
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.data *= scale
        if once:
            Patches().patch_adapted_linears(peft_model)
            Patches().patch_experts(peft_model)
        gains = []
        for rows in (answers, others):
            with peft_model.disable_adapter():
                plain = sum_answers(peft_model, rows, autocast=autocast)
            gains.append(sum_answers(peft_model, rows, autocast=autocast) - plain)
        yield way, gains[0], gains[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("chats", type=Path)
    parser.add_argument("--rows", type=int, default=60, help="the last chats of the file")
    parser.add_argument("--scales", type=float, nargs="+", default=[1, 0.3, 0.1, 0.03])
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    chats = [json.loads(line)["messages"] for line in options.chats.read_text().splitlines()[-options.rows :]]
    answers = read_rows(tokenizer, chats)
    others = read_rows(
        tokenizer, [[chat[0], other[1]] for chat, other in zip(chats, chats[1:] + chats[:1], strict=True)]
    )
    tokens = sum(len(row) - start for row, start in answers)
    print(f"{len(answers)} chats, {tokens} answer tokens; torch {torch.__version__} on {get_device().type}")
    print(f"{'B x':>5}  {'':25}  {'gain':>8}  {'kept':>6}  {'margin':>8}  {'accuracy':>8}  {'correlation':>11}")
    for scale in options.scales:
        true = true_margins = None
        for way, gains, gains_of_others in measure(options.model, options.adapter, scale, answers, others):
            gain = gains.sum() / tokens
            margins = gains - gains_of_others
            true = gain if true is None else true
            true_margins = margins if true_margins is None else true_margins
            correlation = torch.corrcoef(torch.stack([margins, true_margins]))[0, 1]
            figures = f"{gain:8.4f}  {gain / true:6.0%}  {margins.mean():8.3f}  {(margins > 0).double().mean():8.0%}"
            print(f"{scale:5g}  {way:25}  {figures}  {correlation:11.2f}", flush=True)


if __name__ == "__main__":
    main()
