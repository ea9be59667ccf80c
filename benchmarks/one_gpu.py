"""One GPU and Mistral Small 4 at full width: does the model fit, how fast is a step, and where does its time go?

    python benchmarks/one_gpu.py --minutes 9 --out one-gpu   every part; again: those that have not ended yet
    python benchmarks/one_gpu.py --parts whole,profile
    python benchmarks/one_gpu.py --tiny                      the same code at toy size, on any machine
    python benchmarks/one_gpu.py --show one-gpu              the tables of an earlier run, also of an interrupted one

Each part runs in its own process with a share of the time (plus what earlier parts left unused), and appends each row
to rows.jsonl in the folder --out as soon as it is known: an interrupted run loses nothing that was measured. README.md
beside it is the page: machine, versions, and a table for each part. Weights are random and made on the
GPU, without files or a copy on the host. Everything else is what a run uses: the model as parallel.py builds it, the
FP8 base, adapters, checkpointing, autocast, the loss, AdamW. Rows are full, without padding; "masked" rows consist of
documents separated by a mask. "plan" is the plan's figure for the same work, without the driver's context and
fragmentation, which exist only on a device; "peak" is what torch has allocated.

Needs the `train` extra of pyproject.toml, but runs from a checkout that is not installed. On a machine whose image has
torch with CUDA and Triton but an older transformers than src/windlass/versions.py admits, and no package index, set
PYTHONPATH to a folder with these packages for that machine's Python: transformers, huggingface_hub, tokenizers, peft,
accelerate, pydantic, pydantic_core, annotated_types, typing_inspection, nvidia-ml-py. Only tokenizers and pydantic_core
are compiled. Missing packages are reported before the clock starts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHARES = {  # of the time, in parts of it; what one leaves is the next one's
    "ground": 0.10,
    "whole": 0.24,
    "whole-experts": 0.20,
    "whole-nf4": 0.16,
    "layers": 0.20,
    "dense": 0.14,
    "fused": 0.06,
    "peft": 0.12,
    "profile": 0.08,
}
ABOUT = {
    "ground": "the card's own rates, and our GPU paths against plain ones",
    "whole": "all layers resident in FP8, adapters on attention and shared experts",
    "whole-experts": "the same, adapters on the routed experts too",
    "whole-nf4": "all layers resident in 4 bits, as on one card of 80 GB, adapters on attention and shared experts",
    "layers": "a few layers at full width, kept in 16 bits and in FP8, by tokens per micro-batch",
    "dense": "dense models with random weights: a step by windlass, and by transformers + PEFT",
    "fused": "a few layers with few tokens: what each fused part (train/patches.py) saves",
    "peft": "one layer's experts with adapters: PEFT's way and ours, by tokens per expert",
    "profile": "where one step's time goes",
}
ROWS, PAGE = "rows.jsonl", "README.md"
ASIDE = 0.04  # of the time, for starting processes and printing


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(SHARES), help=f"some of {', '.join(SHARES)}")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: does it all run?")
    parser.add_argument("--minutes", type=float, default=9.0, help="of all parts (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)  # instead of minutes
    parser.add_argument("--out", type=Path, default=Path("one-gpu"), help="folder (default: %(default)s)")
    parser.add_argument("--show", type=Path, metavar="PATH", help="print a folder's or file's tables, measure nothing")
    parser.add_argument("--replan", action="store_true", help="with --show: steps beside what the plan says now")
    parser.add_argument("--part", choices=list(SHARES), help=argparse.SUPPRESS)  # for a part's own process
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)  # time.time()
    asked = parser.parse_args()
    if unknown := [part for part in asked.parts.split(",") if part not in SHARES]:
        parser.error(f"no such part: {', '.join(unknown)}; known: {', '.join(SHARES)}")
    return asked


def facts() -> dict[str, Any]:
    """Return the first line of every file. Imports no torch: the waiting process must not use GPU memory."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        gpu = "none"
    versions = {}
    for name in ("torch", "transformers", "peft", "triton"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return {
        "part": "facts", "date": time.strftime("%Y-%m-%d"), "gpu": gpu, "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores", "versions": versions, "command": sys.argv,
    }  # fmt: skip


def write(out: Path, row: dict[str, Any]) -> None:
    """Write a row at once and in full, so that it survives if the process is killed."""
    with (out / ROWS).open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(out: Path) -> list[dict[str, Any]]:
    """Return the rows of a folder or file, without those of a part that was interrupted and measured again."""
    rows: list[dict[str, Any]] = []
    files = [out / ROWS] if (out / ROWS).exists() else sorted(out.glob("*.jsonl")) if out.is_dir() else [out]
    for line in (line for file in files for line in file.read_text().splitlines()):
        try:
            row = json.loads(line)
        except ValueError:
            row = {"part": "facts", "skipped": "a line that was cut off"}
        if not isinstance(row, dict) or not row.keys() & {"part", "begins"}:  # another file of the folder
            continue
        if again := row.get("begins"):
            rows = [each for each in rows if each["part"] != again]
        else:
            rows.append(row)
    return rows


NEEDED = ("pydantic", "torch", "safetensors", "huggingface_hub", "tokenizers", "transformers", "accelerate", "peft")
PROBE = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
for name in (*sys.argv[1:], "one_gpu_parts"):
    try:
        importlib.import_module(name)
    except BaseException as error:
        print(f"{name} ({type(error).__name__}: {error})".replace(chr(10), " ")[:200])
"""


def missing(environ: dict[str, str]) -> str:
    """Return why no part can run here: packages too old or impossible to import, tried in their own process."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
    from windlass.versions import TESTED, is_too_old

    have = {name: number for name, number in facts()["versions"].items() if name in TESTED and number != "absent"}
    short = [f"{name} {TESTED[name][0]} (here: {number})" for name, number in have.items() if is_too_old(name, number)]
    probe = [sys.executable, "-c", PROBE, *NEEDED]
    done = subprocess.run(probe, env=environ, capture_output=True, text=True, timeout=300)
    failed = done.stdout.splitlines() or [f"the imports ended with {done.returncode}"] * (done.returncode != 0)
    return "; ".join([*short, *failed])


def conduct(asked: argparse.Namespace) -> int:
    """Run one part after another, each with a time limit. Returns 1 if one failed or ran out of time."""
    out, here = asked.out, Path(__file__).resolve().parent
    environ = {
        **os.environ,
        **dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"),
        "PYTHONPATH": os.pathsep.join(
            [str(here.parent / "src"), str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    out.mkdir(parents=True, exist_ok=True)
    before, now = read(out) if (out / ROWS).exists() else [], facts()
    if others := {row["gpu"] for row in before if "gpu" in row} - {now["gpu"]}:
        sys.exit(f"{out} has rows of {', '.join(others)}: name another folder with --out")
    ended = [row.get("ended") for row in before]
    write(out, now)
    if lacking := missing(environ):
        write(out, {"part": "facts", "skipped": f"every part. Needed: {lacking}"})
        write_page(out)
        return 1
    parts = [part for part in SHARES if part in asked.parts.split(",") and part not in ended]
    began = until = time.time()  # after the imports, which have warmed the file system's cache
    usable, bad = (asked.seconds or asked.minutes * 60) * (1 - ASIDE), 0
    for part in parts:
        until += usable * SHARES[part] / sum(SHARES[each] for each in parts)
        print(f"{part}: {ABOUT[part]}; until {until - began:.0f} s", file=sys.stderr, flush=True)
        write(out, {"part": "facts", "begins": part})
        command = [sys.executable, __file__, "--part", part, "--until", str(until), "--out", str(out)]
        try:
            code = subprocess.run(
                [*command, *["--tiny"] * asked.tiny], env=environ, timeout=max(1.0, until - time.time())
            ).returncode
            why = f"its process ended with {code}: see what it printed" if code else ""
        except subprocess.TimeoutExpired:
            why = "out of time"
        if why:
            write(out, {"part": part, "skipped": why})
            bad = 1
        else:
            write(out, {"part": "facts", "ended": part, "at_seconds": round(time.time() - began, 1)})
    write_page(out)
    return bad


# --- tables ---


COLUMNS: dict[str, list[tuple[str, str, str]]] = {  # part -> (heading, key, format)
    "ground": [("what", "what", ""), ("found", "value", ".4g"), ("unit", "unit", ""), ("expected", "expected", "")],
    "step": [
        ("model", "model", ""), ("base", "base", ""), ("adapters", "adapters", ""), ("tokens", "tokens", ",d"),
        ("rows", "rows", ""), ("first s", "first_seconds", ".3f"),
        ("tokens/s", "tokens_per_second", ",.0f"), ("MFU", "mfu", ".1%"), ("s/step", "seconds", ".3f"),
        ("forward s", "forward", ".3f"), ("backward s", "backward", ".3f"), ("update s", "update", ".3f"),
        ("peak GiB", "peak_gib", ".2f"), ("plan GiB", "plan_gib", ".2f"), ("peak/plan", "peak_to_plan", ".3f"),
        ("reserved GiB", "reserved_gib", ".2f"), ("plan s/step", "plan_seconds", ".3f"), ("loss", "loss", ".3f"),
    ],
    "dense": [
        ("model", "dense", ""), ("rows", "rows", ""), ("by", "way", ""), ("tokens/s", "tokens_per_second", ",.0f"),
        ("MFU", "mfu", ".1%"), ("s/step", "seconds", ".3f"), ("peak GiB", "peak_gib", ".2f"),
        ("plan GiB", "plan_gib", ".2f"), ("plan s/step", "plan_seconds", ".3f"), ("from", "plan_low", ".3f"),
        ("to", "plan_high", ".3f"), ("loss", "loss", ".3f"),
    ],
    "fused": [
        ("fused", "fused", ""), ("tokens", "tokens", ",d"), ("forward s", "forward", ".4f"),
        ("backward s", "backward", ".4f"), ("s/step", "seconds", ".4f"), ("loss", "loss", ".3f"),
    ],
    "peft": [
        ("tokens/expert", "per_expert", ",d"), ("PEFT ms", "peft_ms", ".2f"), ("unmerged ms", "unmerged_ms", ".2f"),
        ("no adapter ms", "none_ms", ".2f"), ("unmerged/PEFT", "time_ratio", ".2f"), ("PEFT GiB", "peft_gib", ".2f"),
        ("unmerged GiB", "unmerged_gib", ".2f"), ("memory ratio", "memory_ratio", ".2f"),
    ],
    "profile": [("operation", "name", ""), ("calls", "calls", ",d"), ("ms", "ms", ".2f"), ("share", "share", ".1%")],
}  # fmt: skip
KIND = {"whole": "step", "whole-experts": "step", "whole-nf4": "step", "layers": "step"}


def write_page(out: Path) -> None:
    """Write the page, and print it."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        show(read(out))
    (out / PAGE).write_text(f"# One GPU, measured by `python benchmarks/one_gpu.py`\n\n{page.getvalue()}")
    print(page.getvalue(), end="")


def show(rows: list[dict[str, Any]]) -> None:
    """Print Markdown tables."""
    known = []  # of a run in several goes, one line for each machine and day
    for row in rows:
        if "versions" in row:
            versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
            line = f"{row['date']}; GPU: {row['gpu']}; {row['machine']}; Python {row['python']}; {versions}"
            if line not in known:
                print(line)
            known.append(line)
    for part in SHARES:
        own = [row for row in rows if row["part"] == part]
        if not own:
            continue
        print(f"\n**{part}**: {ABOUT[part]}\n")
        measured = [row for row in own if "skipped" not in row and "note" not in row]
        if measured:
            columns = COLUMNS[KIND.get(part, part)]
            print("| " + " | ".join(heading for heading, _, _ in columns) + " |")
            print("|" + " --- |" * len(columns))
            for row in measured:
                print("| " + " | ".join(cell(row.get(key), form) for _, key, form in columns) + " |")
        for row in own:
            if printed := row.get("note") or row.get("skipped"):
                print(f"{'note' if 'note' in row else 'skipped'}: {printed}")
    for row in rows:
        if row["part"] == "facts" and "skipped" in row:
            print(f"skipped: {row['skipped']}")


def cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form).replace("|", "\\|")


def measure(asked: argparse.Namespace) -> None:
    """Measure one part in its own process."""
    try:
        from one_gpu_model import Sizes
        from one_gpu_parts import PARTS

        for row in PARTS[asked.part](Sizes(asked.tiny), asked.until):
            write(asked.out, {"part": asked.part, **row})
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        printed = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        write(asked.out, {"part": asked.part, "skipped": f"{printed} ({Path(last.filename).name}:{last.lineno})"})
        raise


def main() -> None:
    asked = parse()
    if asked.show:
        rows = read(asked.show)
        if asked.replan:
            import one_gpu_dense
            import one_gpu_model

            rows = one_gpu_dense.replan(one_gpu_model.replan(rows))
        show(rows)
    elif asked.part:
        measure(asked)
    else:
        sys.exit(conduct(asked))


if __name__ == "__main__":
    main()
