"""What real runs of several ranks need: a corpus that every rank can read, and a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import training_ranks


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a byte-tokenized dataset of about 50 kB."""
    from megatron_patch.data.prepare import PrepareOptions, prepare

    folder = tmp_path_factory.mktemp("corpus")
    words = ["the", "head", "watches", "one", "token", "and", "its", "row", "repeats"]
    text = "\n\n".join(
        " ".join(words[(5 * d + k * k) % len(words)] for k in range(40 + d)) for d in range(100)
    )
    (folder / "text.txt").write_text(text)
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


@pytest.fixture(scope="module")
def own_worker() -> Iterator[None]:
    """Ranks run this folder's worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_ranks, "WORKER", Path(__file__).parent / "worker.py")
        yield
