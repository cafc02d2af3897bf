"""What real runs of several ranks need: a corpus that every rank can read, and a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import training_ranks
from byte_corpus import word_corpus
from megatron_cpu import single_rank


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a byte-tokenized dataset of about 50 kB."""
    text = "the head watches one token and its row repeats"
    return word_corpus(tmp_path_factory.mktemp("corpus"), text, step=5)


@pytest.fixture(scope="module")
def own_worker() -> Iterator[None]:
    """Ranks run this folder's worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_ranks, "WORKER", Path(__file__).parent / "worker.py")
        yield


@pytest.fixture
def cpu_mode() -> Iterator[None]:
    """Megatron-Core's: the monitor imports it."""
    with single_rank():
        yield
