#!/bin/bash
# Trains on the nodes of a Slurm job: starts Ray on all of them, runs raypod train on the first one, and queues the job
# again if it was preempted or its time ended; the run then continues from its checkpoint.
#
#     sbatch cluster/slurm.sh --config configs/imagenet-resnet50-pod64.yaml --data-dir /data/imagenet
#
# Edit the lines marked EDIT. The arguments are those of raypod train. The variables below can also be set in the
# environment of sbatch. "inferred": not verified on a pod.
#
#SBATCH --job-name=raypod
#SBATCH --nodes=4                     # EDIT: the host servers
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00               # EDIT
#SBATCH --output=raypod-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# SIGUSR1 to this script only, 120 s before the time ends. SIGTERM would reach Ray's processes, too. With
# PreemptParameters=send_user_signal in slurm.conf a preemption sends the same signal; its GraceTime must be at least 120 s.
#SBATCH --signal=B:USR1@120

set -euo pipefail

: "${SLURM_JOB_ID:?start this script with sbatch}"
: "${RAYPOD_RUN_DIR:=$HOME/raypod-runs/$SLURM_JOB_ID}"   # EDIT: a folder that all nodes share; the same after a requeue
: "${RAYPOD_PYTHON:=$HOME/raypod/venv/bin/python}"       # EDIT: the same on all nodes, with raypod and ray
test -x "$RAYPOD_PYTHON" || RAYPOD_PYTHON=$(command -v python3)
: "${RAYPOD_IPUS_PER_HOST:=0}"        # EDIT: 16 on the hosts of a POD64; 0: the emulated SDK
: "${RAYPOD_INSTANCES_PER_HOST:=1}"
: "${RAYPOD_SDK:=}"                   # EDIT: folder of the Poplar SDK, as in /opt/poplar_sdk (inferred)
: "${RAYPOD_GRACE_S:=100}"            # less than the time of --signal: Ray and this script end within the rest
: "${RAYPOD_PREEMPTED:=85}"           # exit code by which raypod train tells a preemption from a failure
: "${RAYPOD_RAY_PORT:=6379}"
: "${RAYPOD_START_S:=300}"            # longest time until Ray runs on all nodes

# Ray without a token executes the code of everyone who reaches its ports.
RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE RAY_AUTH_TOKEN RAYPOD_PYTHON RAYPOD_IPUS_PER_HOST RAYPOD_SDK RAYPOD_RAY_PORT
# The folder of Ray's sockets: local to each node, and short.
export RAY_TMPDIR="${RAY_TMPDIR:-/tmp/ray-$SLURM_JOB_ID}"

# Prints the address of the node on which it runs. A name that resolves to loopback, as in Debian's /etc/hosts, is skipped.
# shellcheck disable=SC2016 # the tasks expand it
ADDRESS='
name=${SLURMD_NODENAME:-$(hostname)}
address=$(getent ahostsv4 "$name" | awk "NR == 1 {print \$1}")
case "$address" in
  "$name") ;;
  127.* | "") address=$(hostname -I | cut -d " " -f 1) ;;
