#!/usr/bin/env bash
# Create (or complete) the virtual environment: make_venv.sh DIR [PYTHON]
set -euo pipefail

venv=$1
wanted=${2:-}

usable() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${wanted:+"$wanted"} python3 python3.12 python3.13 python3.14; do
    if usable "$candidate"; then
      command -v "$candidate"
      return
    fi
    # An interpreter that was asked for is used or refused, never replaced.
    if [[ -n $wanted ]]; then
      break
    fi
  done
  echo "megatron_patch needs Python 3.12 or newer (megatron-core without its checkpoint-loading" \
    "CVEs does); found ${wanted:-python3} $(${wanted:-python3} -V 2>&1 | tail -n 1 || true)." \
    "Install python3.12 or pass PYTHON=/path/to/python3.12 to make." >&2
  return 2
}

if [[ ! -x $venv/bin/python ]]; then
  python=$(find_python)
  echo "creating $venv with $("$python" -V)"
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    echo "$python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2
    exit 2
  fi
fi
echo "installing pinned dependencies (several GB the first time, a minute from a warm cache)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  -c constraints.txt -e '.[dev]' 2> >(grep -v 'is ignored: it is neither' >&2)
