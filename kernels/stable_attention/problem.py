"""One attention call: what it can ask for, and what is known of it.

`Options` is the only list of what a call can ask for; a `Problem` adds what its tensors say, and
`Extras` are the tensors besides q, k and v. `Options.of` parses keywords and `describe.describe`
checks them against tensors. A new option is a field of `Options` with its rule, and a use in a
kernel.

Shape legend: b batch (or number of packed sequences), sq/sk query/key length, h query heads,
kv_heads key/value heads, d query/key head dim, dv value head dim, tq/tk packed token counts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from stable_attention.layouts import LAYOUTS, extents
from stable_attention.stabilizers import KNOWN, O_LO_FORMATS, STABILIZERS

UNLIMITED = -1
# Kernels take scalars as float32, and flush or lose digits of what is not normal there.
# (The largest is less: kernels multiply by log2(e).)
SMALLEST, LARGEST = 2.0**-126, 2.0**127
# A cap costs about 1e-7 of itself in every logit (docs/numerics.md).
MAX_SOFTCAP = 1e5
# Global batch and head indices are 32-bit, and a launch has fewer than 2^16 of each.
MAX_OFFSET = 2**31 - 2**16
# Whose backward pass runs; see `vendors`.
BACKWARDS = ("auto", "own", "own_x2", "sdpa_cudnn", "sdpa_flash", "fa4")
# Problems and specs remembered: packed batches have new lengths at every step.
KEPT = 1024

# What torch.compile and torch.export trace with counts as what it stands for.
_FLOATS, _INTS, _BOOLS = (float, torch.SymFloat), (int, torch.SymInt), (bool, torch.SymBool)

_SIMPLE = frozenset({str, int, float, bool, type(None)})

P = ParamSpec("P")
R = TypeVar("R")
N = TypeVar("N", int, float)


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
    """The one of ``allowed`` that equals ``value``, or `AttentionArgumentError`."""
    names = tuple(allowed)
    if not (isinstance(value, str) and value in names):
        raise AttentionArgumentError(name, show(value), ", ".join(map(repr, names)), remedy)
    return names[names.index(value)]


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
    if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
        learned = "It would get none: pass its .item(). For a learned scale multiply q by it."
        raise AttentionArgumentError(name, f"{show(value)} that wants a gradient", allowed, learned)
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


def flag(name: str, value: object) -> bool:
    """``value`` as a truth value; "no" would count as yes, and is refused."""
    if isinstance(value, _BOOLS):
        return bool(value)
    if isinstance(value, torch.Tensor) or value not in (False, True):
        raise AttentionArgumentError(name, show(value), "True or False", "Call bool() on it.")
    return bool(value)


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


def constant(x: N) -> N:
    """x; where it is traced, the number that it stands for, and the graph serves no other."""
    if not torch.compiler.is_compiling() and type(x) in (float, int):
        return x
    if isinstance(x, torch.Tensor):  # of a size that torch.jit.trace sees
        return x.item()  # type: ignore[return-value]
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(x)  # type: ignore[return-value]


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` of hashable arguments, worked out once for each; anew where they are traced."""
    known = functools.lru_cache(maxsize=KEPT)(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*arguments, **named)
        try:
            return known(*arguments, **named)  # type: ignore[arg-type]
        except TypeError:  # symbolic sizes have no hash
            return function(*arguments, **named)

    return call


def _option(kind: type, default: object, rule: Callable[[str, Any], Any] | None = None) -> Any:
    """A field of `Options`: its type in a spec, and what parses the keyword of its name."""
    return field(default=default, metadata={"kind": kind, "rule": rule})


def _real(ok: Callable[[float], bool], allowed: str, remedy: str) -> Callable[[str, Any], float]:
    def parse(name: str, value: Any) -> float:
        found = constant(number(name, value, allowed, remedy))
        require(ok(found), name, found, allowed, remedy)
        return found

    return parse


def _index(name: str, value: Any) -> int:
    allowed = f"an integer in 0..{MAX_OFFSET}"
    found = constant(integer(name, value, allowed, "It is a global index."))
    require(0 <= found <= MAX_OFFSET, name, found, allowed, "It is a global index.")
    return found


def _scale(name: str, value: Any) -> float | None:
    return None if value is None else _given_scale(name, value)


