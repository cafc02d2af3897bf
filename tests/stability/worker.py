"""A training rank for the stability tests: tests/training/worker.py with three additions.

Triton's interpreter computes BF16 as the hardware does; and ``{"grow": 1.5}`` in the plan
multiplies the loss of step n, but not its report, by 1.5^n, so that the gradient norm rises as it
does before an explosion; ``{"full": [first, last]}`` lets no file of the first rank grow during
these steps.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent


def load_rank() -> Any:
    """The module that runs a plan."""
    spec = importlib.util.spec_from_file_location("rank", TESTS / "training" / "worker.py")
    assert spec is not None and spec.loader is not None
    rank = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rank)
    return rank


def grow(factor: float) -> Any:
    """Install the growing loss; returns the function that takes it out."""
    from megatron_patch.training import step
    from megatron_patch.training.finite import StepGuard

    begin, token_loss = StepGuard.begin, step.token_loss
    current = {"step": 0}

    def counted(self: Any, number: int, chunks: Any, **options: Any) -> None:
        current["step"] = number
        begin(self, number, chunks, **options)

    def larger(*args: Any) -> Any:
        total, tokens, report = token_loss(*args)
        return total * factor ** current["step"], tokens, report

    def undo() -> None:
        StepGuard.begin, step.token_loss = begin, token_loss  # type: ignore[method-assign]

    StepGuard.begin, step.token_loss = counted, larger  # type: ignore[method-assign]
    return undo


def full(first: int, last: int) -> Any:
    """Install the full disk of the first rank; returns the function that takes it out."""
    from megatron_patch.training.finite import StepGuard

    begin, before = StepGuard.begin, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(self: Any, number: int, chunks: Any, **options: Any) -> None:
        if os.environ["RANK"] == "0":
            size = 1 if first <= number <= last else before[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        begin(self, number, chunks, **options)

    def undo() -> None:
        StepGuard.begin = begin  # type: ignore[method-assign]
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    StepGuard.begin = limited  # type: ignore[method-assign]
    return undo


def main() -> None:
    sys.path.insert(0, str(TESTS))
    import interpreter_shim

    interpreter_shim.install_on_import()
    rank = load_rank()
    execute = rank.execute

    def with_growth(config: str, run: dict[str, Any]) -> dict[str, Any]:
        undo = grow(run.get("grow", 1.0))
        undo_full = full(*run["full"]) if "full" in run else lambda: None
        try:
            result: dict[str, Any] = execute(config, run)
        finally:
            undo_full()
            undo()
        return result

    rank.execute = with_growth
    rank.main()


if __name__ == "__main__":
    main()
