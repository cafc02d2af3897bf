"""The ``data:`` section: token files, blends and the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megatron_patch.schema.paths import PathOrName, PathText
from megatron_patch.schema.problem import Problem

MAX_WORKERS = 64
"""Readers of one rank. Each holds two batches, and between reads they share one interpreter lock:
more of them wait for each other, and a node has as many for each of its ranks."""


@dataclass(kw_only=True, frozen=True, slots=True)
class TokenizerConfig:
    """How text became token ids; its hash must match the datasets' manifests."""

    kind: Literal["bytes", "huggingface", "sentencepiece", "tiktoken", "none"] = "bytes"
    """bytes: 256 byte values + end of document; none: datasets of bare ids (needs vocab_size)."""
    path: PathOrName | None = None
    """tokenizer.json (huggingface), .model (sentencepiece); for tiktoken see docs/data.md."""
    vocab_size: int | None = None
    """Number of ids, for ``kind: none`` only."""
    eod_id: int | None = None
    """End-of-document id, where the tokenizer does not name one."""

    def problems(self, path: str = "data.tokenizer") -> Iterator[Problem]:
        """Contradictions between the kind and the other keys; ``path`` prefixes the messages."""
        if self.kind in ("huggingface", "sentencepiece", "tiktoken") and not self.path:
            what = "an encoding's file or name" if self.kind == "tiktoken" else "a tokenizer file"
            yield Problem(f"{path}.path", f"kind {self.kind!r} needs the path of {what}")
        if self.kind in ("bytes", "none") and self.path is not None:
            yield Problem(
                f"{path}.path",
                f"kind {self.kind!r} reads no file, but path is {self.path!r}; remove it or "
                "choose kind huggingface, sentencepiece or tiktoken",
            )
        if self.kind == "none":
            if self.vocab_size is None:
                yield Problem(f"{path}.vocab_size", "kind 'none' needs the number of token ids")
            elif not 1 <= self.vocab_size <= 1 << 31:
                text = f"{self.vocab_size} is not 1 to 2147483648, the ids that an int32 holds"
                yield Problem(f"{path}.vocab_size", text)
        elif self.vocab_size is not None:
            yield Problem(
                f"{path}.vocab_size",
                f"{self.vocab_size} is set, but the {self.kind!r} tokenizer knows its own size; "
                "remove it (it belongs to kind 'none')",
            )
        if self.eod_id is not None:
            if self.kind == "bytes" and self.eod_id != 256:
                yield Problem(f"{path}.eod_id", f"{self.eod_id}: the bytes tokenizer's is 256")
            elif self.eod_id < 0:
                yield Problem(f"{path}.eod_id", f"{self.eod_id} is negative; ids start at 0")
            elif self.vocab_size is not None and self.eod_id >= self.vocab_size:
                text = f"{self.eod_id} is not below vocab_size {self.vocab_size}"
                yield Problem(f"{path}.eod_id", text)


@dataclass(kw_only=True, frozen=True, slots=True)
class DatasetConfig:
    """One prepared dataset of a blend."""

    path: PathText
    """Prefix of the ``.bin``/``.idx``/``.manifest.json`` files."""
    weight: float = 1.0
    """Relative share of the samples drawn from it."""


