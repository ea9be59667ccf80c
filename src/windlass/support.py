"""`windlass version` and `windlass bug-report`: the facts that a helper needs, without data or secrets."""

import contextlib
import io
import json
import os
import platform
import re
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from windlass import run_folder
from windlass.errors import UserError, require_writable
from windlass.files import read_json, read_json_lines, write_atomic
from windlass.hardware import read_gpus
from windlass.runfile import read_any
from windlass.variables import list_other_names, variables

LIBRARIES: Final = ("torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "tokenizers", "triton")
MASK: Final = "***"
LAST: Final = 200  # lines of each log
MAX_LINE: Final = 2000  # characters of a log's line that are kept
WHOLE: Final = (run_folder.MANIFEST, run_folder.PLAN, run_folder.LOAD, "check.json", "plan-measured.json")
TAILS: Final = ("events.jsonl", "alarms.jsonl", "steps-rank0.jsonl", "*.log", "*.out", "*.err", "logs/*")
# Of the data audit these are counts; the rest may quote rows.
AUDIT: Final = ("shape", "batching", "splits")

# Names whose value is a secret: HF_TOKEN, apiKey, aws_secret_access_key. Not pad_token_id, nor tokens_per_second.
SECRET_NAME: Final = re.compile(
    r"(token|secret|passw(or)?d|passphrase|api_?key|access_?key|private_?key|credentials?|auth(orization)?|cookie|dsn)$",
    re.IGNORECASE,
)
# Keys whose value is a user's text.
TEXT: Final = ("prompts", "prompt_template", "chat_template", "template_kwargs", "text", "reference", "prompt")
SECRET: Final = r"(?:token|secret|passwd|password|api_?key|access_?key)"
PATTERNS: Final = (
    (r"(?<=://)[^\s/@\"']+@", f"{MASK}@"),  # credentials of a URL
    (r"([?&][\w.-]*(?:token|key|sig|signature|secret|credential)[\w.-]*=)[^&\s\"']+", rf"\1{MASK}"),
    (r"((?:authorization|bearer|basic)[\"']?[:=]?\s+)[\w.~+/=-]{12,}", rf"\1{MASK}"),
    (rf"([\w-]*{SECRET}[\"']?\s*[=:]\s*)[\"']?[^\s\"',;&]+", rf"\1{MASK}"),
    (r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|wandb_v\d_|xox[abp]-|nvapi-)[\w-]{8,}", MASK),
    (r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\beyJ[\w-]+\.[\w-]+\.[\w-]*", MASK),  # AWS, a JSON web token
    (r"\b[0-9a-f]{40}\b", MASK),  # a key of W&B
)


def read_versions() -> dict[str, Any]:
    """Return versions for a bug report, without importing the libraries."""
    gpus = read_gpus(health=False)
    found: dict[str, Any] = dict(run_folder.read_versions(LIBRARIES))
    return found | {
        "cuda": _torch_cuda(),
        "driver": gpus.driver or None,
        "gpus": [f"{gpu.name}, {gpu.memory_gib:.0f} GiB" for gpu in gpus.gpus],
        "no_gpu_because": gpus.error or None,
        "os": f"{_distribution()}, {platform.system()} {platform.release()} {platform.machine()}",
    }


def _torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for, from its version.py: importing torch takes seconds."""
    spec = find_spec("torch")
    for folder in spec.submodule_search_locations or () if spec else ():
        with contextlib.suppress(OSError):
            match = re.search(r"^cuda\b.*= *['\"]([\d.]+)", (Path(folder) / "version.py").read_text(), re.MULTILINE)
            return match[1] if match else None
    return None


def _distribution() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    return platform.system()


def print_versions(found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        text = "; ".join(value) if isinstance(value, list) else value
        if text:
            print(f"{name:<15} {text}")


class Masks:
    """Removes secrets: by key, by form, and those in this process's environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.values = sorted({v for k, v in environ.items() if SECRET_NAME.search(k) and len(v) >= 6}, key=len)[::-1]
        self.home = environ.get("HOME", "").rstrip("/")

    def mask_text(self, text: str) -> str:
        for value in self.values:
            text = text.replace(value, MASK)
        for pattern, instead in PATTERNS:
            text = re.sub(pattern, instead, text, flags=re.IGNORECASE)
        return text.replace(f"{self.home}/", "~/") if self.home else text

    def mask_value(self, value: Any, key: str = "") -> Any:
        """Mask a JSON value. Variables keep their value only if windlass knows them and they are not secret."""
        if value in (None, "", [], {}) or isinstance(value, bool):
            return value
        if key in TEXT or (SECRET_NAME.search(key) and isinstance(value, str | list)):
            return MASK
        if key == "env" and isinstance(value, dict):
            return {
                k: self.mask_value(v, k) if k in variables() or k in list_other_names() else MASK
                for k, v in value.items()
            }
        if key == "git" and isinstance(value, dict):
            return {**value, "commit": str(value.get("commit"))[:12]}
        if isinstance(value, dict):
            return {k: self.mask_value(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [self.mask_value(v) for v in value]
        return self.mask_text(value) if isinstance(value, str) else value


def bug_report(run: Path, out: Path | None, environ: Mapping[str, str], say: Callable[[str], None]) -> Path:
    folder = Path(read_any(run).run.folder) if run.is_file() else run
    if not any(next(folder.glob(name), None) for name in (*WHOLE, *TAILS, run_folder.DATA)):
        hint = "give the folder of a run that was started, or for versions alone: `windlass version --json`"
        what = "contains no files of a run" if folder.is_dir() else "there is no such run folder"
        raise UserError(what, str(folder), hint, "not-a-run")
    made = {f"{folder.resolve().name}/{name}": text.encode() for name, text in collect_files(folder, Masks(environ))}
    archive = out or Path(f"bug-report-{folder.resolve().name}.tar.gz")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in made.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mtime = int(time.time())
            tar.addfile(entry, io.BytesIO(content))
    with require_writable(archive, "name another file with --out"):
        write_atomic(archive, packed.getvalue())
    for name, content in made.items():
        say(f"{len(content):>9,} bytes  {name}")
    return archive


def collect_files(folder: Path, masks: Masks) -> Iterator[tuple[str, str]]:
    yield "versions.json", json.dumps(masks.mask_value(read_versions()), indent=1)
    files = {name: read_json(folder / name) for name in WHOLE}
    audit = read_json(folder / run_folder.DATA)
    files[run_folder.DATA] = {name: audit[name] for name in AUDIT if name in audit}
    files |= {path.name: read_json(path) for path in (folder / run_folder.METER.format(rank=0),)}
    for name, value in files.items():
        if value:
            yield name, json.dumps(masks.mask_value(value), indent=1, ensure_ascii=False)
    for pattern in TAILS:
        for path in sorted(path for path in folder.glob(pattern) if path.is_file()):
            yield str(path.relative_to(folder)), "".join(f"{masks.mask_text(line)}\n" for line in read_last_lines(path))
    listing = (
        f"{path.stat().st_size:>14,} {path.relative_to(folder)}\n"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )
    yield "files.txt", masks.mask_text("".join(listing))


def read_last_lines(path: Path) -> list[str]:
    """Return the last lines of a text file, each cut; of a step file, with the names of its fields."""
    if path.name.startswith("steps-rank"):
        return [json.dumps(line)[:MAX_LINE] for line in deque(read_json_lines(path), LAST)]
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LAST * MAX_LINE))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return [line[:MAX_LINE] for line in lines[-LAST:]]
