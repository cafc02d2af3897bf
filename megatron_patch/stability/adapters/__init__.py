"""`AttentionMonitor` in other programs' loops, one file a program."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from megatron_patch.runtime.watcher import Pin, Stop
from megatron_patch.schema.stability import checked
from megatron_patch.stability.monitor import AttentionMonitor
from megatron_patch.stability.warning import FLICKER


def check_keywords(given: dict[str, Any]) -> None:
    """Raise now for keywords of an `AttentionMonitor` that is made once the model is built."""
    told = inspect.signature(AttentionMonitor).bind(None, None, **given).arguments
    checked(told.get("options"))


class Saves:
    """When the actions of records ask a program for a checkpoint: at a ``Stop``, and at the first
    danger of a stretch. Every record at danger has a ``Pin``: a checkpoint for each would fill the
    disk, and where a program keeps only its last ones, replace those from before the danger."""

    def __init__(self) -> None:
        self._last: int | None = None  # step of the last record at danger

    def due(self, actions: Sequence[Pin | Stop], *, interval: int) -> bool:
        """Whether to save now; ``interval``: steps between records. Called with all actions."""
        last, now = self._last, max((a.step for a in actions if isinstance(a, Pin)), default=None)
        if now is not None:
            self._last = now
        began = now is not None and (last is None or now - last > max(FLICKER, interval))
        return began or any(isinstance(a, Stop) for a in actions)
