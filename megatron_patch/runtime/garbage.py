"""Python's garbage collector, out of the way of the steps.

A full pass looks at every object there is, and the libraries of a training process make half a
million that never die: it takes as long as some steps do. Each rank has its passes at steps of its
own, and all others wait for it. What is there once training runs is therefore taken out of later
passes (``gc.freeze``), which then look at what the steps themselves leave behind, and stay short.
Nothing is switched off: cycles that hold device memory are found as soon as before.
"""

from __future__ import annotations

import gc

SETTLED_AFTER = 2
"""Steps of an attempt until what it needs all the time has been made: modules imported, kernels
compiled, optimizer state allocated."""


def freeze() -> None:
    """Take what is alive now out of all later passes."""
    gc.collect()
    gc.freeze()


def release() -> None:
    """Undo `freeze`: a process that trains again must be able to free what the first run made."""
    gc.unfreeze()
