"""Checks of the arguments of a call: the error they raise, and the rules of its scalars.

`problem` has the rules of tensors. Everything here is an ``isinstance`` and a comparison where
nothing is wrong, because every call of a training step comes past.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch

from stable_attention.stabilizers import KNOWN, RESIDUALS

OFF_BY_ONE = "off-by-one"

# What torch.compile and torch.export trace with counts as what it stands for.
_FLOATS, _INTS, _BOOLS = (float, torch.SymFloat), (int, torch.SymInt), (bool, torch.SymBool)

# Kernels take scalars as float32, and flush or lose digits of what is not normal there.
# (The largest is less: kernels multiply by log2(e).)
SMALLEST, LARGEST = 2.0**-126, 2.0**127
# A cap costs about 1e-7 of itself in every logit (docs/numerics.md).
MAX_SOFTCAP = 1e5
# Global batch and head indices are 32-bit, and a launch has fewer than 2^16 of each.
MAX_OFFSET = 2**31 - 2**16


class AttentionArgumentError(ValueError):
    """An argument no kernel can serve; the text names the value, the allowed set and the remedy."""

    def __init__(self, name: str, value: object, allowed: str, remedy: str) -> None:
        # Not super().__init__: torch.compile cannot trace it, and its complaint replaced this text.
        self.args = (f"{name} is {value}; allowed: {allowed}. {remedy}",)
        self._given = (name, str(value), allowed, remedy)

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        """Worker processes send their errors pickled."""
        return type(self), self._given


def require(
    ok: bool, name: str, value: object, allowed: str | Callable[[], str], remedy: str
) -> None:
    """Raise `AttentionArgumentError` unless ``ok``.

    ``value`` or ``allowed`` that spell out a batch or a length are callables: a dynamic size that
    is formatted is a constant for torch.compile from then on, also where nothing is wrong.
    """
    if not ok:
        shown = value() if callable(value) else value
        raise AttentionArgumentError(
            name, shown, allowed() if callable(allowed) else allowed, remedy
        )


def choose(name: str, value: str, allowed: Iterable[str], remedy: str = "Pick one of them.") -> str:
    """Return ``value`` if it is one of ``allowed``, else raise `AttentionArgumentError`."""
    names = tuple(allowed)
    if not (isinstance(value, str) and value in names):
        raise AttentionArgumentError(name, show(value), ", ".join(map(repr, names)), remedy)
    return value


def show(value: object) -> str:
    """A short text for a value of any type: never the contents of a tensor."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    if isinstance(value, tuple | list) and len(value) <= 4:
        inside = ", ".join(map(show, value))
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    return f"a {type(value).__name__}"


