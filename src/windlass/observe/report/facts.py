"""Compute the numbers of report.json; nothing is drawn here.

An unknown number is NaN until `to_strict_json` makes it null, so that what is computed from it is unknown as well.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from windlass.observe import steps
from windlass.observe.format import describe_served, format_duration, format_plural
from windlass.observe.reader import (
    NAN,
    as_dict,
    as_list,
    as_number,
    drop_nan,
    find_total_steps,
    get_path,
    is_as_in_the_data,
    mean,
    median,
    read_kept,
)
from windlass.observe.report.read import RunData, finite_numbers
from windlass.observe.symptoms import find_symptoms, has_shared_steps
from windlass.run_folder import DATA, DATA_PAGE, FAILED, LOAD, MANIFEST, PLAN, RUNNING

Facts = dict[str, Any]
SILENT_SECONDS: Final = 120  # without a heartbeat of any rank the run is dead, whatever its manifest says
STOPPED_BY_ALARM: Final = "stopped by an alarm"
KILLED: Final = "killed"
BAD_STATES: Final = (FAILED, KILLED, STOPPED_BY_ALARM)
DATA_SHARE: Final = 0.25  # share of the step time from which waiting for data is reported
CERTIFICATE: Final = ("checkpoint", "base_digest", "layout", "parameters", "loaded", "unread", "checked")
MAX_PROMPTS: Final = 16
MAX_TEXTS: Final = 6  # of a prompt
MAX_LETTERS: Final = 1200  # of a text
MAX_LISTED: Final = 200  # alarms and targets; the counts say how many there are


def collect_facts(run: RunData) -> Facts:
    """Return one run's entry in report.json."""
    first_meter = run.meters[min(run.meters)] if run.meters else {}
    events = {kind: [e for e in run.events if e.get("kind") == kind] for kind in ("start", "eval", "served", "save")}
    times = run.first["time"]
    began = next(iter(finite_numbers(event.get("time") for event in events["start"])), times[0] if len(times) else NAN)
    in_range = 0 <= began < 1e11  # false for NaN
    good = [event for event in events["save"] if event.get("ok") is not False]
    failed = [event for event in events["save"] if event.get("ok") is False]
    save_seconds = finite_numbers(event.get("seconds") for event in good)
    facts: Facts = {
        "name": run.name,
        "folder": str(run.folder),
        "state": read_state(run),
        "model": _last_part(run.get(MANIFEST, "run", "model", "model_name_or_path") or run.get(PLAN, "checkpoint")),
        "data_set": _last_part(
            run.get(DATA, "source", "name") or run.get(MANIFEST, "run", "data", "dataset_name_or_path")
        ),
        "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(began)) if in_range else None,
        "headline": {
            **summarize_run(run, began, finite_numbers(event.get("eval_loss") for event in events["eval"])),
            **summarize_gains(events["eval"]),
            "served": find_served_share(events["served"]),
            **summarize_pairs(run, events["eval"]),
        },
        "step_time": average_phases(run),
        "tokens": count_tokens(run) if run.first.unit == steps.TOKENS else None,
        "memory": compare_memory(run),
        "gpu": {
            "utilization": run.stats("gpu_utilization").mean,
            "power_watts": run.stats("gpu_power_watts").mean,
            "hottest_celsius": run.stats("gpu_temperature_celsius").most,
            "throttled_samples": Counter(str(reason) for rank in run.ranks.values() for reason in rank.throttled),
        },
        "experts": read_expert_balance(run),
        "evaluations": events["eval"],
        "samples": read_samples(run),
        "answers": count_answers(run),
        "alarms": run.alarms[:MAX_LISTED],
        "alarm_count": len(run.alarms),
        "watched": run.watched,
        "saves": {  # each is logged at its end
            "count": len(events["save"]),
            "failed": len(failed),
            "error": str(failed[-1].get("error", "")) if failed else "",
            "seconds": median(save_seconds),
            "most_seconds": max(save_seconds, default=NAN),
            "bytes": _whole(good[-1].get("bytes")) if good else None,
        },
        "ranks": describe_ranks(run),
        "hardware": [{**as_dict(meter.get("hardware")), "rank": rank} for rank, meter in run.meters.items()],
        "unmeasured": first_meter.get("unmeasured") or {},
        "script_name": first_meter.get("script_name") or "",
        "report_meta": first_meter.get("report_meta") or {},
        "arithmetic": first_meter.get("arithmetic") or {},
        "data": run.files.get(DATA),
        "data_page": DATA_PAGE if (run.folder / DATA_PAGE).is_file() else None,
        "adapter": describe_adapter(run),
        "certificate": describe_certificate(run),
        "run": run.get(MANIFEST, "run"),
        "versions": run.get(MANIFEST, "versions") or get_path(first_meter, "hardware", "versions") or {},
        "git": run.get(MANIFEST, "git"),
        "layout": run.get(PLAN, "layout"),
        "absent": run.absent,
    }
    facts["planned"] = compare_with_plan(run, facts)
    facts["verdict"] = judge_run(run, facts)
    return facts


