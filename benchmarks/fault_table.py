"""Inject every kind of fault into real runs of the trainer, and write down what became of them.

    python benchmarks/fault_table.py --state DIR            # all; goes on where it was stopped
    python benchmarks/fault_table.py --state DIR --only 'kill -9' --redo
    python benchmarks/fault_table.py --list

Each case breaks a run of 2 to 4 gloo ranks (8 steps, a checkpoint every 3), looks for what a user
is told, for orphans and leaked shared memory, repairs what a person would repair, gives the same
command again, and compares weights, optimizer state, random streams, metrics and the data of every
step with an unbroken run, bit by bit. Results go to docs/results/fault_table.json.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fault_lab import cases_processes, cases_scripts, cases_setup, cases_storage, lab
from fault_lab.case import Case, run_case
from machine import commit, write_result

CASES: list[Case] = [
    *cases_processes.CASES,
    *cases_storage.CASES,
    *cases_setup.CASES,
    *cases_scripts.CASES,
]
STATES = ("ok", "unseen", "failed", "skipped")
LIMIT = 300.0  # seconds a case may take in all


def select(patterns: list[str] | None) -> list[Case]:
    """Cases whose name or group holds one of the texts (shell patterns, anywhere)."""
    assert len({c.name for c in CASES}) == len(CASES), "two cases have one name"
    if not patterns:
        return CASES
    wanted = [f"*{p.lower()}*" for p in patterns]
    return [
        c
        for c in CASES
        if any(fnmatch.fnmatch(f"{c.group}: {c.name}".lower(), want) for want in wanted)
    ]


def slug(text: str) -> str:
    """A name for files."""
    words = "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")
    return f"{words[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def reference(state: Path, case: Case, mounts: bool) -> dict[str, Any]:
    """The run that nothing happens to, with the ranks and settings of a case; made once."""
    key = slug(f"{case.ranks} {' '.join(case.sets)}")
    file = state / "unbroken" / f"{key}.json"
    if not file.exists():
        made = lab.Lab(state / "unbroken" / key, mounts=mounts, ranks=case.ranks)
        outcome = made.run(*case.sets)
        assert outcome.code == 0, outcome.output
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(made.result()))
        os.replace(temporary, file)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def play(state: Path, case: Case, *, isolated: bool = True) -> dict[str, Any]:
    """One case in a process of its own, which adopts whatever the case leaves behind."""
    row = state / "rows" / f"{slug(case.name)}.json"
    row.parent.mkdir(parents=True, exist_ok=True)
    (state / "unbroken").mkdir(exist_ok=True)
    began = time.time()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGALRM, lambda *a: _give_up())
            signal.setitimer(signal.ITIMER_REAL, lab.SLACK * LIMIT)
            mounts = lab.isolate() and isolated
            expected = reference(state, case, mounts)
            found = run_case(case, state / "cases" / slug(case.name), expected, mounts=mounts)
        except BaseException:
            found = {"name": case.name, "group": case.group, "status": "failed", "note": case.note,
                     "after": case.after, "problems": [traceback.format_exc()[-3000:]]}  # fmt: skip
        lab.kill_all()
        found["took"] = round(time.time() - began, 1)
        found["commit"] = commit()[:12]
        row.write_text(json.dumps(found, indent=1))
        os._exit(0)
    os.waitpid(pid, 0)
    result: dict[str, Any] = json.loads(row.read_text())
    return result


def _give_up() -> None:
    lab.kill_all()
    raise TimeoutError(f"the case took longer than {LIMIT:.0f} s")


def rows(state: Path) -> list[dict[str, Any]]:
    """The rows there are, in the order of the cases."""
    files = [(c, state / "rows" / f"{slug(c.name)}.json") for c in CASES]
    return [json.loads(f.read_text()) for _, f in files if f.exists()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, help="folder that survives restarts")
    parser.add_argument(
        "--only", action="append", help="cases whose name or group holds this text; repeatable"
    )
    parser.add_argument("--redo", action="store_true", help="play cases again that have a row")
    parser.add_argument("--redo-failed", action="store_true", help="play failed cases again")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    options = parser.parse_args()
    chosen = select(options.only)
    if options.list or options.state is None:
        print(*(f"{c.group}: {c.name}" for c in chosen), f"{len(chosen)} cases", sep="\n")
        return 0
    state = options.state.resolve()
    lab.preimport()
    done = {r["name"]: r["status"] for r in rows(state)}
    if options.redo:
        done = {}
    todo = [c for c in chosen if c.name not in done
            or (options.redo_failed and done[c.name] == "failed")]  # fmt: skip
    begin = time.time()
    for number, case in enumerate(todo, 1):
        row = play(state, case)
        left = (time.time() - begin) / number * (len(todo) - number)
        print(f"[{number}/{len(todo)}, left {left:4.0f} s] {row['status']:8}{case.name} "
              f"({row['took']} s){''.join(chr(10) + '    ' + p for p in row['problems'])}",
              flush=True)  # fmt: skip
    found = rows(state)
    counts = {s: sum(r["status"] == s for r in found) for s in STATES}
    print(f"{len(found)} of {len(CASES)} cases played: {counts}")
    if len(found) == len(CASES):
        table = [{k: v for k, v in r.items() if k != "output"} for r in found]
        path = write_result("fault_table", {"cases": table, "counts": counts,
                            "interval": lab.INTERVAL, "steps": lab.STEPS}, options.out)  # fmt: skip
        print(f"wrote {path.name}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
