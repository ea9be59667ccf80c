#!/usr/bin/env bash
# mistral4small-lora-fsdp-2xh200: 3 x 1 h200, resident
# Written by windlass 0.2.0 from runai.yaml: submits the run to Run:ai. launch.sh must be, with accelerate.yaml and run.yaml,
# in /data/output/Models/mistral4small-lora-fsdp-2xH200 on the volume that the pods mount.
# Run it again with the same run folder to resume from the last checkpoint, once the ended job is deleted:
#   runai training pytorch delete mistral4small-lora-fsdp-2xh200 --project research
# For the command line of Run:ai 3.0, by its reference; older ones may lack
#   --clean-pod-policy --restart-policy --master-restart-policy --termination-grace-period --master-cpu-core-request
#   --master-cpu-memory-request --master-cpu-memory-limit
set -euo pipefail

# Git Bash on Windows would turn /data into C:/Program Files/Git/data; elsewhere nothing reads these.
export MSYS_NO_PATHCONV=1 MSYS2_ARG_CONV_EXCL='*'

options=(
  --project research
  --image registry.example/ml/windlass@sha256:0000000000000000000000000000000000000000000000000000000000000000
  # 3 nodes: a master, which has options of its own, and 2 workers
  --workers 2
  # workers that still run when the master has ended are of no use
  --clean-pod-policy Running
  # of each node
  --gpu-devices-request 1 --master-gpu-devices-request 1
  --cpu-core-request 16 --master-cpu-core-request 16
  # with units: a bare number would be bytes; the plan needs 15 GiB with /dev/shm
  --cpu-memory-request 64Gi --master-cpu-memory-request 64Gi
  --cpu-memory-limit 96Gi --master-cpu-memory-limit 96Gi
  # ranks of one node exchange data through /dev/shm
  --large-shm
  --existing-pvc 'claimname=project-001,path=/data'
  # a second network card in each pod
  --annotation k8s.v1.cni.cncf.io/networks=ssa
  --extended-resource openshift.io/mellanoxnics=1 --master-extended-resource openshift.io/mellanoxnics=1
  # set by cluster.runai.user
  --run-as-uid 2000
  --run-as-gid 2000
  # to end a step and save after a stop signal; estimated from the plan's step and the adapter's size
  --termination-grace-period 120s
  # 3 restarts of the run are 9 of pods, which are counted
  --backoff-limit 10
  --restart-policy OnFailure --master-restart-policy OnFailure
  # torch's GPU memory allocator; expandable_segments:True lets a segment grow instead of fragmenting
  -e PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
  # the newer name of PYTORCH_CUDA_ALLOC_CONF
  -e PYTORCH_ALLOC_CONF=expandable_segments:True
  # cluster.env: how much NCCL prints: VERSION, WARN, INFO, TRACE
  -e NCCL_DEBUG=INFO
  # cluster.env: network interfaces for NCCL's sockets: prefixes, `=net1` for exactly one, `^docker` for all but these
  -e NCCL_SOCKET_IFNAME=net1
  # cluster.env: the package index that pip uses
  -e PIP_INDEX_URL=https://artifactory.example/api/pypi/virtual/simple
)
exec runai training pytorch submit mistral4small-lora-fsdp-2xh200 "${options[@]}" \
  --command -- bash /data/output/Models/mistral4small-lora-fsdp-2xH200/launch.sh
