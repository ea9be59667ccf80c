"""The model card: what was trained on what and how, with the loss curve as a picture without libraries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from windlass.export.choose import Chosen, evaluations
from windlass.observe import steps

CURVE = "loss.svg"
WIDTH, HEIGHT, LEFT, BOTTOM, EDGE = 720, 300, 56, 36, 16
POINTS = 400
Points = Sequence[tuple[float, float]]

HYPER = {
    "lora": ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules"),
    "data": ("dataset_name_or_path", "dataset_config_name", "train_split", "max_length", "packing"),
    "train": (
        *("learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps", "optim", "weight_decay"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "seed"),
    ),
}


def write(chosen: Chosen, to: Path, base: str, *, kind: str, dtype: str | None) -> None:
    """README.md, and the curve where the run's steps are at hand."""
    losses = training_losses(chosen.run_folder)
    evaluated = sorted(evaluations(chosen.run_folder).items()) if chosen.run_folder else []
    curve = draw(losses, [(float(step), loss) for step, loss in evaluated])
    if curve:
        (to / CURVE).write_text(curve, encoding="utf-8")
    (to / "README.md").write_text(text(chosen, base, kind, dtype, evaluated, bool(curve)), encoding="utf-8")


def training_losses(run: Path | None) -> list[tuple[float, float]]:
    """Loss by step, of the first rank: the loss is the same on all."""
    files = steps.files(run) if run else {}
    if not files:
        return []
    found = []
    for line in steps.lines(files[min(files)]):
        step, loss = line.get("step"), line.get("loss")
        if isinstance(step, int) and isinstance(loss, int | float) and math.isfinite(loss):
            found.append((float(step), float(loss)))
    return found[:: max(1, len(found) // POINTS)]


def draw(losses: Points, evaluated: Points) -> str:
    """A small SVG: training loss as a line, evaluations as dots."""
    everything = [*losses, *evaluated]
    if len(everything) < 2:
        return ""
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    last = max(x for x, _ in everything)
    high = high if high > low else low + 1

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = point
        across = LEFT + x / last * (WIDTH - LEFT - EDGE)
        return round(across, 1), round(EDGE + (high - y) / (high - low) * (HEIGHT - BOTTOM - EDGE), 1)

    line = " ".join(f"{x},{y}" for x, y in map(place, losses))
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="3.5" fill="#d97706"/>' for x, y in map(place, evaluated))
    marks = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - EDGE}" y1="{y}" y2="{y}" stroke="#8884"/>'
        f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{value:.3g}</text>'
        for value in (low, (low + high) / 2, high)
        for _, y in (place((0, value)),)
    )
    legend = "training loss" + (", evaluation (dots)" if evaluated else "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Loss by step" '
        f'font-family="sans-serif" font-size="12" fill="#6b7280"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
        f'{marks}<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="1.5"/>{dots}'
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 12}" text-anchor="end">step {last:.0f}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 12}">{escape(legend)}</text></svg>\n'
    )


def text(
    chosen: Chosen, base: str, kind: str, dtype: str | None, evaluated: Sequence[tuple[int, float]], curve: bool
) -> str:
    run: dict[str, Any] = chosen.manifest.get("run", {})
    name = run.get("name") or chosen.folder.name
    library, relation = ("peft", "adapter") if kind == "adapter" else ("transformers", "finetune")
    lines = [
        "---",
        *([f"base_model: {_quoted(base)}", f"base_model_relation: {relation}"]),
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        *([f"datasets: [{_quoted(_named(run['data']['dataset_name_or_path']))}]"] if run.get("data") else []),
        "tags: [lora, windlass]",
        "# license: yours to state; the base model's licence binds it too",
        "---",
        "",
        f"# {name}",
        "",
        f"A LoRA {'adapter for' if kind == 'adapter' else 'fine-tune merged into'} `{base}`"
        f"{f', in {dtype}' if dtype else ''}. Exported: {chosen.why}.",
        "",
    ]
    if curve:
        lines += [f"![Loss by step]({CURVE})", ""]
    if evaluated:
        lines += ["| step | evaluation loss |", "|---|---|", *(f"| {s} | {loss:.4f} |" for s, loss in evaluated), ""]
    return "\n".join([*lines, *_hyper(run, chosen), *_versions(chosen.manifest)]) + "\n"


def _hyper(run: dict[str, Any], chosen: Chosen) -> list[str]:
    found = [(f"{s}.{key}", run.get(s, {}).get(key)) for s, keys in HYPER.items() for key in keys]
    if not run:  # an adapter that some other tool made: what its own config says
        found = [(key, chosen.config.get(key)) for key in ("r", "lora_alpha", "target_modules")]
    rows = [(key, _shown(key, value)) for key, value in found if value is not None]
    return ["## How it was trained", "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows), ""]


def _versions(manifest: dict[str, Any]) -> list[str]:
    versions = manifest.get("versions", {})
    if not versions:
        return []
    return ["## Versions", "", ", ".join(f"{name} {version}" for name, version in versions.items()), ""]


def _shown(key: str, value: Any) -> str:
    value = _named(str(value)) if key.endswith("name_or_path") else value
    said = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return (said if len(said) <= 200 else f"{said[:200]}…").replace("|", "\\|")


def _named(path: str) -> str:
    """A data set's or model's name: of a local path, its last part."""
    return Path(path).name if Path(path).is_absolute() or path.startswith(("~", ".")) else path


def _quoted(value: str) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)
