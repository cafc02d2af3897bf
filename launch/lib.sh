# shellcheck shell=bash
# What train.sbatch is made of. Sourced; needs its settings. State lives in $RUN_DIR/launch:
#   events.log   one line an attempt and a decision; the budgets count its lines
#   lock         the job that owns the run directory; lock.after.N: who takes it over from dead job N
#   report.txt   why the run was stopped for good
#   excluded_nodes   nodes that failed a preflight
# shellcheck disable=SC2034,SC2153 # settings and results are shared with train.sbatch

# Settings of a stop, not of a fault: these exit codes come back on every retry (docs/clusters.md).
readonly EXIT_CONFIG=2 EXIT_NONFINITE=3 EXIT_NO_CHECKPOINT=4 EXIT_STABILITY=5
readonly EXIT_SPIKES=7 EXIT_SAME_STEP=8
# Ports of torchrun: below the kernel's ephemeral range (32768), ten to a job.
readonly PORT_BASE=15000 PORT_JOBS=1500 PORT_SLOTS=10
# Seconds a step goes on after Slurm's TERM at the time limit, then it is killed. Slurm kills this
# shell too, after KillWait (30 s by default); what is left of it is for the requeue.
readonly TERM_SECONDS=10
# Seconds that nodes have once the first has ended (srun's --wait). Ranks end together. Reports do
# not: a node may still import the container or load packages from a cold disk, and this must not
# make it a bad one. The preflight has no limit of its own, so this also ends a node that hangs.
readonly STEP_WAIT=60 PREFLIGHT_WAIT=900

# shellcheck source=launch/requeue.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/requeue.sh"

# The log may lie on a disk that is full: what it cannot take must not end the job, least of all while
# the ranks are being asked to save.
say() {
  printf '[%(%F %T)T] %s\n' -1 "$*" || true
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
  KILL_AT=0 # $SECONDS at which a step that does not end is overdue; 0: never
  TOLD_TWICE=0
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
    SETTING_UP=1
    trap 'end_setup $?' EXIT
    set +u # what modules and conda ship reads variables that nobody has set
    # shellcheck source=/dev/null
    source "$SETUP_SCRIPT"
    set -euo pipefail # also where the script has left other options
    SETTING_UP=0
  fi
}

# The shell ends in the middle of the setup script: by its exit, or by a command that failed.
end_setup() {
  if ((SETTING_UP)); then
    say "cluster.setup_script $SETUP_SCRIPT ended this job (exit code $1, at: $BASH_COMMAND): it is" \
      "read by this shell, so leave exit out, and write COMMAND || true where COMMAND may fail"
    exit $(($1 ? $1 : 1))
  fi
}

# --- attempts -------------------------------------------------------------------------------------

find_nodes() {
  local hosts host bad
  EXPECT=()
  hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
  MASTER_ADDR=${hosts%%$'\n'*}
  for host in $hosts; do
    EXPECT+=(--expect "$host")
  done
  read_bad_nodes
  for host in $hosts; do
    for bad in ${BAD_NODES[@]+"${BAD_NODES[@]}"}; do
      if [[ $host == "$bad" ]]; then
        say "note: $host failed an earlier preflight and is part of this job again"
      fi
    done
  done
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
  mkdir -p "$ATTEMPT_DIR/exit" || end_job 1 "not finished: $ATTEMPT_DIR cannot be made"
}

# on_nodes ARG...: node.sh with ARG on every node (or as $STEP_OPTIONS say), signals kept apart.
on_nodes() {
  local names=(PATH HOME USER LOGNAME LANG LD_LIBRARY_PATH) options=()
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
  setsid srun --ntasks-per-node=1 --kill-on-bad-exit=1 \
    --wait="${NODES_WAIT:-$STEP_WAIT}" --label \
    --export="$(join , "${names[@]}")" ${options[@]+"${options[@]}"} \
    ${STEP_OPTIONS[@]+"${STEP_OPTIONS[@]}"} bash "$LAUNCH_DIR/node.sh" "$@" &
  STEP_PID=$!
  if ((STOPPING)); then
    forward_stop # the signal came between the last step and this one
  fi
  await_step
}

