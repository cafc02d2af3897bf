"""What the verdict may do to the run: exchange the attention numerics, or save and stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # It imports Megatron-Core, which must come after `runtime.cpu_mode`.
    from megatron_patch.stability.observe import Site


class StabilityStop(RuntimeError):
    """The guard stopped the run after saving it; raised on all ranks after the same step."""

    exit_code = 5


TARGET = "stable_flash", {"stabilizer": "compensated"}


def switch(sites: Sequence[Site]) -> int:
    """Let every core attention of this rank compute with the compensated stabilizer from now on.

    Nothing else changes: the stabilizer has no parameters and no state between calls.

    Returns:
        How many modules changed; 0 on a rank that computes so already.

    Raises:
        BackendError: a layer that stable_flash cannot serve.
    """
    changed = 0
    for site in sites:
        if (site.backend, site.stabilizer) == ("stable_flash", "compensated"):
            continue
        module: Any = site.module
        name, options = TARGET
        kept = {}
        if site.backend == name and "residual" in module.options:
            kept["residual"] = module.options["residual"]
        module.use(name, **options, **kept)
        changed += 1
    return changed
