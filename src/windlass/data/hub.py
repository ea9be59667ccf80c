"""A published set by its name: fetched once, resumable, then read as the local copy that it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.errors import UserError
from windlass.source import Source, resolve
from windlass.source.files import FORMATS, card_configs, read_card

if TYPE_CHECKING:
    from windlass.runfile import Data

Say = Callable[[str], None]
OFFLINE = "offline: copy the set to this machine and give its folder, or run `windlass fetch` where there is a network"


def fetched(data: Data, where: Callable[[str], str], say: Say) -> Source:
    """The set's files in the hub cache, as a local source. huggingface_hub locks: of several processes one fetches."""
    folder = download(data, where, say)
    return resolve(data.model_copy(update={"dataset_name_or_path": str(folder)}), where)


def download(data: Data, where: Callable[[str], str], say: Say) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    name = data.dataset_name_or_path
    place = where("data.dataset_name_or_path")
    try:
        card = Path(snapshot_download(name, repo_type="dataset", allow_patterns=["README.md"]))
        patterns = patterns_of(card, data.dataset_config_name)
        say(f"fetching {name} from the hub")
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=["README.md", *patterns]))
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, ConnectionError) as error:
        raise UserError(
            f"{name} is not on this machine and the hub can't be reached: {error}", place, OFFLINE
        ) from None
    except HfHubHTTPError as error:
        raise UserError(
            f"the hub gives no set {name!r}: {error}", place, "check the name; a private set needs a token"
        ) from None


def patterns_of(card: Path, config: str | None) -> list[str]:
    """Which files of the set to fetch: a config's alone where its files can be told."""
    entries = card_configs(read_card(card))
    if config in entries and entries[config].get("data_files"):
        files: Any = entries[config]["data_files"]
        files = files if isinstance(files, list) else [files]
        paths = [entry["path"] if isinstance(entry, dict) else entry for entry in files]
        return [pattern for path in paths for pattern in (path if isinstance(path, list) else [path])]
    if config is not None:
        return [f"{config}/**"]
    return [f"*{suffix}{packed}" for suffix in FORMATS for packed in ("", ".gz")]