def number(name: str, value: object, allowed: str, remedy: str) -> float:
    """``value`` as a float; numbers of other libraries count, text does not."""
    if isinstance(value, _FLOATS):
        return value  # type: ignore[return-value]
    # float() reads text.
    if isinstance(value, int) or hasattr(value, "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass  # arrays of several, integers of hundreds of digits
    raise AttentionArgumentError(name, show(value), allowed, remedy)


def integer(name: str, value: object, allowed: str, remedy: str) -> int:
    """``value`` as an int; integers of other libraries count, 7.5 is not cut to 7."""
    if isinstance(value, bool):
        return int(value)  # Triton would compile for a truth value
    if isinstance(value, _INTS):
        return value  # type: ignore[return-value]
    if isinstance(value, torch.Tensor):
        whole = not (value.dtype.is_floating_point or value.dtype.is_complex)
        if whole and value.numel() == 1:
            return int(value)
    elif hasattr(value, "__index__"):
        try:
            return operator.index(value)
        except TypeError:
            pass  # an array of several
    raise AttentionArgumentError(name, show(value), allowed, remedy)


def check_flags(**flags: object) -> None:
    """`AttentionArgumentError` for a flag that is no truth value: "no" would count as yes."""
    for name, value in flags.items():
        if isinstance(value, _BOOLS):
            continue
        if isinstance(value, torch.Tensor) or value not in (False, True):
            raise AttentionArgumentError(name, show(value), "True or False", "Call bool() on it.")


def check_unserved(**given: object) -> None:
    """`AttentionArgumentError` for what only other attentions take."""
    for name, value in given.items():
        if value is not None:
            raise AttentionArgumentError(name, "given", "None", _INSTEAD[name])


_MASKS = (
    "Masks are causal, window and packed sequences (layout='thd' with cu_seqlens); for others use "
    "torch's scaled_dot_product_attention or FlexAttention."
)
_INSTEAD = {
    "attn_mask": _MASKS,
    "bias": f"Logits take no bias. {_MASKS}",
    "alibi_slopes": "Use relative or rotary positions; additive biases are not supported.",
    "block_table": "Paged KV caches are for inference; use an inference kernel.",
}


def check_broken(stabilizer: object, allow_broken: bool) -> None:
    """`AttentionArgumentError` for the stabilizer that fails on purpose, unless it is wanted."""
    if stabilizer == "paper_bf16" and not allow_broken:
        raise AttentionArgumentError(
            "stabilizer",
            "'paper_bf16'",
            "'compensated', 'dynamic_max', 'none'",
            "It reproduces a numerical failure on purpose; pass allow_broken=True if you want it.",
        )


_SCALE = ("2**-126..2**127", "Negate q for a negative scale.")
_SOFTCAP = (
    f"0 for none, or 2**-126..{MAX_SOFTCAP:g}",
    "Logits become softcap * tanh(logit / softcap), with an error of about 1e-7 * softcap; a cap "
    "far above the logits does nothing else: pass 0.",
)
_RATIO = ("2**-126..2**127", "Choose a softcap of the size of the logits.")
_DROPOUT = ("0 <= p < 1", "It is the dropped share.")
_DYNAMIC = ("a finite float32 number", "It is a parameter of stabilizer='dynamic_max'.")
_OFFSET = (f"an integer in 0..{MAX_OFFSET}", "It is a global index.")
_SEED = ("None, an int64 scalar tensor, or an integer in -2**63..2**63 - 1", "Cut it to 63 bits.")


def check_numbers(
    *, scale: object, softcap: object, dropout_p: object, stabilizer: str, residual: str
) -> tuple[float, float, float]:
    """Range rules of the scalar options; returns (scale, softcap, dropout_p) as floats.

    `AttentionArgumentError` names the first broken one.
    """
    unit, cap = number("scale", scale, *_SCALE), number("softcap", softcap, *_SOFTCAP)
    require(SMALLEST <= unit <= LARGEST, "scale", unit, *_SCALE)
    require(cap == 0 or SMALLEST <= cap <= MAX_SOFTCAP, "softcap", cap, *_SOFTCAP)
    if cap > 0:
        require(SMALLEST <= unit / cap <= LARGEST, "scale / softcap", unit / cap, *_RATIO)
    share = check_dropout(dropout_p)
    choose("stabilizer", stabilizer, KNOWN)
    choose("residual", residual, RESIDUALS, "It is the storage of O's low-order part.")
    return unit, cap, share


def check_dropout(dropout_p: object) -> float:
    """The dropped share as a float, or `AttentionArgumentError`."""
    share = number("dropout_p", dropout_p, *_DROPOUT)
    require(0 <= share < 1, "dropout_p", share, *_DROPOUT)
    return share


def check_dynamic(beta: object, eps: object) -> tuple[float, float]:
    """The parameters of "dynamic_max" as floats, or `AttentionArgumentError`."""
    factor, reach = number("beta", beta, *_DYNAMIC), number("eps", eps, *_DYNAMIC)
    require(-LARGEST <= factor <= LARGEST, "beta", factor, *_DYNAMIC)
    require(-LARGEST <= reach <= LARGEST, "eps", reach, *_DYNAMIC)
    return factor, reach


def check_offsets(batch_offset: object, head_offset: object) -> tuple[int, int]:
    """Global indices of batch 0 and head 0 as ints, or `AttentionArgumentError`."""
    batch = integer("batch_offset", batch_offset, *_OFFSET)
    head = integer("head_offset", head_offset, *_OFFSET)
    require(0 <= batch <= MAX_OFFSET, "batch_offset", batch, *_OFFSET)
    require(0 <= head <= MAX_OFFSET, "head_offset", head, *_OFFSET)
    return batch, head


def check_seed(seed: object) -> int:
    """A dropout seed that is a number, as an int that fits int64; 0 for None and tensors."""
    if seed is None or isinstance(seed, torch.Tensor):
        return 0
    value = integer("dropout_seed", seed, *_SEED)
    require(-(2**63) <= value < 2**63, "dropout_seed", value, *_SEED)
    return value


def window_bounds(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """(left, right) of the visible band around the aligned diagonal, -1 for unlimited."""
    left = right = -1
    if window is not None:
        pair = isinstance(window, tuple | list) and len(window) == 2
        if not pair or not all(isinstance(x, _INTS) and x >= -1 for x in window):
            raise AttentionArgumentError(
                "window",
                show(window),
                "None or a pair (left, right) of integers >= -1, where -1 is unlimited",
                "Both bounds are inclusive: (w - 1, 0) shows each query w keys, its own included.",
            )
        left, right = window
    return left, 0 if causal else right


def sure(ok: bool, *, otherwise: bool) -> bool:
    """``ok``; ``otherwise`` where torch.compile traces a comparison that the data decide."""
    if not torch.compiler.is_compiling():
        return ok
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return guard_or_true(ok) if otherwise else guard_or_false(ok)
