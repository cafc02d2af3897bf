#!/usr/bin/env bash
# The one task of a node: node.sh train PROGRAM [ARG...] | preflight | compare [--expect NODE]...
# Started by srun from lib.sh, inside the container if there is one.
set -euo pipefail

NODE=${SLURMD_NODENAME:-$(hostname -s)}

say() {
  printf '[%(%F %T)T] %s: %s\n' -1 "$NODE" "$*"
}

# Compile caches on the node's own disk: shared homes make the ranks of a job race for them.
prepare_caches() {
  local base=$LOCAL_DIR/megatron-patch-$UID
  CACHE_DIR=$base/job-$SLURM_JOB_ID
  # Not made here: on a node whose disk is not mounted it would be a directory of another disk.
  if [[ ! -d $LOCAL_DIR || ! -w $LOCAL_DIR ]]; then
    echo "$NODE: cluster.local_dir $LOCAL_DIR is missing or not writable; make it on every node," \
      "or set cluster.local_dir to a directory that every node has" >&2
    exit 1
  fi
  mkdir -p "$base"
  if [[ ! -O $base || -L $base ]]; then
    echo "$base is not a directory of this user; set cluster.local_dir" >&2
    exit 1
  fi
  chmod 700 "$base"
  # What jobs of last week left behind; one that trains for longer on this node holds its own.
  find "$base" -mindepth 1 -maxdepth 1 -name 'job-*' -mtime +7 -exec flock -n {} rm -rf {} \; || true
  mkdir -p "$CACHE_DIR/triton" "$CACHE_DIR/inductor"
  exec {HELD}<"$CACHE_DIR"
  flock -s "$HELD" || true
  export TRITON_CACHE_DIR=$CACHE_DIR/triton TORCHINDUCTOR_CACHE_DIR=$CACHE_DIR/inductor
}

# One process compiles what all ranks of the node need.
warm_caches() {
  if [[ $DEVICE == cpu ]]; then
    say "caches in $CACHE_DIR; a CPU run compiles nothing"
  elif [[ -e $CACHE_DIR/.warmed ]]; then
    say "caches in $CACHE_DIR are warm"
  else
    "$PYTHON" -m megatron_patch.launcher.warm --config "$CONFIG"
    : >"$CACHE_DIR/.warmed"
    say "caches in $CACHE_DIR warmed in $SECONDS s"
  fi
}

# The ranks are torchrun's children. They get USR1 from here: torchrun itself would end them after
# 30 s, whether they have saved or not, and must not see the signal at all.
signal_ranks() {
  local file line parent pid
  for file in /proc/[0-9]*/stat; do
    { read -r line <"$file"; } 2>/dev/null || continue # gone in the meantime
    read -r _ parent _ <<<"${line##*) }"               # PID (NAME) STATE PARENT ...
    if [[ $parent == "$AGENT" ]]; then
      pid=${file#/proc/}
      kill -USR1 "${pid%/stat}" 2>/dev/null || true
    fi
  done
}

train() {
  local stopping=0 status=0 nap agent
  prepare_caches
  trap 'stopping=1' TERM USR1
  warm_caches
  (
    trap '' TERM USR1
    agent=("$PYTHON" -m torch.distributed.run --nnodes="$SLURM_NNODES"
      --nproc-per-node="$RANKS_PER_NODE" --node-rank="$SLURM_NODEID" --rdzv-backend=static
      --rdzv-id="$SLURM_JOB_ID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"
      --max-restarts=0 --signals-to-handle=SIGINT)
    if [[ $RANK_AGENT == nvrx ]]; then
      # It knows c10d only and wants one --ft option; hangs are found by the ranks themselves.
      agent=("$PYTHON" -m nvidia_resiliency_ext.fault_tolerance.launcher --nnodes="$SLURM_NNODES"
        --nproc-per-node="$RANKS_PER_NODE" --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID"
        --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --max-restarts="$MAX_RESTARTS"
        --ft-workload-check-interval=5)
    fi
    exec setsid "${agent[@]}" -m megatron_patch.launcher.rank "$@"
  ) &
  AGENT=$!
  if [[ $SLURM_NODEID == 0 ]]; then
    # The job's log shows the first rank; the others have files of their own.
    tail -n +1 -s 1 -F --pid="$AGENT" "$ATTEMPT_DIR/rank_00000.log" 2>/dev/null &
  fi
  while kill -0 "$AGENT" 2>/dev/null; do
    if ((stopping)); then
      signal_ranks # again and again: a rank that has not installed its handler ignores it
    fi
    sleep 2 >/dev/null 2>&1 &
    nap=$!
    wait -n "$AGENT" "$nap" || true
    kill "$nap" 2>/dev/null || true
  done
  wait "$AGENT" || status=$?
  if [[ $SLURM_NODEID == 0 ]]; then
    wait # for tail to write the last lines
  fi
  return "$status"
}

case ${1:-} in
  train)
    shift
    train "$@"
    ;;
  preflight) "$PYTHON" -m megatron_patch preflight --config "$CONFIG" --node --out "$ATTEMPT_DIR" ;;
  compare)
    shift
    "$PYTHON" -m megatron_patch preflight --config "$CONFIG" --compare --out "$ATTEMPT_DIR" "$@"
    ;;
  *)
    echo "usage: node.sh train PROGRAM [ARG...] | preflight | compare [--expect NODE]..." >&2
    exit 2
    ;;
esac
