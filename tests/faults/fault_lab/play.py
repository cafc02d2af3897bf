"""Plays cases in a process without threads, so that ranks can be forked from it.

    python -m fault_lab.play FOLDER

Reads the name of a case a line, answers with a line of JSON: its problems, or null where it cannot
be played. Each case has a process of its own, which adopts whatever the case leaves behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from fault_lab import canaries, lab, processes, surroundings
from fault_lab.case import Case, run_case

CASES = [*processes.CASES, *surroundings.CASES, *canaries.CASES]
LIMIT = 300.0
"""Seconds that a case may take in all."""


def slug(text: str) -> str:
    """A name for files."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def unbroken(folder: Path, case: Case, mounts: bool) -> dict[str, Any]:
    """The run that nothing happens to, with the ranks and settings of a case; made once."""
    key = slug(f"{case.ranks} {' '.join(case.sets)}")
    file = folder / f"unbroken-{key}.json"
    if not file.exists():
        made = lab.Lab(folder / f"unbroken-{key}", mounts=mounts, ranks=case.ranks)
        outcome = made.run(*case.sets)
        assert outcome.code == 0, outcome.output
        file.write_text(json.dumps(made.result()))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def give_up(*_: object) -> None:
    lab.kill_all()
    raise TimeoutError(f"the case took longer than {LIMIT:.0f} s")


def play(folder: Path, case: Case) -> list[str] | None:
    """The problems of one case; None where mounting is needed and not permitted."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        found: list[str] | None
        try:
            os.setsid()
            signal.signal(signal.SIGALRM, give_up)
            signal.setitimer(signal.ITIMER_REAL, lab.SLACK * LIMIT)
            mounts = lab.isolate()
            if case.needs_mount and not mounts:
                found = None
            else:
                expected = unbroken(folder, case, mounts)
                found = run_case(case, folder / slug(case.name), expected, mounts=mounts)
        except BaseException:
            found = [traceback.format_exc()[-3000:]]
        lab.kill_all()
        answer.write_text(json.dumps(found))
        os._exit(0)
    os.waitpid(pid, 0)
    problems: list[str] | None = json.loads(answer.read_text())
    return problems


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    cases = {case.name: case for case in CASES}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints is not an answer
    lab.preimport()
    for line in sys.stdin:
        answers.write(json.dumps(play(folder, cases[line.strip()])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
