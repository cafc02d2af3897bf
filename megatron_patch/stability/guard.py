"""What the verdict asks a loop for: exchange the attention numerics, or save and stop.

Checkpoints tell of a switch. One that a rewind goes back to may be from before it: from then on
``<run_dir>/switched.json`` tells of the switch as well, ``{"switched_at": 40}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patch.attention.capabilities import EXACT_DELTA
from megatron_patch.parallel.first_rank import of_all, on_first_rank
from megatron_patch.runtime.files import write_whole
from megatron_patch.schema.problem import ConfigError, Problem

if TYPE_CHECKING:
    # It imports Megatron-Core, which must come after `core_patches.cpu_mode`.
    from megatron_patch.stability.observe import Site


@dataclass(frozen=True, slots=True)
class Switch:
    """Compute with `TARGET` from the next step on: `AttentionMonitor.switch` does it."""

    step: int
    """The steps done."""


class StabilityStop(RuntimeError):
    """The guard stopped the run after saving it; raised on all ranks after the same step."""

    exit_code = 5

    @classmethod
    def of(cls, reason: str, step: int) -> StabilityStop:
        """The stop after ``step``."""
        return cls(
            f"stability.guard stopped the run after step {step:,}, saved: {reason}; change "
            "attention.stabilizer or optimizer.lr, or set stability.guard: warn, and give the same "
            "command again"
        )


TARGET = "stable_flash", {"stabilizer": "compensated"}
ADVICE = (
    "stability guard: warn leaves the run as it is. Resume it with attention.backend stable_flash "
    "and attention.stabilizer compensated (stability.guard switch would have done it), from a "
    "checkpoint of before these signs if the loss has moved: docs/stability.md, What to do"
)
"""Said where it comes to danger, by figures that are finite, and nothing else is done."""


def check(sites: Sequence[Site]) -> None:
    """Whether `switch` can exchange something; ValueError with the first that it cannot."""
    fixed = [site for site in sites if not hasattr(site.module, "use")]
    if fixed:
        raise ValueError(
            f"guard: switch exchanges the numerics of CoreAttention, and {fixed[0].name} is "
            f"a {type(fixed[0].module).__name__}; use guard: warn or stop, or put our core "
            "attention into the model (docs/integrations.md)"
        )


def check_watched(sites: Sequence[Site], model: Any) -> None:
    """Whether any rank watches something, on one device a rank; ValueError if not. Collective."""
    if not any(of_all(len(sites))):
        raise ValueError(
            f"no core attention in decoder.layers or mtp.layers of {type(model).__name__}: nothing "
            "would be watched, and the verdict be ok for ever; watch a GPTModel, or name the "
            "modules with adapters.torch_loop.watch, or set enabled: false (docs/integrations.md)"
        )
    devices = sorted({str(p.device) for p in model.parameters() if p.requires_grad})
    if len(devices) > 1:  # device_map of Hugging Face, say
        raise ValueError(
            f"parameters of {type(model).__name__} are trained on {', '.join(devices)}; allowed: "
            "one device a rank, where everything is summed up; train on one, or set enabled: false"
        )


def switch(sites: Sequence[Site]) -> int:
    """Let every core attention of this rank compute with the compensated stabilizer from now on.

    Nothing else changes: the stabilizer has no parameters and no state between calls.

    Returns how many modules changed; 0 on a rank that computes so already.

    Raises BackendError: a layer that stable_flash cannot serve.
    """
    changed = 0
    for site in sites:
        if f"{site.backend}/{site.stabilizer}".startswith(EXACT_DELTA):
            continue
        module: Any = site.module
        name, options = TARGET
        kept: dict[str, Any] = {}
        if site.backend == name:
            kept = {k: module.options[k] for k in ("o_lo", "backward") if k in module.options}
        module.use(name, **options, **kept)
        changed += 1
    return changed


FILE = "switched.json"


def remember(run_dir: Path, switched_at: int) -> None:
    """Replace the file: the switch is in force after this step."""
    write_whole(run_dir / FILE, json.dumps({"switched_at": switched_at}) + "\n")


def recall(run_dir: Path) -> int:
    """The step that the file of a run tells of; 0 where it has none.

    Raises ConfigError: the file is not what this program writes.
    """
    file = run_dir / FILE
    if not file.exists():
        return 0
    try:
        found = json.loads(file.read_text())
        step = found["switched_at"] if type(found) is dict and len(found) == 1 else None
        if type(step) is not int or step < 1:
            raise ValueError(f"expected switched_at, a step, found {found!r:.80}")
    except (ValueError, KeyError) as error:
        why = (
            f"{file}: {error}; it decides which numerics a run goes on with after a rewind: put "
            'the right one back, e.g. {"switched_at": 40}, or delete it and the newest '
            "checkpoint decides"
        )
        raise ConfigError([Problem("run_dir", why)]) from None
    return int(step)


def recall_together(run_dir: Path, step: int, *, rank: int, log: Callable[[str], None]) -> int:
    """What the file of a run that goes on after ``step`` tells of, on all ranks. Collective.

    Raises ConfigError: as `recall`, on all ranks.
    """

    def look() -> int:
        found = recall(run_dir)
        if found and not step:
            # Begun anew on purpose: a run that misses its checkpoints is refused.
            (run_dir / FILE).unlink()
            log(f"stability guard: begins anew at step 0, without {FILE}")
        return found

    return on_first_rank(look, ConfigError, rank=rank)


def in_force_from(saved: int, noted: int, *, step: int) -> int:
    """The step after which a run switched that goes on after ``step``; 0: it did not.

    Args:
        saved: what its checkpoint says.
        noted: what the file says. The run may go on from an older checkpoint than the rewind did,
            because that one was damaged; exchanged numerics stay exchanged there, too.
    """
    return min((at for at in (saved, min(noted, step)) if at), default=0)
