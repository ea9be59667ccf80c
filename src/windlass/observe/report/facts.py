"""What a run did, as the numbers of report.json: everything here is read or computed, nothing drawn."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Final

from windlass import run_folder
from windlass.observe import steps
from windlass.observe.report.format import count_of, duration
from windlass.observe.report.read import NAN, Run, Stats, ask, known, listed, mean, median, number

Facts = dict[str, Any]
PLAN: Final = run_folder.PLAN
MANIFEST: Final = run_folder.MANIFEST
SILENT_SECONDS: Final = 120  # without a heartbeat of any rank: the run is dead, whatever its manifest says
STOPPED_BY_ALARM, KILLED = "stopped by an alarm", "killed"
BAD_STATES: Final = (run_folder.FAILED, KILLED, STOPPED_BY_ALARM)
DATA_SHARE: Final = 0.25  # of the step time, from which waiting for data is reported
CLIPPED_SHARE: Final = 0.9  # of the steps, from which clipping is reported
MAX_LISTED: Final = 200  # alarms and targets; the counts say how many there are


def facts(run: Run) -> Facts:
    """One run's entry in report.json."""
    meter = run.meters[min(run.meters)] if run.meters else {}
    made: Facts = {
        "name": run.name,
        "folder": str(run.folder),
        "state": state(run),
        "model": _last_part(run.ask(MANIFEST, "run", "model", "model_name_or_path") or run.ask(PLAN, "checkpoint")),
        "data_set": _last_part(
            run.ask(run_folder.DATA, "source", "name") or run.ask(MANIFEST, "run", "data", "dataset_name_or_path")
        ),
        "date": _date(run),
        "headline": headline(run),
        "step_time": step_time(run),
        "tokens": tokens(run) if run.unit == steps.TOKENS else None,
        "memory": memory(run),
        "gpu": gpu(run),
        "experts": experts(run),
        "evaluations": [event for event in run.events if event.get("kind") == "eval"],
        "alarms": run.alarms[:MAX_LISTED],
        "alarm_count": len(run.alarms),
        "watched": run.watched,
        "saves": saves(run),
        "ranks": ranks(run),
        "hardware": [{**_dict(ask(each, "hardware")), "rank": rank} for rank, each in run.meters.items()],
        "unmeasured": ask(meter, "unmeasured") or {},
        "script_name": ask(meter, "script_name") or "",
        "report_meta": ask(meter, "report_meta") or {},
        "arithmetic": ask(meter, "arithmetic") or {},
        "data": run.files.get(run_folder.DATA),
        "adapter": adapter(run),
        "certificate": certificate(run),
        "run": run.ask(MANIFEST, "run"),
        "versions": run.ask(MANIFEST, "versions") or ask(meter, "hardware", "versions") or {},
        "git": run.ask(MANIFEST, "git"),
        "layout": run.ask(PLAN, "layout"),
        "absent": run.absent,
    }
    made["planned"] = planned(run, made)
    made["verdict"] = verdict(run, made)
    return made


def state(run: Run) -> str:
    """As the manifest says; while that says running, the last event may know better: the report is part of the run."""
    recorded = run.ask(MANIFEST, "state")
    if isinstance(recorded, str) and recorded not in ("", run_folder.RUNNING):
        return recorded
    last: dict[str, Any] = next((e for e in reversed(run.events) if e.get("kind") in ("start", "end")), {})
    if last.get("kind") == "end":
        return "ended early" if number(last.get("step")) < number(run.ask(PLAN, "batch", "steps")) else "finished"
    began = number(last.get("time"))
    if any(alarm.get("level") == "stop" and number(alarm.get("time")) >= began for alarm in run.alarms):
        return STOPPED_BY_ALARM
    if run.silent_seconds is not None and run.silent_seconds > SILENT_SECONDS:
        return KILLED
    return run_folder.RUNNING if recorded else "running, or ended without saying so"


