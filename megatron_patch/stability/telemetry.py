"""The watcher of attention, `Stability`: telemetry, early warning, guard and captures of a run.

    before_step -> the step -> grads_reduced inside it, between reduction and update -> after_step

Values are summed on the device. Every `interval` steps one SUM and one MAX over all ranks make them
right for the whole model, and a copy to pinned memory is started; it is read after the *next* step,
when it has long arrived, so nothing waits for the device. All ranks read the same numbers (what
data parallelism relies on, too), judge them by the same pure rule and act at the same step.

Shape legend: L layers, H query heads of the whole model; n steps since the last record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_patch.attention.capabilities import OURS
from megatron_patch.runtime.watcher import Action, Pin, ResumePoint, StepResult, Stop, Watcher
from megatron_patch.stability import guard, record
from megatron_patch.stability.capture import Capturer, Wanted, triggers_in, worst
from megatron_patch.stability.gradients import LayerNorms
from megatron_patch.stability.history_from_parent import history_from_parent
from megatron_patch.stability.names import EXACT_DELTA, LEVELS, level_name
from megatron_patch.stability.observe import Observer, Request, find_sites
from megatron_patch.stability.step_window import StepWindow
from megatron_patch.stability.sums import FIELDS, HeadSums, head_metrics
from megatron_patch.stability.warning import Point, Rule, Verdict, judge, spike_score
from megatron_patch.stability.weights import SpectralNorms
from megatron_patch.stability.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_patch.monitor.hub import Monitor
    from megatron_patch.parallel.setup import Layout
    from megatron_patch.schema.run import RunConfig

RECENT = 20  # records the spike score compares with


@dataclass(slots=True)
class _Pending:
    """Sums on their way to the host."""

    step: int
    steps: int
    lr: float
    total: torch.Tensor
    maxima: torch.Tensor
    event: Any


class Stability(Watcher):
    """Telemetry, early warning, guard and captures; begins anew at `load_state`.

    Args:
        run: configuration.
        layout: coordinates of this rank.
        chunks: wrapped model chunks; roots: the GPTModels inside them.
        monitor: where lines and scalars go.
        run_dir: directory of the run.
    """

    def __init__(
        self,
        run: RunConfig,
        layout: Layout,
        chunks: Sequence[Any],
        roots: Sequence[torch.nn.Module],
        *,
        monitor: Monitor,
        run_dir: Path,
    ) -> None:
        self.run, self.layout, self.monitor, self.run_dir = run, layout, monitor, run_dir
        self.options = run.stability
        self.rule = Rule.of(run.stability, warmup_steps=run.optimizer.warmup_steps)
        self._model = chunks, roots
        self._began = False
        self._reset()

    def _reset(self) -> None:
        """Nothing was observed, judged or captured yet."""
        run, layout = self.run, self.layout
        chunks, roots = self._model
        decoder, layers = run.model.num_layers, run.model.attention_layers
        heads = run.model.num_attention_heads
        cp = parallel_state.get_context_parallel_group() if layout.cp_size > 1 else None
        self.observer = Observer(find_sites(roots, decoder_layers=decoder), cp_group=cp)
        self.capturer = Capturer(run, layout, self.run_dir / "captures")
        self.heads = HeadSums(
            layers=layers,
            heads=heads,
            first_head=layout.tp_rank * (heads // layout.tp_size),
            rows=self.options.rows,
            sequences=self.options.sequences,
            device=layout.device,
        )
        self.norms = LayerNorms(
            chunks, roots, decoder_layers=decoder, layers=layers, device=layout.device
        )
        self.weights = SpectralNorms(self.observer.sites)
        self.window = StepWindow(self.options.interval, layout)
        self._observing = False
        self._pending: _Pending | None = None
        self._pinned: dict[int, torch.Tensor] = {}
        self._writer: Writer | None = None
        self.switched_at = 0
        self.history = record.History(self.rule, compensated=self._compensated)
        self._switch_due = False
        self._stopped = False
        self._actions: list[Action] = []
        self._triggered: set[str] = set()
        self.verdict: Verdict | None = None
        self.latest: dict[str, float] = {}
        self._maxima: dict[str, Any] | None = None

    # ------------------------------------------------------------------ start

    def load_state(self, at: ResumePoint) -> None:
        """Go on after a step: records, history, and a switch that the run has made. Collective.

        Files in the run directory may say more of the switch than the checkpoint does.

        Raises:
            BackendError: the switch cannot be repeated in this configuration.
            ConfigError: switched.json is damaged.
        """
        if self._began:  # a rewind
            self._reset()
        self._began = True
        step, switched_at = at.step, at.switched_at
        first = self.layout.print_rank
        told = guard.told(self.run_dir, step, first=first, say=self.monitor.say)
        self.switched_at = guard.in_force_from(switched_at, told, step=step)
        if self.switched_at and not switched_at:
            self.monitor.say(
                f"stability guard: step {step:,} was saved before the switch that "
                f"{guard.FILE} tells of (a start without that file goes on as the checkpoint says)"
            )
        if self.options.enabled:
            self.window.restore(at.extra.get("stability"), step)
            found: list[Any] = [None]
            if self.layout.print_rank:
                # And `switched_at`, for the other ranks as well.
                history = self._open(step, own=at.has_saved)
                found = [(history, self.switched_at, triggers_in(self.run_dir / "captures"))]
            torch.distributed.broadcast_object_list(found, src=0)
            self.history, self.switched_at, self._triggered = found[0]
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
        self.monitor.say(f"stability guard: it switched after step {self.switched_at:,}; {how}")

    def _open(self, step: int, *, own: bool) -> record.History:
        """First rank: the files, and what they say about the steps before."""
        meta = record.make_meta(
            layers=self.run.model.attention_layers,
            heads=self.run.model.num_attention_heads,
            interval=self.options.interval,
            rule=self.rule,
            attention=self._attention,
        )
        self._writer = Writer(self.run_dir, meta, start_step=step)
        for line in self._writer.messages(own=own):
            self.monitor.say(line)
        try:
            return self._history(step, own=own)
        except (OSError, ValueError, KeyError) as error:
            if self._writer.begun:
                raise
            self.monitor.say(f"early warning: begins anew at step {step:,} ({error})")
            return record.History(self.rule, compensated=self._compensated)

    def _history(self, step: int, *, own: bool) -> record.History:
        """What the files say up to ``step``; they say more where an attempt could not begin."""
        # What lies further back the rule does not look at, and weeks of it are gigabytes.
        start = max(0, step - self._reach)
        found = record.read(self.run_dir, after=start).until(step)
        if step and not own and self._history_from_parent(step, found.meta):
            found = record.read(self.run_dir, after=start).until(step)
        if len(found.records):
            self._maxima = _maxima(int(found.steps[-1]), found.heads["max_logit"][-1])
        switched_at = found.switched_at or 0
        if switched_at > step and not self.switched_at:
            # A checkpoint of the very step whose record made the guard switch, one step later.
            self.switched_at = switched_at
        after = max(self.switched_at, start)
        history = found.since(after).history(self.rule, after=after)
        # Another guard setting has just taken its switch back: nothing is known of these numerics.
        same = history.compensated == self._compensated
        return history if same else record.History(self.rule, compensated=self._compensated)

    def _history_from_parent(self, step: int, meta: dict[str, Any]) -> bool:
        """At the first start from another run's checkpoint: whether its records are here now."""
        writer, parent = self._writer, {"run": str(self._source), "step": step}
        if self._source is None or writer is None or meta.get("parent") == parent:
            return False
        try:
            found, records = history_from_parent(
                self._source, writer.meta, step=step, steps=self._reach
            )
            writer.begin_with(records, parent=parent)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.monitor.say(
                f"early warning: begins anew at step {step:,} ({self._source}: {error})"
            )
            return False
        self.monitor.say(f"early warning: looks back on {found} before step {step:,}")
        return True

    @property
    def _source(self) -> Path | None:
        """The checkpoint of another run that this one goes on from, its optimizer included."""
        options = self.run.checkpoint
        other = None if options.load_weights_only else options.load_from
        return None if other is None else Path(other)

    @property
    def _attention(self) -> str:
        """Backend, stabilizer and a borrowed backward of the configuration, as in meta.json."""
        attention = self.run.attention
        names: list[str] = [attention.backend, attention.stabilizer]
        if attention.backward not in OURS:
            names.append(attention.backward)
        return "/".join(names)

    @property
    def _in_force(self) -> int:
        """The step after which the guard switched; 0 if it did not, or that was taken back."""
        return self.switched_at if self.options.guard == "switch" else 0

    @property
    def _compensated(self) -> bool:
        """Whether the run computes with what the guard switches to."""
        return self._in_force > 0 or self._attention.startswith(EXACT_DELTA)

    @property
    def _reach(self) -> int:
        """Steps that the rule can look back on."""
        rule = self.rule
        # The first record that confirms looks back as far, and its first median has as many steps.
        before = rule.smooth_steps + rule.confirm_steps + RECENT * self.options.interval
        return max(rule.reference_steps, rule.head_steps) + before

    # ------------------------------------------------------------------- step

    def before_step(self, step: int) -> None:
        """See `Watcher`."""
        self._observing = self.options.enabled and step % self.options.interval == 0
        requests = []
        if self._observing:
            self.heads.clear(phase=step // self.options.interval)
            self.norms.clear()
            requests.append(Request(micro_batch=0, layers=None, callback=self.heads.add))
        capture = self.capturer.request(step)
        if capture is not None:
            requests.append(capture)
        self.observer.arm(requests)

    def grads_reduced(self) -> None:
        """See `Watcher`."""
        if self._observing:
            self.norms.measure()

    def after_step(self, step: int, result: StepResult) -> list[Action]:
        """Read what the step before left, send off what is due. Collective."""
        self.observer.disarm()
        for path in self.capturer.saved:
            self.monitor.say(f"captured {path.name}")
        self.capturer.saved = []
        if self._switch_due and step >= self.switched_at:
            self._switch_due = False
            self._switch_again()
        if not self.options.enabled:
            return []
        self.window.observe(result)
        actions = self.flush(step)
        if self._observing:
            self._send(step, result.lr)
        self._observing = False
        return actions

    def _send(self, step: int, lr: float) -> None:
        """Reduce over all ranks and start the copy to the host."""
        sums, logits = self.heads.totals()
        maxima = torch.full((3, *logits.shape), -math.inf, device=self.layout.device)
        maxima[0] = logits
        first = self.heads.first_head
        for site, norms in self.weights.measure():
            maxima[1:, site.layer, first : first + norms.shape[1]] = norms
        series = self.window.drain()
        total = torch.cat([sums.flatten(), self.norms.squares, series.flatten()])
        torch.distributed.all_reduce(total)
        torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX)
        event = None
        if total.is_cuda:
            total, maxima = self._to_host(0, total), self._to_host(1, maxima)
            event = torch.cuda.Event()
            event.record()
        self._pending = _Pending(step, len(series), lr, total, maxima, event)

    def _to_host(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory that arrives later; it is read before the slot's next one.

        The memory is kept: allocating pinned memory waits for the device.
        """
        kept = self._pinned.get(slot)
        if kept is None or kept.numel() < x.numel():
            kept = self._pinned[slot] = torch.empty(x.numel(), dtype=x.dtype, pin_memory=True)
        host = kept[: x.numel()].view(x.shape)
        host.copy_(x, non_blocking=True)
        return host

    # ------------------------------------------------------------------- save

    def before_save(self) -> None:
        """Make `state` that of this step. Collective."""
        self.window.synchronize()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, beside the switch: plain data."""
        return {"stability": self.window.state()}

    # ------------------------------------------------------------------- read

    def finish(self, step: int) -> list[Action]:
        """Take in what is on its way, as the step after ``step`` would. Collective.

        So a switch comes after the same step whether the run was stopped here or not.
        """
        return self.flush(step + 1)

    def before_rewind(self, back_to: int) -> list[Action]:
        """Take in what is on its way of a step that stays; release hooks and files. Collective.

        No later step would take it in: the one it was measured in is not repeated. A switch is in
        force from ``back_to`` on: numerics that were exchanged stay exchanged. A file says so
        before anything is given up, so that a crash cannot forget it.
        """
        pending, actions = self._pending, []
        if pending is not None and pending.step <= back_to:
            actions = self.finish(pending.step)
        if self.switched_at and self.layout.print_rank:
            guard.remember(self.run_dir, min(self.switched_at, max(1, back_to)))
        self.close()
        return actions

    def flush(self, now: int) -> list[Action]:
        """Take in the record on its way, if there is one, after step ``now``; on all ranks."""
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        if pending.event is not None:
            pending.event.synchronize()
        layers, heads = pending.maxima.shape[1:]
        total, maxima = pending.total.numpy(), pending.maxima.numpy()
        cut = layers * heads * len(FIELDS)
        sums = total[:cut].reshape(layers, heads, len(FIELDS))
        squares = total[cut : cut + layers + 1]
        series = total[cut + layers + 1 :].reshape(pending.steps, 3)
        by_head = head_metrics(sums, maxima[0])
        for name, values in (("wq_norm", maxima[1]), ("wk_norm", maxima[2])):
            by_head[name] = np.where(np.isneginf(values), np.float32(np.nan), values)
        by_layer = {"grad_norm": np.sqrt(squares[:layers]).astype(np.float32)}
        scalars = self._scalars(pending, series)
        scalars["grad_norm_rest"] = float(np.sqrt(squares[layers]))
        scalars["rows"] = float(sums[..., FIELDS.index("rows")].max())
        point = self.history.add(step=pending.step, scalars=scalars, heads=by_head)
        self.history.forget(point.step - self._reach)
        verdict = self._judge(point, now)
        self._trigger(point, verdict, by_head)
        scalars["level"], scalars["switched"] = float(verdict.code), float(self._in_force)
        self._publish(pending.step, scalars, by_layer, by_head)
        actions, self._actions = self._actions, []
        return actions

    def _trigger(self, point: Point, verdict: Verdict, by_head: dict[str, np.ndarray]) -> None:
        """Ask for a capture of the next step at the first sign of each kind; all ranks alike."""
        limit = self.options.capture_at_grad_norm
        if point.step <= self.rule.settle_steps:
            return
        # Danger without a watch before it is the first sign of both.
        seen = LEVELS[1 : verdict.code + 1]
        signs: list[str] = [name for name in seen if name in self.options.capture_at]
        if limit is not None and not point.grad_norm <= limit:
            signs.append("grad_norm")
        new = [name for name in signs if name not in self._triggered]
        if not new:
            return
        self._triggered |= set(new)
        signal = record.error_to_signal(by_head["used_error_rms"], by_head["kappa"])
        if not np.isfinite(signal).any():
            signal = record.error_to_signal(by_head["delta_error_rms"], by_head["kappa"])
        heads = worst(
            signal,
            layers=self.options.capture_worst_layers,
            heads=self.options.capture_worst_heads,
        )
        if not heads:
            self.monitor.say(f"no capture at {'-'.join(new)}: no head of the model was measured")
            return
        self.capturer.soon(Wanted(trigger="-".join(new), heads=heads))

    def _scalars(self, pending: _Pending, series: np.ndarray) -> dict[str, float]:
        with np.errstate(divide="ignore", invalid="ignore"):
            losses = series[:, 0] / series[:, 1]
        norms = series[:, 2]
        recent = [p.grad_norm for p in self.history.points[-RECENT:]]
        return {
            "loss_mean": float(losses.mean()),
            "loss_max": float(losses.max()),
            "grad_norm_mean": float(norms.mean()),
            "grad_norm_max": float(norms.max()),
            "lr": pending.lr,
            "spike_score": spike_score(recent, float(norms.max())),
        }

    def _judge(self, point: Point, now: int) -> Verdict:
        before, verdict = self.verdict, judge(self.history.points, self.rule)
        self.verdict, mode = verdict, self.options.guard
        verdict_is_new = before is None or verdict.level != before.level
        if mode != "off" and verdict_is_new:
            self.monitor.say(f"step {point.step:,}: {verdict.line()}")
        if verdict.level != "danger":
            return verdict
        attention = math.isfinite(point.loss) and math.isfinite(point.grad_norm)
        if mode == "warn" and attention and not self._compensated and verdict_is_new:
            self.monitor.say(guard.ADVICE)
        if mode != "off":
            self._actions.append(Pin(point.step))
        if mode == "stop" and not self._stopped:
            self._stopped = True
            self._actions.append(Stop(verdict.reason, guard.StabilityStop.of(verdict.reason, now)))
        elif mode == "switch" and not self.switched_at:
            self._switch(now)
        return verdict

    def _switch(self, now: int) -> None:
        """Between two steps, on all ranks between the same two; the rule starts anew."""
        guard.switch(self.observer.sites)
        self.switched_at, self.history = now, record.History(self.rule, compensated=True)
        self.monitor.say(
            f"stability guard: switched attention to stable_flash, stabilizer compensated, after "
            f"step {self.switched_at:,}"
        )

    def _publish(
        self,
        step: int,
        scalars: dict[str, float],
        by_layer: dict[str, np.ndarray],
        by_head: dict[str, np.ndarray],
    ) -> None:
        """Files, TensorBoard, and what the next log line shows; first rank only."""
        if self._writer is None:
            return
        self._writer.write(step, scalars=scalars, layers=by_layer, heads=by_head)
        self._maxima = _maxima(step, by_head["max_logit"])
        shown = {f"stability/{n}": v for n, v in scalars.items() if math.isfinite(v)}
        worst = {name: record.worst(name, values) for name, values in by_head.items()}
        for name, values in {**by_layer, **worst}.items():
            for layer, value in enumerate(values):
                if math.isfinite(value):
                    shown[f"stability/{name}/layer_{layer:03d}"] = float(value)
        self.monitor.scalars(step, shown)
        self.latest = {"stability/step": float(step), "stability/level": scalars["level"]}
        if math.isfinite(scalars["spike_score"]):
            self.latest["stability/spike_score"] = scalars["spike_score"]
        coherence = record.coherence(by_head["delta_error_mean"], by_head["delta_error_rms"])
        for name, values in (
            ("max_logit", by_head["max_logit"]),
            ("delta_error_rms", by_head["delta_error_rms"]),
            ("coherence", coherence),
            ("kappa", by_head["kappa"]),
        ):
            if np.isfinite(values).any():
                self.latest[f"stability/{name}"] = float(np.nanmax(values))

    def scalars(self) -> dict[str, float]:
        """What the last record says, for the next log line; first rank only."""
        return self.latest

    def status(self) -> list[str]:
        """Verdict of the last record."""
        level = self.latest.get("stability/level")
        return [] if level is None else [f"attention {level_name(level)}"]

    def last_maxima(self) -> dict[str, Any] | None:
        """Largest logits by layer and head of the newest record, if any; first rank only."""
        return self._maxima

    def close(self) -> None:
        """Take hooks off and close files."""
        self.observer.disarm()
        self.capturer.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _maxima(step: int, table: np.ndarray) -> dict[str, Any]:
    """As ``spikes.jsonl`` has it. ``table``: [L, H] largest logits."""
    return {
        "step": step,
        "from": "stability telemetry, the last record before the spike",
        "max_logit": {str(n): [round(float(x), 4) for x in row] for n, row in enumerate(table)},
    }
