"""Make a demo: a tiny Mistral 4 in its published layout, text that Python carries, and a run file."""

import json
import os
import pydoc_data.topics
from pathlib import Path

from windlass.errors import UserError
from windlass.hardware import read_this_machine

RANKS = 2
MACHINE = "machine.json"


def can_calibrate() -> bool:
    """Whether `calibrate` measures what the demo trains on: as many processors, and no GPU."""
    return not read_this_machine().gpus and (os.cpu_count() or 1) >= RANKS


def make_demo(directory: Path, *, calibrated: bool = False) -> Path:
    """Write `model/`, `data/` and `run.yaml` into `directory`; returns the run file. Nothing there is overwritten.

    `calibrated`: the run is to be planned with the machine file that the caller writes there.
    """
    from windlass import tiny

    run = directory / "run.yaml"
    if run.exists():
        raise UserError("there is already a demo", str(run), f"`windlass train {run}`, or give another --dir", "exists")
    # Paragraphs of Python's own help pages, which repeat each other; every tenth is held out for evaluation.
    pages = [page for _, page in sorted(pydoc_data.topics.topics.items())]
    texts = dict.fromkeys(text.strip() for page in pages for text in page.split("\n\n"))
    rows = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts if len(text) > 80]
    splits = {"train": [row for i, row in enumerate(rows) if i % 10], "validation": rows[::10]}
    try:
        (directory / "data").mkdir(parents=True, exist_ok=True)
        # A wider start than usual, so that a random model is wrong enough for its loss to fall visibly.
        config = {"initializer_range": 0.2}
        tiny.write_model(directory / "model", "mistral4", hidden=128, layers=2, vocab=1024, config=config)
        for split, lines in splits.items():
            (directory / "data" / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        places = {"model": directory / "model", "data": directory / "data", "output": directory / "run"}
        text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
        machine = json.dumps(str(directory / MACHINE)) if calibrated else "null"
        filled = text.format(machine=machine, **{name: json.dumps(str(path)) for name, path in places.items()})
        run.write_text(filled, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", str(directory), "give another --dir", "unwritable"
        ) from None
    return run
