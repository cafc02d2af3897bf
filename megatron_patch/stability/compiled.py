"""Models under torch.compile: observed steps run their modules as Python, others their graphs.

A graph keeps no hooks of its tensors, so an observed call must be outside of one. A break in the
graph there would stay: the broken graphs guard nothing that differs in the steps without hooks, and
a frame that breaks in a loop over layers is never compiled again. Under PyTorch's stance
``eager_on_recompile`` nothing is traced in an observed step: what its hooks make invalid runs as
Python, and other graphs of the program run as before. Attention's own may be traced, too: as Python
flex_attention holds all logits.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

_observing: weakref.WeakSet[Any] = weakref.WeakSet()
_stance: Any = None


def look_for_hooks() -> None:
    """Graphs traced from now on are not used where a hook stands that they were traced without."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.skip_nnmodule_hook_guards = False


def hold(observer: object) -> None:
    """No graph is traced until every observer that called this has called `release`."""
    global _stance
    if "torch._dynamo" not in sys.modules:
        return
    _observing.add(observer)
    if _stance is None:
        _stance = torch.compiler.set_stance("eager_on_recompile")
        if _stance.prev.stance == "force_eager":  # the user's, and no graph runs at all
            _stance.__exit__(None, None, None)
            _stance = None


def release(observer: object) -> None:
    """Steps without hooks follow; the stance is as it was, unless somebody has set another."""
    global _stance
    _observing.discard(observer)
    if _stance is not None and not _observing:
        if torch._dynamo.eval_frame._stance is _stance.stance:
            _stance.__exit__(None, None, None)
        _stance = None


def _let_trace(let: bool) -> None:
    """Inside an attention call the stance is the user's."""
    if _stance is not None:
        now = torch._dynamo.eval_frame._stance
        if let and now is _stance.stance:
            _stance.__exit__(None, None, None)
        elif not let and now is _stance.prev:
            _stance.__enter__()


def hooks(module: torch.nn.Module) -> list[Any]:
    """Handles of hooks with which what ``module`` calls is traced, in a step that is held."""
    return [
        module.register_forward_pre_hook(lambda *_: _let_trace(True)),
        module.register_forward_hook(lambda *_: _let_trace(False), always_call=True),
    ]


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a function."""

    def call(*args: Any, **named: Any) -> Any:
        if _stance is None:  # the only way that a graph has
            return function(*args, **named)
        _let_trace(True)
        try:
            return function(*args, **named)
        finally:
            _let_trace(False)

    return call
