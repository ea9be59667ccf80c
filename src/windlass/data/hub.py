"""Fetch published sets and models by their names: once, into the shared cache, by one process, resumable."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from windlass.data.cache import Say, hold_lock
from windlass.data.reading import SUFFIXES, Source
from windlass.data.sources import get_config_name, list_card_files, read_card, resolve_source
from windlass.errors import UserError, Where
from windlass.files import read_json, sample_file, write_json
from windlass.model.files import HEADERS, PUBLISHED
from windlass.observe.format import format_plural
from windlass.runfile import Data

# One request shows whether the hub can be reached: without a network it fails at once or hangs.
REACH_SECONDS = 10


def fetch_source(data: Data, where: Where, say: Say) -> Source:
    """Return a set's files in the hub cache as a local source."""
    local = {"dataset_name_or_path": str(fetch_set(data, where, say)), "dataset_config_name": get_config_name(data)}
    return resolve_source(data.model_copy(update=local), where)


def fetch_set(data: Data, where: Where, say: Say) -> Path:
    """Fetch the card first: it says which files belong to the config."""
    name = data.dataset_name_or_path
    place = where("data.dataset_name_or_path")
    config = get_config_name(data)
    card = read_card(fetch(name, "dataset", ["README.md"], place, say))
    patterns = [pattern for _, pattern in list_card_files(card, config)]
    if not patterns:
        patterns = [f"{config}/*"] if config else [f"*{end}{packed}" for end in SUFFIXES for packed in ("", ".gz")]
    return fetch(name, "dataset", ["README.md", *patterns], place, say)


def fetch(
    name: str,
    kind: str,
    patterns: Sequence[str],
    place: str,
    say: Say,
    ignored: Sequence[str] = (),
    *,
    headers: bool = False,
) -> Path:
    """Fetch files of a repository and return their folder. `kind` is dataset or model; `headers`: only those of its
    weights.

    A mark next to the cache is written when everything is there: without a network, the library itself takes a partly
    fetched folder for complete. What was fetched before an interruption is kept.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    key = hashlib.blake2b(json.dumps([name, kind, *patterns, *ignored]).encode(), digest_size=8).hexdigest()
    mark = cache / f".windlass-{kind}-{name.replace('/', '--')}-{key}.json"
    folder = read_json(mark).get("folder")
    if folder and Path(folder).is_dir():
        return Path(folder)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with hold_lock(mark.with_suffix(".lock"), say, f"waiting for another process that is fetching {name}"):
            folder = read_json(mark).get("folder")
            if not folder or not Path(folder).is_dir():
                say(f"fetching {name} into {cache}")
                folder = download(name, kind, patterns, ignored, place, cache, say)
                if headers:
                    fetch_headers(name, Path(folder), ignored, place, say)
                write_json(mark, {"folder": folder})
    except OSError as error:
        problem = f"{name} can't be stored in {cache}: {error}"
        raise UserError(problem, place, "make room there, or set HF_HOME", "unwritable") from None
    return Path(folder)


def download(
    name: str, kind: str, patterns: Sequence[str], ignored: Sequence[str], place: str, cache: Path, say: Say
) -> str:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    wanted: dict[str, Any] = {"allow_patterns": list(patterns)}
    with explain_hub_errors(name, kind, place):
        info: Any = HfApi().repo_info(name, repo_type=kind, files_metadata=True, timeout=REACH_SECONDS)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        wanted["ignore_patterns"] = choose_ignored([*sizes], ignored) or None
        snapshot = cache / f"{kind}s--{name.replace('/', '--')}" / "snapshots" / info.sha
        absent = [file for file in sizes if not (snapshot / file).exists()]
        require_room(sum(sizes[file] for file in filter_repo_objects(absent, **wanted)), cache, name, place)
        folder = Path(snapshot_download(name, repo_type=kind, revision=info.sha, **wanted))
    published = {file.rfilename: file.lfs.sha256 for file in info.siblings or [] if file.lfs}
    require_published(folder, {file: published[file] for file in published if (folder / file).exists()}, say)
    return str(folder)


def choose_ignored(files: Sequence[str], ignored: Sequence[str]) -> list[str]:
    """Return the patterns of files that aren't fetched: none that would leave a repository without its weights."""
    weights = [file for file in files if file.endswith(".safetensors")]
    if any(not any(fnmatch(file, pattern) for pattern in ignored) for file in weights):
        return [*ignored]
    return [pattern for pattern in ignored if not any(fnmatch(file, pattern) for file in weights)]


