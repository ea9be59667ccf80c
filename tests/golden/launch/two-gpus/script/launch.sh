#!/usr/bin/env bash
# mistral4small-lora-fsdp-2xh200: 1 x 1 h200, resident
# Written by windlass 0.2.0 from mistral4small_2xH200.yaml; runs once on every node and starts its ranks.
#
# Kubernetes, Run:ai and Slurm (--to slurm) start it by themselves. By hand, on each of the machines:
#   PET_NNODES=1 PET_NODE_RANK=0 PET_MASTER_ADDR=FIRST-MACHINE bash launch.sh     (0, 1, … on the others)
#
# Exit codes: 0 finished; 13 the input is wrong, don't retry; 75 stopped by a signal, saved; 1 anything else.
{ # makes bash read the whole file before it runs any of it: the file may be rewritten meanwhile
set -euo pipefail

# --- from the plan --------------------------------------------------------------------------------------------------
title='mistral4small-lora-fsdp-2xh200: 1 x 1 h200, resident'
nodes=1
ranks_per_node=1  # one per GPU
gpu=1
port=29500  # of the ranks' rendezvous, unless the platform sets another
join_seconds=300  # until every node must have started
grace_seconds=120  # to end a step and save after a stop signal; estimated from the plan's step and the adapter's size
fingerprint=4dde3c40234f  # of run file and options: the same on every node
name=mistral4small-lora-fsdp-2xh200
log_format=text
working_dir=''  # empty: where this is started
install=()  # what the image lacks
options=(
  --override cluster.image=registry.example/team/windlass@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
  --override 'cluster.volumes=[{claim: project-001, path: /data}]'
  --override 'cluster.env={NCCL_SOCKET_IFNAME: net1, HF_TOKEN: {secret: hub, key: token}}'
  --override cluster.cpu=16
  --override cluster.kubernetes.namespace=ml
  --override cluster.runai.project=research
  --override 'cluster.kubernetes.networks=[ssa]'
  --override 'cluster.runai.networks=[ssa]'
  --override 'cluster.kubernetes.extended_resources={openshift.io/mellanoxnics: 1}'
  --override 'cluster.runai.extended_resources={openshift.io/mellanoxnics: 1}'
)
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
run=$here/run.yaml
accelerate=$here/accelerate.yaml

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

# --- which node this is: from Kubeflow and Run:ai (PET_*), Slurm, an indexed Job, or the Training Operator ----------
trap 'exit 75' TERM USR1 INT # nothing to save yet; without a trap a container's first process ignores SIGTERM
known='' # that and where the other nodes are
fail() { # CODE TEXT…: print the text, tell the other nodes and exit; 13 tells a scheduler that a retry won't help
  printf 'windlass: node %s (%s): %s\n' "${node:-?}" "$(hostname)" "${*:2}" >&2
  if [[ -n "$known" ]]; then # node 0 may not be there yet; without a word it would wait for this node
    join 60 '' "$1" "${*:2}" 2>/dev/null &
    wait $! || true
  fi
  exit "$1"
}
join() { # SECONDS STATUS_DIR [CODE TEXT]: meet the other nodes, one port above the ranks' own; in the background
  exec python3 -m windlass.ranks.rendezvous "$node" "$nodes" "$master" "$((port + 1))" "$1" "$fingerprint" "${@:2}"
}
if [[ -n "${PET_NODE_RANK:-}" ]]; then
  node=$PET_NODE_RANK count=${PET_NNODES:-$nodes} master=${PET_MASTER_ADDR:-${MASTER_ADDR:-}} port=${PET_MASTER_PORT:-$port}
elif [[ -n "${SLURM_JOB_ID:-}" && -n "${SLURM_NODEID:-}" ]]; then
  node=$SLURM_NODEID count=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-$nodes}}
  port=$((20000 + SLURM_JOB_ID % 5000 * 2)) # of this job's own: jobs may share a machine
  master=${MASTER_ADDR:-}
  if [[ -z "$master" && "$count" -gt 1 ]]; then
    list=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}
    if hosts=$(scontrol show hostnames "$list" 2>/dev/null); then master=${hosts%%$'\n'*}; fi
  fi
  if [[ "${SLURM_NTASKS_PER_NODE:-1}" != 1 ]]; then fail 13 "srun must start one task per node: --ntasks-per-node=1"; fi
