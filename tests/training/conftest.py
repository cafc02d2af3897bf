"""Shared by the training tests: CPU mode in this process, and a corpus every rank can read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_corpus import byte_corpus


@pytest.fixture(scope="module")
def cpu() -> Iterator[None]:
    """CPU mode before Megatron is imported in this test process; undone at the end."""
    from megatron_patch.core_patches import cpu_mode

    cpu_mode.install()
    yield
    cpu_mode.uninstall()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a byte-tokenized dataset of about 40 kB in 100 documents."""
    words = ["the", "model", "reads", "small", "words", "and", "learns", "what", "follows"]
    documents = (
        " ".join(words[(7 * d + k * k) % len(words)] for k in range(40 + d)) for d in range(100)
    )
    return byte_corpus(tmp_path_factory.mktemp("corpus") / "tiny", documents)
