"""Shared by the tests of faults: the corpus of the training tests, and the lab beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a byte-tokenized dataset of about 40 kB in 100 documents."""
    from megatron_patch.data.prepare import PrepareOptions, prepare

    folder = tmp_path_factory.mktemp("corpus")
    text = "\n\n".join(" ".join(f"{d * 7 + k * k}" for k in range(60 + d)) for d in range(100))
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
