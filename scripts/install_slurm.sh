#!/usr/bin/env bash
# Install what tests/slurm needs on Debian or Ubuntu: Slurm's daemons and munge. Needs root.
# No service is started: the tests run their own daemons in a private folder.
set -euo pipefail

if [[ $(id -u) != 0 ]]; then
  echo "run as root: sudo $0" >&2
  exit 2
fi
missing=()
for tool in slurmctld slurmd munged; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
if ((${#missing[@]} == 0)); then
  echo "Slurm and munge are here already"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# Package scripts ask this file whether they may start services; 101 means no.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
  trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurm-wlm munge
slurmd -V
