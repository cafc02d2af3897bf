#!/usr/bin/env bash
# Install what tests/slurm needs on Debian or Ubuntu: Slurm's daemons and commands, and munge.
# No service is started: the tests run their own daemons in a private folder.
#
# Exit code 0: Slurm is here. 69: this machine cannot have it, or could not run the tests with it
# (no root, no mount namespaces, no apt-get, no mirror with the packages); the last line says why.
# Anything else: installing was possible and went wrong.
#
# Limits in seconds: SLURM_FETCH_SECONDS for the download with its retries, SLURM_UNPACK_SECONDS for
# the installation of what was downloaded.
set -euo pipefail

fetch_seconds=${SLURM_FETCH_SECONDS:-600}
unpack_seconds=${SLURM_UNPACK_SECONDS:-300}
pause_seconds=${SLURM_RETRY_PAUSE_SECONDS:-5}
# Package scripts ask this file whether they may start services; 101 means no.
policy=${POLICY_RC_D:-/usr/sbin/policy-rc.d}
passed_on=http_proxy,https_proxy,no_proxy
passed_on+=,SLURM_FETCH_SECONDS,SLURM_UNPACK_SECONDS,SLURM_RETRY_PAUSE_SECONDS

packages=(slurm-wlm munge)
tools=(slurmctld slurmd munged sbatch scancel scontrol sinfo squeue srun)
options=(-qq -y -o Acquire::Retries=3 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20
  -o DPkg::Lock::Timeout=120)

# What apt-get says when a mirror does not answer, when another apt-get is at work, and when no
# mirror has a package.
unreachable='Failed to fetch|Unable to fetch|Temporary failure resolving|Could not connect'
busy='Could not get lock|Unable to acquire the dpkg frontend lock'
unknown='Unable to locate package|has no installation candidate'
# apt-get's messages are read below, so they have to be in English.
export LC_ALL=C DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1

cannot() {
  echo "cannot have Slurm here: $*" >&2
  exit 69
}

fail() {
  echo "installing Slurm went wrong: $*" >&2
  exit 1
}

need_root() {
  if [[ $(id -u) == 0 ]]; then
    return
  fi
  if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    exec sudo -n "--preserve-env=$passed_on" bash "$0"
  fi
  cannot "not root, and no sudo without a password; run: sudo $0"
}

missing_tools() {
  local tool
  for tool in "${tools[@]}"; do
    command -v "$tool" >/dev/null || printf '%s ' "$tool"
  done
}

# Seconds until the download's deadline; timeout takes 0 for no limit.
left() {
  local seconds=$((deadline - SECONDS))
  echo "$((seconds > 0 ? seconds : 1))"
}

# apt SECONDS ARGUMENTS...: in a log and not through a pipe, which a child that outlives the time
# limit would hold open. --foreground: Ctrl-C reaches apt-get too.
apt() {
  timeout --foreground --kill-after=30 "$1" apt-get "${options[@]}" "${@:2}" \
    </dev/null >>"$log" 2>&1
}

# Downloading is a step of its own: what fails here is the machine's network or mirrors, what fails
# later is the installation.
fetch() {
  local deadline=$((SECONDS + fetch_seconds)) attempt status updated why
  for attempt in 1 2 3; do
    : >"$log"
    updated=0 status=0
    apt "$(left)" update || updated=$?
    # One mirror of several may be gone: what counts is whether these packages can be had.
    apt "$(left)" install --download-only --no-install-recommends "${packages[@]}" || status=$?
    if ((status == 0)); then
      return
    fi
    if ((SECONDS >= deadline || attempt == 3)) || ! grep -qE "$unreachable|$busy" "$log"; then
      break
    fi
    echo "attempt $attempt of 3 to download ${packages[*]} failed; again in $pause_seconds s" >&2
    sleep "$pause_seconds"
  done
  tail -n 20 "$log" >&2
  why=$(grep -m 1 -E '^[EW]: ' "$log" || true)
  if ((SECONDS >= deadline)); then
    cannot "no packages after $fetch_seconds s (SLURM_FETCH_SECONDS)${why:+: $why}"
  elif grep -qE "$unreachable" "$log"; then
    cannot "package mirrors do not answer: $why"
  elif ((updated == 0)) && grep -qE "$unknown" "$log"; then
    cannot "this machine's package sources lack ${packages[*]} (Ubuntu: universe): $why"
  fi
  fail "apt-get could not download ${packages[*]} (exit code $status): ${why:-it said nothing}"
}

forbid_services() {
  if [[ -e $policy || -L $policy ]]; then
    echo "$policy is there and stays: it decides whether services start"
    return
  fi
  policy_is_ours=1
  # noclobber: never over a file that somebody else makes at this moment.
  (set -o noclobber && printf '#!/bin/sh\nexit 101\n' >"$policy") || {
    policy_is_ours=0
    fail "cannot write $policy, without which the packages would start services"
  }
  chmod 755 "$policy"
}

clean_up() {
  rm -f "$log"
  if ((policy_is_ours)); then
    rm -f "$policy"
  fi
}

need_root
# Asked before anything is installed: in a container without CAP_SYS_ADMIN nothing would come of it.
unshare --mount true 2>/dev/null ||
  cannot "no mount namespaces (unshare --mount), which the tests need"
if [[ -z $(missing_tools) ]]; then
  echo "Slurm and munge are here already; nothing to do"
  exit 0
fi
command -v apt-get >/dev/null ||
  cannot "no apt-get, and $(missing_tools)not found; install Slurm and munge as this system does it"

policy_is_ours=0
log=$(mktemp)
trap clean_up EXIT
# Told to stop, wait for apt-get's end: until then the policy has to stay.
trap 'exit 130' INT
trap 'exit 143' TERM
fetch
forbid_services
apt "$unpack_seconds" install --no-install-recommends "${packages[@]}" || {
  status=$?
  tail -n 40 "$log" >&2
  fail "apt-get install ended with exit code $status (124: after $unpack_seconds s)"
}
hash -r
left_out=$(missing_tools)
[[ -z $left_out ]] || fail "${packages[*]} are installed, and yet not found: $left_out"
slurmd -V