@dataclass(kw_only=True, frozen=True, slots=True)
class DataConfig:
    """Where the tokens come from. Either ``blend`` + ``split``, or ``train``/``valid``/``test``."""

    blend: list[DatasetConfig] = field(default_factory=list)
    """Datasets whose documents are divided between train, valid and test by ``split``."""
    split: list[float] = field(default_factory=lambda: [0.99, 0.01, 0.0])
    """Shares of each dataset of ``blend`` for train, valid and test, in file order."""
    train: list[DatasetConfig] = field(default_factory=list)
    """Training blend, instead of ``blend``."""
    valid: list[DatasetConfig] = field(default_factory=list)
    """Validation blend, with ``train``."""
    test: list[DatasetConfig] = field(default_factory=list)
    """Test blend, with ``train``."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer the datasets were prepared with."""
    seed: int | None = None
    """Seed of the training order; default: training.seed. Evaluation ignores it."""
    verify: Literal["full", "sampled"] = "full"
    """Hash every byte of the token files at start, or (huge files) a fixed sample of pages."""
    num_workers: int = 2
    """Reader threads per rank that prepare batches ahead, at most 64; 0 reads in the training
    thread."""
    eod_mask_loss: bool = False
    """No loss at end-of-document tokens, where the next document's first token is predicted."""
    reset_position_ids: bool = False
    """Restart positions after every end of document (attention still crosses documents)."""
    document_attention: bool = False
    """Attention, positions and loss stop at ends of documents."""

    @property
    def paths(self) -> list[str]:
        """Prefixes of all datasets, each once, in the order they are named."""
        every = [*self.blend, *self.train, *self.valid, *self.test]
        return list(dict.fromkeys(dataset.path for dataset in every))

    def problems(self) -> Iterator[Problem]:
        yield from self._blend_problems()
        yield from self._split_problems()
        yield from self.tokenizer.problems()
        if self.num_workers < 0:
            yield Problem("data.num_workers", f"{self.num_workers} is negative; use 0 or more")
        elif self.num_workers > MAX_WORKERS:
            yield Problem(
                "data.num_workers",
                f"{self.num_workers}: at most {MAX_WORKERS} threads a rank are of use, more wait "
                "for each other; 2 to 8 read ahead of almost any step",
            )
        if self.seed is not None and self.seed < 0:
            yield Problem("data.seed", f"{self.seed} is negative; use 0 or more")
        if self.tokenizer.kind == "none" and self.tokenizer.eod_id is None:
            for key in ("eod_mask_loss", "reset_position_ids", "document_attention"):
                if getattr(self, key):
                    text = "needs to know the end-of-document id: set data.tokenizer.eod_id"
                    yield Problem(f"data.{key}", text)

    def _blend_problems(self) -> Iterator[Problem]:
        separate = [key for key in ("train", "valid", "test") if getattr(self, key)]
        if self.blend and separate:
            yield Problem(
                "data.blend",
                f"contradicts data.{', data.'.join(separate)}: use blend with split, "
                "or train/valid/test with datasets of their own",
            )
        elif not self.blend and not self.train:
            yield Problem(
                "data.train" if separate else "data.blend",
                "no training data: name at least one prepared dataset "
                "(megatron-patch prepare-data makes one)",
            )
        for key in ("blend", "train", "valid", "test"):
            for i, dataset in enumerate(getattr(self, key)):
                where = f"data.{key}[{i}]"
                if dataset.path.endswith((".bin", ".idx", ".manifest.json")):
                    text = f"{dataset.path!r}: leave the file's ending out, the prefix is wanted"
                    yield Problem(f"{where}.path", text)
                if not (math.isfinite(dataset.weight) and dataset.weight > 0):
                    yield Problem(
                        f"{where}.weight",
                        f"{dataset.weight} is not a positive number; "
                        "leave the dataset out to give it no weight",
                    )

    def _split_problems(self) -> Iterator[Problem]:
        if not self.blend:
            return
        if len(self.split) != 3:
            text = f"{self.split} has {len(self.split)} entries; give train, valid and test"
            yield Problem("data.split", text)
        elif not all(math.isfinite(share) and share >= 0 for share in self.split):
            yield Problem("data.split", f"{self.split}: every share must be a number >= 0")
        elif abs(sum(self.split) - 1) > 1e-6:
            text = f"{self.split} sums to {sum(self.split):g}; the shares must sum to 1"
            yield Problem("data.split", text)
        elif self.split[0] == 0:
            yield Problem("data.split", f"{self.split} leaves nothing to train on")
