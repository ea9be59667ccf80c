"""`windlass data`: the audit by itself, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from windlass import model as weights
from windlass.data.prepare import Say, prepare
from windlass.errors import UserError
from windlass.runfile import Loaded


def look(loaded: Loaded, *, say: Say, audited: Callable[[dict[str, Any]], None]) -> None:
    """Prepare the data as training would. `audited` is given what was found, also where it is then refused."""
    run = loaded.run
    place = loaded.where("model.model_name_or_path")
    checkpoint = weights.find_base(run.model.model_name_or_path, place)
    if checkpoint.path is None:
        raise UserError(
            f"no tokenizer at {run.model.model_name_or_path}", place, "the audit counts tokens: give the model's folder"
        )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=run.model.trust_remote_code)

    def keep(audit: dict[str, Any]) -> None:
        folder = Path(run.train.output_dir)
        if folder.is_dir():
            (folder / "data.json").write_text(json.dumps(audit, indent=2, ensure_ascii=False), encoding="utf-8")
        audited(audit)

    prepare(run, tokenizer, where=loaded.where, vocabulary=checkpoint.dims["vocab"], say=say, audited=keep)