elif [[ -n "${JOB_COMPLETION_INDEX:-}" ]]; then
  node=$JOB_COMPLETION_INDEX count=$nodes master=${MASTER_ADDR:-} port=${MASTER_PORT:-$port}
elif [[ -n "${RANK:-}" ]]; then
  # An operator's pod: RANK is the pod's number. WORLD_SIZE counts ranks or pods, depending on the version: not used.
  node=$RANK count=$nodes master=${MASTER_ADDR:-} port=${MASTER_PORT:-$port}
else
  node=0 count=1 master=localhost
fi
count=${count##*:} # of a range such as 2:2 the upper end
if [[ "$count" != "$nodes" ]]; then fail 13 "the run is planned for $nodes nodes, and the platform started $count"; fi
if ! [[ "$node" =~ ^[0-9]+$ ]] || ((node >= nodes)); then fail 13 "there is no node '$node' among $nodes"; fi
if ((nodes == 1)); then # no other machine needs to know the port: take one that no other run here uses
  master=localhost
  port=$(python3 -c 'import socket; print(socket.create_server(("localhost", 0)).getsockname()[1])') \
    || fail 1 "there is no free port"
fi
if [[ -z "$master" ]]; then fail 13 "the address of node 0 is unknown: set MASTER_ADDR"; fi
if ((nodes > 1)); then known=1; fi
# From here on only the command line below configures the launcher.
unset "${!PET_@}" RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

if [[ "$log_format" == json ]]; then # each line as JSON; the filter outlives signals and ends with its last writer
  exec > >(
    trap '' TERM USR1 INT
    exec python3 -uc 'import json, sys, time
for line in sys.stdin.buffer:
    head = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "run": sys.argv[1], "node": int(sys.argv[2])}
    line = json.dumps(head | {"host": sys.argv[3], "message": line.decode(errors="replace").rstrip()})
    sys.stdout.write(line + "\n")  # at once: nodes share a log' \
      "$name" "$node" "$(hostname)"
  ) 2>&1
  filter=$!
  # At the end, wait for the last lines, but not for a process that was left behind.
  trap 'exec >&- 2>&-; for _ in {1..50}; do if kill -0 "$filter" 2>/dev/null; then sleep 0.1; fi; done' EXIT
fi

# --- HOME: an arbitrary user ID has neither a name nor a writable folder --------------------------------------------
if ! id -un >/dev/null 2>&1; then export LOGNAME="${LOGNAME:-windlass}"; fi # libraries ask for a name
if [[ "${HOME:-/}" == / || ! -w "$HOME" ]]; then
  export HOME="${TMPDIR:-/tmp}/windlass-home-$UID"
  mkdir -p "$HOME" || fail 1 "the folder for caches can't be created: $HOME"
  export HF_HOME="${HF_HOME:-$HOME/huggingface}" TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$HOME/triton}"
  export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$HOME/inductor}"
fi