esac
'
# shellcheck disable=SC2016
START_RAY="$ADDRESS"'
set -eu
for part in ${RAYPOD_SDK:+"$RAYPOD_SDK"/enable "$RAYPOD_SDK"/*/enable.sh}; do
  if test -r "$part"; then . "$part"; fi
done
unset OMP_NUM_THREADS  # raypod chooses the number of threads
"$RAYPOD_PYTHON" -m raypod.system.private "$RAY_TMPDIR"  # another user can have created it
set -- --node-ip-address="$address" --disable-usage-stats --block
if test "$RAYPOD_IPUS_PER_HOST" -gt 0; then set -- "$@" --resources="{\"IPU\": $RAYPOD_IPUS_PER_HOST}"; fi
if test "$RAYPOD_ROLE" = head; then
  exec "$RAYPOD_PYTHON" -m ray.scripts.scripts start --head --port="$RAYPOD_RAY_PORT" --include-dashboard=false "$@"
fi
exec "$RAYPOD_PYTHON" -m ray.scripts.scripts start --address="$HEAD_ADDRESS:$RAYPOD_RAY_PORT" "$@"
'

# This script runs on the first node of the job.
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
nodes=$(wc -l <<<"$names")
head_node=$(head -n 1 <<<"$names")
# shellcheck disable=SC2016
HEAD_ADDRESS=$(srun --nodes=1 --ntasks=1 --nodelist="$head_node" bash -c "$ADDRESS"'echo "$address"')
export HEAD_ADDRESS RAY_ADDRESS="$HEAD_ADDRESS:$RAYPOD_RAY_PORT"

started=() notices=0 child="" code=0
end_ray() {
  local pid
  for pid in "${started[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${started[@]}"; do
    for _ in {1..20}; do
      kill -0 "$pid" 2>/dev/null || break
      sleep 1
    done
    kill -KILL "$pid" 2>/dev/null || true
    wait "$pid" || true
  done
  started=()
}
notify() {
  notices=$((notices + 1))
  if test -n "$child"; then kill -USR1 "$child" 2>/dev/null || true; fi
}
# Runs a command, passes SIGUSR1 on to it, and sets `code` to its exit code, or to that of a preemption.
run() {
  local before
  "$@" &
  child=$!
  if ((notices)); then notify; fi # the signal came before
  while true; do
    before=$notices code=0
    wait "$child" || code=$?
    if ((notices == before)); then break; fi # else the signal has ended `wait`; the next one returns the exit code
  done
  child=""
  # It had no handler yet: 128 + SIGUSR1.
  if ((notices && code == 138)); then code=$RAYPOD_PREEMPTED; fi
}
trap end_ray EXIT
trap notify USR1 TERM

# A step for the head, then one for the others once it runs: Ray writes this file then. A worker that joins before the
# head's own processes makes the start of the head fail, and one that starts long before gives up.
head_file=$RAY_TMPDIR/ray/ray_current_cluster
"$RAYPOD_PYTHON" -m raypod.system.private "$RAY_TMPDIR"
rm -f "$head_file"
start_head() {
  RAYPOD_ROLE="head" srun --overlap --nodes=1 --ntasks=1 --nodelist="$head_node" bash -c "$START_RAY" &
  started=($!)
}
start_head
tries=1
for ((waited = 0; waited < RAYPOD_START_S; waited++)); do
  if grep -qs ":$RAYPOD_RAY_PORT" "$head_file"; then break; fi
  if ! kill -0 "${started[0]}" 2>/dev/null; then
    # Ray gives its own processes 30 s, which is too short on a node that is busy.
    if ((tries == 2)); then break; fi
    echo "Ray's head on $head_node has ended while it started; starting it once more" >&2
    tries=2
    start_head
  fi
  sleep 1
done
workers=$((nodes - 1))
if ((workers > 0)); then
  RAYPOD_ROLE="worker" srun --overlap --nodes="$workers" --ntasks="$workers" --ntasks-per-node=1 \
    --exclude="$head_node" bash -c "$START_RAY" &
  started+=($!)
fi

mkdir -p "$RAYPOD_RUN_DIR.slurm"
cluster=$RAYPOD_RUN_DIR.slurm/cluster.yaml
run "$RAYPOD_PYTHON" -m raypod cluster-file --hosts "$nodes" --wait-s "$RAYPOD_START_S" \
  --instances-per-host "$RAYPOD_INSTANCES_PER_HOST" --name "job-$SLURM_JOB_ID" --output "$cluster"
if ((code == 0)); then
  run "$RAYPOD_PYTHON" -m raypod.train --cluster "$cluster" --run-dir "$RAYPOD_RUN_DIR" \
    --preemption-grace-s "$RAYPOD_GRACE_S" --preemption-exit-code "$RAYPOD_PREEMPTED" "$@"
fi
echo "job $SLURM_JOB_ID ends with exit code $code"
if ((code == RAYPOD_PREEMPTED)); then
  end_ray
  scontrol requeue "$SLURM_JOB_ID" || echo "the job is not queued again; repeat sbatch to continue $RAYPOD_RUN_DIR" >&2
fi
exit "$code"
