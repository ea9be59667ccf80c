"""A look at what a model says: a merged checkpoint, or base + adapter, on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TextStreamer

from windlass.errors import UserError
from windlass.export import logits, update
from windlass.export.choose import CONFIG, WEIGHTS, Chosen, base_of, choose
from windlass.model import Base, read_base
from windlass.model.files import CONFIG as MODEL_CONFIG
from windlass.plan.layout import Layout
from windlass.train import experts
from windlass.train.load import load

GIB = 2**30
SHARE_OF_MEMORY = 0.9


def generate(
    folder: Path,
    prompt: str,
    *,
    base: str | None = None,
    tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
    say: Callable[[str], None] = print,
    write: Callable[[str], None] | None = None,
) -> str:
    """The continuation of `prompt`; `write` gets it piece by piece as it comes."""
    chosen, checkpoint = _what(folder, base)
    tokenizer = _tokenizer([folder, *([chosen.folder] if chosen else []), checkpoint.path])
    text = _chat(tokenizer, prompt, folder) if chat else prompt
    encoded = tokenizer(text, return_tensors="pt", add_special_tokens=not chat)
    if encoded["input_ids"].shape[-1] == 0:
        raise UserError("the prompt is empty", "--prompt", "say something to continue from")
    held = held_as(checkpoint, folder)
    say(f"loading {checkpoint.name}" + (f" with {chosen.folder}" if chosen else ""))
    model = loaded(checkpoint, chosen, held)
    encoded = encoded.to(next(model.parameters()).device)
    torch.manual_seed(seed)
    asked: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": tokens, "use_cache": True}
    if temperature > 0:
        asked["temperature"] = temperature
    streamer = Streamer(tokenizer, write) if write else None
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made = model.generate(**encoded, **asked, streamer=streamer, pad_token_id=tokenizer.pad_token_id)
    said: str = tokenizer.decode(made[0][encoded["input_ids"].shape[-1] :], skip_special_tokens=True)
    return said


class Streamer(TextStreamer):  # type: ignore[misc]
    """Hands text on as it comes."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(f"{text}\n" if stream_end else text)


def _what(folder: Path, base: str | None) -> tuple[Chosen | None, Base]:
    """A whole model, or an adapter and its base."""
    model = (folder / MODEL_CONFIG).is_file() and not (folder / CONFIG).is_file()
    if model:
        return None, read_base(folder)
    chosen = choose(folder)
    checkpoint = base_of(chosen, base)
    update.read(chosen, checkpoint)  # an adapter of another model is told here, by name
    return chosen, checkpoint


def _tokenizer(folders: list[Path | None]) -> Any:
    for folder in folders:
        if folder is not None and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            return AutoTokenizer.from_pretrained(folder)
    raise UserError("there is no tokenizer beside the model", str(folders[0]), "copy the base model's tokenizer there")


def _chat(tokenizer: Any, prompt: str, folder: Path) -> str:
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template", str(folder), "leave --chat out")
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return text


def held_as(checkpoint: Base, folder: Path) -> str:
    """layout.base_dtype: 16 bits where that fits, which is the fastest; else FP8 as stored, where that fits."""
    free = logits.available()
    stored = sum(piece.stored.end - piece.stored.start for each in checkpoint.parameters for piece in each.pieces)
    for held, needs in (("bf16", 2 * checkpoint.total), ("fp8", stored)):
        if needs <= SHARE_OF_MEMORY * free:
            return held
    where = "on the GPU" if torch.cuda.is_available() else "here"
    raise UserError(
        f"the model needs {min(stored, 2 * checkpoint.total) / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free {where}",
        str(folder),
        "serve it where it fits: windlass export --serve-check writes the command line",
    )


def loaded(checkpoint: Base, chosen: Chosen | None, held: str) -> Any:
    layout = Layout("resident", "generated from", 1, 1, shard=1, base_dtype=held)
    if held == "fp8" and chosen and chosen.config.get("use_dora"):
        hint = "merge it first: windlass export FOLDER --to MERGED --merge, then generate from MERGED"
        raise UserError("DoRA needs base weights in 16 bits, and they don't fit here", str(chosen.folder), hint)
    model: Any = load(checkpoint, layout)[0].eval()
    if chosen is None:
        return model
    assert (chosen.folder / WEIGHTS).is_file()
    adapted = logits.with_adapter(model, chosen.folder)
    experts.patch_experts(adapted)  # PEFT's own way adds to the experts' weights, which FP8 has none of
    return adapted
