"""transformers' mask function: what a model may see, as an object that only our attention reads.

transformers hands a mask from its mask function through the model to the attention function. A
mask of None, as for FlashAttention, is lost without a word where a model computes attention on
its own, or where positions and windows do not reach the attention function. A `Mask` carries
causality, window and documents itself, and raises wherever anything else uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import NoReturn

import torch

from stable_attention.hf import serving
from stable_attention.problem import AttentionArgumentError

_OTHERS = "Use attn_implementation='sdpa' or 'eager' for it."


class MaskUseError(AttentionArgumentError, AttributeError):
    """A model used our mask as a tensor; an AttributeError, because models and libraries probe."""


class Mask:
    """Causality, window, padding and documents of the calls of one model forward."""

    def __init__(
        self,
        *,
        causal: bool,
        window: tuple[int, int] | None = None,
        padded: tuple[int, ...] | None = None,
        offsets: torch.Tensor | None = None,
    ) -> None:
        self.causal = causal
        self.window = window
        """Keys visible before and after the query's own."""
        self.padded = padded
        """Shape of a padding mask that hides something."""
        self.offsets = offsets
        """int32 [documents + 1], where documents begin in the rows laid end to end; None where
        every row is one document."""

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_use(f".{name}")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None) -> NoReturn:
        _refuse_use(getattr(func, "__name__", "a function"))


def _refuse_use(how: str, *_: object) -> NoReturn:
    raise MaskUseError(
        "attn_implementation",
        f"stable_attention, but the model uses the mask itself ({how})",
        "models whose attention layers call transformers' AttentionInterface",
        _OTHERS,
    )


def _refusing(name: str) -> Callable[..., NoReturn]:
    return lambda self, *_: _refuse_use(name)


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rand", "ror", "rxor", "neg", "invert", "abs"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("getitem", "setitem", "len", "iter", "contains", "bool", "float", "int", "index"),
):
    setattr(Mask, f"__{_name}__", _refusing(_name))
Mask.__hash__ = object.__hash__  # type: ignore[method-assign]


def mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    config: object = None,
    **kwargs,
) -> Mask:
    """transformers' mask function. Causal masks, windows and packed documents are served.

    Documents come as a mask function of positions that start anew; where there are several, one
    read of the device a model forward finds them.

    Raises:
        AttentionArgumentError: chunked attention longer than a chunk, functions joined to a mask
            (prefix LM, blocks of image tokens), a static cache that is longer than its tokens.
    """
    end = kv_length + kv_offset
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and end > chunk and _chunked(mask_function, config, kwargs):
        _refuse_mask(f"in chunks of {chunk} for {end} keys", f"at most {chunk} keys")
    parts = _parts(mask_function)
    if kwargs.get("use_vmap") or not parts <= _KNOWN_PARTS:
        names = ", ".join(sorted(parts - _KNOWN_PARTS)) or "a caller"
        _refuse_mask(f"a function of {names}", "causal, windows, full, packed documents")
    causal = "allow_is_bidirectional_skip" not in kwargs
    length = kwargs.get("q_length")
    if length is None:  # older releases
        length = kwargs["cache_position"].shape[0]
    if causal:
        _check_tokens(end, length, kwargs)
    size = kwargs.get("local_size")
    reach = None if size is None else size - 1 if causal else size
    offsets = None
    if causal and length == kv_length and length > 1 and mask_function is not None:
        offsets = _documents(mask_function, parts, (batch_size, length), kwargs)
    serving.saw(offsets)
    return Mask(
        causal=causal,
        window=None if reach is None else (reach, 0 if causal else reach),
        padded=_padding(attention_mask, kv_length),
        offsets=offsets,
    )


def _refuse_mask(value: str, allowed: str, remedy: str = _OTHERS) -> NoReturn:
    raise AttentionArgumentError("the mask", value, allowed, remedy)


def _check_tokens(end: int, length: int, kwargs: dict) -> None:
    """Raise where there are more keys than tokens: those of a static cache's empty slots."""
    position = kwargs.get("cache_position")
    if position is not None:
        if end == length:  # nothing cached: nothing to read from the device
            return
        tokens = position[-1] + 1
    else:
        tokens = kwargs.get("q_offset", 0) + length
    if isinstance(tokens, torch.Tensor):
        if torch.compiler.is_compiling():
            _refuse_mask("of a static cache", "a key a token", "Use a dynamic cache.")
        tokens = int(tokens)
    if end != tokens:
        _refuse_mask(f"of {end} keys for {tokens} tokens", "a key a token", "Use a dynamic cache.")