await_step() {
  while :; do
    STEP_STATUS=0
    if ((KILL_AT)); then
      pause 1
      if overdue; then
        # Not waited for: srun may hang as the ranks do. The requeue ends what runs on the nodes.
        kill -KILL -- "-$STEP_PID" 2>/dev/null || kill -KILL "$STEP_PID" 2>/dev/null || true
        STEP_STATUS=137
        break
      elif kill -0 "$STEP_PID" 2>/dev/null; then
        continue
      fi
    fi
    wait "$STEP_PID" || STEP_STATUS=$?
    kill -0 "$STEP_PID" 2>/dev/null || break # else: a trap interrupted the wait
  done
  STEP_PID=
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
  if [[ $1 == TERM ]] && ((KILL_AT == 0)); then
    TOLD_TWICE=$STOPPING
    KILL_AT=$((SECONDS + TERM_SECONDS))
  fi
  STOPPING=1
  forward_stop
}

# Whether the step must be killed for the job to be requeued. A cancelled job is not: its ranks may
# save until Slurm kills them. Neither is the first TERM of somebody who asks the job to stop.
overdue() {
  local line
  if ((SECONDS < KILL_AT)); then
    return 1
  fi
  KILL_AT=0 # until the next TERM
  if [[ $CONTINUATION != requeue ]]; then
    return 1
  fi
  line=$(timeout 5 scontrol show job --oneliner "$SLURM_JOB_ID" 2>/dev/null) || line=
  if [[ $line != *Reason=TimeLimit* ]] && { ((TOLD_TWICE == 0)) || ended_by_others "$line"; }; then
    return 1
  fi
  say "the ranks have not ended $TERM_SECONDS s after TERM and are killed, so that the job can be" \
    "requeued; cluster.stop_lead_seconds must cover a step, a checkpoint and an evaluation"
}

forward_stop() {
  if [[ -n $STEP_PID ]]; then
    kill -USR1 "$STEP_PID" 2>/dev/null || true # srun passes it on to its tasks
  fi
}

# --- what happened --------------------------------------------------------------------------------

