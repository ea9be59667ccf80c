"""What is left of an adapter after a merge: windlass's, PEFT's merge_and_unload, and other trainers' commands.

    python benchmarks/merge_kept.py MODEL ADAPTER CHATS [--rows 60] [--scales 1 0.3 0.1 0.03]
                                    [--peer llamafactory=/venv/bin/python] [--peer swift=/venv/bin/python]
    python benchmarks/merge_kept.py MODEL ADAPTER CHATS --stored nvfp4 int4 uint4 nf4

CHATS is a JSONL file with `messages`, of which the last rows are used. Smaller adapters are the same one with B scaled.
The gain is by how much the adapter lowers the loss of the answers' tokens; kept is the merged model's share of it, KL
its distance from base + adapter. All compute in float32, so the rounded weights are all that differs. With --stored the
base is quantized first, as llm-compressor or bitsandbytes would publish it, and windlass alone merges into it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from windlass.export import export
from windlass.model import read_base
from windlass.train.logits import kl_divergence, load_float32

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import real

PEFT, WINDLASS = "PEFT", "windlass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "adapter", "chats"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--scales", type=float, nargs="+", default=[1, 0.3, 0.1, 0.03])
    parser.add_argument("--stored", nargs="*", default=["bf16"])
    parser.add_argument("--peer", action="append", default=[])
    given = parser.parse_args()
    logging.disable_progress_bar()
    rows = read_rows(given.chats, given.model, given.rows)
    others = dict(peer.split("=", 1) for peer in given.peer)
    for stored in given.stored:
        ways = [PEFT, *others, WINDLASS] if stored == "bf16" else [WINDLASS]
        print(
            "| base | B x | gain, nats a token |",
            " | ".join(f"{way} kept | KL" for way in ways),
            "| adapter's own KL |",
        )
        print("|---" * (4 + 2 * len(ways)) + "|")
        with tempfile.TemporaryDirectory() as directory:
            model = given.model
            if stored != "bf16":
                model = real.publish(given.model, Path(directory, "base"), stored)
            base, base_loss = predict(load_float32(read_base(model)), rows)
            for scale in given.scales:
                adapter = scale_adapter(given.adapter, Path(directory, f"adapter-{scale:g}"), scale)
                true, loss = predict(PeftModel.from_pretrained(load_float32(read_base(model)), str(adapter)), rows)
                cells = [stored, f"{scale:g}", f"{base_loss - loss:.3f}"]
                for way in ways:
                    to = Path(directory, "merged")
                    merge(way, others.get(way, ""), model, adapter, to)
                    logits, merged_loss = predict(load_float32(read_base(to)), rows)
                    shutil.rmtree(to)
                    kept = (base_loss - merged_loss) / (base_loss - loss)
                    cells += [f"{kept:.1%}", f"{kl_divergence(true, logits):.1e}"]
                print("|", " | ".join([*cells, f"{kl_divergence(true, base):.1e}"]), "|", flush=True)


def merge(way: str, python: str, model: Path, adapter: Path, to: Path) -> None:
    """Merge in one way, and report the seconds on standard error."""
    began = time.perf_counter()
    if way == WINDLASS:
        export(adapter, to, merge=True, base=str(model), allow_other_base=True, probes=False, say=lambda _: None)
    elif way == PEFT:
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload().save_pretrained(to)
    else:
        log = to.with_suffix(".log")
        with log.open("w") as opened:
            command = peers.merge_command(way, python, model, adapter, to)
            code = subprocess.run(command, stdout=opened, stderr=opened, env={**os.environ, **peers.ENVIRON}).returncode
        if code or not (to / "config.json").exists():
            raise SystemExit(f"{way} ended with {code}: {log.read_text()[-2000:]}")
    print(f"{way}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


def scale_adapter(trained: Path, to: Path, scale: float) -> Path:
    to.mkdir()
    shutil.copy(trained / "adapter_config.json", to)
    factors = load_file(trained / "adapter_model.safetensors").items()
    scaled = {key: value * scale if "lora_B" in key else value for key, value in factors}
    save_file(scaled, to / "adapter_model.safetensors", metadata={"format": "pt"})
    return to


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
