#!/usr/bin/env bash
# mistral4small-lora-fsdp-2xh200: 3 x 1 h200, full-shard
# Written by windlass 0.1.0 from train.yaml; runs once on every node and starts its ranks.
#
# Kubernetes and Run:ai start it by themselves. By hand, on each of the machines:
#   PET_NNODES=3 PET_NODE_RANK=0 PET_MASTER_ADDR=FIRST-MACHINE bash launch.sh     (0, 1, … on the others)
# As a Slurm step, with two lines in the batch script (USR1 comes that many seconds before the time limit):
#   #SBATCH --nodes=3 --ntasks-per-node=1 --gpus-per-node=1 --signal=USR1@330 --requeue
#   srun --kill-on-bad-exit=0 bash /data/output/Models/mistral4small-lora-fsdp-2xH200/launch.sh
#
# Ends with 0: finished; 13: the input is wrong, don't try again; 75: stopped by a signal, saved; 1: anything else.
{ # bash reads all of it before it does any of it: this file may be written anew while it runs
set -euo pipefail

# --- what the plan says ---------------------------------------------------------------------------------------------
title='mistral4small-lora-fsdp-2xh200: 3 x 1 h200, full-shard'
nodes=3
ranks_per_node=1  # one per GPU
gpu=1
port=29500  # where the ranks of several nodes meet, unless the platform says another
meet_seconds=300  # until every node must have come
grace_seconds=330  # to end a step and save after a stop signal; estimated from the plan's step and the adapter's size
fingerprint=49051af9b743  # of run file and options: the same on every node
working_dir=''  # empty: where this is started
install=()  # what the image lacks
options=(
  --override cluster.project=research
  --override cluster.namespace=ml
  --override cluster.image=registry.example/team/windlass@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
  --override 'cluster.volumes=[{claim: project-001, path: /data}]'
  --override 'cluster.networks=[ssa]'
  --override 'cluster.extended_resources={openshift.io/mellanoxnics: 1}'
  --override 'cluster.env={NCCL_SOCKET_IFNAME: net1, HF_TOKEN: {secret: hub, key: token}}'
  --override cluster.cpu=16
)
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
run=$here/run.yaml
accelerate=$here/accelerate.yaml

# --- who this node is: told by Kubeflow and Run:ai (PET_*), Slurm, an indexed job, or the Training Operator ---------
trap 'exit 75' TERM USR1 INT # nothing is begun yet; without a trap the first process of a container hears no SIGTERM
fail() { # CODE TEXT…: say it and leave; 13 tells a scheduler that trying again won't help
  printf 'windlass: node %s (%s): %s\n' "${node:-?}" "$(hostname)" "${*:2}" >&2
  exit "$1"
}
if [[ -n "${PET_NODE_RANK:-}" ]]; then
  node=$PET_NODE_RANK told=${PET_NNODES:-$nodes} master=${PET_MASTER_ADDR:-${MASTER_ADDR:-}} port=${PET_MASTER_PORT:-$port}
elif [[ -n "${SLURM_JOB_ID:-}" && -n "${SLURM_NODEID:-}" ]]; then
  node=$SLURM_NODEID told=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-$nodes}}
  port=$((20000 + SLURM_JOB_ID % 5000 * 2)) # of this job's own: jobs may share a machine
  master=${MASTER_ADDR:-}
  if [[ -z "$master" && "$told" -gt 1 ]]; then
    list=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}
    if hosts=$(scontrol show hostnames "$list" 2>/dev/null); then master=${hosts%%$'\n'*}; fi
  fi
  if [[ "${SLURM_NTASKS_PER_NODE:-1}" != 1 ]]; then fail 13 "srun must start one task per node: --ntasks-per-node=1"; fi
elif [[ -n "${JOB_COMPLETION_INDEX:-}" ]]; then
  node=$JOB_COMPLETION_INDEX told=$nodes master=${MASTER_ADDR:-} port=${MASTER_PORT:-$port}
elif [[ -n "${RANK:-}" ]]; then
  # An operator's pod: RANK is the pod's number. Its WORLD_SIZE counts ranks or pods, by version: not asked.
  node=$RANK told=$nodes master=${MASTER_ADDR:-} port=${MASTER_PORT:-$port}
else
  node=0 told=1 master=localhost
