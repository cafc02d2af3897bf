"""The error rule of the compiled loss and norms."""

from __future__ import annotations


def check(found, peer, exact, *, floor: float) -> None:
    """Each at most twice as wrong as the peer's, plus ``floor`` of the largest exact value."""
    for ours, theirs, true in zip(found, peer, exact, strict=True):
        allowed = 2 * (theirs.double() - true).abs().max() + floor * true.abs().max()
        assert (ours.double() - true).abs().max() <= allowed
