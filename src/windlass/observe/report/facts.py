"""What a run did, as the numbers of report.json: everything here is read or computed, nothing drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from windlass.observe import steps
from windlass.observe.report.html import duration
from windlass.observe.report.read import NAN, Columns, Run, ask, known, mean, median, number

Facts = dict[str, Any]
SILENT_SECONDS = 120  # without a heartbeat of any rank: nobody is there any more, however the manifest calls it
BAD_STATES = ("failed", "killed", "stopped by an alarm")
DATA_SHARE = 0.25  # of the step time, from which waiting for data is worth a word
SHOWN = 200  # alarms and targets that are listed; the counts say how many there are


def facts(run: Run) -> Facts:
    """One run's entry in report.json."""
    made: Facts = {
        "name": run.name,
        "folder": str(run.folder),
        "state": state(run),
        "headline": headline(run),
        "step_time": step_time(run),
        "tokens": tokens(run) if run.unit == steps.TOKENS else None,
        "memory": memory(run),
        "gpu": gpu(run),
        "experts": experts(run),
        "evaluations": [event for event in run.events if event.get("kind") == "eval"],
        "alarms": run.alarms[:SHOWN],
        "alarm_count": len(run.alarms),
        "watched": run.watched,
        "saves": saves(run),
        "ranks": ranks(run),
    }
    made["planned"] = planned(run, made)
    made["verdict"] = verdict(run, made)
    return made | about(run)


def about(run: Run) -> Facts:
    """What other stages wrote, shortened to what a reader wants."""
    first = run.meters.get(min(run.meters), {}) if run.meters else {}
    return {
        "hardware": [{**table(ask(meter, "hardware")), "rank": rank} for rank, meter in run.meters.items()],
        "unmeasured": ask(first, "unmeasured") or {},
        "script_name": ask(first, "script_name") or "",
        "report_meta": ask(first, "report_meta") or {},
        "arithmetic": ask(first, "arithmetic") or {},
        "data": run.files.get("data.json"),
        "adapter": adapter(run),
        "certificate": certificate(run),
        "run": run.ask("manifest.json", "run"),
        "versions": run.ask("manifest.json", "versions") or ask(first, "hardware", "versions") or {},
        "git": run.ask("manifest.json", "git"),
        "layout": run.ask("plan.json", "layout"),
        "absent": run.absent,
    }


def table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def state(run: Run) -> str:
    """As the manifest says; while that says running, the last event may know better: this page is made at its end."""
    said = run.ask("manifest.json", "state")
    if isinstance(said, str) and said not in ("", "running"):
        return said
    last: dict[str, Any] = next((e for e in reversed(run.events) if e.get("kind") in ("start", "end")), {})
    if last.get("kind") == "end":
        steps_planned = number(run.ask("plan.json", "batch", "steps"))
        return "ended early" if number(last.get("step")) < steps_planned else "finished"
    began = number(last.get("time"))
    if any(alarm.get("level") == "stop" and number(alarm.get("time")) >= began for alarm in run.alarms):
        return "stopped by an alarm"
    if run.silent_seconds is not None and run.silent_seconds > SILENT_SECONDS:
        return "killed"
    return "running" if said else "running or ended without a word"


