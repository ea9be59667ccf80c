"""Former keys of `cluster` that are now in a platform's section: each is answered with its new place."""

from dataclasses import replace
from shlex import quote
from typing import Any

from windlass.errors import Problem, UserError
from windlass.runfile.machines import PLATFORM_SECTIONS, Cluster
from windlass.runfile.names import INSTEAD
from windlass.runfile.reference import find_section, format_yaml

# Keys with another name on some platform; the others kept theirs.
RENAMED_KEYS = {
    "project": ("runai.project", "slurm.account"),
    "queue": ("kubernetes.queue", "slurm.partition"),
    "priority_class": ("kubernetes.priority_class", "runai.priority_class", "slurm.qos"),
}


def find_new_places(name: str, platform: Any = None) -> list[str]:
    """Return where a former key of `cluster` is now: in the platform's own section, or else wherever it exists."""
    if name in Cluster.model_fields:
        return []
    places = list(RENAMED_KEYS.get(name, ()))
    for section in () if places else sorted(set(PLATFORM_SECTIONS.values())):
        model = find_section(Cluster.model_fields[section].annotation)
        if model and name in model.model_fields:
            places.append(f"{section}.{name}")
    own = PLATFORM_SECTIONS.get(str(platform), "no section")
    return [f"cluster.{place}" for place in places if place.startswith(own)] or [f"cluster.{place}" for place in places]


def take_moved_keys(tree: dict[str, Any], where: dict[str, str]) -> list[Problem]:
    """Remove former keys of `cluster` and return a problem for each; the last one's hint has the section to write."""
    cluster = tree.get("cluster")
    if not isinstance(cluster, dict):
        return []
    platform = cluster.get("platform")
    own = PLATFORM_SECTIONS.get(str(platform), "")
    problems: list[Problem] = []
    sections: dict[str, dict[str, Any]] = {}
    last: dict[str, int] = {}  # section -> index of its last problem
    for name in list(cluster):
        places = find_new_places(name, platform)
        if not places:
            continue
        _, section, key = places[0].split(".")
        value = cluster.pop(name)
        hint = ""
        if section != own and (own, name) in INSTEAD:
            hint = f"on platform {platform}, {INSTEAD[own, name]}"
        else:
            sections.setdefault(section, {})[key] = value
            last[section] = len(problems)
        place = where.get(f"cluster.{name}", f"cluster.{name}")
        problems.append(Problem(f"it is {' or '.join(places)} now", place, hint, "moved-key"))
    for section, index in last.items():
        hint = f"below `cluster:` write  {section}: {format_yaml(sections[section])}"
        problems[index] = replace(problems[index], hint=hint)
    return problems


def refuse_moved_override(tree: dict[str, Any], path: str, value: str, place: str) -> None:
    """Raise if an override sets a former key of `cluster`."""
    header, _, rest = path.partition(".")
    name, dot, inner = rest.partition(".")
    cluster = tree.get("cluster")
    platform = cluster.get("platform") if isinstance(cluster, dict) else None
    places = find_new_places(name, platform) if header == "cluster" else []
    if places:
        hint = f"--override {quote(f'{places[0]}{dot}{inner}={value}')}"
        raise UserError(f"it is {' or '.join(places)} now", place, hint, "moved-key")
