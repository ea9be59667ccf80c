"""Make a demo: a tiny Mistral 4 in its published layout that can repeat phrases, rows that teach it to translate them
into a made-up language, and a run file."""

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any, Final

from windlass.errors import UserError
from windlass.hardware import read_this_machine

RANKS = 2
MACHINE = "machine.json"

# fmt: off
NUMBERS: Final = {
    "one": "ek", "two": "ba", "three": "tir", "four": "fo", "five": "lum", "six": "sut", "seven": "nev", "eight": "ost",
}
ADJECTIVES: Final = {
    "red": "rusa", "green": "vela", "blue": "loma", "white": "hika", "black": "dorka",
    "small": "tika", "large": "mora", "old": "sena", "young": "juma", "tired": "laksa",
}
NOUNS: Final = {
    "bird": "pilo", "cat": "kamo", "dog": "dufo", "horse": "hasto", "boat": "navo", "tree": "gerbo",
    "stone": "teko", "river": "wivo", "star": "selo", "lamp": "fumbo", "owl": "ulo", "goat": "beko",
}
# fmt: on
BASE_STEPS: Final = 150  # of the base's own training: four seconds
BASE_ROWS: Final = 64
SEED: Final = 0


def can_calibrate() -> bool:
    """Whether `calibrate` measures what the demo trains on: as many processors, and no GPU."""
    return not read_this_machine().gpus and (os.cpu_count() or 1) >= RANKS


def make_phrases() -> list[tuple[str, str]]:
    """Return every phrase in English and in the made-up language: the noun is first, the number last, and noun and
    adjective end in n if there are several: `six large trees`, `gerbon moran sut`."""
    phrases = []
    for number, adjective, noun in itertools.product(NUMBERS, ADJECTIVES, NOUNS):
        several = number != "one"
        english = f"{number} {adjective} {noun}{'s' if several else ''}"
        ending = "n" if several else ""
        phrases.append((english, f"{NOUNS[noun]}{ending} {ADJECTIVES[adjective]}{ending} {NUMBERS[number]}"))
    random.Random(SEED).shuffle(phrases)
    return phrases


def make_demo(directory: Path, *, calibrated: bool = False) -> Path:
    """Write `model/`, `data/` and `run.yaml` into `directory`; returns the run file. Nothing there is overwritten.
    `calibrated`: the run is to be planned with the machine file that the caller writes there."""
    from windlass import tiny

    run = directory / "run.yaml"
    if run.exists():
        raise UserError("there is already a demo", str(run), f"`windlass train {run}`, or give another --dir", "exists")
    phrases = make_phrases()
    splits = {"train": phrases[len(phrases) // 10 :], "validation": phrases[: len(phrases) // 10]}
    known = [phrase for pair in splits["train"] for phrase in pair]  # the base never sees which of them are pairs
    model = directory / "model"
    try:
        (directory / "data").mkdir(parents=True, exist_ok=True)
        tiny.write_model(model, hidden=128, texts=known, train=lambda base: train_base(base, model, known))
        for split, pairs in splits.items():
            rows = [make_chat(*pair) for pair in pairs]
            lines = [json.dumps({"messages": row}) + "\n" for row in rows]
            (directory / "data" / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        places = {"model": model, "data": directory / "data", "output": directory / "run"}
        text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
        machine = json.dumps(str(directory / MACHINE)) if calibrated else "null"
        filled = text.format(machine=machine, **{name: json.dumps(str(path)) for name, path in places.items()})
        run.write_text(filled, encoding="utf-8")
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise UserError(what, str(directory), "give another --dir", "unwritable") from None
    return run


def make_chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def train_base(model: Any, tokenizer_folder: Path, phrases: list[str]) -> None:
    """Train every weight of a random model to repeat what it is told, in either language: it then knows their words and
    what a chat looks like, and no translation."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    pad = tokenizer.pad_token_id
    chats = [tokenizer.apply_chat_template(make_chat(phrase, phrase), return_dict=False) for phrase in phrases]
    longest = max(map(len, chats))
    rows = torch.tensor([chat + [pad] * (longest - len(chat)) for chat in chats])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=BASE_STEPS, pct_start=0.1)
    order = torch.Generator().manual_seed(SEED)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster at this size, and the same weights whatever the processors
    model.train()
    for _ in range(BASE_STEPS):
        batch = rows[torch.randperm(len(rows), generator=order)[:BASE_ROWS]]
        is_text = batch != pad
        loss = model(input_ids=batch, attention_mask=is_text.long(), labels=batch.masked_fill(~is_text, -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
