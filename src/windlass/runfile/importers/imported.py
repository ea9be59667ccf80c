"""A run file under construction, and how each key of the other tool is handled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from windlass.errors import Problem
from windlass.runfile.names import IMPORTED, ROLES, TOOLS, group_by_name
from windlass.runfile.reference import format_value

OFF: Final[tuple[Any, ...]] = (None, False, 0, "", [], {}, "none", "no", "false", "null")


@dataclass
class ImportedRun:
    """A run file under construction. `theirs` are the other tool's keys that are not handled yet."""

    tool: str
    file: str
    theirs: dict[str, Any]
    lines: Mapping[str, int]  # of their keys
    settings: dict[str, Any] = field(default_factory=dict)  # windlass's key -> value
    remarks: dict[str, str] = field(default_factory=dict)  # windlass's key -> where it is from
    no_effect: dict[str, str] = field(default_factory=dict)  # their key -> why
    problems: list[Problem] = field(default_factory=list)

    def take(self, key: str, otherwise: Any = None, kind: Any = object) -> Any:
        """Return the tool's value and mark the key as handled; refuse a value of another kind."""
        value = self.theirs.pop(key, otherwise)
        entries = kind is list and isinstance(value, list) and not all(isinstance(entry, dict) for entry in value)
        if value is None or (isinstance(value, kind) and not entries):
            return value
        self.refuse(key, f"is {value!r:.40}, which {TOOLS[self.tool]} does not take", "correct it, then import again")
        return otherwise

    def set(self, key: str, value: Any, remark: str) -> None:
        """Set a key of windlass. `remark` is their key, or says what the value is from."""
        values = IMPORTED[self.tool].get("values", {}).get(key, {})
        value = values.get(str(value).lower() if isinstance(value, bool) else str(value), value)
        if value == "":
            return
        before = self.settings.get(key)
        if before not in (None, value):
            problem = f"makes {key} {format_value(value)}, and {self.remarks[key]} makes it {format_value(before)}"
            self.refuse(remark, problem, "keep one of them, then import again")
        self.settings[key] = value
        self.remarks[key] = remark

    def drop(self, key: str, why: str) -> None:
        """Drop a key of windlass that another one rules out."""
        value = self.settings.pop(key, None)
        remark = self.remarks.pop(key, "")
        if value is not None and remark and "default" not in remark:
            self.no_effect[remark] = why

    def refuse(self, key: str, why: str, hint: str) -> None:
        line = f":{self.lines[key]}" if key in self.lines else ""
        self.problems.append(Problem(why, f"{self.file}{line}: {key}", hint, "refused-key"))

    def judge(self, key: str, value: Any, place: str = "") -> None:
        """Handle a key that is not carried over: it has no effect, with a reason, or it is refused."""
        place = place or key
        same = IMPORTED[self.tool].get("same", {})
        no_effect = self._group("no_effect")
        refused = self._group("refused")
        other_training = self._group("other_training")
        if key in no_effect:
            self.no_effect[place] = no_effect[key]
        elif value in same.get(key, ()):
            self.no_effect[place] = "windlass does just that"
        elif value is None or (value in OFF and key not in same):
            self.no_effect[place] = "it is switched off or empty"
        elif key in other_training:
            self.refuse(place, other_training[key], f"train this with {TOOLS[self.tool]}: here it would be another run")
        elif key in refused:
            self.refuse(place, refused[key], "remove it if you can train without it, then import again")
        else:
            hint = "remove it if it doesn't change what is trained, then import again"
            self.refuse(place, f"windlass knows no such key of {TOOLS[self.tool]}", hint)

    def judge_others(self, place: str, entry: Mapping[str, Any], read: str) -> None:
        """Handle the keys of a data set's entry except those that were read."""
        for key, value in entry.items():
            if key not in read.split():
                self.judge(str(key), value, f"{place}.{key}")

    def _group(self, table: str) -> dict[str, str]:
        """Return their keys in a table of all tools and of this one, with the reason."""
        return group_by_name(IMPORTED["all_tools"].get(table, {})) | group_by_name(IMPORTED[self.tool].get(table, {}))

    def require_roles(self, place: str, roles: Mapping[str, Any]) -> None:
        """Require usual role names: the run file can't set them."""
        for role, names in roles.items():
            known = ROLES.get(str(role), ())
            unusual = [name for name in as_list(names) if str(name) not in known]
            if unusual:
                hint = f"rename it in the rows; windlass reads {', '.join(known or ROLES)}"
                self.refuse(place, f"windlass doesn't read {unusual[0]!r} as {role}", hint)

    def as_dict(self) -> dict[str, Any]:
        problems = [problem.as_dict() for problem in self.problems]
        return {"tool": self.tool, "settings": self.settings, "no_effect": self.no_effect, "problems": problems}


def as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def split_names(value: Any) -> list[str]:
    names = value if isinstance(value, list) else str(value or "").split(",")
    return [str(name).strip() for name in names if str(name).strip()]