def require_published(folder: Path, published: Mapping[str, str], say: Say) -> None:
    """Compare the fetched files with the hub's checksums, and record next to them how training recognizes them."""
    if not published:
        return
    say(f"comparing {format_plural(len(published), 'file')} with the published SHA-256")

    def sha256(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        found = dict(zip(published, pool.map(sha256, published), strict=True))
    for name in (name for name in published if found[name] != published[name]):
        (folder / name).resolve().unlink()  # otherwise it would count as fetched
        problem = f"has SHA-256 {found[name]}, the hub publishes {published[name]}: it was removed"
        raise UserError(problem, str(folder / name), "run it again to fetch it again", "checksum-differs")
    samples = {name: hashlib.blake2b(sample_file(folder / name)).hexdigest() for name in published}
    write_json(folder / PUBLISHED, samples)


def fetch_headers(name: str, folder: Path, ignored: Sequence[str], place: str, say: Say) -> None:
    """Fetch, besides a model's config, the headers of its weight files: some kilobytes each."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    with explain_hub_errors(name, "model", place):
        api = HfApi()
        info: Any = api.repo_info(name, revision=folder.name, files_metadata=True, timeout=REACH_SECONDS)
        sizes = {file.rfilename: file.size for file in info.siblings or []}
        ignored = choose_ignored([*sizes], ignored)
        files = list(filter_repo_objects([*sizes], allow_patterns="*.safetensors", ignore_patterns=[*ignored]))
        say(f"reading the headers of {format_plural(len(files), 'file')}")
        headers: dict[str, Any] = {}
        for file in files:
            tensors = api.parse_safetensors_file_metadata(name, file, revision=folder.name).tensors
            headers[file] = {"size": sizes[file], "header": {key: asdict(each) for key, each in tensors.items()}}
    write_json(folder / HEADERS, headers)


@contextmanager
def explain_hub_errors(name: str, kind: str, place: str) -> Iterator[None]:
    """Turn errors of the hub's client into errors with a next step."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
        return
    except errors.GatedRepoError:
        code = "no-access"
        problem = f"{name} is gated and this account has no access"
        hint = "ask for it on its page, then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        code = "no-such-repository"
        problem = f"the hub has no {kind} {name!r}"
        hint = "check the name; a private one needs HF_TOKEN"
    except errors.SafetensorsParsingError as error:
        code = "not-safetensors"
        problem = f"a weight file of {name} has no readable header: {error}"
        hint = "fetch without --headers-only"
    except (errors.HfHubHTTPError, httpx2.ReadError, httpx2.RemoteProtocolError, httpx2.ReadTimeout) as error:
        code = "transfer-interrupted"
        problem = f"the transfer of {name} was interrupted: {error}"
        hint = "run it again: what was fetched is kept"
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, httpx2.TransportError) as error:
        code = "hub-unreachable"
        first = str(error).splitlines()[0]
        problem = f"{name} is not on this machine and the hub can't be reached: {first}"
        hint = "run `windlass fetch RUN` where there is a network and share its cache (HF_HOME), or name a local folder"
    raise UserError(problem, place, hint, code)


def require_room(needed: int, cache: Path, name: str, place: str) -> None:
    """Check free space before the first byte: half of a large model fills a volume for everybody on it."""
    free = shutil.disk_usage(cache).free
    if needed > free:
        problem = f"{name} takes {needed / 2**30:.1f} GiB, {cache} has {free / 2**30:.1f} GiB free"
        hint = "make room, or set HF_HOME to a folder on a larger volume"
        raise UserError(problem, place, hint, "no-room")
