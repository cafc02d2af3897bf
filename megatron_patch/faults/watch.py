"""What the training loop sees of this room: one object an attempt, `FaultWatch`.

    begin(step) -> the step: guard -> policy -> stepped(step) -> ... -> close()

It holds the batches left out so far, the spike policy and the straggler comparison. Hangs are
watched by `faults.hang`, which must work when all of this is stuck.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_patch.faults import ledger, windows
from megatron_patch.faults.spike import Spike, SpikePolicy
from megatron_patch.faults.straggler import Stragglers
from megatron_patch.faults.windows import Skips

if TYPE_CHECKING:
    from megatron_patch.data.loader import Loaders
    from megatron_patch.monitor.hub import Monitor
    from megatron_patch.training.step import Session


class FaultWatch:
    """Spikes, stragglers and left-out batches of one attempt. Collective to build.

    Args:
        session: what is trained.
        loaders: its data.
        monitor: where lines go.
        run_dir: directory of the run.
    """

    def __init__(self, session: Session, loaders: Loaders, monitor: Monitor, run_dir: Path) -> None:
        self._session, self._monitor, self._run_dir = session, monitor, run_dir
        layout, options = session.layout, session.run.faults
        self.spikes = SpikePolicy(
            session, loaders, monitor, run_dir, telemetry=lambda: last_telemetry(run_dir)
        )
        hosts: list[Any] = [None] * layout.world_size
        torch.distributed.all_gather_object(hosts, ledger.node())
        self.stragglers = Stragglers(options, layout, monitor, run_dir, hosts=hosts)

    @property
    def skips(self) -> Skips:
        """The batches this run leaves out."""
        return self.spikes.skips

    # ------------------------------------------------------------------- step

    def begin(self, step: int) -> None:
        """``step`` (1-based) begins."""
        self.spikes.begin(step)

    def stepped(self, step: int) -> None:
        """``step`` is over."""
        self.stragglers.stepped(step)

    def close(self) -> None:
        """The attempt ends in order. Collective."""
        self.stragglers.close()
        self.spikes.close()

    # ------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"faults": self.spikes.state() | {"skipped": self._session.skipped}}

    def resume(self, extra: dict[str, Any], *, step: int) -> None:
        """Go on after ``step`` with what checkpoint and run directory say. Collective.

        The file of the run directory wins over the checkpoint's copy: a rewind writes it before
        it goes on, so it knows of rewinds that no checkpoint has seen yet.

        Raises:
            ConfigError: the file is damaged.
        """
        found: list[Any] = [None, None]
        if self._session.layout.print_rank:
            try:
                found[0] = windows.read(self._run_dir)
            except ValueError as error:
                found[1] = error
        torch.distributed.broadcast_object_list(found, src=0)
        if found[1] is not None:
            raise found[1]
        saved = extra.get("faults")
        self._take(saved)
        self.stragglers.resume(step)
        if found[0] is not None:
            self.spikes.skips = found[0]
        elif saved is not None:
            self.spikes.skips = Skips.from_dict(saved["skips"])
            if self.skips.windows and self._session.layout.print_rank:
                windows.write(self._run_dir, self.skips)
        if self.skips.windows:
            left = ", ".join(f"{f}-{f + n - 1}" for f, n in self.skips.windows)
            self._monitor.say(f"global batches left out of this run: {left} ({windows.FILE})")

    def _take(self, saved: Any) -> None:
        self.spikes.restore(saved)
        self._session.skipped = 0 if saved is None else int(saved["skipped"])

    # ----------------------------------------------------------------- rewinds

    def plan_rewind(self, spike: Spike, *, back_to: int) -> None:
        """Leave batches out from now on: file first, so that a crash cannot forget it. Collective.

        Args:
            spike: why.
            back_to: step of the checkpoint the run returns to.
        """
        first = self.skips.batch(back_to + 1)
        width = self._session.run.faults.spike.rewind_skip
        if width is not None:
            first = max(first, spike.batch - width + 1)
        self.spikes.skips = self.skips.add(first, spike.batch - first + 1)
        if self._session.layout.print_rank:
            windows.write(self._run_dir, self.skips)
        torch.distributed.barrier()
        self._monitor.say(
            f"going back to step {back_to:,}; global batches {first:,}-{spike.batch:,} are left "
            f"out (rewind {self.skips.rewinds} of {self._session.run.faults.spike.max_rewinds})"
        )

    def rewound(self, extra: dict[str, Any], *, step: int) -> None:
        """The checkpoint of ``step`` is loaded: take its history; the windows stay. Collective."""
        self._take(extra.get("faults"))
        self.stragglers.resume(step)


def last_telemetry(run_dir: Path) -> dict[str, Any] | None:
    """Largest logits by layer and head of the newest record of ``<run_dir>/stability``, if any."""
    from megatron_patch.stability import record

    try:
        found = record.read(run_dir)
    except (OSError, ValueError, KeyError):
        return None
    if not len(found.steps):
        return None
    table = found.heads["max_logit"][-1]
    return {
        "step": int(found.steps[-1]),
        "from": "stability telemetry, the last record before the spike",
        "max_logit": {
            str(layer): [round(float(x), 4) for x in row] for layer, row in enumerate(table)
        },
    }
