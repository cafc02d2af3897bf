"""What real runs of several ranks need: a corpus that every rank can read, and a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import training_ranks
from byte_corpus import byte_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a byte-tokenized dataset of about 50 kB."""
    words = ["the", "head", "watches", "one", "token", "and", "its", "row", "repeats"]
    documents = (
        " ".join(words[(5 * d + k * k) % len(words)] for k in range(40 + d)) for d in range(100)
    )
    return byte_corpus(tmp_path_factory.mktemp("corpus") / "tiny", documents)


@pytest.fixture(scope="module")
def own_worker() -> Iterator[None]:
    """Ranks run this folder's worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_ranks, "WORKER", Path(__file__).parent / "worker.py")
        yield
