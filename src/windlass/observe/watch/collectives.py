"""Which rank is absent from which collective: flight recorders of all ranks, laid side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# One rank's part: group -> {"last": 17, "name": "gloo:all_reduce", "recent": {"17": "…"}}
Calls = Mapping[str, Mapping[str, Any]]
RECENT = 8  # last calls of a group that are kept


def calls(trace: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """torch's flight recorder (`_dump_fr_trace_json`), by process group: the last calls that this rank made."""
    found: dict[str, dict[str, Any]] = {}
    for entry in trace.get("entries") or ():
        if entry.get("is_p2p"):
            continue
        group = " ".join(map(str, entry.get("process_group") or ["?"]))
        number = int(entry.get("collective_seq_id") or 0)
        about = found.setdefault(group, {"last": 0, "recent": {}})
        about["last"] = max(about["last"], number)
        about["recent"][str(number)] = f"{entry.get('profiling_name', '?')} of {entry.get('input_sizes')}"
        if len(about["recent"]) > RECENT:
            del about["recent"][min(about["recent"], key=int)]
    return found


def absent(by_rank: Mapping[int, Calls]) -> list[str]:
    """For each group, the ranks that lack the call for which others wait. A rank without any word lacks all."""
    said = []
    for group in sorted({group for groups in by_rank.values() for group in groups}):
        members = {rank: groups[group] for rank, groups in by_rank.items() if group in groups}
        newest = max(int(about["last"]) for about in members.values())
        behind = sorted(rank for rank, about in members.items() if int(about["last"]) < newest)
        behind += sorted(rank for rank, groups in by_rank.items() if not groups)
        waiting = sorted(rank for rank, about in members.items() if int(about["last"]) == newest)
        if behind:
            first = min((int(members[rank]["last"]) for rank in behind if rank in members), default=newest - 1) + 1
            call = members[waiting[0]]["recent"].get(str(first), "a collective")
            said.append(f"{named(behind)} absent from {call} (number {first} of group {group}), {named(waiting)} in it")
    return said


def named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
