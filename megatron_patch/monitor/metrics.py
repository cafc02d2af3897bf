"""One step's record, as every sink receives it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(kw_only=True, frozen=True, slots=True)
class StepMetrics:
    """What is known about one optimizer step at a logging interval. None: not measured there."""

    step: int
    """Optimizer steps completed, this one included."""
    consumed_tokens: int
    """Tokens trained on since step 0, over all ranks."""
    loss: float | None = None
    """Mean token loss (nats) of this step's global batch."""
    grad_norm: float | None = None
    """Global gradient norm of this step, before clipping."""
    lr: float | None = None
    """Learning rate this step used."""
    step_seconds: float | None = None
    """Wall time of a step, mean since the last record; evaluation and checkpoints left out."""
    tokens_per_s: float | None = None
    """Tokens per second over all ranks, mean since the last record."""
    tflops_per_device: float | None = None
    """Model TFLOP/s of one device (``monitor.flops``)."""
    mfu: float | None = None
    """tflops_per_device over the device's dense BF16 peak, 0 to 1."""
    memory_gib: float | None = None
    """Largest memory allocated on this rank's device so far, GiB."""
    skipped: int = 0
    """Updates skipped since the run started."""
    nonfinite: int = 0
    """Steps with a non-finite loss or gradient since the run started."""
    eval_loss: float | None = None
    """Mean token loss (nats) of the validation batches, where one was computed."""
    moe_aux_loss: float | None = None
    """Load-balancing loss of the MoE routers, mean over layers."""
    mtp_loss: float | None = None
    """Loss of the multi-token-prediction heads, mean over depths."""
    elapsed_seconds: float | None = None
    """Wall time of this process since training began."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further scalars by name; they reach TensorBoard, W&B and one JSON column of the CSV."""
    status: tuple[str, ...] = ()
    """Words for the console line alone."""

    def scalars(self) -> dict[str, float]:
        """Every number that was measured, by name, extras included."""
        known = {name: getattr(self, name) for name in CSV_COLUMNS if name != "extra"}
        return {k: v for k, v in known.items() if v is not None and k != "step"} | self.extra

    def csv_row(self) -> dict[str, str]:
        """Text of every CSV column; floats in full, so equal text means equal bits."""
        return {name: _csv_text(getattr(self, name)) for name in CSV_COLUMNS}


CSV_COLUMNS = [f.name for f in fields(StepMetrics) if f.name != "status"]


def _csv_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True) if value else ""
    return repr(value) if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """``1:02:03``; days are spelled out."""
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days} d {text}" if days else text


def console_line(m: StepMetrics, *, train_steps: int, seconds_left: float | None) -> str:
    """The line a person reads, fields in fixed order, absent ones left out."""
    parts = [f"step {m.step:>{len(str(train_steps))}}/{train_steps}"]
    for value, form in (
        (m.loss, "loss {:.4f}"),
        (m.eval_loss, "eval loss {:.4f}"),
        (m.grad_norm, "grad norm {:.3f}"),
        (m.lr, "lr {:.2e}"),
        (m.moe_aux_loss, "aux {:.4f}"),
        (m.mtp_loss, "mtp {:.4f}"),
        (m.tokens_per_s, "{:,.0f} tok/s"),
        (m.tflops_per_device, "{:.3g} TFLOP/s"),
        (None if m.mfu is None else 100 * m.mfu, "MFU {:.1f}%"),
        (m.memory_gib, "mem {:.1f} GiB"),
    ):
        if value is not None:
            parts.append(form.format(value))
    parts += [*m.status, f"skipped {m.skipped}", f"nan {m.nonfinite}"]
    if seconds_left is not None:
        parts.append(f"left {duration(seconds_left)}")
    return " | ".join(parts)
