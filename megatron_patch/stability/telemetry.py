"""One object per run that watches attention: `Stability`, called by the training loop.

    begin(step) -> the step -> reduced() inside it, between reduction and update -> finish(step)

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

from megatron_patch.checkpoint import last_checkpoint
from megatron_patch.stability import guard, lost, record
from megatron_patch.stability.capture import Capturer, Wanted, triggers_in, worst
from megatron_patch.stability.gradients import LayerNorms
from megatron_patch.stability.lookback import look_back
from megatron_patch.stability.names import COMPENSATED, LEVELS
from megatron_patch.stability.observe import Observer, Request, find_sites
from megatron_patch.stability.series import Series
from megatron_patch.stability.sums import FIELDS, HeadSums, head_metrics
from megatron_patch.stability.warning import Point, Rule, Verdict, judge, spike_score
from megatron_patch.stability.weights import SpectralNorms
from megatron_patch.stability.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron_patch.monitor.hub import Monitor
    from megatron_patch.parallel.setup import Layout
    from megatron_patch.schema.run import RunConfig
    from megatron_patch.training.step import StepResult

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


class Stability:
    """Telemetry, early warning, guard and captures of one attempt.

    Args:
        run: configuration.
        layout: coordinates of this rank.
        chunks: wrapped model chunks; roots: the GPTModels inside them.
        monitor: where lines and scalars go.
        run_dir: directory of the run.
        at_danger: told the step of every record at `danger`, unless the guard is off; local.
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
        at_danger: Callable[[int], None],
    ) -> None:
        self._at_danger = at_danger
        self.run, self.layout, self.monitor, self.run_dir = run, layout, monitor, run_dir
        self.options = run.stability
        self.rule = Rule.of(run.stability, warmup_steps=run.optimizer.warmup_steps)
        decoder, layers = run.model.num_layers, run.model.attention_layers
        heads = run.model.num_attention_heads
        cp = parallel_state.get_context_parallel_group() if layout.cp_size > 1 else None
        self.observer = Observer(find_sites(roots, decoder_layers=decoder), cp_group=cp)
        self.capturer = Capturer(run, layout, run_dir / "captures")
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
        self.series = Series(self.options.interval, layout)
        self._observing = False
        self._pending: _Pending | None = None
        self._pinned: dict[int, torch.Tensor] = {}
        self._writer: Writer | None = None
        self.switched_at = 0
        self.history = record.History(self.rule, compensated=self._compensated)
        self._switch_due = False
        self.stop_reason: str | None = None
        self._triggered: set[str] = set()
        self.verdict: Verdict | None = None
        self.latest: dict[str, float] = {}

    # ------------------------------------------------------------------ start

    def start(self, step: int, *, switched_at: int, saved: dict[str, Any] | None = None) -> None:
        """Go on after ``step``: records, history, and a switch that the run has made. Collective.

        Args:
            step: steps done.
            switched_at: what the checkpoint says; files in the run directory may say more.
            saved: what `state` said at that checkpoint; None: nothing is known of it.

        Raises:
            BackendError: the switch cannot be repeated in this configuration.
            ConfigError: switched.json is damaged.
        """
        first = self.layout.print_rank
        told = guard.told(self.run_dir, step, first=first, say=self.monitor.say)
        self.switched_at = guard.in_force_from(switched_at, told, step=step)
        if self.switched_at and not switched_at:
            self.monitor.say(
                f"stability guard: step {step:,} was saved before the switch that "
                f"{guard.FILE} tells of (a start without that file goes on as the checkpoint says)"
            )
        if self.options.enabled:
            self.series.restore(saved, step)
            found: list[Any] = [None]
            if self.layout.print_rank:
                history = self._open(step)  # and `switched_at`, for the other ranks as well
                found = [(history, self.switched_at, triggers_in(self.run_dir / "captures"))]
            torch.distributed.broadcast_object_list(found, src=0)
            self.history, self.switched_at, self._triggered = found[0]
        if self.switched_at > step:
            self._switch_due = True  # decided at the record of this step, one ahead: see `last`
        elif self.switched_at:
            self._switch_again()

    def remember_switch(self, back_to: int) -> None:
        """Before a rewind: file first, so that a crash cannot forget that the guard switched.

        From ``back_to`` on it is in force: numerics that were exchanged stay exchanged. Local; what
        follows is to be collective.
        """
        if self.switched_at and self.layout.print_rank:
            guard.remember(self.run_dir, min(self.switched_at, max(1, back_to)))

    def _switch_again(self) -> None:
        """What the guard did before the resume; another guard setting is the user's wish."""
        if self.options.guard == "switch":
            guard.switch(self.observer.sites)
            how = "stabilizer compensated since then"
        else:
            how = f"stability.guard is {self.options.guard} now: attention is as configured"
        self.monitor.say(f"stability guard: it switched after step {self.switched_at:,}; {how}")

    def _open(self, step: int) -> record.History:
        """First rank: the files, and what they say about the steps before."""
        meta = record.make_meta(
            layers=self.run.model.attention_layers,
            heads=self.run.model.num_attention_heads,
            interval=self.options.interval,
            rule=self.rule,
            attention=self._attention,
        )
        self._writer = Writer(self.run_dir, meta, start_step=step)
        if self._writer.set_aside:
            self.monitor.say(
                f"early warning: begins anew at step {step:,}; the records before it are of "
                f"another version or model and kept as stability/{self._writer.set_aside}"
            )
        own = last_checkpoint.has_saved(self.run_dir)
        for line in self._writer.notes(own=own):
            self.monitor.say(line)
        self._say_of_loss(step, own=own)
        try:
            return self._history(step)
        except (OSError, ValueError, KeyError) as error:
            if self._writer.begun:
                raise
            self.monitor.say(f"early warning: begins anew at step {step:,} ({error})")
            return record.History(self.rule, compensated=self._compensated)

    def _say_of_loss(self, step: int, *, own: bool) -> None:
        """First rank: whether the loss was lost before; ``own``: the run has checkpoints."""
        try:
            for line in lost.at_start(self.run_dir, step, source=self._source, own=own):
                self.monitor.say(line)
        except Exception as error:  # the others wait, and this is no reason to end a run
            self.monitor.say(f"warning: where the loss stood before is not known: {error}")

    def _history(self, step: int) -> record.History:
        """What the files say up to ``step``; they say more where nothing was taken over yet."""
        found = record.read(self.run_dir).until(step)
        if step and not len(found.records) and self._look_back(step):
            found = record.read(self.run_dir).until(step)
        told = found.switched_at or 0
        if told > step and not self.switched_at:
            # A checkpoint of the very step whose record made the guard switch, one step later.
            self.switched_at = told
        # What lies further back the rule does not look at, and weeks of it are gigabytes.
        after = max(self.switched_at, step - self._reach)
        history = found.since(after).history(self.rule, after=after)
        # Another guard setting has just taken its switch back: nothing is known of these numerics.
        same = history.compensated == self._compensated
        return history if same else record.History(self.rule, compensated=self._compensated)

    def _look_back(self, step: int) -> bool:
        """At the first start from another run's checkpoint: whether its records are here now."""
        if self._source is None:
            return False
        try:
            found = look_back(self.run_dir, self._source, step=step, steps=self._reach)
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
        """Backend and stabilizer of the configuration, as meta.json names them."""
        return f"{self.run.attention.backend}/{self.run.attention.stabilizer}"

    @property
    def _in_force(self) -> int:
        """The step after which the guard switched; 0 if it did not, or that was taken back."""
        return self.switched_at if self.options.guard == "switch" else 0

    @property
    def _compensated(self) -> bool:
        """Whether the run computes with what the guard switches to."""
        return self._in_force > 0 or self._attention == COMPENSATED

    @property
    def _reach(self) -> int:
        """Steps that the rule can look back on."""
        rule = self.rule
        # The first record that confirms looks back as far, and its first median has as many steps.
        before = rule.smooth_steps + rule.confirm_steps + RECENT * self.options.interval
        return max(rule.reference_steps, rule.head_steps) + before

    # ------------------------------------------------------------------- step

    def begin(self, step: int) -> None:
        """Before ``step`` (1-based)."""
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

    def reduced(self) -> None:
        """Inside the step: gradients are reduced and not clipped yet."""
        if self._observing:
            self.norms.measure()

    def finish(self, step: int, result: StepResult) -> None:
        """After ``step``. Reads what the step before left, sends off what is due. Collective."""
        self.observer.disarm()
        for path in self.capturer.saved:
            self.monitor.say(f"captured {path.name}")
        self.capturer.saved = []
        if self._switch_due and step >= self.switched_at:
            self._switch_due = False
            self._switch_again()
        if not self.options.enabled:
            return
        self.series.note(result)
        self.flush(step)
        if self._observing:
            self._send(step, result.lr)
        self._observing = False

    def _send(self, step: int, lr: float) -> None:
        """Reduce over all ranks and start the copy to the host."""
        sums, logits = self.heads.totals()
        maxima = torch.full((3, *logits.shape), -math.inf, device=self.layout.device)
        maxima[0] = logits
        first = self.heads.first_head
        for site, norms in self.weights.measure():
            maxima[1:, site.layer, first : first + norms.shape[1]] = norms
        series = self.series.take()
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
        self.series.settle()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, beside the switch: plain data."""
        return self.series.state()

    # ------------------------------------------------------------------- read

    def last(self, step: int) -> None:
        """The attempt ends after ``step``: take in what is on its way, as the step after would.

        So a switch comes after the same step whether the run was stopped here or not.
        """
        self.flush(step + 1)

    def leave(self, back_to: int | None) -> None:
        """The run goes back to step ``back_to``: take in what is on its way of a step that stays.

        No later step would: the one it was measured in is not repeated.
        """
        if self._pending is not None and back_to is not None and self._pending.step <= back_to:
            self.last(self._pending.step)

    def flush(self, now: int) -> None:
        """Take in the record on its way, if there is one, after step ``now``; on all ranks."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
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
            self._at_danger(point.step)
        if mode == "stop" and self.stop_reason is None:
            self.stop_reason = verdict.reason
        elif mode == "switch" and not self.switched_at:
            self._switch(now)
        return verdict

    def _switch(self, now: int) -> None:
        """Between two steps, on all ranks between the same two; the rule starts anew."""
        guard.switch(self.observer.sites)
        points = self.history.points
        before = lost.standing([p.step for p in points], [p.loss for p in points])
        self.switched_at, self.history = now, record.History(self.rule, compensated=True)
        self.monitor.say(
            f"stability guard: switched attention to stable_flash, stabilizer compensated, after "
            f"step {self.switched_at:,}"
        )
        if before is not None and before.lost:
            self.monitor.say(before.line())

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

    def close(self) -> None:
        """Take hooks off and close files."""
        self.observer.disarm()
        self.capturer.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