# --- the log's head: what one needs to know when something went wrong -----------------------------------------------
export PATH="$PATH:$HOME/.local/bin"
if [[ -n "$working_dir" ]]; then cd "$working_dir" || fail 13 "the working folder is missing: $working_dir"; fi
if ((${#install[@]})); then
  # From the index that PIP_INDEX_URL names: the site's mirror.
  python3 -m pip install --quiet --user --disable-pip-version-check "${install[@]}" \
    || fail 1 "pip could not install ${install[*]} from ${PIP_INDEX_URL:-the default index}"
fi
printf '%s\n' "--- $title" \
  "date     $(date '+%Y-%m-%d %H:%M:%S %z')" \
  "host     $(hostname), node $node of $nodes, $ranks_per_node ranks each" \
  "master   $master:$port" \
  "user     $(id -u):$(id -g), locked memory $(ulimit -l) kB, open files $(ulimit -n)" \
  "shm      $(df -h --output=size /dev/shm 2>/dev/null | tail -n 1 | tr -d ' ' || echo none)" \
  "run      $run"
python3 - <<'PYTHON' || fail 13 "windlass is not installed in this image"
import importlib.metadata as m, sys
names = ("windlass", "torch", "transformers", "peft", "accelerate", "datasets")
found = {d.metadata["Name"].lower(): d.version for d in m.distributions() if d.metadata["Name"]}
print("versions python", sys.version.split()[0], *(f"{n} {found.get(n, '-')}" for n in names))
sys.exit("windlass" not in found)
PYTHON
if ((gpu)); then
  table=$(nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader 2>&1) \
    || fail 1 "nvidia-smi failed: $table"
  printf '%s\n' "$table"
  if (($(grep -c . <<<"$table") < ranks_per_node)); then
    fail 1 "$ranks_per_node GPUs are needed; this node has $(grep -c . <<<"$table")"
  fi
  # Without NVLink, GPUs of a node communicate over PCIe; without InfiniBand, nodes communicate over TCP.
  links=$(nvidia-smi nvlink --status 2>/dev/null | grep -c 'GB/s' || true)
  printf '%s\n' "nvlink   $links links active"
fi
for port_state in /sys/class/infiniband/*/ports/*/state; do
  if [[ -r "$port_state" ]]; then
    printf 'infiniband %s %s %s\n' "${port_state#/sys/class/infiniband/}" "$(<"$port_state")" \
      "$(cat "${port_state%state}rate" 2>/dev/null || true)"
  fi
done

# --- all nodes: wait until each has started, and from then on name the one that leaves ------------------------------
status_dir=$(mktemp -d "${TMPDIR:-/tmp}/windlass-XXXXXX") # of this node and this try alone
export WINDLASS_STATUS_DIR="$status_dir"                    # ranks write their exit codes here: launchers make each of them 1
rendezvous='' check='' launcher=''
leave() { # CODE: tell the other nodes, clean up, exit
  trap '' TERM USR1 INT
  local code=$1
  if [[ -z "$launcher" && "$1" == 75 ]]; then code=143; fi # stopped before there were ranks that agree with the others'
  if [[ -n "$check" ]]; then kill -TERM "$check" 2>/dev/null || true; fi
  if [[ -n "$rendezvous" ]]; then
    if printf '%s' "$code" >"$status_dir/.leaving"; then mv "$status_dir/.leaving" "$status_dir/leaving" || true; fi
    kill -TERM "$rendezvous" 2>/dev/null || true
    wait "$rendezvous" || true
  fi
  rm -rf -- "$status_dir"
  exit "$1"
}
trap 'leave 75' TERM USR1 INT
if ((nodes > 1)); then
  join "$join_seconds" "$status_dir" &
  rendezvous=$!
  while [[ ! -e "$status_dir/ready" ]]; do
    if ! kill -0 "$rendezvous" 2>/dev/null; then
      code=0
      wait "$rendezvous" || code=$?
      rendezvous=
      if ((code == 143)); then code=75; fi # it got the stop signal before this script
      leave "$((code ? code : 1))"
    fi
    sleep 0.1
  done
fi
if [[ "${WINDLASS_CHECK:-yes}" != no ]]; then
  # Everything else that can be known of this node and between all nodes, before anything is loaded.
  PET_NODE_RANK="$node" PET_NNODES="$nodes" PET_MASTER_ADDR="$master" PET_MASTER_PORT="$port" \
    python3 -m windlass check "$run" --accelerate "$accelerate" --in-pod --wait "$join_seconds" "${options[@]}" &
  check=$! # in the background, because bash handles no signals while it waits for a program in the foreground
  lost_at=''
  while kill -0 "$check" 2>/dev/null; do
    # A node that is lost joins no check. One whose check failed has told this one's, which is about to end.
    if [[ -e "$status_dir/lost" ]] && ((SECONDS > ${lost_at:=$SECONDS} + 30)); then kill -TERM "$check" 2>/dev/null || true; fi
    sleep 0.2 &
    wait $! || true # a signal ends the wait, not the sleep: traps run at once
  done
  code=0
  wait "$check" || code=$?
  check=
  if ((code)) && [[ -e "$status_dir/lost" && "$(<"$status_dir/lost")" == 13 ]]; then code=13; fi
  case $code in
    0) ;;
    13) leave 13 ;;
    *) leave 1 ;; # nodes were lost, or the check itself broke down: a retry may succeed
  esac
