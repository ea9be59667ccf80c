#!/usr/bin/env bash
@@HEAD@@
{ # makes bash read the whole file before it runs any of it: the file may be rewritten meanwhile
set -euo pipefail
trap 'exit 75' TERM USR1 INT # nothing to save yet; without a trap a container's first process ignores SIGTERM

# --- from the plan --------------------------------------------------------------------------------------------------
@@SETTINGS@@
@@ENVIRONMENT@@
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
exec python3 -m windlass train "$here/run.yaml"@@ACCELERATE@@ "${options[@]}" --resume
}
