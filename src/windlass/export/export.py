"""Export an adapter, alone or merged into its base, and upload what was exported to the Hugging Face Hub."""

import errno
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from windlass import __version__
from windlass.errors import RunError, UserError
from windlass.export.adapter import export_adapter
from windlass.export.merge import merge_adapter
from windlass.export.probe import write_probe
from windlass.export.screen import Say, ShowProgress, show_progress
from windlass.export.source import ADAPTER, EXPORT, MERGED, choose_adapter, locate_base, public_base_name
from windlass.files import write_json
from windlass.hardware import GIB
from windlass.serve.servers import PEFT
from windlass.train.checkpoint.snapshot import require_intact

SHOWN: Final = 8  # deviations in an error; export.json lists all
OUT_OF_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def export(
    path: Path,
    to: Path,
    *,
    merge: bool = False,
    dtype: str | None = None,
    base: str | None = None,
    called: str | None = None,
    model_class: str | None = None,
    server: str | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    layout: str | None = None,
    workers: int | None = None,
    allow_other_base: bool = False,
    probes: bool = True,
    say: Say = print,
    progress: ShowProgress = show_progress,
) -> dict[str, Any]:
    """Write and prove; return what export.json records.

    `base`: the base's folder, `called`: its name; by default the adapter gives both. `model_class`: the class on which
    an adapter for a multimodal model is to be opened. `server`: one of SERVERS, which is to apply the adapter in this
    `environment`; by default the run file's. `layout`: of a merged model, hf or mistral. `probes`: also write what a
    server's answers are compared with. A deviation is raised after everything is written: nothing is deleted.
    """
    source = choose_adapter(path, base, allow_other_base=allow_other_base)
    say(f"adapter   {source.folder}: {source.why}")
    require_intact(source.folder)
    name = called or public_base_name(source)
    kind = MERGED if merge else ADAPTER
    record: dict[str, Any] = {"windlass": __version__, "kind": kind, "base": name}
    record |= {"adapter": source.folder.name, "why": source.why}
    record["run"] = source.run_folder.name if source.run_folder else None
    try:
        if merge:
            if model_class or server:
                what = "a merged model is its base's, whoever reads it"
                raise UserError(what, "--for", "leave it out", "not-for-merged")
            record |= merge_adapter(
                source, to, base_name=name, dtype=dtype, layout=layout, workers=workers, say=say, progress=progress
            )
        else:
            if layout:
                raise UserError("an adapter has no layout of its own", "--layout", "add --merge", "no-such-layout")
            named = (source.manifest.get("run", {}).get("export") or {}).get("server")
            record |= export_adapter(
                source,
                to,
                base_name=name,
                opened_by=called or locate_base(source, name),
                dtype=dtype,
                model_class=model_class,
                server=server or (PEFT if model_class else named) or PEFT,
                environment=environment,
                say=say,
            )
        if probes and not record["deviations"]:
            record |= write_probe(source, to, record, say)
        write_json(to / EXPORT, record)
    except OSError as error:
        problem = f"{error.filename or to} can't be written: {error.strerror or error}"
        if error.errno in OUT_OF_SPACE:
            raise RunError(problem, f"--to {to}", "make room and repeat the command", "disk-full") from None
        hint = "check that the folder can be written, and has room"
        raise UserError(problem, f"--to {to}", hint, "unwritable") from None
    deviations = record["deviations"]
    if deviations:
        problem = f"the export is not base + adapter: {'; '.join(deviations[:SHOWN])}"
        if len(deviations) > SHOWN:
            problem += f"; and {len(deviations) - SHOWN} more"
        hint = f"nothing was deleted, {to / EXPORT} lists all; don't use it: export into a new folder"
        raise RunError(problem, str(to), hint, "not-base-plus-adapter")
    return record


def push_to_hub(folder: Path, repository: str, say: Say = print) -> str:
    """Upload the folder with the hub's own client and token; a new repository is private. Returns its address."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    where = f"--push {repository}"
    hint = f"the export in {folder} is complete: push it again"
    api = HfApi()
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    try:
        address = str(api.create_repo(repository, private=True, exist_ok=True))
        say(f"pushing {size / GIB:.2f} GiB to {address}")
        api.upload_folder(repo_id=repository, folder_path=folder)
    except HFValidationError as error:
        raise UserError(str(error).split("\n")[0], where, "write it as organisation/name", "hub-name") from None
    except LocalTokenNotFoundError:
        raise UserError("this machine has no token for the hub", where, "run: hf auth login", "no-token") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        problem = f"the hub answered {status}"
        if status in (401, 403):
            problem += "; run `hf auth login` with a token that may write there"
        raise RunError(problem, where, hint, "hub-refused") from None
    except (httpx2.TransportError, OfflineModeIsEnabled, OSError) as error:
        raise RunError(f"the hub can't be reached ({type(error).__name__})", where, hint, "hub-unreachable") from None
    return address
