# shellcheck shell=bash
# How a job ends or goes on: reports, budgets, the lock, requeue, chain. Sourced by lib.sh, which says
# what lives in $RUN_DIR/launch.
# shellcheck disable=SC2153,SC2154 # settings are of train.sbatch, the job's state is of lib.sh

# How long a controller that does not take the requeue is asked again: five minutes, longer than a
# restart of it or the switch to its backup takes. The nodes wait meanwhile.
readonly REQUEUE_TRIES=60 REQUEUE_PAUSE=5
# Seconds after which a lock without an owner has none because its writer is gone, not because it is
# being written.
readonly LOCK_PAUSE=2

# --- ends -----------------------------------------------------------------------------------------

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
  local report=$STATE_DIR/report.txt
  record "stopped-for-good code=$1"
  # A report that cannot be made must not change how the job ends.
  write_report "$2" >"$report" || say "warning: $report is not complete"
  cat "$report" || true
  end_job "$1" "stopped for good: $2"
}

write_report() {
  local complete=1
  say "job $JOB stopped for good: $1"
  echo
  echo "Last events:"
  tail -n 20 "$STATE_DIR/events.log" || complete=0
  print_failures || complete=0
  print_ledger || complete=0
  echo
  echo "When the cause is removed, 'megatron-patch launch' continues from the newest checkpoint."
  ((complete))
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

# A line that cannot be written must not change how the job ends ...
record() {
  count "$1" || say "warning: $STATE_DIR/events.log cannot be written: '$1' is missing in it"
}

# ... unless a budget counts it.
count() {
  printf '%(%FT%TZ)T job=%s restart=%s attempt=%s step=%s %s\n' -1 "$JOB" "$RESTART" "$ATTEMPT" \
    "$(last_step)" "$1" >>"$STATE_DIR/events.log"
}

count_or_end() {
  count "$1" || end_job 1 "not finished; $STATE_DIR/events.log, which limits how often the job goes on, \
cannot be written: make room, then 'megatron-patch launch' continues"
}

# --- one job at a time ----------------------------------------------------------------------------

take_lock() {
  local lock=$STATE_DIR/lock owner try
  for try in 1 2 3; do
    if claim "$lock"; then
      return # now, or in an earlier start of this job
    fi
    owner=$(owner_of "$lock") || continue # released in the meantime
    if [[ $owner == nobody ]]; then
      pause "$LOCK_PAUSE"
      owner=$(owner_of "$lock") || continue
    fi
    require_gone "$owner"
    if take_over "$lock" "$owner"; then
      return
    fi
    if [[ -e $lock ]]; then
      break
    fi
  done
  echo "another job took the run directory at the same moment; this job does not start" >&2
  exit 1
}

# Whether FILE, a lock, is this job's now. A link appears together with its content.
claim() {
  local file=$1 mine=$STATE_DIR/.lock.$JOB
  rm -f "$mine"
  if ! echo "$JOB" >"$mine"; then
    echo "cannot write into $STATE_DIR; this job does not start" >&2
    exit 1
  fi
  # noclobber is for file systems without links.
  ln "$mine" "$file" 2>/dev/null || (set -o noclobber && echo "$JOB" >"$file") 2>/dev/null || true
  rm -f "$mine"
  [[ $(owner_of "$file") == "$JOB" ]] # not ln's status: a repeated NFS request makes it wrong
}

# The job that a lock names, or "nobody"; false when there is no lock.
owner_of() {
  local owner
  { owner=$(<"$1"); } 2>/dev/null || return 1
  # Without a number squeue would list every job of the cluster.
  [[ $owner =~ ^[0-9]{1,18}$ ]] && echo "$owner" || echo nobody
}

require_gone() {
  local state
  if [[ $1 == nobody ]]; then
    say "the lock of the run directory names no job: taken for left behind"
    return
  fi
  if state=$(squeue --noheader --jobs="$1" --format=%T 2>&1); then
    if [[ -n $state ]]; then
      echo "job $1 ($state) has this run directory; this job does not start" >&2
      exit 1
    fi
  elif [[ $state != *"Invalid job id"* ]]; then
    echo "job $1 has this run directory, and squeue does not answer: $state" >&2
    exit 1
  fi
}

# take_over LOCK OWNER: two jobs can find the same dead owner, and one of them late. So nobody removes
# a lock: a dead job has one successor, whoever gets lock.after.<its number>, and only that one
# replaces the lock, if it still is the dead job's. A successor that died has a successor in turn.
take_over() {
  local lock=$1 dead=$2 claims=() new=$STATE_DIR/.lock.$JOB
  while ! claim "$lock.after.$dead"; do
    claims+=("$lock.after.$dead")
    dead=$(owner_of "$lock.after.$dead") || return 1
    require_gone "$dead"
    if ((${#claims[@]} == 20)); then
      echo "$lock.after.*: too many successors; remove them when no job of this run exists" >&2
      exit 1
    fi
  done
  claims+=("$lock.after.$dead")
  if [[ $(owner_of "$lock") != "$2" ]]; then
    rm -f "${claims[-1]}" # somebody was faster
    return 1
  fi
  say "taking over the run directory from job $2, which is gone"
  if ! echo "$JOB" >"$new" || ! mv -f "$new" "$lock"; then
    echo "cannot write into $STATE_DIR; this job does not start" >&2
    exit 1
  fi
  rm -f "${claims[@]}" # last: as long as the lock is the dead job's, they say who follows
}

release_lock() {
  if [[ -f $STATE_DIR/lock && $(<"$STATE_DIR/lock") == "$JOB" ]]; then
    rm -f "$STATE_DIR/lock"
  fi
}

# --- going on -------------------------------------------------------------------------------------

# continue_after_crash [WHAT]: continue_later within the budget of crashes.
continue_after_crash() {
  if (($(count_events requeue=crash) + $(count_events chain=crash) >= MAX_CRASH_REQUEUES)); then
    stop_for_good 1 "retry budget used up ($MAX_CRASH_REQUEUES requeues after crashes)${1:+; $1}"
  fi
  continue_later crash
}

# continue_later CAUSE: requeue, or leave it to the next job of the chain.
continue_later() {
  case $CONTINUATION in
    chain)
      count_or_end "chain=$1"
      exclude_bad_nodes
      if ((${SLURM_ARRAY_TASK_ID:-0} >= ${SLURM_ARRAY_TASK_MAX:-0})); then
        end_job 1 "not finished, and no task of the chain is left: 'megatron-patch launch' goes on"
      fi
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
  count_or_end "requeue=$1"
  say "not finished: requeueing job $SLURM_JOB_ID (cause: $1)"
  # Slurm may end this shell from here on; the exclusion is for a pending job only and comes last.
  trap '' TERM USR1
  requeue
  exclude_bad_nodes
  exit 0
}

# Ask until Slurm takes it. A job that was cancelled meanwhile is not asked for again: Slurm would
# bring it back.
requeue() {
  local try answer
  for ((try = 1; try <= REQUEUE_TRIES; try++)); do
    if answer=$(scontrol requeue "$SLURM_JOB_ID" 2>&1); then
      return
    fi
    say "scontrol requeue failed (try $try of $REQUEUE_TRIES, one every $REQUEUE_PAUSE s): $answer"
    if [[ $answer == *"disabled"* || $answer == *"denied"* || $answer == *"Invalid job id"* ]]; then
      break # this cluster's answer, also the next time
    fi
    pause "$REQUEUE_PAUSE"
    if being_ended; then
      # A request whose answer got lost looks like this as well.
      exclude_bad_nodes
      end_job 1 "Slurm has requeued the job or is ending it itself; not asked again"
    fi
  done
  record "requeue-failed"
  end_job 1 "scontrol requeue failed; submit again with 'megatron-patch launch'"
}

# Whether somebody else ends or has requeued this job: cancelled, most of all. A job that ran into
# its time limit while saving is ours. Slurm says RUNNING as long as nobody does.
being_ended() {
  local line
  line=$(scontrol show job --oneliner "$SLURM_JOB_ID" 2>/dev/null) || return 1
  ended_by_others "$line"
}

# ended_by_others LINE: being_ended, from what scontrol has said.
ended_by_others() {
  local line=$1
  [[ $line =~ JobState=(COMPLETING|CANCELLED|PENDING|REQUEUED) && $line != *Reason=TimeLimit* ]]
}

# BAD_NODES of excluded_nodes, which people edit: one empty name, and Slurm refuses the whole list.
read_bad_nodes() {
  local line file=$STATE_DIR/excluded_nodes
  BAD_NODES=()
  [[ -f $file ]] || return 0
  while read -r line; do
    if [[ $line =~ ^[A-Za-z0-9][][A-Za-z0-9._,-]*$ ]]; then
      BAD_NODES+=("$line")
    elif [[ -n $line ]]; then
      say "warning: $file: '$line' names no node and excludes none; write one name a line"
    fi
  done < <(sed -E 's/^[[:space:]]+|[[:space:]]+$//g' "$file" | sort -u)
}

# Add the nodes in FILE. An editor may have left the last line without its end.
add_bad_nodes() {
  local file=$STATE_DIR/excluded_nodes
  [[ ! -s $file || -z $(tail -c 1 "$file") ]] || echo >>"$file" || return 1
  cat "$1" >>"$file"
}

# For pending jobs: this one after its requeue, or the tasks of the chain that are left, one by one (of
# the whole array Slurm would refuse the running task).
exclude_bad_nodes() {
  local try nodes task job jobs=("$SLURM_JOB_ID") left
  [[ -e $STATE_DIR/excluded_nodes ]] || return 0
  read_bad_nodes
  # Also where no line is left: what an earlier requeue excluded is admitted again by that.
  nodes=$(join , ${EXCLUDED_NODES:+"$EXCLUDED_NODES"} ${BAD_NODES[@]+"${BAD_NODES[@]}"})
  if [[ $CONTINUATION == chain ]]; then
    jobs=()
    for ((task = ${SLURM_ARRAY_TASK_ID:-0} + 1; task <= ${SLURM_ARRAY_TASK_MAX:-0}; task++)); do
      jobs+=("${SLURM_ARRAY_JOB_ID}_$task")
    done
    if ((${#jobs[@]} == 0)); then
      say "no task of the chain is left to exclude ${nodes:-no node} from; the next submission does"
      return 0
    fi
  fi
  for try in 1 2 3 4 5 6 7 8; do
    left=()
    for job in "${jobs[@]}"; do
      scontrol update "JobId=$job" "ExcNodeList=$nodes" 2>/dev/null || left+=("$job")
    done
    if ((${#left[@]} == 0)); then
      say "excluded: ${nodes:-no node}"
      return 0
    fi
    jobs=("${left[@]}")
    sleep 1
  done
  say "could not exclude ${nodes:-no node} from ${jobs[*]}: $try tries; cluster.exclude_nodes does it" \
    "for the next submission"
}
