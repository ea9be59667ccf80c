"""What servers do with an export's targets, the command line that serves it, and the way to a hub repository."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from windlass.errors import RunError, UserError
from windlass.export.source import Source
from windlass.model import Base
from windlass.model.files import read_header
from windlass.train.wrapped import KEY, PREFIX

APPLIED, NOT, UNSURE = "applied", "not applied", "not certain"
VLLM, SGLANG = "vLLM", "SGLang"
# Ranks that vLLM's --max-lora-rank takes (vllm/config/lora.py).
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)

# server -> target -> (what it does unmerged, source). "*": any other. Read in November 2026; sources move on.
KNOWN: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    VLLM: {
        "kv_b_proj": (NOT, "loaded without a word and used by no path: vllm-project/vllm#48974"),
        "experts": (UNSURE, "PEFT's target_parameters on fused experts: vllm-project/vllm#41384, #52194 (both closed)"),
        "dora": (NOT, "refused: vllm/lora/peft_helper.py"),
        "full": (NOT, "modules_to_save and trained biases are refused: vllm/lora/peft_helper.py"),
        "*": (APPLIED, "if the server's model class supports LoRA"),
    },
    SGLANG: {
        **dict.fromkeys(("q_b_proj", "kv_b_proj"), (APPLIED, "from sgl-project/sglang#25001 on; dropped before")),
        **dict.fromkeys(("experts", "dora", "full"), (UNSURE, "no statement found")),
        "*": (APPLIED, "if the server's model class supports LoRA"),
    },
}


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """What one server does with one target."""

    server: str
    target: str
    adapters: int  # modules or parameters of that name
    unmerged: str
    source: str


@dataclass(frozen=True, slots=True)
class ServeHints:
    rows: tuple[ServerTarget, ...]
    advice: str
    commands: Mapping[str, str]  # what it serves -> the command line


def serve_hints(source: Source, base: Base | None, folder: Path, *, base_name: str, merged: bool) -> ServeHints:
    """What is known, for the targets that this adapter has."""
    targets: Counter[str] = Counter()  # last part of a module's name, or the kind of an adapter -> how many
    for key in read_header(source.weights):
        match = KEY.fullmatch(key)
        kind = match["kind"] if match else "full"  # trained in full, not low-rank
        if match and kind == "lora_A":
            targets[match["module"].removeprefix(PREFIX).replace(".base_layer", "").rpartition(".")[2]] += 1
        elif kind != "lora_B":
            targets["dora" if match else "full"] += 1
    rows = tuple(
        ServerTarget(server, target, count, *known.get(target, known["*"]))
        for server, known in KNOWN.items()
        for target, count in sorted(targets.items())
    )
    advice = "vLLM applies every target unmerged: the adapter can be served as it is"
    if doubtful := dict.fromkeys(row.target for row in rows if row.server == VLLM and row.unmerged != APPLIED):
        advice = f"merge it for vLLM (windlass export … --merge), which may not apply {', '.join(doubtful)}"
    name = folder.resolve().name or "adapter"
    if merged:
        advice = "it is merged: a server needs no LoRA support, only the base's model class"
        command = {"merged model": shlex.join(["vllm", "serve", str(folder), "--served-model-name", name])}
    else:
        rank = max([int(source.config.get("r", 16)), *map(int, (source.config.get("rank_pattern") or {}).values())])
        allowed = next((size for size in RANKS if size >= rank), RANKS[-1])
        model = str(base.path) if base is not None and base.path else base_name
        words = ["vllm", "serve", model, "--enable-lora", "--max-lora-rank", str(allowed)]
        command = {"base and adapter": shlex.join([*words, "--lora-modules", f"{name}={folder}"])}
    return ServeHints(rows, advice, command)


def push(folder: Path, repository: str, *, private: bool = True, say: Callable[[str], None] = print) -> str:
    """Upload the folder with the hub's own client and token; a new repository is private. Returns its address."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    where, again = f"--push {repository}", f"the export in {folder} is complete: push it again"
    api = HfApi()
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    try:
        address = str(api.create_repo(repository, private=private, exist_ok=True))
        say(f"pushing {size / 2**30:.2f} GiB to {address}")
        api.upload_folder(repo_id=repository, folder_path=folder)
    except HFValidationError as error:
        raise UserError(str(error).split("\n")[0], where, "write it as organisation/name") from None
    except LocalTokenNotFoundError:
        raise UserError("this machine has no token for the hub", where, "run: hf auth login") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        token = "; run `hf auth login` with a token that may write there" * (status in (401, 403))
        raise RunError(f"the hub answered {status}{token}", where, again) from None
    except (httpx2.TransportError, OfflineModeIsEnabled, OSError) as error:
        raise RunError(f"the hub can't be reached ({type(error).__name__})", where, again) from None
    return address
