"""What bfloat16 keeps of an adapter: its gain over the base on chats, and the margins of pairs, against float32.

    python benchmarks/bfloat16.py MODEL ADAPTER CHATS.jsonl            B scaled by 1, 0.3, 0.1 and 0.03
    python benchmarks/bfloat16.py MODEL ADAPTER CHATS.jsonl --rows 20 --scales 1 0.1
    python benchmarks/bfloat16.py MODEL ADAPTER CHATS.jsonl --residual         how the sum between layers is rounded

A gain is nats per answer token. As PEFT computes it, a layer's output is rounded before the adapter's is added;
windlass rounds the sum. Autocast: weights and what runs between the layers in float32, products in bfloat16. A pair is
a chat's answer against the next chat's; its margin is how much more the adapter favours the answer than the base does.
With --residual all weights are in bfloat16, and layers, of Llama's kind, round once: what is added up between them is
rounded to bfloat16, kept in float32, or rounded up or down by chance, with the same numbers for adapter and base.
"""

from __future__ import annotations

import argparse
import json
import time
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from windlass.train.fsdp import get_device
from windlass.train.patches import Patches

Rows = list[tuple[list[int], int]]  # tokens, and where the answer begins
Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # a branch to the residual stream


def add_wide(stream: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    return stream.float() + branch.float()


def add_by_chance(stream: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    bits = add_wide(stream, branch).view(torch.int32)
    return (bits + torch.randint_like(bits, 2**16) & -(2**16)).view(torch.float32).bfloat16()


WAYS: dict[str, tuple[torch.dtype, bool, bool, Add | None]] = {
    "float32": (torch.float32, False, False, None),
    "PEFT, autocast": (torch.float32, True, False, None),
    "PEFT, all in bfloat16": (torch.bfloat16, False, False, None),
    "windlass, autocast": (torch.float32, True, True, None),
    "windlass, all in bfloat16": (torch.bfloat16, False, True, None),
}
RESIDUAL: dict[str, tuple[torch.dtype, bool, bool, Add | None]] = {
    "float32": WAYS["float32"],
    "sum in bfloat16": (torch.bfloat16, False, True, torch.add),
    "sum in float32": (torch.bfloat16, False, True, add_wide),
    "rounded by chance": (torch.bfloat16, False, True, add_by_chance),
}


def read_rows(tokenizer: Any, chats: list[list[dict[str, str]]]) -> Rows:
    rows = []
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
        tokens = tokenizer.apply_chat_template(chat[:2], return_dict=False)
        end = len(tokens) - tokens[::-1].index(tokenizer.eos_token_id)
        rows.append((tokens[:end], len(prompt)))
    return rows


def patch_residual(model: Any, add: Add) -> None:
    """Replace the sums between a Llama's layers; what a branch is given, and the head, is in bfloat16."""

    def forward(self: Any, stream: torch.Tensor, **inputs: Any) -> torch.Tensor:
        stream = add(stream, self.self_attn(hidden_states=self.input_layernorm(stream), **inputs)[0])
        return add(stream, self.mlp(self.post_attention_layernorm(stream)))

    for layer in model.model.layers:
        layer.forward = types.MethodType(forward, layer)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
            norm.register_forward_hook(lambda _module, _inputs, output: output.bfloat16())


@torch.no_grad()
def sum_answers(model: Any, rows: Rows, *, autocast: bool) -> torch.Tensor:
    """Return the log-probability of each row's answer."""
    sums = []
    torch.manual_seed(0)
    for tokens, start in rows:
        ids = torch.tensor([tokens], device=model.device)
        with torch.autocast(model.device.type, torch.bfloat16) if autocast else nullcontext():
            logits = model(ids, use_cache=False).logits
        scores = logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[start - 1 :, 0]
        sums.append(scores.double().sum())
    return torch.stack(sums).cpu()


def measure(
    ways: dict[str, Any], model: str, adapter: str, scale: float, answers: Rows, others: Rows
) -> Iterator[tuple[str, Any, Any, float]]:
    """Yield each way with what the adapter adds to the log-probability of each answer, and of each other answer, and
    the seconds of the processor."""
    for way, (dtype, autocast, once, add) in ways.items():
        base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(get_device())
        peft_model = PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False).eval()
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.data *= scale
        if once:
            Patches().patch_adapted_linears(peft_model)
            Patches().patch_experts(peft_model)
        if add is not None:
            patch_residual(base, add)
        gains = []
        began = time.process_time()
        for rows in (answers, others):
            with peft_model.disable_adapter():
                plain = sum_answers(peft_model, rows, autocast=autocast)
            gains.append(sum_answers(peft_model, rows, autocast=autocast) - plain)
        yield way, gains[0], gains[1], time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("chats", type=Path)
    parser.add_argument("--rows", type=int, default=60, help="the last chats of the file")
    parser.add_argument("--scales", type=float, nargs="+", default=[1, 0.3, 0.1, 0.03])
    parser.add_argument("--residual", action="store_true", help="compare how the sum between layers is rounded")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    chats = [json.loads(line)["messages"] for line in options.chats.read_text().splitlines()[-options.rows :]]
    answers = read_rows(tokenizer, chats)
    others = read_rows(
        tokenizer, [[chat[0], other[1]] for chat, other in zip(chats, chats[1:] + chats[:1], strict=True)]
    )
    tokens = sum(len(row) - start for row, start in answers)
    print(f"{len(answers)} chats, {tokens} answer tokens; torch {torch.__version__} on {get_device().type}")
    heads = f"{'gain':>8}  {'kept':>6}  {'margin':>8}  {'accuracy':>8}  {'correlation':>11}  {'seconds':>7}"
    print(f"{'B x':>5}  {'':25}  {heads}")
    for scale in options.scales:
        true = true_margins = None
        ways = RESIDUAL if options.residual else WAYS
        for way, gains, gains_of_others, seconds in measure(
            ways, options.model, options.adapter, scale, answers, others
        ):
            gain = gains.sum() / tokens
            margins = gains - gains_of_others
            true = gain if true is None else true
            true_margins = margins if true_margins is None else true_margins
            correlation = torch.corrcoef(torch.stack([margins, true_margins]))[0, 1]
            figures = f"{gain:8.4f}  {gain / true:6.0%}  {margins.mean():8.3f}  {(margins > 0).double().mean():8.0%}"
            print(f"{scale:5g}  {way:25}  {figures}  {correlation:11.2f}  {seconds:7.1f}", flush=True)


if __name__ == "__main__":
    main()
