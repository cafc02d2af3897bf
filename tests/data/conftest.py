"""Small corpora for the data tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Helpers are a plain module beside this file (importmode=importlib adds no path).
sys.path.append(str(Path(__file__).resolve().parent))
from prepared import documents, make


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Prefixes of two prepared byte-level datasets of different size; do not change them."""
    root = tmp_path_factory.mktemp("corpora")
    prefixes = []
    for number, count in enumerate((300, 120)):
        text = root / f"text{number}.txt"
        text.write_text("\n\n".join(documents(count, seed=number)), encoding="utf-8")
        prefix = root / f"corpus{number}"
        make(prefix, text, document_separator="\n\n")
        prefixes.append(prefix)
    return prefixes


@pytest.fixture
def texts() -> list[str]:
    return documents(200, seed=5)
