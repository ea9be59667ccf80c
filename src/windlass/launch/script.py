"""launch.sh and accelerate.yaml: what runs on every node, whatever brought it there."""

from __future__ import annotations

import re
from importlib.resources import files

from windlass import __version__
from windlass.launch.job import Job, Variable, quote, words
from windlass.runfile.machines import Secret

HEAD = """\
# {title}
# Written by windlass {version} from {source}; runs once on every node and starts its ranks.
#
# Kubernetes and Run:ai start it by themselves. By hand, on each of the machines:
#   PET_NNODES={nodes} PET_NODE_RANK=0 PET_MASTER_ADDR=FIRST-MACHINE bash launch.sh     (0, 1, … on the others)
# As a Slurm step, with two lines in the batch script (USR1 comes that many seconds before the time limit):
#   #SBATCH --nodes={nodes} --ntasks-per-node=1{gpus} --signal=USR1@{grace} --requeue
#   srun --kill-on-bad-exit=0 bash {launch}
#
# Ends with 0: finished; 13: the input is wrong, don't try again; 75: stopped by a signal, saved; 1: anything else."""


ACCELERATE = """\
accelerate launch \\
    --config_file "$accelerate" \\
    --num_machines "$nodes" \\
    --num_processes "$((nodes * ranks_per_node))" \\
    --machine_rank "$node" \\
    --main_process_ip "$master" \\
    --main_process_port "$port" \\
    --rdzv_backend static \\
    --rdzv_conf "timeout=$join_seconds\""""
# A script's image may hold no more than torch.
TORCHRUN = """\
torchrun \\
    --nnodes "$nodes" \\
    --nproc-per-node "$ranks_per_node" \\
    --node-rank "$node" \\
    --master-addr "$master" \\
    --master-port "$port" \\
    --rdzv-backend static \\
    --rdzv-conf "timeout=$join_seconds\""""


def texts(job: Job) -> dict[str, str]:
    """All that a node needs, side by side in one folder."""
    return {
        "launch.sh": launch_sh(job, exports=True),
        **job.accelerate_file,
        "run.yaml": job.run_text,
    }


def launch_sh(job: Job, *, exports: bool) -> str:
    """`exports`: set the environment too. Run:ai and Kubernetes set it on the pod, where it can be seen."""
    template = files("windlass.launch").joinpath("launch.sh").read_text(encoding="utf-8")
    parts = {
        "@@HEAD@@": head(job),
        "@@SETTINGS@@": settings(job),
        "@@ENVIRONMENT@@": environment(job) if exports else "",
        "@@ACCELERATE@@": "" if job.is_script else ' --accelerate "$accelerate"',
        "@@LAUNCHER@@": TORCHRUN if job.is_script else ACCELERATE,
    }
    # Split first: what is put in is never looked at again.
    return "".join(parts.get(piece, piece) for piece in re.split("(@@[A-Z]+@@)", template))


def head(job: Job) -> str:
    return HEAD.format(
        title=job.title,
        version=__version__,
        source=one_line(job.source),
        nodes=job.nodes,
        gpus=f" --gpus-per-node={job.ranks_per_node}" if job.gpu else "",
        grace=job.grace_seconds,
        launch=one_line(quote(f"{job.folder}/launch.sh")),
    )


def settings(job: Job) -> str:
    options = "".join(f"\n  {words(('--override', override))}" for override in job.overrides)
    lines = (
        ("title", quote(job.title), ""),
        ("nodes", str(job.nodes), ""),
        ("ranks_per_node", str(job.ranks_per_node), "one per GPU" if job.gpu else "on the CPU"),
        ("gpu", str(int(job.gpu)), ""),
        ("port", str(job.port), "of the ranks' rendezvous, unless the platform sets another"),
        ("join_seconds", str(job.join_seconds), "until every node must have started"),
        ("grace_seconds", str(job.grace_seconds), f"to end a step and save after a stop signal; {job.grace_reason}"),
        ("fingerprint", quote(job.fingerprint), "of run file and options: the same on every node"),
        ("working_dir", quote(job.cluster.working_dir or ""), "empty: where this is started"),
        ("install", f"({words(job.cluster.install)})", "what the image lacks"),
        ("options", f"({options}\n)" if options else "()", ""),
        ("here", '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"', ""),
        ("run", "$here/run.yaml", ""),
        *(() if job.is_script else (("accelerate", "$here/accelerate.yaml", ""),)),
    )
    return "\n".join(f"{name}={value}{f'  # {why}' if why else ''}" for name, value, why in lines)


def environment(job: Job) -> str:
    lines = ["", "# --- the environment ".ljust(119, "-")]
    for variable in job.environment:
        lines += [f"# {one_line(variable.reason)}", _export(variable)]
    return "\n".join([*lines, ""])


def _export(variable: Variable) -> str:
    if isinstance(variable.value, Secret):
        name = variable.name
        told = f"{name} is a secret ({variable.value.secret}, key {variable.value.key}): export it before"
        return f'if [[ -z "${{{name}:-}}" ]]; then\n  echo {quote(told)} >&2\n  exit 13\nfi\nexport {name}'
    return f"export {variable.name}={quote(variable.value)}"


def one_line(text: str) -> str:
    """Fit for a comment: what comes after a line break would be a command."""
    return " ".join(text.split())
