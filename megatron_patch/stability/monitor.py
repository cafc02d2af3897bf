"""`AttentionMonitor`: telemetry, early warning, guard and captures for any training loop.

    monitor = AttentionMonitor(chunks, optimizer, directory="runs/mine")
    monitor.resume(step, state)                   # after a restart; not needed at step 0
    for step in ...:                              # 1-based
        monitor.before_step(step)
        ...forward, backward, reduction of gradients
        monitor.grads_reduced()
        ...clipping, optimizer step
        found = monitor.after_step(step, loss=loss, grad_norm=norm)
        for action in monitor.switched(found):
            ...                                   # Pin: keep a checkpoint; Stop: save and end
    monitor.close()

Values are summed on the device. Every `interval` steps one SUM and one MAX over all ranks make them
right for the whole model, and a copy to pinned memory is started; it is read after the *next* step,
when it has long arrived, so nothing waits for the device. All ranks read the same numbers, judge
them by the same pure rule and are asked for the same actions after the same step.

Shape legend: L layers, H query heads of the whole model; n steps since the last record.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_patch.attention.capabilities import EXACT_DELTA
from megatron_patch.parallel.first_rank import from_first, of_all
from megatron_patch.runtime.watcher import Pin, Stop
from megatron_patch.schema.stability import StabilityConfig, checked
from megatron_patch.stability import guard, names, observe, record
from megatron_patch.stability.capture import Capturer, triggers_in
from megatron_patch.stability.gradients import LayerNorms
from megatron_patch.stability.groups import Groups
from megatron_patch.stability.guard import Switch
from megatron_patch.stability.history import History
from megatron_patch.stability.key_sums import KeySums, key_metrics
from megatron_patch.stability.look_back import look_back
from megatron_patch.stability.observe import Observer, Seen, Watched
from megatron_patch.stability.reduction import Arrived, Reduction
from megatron_patch.stability.step_window import StepWindow
from megatron_patch.stability.sums import FIELDS, HeadSums, head_metrics
from megatron_patch.stability.warning import Point, Rule, Verdict, judge, spike_score
from megatron_patch.stability.weights import SpectralNorms
from megatron_patch.stability.writer import Writer

RECENT = 20  # records the spike score compares with
Action = Switch | Pin | Stop


@dataclass(frozen=True, slots=True)
class Record:
    """What one observation has shown; on all ranks but for the two tables."""

    step: int
    """Of the observation; it is read one step later."""
    verdict: Verdict
    actions: tuple[Action, ...]
    """What the loop is asked to do, in this order."""
    scalars: dict[str, float]
    """Finite values by name for a logger, the worst head of each layer; first rank only."""
    heads: dict[str, np.ndarray]
    """Float32 [L, H] by name; first rank only."""


class AttentionMonitor:
    """Watches the attention of a model while it trains; every method is called by all ranks.

    Args:
        model: Megatron-Core's model chunks, wrapped or not, or what an adapter's `Watched` names.
        optimizer: tells the learning rate, where `after_step` is not given it.
        directory: ``stability/``, ``captures/`` and ``switched.json`` go here.
        options: as the ``stability:`` section of a configuration.
        groups: of this rank; default: Megatron-Core's parallel state.
        log: takes a line for people; rank 0's counts.
        warmup_steps: of the learning rate, in which the rule does not look.
        name: of the run, for captures.
        attention: backend/stabilizer, for meta.json; default: as the first module says.

    Raises:
        ConfigError: options that cannot work.
        ValueError: nothing to watch, or nothing that ``guard: switch`` could exchange.
    """

    def __init__(
        self,
        model: Sequence[Any] | torch.nn.Module | Watched,
        optimizer: Any = None,
        *,
        directory: Path | str,
        options: StabilityConfig | None = None,
        groups: Groups | None = None,
        log: Callable[[str], None] = print,
        warmup_steps: int = 0,
        name: str | None = None,
        attention: str | None = None,
    ) -> None:
        if isinstance(model, torch.nn.Module):
            model = [model]
        self.watched = model if isinstance(model, Watched) else observe.watched_chunks(model)
        self.options = checked(options)
        if groups is None:
            weight = next(self.watched.roots[0].parameters())
            groups = Groups.find(weight.device)
        self.groups, self._optimizer = groups, optimizer
        self._log = log if groups.rank == 0 else (lambda line: None)
        self.directory = Path(directory)
        self.name = self.directory.resolve().name if name is None else name
        self.rule = Rule.of(self.options, warmup_steps=warmup_steps)
        if self.options.enabled:
            guard.check_watched(self.watched.sites, self.watched.roots[0])
        if self.options.guard == "switch":
            guard.check(self.watched.sites)
        if attention is None:  # a pipeline stage may have none
            mine = next((site.numerics for site in self.watched.sites), "")
            attention = next(filter(None, of_all(mine)), "")
        self._attention = attention
        self._resumed, self._step = False, 0
        self._reset()

    def _reset(self) -> None:
        """Nothing was observed, judged or captured yet."""
        watched, groups, options = self.watched, self.groups, self.options
        first_head = groups.tp_rank * (watched.heads // groups.tp_size)
        shape: dict[str, Any] = {"layers": watched.layers, "heads": watched.heads}
        shape |= {"first_head": first_head, "device": groups.device}
        self.observer = Observer(watched.sites, cp_group=groups.cp)
        per_kv_head = watched.heads // watched.kv_heads
        self.capturer = Capturer(
            options, groups, self.directory / "captures", name=self.name, per_kv_head=per_kv_head
        )
        self.heads = HeadSums(rows=options.rows, sequences=options.sequences, **shape)
        self.keys = KeySums(cp=groups.cp, **shape)
        first = groups.dp_rank == 0 and (groups.cp is None or groups.cp.rank() == 0)
        self.norms = LayerNorms(watched, device=groups.device, first=first)
        self.weights = SpectralNorms(watched.sites)
        self.window = StepWindow(options.interval, groups)
        self.reduction = Reduction()
        self._observing, self._told = False, False
        self._writer: Writer | None = None
        self.switched_at = 0
        """Step after which the guard switched; 0: it did not."""
        self.history = History(self.rule, compensated=self.compensated)
        self._switch_due = False
        self._stopped = False
        self.verdict: Verdict | None = None
        """After the last record."""
        self.max_logits: tuple[int, np.ndarray] | None = None
        """Step and [L, H] of the last record, those before a resume included; first rank only."""

    # ------------------------------------------------------------------ start

    def resume(
        self,
        step: int,
        state: dict[str, Any] | None = None,
        *,
        switched_at: int | None = None,
        parent: Path | str | None = None,
        has_saved: bool = True,
    ) -> None:
        """Go on after ``step`` with records, history and a switch that was made. Collective.

        Files in the directory may say more of the switch than the checkpoint does, and all of it
        where a checkpoint of another program says nothing.

        Args:
            step: steps done.
            state: what `state` returned at that checkpoint; None: nothing is known.
            switched_at: as the checkpoint says it elsewhere; default: as ``state`` does.
            parent: another run's checkpoint, from which this one starts.
            has_saved: whether the run has checkpoints of its own; counts on the first rank.

        Raises:
            BackendError: the switch cannot be repeated in this configuration.
            ConfigError: switched.json is damaged.
        """
        if self._resumed:  # a rewind, or after an error in a step
            self.close()
            self._reset()
        self._resumed, self._step = True, step
        if switched_at is None:
            switched_at = (state or {}).get("switched_at")
        silent, switched_at = switched_at is None, int(switched_at or 0)
        noted = guard.recall_together(self.directory, step, rank=self.groups.rank, log=self._log)
        self.switched_at = guard.in_force_from(switched_at, noted, step=step)
        if self.switched_at and not switched_at:
            self._log(
                f"stability guard: step {step:,} was saved before the switch that "
                f"{guard.FILE} tells of (a start without that file goes on as the checkpoint says)"
            )
        if self.options.enabled:
            self.window.restore(state, step)
            found: Any = None
            if self.groups.rank == 0:
                history = self._open(step, own=has_saved, parent=parent, silent=silent)
                # And `switched_at`, which reading the records may have changed.
                found = history, self.switched_at, triggers_in(self.directory / "captures")
            self.history, self.switched_at, self.capturer.triggered = from_first(found)
        if self.switched_at > step:
            self._switch_due = True  # decided at the record of this step, one ahead: see `finish`
        elif self.switched_at:
            self._switch_again()

    def _switch_again(self) -> None:
        """What the guard did before the resume; another guard setting is the user's wish."""
        if self.options.guard == "switch":
            guard.switch(self.observer.sites)
            how = "stabilizer compensated since then"
        else:
            how = f"stability.guard is {self.options.guard} now: attention is as configured"
        self._log(f"stability guard: it switched after step {self.switched_at:,}; {how}")

    def _open(self, step: int, *, own: bool, parent: Path | str | None, silent: bool) -> History:
        """First rank: the files, and what they say about the steps before."""
        meta = record.make_meta(
            layers=self.watched.layers, heads=self.watched.heads, rule=self.rule,
            interval=self.options.interval, attention=self._attention,
        )  # fmt: skip
        self._writer = Writer(self.directory, meta, start_step=step)
        for line in self._writer.messages(own=own):
            self._log(line)
        history, self.switched_at, last = look_back(
            self._writer, self.rule, step=step, reach=self._reach, switched_at=self.switched_at,
            silent=silent, parent=None if own or parent is None else Path(parent),
            compensated=self._compensated_after, log=self._log,
        )  # fmt: skip
        self.max_logits = last or self.max_logits
        return history

    def _compensated_after(self, switched_at: int) -> bool:
        """Whether the run computes with what the guard switches to; 0: it has not switched."""
        in_force = switched_at > 0 and self.options.guard == "switch"
        return in_force or self._attention.startswith(EXACT_DELTA)

    @property
    def compensated(self) -> bool:
        """Whether it does so now."""
        return self._compensated_after(self.switched_at)

    @property
    def _reach(self) -> int:
        """Steps that the rule can look back on."""
        return self.rule.reach(RECENT * self.options.interval)

    # ------------------------------------------------------------------- step

    def before_step(self, step: int) -> None:
        """``step`` (1-based) begins. Collective at the first one, where `resume` was not called.

        Raises ValueError: it is none, or one before the last.
        """
        if step < max(1, self._step):
            raise ValueError(f"before_step({step}) after {self._step}: steps are counted from 1, "
                             "on over epochs; before a loop goes back, call resume")  # fmt: skip
        if not self._resumed:
            self.resume(step - 1)
        self._step = step
        self._observing = self.options.enabled and step % self.options.interval == 0
        requests = []
        if self._observing:
            self.heads.clear(phase=step // self.options.interval)
            self.keys.clear()
            self.norms.clear()
            add, inputs = self._add, self.keys.add_input
            requests.append(
                observe.ObservationRequest(micro_batch=0, layers=None, callback=add, inputs=inputs)
            )
        capture = self.capturer.request(step)
        if capture is not None:
            requests.append(capture)
        self.observer.arm(requests)

    def _add(self, seen: Seen, dout: torch.Tensor) -> None:
        self.keys.add_output(seen, dout)
        if not seen.softcap:  # the sampled rows are computed without one
            self.heads.add(seen, dout)

    def grads_reduced(self) -> None:
        """Gradients are reduced over all ranks, and not clipped yet. Local."""
        if self._observing:
            self.norms.measure()

    @contextlib.contextmanager
    def reduced_before(self, optimizer: Any) -> Iterator[None]:
        """`grads_reduced` when ``optimizer.step`` is called inside, for loops of other programs."""
        update = optimizer.step

        def reduced_and_updated(*args: Any, **named: Any) -> Any:
            self.grads_reduced()
            return update(*args, **named)

        optimizer.step = reduced_and_updated
        try:
            yield
        finally:
            optimizer.step = update

    def after_step(
        self,
        step: int,
        *,
        loss: torch.Tensor | float | None,
        grad_norm: torch.Tensor | float | None = None,
        lr: float | None = None,
    ) -> Record | None:
        """Read what the step before left, send off what is due. Collective.

        Args:
            step: the update of which is launched.
            loss: mean loss of this rank, or a tensor [sum of token losses, tokens]; may be on the
                device. None only where ``groups.reports_loss`` is false.
            grad_norm: over all ranks, before clipping; None: not computed, or GradScaler skips.
            lr: of the update; default: the optimizer's first group's.

        Returns the record of an earlier step, if one has arrived.

        Raises ValueError: no loss where one is due, or not the step that began.
        """
        if step != self._step:
            raise ValueError(
                f"after_step({step}) after before_step({self._step}): nothing of that step was "
                "watched; call both with the same step, counted from 1"
            )
        self.observer.disarm(ended=True)
        for path in self.capturer.saved:
            self._log(f"captured {path.name}")
        self.capturer.saved = []
        if self._switch_due and step >= self.switched_at:
            self._switch_due = False
            self._switch_again()
        if not self.options.enabled:
            return None
        if loss is None and self.groups.reports_loss:
            raise ValueError(
                "loss is None on a rank that reports it; give the mean loss, or "
                "[sum of token losses, tokens], or groups with reports_loss=False"
            )
        self.window.observe(loss, 0.0 if grad_norm is None else grad_norm)
        found = self.flush(step)
        if self._observing:
            self._send(step, lr)
        self._observing = False
        return found

    def _send(self, step: int, lr: float | None) -> None:
        """Start what was summed on its way."""
        if not (self.norms.measured or self._told):
            self._told = True
            self._log(
                f"step {step:,}: grads_reduced() was not called, so no layer's gradient norm is "
                "known; call it in every step, after gradients are reduced, before they are clipped"
            )
        if lr is None:
            groups = getattr(self._optimizer, "param_groups", None) or [{}]
            lr = float(groups[0].get("lr", math.nan))
        sums, logits = self.heads.totals()
        maxima = torch.full((3, *logits.shape), -math.inf, device=self.groups.device)
        maxima[0] = logits
        first = self.heads.first_head
        for site, norms in self.weights.measure():
            maxima[1:, site.layer, first : first + norms.shape[1]] = norms
        parts = [sums, self.keys.totals(), self.norms.squares, self.window.drain()]
        self.reduction.send(step, lr=lr, sums=parts, maxima=maxima)

    def switch(self, action: Switch) -> None:
        """Carry out a `Switch`: compute with `guard.TARGET` from now on. Local.

        Raises BackendError: a layer that stable_flash cannot serve.
        """
        guard.switch(self.observer.sites)
        how = "switched attention to stable_flash, stabilizer compensated, after step"
        self._log(f"stability guard: {how} {action.step:,}")

    def switched(self, found: Record | None) -> list[Pin | Stop]:
        """Carry out a `Switch` of a record; the actions that are left to the loop. Local."""
        left: list[Pin | Stop] = []
        for action in found.actions if found else ():
            if isinstance(action, Switch):
                self.switch(action)
            else:
                left.append(action)
        return left

    # ------------------------------------------------------------------- save

    def before_save(self) -> None:
        """Make `state` that of this step. Collective."""
        self.window.synchronize()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain data, the same on every rank, for any layout."""
        return self.window.state() | {"switched_at": self.switched_at}

    def finish(self, step: int) -> Record | None:
        """Take in what is on its way, as the step after ``step`` would. Collective.

        So a switch comes after the same step whether the run was stopped here or not.
        """
        return self.flush(step + 1)

    def before_rewind(self, back_to: int) -> Record | None:
        """The loop goes back to the checkpoint of ``back_to``: `resume` follows. Collective.

        Takes in what is on its way of a step that stays: no later step would, the one it was
        measured in is not repeated. A switch is in force from ``back_to`` on: numerics that were
        exchanged stay exchanged. A file says so before anything is given up, so that a crash
        cannot forget it.
        """
        step, found = self.reduction.step, None
        if step is not None and step <= back_to:
            found = self.finish(step)
        if self.switched_at and self.groups.rank == 0:
            guard.remember(self.directory, min(self.switched_at, max(1, back_to)))
        self.close()
        return found

    def flush(self, now: int) -> Record | None:
        """Take in the record on its way, if there is one, after step ``now``; on all ranks."""
        arrived = self.reduction.drain()
        if arrived is None:
            return None
        sums, keys, squares, series = arrived.sums
        by_head = head_metrics(sums, arrived.maxima[0]) | key_metrics(keys)
        for name, values in (("wq_norm", arrived.maxima[1]), ("wk_norm", arrived.maxima[2])):
            by_head[name] = np.where(np.isneginf(values), np.float32(np.nan), values)
        by_layer = {"grad_norm": np.sqrt(squares[:-1]).astype(np.float32)}
        scalars = self._scalars(arrived, series)
        scalars["grad_norm_rest"] = float(np.sqrt(squares[-1]))
        scalars["rows"] = float(sums[..., FIELDS.index("rows")].max())
        point = self.history.add(step=arrived.step, scalars=scalars, heads=by_head)
        self.history.forget(point.step - self._reach)
        actions = self._judge(point, now)
        assert self.verdict is not None
        if point.step > self.rule.settle_steps:
            line = self.capturer.see(self.verdict, by_head)
            if line is not None:
                self._log(line)
        # 0 where another guard setting has taken the switch back.
        in_force = self.switched_at if self.options.guard == "switch" else 0
        scalars["level"], scalars["switched"] = float(self.verdict.code), float(in_force)
        shown: dict[str, float] = {}
        heads: dict[str, np.ndarray] = {}
        if self._writer is not None:
            self._writer.write(arrived.step, scalars=scalars, layers=by_layer, heads=by_head)
            shown, heads = names.shown(scalars, by_layer, by_head), by_head
            self.max_logits = arrived.step, by_head["max_logit"]
        return Record(arrived.step, self.verdict, tuple(actions), shown, heads)

    def _scalars(self, arrived: Arrived, series: np.ndarray) -> dict[str, float]:
        with np.errstate(divide="ignore", invalid="ignore"):
            losses = series[:, 0] / series[:, 1]
        norms = series[:, 2]
        recent = [p.grad_norm for p in self.history.points[-RECENT:]]
        return {
            "loss_mean": float(losses.mean()),
            "loss_max": float(losses.max()),
            "grad_norm_mean": float(norms.mean()),
            "grad_norm_max": float(norms.max()),
            "lr": arrived.lr,
            "spike_score": spike_score(recent, float(norms.max())),
        }

    def _judge(self, point: Point, now: int) -> list[Action]:
        """The verdict, what is logged of it, and what the loop is asked to do."""
        before, verdict = self.verdict, judge(self.history.points, self.rule)
        self.verdict, mode = verdict, self.options.guard
        verdict_is_new = before is None or verdict.kind != before.kind
        if mode != "off" and verdict_is_new:
            self._log(f"step {point.step:,}: {verdict.line()}")
        if verdict.level != "danger" or mode == "off":
            return []
        attention = math.isfinite(point.loss) and math.isfinite(point.grad_norm)
        if mode == "warn" and attention and not self.compensated and verdict_is_new:
            self._log(guard.ADVICE)
        actions: list[Action] = [Pin(point.step)]
        if mode == "stop" and not self._stopped:
            self._stopped = True
            actions.append(Stop(verdict.reason, guard.StabilityStop.of(verdict.reason, now)))
        elif mode == "switch" and not self.switched_at:
            # Between two steps, on all ranks between the same two; the rule starts anew.
            self.switched_at, self.history = now, History(self.rule, compensated=True)
            actions.append(Switch(now))
        return actions

    def close(self) -> None:
        """Take hooks off and close files."""
        self.observer.disarm()
        self.capturer.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
