"""SIGKILLs, automatic restart and resume, and the same bits as an unbroken run.

    python tests/faults/soak.py --state DIR [--kills 500] [--minutes 25] [--ranks 4] [--out DIR]

A run is killed again and again until it reaches its end; then weights, optimizer, random streams,
metrics and the data of every step are compared with those of an unbroken run, bit by bit. That is
one episode; episodes follow until enough kills were survived or the time is over. A fifth of the
kills happen inside a save. Started again with the same --state, the script goes on where it was.

Writes ``soak.json`` into --out (default runs/soak); exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fault_lab import hooks, lab

from megatron_patch.runtime import environment

STEPS, INTERVAL = 30, 4
SETS = (f"training.train_steps={STEPS}", f"checkpoint.interval={INTERVAL}")
VICTIMS = ("a rank", "a rank", "a rank", "all ranks", "the launcher")
IN_SAVE = 0.25
"""Tries at a named place of a save; kills at random instants hit open saves besides."""
OPEN_SAVE = "a save was open"


class Soak:
    """The state of the whole script: counts, and the episode that is being played."""

    def __init__(self, folder: Path, *, ranks: int, seed: int) -> None:
        self.folder, self.ranks, self.seed = folder, ranks, seed
        self.commit = environment.commit()[:12]
        self.mounts = lab.isolate()
        self.file = folder / f"soak-{ranks}.json"
        self.counts: dict[str, Any] = {"kills": 0, "episodes": 0, "different": [], "lost": {},
                                       "by_victim": {}, "by_place": {}, "in_save": 0, "wrong": [],
                                       "seconds": 0.0, "ended_within_s": []}  # fmt: skip
        if self.file.exists():
            self.counts = json.loads(self.file.read_text())
        self.reference, self.startup, self.duration = self._unbroken()

    def _unbroken(self) -> tuple[dict[str, Any], float, float]:
        """The run that nothing happens to; made once a commit."""
        file = self.folder / f"unbroken-{self.ranks}-{self.commit}.json"
        if not file.exists():
            run = self._lab("unbroken")
            attempt = run.start(*SETS)
            attempt.until(lambda: attempt.steps() >= 1)
            startup = time.time() - attempt.began
            outcome = attempt.finish(300)
            assert outcome.code == 0, outcome.output
            found = [run.result(), startup, outcome.seconds]
            file.write_text(json.dumps(found))
        reference, startup, duration = json.loads(file.read_text())
        return reference, startup, duration

    def _lab(self, name: str) -> lab.Lab:
        folder = self.folder / f"{name}-{self.ranks}"
        shutil.rmtree(folder, ignore_errors=True)
        return lab.Lab(folder, mounts=self.mounts, ranks=self.ranks)

    def episode(self, until: float, wanted: int) -> None:
        """Kill one run until it finishes, compare, and add what happened to the counts."""
        began, number = time.time(), self.counts["episodes"]
        dice = random.Random(f"{self.seed} {self.ranks} {number}")
        run = self._lab("episode")
        tally: dict[str, Any] = {"kills": 0, "in_save": 0, "wrong": [],
                                 "lost": Counter(), "by_victim": Counter(),
                                 "by_place": Counter(), "ended": []}  # fmt: skip
        done: int | None = None
        while True:
            enough = time.time() > until or self.counts["kills"] + tally["kills"] >= wanted
            outcome, victim, place = self._attempt(run, dice, spare=enough)
            if done is not None and outcome.began is not None:
                tally["lost"][done - outcome.began] += 1
            if outcome.began is not None:
                done = outcome.done
            problems = [w for w in ("orphans", "shm") if getattr(outcome, w)]
            if outcome.timed_out:
                problems.append("did not end")
            if problems or (not outcome.fault and outcome.code):
                tally["wrong"].append(f"episode {number}: {victim} {place} {problems} "
                                      f"code {outcome.code}\n{outcome.output[-2000:]}")  # fmt: skip
            if outcome.fault:
                tally["kills"] += 1
                tally["in_save"] += place in (*hooks.SAVE_PLACES, OPEN_SAVE)
                tally["by_victim"][victim] += 1
                tally["by_place"][place] += 1
                tally["ended"].append(round(outcome.after_fault or 0.0, 2))
            if run.result()["finished"] or tally["wrong"]:
                break
        different = list(lab.compare(self.reference, run.result()))
        self._add(tally, different, time.time() - began)

    def _attempt(
        self, run: lab.Lab, dice: random.Random, *, spare: bool
    ) -> tuple[lab.Outcome, str, str]:
        """Start the run where it stands and kill somebody, unless it is to be spared."""
        if spare:
            return run.run(*SETS, limit=300), "", ""
        if dice.random() < IN_SAVE:
            place = dice.choice(hooks.SAVE_PLACES)
            everywhere = ("save begin", "save write", "save hash")
            rank = dice.randrange(self.ranks) if place in everywhere else 0
            # The save may be any of the next two.
            step = self._position(run) + dice.choice([1, INTERVAL + 1])

            def hook(mine: int) -> None:
                if mine == rank:
                    hooks.at(place, hooks.kill, step=step)

            return run.run(*SETS, hook=hook, limit=120), "a rank", place
        victim = dice.choice(VICTIMS)
        early = dice.random() < 0.25
        per_step = (self.duration - self.startup) / STEPS
        late = self.startup + dice.uniform(0, 3 * INTERVAL * per_step)
        after = dice.uniform(0, self.startup) if early else late
        attempt = run.start(*SETS)
        end = attempt.began + after
        while time.time() < end and not attempt.poll():
            time.sleep(0.002)
        where = "before the first step" if attempt.steps() == 0 else "between two saves"
        if any(p.stat().st_mtime > attempt.began for p in run.store.glob("*.tmp")):
            where = OPEN_SAVE
        self._kill(attempt, victim, dice)
        return attempt.finish(120), victim, where

    def _kill(self, attempt: lab.Running, victim: str, dice: random.Random) -> None:
        """SIGKILL to the launcher, to one rank or to all of them; nothing if there is nobody."""
        if attempt.poll():
            return
        files = sorted(attempt.folder.glob("pid.*"))
        pids = [int(text) for f in files if (text := f.read_text())]
        if victim == "a rank" and pids:
            pids = [dice.choice(pids)]
        elif victim == "the launcher" or not pids:
            pids = [attempt.pid]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            attempt.mark(f"SIGKILL to {victim}")

    def _position(self, run: lab.Lab) -> int:
        """Step of the newest complete checkpoint."""
        names = [p.name for p in run.store.glob("step_*.attempt-*")]
        complete = [n for n in names if n.rpartition("-")[2].isdigit()]
        return max((int(n[5:13]) for n in complete), default=0)

    def _add(self, tally: dict[str, Any], different: list[str], seconds: float) -> None:
        c = self.counts
        if different:
            c["different"].append([c["episodes"], different[:5]])
        c["episodes"] += 1
        for key in ("kills", "in_save"):
            c[key] += tally[key]
        by_commit = c.setdefault("by_commit", {})
        by_commit[self.commit] = by_commit.get(self.commit, 0) + tally["kills"]
        for key in ("lost", "by_victim", "by_place"):
            for name, count in tally[key].items():
                c[key][str(name)] = c[key].get(str(name), 0) + count
        c["wrong"] += tally["wrong"]
        c["ended_within_s"] += tally["ended"]
        c["seconds"] += seconds
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(c))
        os.replace(temporary, self.file)

    def figures(self) -> dict[str, Any]:
        """What is written down."""
        c = self.counts
        ended = sorted(c["ended_within_s"])
        return {
            "ranks": self.ranks, "steps": STEPS, "interval": INTERVAL, "seed": self.seed,
            "kills": c["kills"], "kills_in_save": c["in_save"], "episodes": c["episodes"],
            "episodes_bitwise_equal": c["episodes"] - len(c["different"]),
            "different": c["different"], "wrong": c["wrong"],
            "by_commit": c.get("by_commit", {}),
            "by_victim": c["by_victim"], "by_place": c["by_place"],
            "steps_lost": dict(sorted(c["lost"].items(), key=lambda item: int(item[0]))),
            "most_steps_lost": max(map(int, c["lost"]), default=0),
            "seconds_until_all_ended": {"median": ended[len(ended) // 2] if ended else None,
                                        "most": ended[-1] if ended else None},
            "hours": round(c["seconds"] / 3600, 2),
        }  # fmt: skip


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Go on until ``kills`` were survived or ``minutes`` are over; the figures so far."""
    folder = args.state.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    begin, kills = time.time(), args.kills
    until = begin + 60 * args.minutes
    state = Soak(folder, ranks=args.ranks, seed=args.seed)
    before = state.counts["kills"]
    while state.counts["kills"] < kills and time.time() < until:
        state.episode(until, kills)
        c = state.counts
        rate = (c["kills"] - before) / (time.time() - begin)
        left = min((kills - c["kills"]) / rate if rate else 0.0, max(until - time.time(), 0))
        print(f"{c['kills']}/{kills} kills, {c['in_save']} in a save, {c['episodes']} episodes, "
              f"{len(c['different'])} different, {len(c['wrong'])} wrong, left {left / 60:.1f} min",
              flush=True)  # fmt: skip
    return state.figures()


def main() -> int:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--out", type=Path, default=Path("runs/soak"), help="folder of the result")
    found.add_argument("--state", type=Path, required=True, help="folder; survives restarts")
    found.add_argument("--kills", type=int, default=500)
    found.add_argument("--minutes", type=float, default=25.0)
    found.add_argument("--ranks", type=int, default=4)
    found.add_argument("--seed", type=int, default=20261121)
    args = found.parse_args()
    lab.preimport()
    figures = soak(args)
    print(json.dumps(figures, indent=1))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "soak.json").write_text(json.dumps(environment.report() | figures, indent=1) + "\n")
    return 1 if figures["different"] or figures["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
