#!/usr/bin/env bash
# mistral4small-lora-fsdp-2xh200: 3 x 1 h200, resident
# Written by windlass 0.2.0 from train.yaml; runs once on every node and starts its ranks.
#
# Kubernetes, Run:ai, SkyPilot and Slurm (--to slurm) start it by themselves. By hand, on each of the machines:
#   PET_NNODES=3 PET_NODE_RANK=0 PET_MASTER_ADDR=FIRST-MACHINE bash launch.sh     (0, 1, … on the others)
#
# Exit codes: 0 finished; 13 the input is wrong, don't retry; 75 stopped by a signal, saved; 1 anything else.
{ # makes bash read the whole file before it runs any of it: the file may be rewritten meanwhile
set -euo pipefail
trap 'exit 75' TERM USR1 INT # nothing to save yet; without a trap a container's first process ignores SIGTERM

# --- from the plan --------------------------------------------------------------------------------------------------
export WINDLASS_JOB=mistral4small-lora-fsdp-2xh200
export WINDLASS_NODES=3
export WINDLASS_RANKS_PER_NODE=1  # one per GPU
export WINDLASS_GRACE_SECONDS=120  # to end a step and save; estimated from the plan's step and the adapter's size
export WINDLASS_LOG_FORMAT=text
working_dir=''  # empty: where this is started
install=()  # what the image lacks
options=(
  --override cluster.image=registry.example/team/windlass@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
  --override 'cluster.volumes=[{claim: project-001, path: /data}]'
  --override 'cluster.env={NCCL_SOCKET_IFNAME: net1, HF_TOKEN: {secret: hub, key: token}}'
  --override cluster.cpu=16
  --override cluster.kubernetes.namespace=ml
  --override cluster.runai.project=research
  --override 'cluster.skypilot.mounts={/data: '"'"'s3://site/data'"'"'}'
  --override 'cluster.kubernetes.networks=[ssa]'
  --override 'cluster.runai.networks=[ssa]'
  --override 'cluster.kubernetes.extended_resources={openshift.io/mellanoxnics: 1}'
  --override 'cluster.runai.extended_resources={openshift.io/mellanoxnics: 1}'
)
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# --- the environment -------------------------------------------------------------------------------------------------
# how much NCCL prints: VERSION, WARN, INFO, TRACE
export NCCL_DEBUG=WARN
# torch's GPU memory allocator; expandable_segments:True lets a segment grow instead of fragmenting
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# the newer name of PYTORCH_CUDA_ALLOC_CONF
export PYTORCH_ALLOC_CONF=expandable_segments:True
# cluster.env: network interfaces for NCCL's sockets: prefixes, `=net1` for exactly one, `^docker` for all but these
export NCCL_SOCKET_IFNAME=net1
# cluster.env: the token for gated models
if [[ -z "${HF_TOKEN:-}" ]]; then
  echo 'HF_TOKEN is a secret (hub, key token): export it before' >&2
  exit 13
fi
export HF_TOKEN

fail() { # CODE TEXT: print the text, tell the other nodes, exit; 13 tells a scheduler that a retry won't help
  printf 'windlass: %s: %s\n' "$(hostname)" "$2" >&2
  python3 -m windlass.ranks.node "$WINDLASS_NODES" "$1" "$2" &
  wait $! || true
  exit "$1"
}

# --- HOME: an arbitrary user ID has neither a name nor a writable folder --------------------------------------------
if ! id -un >/dev/null 2>&1; then export LOGNAME="${LOGNAME:-windlass}"; fi # libraries ask for a name
if [[ "${HOME:-/}" == / || ! -w "$HOME" ]]; then
  export HOME="${TMPDIR:-/tmp}/windlass-home-$UID"
  mkdir -p "$HOME" || fail 1 "the folder for caches can't be created: $HOME"
  export HF_HOME="${HF_HOME:-$HOME/huggingface}" TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$HOME/triton}"
  export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$HOME/inductor}"
fi
export PATH="$PATH:$HOME/.local/bin"

if [[ -n "$working_dir" ]]; then cd "$working_dir" || fail 13 "the working folder is missing: $working_dir"; fi
if ((${#install[@]})); then
  # From the index that PIP_INDEX_URL names: the site's mirror.
  python3 -m pip install --quiet --user --disable-pip-version-check "${install[@]}" \
    || fail 1 "pip could not install ${install[*]} from ${PIP_INDEX_URL:-the default index}"
fi
python3 -c 'import windlass' || fail 13 "windlass is not installed in this image"

# It joins the other nodes, checks, and starts this node's ranks. A restarted pod resumes from the last checkpoint;
# without one, --resume starts from the beginning.
exec python3 -m windlass train "$here/run.yaml" --accelerate "$here/accelerate.yaml" "${options[@]}" --resume
}
