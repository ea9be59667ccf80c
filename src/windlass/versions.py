"""The versions of libraries that windlass runs with. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, NamedTuple

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


class Since(NamedTuple):
    """What first has something that layouts need. Older ones are refused by name."""

    library: str
    version: str
    instead: str  # what a run can do without it


SINCE: Final[dict[str, Since]] = {
    "expert parallelism": Since("transformers", "5.23", "set layout.name: full-shard"),
    "hybrid sharding": Since("transformers", "5.23", "set layout.name: full-shard"),
    # Until torch >=2.13 is required: 2.12 briefly gives every sharded parameter a gradient, which bytes can't have.
    "sharding of a quantized base": Since("torch", "2.13", "set layout.name: resident, or layout.base_dtype: bf16"),
}


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
    """Parse a version for comparison: prereleases and local builds count as their release; None if that can't be."""
    try:
        from packaging.version import InvalidVersion, Version  # comes with transformers, which may not be here
    except ImportError:
        return None
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


def is_newer(name: str, version: str) -> bool:
    """Return whether a library is newer than its range."""
    end = TESTED[name][0].partition("<")[2]
    return parse_release(version) is not None and not is_older(version, end)


def find_newer(have: Mapping[str, str]) -> Iterator[str]:
    """Yield a note on each library that is newer than its range: it may work."""
    for name, (supported, _) in TESTED.items():
        if name in have and is_newer(name, have[name]):
            remedy = f"`windlass check --self-test` tries it, pip install '{name}{supported}' replaces it"
            yield f"{name} {have[name]} is newer than tested, {supported}: {remedy}"


def find_lacking(needs: Iterable[str], have: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what these versions lack of a layout's needs, as a problem and its hint; None if nothing is known to be.

    `needs`: keys of SINCE.
    """
    for what in needs:
        library, since, instead = SINCE[what]
        if library in have and is_older(have[library], since):
            return f"{library} {have[library]} has no {what}", f"pip install '{library}>={since}', or {instead}"
    return None
