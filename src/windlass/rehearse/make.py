"""A process of the rehearsal: the user's first rows looked at as training will, then the twin. Imports torch.

`python -m windlass.rehearse.make REQUEST.json` prints one line of JSON for each part, as soon as it is done.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.model import Base, find_base
from windlass.rehearse import rows
from windlass.rehearse.sizes import STAND_IN_VOCAB, shrunk
from windlass.runfile import Loaded, read

TOKENIZER = (  # every file that a tokenizer may be made of, and what says where answers end
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "generation_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
)


def main(request: Path) -> int:
    asked = json.loads(request.read_text())
    loaded = read(Path(asked["run"]), asked["overrides"])
    checkpoint = find_base(loaded.run.model.model_name_or_path, loaded.where("model.model_name_or_path"))
    model, data = Path(asked["folder"]) / "model", Path(asked["folder"]) / "data"
    began = time.monotonic()
    tokenizer, stand_in = tokenizer_of(checkpoint, loaded, model)
    imported = time.monotonic() - began
    found = rows.take(loaded, checkpoint, tokenizer, data, asked["sequences"], own=stand_in is None)
    tell(
        "data", time.monotonic() - began - imported, **{**found, "stand_ins": [*found["stand_ins"], *(stand_in or ())]}
    )
    began = time.monotonic()
    tell("twin", time.monotonic() - began, **made(checkpoint, model, asked["experts_over"], own=stand_in is None))
    return 0


def tell(part: str, seconds: float, **found: Any) -> None:
    print(json.dumps({"part": part, "seconds": seconds, **found}), flush=True)


def tokenizer_of(checkpoint: Base, loaded: Loaded, model: Path) -> tuple[Any, tuple[str, ...] | None]:
    """The model's own, copied beside the twin; where there is none on this machine the stand-in, stated."""
    from transformers import AutoTokenizer

    from windlass import tiny

    model.mkdir(parents=True, exist_ok=True)
    stand_in = None
    if checkpoint.path is None:
        tiny.write_tokenizer(model, STAND_IN_VOCAB)
        stand_in = (
            "tokenizer and chat template: the model's folder is not on this machine; "
            f"{STAND_IN_VOCAB} tokens in Mistral's format stand in",
        )
    else:
        for path in checkpoint.path.iterdir():
            if path.name in TOKENIZER or path.suffix == ".py":
                shutil.copy(path, model)
    return AutoTokenizer.from_pretrained(model, trust_remote_code=loaded.run.model.trust_remote_code), stand_in


def made(checkpoint: Base, model: Path, experts_over: int, *, own: bool) -> dict[str, Any]:
    """The twin on disk, and what it is."""
    from windlass import tiny
    from windlass.model import read_base

    sizes = shrunk(checkpoint, experts_over=experts_over, vocab=checkpoint.dims["vocab"] if own else None)
    small = read_base(tiny.write_like(checkpoint, sizes, model))
    kept = ["class", "wrapper", "quantisation"]
    differing = [
        name
        for name, mine, theirs in zip(
            kept,
            (small.family.causal_lm, small.wrapper, bool(small.quantization)),
            (checkpoint.family.causal_lm, checkpoint.wrapper, bool(checkpoint.quantization)),
            strict=True,
        )
        if mine != theirs
    ]
    assert not differing, differing
    told = ("layers", "hidden", "heads", "kv_heads", "experts", "top_k", "vocab")
    return {
        "parameters": small.total,
        "yours": checkpoint.total,
        "class": small.family.causal_lm,
        "wrapper": small.wrapper,
        "quantization": (small.quantization or {}).get("quant_method"),
        "sizes": {name: [checkpoint.dims[name], small.dims[name]] for name in told if name in small.dims},
    }


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except UserError as error:
        print(json.dumps({"problems": [problem.as_dict() for problem in error.problems]}), flush=True)
        sys.exit(2)
