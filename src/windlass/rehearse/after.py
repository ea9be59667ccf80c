"""What comes after training: the best adapter, the exports, and other people's libraries opening them."""

from __future__ import annotations

import json
import sys
from typing import Any

from windlass.rehearse.record import Failed
from windlass.rehearse.stage import Stage, require


def judge(stage: Stage) -> None:
    """`windlass best`, where there is something to compare."""
    if not list((stage.rehearsal / "checkpoints").glob("step-*")) or not validated(stage):
        stage.record.not_proved.append({"what": "best", "why": "the run saves nothing, or has no rows to compare on"})
        return
    with stage.phase("best") as phase:
        ranking = stage.windlass("best", "best", str(stage.rehearsal), "--ranks", "1")
        order = [f"{each['name']} {each['loss']:.4f}" for each in ranking["best"]]
        phase.proved.append(f"ranked on {ranking['rows']} rows: {', '.join(order)}")


def validated(stage: Stage) -> bool:
    audit = json.loads((stage.rehearsal / "data.json").read_text())
    return int(audit["splits"].get("validation", {}).get("documents", 0)) > 1


def export(stage: Stage) -> None:
    with stage.phase("export") as phase:
        made = stage.windlass("export", "export", str(stage.rehearsal), "--to", str(stage.folder / "adapter"))
        phase.proved.append(f"{made['adapter']} in PEFT's format, opened again, every tensor byte-equal")


def merge(stage: Stage) -> None:
    """In 16 bits where the base is quantised: plain transformers can't open fused experts in FP8."""
    coded = stage.record.twin.get("quantization")
    with stage.phase("merge") as phase:
        dtype = ("--dtype", "bf16") if coded else ()
        command = ("export", str(stage.rehearsal), "--to", str(stage.folder / "merged"), "--merge", *dtype)
        made = stage.windlass("merge", *command)
        logits = made["logits"]
        phase.proved.append(
            f"{made['touched']} tensors merged and computed again, {made['untouched']} byte-equal to the base"
        )
        if "kl" in logits:
            phase.proved.append(
                f"base + adapter to merged: KL {logits['kl']:.1e} nats a token, bound {logits['bound_kl']:.1e}"
            )


def reload(stage: Stage) -> None:
    """Plain transformers and PEFT, without a line of windlass between them and the files."""
    with stage.phase("reload") as phase:
        command = [sys.executable, "-m", "windlass.rehearse.reload", str(stage.folder)]
        with stage.started("reload", command) as running:
            ended = running.ended(stage.tick)
        found: dict[str, Any] = {}
        if ended.out.strip():
            found = json.loads(ended.out.strip().splitlines()[-1])
        if "problem" in found:
            raise Failed(f"error: {found['problem']}", 1, ended.log)
        require(ended)
        phase.proved += found["proved"]
