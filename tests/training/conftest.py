"""Shared by the training tests: CPU mode in this process, and a corpus every rank can read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


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
    from megatron_patch.data.prepare import PrepareOptions, prepare

    folder = tmp_path_factory.mktemp("corpus")
    words = ["the", "model", "reads", "small", "words", "and", "learns", "what", "follows"]
    documents = [
        " ".join(words[(7 * d + k * k) % len(words)] for k in range(40 + d)) for d in range(100)
    ]
    (folder / "text.txt").write_text("\n\n".join(documents))
    prepare(
        PrepareOptions(
            inputs=[str(folder / "text.txt")],
            out=str(folder / "tiny"),
            document_separator="\n\n",
            workers=1,
            quiet=True,
        )
    )
    return folder / "tiny"
