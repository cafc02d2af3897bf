# shellcheck shell=bash
# What train.sbatch is made of. Sourced; needs its settings. State lives in $RUN_DIR/launch:
#   events.log   one line an attempt and a decision; the budgets count its lines
#   lock         the job that owns the run directory
#   report.txt   why the run was stopped for good
#   excluded_nodes   nodes that failed a preflight
# shellcheck disable=SC2034,SC2153 # settings and results are shared with train.sbatch

# Settings of a stop, not of a fault: these exit codes come back on every retry (docs/clusters.md).
readonly EXIT_CONFIG=2 EXIT_NONFINITE=3 EXIT_NO_CHECKPOINT=4 EXIT_STABILITY=5
readonly EXIT_SPIKES=7 EXIT_SAME_STEP=8
# Ports of torchrun: below the kernel's ephemeral range (32768), ten to a job.
readonly PORT_BASE=15000 PORT_JOBS=1500 PORT_SLOTS=10

say() {
  printf '[%(%F %T)T] %s\n' -1 "$*"
}

# bash runs a command inside an array index when it calculates with a variable: numbers only.
require_numbers() {
  local name
  for name in "$@"; do
    if [[ -n ${!name:-} && ! ${!name} =~ ^[0-9]+$ ]]; then
      echo "$name is not a number: this is no environment that Slurm made" >&2
      exit 1
    fi
  done
}

start_job() {
  require_numbers SLURM_JOB_ID SLURM_NNODES SLURM_RESTART_COUNT SLURM_CPUS_PER_TASK \
    SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_ARRAY_TASK_MAX
  JOB=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
  RESTART=${SLURM_RESTART_COUNT:-0}
  ATTEMPT=0
  CRASHES=0
  STOPPING=0
  STEP_PID=
  STATE_DIR=$RUN_DIR/launch
  mkdir -p "$STATE_DIR" "$RUN_DIR/logs"
  RUN_DIR=$(cd "$RUN_DIR" && pwd)
  LAUNCH_DIR=$(cd "$LAUNCH_DIR" && pwd)
  STATE_DIR=$RUN_DIR/launch
  trap 'ask_to_stop USR1' USR1
  trap 'ask_to_stop TERM' TERM
  say "job $JOB${SLURM_ARRAY_TASK_ID:+ (array task $SLURM_ARRAY_TASK_ID)}, restart $RESTART," \
    "nodes ${SLURM_JOB_NODELIST:-?}, run directory $RUN_DIR"
  if [[ -n $SETUP_SCRIPT ]]; then
    # shellcheck source=/dev/null
    source "$SETUP_SCRIPT"
  fi
}

# --- ends -----------------------------------------------------------------------------------------