fi
told=${told##*:} # a range such as 2:2 ends with the most
if [[ "$told" != "$nodes" ]]; then fail 13 "the run is planned for $nodes nodes, and the platform says $told"; fi
if ! [[ "$node" =~ ^[0-9]+$ ]] || ((node >= nodes)); then fail 13 "there is no node '$node' among $nodes"; fi
if ((nodes == 1)); then # nobody else must know where the ranks meet: on a port that no other run here has taken
  master=localhost
  port=$(python3 -c 'import socket; print(socket.create_server(("localhost", 0)).getsockname()[1])') \
    || fail 1 "no free port can be had"
fi
if [[ -z "$master" ]]; then fail 13 "nobody says where node 0 is: set MASTER_ADDR"; fi
# From here on only the command line below speaks to the launcher.
unset "${!PET_@}" RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

# --- a home: an arbitrary user ID has neither a name nor a writable folder ------------------------------------------
if ! id -un >/dev/null 2>&1; then export LOGNAME="${LOGNAME:-windlass}"; fi # libraries ask for a name
if [[ "${HOME:-/}" == / || ! -w "$HOME" ]]; then
  export HOME="${TMPDIR:-/tmp}/windlass-home-$UID"
  mkdir -p "$HOME" || fail 1 "no folder can be made for caches: $HOME"
  export HF_HOME="${HF_HOME:-$HOME/huggingface}" TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$HOME/triton}"
  export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$HOME/inductor}"
fi

# --- traces: what a log must tell when somebody asks about it later -------------------------------------------------
export PATH="$PATH:$HOME/.local/bin"
if [[ -n "$working_dir" ]]; then cd "$working_dir" || fail 13 "the working folder is missing: $working_dir"; fi
if ((${#install[@]})); then
  # pip asks the index that PIP_INDEX_URL names: the site's mirror.
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
names = ("windlass", "torch", "transformers", "trl", "peft", "accelerate", "datasets")
found = {d.metadata["Name"].lower(): d.version for d in m.distributions() if d.metadata["Name"]}
print("versions python", sys.version.split()[0], *(f"{n} {found.get(n, '-')}" for n in names))
sys.exit("windlass" not in found)
PYTHON
if ((gpu)); then
  table=$(nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader 2>&1) \
    || fail 1 "no GPU can be asked: $table"
  printf '%s\n' "$table"
  if (($(grep -c . <<<"$table") < ranks_per_node)); then
    fail 1 "$ranks_per_node GPUs are needed, and there are $(grep -c . <<<"$table")"
  fi
  # Without NVLink, GPUs of a node talk over PCIe; without InfiniBand, nodes talk over TCP.
  links=$(nvidia-smi nvlink --status 2>/dev/null | grep -c 'GB/s' || true)
  printf '%s\n' "nvlink   $links links active"
fi
for port_state in /sys/class/infiniband/*/ports/*/state; do
  if [[ -r "$port_state" ]]; then
    printf 'infiniband %s %s %s\n' "${port_state#/sys/class/infiniband/}" "$(<"$port_state")" \
      "$(cat "${port_state%state}rate" 2>/dev/null || true)"
  fi
done

# --- all nodes together: each says that it is here, and who leaves later is named -----------------------------------
desk=$(mktemp -d "${TMPDIR:-/tmp}/windlass-XXXXXX") # of this node alone, and new: no word of an earlier try
export WINDLASS_DESK="$desk"                          # ranks leave their exit codes here: launchers make each of them 1
meeting='' checking='' launcher=''
leave() { # CODE: take leave of the other nodes, tidy up
  trap '' TERM USR1 INT
  local told=$1
  if [[ -z "$launcher" && "$1" == 75 ]]; then told=143; fi # no ranks have agreed on it with those of others
  if [[ -n "$checking" ]]; then kill -TERM "$checking" 2>/dev/null || true; fi
  if [[ -n "$meeting" ]]; then
    if printf '%s' "$told" >"$desk/.farewell"; then mv "$desk/.farewell" "$desk/farewell" || true; fi
    kill -TERM "$meeting" 2>/dev/null || true
    wait "$meeting" || true
  fi
  rm -rf -- "$desk"
  exit "$1"
}
trap 'leave 75' TERM USR1 INT
if ((nodes > 1)); then
  # One port above the ranks' own.
  python3 -m windlass.launch.meeting --node "$node" --nodes "$nodes" --master "$master" --port "$((port + 1))" \
    --seconds "$meet_seconds" --fingerprint "$fingerprint" --desk "$desk" &
  meeting=$!
  while [[ ! -e "$desk/met" ]]; do
    if ! kill -0 "$meeting" 2>/dev/null; then
      code=0
      wait "$meeting" || code=$?
      meeting=
      leave "$((code ? code : 1))"
    fi
    sleep 0.1
  done
fi
if [[ "${WINDLASS_CHECK:-yes}" != no ]]; then
  # Everything else that can be known of this node and of all together, before anything is loaded.
  PET_NODE_RANK="$node" PET_NNODES="$nodes" PET_MASTER_ADDR="$master" PET_MASTER_PORT="$port" \
    python3 -m windlass check "$run" --accelerate "$accelerate" --in-pod --wait "$meet_seconds" "${options[@]}" &
  checking=$! # in the background, for bash does not hear signals while it waits for a program
  code=0
  wait "$checking" || code=$?
  checking=
  case $code in
    0) ;;
    13) leave 13 ;;
    *) leave 1 ;; # nodes were lost, or the checks themselves broke down: another try may do
  esac
