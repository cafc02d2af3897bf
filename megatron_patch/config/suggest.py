"""The key or value a person probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from megatron_patch.config import fields

# difflib is quadratic in the length; no key is longer.
LONGEST = 64


def nearest(word: str, names: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """The name closest to ``word``, if any is close."""
    plain = word[:LONGEST].lower().replace("-", "_")
    lowered = {name.lower().replace("-", "_"): name for name in reversed(names)}
    found = difflib.get_close_matches(plain, list(lowered), n=1, cutoff=cutoff)
    return lowered[found[0]] if found else None


def for_key(key: str, section: type, root: type) -> str:
    """Where an unknown ``key`` of ``section`` belongs: the end of an error message."""
    names = list(fields.fields(section))
    here = nearest(key, names)
    leaves: dict[str, str] = {}
    for path, _ in fields.walk(root):
        leaves.setdefault(path.rpartition(".")[2], path)
    if key in leaves and key not in names:
        elsewhere = f"{leaves[key]} is such a key"
        return f"did you mean {here}? ({elsewhere}, too)" if here else elsewhere
    if here:
        return f"did you mean {here}?"
    far = nearest(key, list(leaves), cutoff=0.75)
    if far:
        return f"did you mean {leaves[far]}?"
    return "known keys: " + ", ".join(names)
