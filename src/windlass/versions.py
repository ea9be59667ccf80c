"""The versions of libraries that windlass runs with. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from windlass.errors import UserError, missing_extra_error

if TYPE_CHECKING:
    from packaging.version import Version

# Each library's supported range, which is pyproject's (a test compares them), and the version that the tests ran with.
TESTED: Final[dict[str, tuple[str, str]]] = {
    "torch": (">=2.11,<2.16", "2.13.0"),
    "transformers": (">=5.17,<5.25", "5.23.0"),
    "peft": (">=0.20,<0.22", "0.21.2"),
    "accelerate": (">=1.15,<2", "1.15.0"),
    "datasets": (">=4.7,<6", "5.2.0"),
    "safetensors": (">=0.8,<1", "0.8.0"),
}
# The transformers that first has it. Older ones are refused by name.
SINCE: Final[dict[str, str]] = {"expert parallelism": "5.23", "hybrid sharding": "5.23"}


def require_libraries(libraries: Sequence[str], command: str) -> None:
    """Look for libraries, and for versions that are too old, without importing them."""
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise missing_extra_error(", ".join(missing), command)
    for name, found in _list_versions(libraries):
        supported, _ = TESTED[name]
        if is_too_old(name, found):
            hint = f"pip install '{name}{supported}'"
            raise UserError(
                f"{name} {found} is too old: it has to be {supported}", f"windlass {command}", hint, "too-old"
            )


def _list_versions(libraries: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in TESTED.keys() & {*libraries}:
        try:
            yield name, version(name)
        except PackageNotFoundError:  # importable from a folder, without its metadata
            continue


def parse_release(version: str) -> Version | None:
    """Parse a version for comparison: prereleases and local builds count as their release; None if invalid."""
    from packaging.version import InvalidVersion, Version  # installed with torch; a login node may lack both

    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return None


def is_older(version: str, than: str) -> bool:
    mine = parse_release(version)
    other = parse_release(than)
    return mine is not None and other is not None and mine < other


def is_too_old(name: str, version: str) -> bool:
    """Return whether a library is older than the lower end of its range."""
    lowest = TESTED[name][0].partition(",")[0].removeprefix(">=")
    return is_older(version, lowest)


def find_lacking(transformers: str, *, splits_experts: bool, is_hybrid: bool) -> tuple[str, str] | None:
    """Return what a layout needs and this version of transformers lacks, as a problem and its hint; None if nothing."""
    needed = ["expert parallelism"] * splits_experts + ["hybrid sharding"] * is_hybrid
    for what in needed:
        if is_older(transformers, SINCE[what]):
            hint = f"pip install 'transformers>={SINCE[what]}', or set layout.name: full-shard"
            return f"transformers {transformers} has no {what}", hint
    return None
