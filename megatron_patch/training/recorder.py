"""Turns steps into records, at logging intervals only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from megatron_patch.monitor.flops import flops_per_token
from megatron_patch.monitor.metrics import StepMetrics
from megatron_patch.monitor.peaks import peak_tflops
from megatron_patch.runtime.watcher import StepResult
from megatron_patch.training import auxiliary
from megatron_patch.training.session import Session

GIB = 1024**3


def device_peak(session: Session) -> tuple[float | None, str]:
    """(dense BF16 peak in TFLOP/s or None, the start-up line that says where it comes from)."""
    run = session.run
    if run.training.device == "cpu":
        return None, "MFU: omitted, the CPU has no tensor-core peak to compare with"
    name = torch.cuda.get_device_name(session.layout.device)
    if run.logging.peak_tflops is not None:
        return run.logging.peak_tflops, f"MFU: against logging.peak_tflops of {name}"
    peak = peak_tflops(name)
    if peak is None:
        return None, f"MFU: omitted, no peak is known for {name}; set logging.peak_tflops"
    return peak, f"MFU: against {peak:g} TFLOP/s, the dense BF16 peak of {name}"


class Recorder:
    """Clock and bookkeeping between two records.

    ``vocab_size`` is the padded vocabulary, for the FLOP count; ``line`` says what MFU compares
    with.
    """

    def __init__(self, session: Session, *, vocab_size: int) -> None:
        self._session = session
        self._peak, self.line = device_peak(session)
        self._flops = flops_per_token(session.run, vocab_size=vocab_size)
        self.restart()

    def restart(self) -> None:
        """Begin the clock now (everything before was set-up)."""
        self._began = self._window = time.perf_counter()
        self._away, self._steps, self._tokens = 0.0, 0, 0

    def stepped(self) -> None:
        """A step was dispatched."""
        self._steps += 1
        self._tokens += self._session.sequences * self._session.run.model.seq_length

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Time that is not training: evaluation, checkpoints."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._away += time.perf_counter() - begin

    def record(self, step: int, result: StepResult, consumed_tokens: int) -> StepMetrics:
        """The record of ``step``, from what the ranks agreed on before its update. Collective.

        Waits for the device for no more than an expert model's auxiliary losses: what was
        dispatched after the update runs on, and the clock is read where each step's wait has ended.
        """
        session = self._session
        assert session.guard.agreed is not None, "a step was made"
        now = time.perf_counter()
        seconds = (now - self._window - self._away) / max(self._steps, 1)
        rate = self._tokens / max(self._steps, 1) / seconds
        self._window, self._away, self._steps, self._tokens = now, 0.0, 0, 0
        tflops = rate * self._flops / session.layout.world_size / 1e12
        return StepMetrics(
            step=step,
            consumed_tokens=consumed_tokens,
            loss=session.guard.agreed.loss,
            grad_norm=float(result.grad_norm),
            lr=result.lr,
            step_seconds=seconds,
            tokens_per_s=rate,
            tflops_per_device=tflops,
            mfu=None if self._peak is None else tflops / self._peak,
            memory_gib=self._memory(),
            skipped=session.skipped,
            nonfinite=session.guard.nonfinite,
            moe_aux_loss=auxiliary.moe_loss(session),
            mtp_loss=auxiliary.mtp_loss(session),
            elapsed_seconds=now - self._began,
        )

    def _memory(self) -> float | None:
        """Largest CUDA memory allocated so far; on CPU the process's peak resident set."""
        if self._session.run.training.device == "cuda":
            return torch.cuda.max_memory_allocated() / GIB
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
