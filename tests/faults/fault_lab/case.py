"""One fault as an object: how it is put in, what a user must see, and what must be left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_lab.lab import INTERVAL, SLACK, Hook, Lab, Outcome, Running, compare


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault.

    ``inject`` plays the broken attempt and returns how it ended. Then ``repair`` undoes what a
    person would have to undo, and the same command is given again.
    """

    name: str
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
    resumes: bool = True
    """The same command continues; False: the run, or the job by itself, came to its end."""
    within: float = 60.0
    """Seconds from the fault to the end of the last process."""
    found_within: float | None = None
    """Seconds from the fault to the hang watcher's report."""
    most_lost: int = INTERVAL
    """Steps that may have to be repeated."""
    repair: Callable[[Scene], None] | None = None
    needs_mount: bool = False
    quick: bool = False
    """Part of the sample that runs by default."""


@dataclass
class Scene:
    """Where a case is played."""

    case: Case
    lab: Lab
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


def run_case(case: Case, folder: Path, reference: dict[str, Any], *, mounts: bool) -> list[str]:
    """Play one case; what is wrong with what became of it.

    Args:
        case: the fault.
        folder: is emptied first.
        reference: ``Lab.result`` of the run that nothing happens to.
        mounts: whether this process may mount.
    """
    shutil.rmtree(folder, ignore_errors=True)
    scene = Scene(case, Lab(folder, mounts=mounts, ranks=case.ranks))
    broken = case.inject(scene)
    problems = judge_end(case, broken)
    if case.found_within is not None:
        hang = seconds_to_hang_report(scene, broken)
        if hang is None or hang > SLACK * case.found_within:
            problems.append(f"no hang was reported within {case.found_within:g} s: {hang}")
    if case.repair is not None:
        case.repair(scene)
    if case.resumes:
        again = scene.play()
        if again.code != 0:
            problems.append(f"resume ended with {again.code}: {again.output[-1000:]}")
        lost = 0 if again.began is None else max(broken.done - again.began, 0)
        if lost > case.most_lost:
            problems.append(f"{lost} steps lost, the interval is {case.most_lost}")
        problems += [f"resume left {what}" for what in (again.orphans or again.shm)]
    found = scene.lab.result()
    problems += [f"differs from the unbroken run: {d}" for d in compare(reference, found)][:4]
    if not found["finished"]:
        problems.append("the run was not finished")
    return [*problems, broken.output[-6000:]] if problems else []


def seconds_to_hang_report(scene: Scene, broken: Outcome) -> float | None:
    """From the fault to the hang watcher's report."""
    reports = sorted(scene.lab.run_dir.glob("hangs/*/summary.txt"))
    if not reports or broken.fault_at is None:
        return None
    return reports[0].stat().st_mtime - broken.fault_at


def judge_end(case: Case, broken: Outcome) -> list[str]:
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
