"""Published sets and models by their names: fetched once to the shared cache, by one process, resumable."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data.cache import locked
from windlass.data.source import Source, resolve
from windlass.data.source.files import FORMATS, card_configs, config_of, read_card
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.runfile import Data

Say = Callable[[str], None]
# One request says whether the hub can be reached: a node without a network answers at once or not at all.
REACH_SECONDS = 10
ELSEWHERE = "run `windlass fetch` where there is a network and share its cache (HF_HOME), or name a local folder"


def fetched(data: Data, where: Callable[[str], str], say: Say) -> Source:
    """A set's files in the hub cache, as the local source that they are."""
    folder = fetch_set(data, where, say)
    return resolve(
        data.model_copy(update={"dataset_name_or_path": str(folder), "dataset_config_name": config_of(data)}), where
    )


def fetch_set(data: Data, where: Callable[[str], str], say: Say) -> Path:
    """The card first: it says which files belong to the config."""
    name, place = data.dataset_name_or_path, where("data.dataset_name_or_path")
    card = fetch(name, "dataset", ["README.md"], place, say)
    return fetch(name, "dataset", ["README.md", *patterns_of(card, config_of(data))], place, say)


def patterns_of(card: Path, config: str | None) -> list[str]:
    """Which files of the set to fetch: a config's alone where its files can be told."""
    entries = card_configs(read_card(card))
    if config in entries and entries[config].get("data_files"):
        files: Any = entries[config]["data_files"]
        paths = [entry["path"] if isinstance(entry, dict) else entry for entry in as_list(files)]
        return [pattern for path in paths for pattern in as_list(path)]
    if config is not None:
        return [f"{config}/*"]
    return [f"*{suffix}{packed}" for suffix in FORMATS for packed in ("", ".gz")]


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def fetch(name: str, kind: str, patterns: Sequence[str], place: str, say: Say, ignored: Sequence[str] = ()) -> Path:
    """The folder with these files of a repository, whole. `kind` is dataset or model.

    The mark beside the cache is written when everything is there: the library itself takes a half-fetched folder
    for a whole one once there is no network. What was fetched before an interruption is kept and gone on from.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    key = hashlib.blake2b(json.dumps([name, kind, *patterns, *ignored]).encode(), digest_size=8).hexdigest()
    mark = cache / f".windlass-{kind}-{name.replace('/', '--')}-{key}.json"
    found = marked(mark)
    if found is not None:
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(mark.with_suffix(".lock"), say, f"waiting for another process that fetches {name}"):
            found = marked(mark)
            if found is None:
                say(f"fetching {name} into {cache}")
                found = download(name, kind, patterns, ignored, place, cache)
                part = mark.with_suffix(".part")
                part.write_text(json.dumps({"folder": str(found)}))
                part.replace(mark)
    except OSError as error:
        raise UserError(f"{name} can't be kept in {cache}: {error}", place, "make room there, or set HF_HOME") from None
    return found


def marked(mark: Path) -> Path | None:
    try:
        folder = Path(json.loads(mark.read_text())["folder"])
    except (OSError, ValueError, KeyError):
        return None
    return folder if folder.is_dir() else None


def download(name: str, kind: str, patterns: Sequence[str], ignored: Sequence[str], place: str, cache: Path) -> Path:
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        info = HfApi().repo_info(name, repo_type=kind, files_metadata=True, timeout=REACH_SECONDS)
        sizes = {file.rfilename: file.size or 0 for file in getattr(info, "siblings", None) or []}
        chosen = [file for file in sizes if matches(file, patterns) and not matches(file, ignored)]
        room(sum(sizes[file] for file in chosen), cache, name, place)
        return Path(
            snapshot_download(
                name,
                repo_type=kind,
                revision=info.sha,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored) or None,
            )
        )
    except GatedRepoError:
        raise UserError(
            f"{name} is gated and this account has no access", place, "ask for access on its page, then set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"the hub has no {kind} {name!r}", place, "check the name; a private one needs HF_TOKEN"
        ) from None
    except (httpx2.ReadError, httpx2.RemoteProtocolError, httpx2.ReadTimeout) as error:
        raise UserError(f"the transfer of {name} broke off: {error}", place, "run it again: it resumes there") from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, httpx2.TransportError) as error:
        raise UserError(
            f"{name} is not on this machine and the hub can't be reached: {str(error).splitlines()[0]}",
            place,
            ELSEWHERE,
        ) from None
    except HfHubHTTPError as error:
        raise UserError(f"the hub refuses {name}: {error}", place, "run it again: what was fetched is kept") from None


def matches(file: str, patterns: Sequence[str]) -> bool:
    """As the hub's client matches: a star takes slashes too."""
    return any(fnmatch(file, pattern) for pattern in patterns)


def room(needed: int, cache: Path, name: str, place: str) -> None:
    """Said before the first byte: half of a large model fills a volume for everybody on it."""
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise UserError(
            f"{name} takes {needed / 2**30:.1f} GiB, {cache} has {free / 2**30:.1f} GiB free",
            place,
            "make room, or let HF_HOME be on a larger volume; what is already fetched counts as taken",
        )