fi

# --- the ranks ------------------------------------------------------------------------------------------------------
if ((nodes * ranks_per_node == 1)); then
  export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT="$port"
fi
stopping=0
trap 'stopping=1' TERM USR1 INT
(
  # A stop signal is for the ranks, which save. torch's launcher would kill them 30 s later, saved or not, and would
  # die of SIGUSR1: it ignores signals here, and this script forwards them.
  trap '' TERM USR1 INT
  export PET_SIGNALS_TO_HANDLE=SIGQUIT PET_SHUTDOWN_TIMEOUT="$grace_seconds"
  # A restarted pod resumes from the last checkpoint; without one, --resume starts from the beginning.
  exec accelerate launch \
    --config_file "$accelerate" \
    --num_machines "$nodes" \
    --num_processes "$((nodes * ranks_per_node))" \
    --machine_rank "$node" \
    --main_process_ip "$master" \
    --main_process_port "$port" \
    --rdzv_backend static \
    --rdzv_conf "timeout=$join_seconds" \
    -m windlass train "$run" "${options[@]}" --resume
) &
launcher=$!

signal_ranks() { # SIGNAL: send it once to every rank that has started
  local file
  for file in "$status_dir"/pid-*[0-9]; do
    if [[ -e "$file" && ! -e "$file.$1" ]]; then
      : >"$file.$1"
      kill "-$1" "$(<"$file")" 2>/dev/null || true
    fi
  done
}
deadline='' lost_at='' late="the $grace_seconds s to save had passed"
while kill -0 "$launcher" 2>/dev/null; do
  if [[ -e "$status_dir/lost" ]]; then # another node is lost: ranks notice by themselves, or wait for it forever
    lost_at=${lost_at:-$SECONDS}
    if ((SECONDS > lost_at + 20)); then
      if [[ -z "$deadline" ]]; then late="another node was lost 40 s before"; fi
      stopping=1 deadline=${deadline:-$((SECONDS + 20))}
    fi
  fi
  if ((stopping)); then
    deadline=${deadline:-$((SECONDS + grace_seconds))}
    signal_ranks TERM # repeated: ranks that are still starting get it once they handle it
    if ((SECONDS > deadline)); then
      signal_ranks KILL
      kill -KILL "$launcher" 2>/dev/null || true
    fi
  fi
  sleep 0.2 &
  wait $! || true # a signal ends the wait, not the sleep: traps run at once
done
code=0
wait "$launcher" || code=$?

# --- the exit code: that of the first rank that failed --------------------------------------------------------------
first=
for file in "$status_dir"/code-*; do
  if [[ -e "$file" && "$(<"$file")" != 0 ]] && [[ -z "$first" || "$file" -ot "$first" ]]; then first=$file; fi
done
if [[ -n "$first" ]]; then code=$(<"$first"); fi
if [[ -z "$first" || "$code" == 75 ]]; then # one rank that saved doesn't speak for those that were killed
  why="usually out of memory"
  if ((stopping && SECONDS > ${deadline:-SECONDS})); then why=$late; fi
  for file in "$status_dir"/pid-*[0-9]; do
    rank=${file##*-}
    if [[ -e "$file" && ! -e "$status_dir/code-$rank" ]]; then
      printf 'windlass: node %s (%s): rank %s was killed while %s; %s\n' \
        "$node" "$(hostname)" "$rank" "$(cat "$status_dir/phase-$rank" 2>/dev/null || echo starting)" "$why" >&2
      code=1
    fi
  done
fi
if ((code)) && [[ -e "$status_dir/lost" && "$code" != 13 ]]; then # wrong input on one node is wrong on all
  if [[ "$(<"$status_dir/lost")" == 13 ]]; then code=13; else code=1; fi
fi
case $code in
  0 | 13 | 75) ;;
  2) code=13 ;; # the input is wrong: a retry won't help
  *) code=1 ;;
esac
if ((code)); then printf 'windlass: node %s (%s): ended with %s\n' "$node" "$(hostname)" "$code" >&2; fi
leave "$code"
}
