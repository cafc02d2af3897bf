"""`AttentionMonitor` in other programs' loops, one file a program."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_patch.schema.stability import checked
from megatron_patch.stability.monitor import AttentionMonitor


def check_keywords(given: dict[str, Any]) -> None:
    """Raise now for keywords of an `AttentionMonitor` that is made once the model is built."""
    told = inspect.signature(AttentionMonitor).bind(None, None, **given).arguments
    checked(told.get("options"))
