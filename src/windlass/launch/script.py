"""launch.sh and accelerate.yaml: the files that run on every node, whatever platform starts them."""

from __future__ import annotations

import re
from importlib.resources import files as resources

from windlass import __version__
from windlass.launch.job import Job, quote, quote_words, to_one_line
from windlass.ranks.job import GRACE, JOB, LOG_FORMAT, NODES, RANKS_PER_NODE
from windlass.runfile.machines import Secret

HEAD = """\
# {title}
# Written by windlass {version} from {source}; runs once on every node and starts its ranks.
#
# Kubernetes, Run:ai, SkyPilot and Slurm (--to slurm) start it by themselves. By hand, on each of the machines:
#   PET_NNODES={nodes} PET_NODE_RANK=0 PET_MASTER_ADDR=FIRST-MACHINE bash launch.sh     (0, 1, … on the others)
#
# Exit codes: 0 finished; 13 the input is wrong, don't retry; 75 stopped by a signal, saved; 1 anything else."""


def render_launch_sh(job: Job, *, exports: bool) -> str:
    """Render launch.sh. `exports`: set the environment too; Run:ai and Kubernetes set it visibly on the pod."""
    head = HEAD.format(
        title=job.title,
        version=__version__,
        source=to_one_line(job.source),
        nodes=job.nodes,
    )
    options = "".join(f"\n  {quote_words(('--override', override))}" for override in job.overrides)
    settings = (
        (f"export {JOB}", quote(job.name), ""),
        (f"export {NODES}", str(job.nodes), ""),
        (f"export {RANKS_PER_NODE}", str(job.ranks_per_node), "one per GPU" if job.gpu else "on the CPU"),
        (f"export {GRACE}", str(job.grace_seconds), f"to end a step and save; {job.grace_reason}"),
        (f"export {LOG_FORMAT}", job.cluster.log_format, ""),
        ("working_dir", quote(job.cluster.working_dir or ""), "empty: where this is started"),
        ("install", f"({quote_words(job.cluster.install)})", "what the image lacks"),
        ("options", f"({options}\n)" if options else "()", ""),
        ("here", '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"', ""),
    )
    exported = ["", "# --- the environment ".ljust(119, "-")] if exports else []
    for variable in job.environment if exports else ():
        name, value = variable.name, variable.value
        exported.append(f"# {to_one_line(variable.reason)}")
        if isinstance(value, Secret):
            missing = f"{name} is a secret ({value.secret}, key {value.key}): export it before"
            exported.append(
                f'if [[ -z "${{{name}:-}}" ]]; then\n  echo {quote(missing)} >&2\n  exit 13\nfi\nexport {name}'
            )
        else:
            exported.append(f"export {name}={quote(value)}")
    parts = {
        "@@HEAD@@": head,
        "@@SETTINGS@@": "\n".join(f"{name}={value}{f'  # {why}' if why else ''}" for name, value, why in settings),
        "@@ENVIRONMENT@@": "\n".join([*exported, ""] if exports else []),
        "@@ACCELERATE@@": "" if job.is_script else ' --accelerate "$here/accelerate.yaml"',
    }
    template = resources("windlass.launch").joinpath("launch.sh").read_text(encoding="utf-8")
    # Split first, so that inserted text is not searched for placeholders.
    return "".join(parts.get(piece, piece) for piece in re.split("(@@[A-Z]+@@)", template))
