"""How a bug is planted into a copy of the package, and what a child process finds on it.

A bug replaces text of a file of the package (never of a stand-in) in a copy, which a child process
imports and runs against members of the suite (suite.py). A control is the copy without a change.
"""

from __future__ import annotations

import multiprocessing as mp
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "kernels" / "stable_attention"
TIMEOUT = 180.0
"""Of one member of the suite."""


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    old: str
    new: str
    caught_by: str
    """Member of the suite: a case line, a fault's or a property's name."""
    occurrence: int = 0
    """Which of several equal texts, counted from 0."""
    total: int = 1
    """How often ``old`` occurs; another number means the patch needs a look."""

    def apply(self, text: str) -> str:
        """The file's text with the bug; ValueError where the kernel's text has moved on."""
        if text.count(self.old) != self.total:
            raise ValueError(
                f"bug {self.name!r}: {self.old!r} occurs {text.count(self.old)} times in "
                f"{self.file}, not {self.total}; adapt the patch to the kernel's new text"
            )
        at = -1
        for _ in range(self.occurrence + 1):
            at = text.index(self.old, at + 1)
        return text[:at] + self.new + text[at + len(self.old) :]


def copy_package(target: Path, bug: Bug | None) -> None:
    """Copy the package to ``target``/stable_attention and plant the bug."""
    copy = target / "stable_attention"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if bug is not None:
        file = copy / bug.file
        file.write_text(bug.apply(file.read_text()))


def _child(pipe: Any, folder: str, members: list[str]) -> None:
    """Import the copy and run members until one reports a problem."""
    sys.path.insert(0, folder)
    from suite import run_member

    import stable_attention

    assert stable_attention.__file__.startswith(folder), stable_attention.__file__
    warnings.simplefilter("ignore")
    for member in members:
        problems = run_member(member)
        if problems:
            pipe.send({"caught": True, "by": member, "how": problems[0].splitlines()[0][:200]})
            return
    pipe.send({"caught": False, "by": "", "how": ""})


def run_bug(
    bug: Bug | None, members: list[str], start: str = "fork"
) -> Iterator[dict[str, Any] | None]:
    """Generator that yields None while the child works and its verdict at the end.

    ``start``: of the child; CUDA does not fork.
    """
    with tempfile.TemporaryDirectory(prefix="planted") as folder:
        try:
            copy_package(Path(folder), bug)
        except ValueError as error:
            yield {"caught": False, "by": "", "how": str(error)}
            return
        context = mp.get_context(start)
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(there, folder, members))
        started, limit = time.monotonic(), TIMEOUT * len(members)
        process.start()
        there.close()
        while process.is_alive() and not here.poll():
            if time.monotonic() - started > limit:
                process.kill()
                process.join()
                yield {"caught": False, "by": "", "how": f"hung: ran past {limit:.0f} s"}
                return
            yield None
        try:
            verdict = here.recv()
        except EOFError:
            process.join()
            verdict = {"caught": True, "by": members[-1], "how": f"exit code {process.exitcode}"}
        process.join()
        yield verdict | {"seconds": round(time.monotonic() - started, 1)}


def run_all(
    bugs: Sequence[Bug], *, jobs: int, controls: dict[str, list[str]], start: str = "fork"
) -> dict[str, dict[str, Any]]:
    """Verdicts by name, ``jobs`` children at a time; controls are members of the unchanged copy."""
    queue = [(name, run_bug(None, members, start)) for name, members in controls.items()]
    queue += [(bug.name, run_bug(bug, [bug.caught_by], start)) for bug in bugs]
    verdicts: dict[str, dict[str, Any]] = {}
    active: list[tuple[str, Iterator[dict[str, Any] | None]]] = []
    while queue or active:
        while queue and len(active) < jobs:
            active.append(queue.pop(0))
        for entry in list(active):
            verdict = next(entry[1])
            if verdict is not None:
                verdicts[entry[0]] = verdict
                active.remove(entry)
                mark = "caught" if verdict["caught"] else "passed"
                print(f"{mark}  {entry[0]}: {verdict['how']}", flush=True)
        time.sleep(0.02)
    return verdicts
