"""A training rank for the stability tests: tests/training/worker.py with three additions.

Triton's interpreter computes BF16 as the hardware does. ``{"sick": 6}`` in the plan lets the error
of the first head be as large as its signal from the record of that step on, for as long as the
numerics are not `compensated`, as an explosion does. ``{"full": [first, last]}`` lets no file of
the first rank grow during these steps.
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


def sick(first: int | None) -> Any:
    """Plant the error; returns the function that takes it out."""
    from megatron_patch.stability.history import History

    add = History.add

    def planted(self: Any, *, step: int, scalars: Any, heads: Any) -> Any:
        # A record that is made, not one that is read again: that has it.
        if first is not None and step >= first and not self.compensated and "entropy" in heads:
            for name in ("used_error_rms", "kappa"):
                heads[name] = heads[name].copy()
                heads[name][0, 0] = 1.0
        return add(self, step=step, scalars=scalars, heads=heads)

    def undo() -> None:
        History.add = add  # type: ignore[method-assign]

    History.add = planted  # type: ignore[method-assign]
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

    def with_additions(config: str, run: dict[str, Any]) -> dict[str, Any]:
        undo = sick(run.get("sick"))
        undo_full = full(*run["full"]) if "full" in run else lambda: None
        try:
            result: dict[str, Any] = execute(config, run)
        finally:
            undo_full()
            undo()
        return result

    rank.execute = with_additions
    rank.main()


if __name__ == "__main__":
    main()
