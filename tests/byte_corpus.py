"""Small byte-tokenized datasets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def byte_corpus(prefix: Path, documents: Iterable[str]) -> Path:
    """Prepare a dataset of ``documents``; its text lies beside it. Returns the prefix."""
    from megatron_patch.data.prepare import PrepareOptions, prepare

    text = prefix.with_suffix(".txt")
    text.write_text("\n\n".join(documents))
    prepare(
        PrepareOptions(
            inputs=[str(text)], out=str(prefix), document_separator="\n\n", workers=1, quiet=True
        )
    )
    return prefix


def word_corpus(folder: Path, text: str, *, step: int, documents: int = 100) -> Path:
    """A dataset of the words of ``text``, their order and number another in every document."""
    words = text.split()
    return byte_corpus(
        folder / "tiny",
        (
            " ".join(words[(step * d + k * k) % len(words)] for k in range(40 + d))
            for d in range(documents)
        ),
    )
