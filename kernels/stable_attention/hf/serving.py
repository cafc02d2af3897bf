"""Whether a model is served: its attention layers called us, and its documents reached us.

`watch` wraps two methods of ``PreTrainedModel``, because no hook of transformers knows the model:
``__init__`` refuses models with tables of attention classes, ``__call__`` what follows from a
model's first forward. Of nested models the outermost counts.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from typing import Any

import torch
from packaging.version import Version

from stable_attention.problem import AttentionArgumentError

OLDEST = Version("4.53.3")
_SERVED = "_served_by_stable_attention"
_ALLOWED = "models whose attention layers call transformers' AttentionInterface"
_REMEDY = "Use attn_implementation='sdpa' or 'eager' for it."


class _Forward:
    """The outermost model forward under way, of a model that asked for us."""

    model: torch.nn.Module | None = None
    called = False
    """Whether our attention function was."""
    given: dict[str, Any] = {}
    """Its arguments; empty in a compiled model."""
    packed = False
    """Whether our mask function saw documents."""


class _Thread(threading.local):
    """Threads run models at once. A plain object holds what is noted: torch.compile loses what
    compiled layers write to a threading.local itself."""

    def __init__(self) -> None:
        self.forward = _Forward()


_thread = _Thread()
_names: set[str] = set()


def check_version() -> None:
    """RuntimeError for a transformers that is too old."""
    import transformers

    version = Version(transformers.__version__)
    if Version(version.base_version) < OLDEST:
        raise RuntimeError(
            f"transformers is {version}; allowed: {OLDEST} or newer. Upgrade it, or use "
            "attn_implementation='sdpa'."
        )


def watch(name: str) -> None:
    """Check every model whose ``attn_implementation`` is ``name``, built before or after."""
    from transformers import PreTrainedModel

    if not _names:
        PreTrainedModel.__init__ = _checked_init(PreTrainedModel.__init__)
        PreTrainedModel.__call__ = _checked_call
    _names.add(name)


def _checked_init(original):
    @functools.wraps(original)
    def __init__(self, config, *args, **kwargs):
        original(self, config, *args, **kwargs)
        if _asked(self):
            _check_tables(type(self))

    return __init__


def _asked(model: torch.nn.Module) -> bool:
    return getattr(model.config, "_attn_implementation", None) in _names


def _check_tables(model: type) -> None:
    """Refuse a model that looks attention classes up by name: it ends in a bare KeyError."""
    from transformers import PreTrainedModel

    for kind in model.__mro__:
        if not issubclass(kind, PreTrainedModel):
            continue
        for value in vars(sys.modules.get(kind.__module__, object)).values():
            if isinstance(value, dict) and "eager" in value and _names.isdisjoint(value):
                _refuse(model, "which looks attention up in a table of its own")


def _refuse(model: type, why: str) -> None:
    raise AttentionArgumentError(
        "attn_implementation", f"stable_attention for {model.__name__}, {why}", _ALLOWED, _REMEDY
    )


def _checked_call(self, *args, **kwargs):
    """``PreTrainedModel.__call__``: note the forward, and refuse one that did not come past us."""
    if _thread.forward.model is not None or not _asked(self):
        return torch.nn.Module.__call__(self, *args, **kwargs)
    compiling = torch.compiler.is_compiling()
    _thread.forward.model, _thread.forward.called, _thread.forward.packed = self, False, False
    if not compiling:
        _thread.forward.given = _named(self, args, kwargs)
    try:
        result = torch.nn.Module.__call__(self, *args, **kwargs)
    finally:
        _thread.forward.model = None
        if not compiling:
            _thread.forward.given = {}
    if not _thread.forward.called and not getattr(self, _SERVED, False):
        _refuse(type(self), "none of whose layers called it")
    if not compiling:
        # A later forward may replay graphs that were recorded of the layers.
        setattr(self, _SERVED, True)
    return result


def _named(model: torch.nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    if len(args) < 2:
        return kwargs
    return inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments


def called() -> None:
    """Our attention function says so."""
    _thread.forward.called = True


def saw(offsets: torch.Tensor | None) -> None:
    """Our mask function says which documents it saw."""
    if offsets is not None and not torch.compiler.is_compiling():
        _thread.forward.packed = True


def packed() -> bool:
    """Whether our mask function saw documents in the forward under way."""
    return _thread.forward.model is not None and _thread.forward.packed


def given(name: str) -> Any:
    """An argument of the forward under way, None in a compiled model."""
    return _thread.forward.given.get(name)