_given_scale = _real(
    lambda x: SMALLEST <= x <= LARGEST, "2**-126..2**127", "Negate q for a negative scale."
)
_softcap = _real(
    lambda x: x == 0 or SMALLEST <= x <= MAX_SOFTCAP,
    f"0 for none, or 2**-126..{MAX_SOFTCAP:g}",
    "Logits become softcap * tanh(logit / softcap), with an error of about 1e-7 * softcap; a cap "
    "far above the logits does nothing else: pass 0.",
)
dropout_share = _real(lambda x: 0 <= x < 1, "0 <= p < 1", "It is the dropped share.")
_dynamic = _real(
    lambda x: -LARGEST <= x <= LARGEST,
    "a finite float32 number",
    "It is a parameter of stabilizer='dynamic_max'.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a call asks for, whatever its tensors: see `stable_attention` for the meanings."""

    layout: str = _option(str, "bshd", lambda name, x: choose(name, x, LAYOUTS))
    scale: float | None = _option(float, None, _scale)
    """None: d ** -0.5."""
    window_left: int = _option(int, UNLIMITED)
    """Keys visible before the aligned diagonal, ``UNLIMITED`` for all."""
    window_right: int = _option(int, UNLIMITED)
    """Keys visible after the aligned diagonal; causal is 0."""
    softcap: float = _option(float, 0.0, _softcap)
    dropout_p: float = _option(float, 0.0, dropout_share)
    batch_offset: int = _option(int, 0, _index)
    head_offset: int = _option(int, 0, _index)
    stabilizer: str = _option(str, "compensated", lambda name, x: choose(name, x, KNOWN))
    o_lo: str = _option(
        str,
        "bf16",
        lambda name, x: choose(name, x, O_LO_FORMATS, "It is the storage of O's low-order part."),
    )
    beta: float = _option(float, 2.0, _dynamic)
    eps: float = _option(float, 1e-3, _dynamic)
    deterministic: bool = _option(bool, False, flag)
    backward: str = _option(
        str,
        "auto",
        lambda name, x: choose(name, x, BACKWARDS, "It is whose backward pass runs."),
    )

    @classmethod
    def of(
        cls,
        *,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        allow_broken: bool = False,
        **named: Any,
    ) -> Options:
        """Parse keywords of `stable_attention`.

        Raises:
            AttentionArgumentError: a value of a wrong type or range.
            TypeError: a keyword that is no option.
        """
        # Only an immutable object cannot come again with another value.
        simple = not torch.compiler.is_compiling() and _SIMPLE.issuperset(map(type, named.values()))
        if simple and window is None and type(causal) is type(allow_broken) is bool:
            return _parsed(UNLIMITED, 0 if causal else UNLIMITED, allow_broken, **named)
        flag("causal", causal)
        flag("allow_broken", allow_broken)
        left, right = (int(constant(x)) for x in window_bounds(causal, window))
        parse = _parsed if simple else cls._parse
        return parse(left, right, bool(allow_broken), **named)

    @classmethod
    def _parse(cls, left: int, right: int, allow_broken: bool, **named: Any) -> Options:
        """Options of window bounds (`window_bounds`) and other keywords."""
        if named.get("stabilizer") == "paper_bf16" and not allow_broken:
            raise AttentionArgumentError(
                "stabilizer",
                "'paper_bf16'",
                ", ".join(repr(name) for name, kind in STABILIZERS.items() if not kind.paper),
                "It reproduces a numerical failure on purpose; pass allow_broken=True if you want "
                "it.",
            )
        for name in named:
            if name not in _RULES:
                raise TypeError(f"got an unexpected keyword argument {name!r}")
        parsed = {name: _RULES[name](name, value) for name, value in named.items()}
        return cls(window_left=left, window_right=right, **parsed)

    @property
    def causal(self) -> bool:
        """Whether no query sees a key after its own position."""
        return self.window_right == 0

    def keywords(self) -> dict[str, Any]:
        """As the keywords of `stable_attention` and of the chunk primitives."""
        named = {name: getattr(self, name) for name in _RULES}
        return named | {"window": (self.window_left, self.window_right)}


_parsed = functools.lru_cache(maxsize=KEPT, typed=True)(Options._parse)
_FIELDS = {x.name: x for x in fields(Options)}
_DEFAULTS = {name: x.default for name, x in _FIELDS.items()}
_RULES = {name: x.metadata["rule"] for name, x in _FIELDS.items() if x.metadata["rule"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem(Options):
    """A validated call: everything a launcher needs besides the tensors themselves."""

    dtype: torch.dtype
    batch: int
    """Batch size; for ``thd`` the number of packed sequences."""
    sq: int
    """Query length; for ``thd`` the upper bound ``max_seqlen_q``."""
    sk: int
    heads: int
    kv_heads: int
    d: int
    dv: int
    tq: int
    """Query tokens in memory for ``thd``, else ``batch * sq``."""
    tk: int
    scale: float
    has_sinks: bool = False
    chunked: bool = False
    """Positions are global (chunks of a longer sequence), not bottom-right aligned."""
    pos_q: int = 0
    """Global position of query row 0 (and of key 0 in ``pos_k``), where the host knows it."""
    pos_k: int = 0

    def __hash__(self) -> int:
        """Of what differs most: a call is looked up several times, and 28 fields take longer."""
        return hash((self.batch, self.sq, self.sk, self.heads, self.kv_heads, self.d, self.scale))

    @property
    def varlen(self) -> bool:
        return self.layout == "thd"

    @property
    def planes(self) -> int:
        """Float32 planes of the LSE that the backward makes P of; chunks have the public LSE."""
        return 1 if self.chunked else KNOWN[self.stabilizer].planes

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    def encode(self) -> str:
        """The options as text, such as "scale=0.125 window_right=0": the operators' ``spec``.

        Numbers that torch.compile traces become constants; lengths are not among them.
        """
        return _encode(self)

    @classmethod
    def decode(
        cls,
        spec: str | Problem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sq: int,
        sk: int,
        sinks: torch.Tensor | None,
        cu_q: torch.Tensor | None,
    ) -> Problem:
        """The `Problem` of a call that `describe` has seen, without its checks.

        A ``spec`` that is one already is it: nothing stood between that needs text.
        """
        if isinstance(spec, Problem):
            return spec
        sequences = None if cu_q is None else cu_q.shape[0] - 1
        return build(
            options_of(spec), q.dtype, q.shape, k.shape, v.shape, sequences, sq, sk,
            sinks is not None,
        )  # fmt: skip


@remembered
def _encode(problem: Problem) -> str:
    given = {name: getattr(problem, name) for name in _FIELDS}
    return " ".join(f"{name}={x}" for name, x in given.items() if x != _DEFAULTS[name])


@functools.lru_cache(maxsize=KEPT)
def options_of(spec: str) -> Options:
    """The `Options` that a spec stands for."""
    given = dict(item.split("=") for item in spec.split())
    parsed: dict[str, Any] = {}
    for name, text in given.items():
        kind = _FIELDS[name].metadata["kind"]
        parsed[name] = text == "True" if kind is bool else kind(text)
    return Options(**parsed)


@remembered
def build(
    options: Options,
    dtype: torch.dtype,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    sequences: int | None,
    sq: int,
    sk: int,
    has_sinks: bool,
    **found: Any,
) -> Problem:
    batch, lq, heads, d = extents(q, options.layout)
    _, lk, kv_heads, _ = extents(k, options.layout)
    packed = sequences is not None
    given = {name: getattr(options, name) for name in _FIELDS} | found
    return Problem(
        **given,
        dtype=dtype,
        batch=sequences if sequences is not None else batch,
        sq=sq,
        sk=sk,
        heads=heads,
        kv_heads=kv_heads,
        d=d,
        dv=v[-1],
        tq=lq if packed else batch * lq,
        tk=lk if packed else batch * lk,
        has_sinks=has_sinks,
    )


class Extras(NamedTuple):
    """The tensors of a call besides q, k and v."""

    sinks: torch.Tensor | None = None
    """[h] sink logits, natural-log units."""
    cu_q: torch.Tensor | None = None
    """int32 [b + 1] token offsets of packed sequences."""
    cu_k: torch.Tensor | None = None
    start_q: torch.Tensor | None = None
    """int32 [b] where sequences start in memory, if not at ``cu_q``."""
    start_k: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    """int64 scalar on the device."""
    pos_q: torch.Tensor | None = None
    """int32 [b] global positions, one a packed sequence; replaces those of the `Problem`."""
    pos_k: torch.Tensor | None = None

    def pointers(self) -> tuple[torch.Tensor | None, ...]:
        """cu, start and position tensors in kernel order."""
        start_q = self.cu_q if self.start_q is None else self.start_q
        start_k = self.cu_k if self.start_k is None else self.start_k
        return self.cu_q, self.cu_k, start_q, start_k, self.pos_q, self.pos_k
