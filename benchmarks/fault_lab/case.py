"""One fault as an object: how it is put in, what a user must see, and what must be left."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fault_lab.lab import INTERVAL, SLACK, Hook, Lab, Outcome, Running, compare

After = Literal["resume", "finished", "goes on", "same job", "undetected"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault.

    ``inject`` plays the broken attempt and returns how it ended. Then ``repair`` undoes what a
    person would have to undo, and the same command is given again.
    """

    name: str
    group: str
    inject: Callable[[Scene], Outcome]
    says: str = ""
    """Regular expression of the line that tells the user; empty: nothing needs telling."""
    code: int = 1
    """Exit code of the launcher; torchrun makes 1 of every failure."""
    rank_code: int | None = None
    """Exit code of the trainer on at least one rank."""
    ranks: int = 2
    sets: tuple[str, ...] = ()
    """Overrides of all attempts and of the unbroken run."""
    after: After = "resume"
    """resume: the same command continues; finished: the run itself came to its end, nothing to
    resume; goes on: as resume, but bits may differ (another layout); same job: the launch script
    itself started the run again; undetected: known to go unseen, and the table says so."""
    ignore: tuple[str, ...] = ()
    """Parts of the comparison that the fault itself destroyed."""
    within: float = 60.0
    """Seconds from the fault to the end of the last process."""
    found_within: float | None = None
    """Seconds from the fault to the hang watcher's report."""
    most_lost: int = INTERVAL
    """Steps that may have to be repeated."""
    repair: Callable[[Scene], None] | None = None
    needs_mount: bool = False
    note: str = ""
    """What the table adds in words."""


@dataclass
class Scene:
    """Where a case is played."""

    case: Case
    lab: Lab
    reference: dict[str, Any]
    keep: dict[str, Any] = field(default_factory=dict)
    """What ``inject`` leaves for ``repair``."""

    def play(
        self,
        *sets: str,
        hook: Hook | None = None,
        outside: Callable[[Running], None] | None = None,
        limit: float = 100,
        **options: Any,
    ) -> Outcome:
        """One attempt: ``hook`` acts inside the ranks, ``outside`` beside them."""
        attempt = self.lab.start(*self.case.sets, *sets, hook=hook, **options)
        if outside is not None:
            outside(attempt)
        return attempt.finish(limit)

    def first_part(self, steps: int = 5) -> Outcome:
        """Train the first steps of the run and stop gracefully."""
        outcome = self.play(f"training.exit_at_step={steps}")
        assert outcome.code == 0, outcome.output
        return outcome


def run_case(
    case: Case, folder: Path, reference: dict[str, Any], *, mounts: bool
) -> dict[str, Any]:
    """Play one case; the row of the table."""
    if case.needs_mount and not mounts:
        return _row(case, status="skipped", problems=["mounting is not permitted here"])
    shutil.rmtree(folder, ignore_errors=True)
    scene = Scene(case, Lab(folder, mounts=mounts, ranks=case.ranks), reference)
    broken = case.inject(scene)
    problems = _judge_end(case, broken)
    hang = _hang(scene, broken)
    if case.found_within is not None and not (
        hang and hang["seconds"] <= SLACK * case.found_within
    ):
        problems.append(f"no hang was reported within {case.found_within:g} s: {hang}")
    if case.repair is not None:
        case.repair(scene)
    lost: int | None = 0
    again: Outcome | None = None
    if case.after in ("resume", "goes on"):
        again = scene.play()
        if again.code != 0:
            problems.append(f"resume ended with {again.code}: {_last(again)}")
        lost = None if again.began is None else max(broken.done - again.began, 0)
        if lost is not None and lost > case.most_lost:
            problems.append(f"{lost} steps lost, the interval is {case.most_lost}")
        problems += [f"resume left {what}" for what in (again.orphans or again.shm)]
    found = scene.lab.result()
    differences = []
    for difference in compare(reference, found):
        if not difference.startswith(case.ignore or ("-",)):
            differences.append(difference)
    if not found["finished"]:
        problems.append("the run was not finished")
    status = "ok"
    if case.after == "undetected":
        status = "unseen" if differences else "ok"
    elif case.after != "goes on":
        problems += [f"differs from the unbroken run: {d}" for d in differences[:4]]
    return _row(
        case,
        status=status if not problems else "failed",
        problems=problems,
        code=broken.code,
        rank_codes=sorted({code for code, _ in broken.ranks.values()}),
        seen=_seen(case, broken),
        fault=broken.fault,
        seconds=round(broken.after_fault if broken.after_fault is not None else broken.seconds, 2),
        lost=lost,
        bitwise=not differences,
        hang=hang,
        orphans=len(broken.orphans),
        shm=len(broken.shm),
        output=broken.output[-6000:] if problems else "",
    )


def _hang(scene: Scene, broken: Outcome) -> dict[str, Any] | None:
    """When the hang watcher reported, and how many ranks left their stacks."""
    reports = sorted(scene.lab.run_dir.glob("hangs/*/summary.txt"))
    if not reports or broken.fault_at is None:
        return None
    seconds = round(reports[0].stat().st_mtime - broken.fault_at, 1)
    return {"seconds": seconds, "stacks": len(list(reports[0].parent.glob("rank_*.txt")))}


def _row(case: Case, **figures: Any) -> dict[str, Any]:
    facts = {"name": case.name, "group": case.group, "after": case.after, "note": case.note}
    return facts | figures


def _judge_end(case: Case, broken: Outcome) -> list[str]:
    """What is wrong with how the broken attempt ended."""
    problems = []
    if broken.timed_out:
        problems.append("it did not end by itself")
    if broken.code != case.code:
        problems.append(f"exit code {broken.code}, expected {case.code}")
    codes = {code for code, _ in broken.ranks.values()}
    if case.rank_code is not None and case.rank_code not in codes:
        problems.append(f"no rank ended with {case.rank_code}: {sorted(codes)}")
    if case.says and broken.line(case.says) is None:
        problems.append(f"nobody said {case.says!r}")
    if broken.after_fault is not None and broken.after_fault > SLACK * case.within:
        problems.append(f"it took {broken.after_fault:.0f} s to end")
    if broken.orphans:
        problems.append(f"orphans: {broken.orphans}")
    if broken.shm:
        problems.append(f"left in /dev/shm: {broken.shm}")
    return problems


def _seen(case: Case, broken: Outcome) -> str:
    line = broken.line(case.says) if case.says else None
    if line is None:
        return ""
    line = re.sub(r"^[EW]\d{4} [\d:.]+ \d+ \S+\] ", "", line)
    line = re.sub(r"^\[?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]? ", "", line)
    line = re.sub(r"\b(pid:?|PID) \d+", r"\1 N", line)
    line = re.sub(r"(127\.0\.0\.\d|localhost|\[::1?\])([]:, ]+)\d+", r"\1\2PORT", line)
    line = re.sub(r"\[/__w/\S+\] ", "", line)
    line = line.replace(f"({socket.gethostname().split('.')[0]})", "(node)")
    return line[:260]


def _last(outcome: Outcome) -> str:
    lines = [x for x in outcome.output.splitlines() if x.strip()]
    return json.dumps(lines[-3:])
