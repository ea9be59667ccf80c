"""Commands if something is wrong."""

import os
from pathlib import Path
from typing import Annotated

from windlass.cli.options import HELP, Json, arg, command, opt, say, write_result


@command(HELP, "version", "version --json")
def version(as_json: Json = False) -> None:
    """Print the versions that matter for a bug report: libraries, CUDA, driver, GPUs, system."""
    from windlass.support import print_versions, read_versions

    write_result(read_versions(), as_json, print_versions)


@command(HELP, "bug-report run", "bug-report run.yaml --out bug-report.tar.gz")
def bug_report(
    run: Annotated[Path, arg("RUN", "The run folder, or the run file.")],
    out: Annotated[Path | None, opt("--out", "FILE", "Archive to write. Default: bug-report-RUN.tar.gz, here.")] = None,
) -> None:
    """Collect what explains a run into one archive, without data or secrets, and print what is in it.

    Versions, the resolved run with secrets masked, plan, loading certificate, counts of the data audit, and the last
    lines of logs and events. No rows, no weights, no samples. Read it before you send it.
    """
    from windlass.support import bug_report

    print(bug_report(run, out, os.environ, say))
