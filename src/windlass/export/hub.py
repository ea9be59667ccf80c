"""Upload an export to the Hugging Face Hub."""

from pathlib import Path

from windlass.errors import RunError, UserError
from windlass.export.screen import Say
from windlass.hardware import GIB


def push_to_hub(folder: Path, repository: str, *, private: bool = True, say: Say = print) -> str:
    """Upload the folder with the hub's own client and token; a new repository is private. Returns its address."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    where = f"--push {repository}"
    hint = f"the export in {folder} is complete: push it again"
    api = HfApi()
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    try:
        address = str(api.create_repo(repository, private=private, exist_ok=True))
        say(f"pushing {size / GIB:.2f} GiB to {address}")
        api.upload_folder(repo_id=repository, folder_path=folder)
    except HFValidationError as error:
        raise UserError(str(error).split("\n")[0], where, "write it as organisation/name", "hub-name") from None
    except LocalTokenNotFoundError:
        raise UserError("this machine has no token for the hub", where, "run: hf auth login") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        problem = f"the hub answered {status}"
        if status in (401, 403):
            problem += "; run `hf auth login` with a token that may write there"
        raise RunError(problem, where, hint) from None
    except (httpx2.TransportError, OfflineModeIsEnabled, OSError) as error:
        raise RunError(f"the hub can't be reached ({type(error).__name__})", where, hint, "hub-unreachable") from None
    return address
