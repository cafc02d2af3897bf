"""One rank of a test: runs a list of trainings in this process and reports what happened.

    RANK=.. WORLD_SIZE=.. python worker.py PLAN.json

The plan is a list of runs: ``{"set": [...], "nan": {...}, "signal": {...}}``. ``nan`` writes a NaN
into one rank's local gradient before it is reduced (rank null: into every rank's, after it was);
``signal`` delivers a real signal to one rank in the middle of a step; ``spike`` multiplies the
gradients of a step, ``times`` times; ``read`` reports which windows of the training data were read.
Results go to PLAN.json.rank<N>.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
import group_threads
from session_digest import digest


def install_faults(run: dict[str, Any]) -> None:
    """Patch the guard's hooks: one runs before gradients are reduced, one right after."""
    from megatron_patch.training.finite import StepGuard

    before, after = StepGuard.before_reduction, StepGuard.loss
    nan, sent, spike = run.get("nan"), run.get("signal"), dict(run.get("spike", {}))

    def before_reduction(self: Any, chunks: list[Any]) -> None:
        if nan and self.step == nan["step"] and self.layout.rank == nan["rank"]:
            plant_nan(chunks, nan["parameter"])
        if sent and self.step == sent["step"] and self.layout.rank == sent["rank"]:
            os.kill(os.getpid(), getattr(signal, sent["name"]))
        before(self, chunks)

    def loss(self: Any, total: Any) -> None:
        if nan and self.step == nan["step"] and nan["rank"] is None:
            plant_nan(self._chunks, nan["parameter"])
        if spike and self.step == spike["step"] and spike["times"]:
            spike["times"] -= 1
            for chunk in self._chunks:
                for parameter in chunk.parameters():
                    parameter.main_grad *= 1e4
        after(self, total)

    StepGuard.before_reduction, StepGuard.loss = before_reduction, loss  # type: ignore[method-assign]

    begin = StepGuard.agree_on_signal

    def agree_on_signal(self: Any) -> int:
        if sent and sent["step"] == 0 and self.layout.rank == sent["rank"]:  # during start-up
            os.kill(os.getpid(), getattr(signal, sent["name"]))
        return begin(self)

    StepGuard.agree_on_signal = agree_on_signal  # type: ignore[method-assign]

    def undo() -> None:
        StepGuard.before_reduction, StepGuard.loss = before, after  # type: ignore[method-assign]
        StepGuard.agree_on_signal = begin  # type: ignore[method-assign]

    run["_undo"] = undo


def plant_nan(chunks: list[Any], wanted: str) -> None:
    """One NaN in the gradient of the parameter called ``wanted``."""
    from megatron_patch.parallel.buffers import unwrap

    for chunk in chunks:
        for name, parameter in unwrap(chunk).named_parameters():
            if name == wanted:
                parameter.main_grad.view(-1)[3] = math.nan


def windows_read(found: list[Any]) -> Callable[[], None]:
    """Note (file, number of the window in its order) of every training sample read."""
    from megatron_patch.data.loader import _Part

    right = _Part.read

    def read(self: Any, index: int, out: torch.Tensor) -> None:
        if self.source.first == 0:  # the others are of the validation split
            found.append((self.file.path.name, index))
        right(self, index, out)

    _Part.read = read  # type: ignore[method-assign]
    return lambda: setattr(_Part, "read", right)


def execute(config: str, run: dict[str, Any]) -> dict[str, Any]:
    """One training; the exit code and weights, or the error."""
    from megatron_patch.cli.app import exit_code
    from megatron_patch.config import load
    from megatron_patch.parallel import setup
    from megatron_patch.training import trainer

    result: dict[str, Any] = {}
    install_faults(run)
    undo_read = windows_read(result.setdefault("read", [])) if run.get("read") else None
    original = trainer.Trainer.run_to_end

    def run_to_end(self: Any) -> None:
        try:
            original(self)
        finally:
            result["weights"] = digest(self.session)
            result["step"] = self.position.step
            result["frozen"] = gc.get_freeze_count()

    trainer.Trainer.run_to_end = run_to_end  # type: ignore[method-assign]
    try:
        result["code"] = trainer.train(load(config, run["set"]))
        if "frozen" in result:  # it trained
            result["frozen_after"] = gc.get_freeze_count()
    except Exception as error:
        result["error"], result["code"] = str(error), exit_code(error)
        if result["code"] is None:
            raise
        setup.destroy()  # the plan makes all ranks fail together
    finally:
        trainer.Trainer.run_to_end = original  # type: ignore[method-assign]
        run["_undo"]()
        if undo_read is not None:
            undo_read()
    group_threads.forget()
    return result


def checkpoints_found(setting: str) -> str:
    """A setting with the directory of a checkpoint for ``NAME@STEP``."""
    key, _, value = setting.partition("=")
    name, at, step = value.partition("@")
    if not at:
        return setting
    (found,) = Path("runs", name, "checkpoints").glob(f"step_{int(step):08d}.*")
    return f"{key}={found}"


def wait_for_first_rank(plan: Path, runs: int) -> None:
    """Until the first rank has finished ``runs`` of the plan; if it fails, we are killed."""
    report = Path(f"{plan}.rank0")
    while not report.exists() or len(json.loads(report.read_text() or "[]")) < runs:
        time.sleep(0.05)


def main() -> None:
    plan_path = Path(sys.argv[1])
    plan = json.loads(plan_path.read_text())
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    report = Path(f"{plan_path}.rank{rank}")
    results: list[dict[str, Any]] = []
    for index, run in enumerate(plan["runs"]):
        ranks = run.get("ranks", world)
        os.environ["MASTER_PORT"] = str(plan["ports"][index])
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
        if rank < ranks:
            run["set"] = [checkpoints_found(setting) for setting in run["set"]]
            results.append(execute(plan["config"], run))
        else:
            wait_for_first_rank(plan_path, index + 1)
            results.append({})
        part = Path(f"{report}.part")
        part.write_text(json.dumps(results))
        part.replace(report)


if __name__ == "__main__":
    main()