# The marker of a run with fewer steps than are wanted now is not the end.
finished() {
  local marker=$RUN_DIR/FINISHED text
  [[ -f $marker ]] || return 1
  text=$(<"$marker")
  if [[ $text =~ \"step\":\ *([0-9]+) ]]; then
    ((BASH_REMATCH[1] >= TRAIN_STEPS))
  fi
}

end_job() {
  say "$2; exit code $1"
  if [[ $CONTINUATION == chain && -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
    cancel_rest_of_chain
  fi
  release_lock
  exit "$1"
}

cancel_rest_of_chain() {
  local task rest=()
  for ((task = SLURM_ARRAY_TASK_ID + 1; task <= ${SLURM_ARRAY_TASK_MAX:-0}; task++)); do
    rest+=("${SLURM_ARRAY_JOB_ID}_$task")
  done
  if ((${#rest[@]})); then
    say "the chain ends here"
    scancel "${rest[@]}" || say "scancel failed: cancel the rest of the array by hand"
  fi
}

# stop_for_good CODE REASON: never again by itself; a person reads the report.
stop_for_good() {
  record "stopped-for-good code=$1"
  {
    say "job $JOB stopped for good: $2"
    echo
    echo "Last events:"
    tail -n 20 "$STATE_DIR/events.log"
    print_failures
    print_ledger
    echo
    echo "When the cause is removed, 'megatron-patch launch' continues from the newest checkpoint."
  } >"$STATE_DIR/report.txt"
  cat "$STATE_DIR/report.txt"
  end_job "$1" "stopped for good: $2"
}

# Count the lines of this job in the ledger that match.
count_events() {
  local file=$STATE_DIR/events.log
  [[ -f $file ]] || {
    echo 0
    return
  }
  awk -v job="job=$JOB" -v want="$1" '$2 == job && index($0 " ", " " want " ") { n++ } END { print n + 0 }' "$file"
}

record() {
  printf '%(%FT%TZ)T job=%s restart=%s attempt=%s step=%s %s\n' -1 "$JOB" "$RESTART" "$ATTEMPT" \
    "$(last_step)" "$1" >>"$STATE_DIR/events.log"
}

# --- one job at a time ----------------------------------------------------------------------------

take_lock() {
  local lock=$STATE_DIR/lock owner state try
  for try in 1 2; do
    # noclobber: created by us, or it was there (atomic on NFS too).
    if (set -o noclobber && echo "$JOB" >"$lock") 2>/dev/null; then
      if ((try == 2)); then
        pause 2 # two jobs can find the same dead owner; the last one to write has the lock
      fi
      if [[ $(<"$lock") == "$JOB" ]]; then
        return
      fi
      break
    fi
    owner=$(<"$lock") || continue
    if [[ $owner == "$JOB" ]]; then
      return # our own earlier start
    fi
    if state=$(squeue --noheader --jobs="$owner" --format=%T 2>&1); then
      if [[ -n $state ]]; then
        echo "job $owner ($state) has this run directory; this job does not start" >&2
        exit 1
      fi
    elif [[ $state != *"Invalid job id"* ]]; then
      echo "job $owner has this run directory, and squeue does not answer: $state" >&2
      exit 1
    fi
    say "taking over the run directory from job $owner, which is gone"
    rm -f "$lock"
  done
  echo "another job took the run directory at the same moment; this job does not start" >&2
  exit 1
}

release_lock() {
  if [[ -f $STATE_DIR/lock && $(<"$STATE_DIR/lock") == "$JOB" ]]; then
    rm -f "$STATE_DIR/lock"
  fi
}

# --- attempts -------------------------------------------------------------------------------------

find_nodes() {
  local hosts host
  EXPECT=()
  hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
  MASTER_ADDR=${hosts%%$'\n'*}
  for host in $hosts; do
    EXPECT+=(--expect "$host")
  done
  if [[ -f $STATE_DIR/excluded_nodes ]]; then
    for host in $hosts; do
      if grep -qxF -- "$host" "$STATE_DIR/excluded_nodes"; then
        say "note: $host failed an earlier preflight and is part of this job again"
      fi
    done
  fi
}

# A directory of logs and a port of its own for every srun step.
new_attempt() {
  ATTEMPT=$((ATTEMPT + 1))
  ATTEMPT_DIR=$RUN_DIR/logs/$SLURM_JOB_ID.$RESTART.$ATTEMPT
  if [[ $1 == preflight ]]; then
    ATTEMPT_DIR+=.preflight
  fi
  MASTER_PORT=$((PORT_BASE + SLURM_JOB_ID % PORT_JOBS * PORT_SLOTS + (RESTART + ATTEMPT - 1) % PORT_SLOTS))
  if [[ -e $ATTEMPT_DIR ]]; then
    # Slurm can start the same restart twice (node failure before the script ran on).
    mv "$ATTEMPT_DIR" "$ATTEMPT_DIR.before-$(date +%s)"
  fi
  mkdir -p "$ATTEMPT_DIR/exit"
}

# on_nodes ARG...: node.sh with ARG on every node (or as $STEP_OPTIONS say), signals kept apart.
on_nodes() {
  local names=(PATH HOME USER LOGNAME LANG LD_LIBRARY_PATH) options=() status=0
  export MASTER_ADDR MASTER_PORT ATTEMPT_DIR DEVICE RANKS_PER_NODE PYTHON LOCAL_DIR CONFIG
  export MEGATRON_PATCH_ATTEMPT_DIR=$ATTEMPT_DIR MEGATRON_PATCH_SECRETS_FILE=$SECRETS_FILE
  export MEGATRON_PATCH_HEARTBEAT=$ATTEMPT_DIR/step
  export TORCH_FR_DUMP_TEMP_FILE=$ATTEMPT_DIR/flight_recorder_
  export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
  if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # newer srun does not inherit it
  fi
  export RANK_AGENT MAX_RESTARTS MEGATRON_PATCH_SAME_STEP_LIMIT=$SAME_STEP_LIMIT
  names+=(MASTER_ADDR MASTER_PORT ATTEMPT_DIR DEVICE RANKS_PER_NODE PYTHON LOCAL_DIR CONFIG
    RANK_AGENT MAX_RESTARTS MEGATRON_PATCH_SAME_STEP_LIMIT
    MEGATRON_PATCH_ATTEMPT_DIR MEGATRON_PATCH_SECRETS_FILE MEGATRON_PATCH_HEARTBEAT
    TORCH_FR_DUMP_TEMP_FILE PYTHONUNBUFFERED PYTHONFAULTHANDLER
    ${SETTINGS_ENVIRONMENT[@]+"${SETTINGS_ENVIRONMENT[@]}"}
    ${PASS_ENVIRONMENT[@]+"${PASS_ENVIRONMENT[@]}"})
  if [[ -n $CONTAINER_IMAGE ]]; then
    options+=("--container-image=$CONTAINER_IMAGE" --no-container-mount-home
      "--container-mounts=$CONTAINER_MOUNTS" "--container-workdir=$PWD"
      # Without it, variables that the image sets as well keep the image's value.
      "--container-env=$(join , ${SETTINGS_ENVIRONMENT[@]+"${SETTINGS_ENVIRONMENT[@]}"})")
  fi
  # A session of its own: what Slurm sends to this shell's group must not reach srun, which would
  # answer TERM by killing the step before it has saved.
  setsid srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=60 --label \
    --export="$(join , "${names[@]}")" ${options[@]+"${options[@]}"} \
    ${STEP_OPTIONS[@]+"${STEP_OPTIONS[@]}"} bash "$LAUNCH_DIR/node.sh" "$@" &
  STEP_PID=$!
  if ((STOPPING)); then
    forward_stop # the signal came between the last step and this one
  fi
  while :; do
    status=0
    wait "$STEP_PID" || status=$?
    kill -0 "$STEP_PID" 2>/dev/null || break # else: a trap interrupted the wait
  done
  STEP_PID=
  STEP_STATUS=$status
}

join() {
  local IFS=$1
  shift
  printf '%s' "$*"
}

run_ranks() {
  STEP_OPTIONS=()
  say "attempt $ATTEMPT: $SLURM_NNODES node(s) x $RANKS_PER_NODE rank(s), rendezvous" \
    "$MASTER_ADDR:$MASTER_PORT, logs $ATTEMPT_DIR"
  record start
  if ((STOPPING)); then
    STEP_STATUS=0
    return
  fi
  on_nodes train "${PROGRAM[@]}"
}

ask_to_stop() {
  if ((STOPPING == 0)); then
    say "got $1: asking the ranks to save and stop"
  fi
  STOPPING=1
  forward_stop
}

forward_stop() {
  if [[ -n $STEP_PID ]]; then
    kill -USR1 "$STEP_PID" 2>/dev/null || true # srun passes it on to its tasks
  fi
}

# --- what happened --------------------------------------------------------------------------------

# The step the first rank has begun last; -1 before the first.
last_step() {
  local step=
  if [[ -s ${ATTEMPT_DIR:-}/step ]]; then
    read -r step <"$ATTEMPT_DIR/step" || true
  fi
  [[ $step =~ ^[0-9]+$ ]] && echo "$step" || echo -1
}

# OUTCOME of the attempt: finished, fatal (FATAL_CODE, FATAL_REASON), stopped or crash.
classify() {
  local file code rest stopped=0 known=0
  OUTCOME=crash FATAL_CODE='' FATAL_REASON=''
  for file in "$ATTEMPT_DIR"/exit/[0-9]*; do
    [[ -f $file && $file != *.tmp ]] || continue
    read -r code _ rest <"$file" || true
    known=$((known + 1))
    case $code in
      "$EXIT_CONFIG" | "$EXIT_NONFINITE" | "$EXIT_NO_CHECKPOINT" | "$EXIT_STABILITY" | \
        "$EXIT_SPIKES" | "$EXIT_SAME_STEP")
        FATAL_CODE=${FATAL_CODE:-$code}
        ;;
      0) stopped=$((stopped + 1)) ;;
    esac
  done
  if finished; then
    OUTCOME=finished
  elif [[ -n $FATAL_CODE ]]; then
    OUTCOME=fatal
    FATAL_REASON=$(meaning "$FATAL_CODE")
  elif ((STOPPING)); then
    OUTCOME=stopped
  elif ((stopped == SLURM_NNODES * RANKS_PER_NODE)) && [[ $(last_step) != -1 ]]; then
    OUTCOME=stopped # by preemption, of which this shell hears nothing, or by a limit of its own
  fi
  say "attempt $ATTEMPT: $OUTCOME after step $(last_step) (srun $STEP_STATUS, $known of" \
    "$((SLURM_NNODES * RANKS_PER_NODE)) ranks left an exit code, $stopped of them 0)"
}

meaning() {
  case $1 in
    "$EXIT_CONFIG") echo "configuration or data error (exit code 2); a retry meets it again" ;;
    "$EXIT_NONFINITE") echo "non-finite loss or gradient (exit code 3); a retry meets it again" ;;
    "$EXIT_NO_CHECKPOINT") echo "no good checkpoint where one is required (exit code 4)" ;;
    "$EXIT_STABILITY") echo "stopped by stability.guard after a checkpoint (exit code 5)" ;;
    "$EXIT_SPIKES") echo "loss spikes, and faults.spike.max_rewinds are used up (exit code 7)" ;;
    "$EXIT_SAME_STEP") echo "the same step crashed every attempt (exit code 8)" ;;
  esac
}

