"""How far a run is: what a checkpoint says about the position in the data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

LATER = frozenset({"switched_at"})
"""Counts that checkpoints of earlier versions do not have."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Progress:
    """Position of a run after a whole number of optimizer steps."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int = 0
    """Sequences trained on, over all ranks."""
    consumed_tokens: int = 0
    """Tokens trained on, over all ranks."""
    abandoned_saves: int = 0
    """Saves of this run that were given up."""
    switched_at: int = 0
    """Step after which the stability guard exchanged the attention numerics; 0: it did not."""

    def as_dict(self) -> dict[str, int]:
        """Plain integers, for the checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Progress:
        """Inverse of `as_dict`. Counts that a checkpoint is too old to have keep their default.

        Raises:
            ValueError: not these counts.
        """
        names = {field.name for field in fields(cls)}
        needed = names - LATER
        if type(values) is not dict or not needed <= set(values) <= names:
            raise ValueError(f"progress is {values!r}, expected the counts {sorted(names)}")
        if any(type(value) is not int or value < 0 for value in values.values()):
            raise ValueError(f"progress {values!r} holds something that is not a count")
        return cls(**values)
