"""Keys that nothing reads unless another one, their switch, has one of some values.

A key that was changed while nobody wrote its switch would be dropped without a word: the checks
refuse it. Who wrote the switch, as ``wandb.enabled: false``, keeps the rest for another day. Not
here is what belongs to a switch that is on by default, as ``stability.enabled``, nor what is of one
text for several machines, as ``cluster.python``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from typing import Any

from megatron_patch.schema import render


@dataclass(frozen=True, slots=True)
class Switch:
    """A key, and the values under which others are read: those ``on``, or all but those ``off``."""

    key: str
    on: tuple[Any, ...] = ()
    off: tuple[Any, ...] = (None, [])
    strict: bool = False
    """Whether its keys are refused where it was written, too: they contradict it."""

    def reads(self, run: object) -> bool:
        """Whether the keys of this switch have an effect.

        Raises AttributeError: it stands in a section that is not there.
        """
        value = attrgetter(self.key)(run)
        return value in self.on if self.on else value not in self.off

    def remedy(self) -> str:
        """What to set for them to have one."""
        values = " or ".join(map(render.scalar, self.on))
        return f"set {self.key}: {values}" if values else f"change {self.key}"


_FULL = Switch("training.recompute.granularity", on=("full",))
_DECAYS = Switch("optimizer.schedule", off=("constant",))
_ROTATES = Switch("model.position_embedding", on=("rope",))
_DYNAMIC_MAX = Switch("attention.stabilizer", on=("dynamic_max",))
_SAGE = Switch("attention.backend", on=("sage_int8",), strict=True)
_WANDB = Switch("logging.wandb.enabled", on=(True,))
_REWINDS = Switch("faults.spike.action", on=("rewind",))
_IMAGE = Switch("cluster.container.image")

SWITCHES: dict[str, Switch] = {
    "model.rotary_base": _ROTATES,
    "model.rotary_percent": _ROTATES,
    "model.moe.aux_loss_coeff": Switch("model.moe.load_balancing", on=("aux_loss", "seq_aux_loss")),
    "training.recompute.modules": Switch("training.recompute.granularity", on=("selective",)),
    "training.recompute.method": _FULL,
    "training.recompute.num_layers": _FULL,
    "optimizer.min_lr": _DECAYS,
    "optimizer.decay_steps": _DECAYS,
    "optimizer.wsd_decay_steps": Switch("optimizer.schedule", on=("wsd",), strict=True),
    "optimizer.wsd_decay_style": Switch("optimizer.schedule", on=("wsd",)),
    "optimizer.muon_momentum": Switch("optimizer.name", on=("muon",)),
    "data.split": Switch("data.blend"),
    "attention.dynamic_max_beta": _DYNAMIC_MAX,
    "attention.dynamic_max_eps": _DYNAMIC_MAX,
    "attention.int8.smooth_k": _SAGE,
    "attention.int8.smooth_q": _SAGE,
    "attention.int8.scales": _SAGE,
    "attention.int8.normalizer": _SAGE,
    "attention.int8.projection": _SAGE,
    "parallel.cp_gradient_wire": Switch("parallel.context_parallel_size", off=(1,), strict=True),
    "parallel.expert_tensor_parallel_size": Switch("model.moe"),
    "logging.wandb.project": _WANDB,
    "logging.wandb.entity": _WANDB,
    "logging.wandb.mode": _WANDB,
    "stability.capture_heads": Switch("stability.capture_steps"),
    "faults.spike.rewind_margin": _REWINDS,
    "faults.spike.rewind_skip": _REWINDS,
    "faults.spike.max_rewinds": _REWINDS,
    "cluster.container.mounts": _IMAGE,
    "cluster.container.python": _IMAGE,
    "cluster.chain_length": Switch("cluster.continuation", on=("chain",)),
    "cluster.max_requeues": Switch("cluster.continuation", off=("chain",)),
}


def idle(run: object) -> Iterator[tuple[str, Any, Switch]]:
    """(key, value, its switch) of every key that is not its default and that nothing reads."""
    for key, switch in SWITCHES.items():
        above, _, name = key.rpartition(".")
        try:
            section = attrgetter(above)(run)
            value, reads = getattr(section, name), switch.reads(run)
        except AttributeError:  # in a section that is not there
            continue
        if not reads and value != _default(type(section), name):
            yield key, value, switch


def _default(section: type, name: str) -> Any:
    (item,) = (field for field in fields(section) if field.name == name)
    return item.default if item.default_factory is MISSING else item.default_factory()