# The marker of a run with fewer steps than are wanted now is not the end.
finished() {
  local marker=$RUN_DIR/FINISHED text
  [[ -f $marker ]] || return 1
  text=$(<"$marker")
  # Without a step it is no marker of ours: the ranks say what it is.
  [[ $text =~ \"step\":\ *([0-9]+) ]] && ((BASH_REMATCH[1] >= TRAIN_STEPS))
}

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

# Ranks without an exit code: KILLED, and WAITING where TERM had come before. torchrun sends it to the
# others when a rank has died; one that waits for it inside a collective cannot answer, and is killed
# 30 s later. Where TERM had reached all of them, nobody can tell them apart.
sort_silent() {
  local rank name
  KILLED=() WAITING=()
  for ((rank = 0; rank < SLURM_NNODES * RANKS_PER_NODE; rank++)); do
    printf -v name '%05d' "$rank"
    if [[ -f $ATTEMPT_DIR/exit/$name ]]; then
      continue
    elif [[ -f $ATTEMPT_DIR/asked/$name ]]; then
      WAITING+=("$rank")
    else
      KILLED+=("$rank")
    fi
  done
  if ((${#KILLED[@]} == 0)); then
    KILLED=("${WAITING[@]}") WAITING=()
  fi
}

# Ranks that ended with an error, the first one first, with the end of its log.
print_failures() {
  local lines first='' log file
  sort_silent
  lines=$(for file in "$ATTEMPT_DIR"/exit/[0-9]*; do
    [[ -f $file && $file != *.tmp ]] || continue
    read -r code when reason <"$file" || true
    if [[ $code != 0 ]]; then
      printf '%s %s %s %s\n' "$when" "${file##*/}" "$code" "$reason"
    fi
  done | sort -n | sed -n 1,8p) # not head: what it leaves unread would end sort, and with it this job
  echo
  if ((${#KILLED[@]} == SLURM_NNODES * RANKS_PER_NODE)); then
    echo "No rank left an exit code: killed from outside, or Python did not start."
  elif ((${#KILLED[@]})); then
    echo "Ranks that were killed (they left no exit code; look here first): ${KILLED[*]:0:32}"
  fi
  if ((${#WAITING[@]})); then
    echo "Ranks that waited for others until they were ended: ${WAITING[*]:0:32}"
  fi
  if [[ -n $lines ]]; then
    echo "Ranks that ended with an error, the first one first (time, rank, exit code, reason):"
    echo "$lines"
    read -r _ first _ <<<"$lines"
  fi
  if ((${#KILLED[@]})); then
    printf -v first '%05d' "${KILLED[0]}"
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
  local rank ledger=$RUN_DIR/crashes.jsonl
  sort_silent
  # One of them may have been killed in the middle of its own line.
  [[ ! -s $ledger || -z $(tail -c 1 "$ledger") ]] || echo >>"$ledger" || return 1
  for rank in "${KILLED[@]:0:16}"; do
    printf '{"utc": "%(%FT%TZ)T", "job": "%s", "attempt": "%s.0", "step": %s, "phase": "?", ' \
      -1 "$JOB" "${ATTEMPT_DIR##*/}" "$(last_step)" >>"$ledger" || return 1
    printf '"rank": %s, "host": "?", "exit_code": null, "error": "%s", "traceback": ""}\n' \
      "$rank" "killed: it left no exit code" >>"$ledger" || return 1
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
  # What cannot be told must not decide what happens next.
  note_killed || say "warning: could not write into the crash ledger"
  print_failures || say "warning: could not read what the ranks left in $ATTEMPT_DIR"
  same=$(awk -v job="job=$JOB" -v step="step=$step" \
    '$2 == job && $NF == "crash" { if ($5 == step) n++; else n = 0 }
     $2 == job && $NF == "stopped" { n = 0 }
     END { print n + 0 }' "$STATE_DIR/events.log") || same=0
  if ((same >= SAME_STEP_LIMIT)); then
    stop_for_good 1 "$same crashes in a row at step $step"
  fi
  # nvrx has used up its restarts before the step ends.
  if [[ $RANK_AGENT == torchrun ]] && ((CRASHES <= MAX_RESTARTS)); then
    say "restart $CRASHES of $MAX_RESTARTS inside this allocation"
    pause "$RESTART_PAUSE"
    return
  fi
  continue_after_crash
}

# A sleep that signals end.
pause() {
  local pid
  sleep "$1" &
  pid=$!
  wait "$pid" || true
  kill "$pid" 2>/dev/null || true
}

# --- preflight ------------------------------------------------------------------------------------

preflight() {
  local bad try
  for try in 1 2; do
    ask_nodes
    if ((STOPPING)); then
      record stopped
      continue_later stop
    fi
    if ((STEP_STATUS == 0)); then
      return
    fi
    record preflight-failed
    if [[ -s $ATTEMPT_DIR/bad_nodes ]]; then
      bad=$(paste -sd' ' "$ATTEMPT_DIR/bad_nodes")
      add_bad_nodes "$ATTEMPT_DIR/bad_nodes" || say "warning: cannot write excluded_nodes"
      say "bad node(s): $bad"
      continue_after_crash "bad node(s): $bad"
    fi
    if [[ -e $ATTEMPT_DIR/every_node_failed ]]; then
      stop_for_good 1 "every node failed the preflight, and would again; its table is above"
    fi
    if ((try == 1)); then
      # A port that was taken, a link that came back: nothing that a person could look for.
      say "the preflight failed on no node in particular: once more, on another port"
      pause "$RESTART_PAUSE"
      new_attempt preflight
    fi
  done
  continue_after_crash "the preflight failed twice on no node in particular; its tables are above"
}

# Every node's report and the collectives into $ATTEMPT_DIR; STEP_STATUS of their comparison.
ask_nodes() {
  say "preflight, results in $ATTEMPT_DIR"
  STEP_OPTIONS=()
  if ((STOPPING == 0)); then
    NODES_WAIT=$PREFLIGHT_WAIT
    on_nodes preflight # a node that cannot even answer is missing in the comparison
    NODES_WAIT=
  fi
  if [[ $DEVICE == cuda && $PREFLIGHT_COMMUNICATION == 1 ]] && ((STOPPING == 0)); then
    on_nodes train megatron_patch.launcher.probe --out "$ATTEMPT_DIR"
  fi
  if ((STOPPING == 0)); then
    STEP_OPTIONS=(--nodes=1 --ntasks=1)
    on_nodes compare "${EXPECT[@]}"
  fi
}