def describe_adapter(run: RunData) -> Facts | None:
    """Return the plan's adapter without the names of thousands of modules."""
    adapter = run.get(PLAN, "adapter")
    if not isinstance(adapter, dict):
        return None
    targets = [target for target in as_list(adapter.get("targets"))[:MAX_LISTED] if isinstance(target, dict)]
    without_names = [{key: value for key, value in target.items() if key != "matched"} for target in targets]
    return {**adapter, "targets": without_names}


def describe_certificate(run: RunData) -> Facts | None:
    """Return the loading certificate with the number of tensors instead of their names."""
    certificate = run.files.get(LOAD)
    if not certificate:
        return None
    values = {key: certificate.get(key) for key in CERTIFICATE}
    return {key: len(value) if isinstance(value, list) else value for key, value in values.items()}


def read_samples(run: RunData) -> list[Facts]:
    """Return the model's output for each prompt, at a few steps from the first to the last."""
    by_prompt: dict[str, list[Facts]] = {}
    for line in run.samples:
        by_prompt.setdefault(str(line.get("prompt", "")), []).append(line)
    shown = []
    for prompt, lines in list(by_prompt.items())[:MAX_PROMPTS]:
        chosen = [lines[round(i * (len(lines) - 1) / (MAX_TEXTS - 1))] for i in range(MAX_TEXTS)]
        chosen = list({id(line): line for line in chosen}.values())
        texts = [{"step": line.get("step"), "text": str(line.get("text", ""))[:MAX_LETTERS]} for line in chosen]
        reference = str(lines[-1].get("reference") or "")[:MAX_LETTERS]
        shown.append({"prompt": prompt[:MAX_LETTERS], "reference": reference, "texts": texts})
    return shown


def count_answers(run: RunData) -> list[Facts]:
    """Count, at each step, the continued prompts whose text is the one in the data. Empty if none ever is: long answers
    are right in other words too."""
    by_step: dict[int, dict[tuple[str, str], bool]] = {}  # an interrupted run may have continued a prompt twice
    for line in run.samples:
        step = _whole(line.get("step"))
        if step is not None and line.get("reference"):
            key = str(line.get("prompt")), str(line["reference"])
            by_step.setdefault(step, {})[key] = is_as_in_the_data(line)
    counts = [{"step": step, "right": sum(found.values()), "of": len(found)} for step, found in by_step.items()]
    return counts if any(count["right"] for count in counts) else []