# Ranks that ended with an error, the first one first, with the end of its log.
print_failures() {
  local lines first log file rank silent=()
  for ((rank = 0; rank < SLURM_NNODES * RANKS_PER_NODE; rank++)); do
    printf -v file '%s/exit/%05d' "$ATTEMPT_DIR" "$rank"
    if [[ ! -f $file ]]; then
      silent+=("$rank")
    fi
  done
  lines=$(for file in "$ATTEMPT_DIR"/exit/[0-9]*; do
    [[ -f $file && $file != *.tmp ]] || continue
    read -r code when reason <"$file" || true
    if [[ $code != 0 ]]; then
      printf '%s %s %s %s\n' "$when" "${file##*/}" "$code" "$reason"
    fi
  done | sort -n | head -n 8)
  echo
  if ((${#silent[@]} == SLURM_NNODES * RANKS_PER_NODE)); then
    echo "No rank left an exit code: killed from outside, or Python did not start."
  elif ((${#silent[@]})); then
    echo "Ranks that were killed (they left no exit code; look here first): ${silent[*]:0:32}"
  fi
  if [[ -z $lines ]]; then
    return
  fi
  echo "Ranks that ended with an error, the first one first (time, rank, exit code, reason):"
  echo "$lines"
  read -r _ first _ <<<"$lines"
  if ((${#silent[@]})); then
    printf -v first '%05d' "${silent[0]}"
  fi
  log=$ATTEMPT_DIR/rank_$first.log
  if [[ -f $log ]]; then
    echo
    echo "End of $log:"
    tail -n 20 "$log"
  fi
}

# Ranks that were killed could not write into the crash ledger themselves.
note_killed() {
  local rank file noted=0
  for ((rank = 0; rank < SLURM_NNODES * RANKS_PER_NODE && noted < 16; rank++)); do
    printf -v file '%s/exit/%05d' "$ATTEMPT_DIR" "$rank"
    if [[ ! -f $file ]]; then
      noted=$((noted + 1))
      printf '{"utc": "%(%FT%TZ)T", "job": "%s", "attempt": "%s.0", "step": %s, "phase": "?", ' \
        -1 "$JOB" "${ATTEMPT_DIR##*/}" "$(last_step)" >>"$RUN_DIR/crashes.jsonl"
      printf '"rank": %s, "host": "?", "exit_code": null, "error": "%s", "traceback": ""}\n' \
        "$rank" "killed: it left no exit code" >>"$RUN_DIR/crashes.jsonl"
    fi
  done
}

# The ledger's last lines, without their tracebacks.
print_ledger() {
  local file=$RUN_DIR/crashes.jsonl
  if [[ -s $file ]]; then
    echo
    echo "Crash ledger ($file, with tracebacks), last lines:"
    tail -n 12 "$file" | sed 's/, "traceback": .*/}/'
  fi
}

after_crash() {
  local step same
  CRASHES=$((CRASHES + 1))
  step=$(last_step)
  note_killed
  print_failures
  same=$(awk -v job="job=$JOB" -v step="step=$step" \
    '$2 == job && $NF == "crash" { if ($5 == step) n++; else n = 0 }
     $2 == job && $NF == "stopped" { n = 0 }
     END { print n + 0 }' "$STATE_DIR/events.log")
  if ((same >= SAME_STEP_LIMIT)); then
    stop_for_good 1 "$same crashes in a row at step $step"
  fi
  # nvrx has used up its restarts before the step ends.
  if [[ $RANK_AGENT == torchrun ]] && ((CRASHES <= MAX_RESTARTS)); then
    say "restart $CRASHES of $MAX_RESTARTS inside this allocation"
    pause "$RESTART_PAUSE"
    return
  fi
  if (($(count_events requeue=crash) >= MAX_CRASH_REQUEUES)); then
    stop_for_good 1 "retry budget used up ($MAX_CRASH_REQUEUES requeues after crashes)"
  fi
  continue_later crash
}

# A sleep that signals end.
pause() {
  local pid
  sleep "$1" &
  pid=$!
  wait "$pid" || true
  kill "$pid" 2>/dev/null || true
}

# continue_later CAUSE: requeue, or leave it to the next job of the chain.
continue_later() {
  case $CONTINUATION in
    chain)
      record "chain=$1"
      say "not finished; the next task of the array goes on"
      release_lock
      exit 0
      ;;
    requeue) ;;
    *) end_job 1 "not finished, and cluster.continuation is none" ;;
  esac
  if being_ended; then
    end_job 1 "not finished; Slurm is ending the job itself (cancelled?), so it is not requeued here"
  fi
  if (($(count_events requeue=stop) + $(count_events requeue=crash) >= MAX_REQUEUES)); then
    stop_for_good 1 "retry budget used up ($MAX_REQUEUES requeues)"
  fi
  record "requeue=$1"
  say "not finished: requeueing job $SLURM_JOB_ID (cause: $1)"
  # Slurm may end this shell from here on; the exclusion is for a pending job only and comes last.
  trap '' TERM USR1
  if ! scontrol requeue "$SLURM_JOB_ID"; then
    record "requeue-failed"
    end_job 1 "scontrol requeue failed; submit again with 'megatron-patch launch'"
  fi
  exclude_bad_nodes
  exit 0
}

# Whether somebody else ends or has requeued this job: cancelled, most of all. A job that ran into
# its time limit while saving is ours. Slurm says RUNNING as long as nobody does.
being_ended() {
  local line
  line=$(scontrol show job --oneliner "$SLURM_JOB_ID" 2>/dev/null) || return 1
  [[ $line =~ JobState=(COMPLETING|CANCELLED|PENDING|REQUEUED) && $line != *Reason=TimeLimit* ]]
}

exclude_bad_nodes() {
  local try nodes
  [[ -s $STATE_DIR/excluded_nodes ]] || return 0
  nodes=$(sort -u "$STATE_DIR/excluded_nodes" | paste -sd, -)
  for try in 1 2 3 4 5 6 7 8; do
    if scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=${EXCLUDED_NODES:+$EXCLUDED_NODES,}$nodes" 2>/dev/null; then
      say "excluded: $nodes"
      return 0
    fi
    sleep 1
  done
  say "could not exclude $nodes: $try tries; cluster.exclude_nodes does it for the next submission"
}

# --- preflight ------------------------------------------------------------------------------------

preflight() {
  local bad
  say "preflight, results in $ATTEMPT_DIR"
  STEP_OPTIONS=()
  on_nodes preflight # a node that cannot even answer is missing in the comparison
  if [[ $DEVICE == cuda && $PREFLIGHT_COMMUNICATION == 1 ]] && ((STOPPING == 0)); then
    on_nodes train megatron_patch.launcher.probe --out "$ATTEMPT_DIR"
  fi
  STEP_OPTIONS=(--nodes=1 --ntasks=1)
  on_nodes compare "${EXPECT[@]}"
  if ((STOPPING)); then
    record stopped
    continue_later stop
  fi
  if ((STEP_STATUS == 0)); then
    return
  fi
  record preflight-failed
  if [[ ! -s $ATTEMPT_DIR/bad_nodes ]]; then
    stop_for_good 1 "the preflight failed on no node in particular; its table is above"
  fi
  bad=$(paste -sd' ' "$ATTEMPT_DIR/bad_nodes")
  cat "$ATTEMPT_DIR/bad_nodes" >>"$STATE_DIR/excluded_nodes"
  say "bad node(s): $bad"
  if (($(count_events requeue=crash) >= MAX_CRASH_REQUEUES)); then
    stop_for_good 1 "retry budget used up ($MAX_CRASH_REQUEUES requeues); bad node(s): $bad"
  fi
  continue_later crash
}
