"""How far a run is: counters over all ranks, as the training loop counts and checkpoints record."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

LATER = frozenset({"switched_at"})
"""Counters that checkpoints of earlier versions do not have."""


@dataclass(slots=True)
class TrainState:
    """Position of a run after a whole number of optimizer steps."""

    step: int = 0
    """Optimizer steps done."""
    consumed_samples: int = 0
    """Sequences trained on."""
    consumed_tokens: int = 0
    """Tokens trained on."""
    abandoned_saves: int = 0
    """Saves of this run that were given up."""
    switched_at: int = 0
    """Step after which the stability guard exchanged the attention numerics; 0: it did not."""

    def advance(self, *, sequences: int, length: int) -> None:
        """One more step is done, on so many sequences of ``length`` tokens."""
        self.step += 1
        self.consumed_samples += sequences
        self.consumed_tokens += sequences * length

    def as_dict(self) -> dict[str, int]:
        """Plain integers, for the checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> TrainState:
        """Inverse of `as_dict`. Counters that a checkpoint is too old to have keep their default.

        Raises ValueError: not these counters.
        """
        names = {field.name for field in fields(cls)}
        needed = names - LATER
        if type(values) is not dict or not needed <= set(values) <= names:
            raise ValueError(f"progress is {values!r}, expected the counts {sorted(names)}")
        if any(type(value) is not int or value < 0 for value in values.values()):
            raise ValueError(f"progress {values!r} holds something that is not a count")
        return cls(**values)
