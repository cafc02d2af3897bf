"""The error rule of the compiled loss and norms."""

from __future__ import annotations


def check(found, peer, exact, *, floor: float) -> None:
    """Each at most twice as wrong as the peer's, plus ``floor`` of the largest exact value."""
    for index, (ours, theirs, true) in enumerate(zip(found, peer, exact, strict=True)):
        error = (ours.double() - true).abs().max().item()
        of_peer = (theirs.double() - true).abs().max().item()
        scale = true.abs().max().item()
        said = f"result {index}: {error:.3g}, the peer's {of_peer:.3g}, largest value {scale:.3g}"
        assert error <= 2 * of_peer + floor * scale, said
