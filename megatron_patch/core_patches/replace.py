"""Replacing attributes of Megatron-Core's modules, classes and objects, and giving them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Change = tuple[Any, str, Any]
"""(owner, attribute, new value)."""


@contextmanager
def patched(*changes: Change) -> Iterator[None]:
    """Replace attributes for the time of the block.

    Raises AttributeError: there is none of that name; what was replaced before it is given back.
    """
    with ExitStack() as undo:
        for owner, name, value in changes:
            getattr(owner, name)
            # What an object has from its class is taken away again, not written into it.
            if name in vars(owner):
                undo.callback(setattr, owner, name, vars(owner)[name])
            else:
                undo.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


class Replacement:
    """Attributes that are replaced for the rest of the process, or until `undo`.

    ``changes``: what is to be replaced now; nothing where it has been, or core has its own.
    """

    def __init__(self, changes: Callable[..., Iterable[Change]]) -> None:
        self._changes, self._undo = changes, ExitStack()

    def install(self, **options: Any) -> bool:
        """Replace what ``changes(**options)`` says; whether there was something to replace."""
        changes = list(self._changes(**options))
        self._undo.enter_context(patched(*changes))
        return bool(changes)

    def undo(self) -> None:
        """Give core its own back."""
        self._undo.close()