def headline(run: Run) -> Facts:
    first = run.first
    loss, evaluations = first["loss"], known(number(e.get("eval_loss")) for e in run.events if e.get("kind") == "eval")
    few = max(1, first.length // 20)  # a twentieth of the run: one step's loss is mostly noise
    wall = first["time"][-1] - first["time"][0] if first.length > 1 and len(first["time"]) else NAN
    begun = next((number(e.get("time")) for e in run.events if e.get("kind") == "start"), NAN)
    if first.length and len(first["time"]) and not math.isnan(begun):
        wall = first["time"][-1] - begun
    mfu = mean(known(value for columns in run.ranks.values() for value in columns["mfu"]))
    return {
        "steps": int(first["step"][-1]) if first.length else 0,
        "steps_planned": whole(run.ask("plan.json", "batch", "steps")),
        "ranks": world(run),
        "first_loss": mean(known(loss[:few])),
        "final_loss": mean(known(loss[-few:])),
        "least_eval_loss": min(evaluations, default=None),
        "final_eval_loss": evaluations[-1] if evaluations else None,
        "step_seconds": median(first["step_seconds"]),
        "unit": run.unit,
        "per_second": median(job_rate(run)),
        "tokens_per_second": median(job_rate(run)) if run.unit == steps.TOKENS else None,
        "tokens_per_second_per_gpu": _per_gpu(run) if run.unit == steps.TOKENS else None,
        "mfu": mfu,
        "seconds": clean(wall),
        "gpu_hours": clean(wall * world(run) / 3600),
        "skipped_steps": len(first.skipped),
    }


def _per_gpu(run: Run) -> float | None:
    rate = median(job_rate(run))
    return rate / world(run) if rate else None


def world(run: Run) -> int:
    said = [number(ask(meter, "ranks")) for meter in run.meters.values()] + [number(run.ask("manifest.json", "ranks"))]
    return int(max([len(run.ranks), *known(said)]))


def aligned(columns: Columns, name: str, by: Sequence[float]) -> Sequence[float]:
    """A rank's field at the first rank's steps: a killed rank may have fewer."""
    values, own = columns[name], columns["step"]
    if not len(values):
        return [NAN] * len(by)
    if len(own) >= len(by) and own[0] == by[0] and own[len(by) - 1] == by[-1]:
        return values[: len(by)]
    at = dict(zip(own, values, strict=True))
    return [at.get(step, NAN) for step in by]


def job_items(run: Run) -> Sequence[float]:
    """What is counted of all ranks per step: by the loop itself, else the sum over the ranks whose files are here."""
    first = run.first
    if len(first["job_tokens"]):
        return first["job_tokens"]
    by = first["step"]
    rows = [aligned(columns, run.unit, by) for columns in run.ranks.values()]
    return [math.fsum(row) for row in zip(*rows, strict=True)] if first.length else []


def job_rate(run: Run) -> list[float]:
    """Tokens, or what else is counted, per second of the whole job, step by step."""
    seconds = run.first["step_seconds"]
    pairs = zip(job_items(run), seconds, strict=False)
    return [items / taken if taken and taken > 0 else NAN for items, taken in pairs]


def step_time(run: Run) -> Facts:
    """Mean seconds per phase over all ranks and steps, and each rank's share of waiting."""
    seconds = {}
    for phase in steps.PHASES:
        found = mean(value for columns in run.ranks.values() for value in columns[f"{phase}_seconds"])
        if found is not None:
            seconds[phase] = found
    total = math.fsum(seconds.values())
    slowest = sorted(((median(c["step_seconds"]) or 0.0, rank) for rank, c in run.ranks.items()), reverse=True)
    return {
        "seconds": seconds,
        "shares": {phase: value / total for phase, value in seconds.items()} if total else {},
        "median": median(run.first["step_seconds"]),
        "slowest_rank": slowest[0][1] if slowest else None,
        "pause_seconds": math.fsum(known(run.first["pause_seconds"])),
        "meter_share": _share(run.first, "meter_seconds", "step_seconds"),
    }


def _share(columns: Columns, part: str, whole_: str) -> float | None:
    total = math.fsum(known(columns[whole_]))
    return math.fsum(known(columns[part])) / total if total and len(columns[part]) else None


def tokens(run: Run) -> Facts:
    """Sums over the ranks whose files are here."""
    sums = {
        name: math.fsum(value for columns in run.ranks.values() for value in known(columns[name]))
        for name in ("tokens", "padded_tokens", "supervised_tokens")
    }
    useful, padded, supervised = sums.values()
    computed = useful + padded
    counted = any(len(columns["padded_tokens"]) for columns in run.ranks.values())
    return {
        "useful": int(useful),
        "padded": int(padded) if counted else None,
        "supervised": int(supervised),
        "masked": max(int(useful - supervised), 0),
        "useful_share": useful / computed if computed else None,
        "supervised_share": min(supervised / useful, 1.0) if useful else None,
    }


def memory(run: Run) -> Facts:
    on_gpu = any(len(columns["gpu_peak_gib"]) for columns in run.ranks.values())
    field = "gpu_peak_gib" if on_gpu else "rss_gib"
    device, host, node = (
        number(run.ask("plan.json", *path))
        for path in (("memory", "gpu_gib"), ("memory", "host_gib"), ("layout", "gpus_per_node"))
    )
    # Without a GPU a rank's device is the host: what the plan puts there, and its share of the node.
    planned_gib = device if on_gpu else device + host / node if node else NAN
    return {
        "place": "gpu" if on_gpu else "host",
        "per_rank": [
            {"rank": rank, "peak_gib": max(known(columns[field]), default=None)} for rank, columns in run.ranks.items()
        ],
        "planned_gib": clean(planned_gib),
        "capacity_gib": clean(number(run.ask("plan.json", "memory", "gpu_memory_gib"))) if on_gpu else None,
    }


def gpu(run: Run) -> Facts:
    every = list(run.ranks.values())
    throttled: dict[str, int] = {}
    for columns in every:
        for reason, count in columns.throttled.items():
            throttled[reason] = throttled.get(reason, 0) + count
    return {
        "utilization": mean(value for columns in every for value in columns["gpu_utilization"]),
        "power_watts": mean(value for columns in every for value in columns["gpu_power_watts"]),
        "hottest_celsius": max(known(v for columns in every for v in columns["gpu_temperature_celsius"]), default=None),
        "throttled_samples": throttled,
    }


def experts(run: Run) -> Facts | None:
    """The last look at the routers, with what is wrong in it left out."""
    seen = run.first.experts
    if not seen:
        return None
    last = max(seen)
    lists = {name: seen[last].get(name) for name in ("busiest", "idlest", "unused")}
    if not all(isinstance(values, list) and values for values in lists.values()):
        return None
    layers = min(len(values or ()) for values in lists.values())
    return {
        "step": int(run.first["step"][last]),
        "experts": whole(seen[last].get("experts")),
        **{name: [clean(number(value)) for value in (values or ())[:layers]] for name, values in lists.items()},
    }


def saves(run: Run) -> Facts:
    """Checkpoints, by the events that were written when each had ended."""
    found = [event for event in run.events if event.get("kind") == "save"]
    failed = [event for event in found if event.get("ok") is False]
    whole_ones = [event for event in found if event.get("ok") is not False]
    seconds = known(number(event.get("seconds")) for event in whole_ones)
    return {
        "count": len(found),
        "failed": len(failed),
        "error": str(failed[-1].get("error", "")) if failed else "",
        "seconds": median(seconds),
        "most_seconds": max(seconds, default=None),
        "bytes": whole(whole_ones[-1].get("bytes")) if whole_ones else None,
    }


def ranks(run: Run) -> list[Facts]:
    return [
        {
            "rank": rank,
            "host": ask(run.meters.get(rank), "hardware", "host"),
            "steps": columns.length,
            "step_seconds": median(columns["step_seconds"]),
            "communication_share": _share(columns, "communication_seconds", "step_seconds"),
            "per_second": median(columns[steps.counted(run.unit)[1]]),
            "tokens_per_second": median(columns["tokens_per_second"]),
            "gpu_utilization": mean(columns["gpu_utilization"]),
            "power_watts": mean(columns["gpu_power_watts"]),
            "rss_gib": max(known(columns["rss_gib"]), default=None),
        }
        for rank, columns in run.ranks.items()
    ]


def planned(run: Run, made: Facts) -> list[Facts]:
    """Each figure of the plan that was also measured."""
    measured_memory = max((row["peak_gib"] or 0 for row in made["memory"]["per_rank"]), default=0) or None
    rows = (
        ("seconds per step", run.ask("plan.json", "estimate", "step_seconds"), made["headline"]["step_seconds"]),
        (
            "tokens per second",
            run.ask("plan.json", "estimate", "tokens_per_second"),
            made["headline"]["tokens_per_second"],
        ),
        ("MFU", run.ask("plan.json", "estimate", "mfu"), made["headline"]["mfu"]),
        ("peak memory, GiB", made["memory"]["planned_gib"], measured_memory),
        ("steps", run.ask("plan.json", "batch", "steps"), made["headline"]["steps"]),
        ("hours", run.ask("plan.json", "estimate", "hours"), _hours(made["headline"]["seconds"])),
    )
    table = []
    for what, plan, measured in rows:
        expected = clean(number(plan))
        if expected is not None or measured is not None:
            ratio = measured / expected if expected and measured is not None else None
            table.append({"what": what, "planned": expected, "measured": measured, "ratio": ratio})
    return table if any(row["planned"] is not None for row in table) else []


def _hours(seconds: float | None) -> float | None:
    return seconds / 3600 if seconds is not None else None


def adapter(run: Run) -> Facts | None:
    said = run.ask("plan.json", "adapter")
    if not isinstance(said, dict):
        return None
    targets = said.get("targets")
    listed = [
        {name: target.get(name) for name in ("pattern", "part", "modules", "parameters", "note")}
        for target in (targets if isinstance(targets, list) else [])[:SHOWN]
        if isinstance(target, dict)
    ]
    return {name: said.get(name) for name in ("r", "alpha", "trainable", "percent")} | {"targets": listed}


def certificate(run: Run) -> Facts | None:
    """load.json without its thousands of tensors."""
    said = run.files.get("load.json")
    if said is None:
        return None
    parameters, unread = said.get("parameters"), said.get("unread")
    return {
        "checkpoint": said.get("checkpoint"),
        "layout": said.get("layout"),
        "parameters": len(parameters) if isinstance(parameters, list | dict) else whole(parameters),
        "loaded": whole(said.get("loaded")),
        "unread": len(unread) if isinstance(unread, list | dict) else whole(unread),
        "checked": said.get("checked"),
    }


def verdict(run: Run, made: Facts) -> Facts:
    """good, warn or bad; a sentence; and what speaks against the run."""
    head, against = made["headline"], []
    bad = bool(run.first.non_finite) or made["state"] in BAD_STATES
    if made["state"] == "killed":
        against.append(f"no sign of life from any rank for {duration(run.silent_seconds)}, and no end recorded")
    if run.first.non_finite:
        against.append(f"loss or gradient is not a finite number at step {run.first.non_finite[0]}")
    if head["skipped_steps"]:
        count = "1 step was" if head["skipped_steps"] == 1 else f"{head['skipped_steps']} steps were"
        against.append(f"{count} left out because their gradients were not finite")
    first, last = head["first_loss"], head["final_loss"]
    if first is not None and last is not None and last > first * 1.02 and head["steps"] >= 20:
        against.append("the loss is higher at the end than at the start")
    least, final = head["least_eval_loss"], head["final_eval_loss"]
    if least is not None and final > least * 1.05:
        against.append(f"the evaluation loss has risen from {least:.3f} to {final:.3f}: overfitting")
    if run.alarms:
        serious = sum(1 for alarm in run.alarms if alarm.get("level") in ("stop", "error", "bad"))
        bad = bad or bool(serious)
        kinds = list(dict.fromkeys(str(alarm.get("kind", "?")) for alarm in run.alarms))[:6]
        against.append(f"{len(run.alarms)} alarm{'s' if len(run.alarms) > 1 else ''}: {', '.join(kinds)}")
    if made["saves"]["failed"]:
        against.append(f"{made['saves']['failed']} of {made['saves']['count']} saves failed: {made['saves']['error']}")
    waiting = made["step_time"]["shares"].get("data", 0.0)
    if waiting > DATA_SHARE:
        against.append(f"{waiting:.0%} of the step time is waiting for data: loading is the bottleneck")
    if made["gpu"]["throttled_samples"]:
        against.append(f"GPU clocks were held down: {', '.join(made['gpu']['throttled_samples'])}")
    if len(run.ranks) < head["ranks"]:
        against.append(f"{head['ranks'] - len(run.ranks)} of {head['ranks']} ranks left no step file")
    level = "bad" if bad else "warn" if against else "good"
    return {"level": level, "text": sentence(made), "against": against}


def sentence(made: Facts) -> str:
    head = made["headline"]
    if not head["steps"]:
        return "No step has been made yet."
    of = f" of {head['steps_planned']:,}" if head["steps_planned"] else ""
    name = "step" if head["steps"] == 1 and not of else "steps"
    text = f"{made['state'][:1].upper()}{made['state'][1:]} after {head['steps']:,}{of} {name}"
    if head["first_loss"] is not None and head["final_loss"] is not None:
        text += f"; the loss went from {head['first_loss']:.3f} to {head['final_loss']:.3f}"
    return text + "."


def whole(value: Any) -> int | None:
    found = number(value)
    return None if math.isnan(found) else int(found)


def clean(value: float) -> float | None:
    return None if math.isnan(value) else value