fi

# --- the ranks ------------------------------------------------------------------------------------------------------
if ((nodes * ranks_per_node == 1)); then
  export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT="$port"
fi
stopping=0
trap 'stopping=1' TERM USR1 INT
(
  # A stop signal is for the ranks, which save. torch's launcher would end them 30 s later, saved or not, and on
  # SIGUSR1 itself: it does not hear them, and this script passes them on.
  trap '' TERM USR1 INT
  export PET_SIGNALS_TO_HANDLE=SIGQUIT PET_SHUTDOWN_TIMEOUT="$grace_seconds"
  # A restarted pod resumes from the last checkpoint: --resume begins anew where there is none.
  exec accelerate launch \
    --config_file "$accelerate" \
    --num_machines "$nodes" \
    --num_processes "$((nodes * ranks_per_node))" \
    --machine_rank "$node" \
    --main_process_ip "$master" \
    --main_process_port "$port" \
    --rdzv_backend static \
    --rdzv_conf "timeout=$meet_seconds" \
    -m windlass train "$run" "${options[@]}" --resume
) &
launcher=$!

each_rank() { # SIGNAL: once to every rank that there is
  local file
  for file in "$desk"/pid-*[0-9]; do
    if [[ -e "$file" && ! -e "$file.$1" ]]; then
      : >"$file.$1"
      kill "-$1" "$(<"$file")" 2>/dev/null || true
    fi
  done
}
deadline='' alone=''
while kill -0 "$launcher" 2>/dev/null; do
  if [[ -e "$desk/gone" ]]; then # another node left: ranks notice by themselves, or wait for it for ever
    alone=${alone:-$SECONDS}
    if ((SECONDS > alone + 20)); then stopping=1 deadline=${deadline:-$((SECONDS + 20))}; fi
  fi
  if ((stopping)); then
    deadline=${deadline:-$((SECONDS + grace_seconds))}
    each_rank TERM # ranks that are only starting are told as soon as they listen
    if ((SECONDS > deadline)); then
      each_rank KILL
      kill -KILL "$launcher" 2>/dev/null || true
    fi
  fi
  sleep 0.2 &
  wait $! || true # a signal ends the wait, not the sleep: traps run at once
done
code=0
wait "$launcher" || code=$?

# --- how it ended: the first rank that failed says it ---------------------------------------------------------------
first=
for file in "$desk"/code-*; do
  if [[ -e "$file" && "$(<"$file")" != 0 ]] && [[ -z "$first" || "$file" -ot "$first" ]]; then first=$file; fi
done
if [[ -n "$first" ]]; then code=$(<"$first"); fi
if [[ -z "$first" || "$code" == 75 ]]; then # that one rank has saved says nothing of those that were killed
  why="most often memory ran out"
  if ((stopping && SECONDS > ${deadline:-SECONDS})); then why="the $grace_seconds s to save in were over"; fi
  for file in "$desk"/pid-*[0-9]; do
    rank=${file##*-}
    if [[ -e "$file" && ! -e "$desk/code-$rank" ]]; then
      printf 'windlass: node %s (%s): rank %s was killed while %s; %s\n' \
        "$node" "$(hostname)" "$rank" "$(cat "$desk/phase-$rank" 2>/dev/null || echo starting)" "$why" >&2
      code=1
    fi
  done
fi
if ((code)) && [[ -e "$desk/gone" && "$code" != 13 ]]; then # a node that leaves for its input's sake speaks for all
  if [[ "$(<"$desk/gone")" == 13 ]]; then code=13; else code=1; fi
fi
case $code in
  0 | 13 | 75) ;;
  2) code=13 ;; # the input is wrong: trying again won't help
  *) code=1 ;;
esac
if ((code)); then printf 'windlass: node %s (%s): ended with %s\n' "$node" "$(hostname)" "$code" >&2; fi
leave "$code"
}
