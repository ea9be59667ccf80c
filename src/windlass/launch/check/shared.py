"""Whether all nodes see one volume and the same files."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import __version__
from windlass.data import sources
from windlass.errors import UserError
from windlass.launch.check.folders import standing
from windlass.launch.check.meeting import Meeting
from windlass.launch.check.result import Result, failed, passed, unseen, warned
from windlass.plan.script import ScriptPlan
from windlass.runfile import Loaded, LoadedScript

if TYPE_CHECKING:
    from windlass.plan.script import AnyPlan

END_BYTES = 64 << 10  # of each file, so much from its beginning and its end: it is compared, not proven
SEEN_SECONDS = 10.0  # NFS clients may show a folder as it was for some seconds


def facts(
    loaded: Loaded | LoadedScript, plan: AnyPlan | None, have: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, Any]:
    """What must be the same on every node, as texts to compare."""
    return {
        "run file": digest([loaded.run.model_dump_json().encode()]),
        "windlass": __version__,
        "image": dict(have),
        "system": system(),
        "data": data(loaded),
        "model": model(plan),
        "variables": {k: v for k, v in environ.items() if k.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))},
    }


def digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def system() -> str:
    """The image's own word for itself."""
    try:
        lines = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    except OSError:
        return ""
    return lines.get("PRETTY_NAME", "").strip('"')


def data(loaded: Loaded | LoadedScript) -> str | None:
    """The files of the data; of a script its own."""
    try:
        if isinstance(loaded, LoadedScript):
            return files([Path(loaded.run.script.path)]) if loaded.run.script.path else None
        found = sources.resolve(loaded.run.data, loaded.where)
    except UserError:
        return None
    if found.format == "hub":
        return None
    return files(path for paths in found.splits.values() for path in paths)


def model(plan: AnyPlan | None) -> str | None:
    if plan is None or isinstance(plan, ScriptPlan) or plan.base.path is None:
        return None
    return files([*sorted(plan.base.path.glob("*.safetensors")), plan.base.path / "config.json"])


def files(paths: Iterable[Path]) -> str | None:
    """Names, sizes and ends of files; a folder stands for the files in it. None where one cannot be read."""
    parts: list[bytes] = []
    try:
        for path in dict.fromkeys(paths):
            for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
                size = file.stat().st_size
                with file.open("rb") as opened:
                    head = opened.read(END_BYTES)
                    opened.seek(max(0, size - END_BYTES))
                    parts += [file.name.encode(), str(size).encode(), head, opened.read(END_BYTES)]
    except OSError:
        return None
    return digest(parts)


def compare(all_facts: Sequence[Mapping[str, Any] | None], names: Sequence[str]) -> list[Result]:
    """One result for each fact. The nodes in the minority are named."""
    present = {name: fact for name, fact in zip(names, all_facts, strict=True) if fact is not None}
    hints = {
        "run file": "mount one run file for all, with the same overrides",
        "windlass": "use one image for all nodes",
        "system": "use one image for all nodes, by digest",
        "data": "mount the same volume, or copy the data set again",
        "model": "mount the same volume, or copy the checkpoint again",
    }
    found = [same(key, {n: f.get(key) for n, f in present.items()}, hint) for key, hint in hints.items()]
    return [*found, packages(present), variables(present)]


def same(key: str, values: Mapping[str, Any], hint: str) -> Result:
    title = f"same {key}"
    blind = [name for name, value in values.items() if value is None]
    if len(blind) == len(values):
        return unseen(title, "no node could read it")
    if blind:
        return failed(title, f"{', '.join(blind)} cannot read it, the others can", hint)
    odd = minority(values)
    if odd:
        return failed(title, "; ".join(f"{name} has {values[name]}" for name in odd) + ", the others not", hint)
    return passed(title, str(next(iter(values.values()))))


def minority(values: Mapping[str, Any]) -> list[str]:
    """Names whose value is not the most common one; of equally common ones, the first node's counts."""
    said = list(map(str, values.values()))
    usual = max(said, key=lambda text: (said.count(text), -said.index(text)))
    return [name for name, value in values.items() if str(value) != usual]


def packages(present: Mapping[str, Mapping[str, Any]]) -> Result:
    """Every installed distribution: what an image holds, whatever it is called."""
    every = {package for fact in present.values() for package in fact["image"]}
    odd: list[str] = []
    for package in sorted(every):
        versions = {name: fact["image"].get(package, "none") for name, fact in present.items()}
        odd += [f"{name} has {package} {versions[name]}" for name in minority(versions)]
    if odd:
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        return failed("same image", "; ".join(odd[:5]) + more, "use one image for all nodes, by digest")
    return passed("same image", f"{len(every)} packages, the same versions")


def variables(present: Mapping[str, Mapping[str, Any]]) -> Result:
    """Settings of the communication libraries; nodes of two kinds may need two, so this one only warns."""
    every = {key for fact in present.values() for key in fact["variables"]}
    odd: list[str] = []
    for key in sorted(every):
        values = {name: fact["variables"].get(key, "unset") for name, fact in present.items()}
        odd += [f"{name} has {key}={values[name]}" for name in minority(values)]
    if odd:
        return warned("same variables", "; ".join(odd[:5]), "set them for all nodes alike, in cluster.env")
    return passed("same variables", f"{len(every)} of NCCL and gloo")


def volume(meeting: Meeting, folder: Path) -> dict[str, str]:
    """A file that node 0 makes and renames, as every node sees it. Returns what went wrong here, by step."""
    place, wrong = standing(folder), ""
    token = secrets.token_hex(8)
    if meeting.place.rank == 0:
        wrong = attempt(lambda: (place / f".windlass-{token}.part").write_text(token))
    said = meeting.gather({"wrong": wrong, "token": token, "folder": str(place)})[0]
    if said is None or said["wrong"]:
        return {"written": said["wrong"] if said else "node 0 is gone"}
    place, token = Path(said["folder"]), said["token"]
    before, after = place / f".windlass-{token}.part", place / f".windlass-{token}"
    found = {} if until(before.exists) else {"seen": f"what node 0 wrote in {place} does not show here"}
    meeting.gather(None)
    if meeting.place.rank == 0:
        wrong = attempt(lambda: before.rename(after))
    said = meeting.gather(wrong)[0]
    if said:
        found = {"renamed": said}
    elif not found and not until(lambda: after.exists() and not before.exists() and after.read_text() == token):
        found = {"renamed": f"node 0's rename in {place} does not show here"}
    meeting.gather(None)
    if meeting.place.rank == 0:
        attempt(lambda: before.unlink(missing_ok=True))
        attempt(lambda: after.unlink(missing_ok=True))
    return found


def attempt(action: Callable[[], Any]) -> str:
    try:
        action()
    except OSError as error:
        return f"{error.strerror or error}"
    return ""


def until(true: Callable[[], bool], seconds: float = SEEN_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if true():
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def one_volume(reports: Sequence[Mapping[str, str] | None], names: Sequence[str], folder: str, where: str) -> Result:
    wrong = [f"{name}: {'; '.join(row.values())}" for name, row in zip(names, reports, strict=True) if row]
    if wrong:
        hint = "mount the same claim (ReadWriteMany) on every node, without long attribute caching (NFS: actimeo)"
        return failed("shared volume", "; ".join(wrong), hint, where)
    return passed("shared volume", f"written and renamed in {folder} by {names[0]}, seen by all")
