"""Runs the cells: a queue over the seats of one node's GPUs, with a deadline, resumable.

Every run is an ordinary trainer process (torchrun where it has several GPUs) in its own run
directory. The runner only starts processes, reads their metrics.csv, and ends them: at the
deadline gracefully, so that they save, and an exploded run some steps after it has exploded.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_patch.experiments import origin
from megatron_patch.experiments.plan import steps_of
from megatron_patch.experiments.process import (
    Active,
    ask_ranks,
    cell_command,
    check_data,
    last_words,
    on_cpu,
    rank_exit_code,
    tail,
)
from megatron_patch.experiments.protocol import Run
from megatron_patch.experiments.store import (
    AFTER,
    EXPLODED,
    FAILED,
    FINAL,
    FINISHED,
    GUARDED,
    NONFINITE,
    PAUSED,
    REFUSED,
    WAITING,
    Store,
    set_aside,
)
from megatron_patch.experiments.verdict import judge
from megatron_patch.monitor.metrics import duration
from megatron_patch.runtime import lifeline
from megatron_patch.runtime.devices import visible_devices
from megatron_patch.runtime.environment import TORCHRUN_VARIABLES
from megatron_patch.training.run_directory import is_taken

POLL_SECONDS = 0.5
REPORT_SECONDS = 20.0
SHORTEST_SECONDS = 30.0
"""A run is not started with less training time than this left."""
PUBLISH_SECONDS = 90.0
WORTH_SECONDS = 120.0
"""A run is stopped for more GPUs only if that should save as much. Stopping and starting takes half
of it, and more GPUs are never quicker in proportion."""
GRACE_SECONDS = 60.0
"""After a request to stop, before the process and all below it are killed; at least
``save_seconds``."""
AGAIN_SECONDS = 30.0
"""Before a run that failed is started once more: what took its memory or its GPU may be gone."""
_STATE_OF_EXIT = {2: REFUSED, 3: NONFINITE, 5: GUARDED}


@dataclass(slots=True)
class Runner:
    """One invocation.

    Args of the constructor: the store; ``devices``, a seat each (a GPU index, repeated where runs
    share it; for the CPU any numbers); ``seconds`` of the time budget or None; ``steps`` to end
    runs at; ``only``, names of cells, runs or seeds; ``say``, where progress lines go; ``widen``,
    whether runs take GPUs that nobody waits for.
    """

    store: Store
    devices: list[int]
    seconds: float | None
    steps: int
    only: set[str] = field(default_factory=set)
    say: Callable[[str], None] = print
    widen: bool = False
    publish: Callable[[], None] | None = None
    """Called every `PUBLISH_SECONDS` and after a run has ended, to copy out what there is."""
    active: list[Active] = field(default_factory=list)
    stopping: bool = False
    _told: bool = False
    _began: float = field(default_factory=time.monotonic)
    _again: dict[str, float] = field(default_factory=dict)
    """Runs that failed, and when they are started once more."""
    _refused: set[str] = field(default_factory=set)
    """Runs that were refused by an earlier invocation, and are tried once more by this one."""
    _narrow: set[str] = field(default_factory=set)
    _rates: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        """Start, watch and end runs until none can be started any more."""
        free = list(self.devices)
        reported, published = 0.0, time.monotonic()
        handlers = {n: signal.signal(n, self._stop) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            queue = self._queue()
            while queue or self.active:
                if not self.stopping and self._time_left() < SHORTEST_SECONDS and queue:
                    self.say(
                        f"out of time: {len(queue)} run(s) are left for the next invocation; none "
                        f"is started with less than {SHORTEST_SECONDS:g} s beside those for saving"
                    )
                    queue.clear()
                self.stopping = self.stopping or self.store.is_gone()
                if self.stopping:
                    self._tell_of_stop()
                    queue.clear()
                self._fill(queue, free)
                for item in list(self.active):
                    if self._watch(item):
                        self.active.remove(item)
                        free += item.seats
                        published = 0.0
                        if self._goes_on(item):
                            queue.insert(0, item.run)
                if self.widen and free and not self.stopping and not self._startable(queue):
                    self._make_wider(free)
                if self.publish is not None and time.monotonic() - published > PUBLISH_SECONDS:
                    self.publish()
                    published = time.monotonic()
                if time.monotonic() - reported > REPORT_SECONDS and self.active:
                    reported = time.monotonic()
                    self.say(self._progress(queue))
                time.sleep(POLL_SECONDS)
        finally:
            self._kill()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            waited = self._again.keys() | self._refused
            self.store.give_up(waited - {item.run.id for item in self.active})
            self.store.save_if_possible(self.say)

    def _queue(self) -> list[Run]:
        """What this invocation has to start; refused as a whole while its data are not there."""
        self._refused = self.store.ask_again(self.only)
        queue = [run for run in self.store.experiment.runs if self._wanted(run)]
        check_data(self.store.experiment, queue, self.say)
        return queue

    def _fill(self, queue: list[Run], free: list[int]) -> None:
        """Start what can start, in the order of the protocol; drop what never can.

        A run that waits for another one, for more GPUs than are free, or after a failure, lets
        later ones pass.
        """
        for run in list(queue):
            if not free:
                return
            if time.monotonic() < self._again.get(run.id, 0.0):
                continue
            if run.base is not None and origin.find(self.store, run) is None:
                if self._hopeless(run, queue):
                    queue.remove(run)
                continue
            if is_taken(self.store.run_dir(run)):
                queue.remove(run)
                self.say(f"{run.id} is not started: another process trains in its directory")
                continue
            seats = self._seats(free, self._width(run, queue, free))
            if seats:
                queue.remove(run)
                try:
                    self._start(run, seats)
                except OSError as error:  # no room for its log, no process: others train meanwhile
                    free += seats
                    self.say(f"{run.id} is not started: {error}; the same command tries again")

    def _hopeless(self, run: Run, queue: list[Run]) -> bool:
        """Whether a run that waits for its base waits in vain in this invocation."""
        why = origin.unstartable(self.store, run)
        if why is None:
            if any(other.id == run.base for other in [*queue, *(i.run for i in self.active)]):
                return False
            why = f"{run.base} is not far enough, and this invocation does not run it"
        self.store.states[run.id].reason = why
        self.say(f"{run.id} cannot start: {why}")
        return True

    def _wanted(self, run: Run) -> bool:
        if not run.among(self.only):
            return False
        state = self.store.states[run.id]
        return state.state not in FINAL and self.store.reached(run) < self._end(run)

    def _goes_on(self, item: Active) -> bool:
        """Whether a run whose process has ended is started again in this invocation."""
        if item.wanted_wider and self._wanted(item.run):
            return not self.stopping
        return self._failed_wide(item) or self._failed_first(item.run)

    def _failed_wide(self, item: Active) -> bool:
        """Whether a run failed on GPUs that it had been given in addition: it goes on without."""
        state, own = self.store.states[item.run.id], self.store.experiment.gpus_of(item.run)
        more = len(item.seats) > own
        if state.state != FAILED or not more or self._time_left() < SHORTEST_SECONDS:
            return False
        self._narrow.add(item.run.id)
        state.state, state.reason = PAUSED, f"failed on {len(item.seats)} GPUs: {state.reason}"
        self.say(f"{item.run.id} goes on with {own} GPU(s), as it would have without --widen")
        return not self.stopping

    def _failed_first(self, run: Run) -> bool:
        """Whether a run that failed (memory, a lost GPU, a crash) is to be started once more.

        Once an invocation, so that its GPU is not idle for the rest; both attempts are on record.
        """
        state = self.store.states[run.id]
        if state.state != FAILED or run.id in self._again or self.stopping:
            return False
        if self._time_left() < AGAIN_SECONDS + SHORTEST_SECONDS:
            return False
        self._again[run.id] = time.monotonic() + AGAIN_SECONDS
        state.state, state.reason = PAUSED, f"{AFTER}{state.reason}"
        self.say(f"{run.id} is started again, once, in {AGAIN_SECONDS:g} s")
        return True

    def _end(self, run: Run) -> int:
        """Step at which a run ends in this invocation."""
        return origin.end_of(self.store, run, limit=self.steps)

    def _time_left(self) -> float:
        """Seconds of training that a run started now would have."""
        if self.seconds is None:
            return float("inf")
        protocol = self.store.experiment.protocol
        return self.seconds - (time.monotonic() - self._began) - protocol.save_seconds

    def _startable(self, queue: list[Run]) -> list[Run]:
        """Waiting runs that wait for nothing but GPUs."""
        return [r for r in queue if r.base is None or origin.find(self.store, r) is not None]

    def _width(self, run: Run, queue: list[Run], free: list[int]) -> int:
        """GPUs a run is started on: its own number, or its share of those that are free."""
        own = self.store.experiment.gpus_of(run)
        if not self.widen or run.id in self._narrow:
            return own
        return run.widest(own, len(set(free)) // len(self._startable(queue)))

    def _make_wider(self, free: list[int]) -> None:
        """Have one run go on with idle GPUs, where that saves more than stopping it costs."""
        if any(item.asked_to_stop is not None for item in self.active):
            return  # what it has will be free soon, too
        best, most = 0.0, None
        for item in self.active:
            own, rate = len(item.seats), self._rates.get(item.run.id)
            more = item.run.widest(own, own + len(set(free) - set(item.seats)))
            if rate is None or more == own or item.run.id in self._narrow:
                continue
            left = min((self._end(item.run) - item.step) / rate, self._time_left())
            saved = left * (1 - own / more)
            if saved > max(best, WORTH_SECONDS):
                best, most = saved, (item, more)
        if most is not None:
            item, more = most
            self.say(f"{item.run.id} is stopped, to go on with {more} GPUs, not {len(item.seats)}")
            item.wanted_wider = True
            self._ask_to_stop(item)

    def _seats(self, free: list[int], needed: int) -> list[int]:
        """Seats on ``needed`` different GPUs, taken from ``free``; [] if there are too few."""
        # The GPU with most free seats first, so that runs spread before they share.
        distinct = sorted(set(free), key=lambda device: (-free.count(device), device))
        if len(distinct) < needed:
            return []
        taken = sorted(distinct[:needed])
        for device in taken:
            free.remove(device)
        return taken

    def _start(self, run: Run, seats: list[int]) -> None:
        store = self.store
        begins = origin.find(store, run) if run.base is not None else None
        if begins is not None and store.states[run.id].origin != begins.as_dict():
            store.states[run.id].origin = begins.as_dict()
            store.save_if_possible(self.say)
        command = cell_command(
            store,
            run.on(len(seats)),
            gpus=len(seats),
            steps=self._end(run),
            left=self._time_left(),
        )
        environment = dict(os.environ)
        if not on_cpu(run, store):
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices(seats)
        environment.setdefault("OMP_NUM_THREADS", "1")
        for name in TORCHRUN_VARIABLES:
            environment.pop(name, None)  # a run is a job of its own, wherever this one was started
        log = store.log(run)
        log.parent.mkdir(parents=True, exist_ok=True)
        rows, kept = store.rows(run), store.reached(run)
        first = kept or (0 if begins is None else begins.step)
        if rows and not kept:
            # The trainer would continue the records of steps that it repeats.
            set_aside(store.run_dir(run))
        with log.open("ab") as out:
            log_begins = out.seek(0, os.SEEK_END)
            # Its own session: a stop reaches the whole group, and ours does not reach it. Tied to
            # us all the same: killed, we must not leave it training on GPUs that look free.
            process = subprocess.Popen(
                lifeline.tied(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        item = Active(run, process, seats, time.monotonic(), first, log_begins, step=first)
        self.active.append(item)
        again = f"from its checkpoint (logged to step {kept:,})" if kept else "from step 0"
        if begins is not None and not kept:
            again = f"from step {begins.step:,} of {begins.base} (event at {begins.event:,})"
        if rows and not kept:
            lost = f"{int(rows[-1]['step']):,} steps are repeated: there is no checkpoint"
            again += f" ({lost}; their records are set aside)"
        self.say(f"start {run.id} on {'/'.join(map(str, seats))}: {again}")

    def _watch(self, item: Active) -> bool:
        """Look after a process; True once it has ended and its end is recorded."""
        now = time.monotonic()
        code = item.process.poll()
        if code is not None:
            self._ended(item, code)
            return True
        if now - item.looked > min(REPORT_SECONDS, 5.0):
            item.looked = now
            self._look(item)
        if (self._is_late(item) or self.stopping) and item.asked_to_stop is None:
            self._ask_to_stop(item)
        if item.asked_to_stop is not None and now - item.asked_to_stop > self._grace():
            self.say(f"{item.run.id} did not stop in {self._grace():g} s and is killed")
            lifeline.kill_tree(item.process)
            item.asked_to_stop = now  # should that not do, again after as long
        return False

    def _grace(self) -> float:
        """A save may take what the protocol keeps for it, and more than is usual."""
        return max(GRACE_SECONDS, self.store.experiment.protocol.save_seconds)

    def _is_late(self, item: Active) -> bool:
        """Whether a run has to save now, or has had its time altogether.

        It stops by its own clock as well, which starts later: when Python and the libraries are
        loaded. A run that was stopped before its first step would never get on, so one that has
        made none since its start is left to that clock.
        """
        if item.step > item.first_step and self._time_left() <= 0:
            return True
        return self.seconds is not None and time.monotonic() - self._began > self.seconds

    def _look(self, item: Active) -> None:
        """Read the run's figures; stop it so many steps after its explosion, or its event."""
        rows = self.store.rows(item.run)
        if not rows:
            return
        item.step, item.loss = int(rows[-1]["step"]), rows[-1]["loss"]
        now = time.monotonic()
        if item.paced is None:
            item.paced = (now, item.step) if item.step > item.first_step else None
        elif item.step > item.paced[1]:
            self._rates[item.run.id] = (item.step - item.paced[1]) / (now - item.paced[0])
        if item.asked_to_stop is not None:
            return
        rule = self.store.experiment.protocol.explosion
        at = judge(rows, rule).exploded_at
        if at is not None and rule.stop_after is not None and item.step >= at + rule.stop_after:
            item.exploded = f"loss above {rule.loss:g} from step {at:,}; stopped at {item.step:,}"
            self.say(f"{item.run.id} has exploded: {item.exploded}")
            self._ask_to_stop(item)
        elif self._followed(item):
            self._ask_to_stop(item)

    def _followed(self, item: Active) -> bool:
        """Whether a living run that continues none has come far enough after its own event.

        Continued runs were told their last step; that of this one is known since the event.
        """
        if item.run.cell.follow is None or item.run.base is not None:
            return False
        return item.process.poll() is None and item.step >= self._end(item.run)

    def _ask_to_stop(self, item: Active) -> None:
        item.asked_to_stop = time.monotonic()
        if not ask_ranks(item.process, torchrun=len(item.seats) > 1):
            self.say(f"{item.run.id} has no process to ask; it is killed in {self._grace():g} s")

    def _ended(self, item: Active, code: int) -> None:
        """Record how a process ended."""
        run, store = item.run, self.store
        self._look(item)
        state = store.states[run.id]
        rows = store.rows(run)
        last = int(rows[-1]["step"]) if rows else 0
        state.attempts.append(
            {
                "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(time.monotonic() - item.began, 1),
                "exit_code": code,
                "from_step": item.first_step,
                "to_step": last,
                "gpus": len(item.seats),
            }
        )
        state.state, state.reason = self._verdict(item, code)
        store.save_if_possible(self.say)
        note = f": {state.reason}" if state.reason else ""
        self.say(f"{run.id} is {state.state} after step {last:,}{note}")

    def _verdict(self, item: Active, code: int) -> tuple[str, str]:
        """(state, reason) of a process that ended."""
        store, run = self.store, item.run
        if item.exploded:
            return EXPLODED, item.exploded
        if code == 0 and (store.run_dir(run) / "FINISHED").exists():
            return FINISHED, ""
        complete = origin.completion(store, run)
        if complete and (code == 0 or item.asked_to_stop is not None):
            return FINISHED, complete
        if code == 0:
            early = self.steps < store.experiment.protocol.steps
            at_limit = early and store.reached(run) >= self.steps
            return PAUSED, f"reached --steps {self.steps:,}" if at_limit else "saved and stopped"
        if item.asked_to_stop is not None:
            # The request may kill a process that has saved and is leaving (its handlers are gone),
            # and torchrun then ends with an error: what is on disk counts, not the code.
            if (store.run_dir(run) / "FINISHED").exists():
                return FINISHED, ""
            kept = store.has_checkpoint(run)
            if kept and store.reached(run) == store.last_step(run):
                return PAUSED, "saved and stopped"
            return (PAUSED if kept else WAITING), "ended before it could save"
        said = tail(store.log(run), item.log_begins)
        code = rank_exit_code(said) if len(item.seats) > 1 else code
        return _STATE_OF_EXIT.get(code, FAILED), f"exit code {code}: {last_words(said)}"

    def _stop(self, number: int, _: object) -> None:
        # A batch system sends its request again while runs save; a person presses again to leave.
        if self.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stopping = True  # told by the loop: in here it may interrupt a line being written

    def _tell_of_stop(self) -> None:
        if not self._told:
            self._told = True
            gone = self.store.is_gone()
            why = f"{self.store.path / 'experiment.json'} was removed" if gone else "stopping"
            self.say(f"{why}: running cells save first; the same command continues")

    def _kill(self) -> None:
        for item in self.active:
            lifeline.kill_tree(item.process)
            item.process.wait()

    def _progress(self, queue: list[Run]) -> str:
        """One line: what runs, how far, how long it will take."""
        parts = []
        for item in self.active:
            rate = self._rates.get(item.run.id)
            speed = f" {rate:.1f} step/s" if rate else ""
            loss = "" if item.loss is None else f" loss {item.loss:.3f}"
            parts.append(f"{item.run.id} {item.step:,}/{self._end(item.run):,}{loss}{speed}")
        clock = duration(time.monotonic() - self._began)
        line = f"[{clock}] {'; '.join(parts)}; waiting {len(queue)}"
        left = self._work_left(queue)
        if left is not None:
            line += f"; about {duration(left)} of work"
        if self.seconds is not None:
            line += f", {duration(max(0.0, self._time_left()))} of time"
        return line + " left"

    def _work_left(self, queue: list[Run]) -> float | None:
        """Seconds until the queue is empty at the speeds seen so far; None before any is known."""
        if not self._rates:
            return None
        usual = statistics.median(self._rates.values())
        total = sum(
            (self._end(i.run) - max(i.step, i.first_step)) / self._rates.get(i.run.id, usual)
            for i in self.active
        )
        for run in queue:
            kept = self.store.reached(run)
            total += (self._end(run) - kept if kept else steps_of(run, self.steps)) / usual
        lanes = max(1, len(self.devices) // self.store.experiment.protocol.gpus_per_run)
        return total / min(lanes, max(1, len(queue) + len(self.active)))