def read_state(run: RunData) -> str:
    """Return the manifest's state; while that is `running`, the last event may be newer: the run writes the report."""
    recorded = run.get(MANIFEST, "state")
    if isinstance(recorded, str) and recorded not in ("", RUNNING):
        return recorded
    if recorded and run.starting:
        return RUNNING
    last: dict[str, Any] = next((e for e in reversed(run.events) if e.get("kind") in ("start", "end")), {})
    if last.get("kind") == "end":
        is_early = as_number(last.get("step")) < find_total_steps(run.events, run.get(PLAN))
        return "ended early" if is_early else "finished"
    began = as_number(last.get("time"))
    if any(alarm.get("level") == "stop" and as_number(alarm.get("time")) >= began for alarm in run.alarms):
        return STOPPED_BY_ALARM
    if run.silent_seconds > SILENT_SECONDS:
        return KILLED
    return RUNNING if recorded else "running, or ended without saying so"


def summarize_run(run: RunData, began: float, evaluations: list[float]) -> Facts:
    first = run.first
    of_tokens = first.unit == steps.TOKENS
    few = max(1, first.length // 20)  # a twentieth of the run: a single step's loss is mostly noise
    seconds = first["time"][-1] - began - count_waits(run.events, first["time"]) if len(first["time"]) else NAN
    ranks = int(run.rank_count)  # some may have left no file
    rate = median(run.job_rate)
    norms = drop_nan(first["grad_norm"])
    limit = as_number(run.get(MANIFEST, "run", "train", "max_grad_norm"))
    return {
        "steps": int(first["step"][-1]) if first.length else 0,
        "steps_planned": _whole(find_total_steps(run.events, run.get(PLAN))),
        "ranks": ranks,
        "averaged_steps": few,
        "first_loss": mean(first["loss"][:few]),
        "final_loss": mean(first["loss"][-few:]),
        "least_eval_loss": min(evaluations, default=NAN),
        "final_eval_loss": evaluations[-1] if evaluations else NAN,
        "step_seconds": median(first["step_seconds"]),
        "unit": first.unit,
        "per_second": rate,
        "tokens_per_second": rate if of_tokens else NAN,
        "tokens_per_second_per_gpu": rate / ranks if of_tokens else NAN,
        "mfu": run.stats("mfu").mean,
        "seconds": seconds,
        "gpu_hours": seconds * ranks / 3600,
        "skipped_steps": sum(value is True for value in first.objects["skipped"].values()),
        "clipped_share": sum(norm > limit for norm in norms) / len(norms) if norms and limit > 0 else NAN,
    }


def summarize_gains(evaluations: list[dict[str, Any]]) -> Facts:
    """Return the largest gain over the base without its adapter, the base's evaluation loss, and of the last evaluation
    the kept set that got worse most."""
    gains = finite_numbers(event.get("eval_gain") for event in evaluations)
    bases = finite_numbers(event.get("eval_base") for event in evaluations)
    last: Facts = next((event for event in reversed(evaluations) if read_kept(event, "worse")), {})
    worse = read_kept(last, "worse")
    worst = max(worse, key=lambda name: worse[name], default=None)
    return {
        "gain": max(gains, default=NAN),
        "base_eval_loss": bases[-1] if bases else NAN,
        "kept_worst": worst,
        "kept_worse": worse.get(worst or "", NAN),
        "kept_kl": read_kept(last, "kl").get(worst or "", NAN),
    }


def find_served_share(measured: Sequence[Facts]) -> float:
    """Return the share of the adapter that a server in bfloat16 computes, if the user is to be warned."""
    last = measured[-1] if measured else {}
    share, error = as_number(last.get("share")), as_number(last.get("error"))
    return share if describe_served(share, error) else NAN


def count_waits(events: Sequence[Facts], step_times: Sequence[float]) -> float:
    """Return the seconds between an end, or the last step that a killed run has left, and the next start."""
    marks = [(event["kind"], as_number(event.get("time"))) for event in events if event.get("kind") in ("start", "end")]
    waits = []
    for (_, before), (kind, began) in pairwise(marks):
        if kind == "start":
            ends = drop_nan([before, *(at for at in step_times if at < began)])
            waits.append(began - max(ends, default=NAN))
    return math.fsum(wait for wait in waits if 0 < wait < math.inf)


def summarize_pairs(run: RunData, evaluations: list[dict[str, Any]]) -> Facts:
    """Return in how many pairs the chosen answer is preferred, and the reward margin: of the last evaluation, or of the
    last twentieth of the steps. NaN without pairs."""
    rows = [as_dict(figures) for figures in run.first.objects["preference"].values()]
    names = {"preferred": "rewards/accuracies", "margin": "rewards/margins"}
    evaluated = [event for event in evaluations if "eval_rewards/accuracies" in event]
    few = rows[-max(1, len(rows) // 20) :]
    figures = {name: mean(as_number(row.get(field)) for row in few) for name, field in names.items()}
    first = NAN
    if evaluated:
        figures = {name: as_number(evaluated[-1].get(f"eval_{field}")) for name, field in names.items()}
        first = as_number(evaluated[0]["eval_rewards/accuracies"]) if len(evaluated) > 1 else NAN
    return {
        **figures,
        "first_preferred": first,
        "first_evaluation": _whole(evaluated[0].get("step")) if evaluated else None,
        "preferred_of": "evaluation" if evaluated else "training",
        "evaluated_pairs": _whole(run.get(DATA, "sequences", "validation")) if evaluated else None,
    }


def average_phases(run: RunData) -> Facts:
    """Return the mean seconds per phase over all ranks and steps."""
    stats = {phase: run.stats(f"{phase}_seconds") for phase in steps.PHASES}
    seconds = {phase: phase_stats.mean for phase, phase_stats in stats.items() if phase_stats.count}
    total = math.fsum(seconds.values())
    spent = math.fsum(drop_nan(run.first["step_seconds"]))
    cost = drop_nan(run.first["meter_seconds"])
    medians = {number: rank.step_seconds for number, rank in run.ranks.items() if number < run.rank_count}
    return {
        "seconds": seconds,
        "shares": {phase: value / total for phase, value in seconds.items()} if total else {},
        "median": medians[min(medians)],
        "slowest_rank": max(medians, key=lambda rank: (medians[rank] if medians[rank] > 0 else 0.0, rank)),
        "pause_seconds": math.fsum(drop_nan(run.first["pause_seconds"])),
        "meter_share": math.fsum(cost) / spent if spent and cost else NAN,
    }


def count_tokens(run: RunData) -> Facts:
    """Return sums over the ranks whose files are here."""
    useful, padded, supervised = (run.stats(name).total for name in ("tokens", "padded_tokens", "supervised_tokens"))
    return {
        "useful": int(useful),
        "padded": int(padded) if run.stats("padded_tokens").count else None,
        "supervised": int(supervised),
        "masked": max(int(useful - supervised), 0),
        "useful_share": useful / (useful + padded) if useful + padded else NAN,
        "supervised_share": min(supervised / useful, 1.0) if useful else NAN,
    }


def compare_memory(run: RunData) -> Facts:
    on_gpu = run.stats("gpu_peak_gib").count > 0
    planned = as_number(run.get(PLAN, "memory", "gpu_gib"))
    if not on_gpu:  # a rank's device is the host: use its share of the plan's host memory
        host = as_number(run.get(PLAN, "memory", "host_gib"))
        planned = host / (as_number(run.get(PLAN, "layout", "gpus_per_node")) or NAN)
    field = "gpu_peak_gib" if on_gpu else "rss_gib"
    return {
        "place": "gpu" if on_gpu else "host",
        "per_rank": [{"rank": number, "peak_gib": rank.stats[field].most} for number, rank in run.ranks.items()],
        "planned_gib": NAN if has_shared_steps(run.files.get(PLAN)) else planned,
        "capacity_gib": as_number(run.get(PLAN, "memory", "gpu_memory_gib")) if on_gpu else NAN,
    }


def read_expert_balance(run: RunData) -> Facts | None:
    """Return the last expert balance."""
    balances = {row: balance for row, balance in run.first.objects["experts"].items() if isinstance(balance, dict)}
    last = max(balances, default=-1)
    lists = {name: as_list(get_path(balances.get(last), name)) for name in ("busiest", "idlest", "unused")}
    layers = min(map(len, lists.values()))
    if not layers:
        return None
    return {
        "step": int(run.first["step"][last]),
        "experts": _whole(balances[last].get("experts")),
        **{name: list(map(as_number, values[:layers])) for name, values in lists.items()},
    }


def describe_ranks(run: RunData) -> list[Facts]:
    rows = []
    for number, rank in run.ranks.items():
        waiting = rank.stats["communication_seconds"]
        seconds = rank.stats["step_seconds"].total
        rows.append(
            {
                "rank": number,
                "host": get_path(run.meters.get(number), "hardware", "host"),
                "steps": rank.length,
                "step_seconds": rank.step_seconds,
                "communication_share": waiting.total / seconds if seconds and waiting.count else NAN,
                "per_second": rank.per_second,
                "tokens_per_second": rank.per_second if run.first.unit == steps.TOKENS else NAN,
                "gpu_utilization": rank.stats["gpu_utilization"].mean,
                "power_watts": rank.stats["gpu_power_watts"].mean,
                "rss_gib": rank.stats["rss_gib"].most,
            }
        )
    return rows


def compare_with_plan(run: RunData, facts: Facts) -> list[Facts]:
    """Return each figure of the plan that was also measured; none of a trial whose steps are also others'."""
    if has_shared_steps(run.files.get(PLAN)):
        return []
    head = facts["headline"]
    estimate = as_dict(run.get(PLAN, "estimate"))
    rows = (
        ("seconds per step", estimate.get("step_seconds"), head["step_seconds"], "step_seconds"),
        ("tokens per second", estimate.get("tokens_per_second"), head["tokens_per_second"], "tokens_per_second"),
        ("MFU", estimate.get("mfu"), head["mfu"], "mfu"),
        ("peak memory, GiB", facts["memory"]["planned_gib"], highest_peak_gib(facts), ""),
        ("steps", run.get(PLAN, "batch", "steps"), float(head["steps"]), ""),
        ("hours", estimate.get("hours"), head["seconds"] / 3600, "hours"),
    )
    table = []
    for name, planned, measured, field in rows:
        expected = as_number(planned)
        if drop_nan([expected, measured]):
            ends = [as_number(estimate.get(f"{field}_{end}")) for end in ("low", "high")]
            row = {"what": name, "planned": expected, "measured": measured, "ratio": measured / (expected or NAN)}
            table.append({**row, "range": ends if drop_nan(ends) else None})
    return table if finite_numbers(row["planned"] for row in table) else []


def highest_peak_gib(facts: Facts) -> float:
    """Return the peak of the rank with the highest one."""
    return max(finite_numbers(row["peak_gib"] for row in facts["memory"]["per_rank"]), default=NAN)


def judge_run(run: RunData, facts: Facts) -> Facts:
    """Return good, warn or bad, a sentence, and the symptoms about the run."""
    head = facts["headline"]
    saves = facts["saves"]
    throttled = facts["gpu"]["throttled_samples"]
    least = head["least_eval_loss"]
    final = head["final_eval_loss"]
    waiting = facts["step_time"]["shares"].get("data", 0.0)
    lost = head["ranks"] - sum(rank < head["ranks"] for rank in run.ranks)
    non_finite = [int(run.first["step"][row]) for row in run.first.objects["non_finite"]]
    reasons: list[str] = [run.starting] if run.starting and facts["state"] == RUNNING else []
    # Comparisons with an unknown number (NaN) are false.
    if facts["state"] == KILLED:
        silence = f"no sign of life from any rank for {format_duration(run.silent_seconds)}"
        reasons.append(f"{silence}, and no end recorded")
    if non_finite:
        reasons.append(f"loss or gradient is not a finite number at step {non_finite[0]}")
    if head["skipped_steps"]:
        were = "was" if head["skipped_steps"] == 1 else "were"
        skipped = format_plural(head["skipped_steps"], "step")
        reasons.append(f"{skipped} {were} skipped: the gradients were not finite")
    if head["final_loss"] > head["first_loss"] * 1.02 and head["steps"] >= 20:
        reasons.append("the loss is higher at the end than at the start")
    if final > least + 0.05 * abs(least):
        reasons.append(f"the evaluation loss has risen from {least:.3f} to {final:.3f}: overfitting")
    other_base = run.get(MANIFEST, "other_base")
    if other_base:
        reasons.append(f"trained on another base model than before: {other_base}")
    if run.alarms:
        kinds = list(dict.fromkeys(str(alarm.get("kind", "?")) for alarm in run.alarms))[:6]
        reasons.append(f"{format_plural(len(run.alarms), 'alarm')}: {', '.join(kinds)}")
    if saves["failed"]:
        reasons.append(f"{saves['failed']} of {saves['count']} saves failed: {saves['error']}")
    if waiting > DATA_SHARE:
        reasons.append(f"{waiting:.0%} of the step time is waiting for data: loading is the bottleneck")
    if throttled:
        reasons.append(f"GPU clocks were lowered: {', '.join(throttled)}")
    if lost > 0:
        reasons.append(f"{lost} of {head['ranks']} ranks left no step file")
    balances = [balance for balance in run.first.objects["experts"].values() if isinstance(balance, dict)]
    reasons += find_symptoms(
        head["steps"],
        head["clipped_share"],
        as_number(run.get(MANIFEST, "run", "train", "max_grad_norm")),
        [list(map(as_number, as_list(get_path(balance, "busiest")))) for balance in balances],
        plan=run.get(PLAN),
        step_seconds=head["step_seconds"],
        gpu_peak_gib=highest_peak_gib(facts) if facts["memory"]["place"] == "gpu" else NAN,
    )
    is_stopped = any(alarm.get("level") in ("stop", "error", "bad") for alarm in run.alarms)
    level = "warn" if reasons else "good"
    if non_finite or is_stopped or facts["state"] in BAD_STATES:
        level = "bad"
    return {"level": level, "text": _sentence(facts), "against": reasons}


def _sentence(facts: Facts) -> str:
    head = facts["headline"]
    if not head["steps"]:
        return "No step has been made yet."
    planned = f" of {head['steps_planned']:,} steps" if head["steps_planned"] else ""
    text = f"{facts['state'][:1].upper()}{facts['state'][1:]} after "
    text += f"{head['steps']:,}{planned}" if planned else format_plural(head["steps"], "step")
    if drop_nan([head["first_loss"] + head["final_loss"]]):
        text += f"; loss from {head['first_loss']:.3f} to {head['final_loss']:.3f}"
        text += f" (means of {head['averaged_steps']} steps)" if head["averaged_steps"] > 1 else ""
    if drop_nan([head["preferred"]]):
        pairs = f"{head['evaluated_pairs']:,}" if head["evaluated_pairs"] else "the"
        text += f"; the chosen answer is preferred in {head['preferred']:.0%} of {pairs} {head['preferred_of']} pairs"
        if drop_nan([head["first_preferred"]]):
            text += f", {head['first_preferred']:.0%} at step {head['first_evaluation']}"
    counts = facts["answers"]
    if counts:
        shown = [counts[0], counts[-1]] if len(counts) > 1 else counts
        listed = ", ".join(f"{count['right']} of {count['of']} at step {count['step']}" for count in shown)
        text += f"; answers as in the data: {listed}"
    return text + "."


def _whole(value: Any) -> int | None:
    return int(as_number(value)) if drop_nan([as_number(value)]) else None


def _last_part(value: Any) -> str | None:
    """Return the last part of the path of a model or data set: /data/models/Mistral-7B -> Mistral-7B."""
    return Path(value).name or value if isinstance(value, str) and value else None
