"""The ``data:`` section: token files, blends and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_patch.config.problem import Problem
    from megatron_patch.config.root import RunConfig


@dataclass(kw_only=True, frozen=True, slots=True)
class TokenizerConfig:
    """How text became token ids; its hash must match the datasets' manifests."""

    kind: Literal["bytes", "huggingface", "sentencepiece", "tiktoken", "none"] = "bytes"
    """bytes: 256 byte values + end of document; none: datasets of bare ids (needs vocab_size)."""
    path: str | None = None
    """tokenizer.json (huggingface), .model (sentencepiece) or encoding name / file (tiktoken)."""
    vocab_size: int | None = None
    """Number of ids, for ``kind: none`` only."""
    eod_id: int | None = None
    """End-of-document id, where the tokenizer does not name one."""


@dataclass(kw_only=True, frozen=True, slots=True)
class DatasetConfig:
    """One prepared dataset of a blend."""

    path: str
    """Prefix of the ``.bin``/``.idx``/``.manifest.json`` files."""
    weight: float = 1.0
    """Relative share of the samples drawn from it."""


@dataclass(kw_only=True, frozen=True, slots=True)
class DataConfig:
    """Where the tokens come from. Either ``blend`` + ``split``, or ``train``/``valid``/``test``."""

    blend: list[DatasetConfig] = field(default_factory=list)
    """Datasets whose documents are divided between train, valid and test by ``split``."""
    split: list[float] = field(default_factory=lambda: [0.98, 0.01, 0.01])
    """Shares of train, valid and test for ``blend``."""
    train: list[DatasetConfig] = field(default_factory=list)
    """Training blend, instead of ``blend``."""
    valid: list[DatasetConfig] = field(default_factory=list)
    """Validation blend, with ``train``."""
    test: list[DatasetConfig] = field(default_factory=list)
    """Test blend, with ``train``."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer the datasets were prepared with."""
    seed: int | None = None
    """Seed of the sample order; default: training.seed."""
    verify: Literal["full", "sampled"] = "full"
    """Hash every byte of the token files at start, or (huge files) a fixed sample of pages."""
    cache_dir: str | None = None
    """Where sample indices are cached; default: the run directory."""
    num_workers: int = 2
    """Loader processes per rank; 0 loads in the training process."""
    eod_mask_loss: bool = False
    """Exclude end-of-document tokens from the loss."""
    reset_position_ids: bool = False
    """Restart positions after every end of document."""

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Everything about this section that can be checked without a GPU."""
        yield from ()