def _padding(attention_mask: torch.Tensor | None, kv_length: int) -> tuple[int, ...] | None:
    """The shape of a 2-D mask that hides something."""
    if attention_mask is None:
        return None
    seen = attention_mask[:, -kv_length:]
    return None if seen.shape[1] == kv_length and seen.all() else tuple(attention_mask.shape)


def _chunked(mask_function: object, config: object, kwargs: dict) -> bool:
    """Whether a mask of a model that has chunked layers is one of theirs."""
    if kwargs.get("local_size") != getattr(config, "attention_chunk_size", None):
        return False
    if getattr(config, "sliding_window", None) != kwargs["local_size"]:
        return True
    return not _CHUNKS.isdisjoint(_parts(mask_function))


_CHUNKS = {"chunked_overlay", "_legacy_chunked_overlay"}
_KNOWN_PARTS = {
    "and_masks",
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
} | _CHUNKS  # not longer than a chunk: causal


def _parts(mask_function: object) -> set[str]:
    """Names of the functions of transformers.masking_utils that made a mask function.

    The outermost alone in a compiled model: Dynamo does not look into closures.
    """
    if isinstance(mask_function, tuple):
        return set().union(*map(_parts, mask_function))
    if not isinstance(mask_function, FunctionType):
        return set()
    outermost = {mask_function.__qualname__.split(".")[0]}
    if torch.compiler.is_compiling():
        return outermost
    inside = (cell.cell_contents for cell in mask_function.__closure__ or ())
    return outermost.union(*map(_parts, inside))


def _documents(
    mask_function: Callable[..., torch.Tensor],
    parts: set[str],
    size: tuple[int, int],
    kwargs: dict,
) -> torch.Tensor | None:
    """`document_offsets` of a causal mask function for rows and tokens ``size``.

    A document begins where a token does not see the one before. While tracing every model may be
    packed for all that can be known.
    """
    compiling = torch.compiler.is_compiling()
    if not (parts == {"and_masks"} if compiling else "packed_sequence_mask_function" in parts):
        return None
    rows, tokens = size
    device = kwargs.get("device")
    if device is None:  # older releases
        device = kwargs["cache_position"].device
    index = torch.arange(tokens, device=device)[None]
    row = torch.arange(rows, device=device)[:, None]
    sees = mask_function(row, torch.zeros_like(row), index[:, 1:], index[:, :-1])
    return document_offsets(~sees.expand(rows, tokens - 1))


def document_offsets(begins: torch.Tensor) -> torch.Tensor | None:
    """int32 [documents + 1] offsets in rows laid end to end, or None for one document a row.

    ``begins`` is bool [rows, tokens - 1], where a document begins after the first token. A
    compiled model of several rows is one document a row, or stops at its first batch.
    """
    if torch.compiler.is_compiling():
        if begins.shape[0] == 1:
            return _offsets_op(begins)
        torch._assert_async(~begins.any(), _SEVERAL_ROWS)
        return None
    found = _offsets(begins)
    return None if found.numel() == begins.shape[0] + 1 else found


_SEVERAL_ROWS = (
    "stable_attention: packed documents in a compiled model of several rows; allowed: one row. "
    "Put them behind each other in one row (DataCollatorWithFlattening), or do not compile."
)


def _offsets(begins: torch.Tensor) -> torch.Tensor:
    first = torch.nn.functional.pad(begins, (1, 0), value=True).flatten()
    starts = first.nonzero()[:, 0].to(torch.int32)
    return torch.cat([starts, starts.new_full((1,), first.numel())])


@torch.library.custom_op(f"{__name__.partition('.')[0]}::document_offsets", mutates_args=())
def _offsets_op(begins: torch.Tensor) -> torch.Tensor:
    return _offsets(begins)


@_offsets_op.register_fake
def _(begins: torch.Tensor) -> torch.Tensor:
    most = begins.shape[0] * (begins.shape[1] + 1) + 1
    found = torch.library.get_ctx().new_dynamic_size(min=2, max=most)
    return begins.new_empty(found, dtype=torch.int32)
