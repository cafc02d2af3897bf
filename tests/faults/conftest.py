"""The corpus of the tests of faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_corpus import byte_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a byte-tokenized dataset of about 40 kB in 100 documents."""
    documents = (" ".join(f"{d * 7 + k * k}" for k in range(60 + d)) for d in range(100))
    return byte_corpus(tmp_path_factory.mktemp("corpus") / "tiny", documents)
