"""An export brought to a hub repository, by the hub's own client and with the token that it keeps itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from windlass.errors import RunError, UserError
from windlass.export.write import WORK


def push(folder: Path, repository: str, *, private: bool = True, say: Callable[[str], None] = print) -> str:
    """Create the repository where it isn't there yet (private unless asked), upload the folder, return its address."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    where = f"--push {repository}"
    api = HfApi()
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    try:
        address = str(api.create_repo(repository, private=private, exist_ok=True))
        say(f"pushing {size / 2**30:.2f} GiB to {address}")
        api.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=[f"{WORK}/*"])
    except HFValidationError as error:
        raise UserError(str(error).split("\n")[0], where, "write it as organisation/name") from None
    except LocalTokenNotFoundError:
        raise UserError("this machine has no token for the hub", where, "run: hf auth login") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            hint = "run `hf auth login` with a token that may write there"
            raise UserError("the hub refuses this machine's token", where, hint) from None
        raise RunError(f"the hub answered {status}", where, f"the export is whole in {folder}: push it again") from None
    except (httpx2.TransportError, OfflineModeIsEnabled, OSError) as error:
        said = type(error).__name__
        raise RunError(
            f"the hub can't be reached ({said})", where, f"the export is whole in {folder}: push it again"
        ) from None
    return address
