"""Upload an export to a hub repository."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from windlass.errors import RunError, UserError


def push(folder: Path, repository: str, *, private: bool = True, say: Callable[[str], None] = print) -> str:
    """Upload the folder with the hub's own client and token; a new repository is private. Returns its address."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    where, again = f"--push {repository}", f"the export in {folder} is complete: push it again"
    api = HfApi()
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    try:
        address = str(api.create_repo(repository, private=private, exist_ok=True))
        say(f"pushing {size / 2**30:.2f} GiB to {address}")
        api.upload_folder(repo_id=repository, folder_path=folder)
    except HFValidationError as error:
        raise UserError(str(error).split("\n")[0], where, "write it as organisation/name") from None
    except LocalTokenNotFoundError:
        raise UserError("this machine has no token for the hub", where, "run: hf auth login") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        token = "; run `hf auth login` with a token that may write there" * (status in (401, 403))
        raise RunError(f"the hub answered {status}{token}", where, again) from None
    except (httpx2.TransportError, OfflineModeIsEnabled, OSError) as error:
        raise RunError(f"the hub can't be reached ({type(error).__name__})", where, again) from None
    return address