def headline(run: Run) -> Facts:
    first = run.first
    loss, evaluations = first["loss"], known(number(e.get("eval_loss")) for e in run.events if e.get("kind") == "eval")
    few = max(1, first.length // 20)  # a twentieth of the run: one step's loss is mostly noise
    began = next((number(e.get("time")) for e in run.events if e.get("kind") == "start"), NAN)
    times = first["time"]
    wall = times[-1] - (times[0] if math.isnan(began) else began) if len(times) else NAN
    rate = median(job_rate(run))
    mfu = [rank.stats["mfu"] for rank in run.ranks.values()]
    norms, limit = known(first["grad_norm"]), number(run.ask(MANIFEST, "run", "train", "max_grad_norm"))
    clipped = sum(norm > limit for norm in norms) / len(norms) if norms and limit > 0 else None
    return {
        "steps": int(first["step"][-1]) if first.length else 0,
        "steps_planned": _whole(run.ask(PLAN, "batch", "steps")),
        "ranks": world(run),
        "first_loss": mean(loss[:few]),
        "final_loss": mean(loss[-few:]),
        "least_eval_loss": min(evaluations, default=None),
        "final_eval_loss": evaluations[-1] if evaluations else None,
        "step_seconds": median(first["step_seconds"]),
        "unit": run.unit,
        "per_second": rate,
        "tokens_per_second": rate if run.unit == steps.TOKENS else None,
        "tokens_per_second_per_gpu": rate / world(run) if rate and run.unit == steps.TOKENS else None,
        "mfu": _mean_of(mfu),
        "seconds": _clean(wall),
        "gpu_hours": _clean(wall * world(run) / 3600),
        "skipped_steps": len(first.skipped),
        "clipped_share": clipped,
    }


def world(run: Run) -> int:
    """Ranks of the run; some may have left no file."""
    recorded = [number(ask(meter, "ranks")) for meter in run.meters.values()] + [number(run.ask(MANIFEST, "ranks"))]
    return int(max([len(run.ranks), *known(recorded)]))


def job_rate(run: Run) -> list[float]:
    """Tokens, or what else is counted, per second of the whole job, step by step."""
    pairs = zip(run.job_items, run.first["step_seconds"], strict=False)
    return [items / seconds if seconds > 0 else NAN for items, seconds in pairs]


def step_time(run: Run) -> Facts:
    """Mean seconds per phase over all ranks and steps."""
    means = {phase: _mean_of([r.stats[f"{phase}_seconds"] for r in run.ranks.values()]) for phase in steps.PHASES}
    seconds = {phase: value for phase, value in means.items() if value is not None}
    total = math.fsum(seconds.values())
    slowest = max(run.ranks, key=lambda rank: (run.ranks[rank].medians["step_seconds"] or 0.0, rank), default=None)
    cost, spent = Stats.of(run.first["meter_seconds"]), Stats.of(run.first["step_seconds"])
    return {
        "seconds": seconds,
        "shares": {phase: value / total for phase, value in seconds.items()} if total else {},
        "median": run.ranks[min(run.ranks)].medians["step_seconds"],
        "slowest_rank": slowest,
        "pause_seconds": math.fsum(known(run.first["pause_seconds"])),
        "meter_share": cost.total / spent.total if spent.total and cost.count else None,
    }


def tokens(run: Run) -> Facts:
    """Sums over the ranks whose files are here."""
    names = ("tokens", "padded_tokens", "supervised_tokens")
    useful, padded, supervised = (math.fsum(rank.stats[n].total for rank in run.ranks.values()) for n in names)
    padding_known = any(rank.stats["padded_tokens"].count for rank in run.ranks.values())
    return {
        "useful": int(useful),
        "padded": int(padded) if padding_known else None,
        "supervised": int(supervised),
        "masked": max(int(useful - supervised), 0),
        "useful_share": useful / (useful + padded) if useful + padded else None,
        "supervised_share": min(supervised / useful, 1.0) if useful else None,
    }


def memory(run: Run) -> Facts:
    on_gpu = any(rank.stats["gpu_peak_gib"].count for rank in run.ranks.values())
    device, host = number(run.ask(PLAN, "memory", "gpu_gib")), number(run.ask(PLAN, "memory", "host_gib"))
    per_node = number(run.ask(PLAN, "layout", "gpus_per_node"))
    field = "gpu_peak_gib" if on_gpu else "rss_gib"
    return {
        "place": "gpu" if on_gpu else "host",
        "per_rank": [
            {"rank": number_, "peak_gib": _clean(rank.stats[field].most)} for number_, rank in run.ranks.items()
        ],
        # Without a GPU a rank's device is the host: what the plan puts there, and its share of the node's.
        "planned_gib": _clean(device if on_gpu else device + host / per_node if per_node else NAN),
        "capacity_gib": _clean(number(run.ask(PLAN, "memory", "gpu_memory_gib"))) if on_gpu else None,
    }


def gpu(run: Run) -> Facts:
    throttled: dict[str, int] = {}
    for rank in run.ranks.values():
        for reason, samples in rank.throttled.items():
            throttled[reason] = throttled.get(reason, 0) + samples
    return {
        "utilization": _mean_of([rank.stats["gpu_utilization"] for rank in run.ranks.values()]),
        "power_watts": _mean_of([rank.stats["gpu_power_watts"] for rank in run.ranks.values()]),
        "hottest_celsius": max(
            known(r.stats["gpu_temperature_celsius"].most for r in run.ranks.values()), default=None
        ),
        "throttled_samples": throttled,
    }


def experts(run: Run) -> Facts | None:
    """The last expert balance."""
    if not run.first.experts:
        return None
    last = max(run.first.experts)
    lists = {name: listed(run.first.experts[last].get(name)) for name in ("busiest", "idlest", "unused")}
    layers = min(map(len, lists.values()))
    if not layers:
        return None
    return {
        "step": int(run.first["step"][last]),
        "experts": _whole(run.first.experts[last].get("experts")),
        **{name: [_clean(number(value)) for value in values[:layers]] for name, values in lists.items()},
    }


def saves(run: Run) -> Facts:
    """Checkpoints, by the events that are logged when each has ended."""
    found = [event for event in run.events if event.get("kind") == "save"]
    failed = [event for event in found if event.get("ok") is False]
    good = [event for event in found if event.get("ok") is not False]
    seconds = known(number(event.get("seconds")) for event in good)
    return {
        "count": len(found),
        "failed": len(failed),
        "error": str(failed[-1].get("error", "")) if failed else "",
        "seconds": median(seconds),
        "most_seconds": max(seconds, default=None),
        "bytes": _whole(good[-1].get("bytes")) if good else None,
    }


def ranks(run: Run) -> list[Facts]:
    rows = []
    for number_, rank in run.ranks.items():
        seconds, waiting = rank.stats["step_seconds"], rank.stats["communication_seconds"]
        rows.append(
            {
                "rank": number_,
                "host": ask(run.meters.get(number_), "hardware", "host"),
                "steps": rank.length,
                "step_seconds": rank.medians["step_seconds"],
                "communication_share": waiting.total / seconds.total if seconds.total and waiting.count else None,
                "per_second": rank.medians[steps.counted(run.unit)[1]],
                "tokens_per_second": rank.medians["tokens_per_second"],
                "gpu_utilization": _mean_of([rank.stats["gpu_utilization"]]),
                "power_watts": _mean_of([rank.stats["gpu_power_watts"]]),
                "rss_gib": _clean(rank.stats["rss_gib"].most),
            }
        )
    return rows


def planned(run: Run, made: Facts) -> list[Facts]:
    """Each figure of the plan that was also measured."""
    head, seconds = made["headline"], made["headline"]["seconds"]
    rows = (
        ("seconds per step", ("estimate", "step_seconds"), head["step_seconds"]),
        ("tokens per second", ("estimate", "tokens_per_second"), head["tokens_per_second"]),
        ("MFU", ("estimate", "mfu"), head["mfu"]),
        ("peak memory, GiB", None, peak_gib(made)),
        ("steps", ("batch", "steps"), head["steps"]),
        ("hours", ("estimate", "hours"), seconds / 3600 if seconds is not None else None),
    )
    table = []
    for what, path, measured in rows:
        expected = _clean(number(run.ask(PLAN, *path))) if path else made["memory"]["planned_gib"]
        if expected is not None or measured is not None:
            ratio = measured / expected if expected and measured is not None else None
            table.append({"what": what, "planned": expected, "measured": measured, "ratio": ratio})
    return table if any(row["planned"] is not None for row in table) else []


def peak_gib(made: Facts) -> float | None:
    """Of the rank with the highest peak."""
    return max((row["peak_gib"] or 0 for row in made["memory"]["per_rank"]), default=0) or None


def adapter(run: Run) -> Facts | None:
    plan = run.ask(PLAN, "adapter")
    if not isinstance(plan, dict):
        return None
    keys = ("pattern", "part", "modules", "parameters", "note")
    targets = [target for target in listed(plan.get("targets"))[:MAX_LISTED] if isinstance(target, dict)]
    shown = [{key: target.get(key) for key in keys} for target in targets]
    return {name: plan.get(name) for name in ("r", "alpha", "trainable", "percent")} | {"targets": shown}


def certificate(run: Run) -> Facts | None:
    """load.json without its thousands of tensors."""
    load = run.files.get(run_folder.LOAD)
    if load is None:
        return None
    return {
        "checkpoint": load.get("checkpoint"),
        "layout": load.get("layout"),
        "parameters": _length(load.get("parameters")),
        "loaded": _whole(load.get("loaded")),
        "unread": _length(load.get("unread")),
        "checked": load.get("checked"),
    }


def verdict(run: Run, made: Facts) -> Facts:
    """good, warn or bad; a sentence; and what speaks against the run."""
    head, against = made["headline"], []
    bad = bool(run.first.non_finite) or made["state"] in BAD_STATES
    if made["state"] == KILLED:
        against.append(f"no sign of life from any rank for {duration(run.silent_seconds)}, and no end recorded")
    if run.first.non_finite:
        against.append(f"loss or gradient is not a finite number at step {run.first.non_finite[0]}")
    if head["skipped_steps"]:
        was = "was" if head["skipped_steps"] == 1 else "were"
        against.append(f"{count_of(head['skipped_steps'], 'step')} {was} skipped: the gradients were not finite")
    first, last = head["first_loss"], head["final_loss"]
    if first is not None and last is not None and last > first * 1.02 and head["steps"] >= 20:
        against.append("the loss is higher at the end than at the start")
    least, final = head["least_eval_loss"], head["final_eval_loss"]
    if least is not None and final > least * 1.05:
        against.append(f"the evaluation loss has risen from {least:.3f} to {final:.3f}: overfitting")
    if (head["clipped_share"] or 0) >= CLIPPED_SHARE and head["steps"] >= 20:
        limit = number(run.ask(MANIFEST, "run", "train", "max_grad_norm"))
        against.append(f"{head['clipped_share']:.0%} of the gradients were clipped to max_grad_norm {limit:g}")
    if run.alarms:
        bad = bad or any(alarm.get("level") in ("stop", "error", "bad") for alarm in run.alarms)
        kinds = list(dict.fromkeys(str(alarm.get("kind", "?")) for alarm in run.alarms))[:6]
        against.append(f"{count_of(len(run.alarms), 'alarm')}: {', '.join(kinds)}")
    if made["saves"]["failed"]:
        against.append(f"{made['saves']['failed']} of {made['saves']['count']} saves failed: {made['saves']['error']}")
    waiting = made["step_time"]["shares"].get("data", 0.0)
    if waiting > DATA_SHARE:
        against.append(f"{waiting:.0%} of the step time is waiting for data: loading is the bottleneck")
    if made["gpu"]["throttled_samples"]:
        against.append(f"GPU clocks were held down: {', '.join(made['gpu']['throttled_samples'])}")
    if len(run.ranks) < head["ranks"]:
        against.append(f"{head['ranks'] - len(run.ranks)} of {head['ranks']} ranks left no step file")
    return {"level": "bad" if bad else "warn" if against else "good", "text": _sentence(made), "against": against}


def _sentence(made: Facts) -> str:
    head = made["headline"]
    if not head["steps"]:
        return "No step has been made yet."
    of = f" of {head['steps_planned']:,}" if head["steps_planned"] else ""
    text = f"{made['state'][:1].upper()}{made['state'][1:]} after {head['steps']:,}{of} "
    text += "step" if head["steps"] == 1 and not of else "steps"
    if head["first_loss"] is not None and head["final_loss"] is not None:
        text += f"; the loss went from {head['first_loss']:.3f} to {head['final_loss']:.3f}"
    return text + "."


def _mean_of(found: list[Stats]) -> float | None:
    count = sum(each.count for each in found)
    return math.fsum(each.total for each in found) / count if count else None


def _whole(value: Any) -> int | None:
    found = number(value)
    return None if math.isnan(found) else int(found)


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, list | dict) else _whole(value)


def _clean(value: float) -> float | None:
    return None if math.isnan(value) else value


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _last_part(value: Any) -> str | None:
    """A model or data set by its last name: /data/models/Mistral-7B -> Mistral-7B."""
    return Path(value).name or value if isinstance(value, str) and value else None


def _date(run: Run) -> str | None:
    """When the run began, in this machine's time."""
    began = next((number(e.get("time")) for e in run.events if e.get("kind") == "start"), NAN)
    began = run.first["time"][0] if math.isnan(began) and len(run.first["time"]) else began
    if math.isnan(began) or not 0 <= began < 1e11:
        return None
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(began))
