"""The model card: what was trained on what and how, with the loss curve as a picture that needs no library."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from windlass.export.source import Source
from windlass.files import read_json_lines
from windlass.run_folder import EVENTS, step_files

CURVE: Final = "loss.svg"
WIDTH, HEIGHT, LEFT, BOTTOM, EDGE = 720, 300, 56, 36, 16
POINTS: Final = 400
Points = Sequence[tuple[int, float]]

SETTINGS: Final = {
    "lora": ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules"),
    "data": ("dataset_name_or_path", "dataset_config_name", "train_split", "max_length", "packing"),
    "train": (
        *("learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps", "optim", "weight_decay"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "seed"),
    ),
}


def write_card(source: Source, to: Path, base: str, *, merged: bool, dtype: str | None) -> None:
    """README.md, and the loss curve if the run's steps are at hand."""
    run_folder = source.run_folder
    files = step_files(run_folder) if run_folder else {}
    losses = _by_step(files[min(files)], "loss") if files else []  # the loss is the same on all ranks
    evaluations = sorted(dict(_by_step(run_folder / EVENTS, "eval_loss")).items()) if run_folder else []
    curve = draw(losses[:: max(1, len(losses) // POINTS)], evaluations)
    if curve:
        (to / CURVE).write_text(curve, encoding="utf-8")

    run: dict[str, Any] = source.manifest.get("run", {})
    front = [
        f"base_model: {json.dumps(base, ensure_ascii=False)}",
        f"base_model_relation: {'finetune' if merged else 'adapter'}",
        f"library_name: {'transformers' if merged else 'peft'}",
        "pipeline_tag: text-generation",
    ]
    if run.get("data"):
        front.append(f"datasets: [{json.dumps(_public(run['data']['dataset_name_or_path']), ensure_ascii=False)}]")
    front += ["tags: [lora, windlass]", "# license: yours to state; the base model's licence binds it too"]
    what = f"A LoRA {'fine-tune merged into' if merged else 'adapter for'} `{base}`"
    lines = ["---", *front, "---", "", f"# {run.get('name') or source.folder.name}", ""]
    lines += [f"{what}{f', in {dtype}' if dtype else ''}. Exported: {source.why}.", ""]
    if curve:
        lines += [f"![Loss by step]({CURVE})", ""]
    if evaluations:
        lines += ["| step | evaluation loss |", "|---|---|", *(f"| {s} | {loss:.4f} |" for s, loss in evaluations), ""]
    settings = [(f"{s}.{key}", run.get(s, {}).get(key)) for s, keys in SETTINGS.items() for key in keys]
    if not run:  # an adapter that some other tool made: what its own config has
        settings = [(key, source.config.get(key)) for key in ("r", "lora_alpha", "target_modules")]
    lines += ["## How it was trained", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {_cell(key, value)} |" for key, value in settings if value is not None]
    if versions := source.manifest.get("versions"):
        lines += ["", "## Versions", "", ", ".join(f"{name} {version}" for name, version in versions.items())]
    (to / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _by_step(file: Path, name: str) -> list[tuple[int, float]]:
    found = []
    for line in read_json_lines(file) if file.is_file() else ():
        step, value = line.get("step"), line.get(name)
        if isinstance(step, int) and isinstance(value, int | float) and math.isfinite(value):
            found.append((step, float(value)))
    return found


def draw(losses: Points, evaluations: Points) -> str:
    """A small SVG: training loss as a line, evaluations as dots."""
    points = [*losses, *evaluations]
    if len(points) < 2:
        return ""
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    last = max(step for step, _ in points)
    high = high if high > low else low + 1

    def x(step: float) -> float:
        return round(LEFT + step / last * (WIDTH - LEFT - EDGE), 1)

    def y(loss: float) -> float:
        return round(EDGE + (high - loss) / (high - low) * (HEIGHT - BOTTOM - EDGE), 1)

    line = " ".join(f"{x(step)},{y(loss)}" for step, loss in losses)
    dots = "".join(f'<circle cx="{x(step)}" cy="{y(loss)}" r="3.5" fill="#d97706"/>' for step, loss in evaluations)
    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - EDGE}" y1="{y(loss)}" y2="{y(loss)}" stroke="#8884"/>'
        f'<text x="{LEFT - 8}" y="{y(loss) + 4}" text-anchor="end">{loss:.3g}</text>'
        for loss in (low, (low + high) / 2, high)
    )
    legend = "training loss" + (", evaluation (dots)" if evaluations else "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Loss by step" '
        f'font-family="sans-serif" font-size="12" fill="#6b7280"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
        f'{grid}<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="1.5"/>{dots}'
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 12}" text-anchor="end">step {last}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 12}">{legend}</text></svg>\n'
    )


def _cell(key: str, value: Any) -> str:
    value = _public(str(value)) if key.endswith("name_or_path") else value
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return (text if len(text) <= 200 else f"{text[:200]}…").replace("|", "\\|")


def _public(path: str) -> str:
    """A data set's or model's name; of a local path, its last part."""
    return Path(path).name if Path(path).is_absolute() or path.startswith(("~", ".")) else path
