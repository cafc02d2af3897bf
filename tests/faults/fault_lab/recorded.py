"""The trainer as the launch scripts start it, recorded, with a fault planted by an argument.

    python -m megatron_patch.launcher.rank recorded.py cpu FAULT train --config ...

``gpu`` in place of ``cpu``: the run trains on GPUs. ``FAULT`` is ``none`` or
``PLACE:STEP:RANK:TIMES``: SIGKILL to that rank at a place of ``hooks`` in the first TIMES attempts;
under the place ``exception`` an error in the forward pass.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def fail() -> None:
    """An error whose traceback passes through frames that hold the environment."""
    environment = dict(os.environ)
    raise RuntimeError(f"a fault of the program ({len(environment)} variables)")


def main() -> int:
    from fault_lab import hooks
    from megatron_patch.cli import app
    from megatron_patch.core_patches import cpu_mode

    where, fault, *arguments = sys.argv[1:]
    rank = int(os.environ["RANK"])
    attempt = Path(os.environ["MEGATRON_PATCH_ATTEMPT_DIR"])
    if where == "cpu":
        cpu_mode.install()
    hooks.record(attempt, rank)
    if fault != "none":
        place, step, victim, times = fault.split(":")
        if rank == int(victim) and len(list(attempt.parent.glob("*/exit"))) <= int(times):
            if place == "exception":
                hooks.at("forward", fail, step=int(step))
            else:
                hooks.at(place, hooks.kill, step=int(step))
    return app.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
