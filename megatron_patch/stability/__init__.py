"""Telemetry of attention, early warning, guard and captures; docs/stability.md.

`AttentionMonitor` and `MonitorOptions` (the ``stability:`` section) are the door for any loop;
`adapters` has loops that are known. Reading records imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_patch.schema.stability import StabilityConfig as MonitorOptions

if TYPE_CHECKING:
    from megatron_patch.stability.monitor import AttentionMonitor

__all__ = ["AttentionMonitor", "MonitorOptions"]


def __getattr__(name: str) -> Any:
    if name == "AttentionMonitor":
        from megatron_patch.stability.monitor import AttentionMonitor

        return AttentionMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
