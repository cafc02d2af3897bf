"""What makes a capture file consistent: every field of its type, tensors and lists that fit.

Anybody may have written the file: nothing of it is used before `problem` found nothing.

Shape legend: as in `megatron_patch.stability.capture`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_COUNTS = ("step", "layer", "micro_batch", "dp_rank")
_TEXTS = ("layer_name", "layout", "backend", "stabilizer", "precision", "run_name", "trigger")
_LISTS = ("heads", "kv_heads", "head_to_kv")
_TENSORS = ("q", "k", "v", "out", "dout")
_PER_HEAD = ("sinks", "wq_norm", "wk_norm")


def problem(content: Mapping[str, Any]) -> str:
    """The first thing that is wrong with the fields of a capture, all of which are there; '' if
    nothing is."""
    return next(_wrong_types(content), "") or next(_wrong_shapes(content), "")


def _wrong_types(content: Mapping[str, Any]) -> Iterator[str]:
    rules: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
        (_COUNTS, _is_count, "a whole number from 0"),
        (_TEXTS, lambda x: isinstance(x, str), "text"),
        (("variant",), lambda x: x is None or isinstance(x, str), "text or None"),
        (_LISTS, lambda x: isinstance(x, list) and all(map(_is_count, x)),
         "a list of whole numbers from 0"),
        (_TENSORS, lambda x: _is_tensor(x, 4), "a tensor of 4 dimensions, floating, not empty"),
        (_PER_HEAD, lambda x: x is None or _is_tensor(x, 1), "a floating tensor [heads] or None"),
        (("causal", "norms_exact"), lambda x: isinstance(x, bool), "True or False"),
        (("scale",), lambda x: _is_number(x) and x > 0, "a finite number above 0"),
        (("dropout_p",), lambda x: _is_number(x) and 0 <= x <= 1, "a number from 0 to 1"),
        (("window",), _is_window, "None or two whole numbers [left, right], -1 for no limit"),
    ]  # fmt: skip
    for names, fits, wanted in rules:
        for name in names:
            if not fits(content[name]):
                yield f"{name} is {_shown(content[name])}, expected {wanted}"
    if content["layout"] != "sbhd":
        yield f"layout is {content['layout']!r}, expected 'sbhd'"


def _wrong_shapes(content: Mapping[str, Any]) -> Iterator[str]:
    """Of fields of the right types."""
    s, b, h, d = content["q"].shape
    kv, dv = content["k"].shape[2], content["v"].shape[3]
    shapes = {
        "k": (s, b, kv, d),
        "v": (s, b, kv, dv),
        "out": (s, b, h, dv),
        "dout": (s, b, h, dv),
        **{name: (h,) for name in _PER_HEAD if content[name] is not None},
    }
    start = "tensors and head lists of the capture do not fit together: "
    for name, wanted in shapes.items():
        found = tuple(content[name].shape)
        if found != wanted:
            yield f"{start}{name} has shape {list(found)}, expected {list(wanted)} beside q and v"
    for name, count in (("heads", h), ("kv_heads", kv), ("head_to_kv", h)):
        if len(content[name]) != count:
            yield f"{start}{name} has {len(content[name])} entries for {count} heads"
    beyond = [i for i in content["head_to_kv"] if i >= kv]
    if beyond:
        yield f"{start}head_to_kv names head {beyond[0]} of k and v, which have {kv}"


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _is_window(x: Any) -> bool:
    # type(), not isinstance(): True is no reach.
    return x is None or (isinstance(x, list) and len(x) == 2 and all(type(i) is int for i in x))


def _is_tensor(x: Any, dims: int) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.layout == torch.strided
        and x.device.type == "cpu"  # a meta tensor has a shape and nothing in it
        and x.dim() == dims
        and x.is_floating_point()
        and x.numel() > 0
    )


def _shown(x: Any) -> str:
    """A value in few characters."""
    if isinstance(x, torch.Tensor):
        return f"a tensor {list(x.shape)} of {x.dtype}"
    text = repr(x)
    return text if len(text) <= 60 else f"{text[:60]}..."
