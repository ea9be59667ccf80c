"""Generate text with a merged model, or base + adapter, on this machine."""

import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer, TextStreamer

from windlass.data.chat import list_ends
from windlass.data.trained_template import set_template
from windlass.errors import UserError
from windlass.export.deltas import read_deltas
from windlass.export.proof import read_free_memory
from windlass.export.screen import Say
from windlass.export.source import CONFIG, AdapterSource, choose_adapter, require_local_base
from windlass.hardware import GIB
from windlass.model import Base, read_base
from windlass.model.files import CONFIG as MODEL_CONFIG
from windlass.model.quantization import published_dtype, quantizable_names
from windlass.plan.layout import Layout
from windlass.settings import FOUR_BITS
from windlass.train.checkpoint.snapshot import require_intact
from windlass.train.load import load_base
from windlass.train.logits import open_adapter
from windlass.train.patches import Patches
from windlass.weights.same_base import CHAT_TEMPLATE, read_recorded_base

MODEL_SHARE: Final = 0.9  # of free memory, that a model may take


def generate(
    folder: Path,
    prompt: str,
    *,
    base: str | None = None,
    tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool | None = None,
    allow_other_base: bool = False,
    say: Say = print,
    write: Callable[[str], None] | None = None,
) -> str:
    """Return the continuation of `prompt`; `write` receives it piece by piece. chat: whether the prompt is a turn of a
    user; None: if a run trained the adapter on chats, or if another adapter or a model alone has a template."""
    source: AdapterSource | None = None
    if (folder / MODEL_CONFIG).is_file() and not (folder / CONFIG).is_file():
        model_base = read_base(folder)
    else:
        source = choose_adapter(folder, base, allow_other_base=allow_other_base)
        model_base = require_local_base(source)
        require_intact(source.folder)
        read_deltas(source, model_base)  # refuses an adapter of another model, by name
    tokenizer = AutoTokenizer.from_pretrained(_find_tokenizer(folder, source, model_base), mistral_format=False)
    recorded = read_recorded_base(source.folder) if source else {}
    template = recorded.get(CHAT_TEMPLATE, {})
    if source:
        set_template(tokenizer, template)
    if chat is None:
        chat = bool(template) if recorded else bool(tokenizer.chat_template)
    if chat:
        if not tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template", str(folder), "leave --chat out", "no-chat-template")
        turn = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat)
    if encoded["input_ids"].shape[-1] == 0:
        raise UserError("the prompt is empty", "--prompt", "give a text to continue", "no-prompt")
    trained_in = recorded.get("base_quantisation", {}).get("format", "")
    base_dtype = choose_base_dtype(model_base, folder, trained_in)
    stored = f" in {base_dtype.upper()}" if base_dtype != "bf16" else ""
    say(f"loading {model_base.name}{stored}{f' with {source.folder}' if source else ''}")
    model = load_model(model_base, source, base_dtype, say)
    encoded = encoded.to(next(model.parameters()).device)
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"temperature": temperature} if temperature > 0 else {}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        output = model.generate(
            **encoded,
            **sampling,
            do_sample=temperature > 0,
            max_new_tokens=tokens,
            use_cache=True,
            streamer=_Streamer(tokenizer, write) if write else None,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=sorted(list_ends(tokenizer, model_base.path, model)) or None,
        )
    answer = output[0][encoded["input_ids"].shape[-1] :]
    text: str = tokenizer.decode(answer, skip_special_tokens=True)
    if not text.strip():
        why = "its first token ended it" if len(answer) == 1 else "it is white space and special tokens"
        other = "--raw continues the text as it is" if chat else "--chat makes the prompt a turn of a chat"
        say(f"the answer is empty: {why}; {other}")
    return text


def _find_tokenizer(folder: Path, source: AdapterSource | None, base: Base) -> Path:
    """Return the first folder with a tokenizer: the one that was named, the adapter's, the base's."""
    for place in (folder, source.folder if source else None, base.path):
        if place and any((place / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            return place
    hint = "copy the base model's tokenizer there"
    raise UserError("the model folder has no tokenizer", str(folder), hint, "no-tokenizer")


class _Streamer(TextStreamer):  # type: ignore[misc]
    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(f"{text}\n" if stream_end else text)


def choose_base_dtype(base: Base, folder: Path, trained_in: str = "") -> str:
    """Choose layout.base_dtype: the 4 bits that windlass trained on; else 16 bits if they fit, which is fastest;
    else as published, if that fits."""
    free = read_free_memory()
    stored = sum(piece.stored.end - piece.stored.start for p in base.parameters for piece in p.pieces)
    ways = [("bf16", 2 * base.total), (published_dtype(base) or "bf16", stored)]
    if trained_in:
        names = quantizable_names(base)
        in_four_bits = FOUR_BITS[trained_in].bytes
        ways = [(trained_in, int(sum(p.count * (in_four_bits if p.name in names else 2) for p in base.parameters)))]
    for dtype, needed in ways:
        if needed <= MODEL_SHARE * free:
            return dtype
    problem = f"the model needs {min(needed for _, needed in ways) / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free"
    hint = "generate where it fits, or on more GPUs with a server such as vLLM"
    raise UserError(problem, str(folder), hint, "does-not-fit")


def load_model(base: Base, source: AdapterSource | None, base_dtype: str, say: Say = print) -> Any:
    if base_dtype != "bf16" and source and source.config.get("use_dora"):
        command = f"windlass export {shlex.quote(str(source.folder))} --to MERGED --merge"
        hint = f"merge it first: `{command}`, then generate from MERGED"
        problem = "DoRA needs base weights in 16 bits, and they don't fit here"
        raise UserError(problem, str(source.folder), hint, "dora-needs-16-bits")
    layout = Layout("resident", "generated from", 1, 1, shard=1, base_dtype=base_dtype)
    model: Any
    model, certificate = load_base(base, layout)
    model.eval()
    if source is None:
        return model
    source.require_same_base(base, certificate["base_digest"], say)
    adapted = open_adapter(model, source.folder)
    Patches().patch_experts(adapted)  # PEFT adds to the experts' weights, which is impossible in FP8
    return adapted
