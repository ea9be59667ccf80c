"""What a server does with this adapter, and the command line that starts it. As known; each row names its source."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.export.choose import Chosen
from windlass.export.update import KEY, PREFIX
from windlass.model import Base
from windlass.model.files import read_header

APPLIED, NOT, UNSURE = "applied", "not applied", "not certain"
VLLM, SGLANG = "vLLM", "SGLang"
# Ranks that vLLM's --max-lora-rank takes (vllm/config/lora.py).
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

# server -> target -> (what it does unmerged, source). "*": any other. Read in November 2026; sources move on.
KNOWN: Mapping[str, Mapping[str, tuple[str, str]]] = {
    VLLM: {
        "kv_b_proj": (NOT, "loaded without a word and used by no path: vllm-project/vllm#48974"),
        "experts": (UNSURE, "PEFT's target_parameters on fused experts: vllm-project/vllm#41384, #52194 (both closed)"),
        "dora": (NOT, "refused: vllm/lora/peft_helper.py"),
        "whole": (NOT, "modules_to_save and trained biases are refused: vllm/lora/peft_helper.py"),
        "*": (APPLIED, "where the server's model class supports LoRA"),
    },
    SGLANG: {
        "q_b_proj": (APPLIED, "from the release with sgl-project/sglang#25001 on; dropped or refused before"),
        "kv_b_proj": (APPLIED, "from the release with sgl-project/sglang#25001 on; dropped or refused before"),
        "experts": (UNSURE, "no statement found"),
        "dora": (UNSURE, "no statement found"),
        "whole": (UNSURE, "no statement found"),
        "*": (APPLIED, "where the server's model class supports LoRA"),
    },
}


@dataclass(frozen=True, slots=True)
class Row:
    server: str
    target: str
    adapters: int  # modules or parameters of that name
    unmerged: str
    source: str


@dataclass(frozen=True, slots=True)
class Served:
    rows: tuple[Row, ...]
    advice: str
    commands: Mapping[str, str]  # what it serves -> the command line

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def serve_check(chosen: Chosen, checkpoint: Base | None, folder: Path, *, base: str, merged: bool) -> Served:
    """What is known, for the targets that this adapter has."""
    targets = _targets(chosen)
    rows = tuple(
        Row(server, target, count, *known.get(target, known["*"]))
        for server, known in KNOWN.items()
        for target, count in targets.items()
    )
    bad = [row for row in rows if row.server == VLLM and row.unmerged != APPLIED]
    advice = "every target is applied unmerged by vLLM: the adapter can be served as it is"
    if bad:
        names = ", ".join(dict.fromkeys(row.target for row in bad))
        advice = f"merge it for vLLM (windlass export … --merge): {names} would not surely be applied"
    here = str(checkpoint.path) if checkpoint is not None and checkpoint.path else base
    return Served(rows, advice, _commands(chosen, here, folder, merged=merged))


def _targets(chosen: Chosen) -> dict[str, int]:
    """Last part of each target's name -> how many; routed experts and what is not low-rank under names of their own."""
    found: dict[str, int] = {}
    for key in read_header(chosen.weights):
        match = KEY.fullmatch(key)
        if match is None:
            found["whole"] = found.get("whole", 0) + 1
        elif match["kind"] == "lora_A":
            module = match["module"].removeprefix(PREFIX).replace(".base_layer", "")
            leaf = module.rpartition(".")[2]
            found[leaf] = found.get(leaf, 0) + 1
        elif match["kind"] == "lora_magnitude_vector":
            found["dora"] = found.get("dora", 0) + 1
    return dict(sorted(found.items()))


def _commands(chosen: Chosen, base: str, folder: Path, *, merged: bool) -> dict[str, str]:
    rank = max([int(chosen.config.get("r", 16)), *map(int, (chosen.config.get("rank_pattern") or {}).values())])
    allowed = next((size for size in RANKS if size >= rank), RANKS[-1])
    name = folder.resolve().name or "adapter"
    if merged:
        return {"merged model": shlex.join(["vllm", "serve", str(folder), "--served-model-name", name])}
    words = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", str(allowed)]
    return {"base and adapter": shlex.join([*words, "--lora-modules", f"{name}={folder}"])}
