"""What Megatron-Core and the libraries under it log and warn of that is not about a run."""

from __future__ import annotations

import logging
import warnings
from typing import Any

IGNORED: tuple[dict[str, Any], ...] = (
    # Missing optional packages and deprecations inside Megatron-Core, once per rank.
    {"category": UserWarning, "module": r"megatron\.core(\..*)?"},
    {"category": DeprecationWarning},
    # Core's tensor-parallel layers look at .grad of activations; its collectives use old names.
    {"message": "The .grad attribute of a Tensor that is not a leaf"},
    {"category": FutureWarning, "module": r"torch\.distributed.*"},
)
QUIETED = [logging.getLogger(x) for x in ("megatron.core", "torch.utils.cpp_extension")]
NOTICES = {
    # For every chunk; `model.build` logs it once.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # A layout precomputed by the caller is recommended; core's own is the same.
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
}

_filters: list[Any] = []


def install() -> None:
    """Drop notices that are not about this run; what it runs on is said in the start-up lines."""
    for notice in IGNORED:
        warnings.filterwarnings("ignore", **notice)
        _filters.append(warnings.filters[0])
    for logger in QUIETED:
        logger.setLevel(logging.ERROR)
    drop_notices()


def drop_notices() -> None:
    """Drop ``NOTICES`` alone, for programs with warnings and log levels of their own."""
    for name in NOTICES:
        logging.getLogger(name).addFilter(_is_news)


def undo() -> None:
    """Let all of them through again."""
    warnings.filters[:] = [x for x in warnings.filters if x not in _filters]  # type: ignore[index]
    _filters.clear()
    for logger in QUIETED:
        logger.setLevel(logging.NOTSET)
    for name in NOTICES:
        logging.getLogger(name).removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return NOTICES[record.name] not in record.getMessage()
