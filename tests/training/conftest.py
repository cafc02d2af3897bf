"""Shared by the training tests: CPU mode in this process, and a corpus every rank can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_corpus import word_corpus
from minimal_config import TINY

from megatron_patch.config import load


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Loads `TINY` with overrides, in its folder; the run directory is runs/tiny there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return lambda *overrides: load(tmp_path / "tiny.yaml", list(overrides))


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
    text = "the model reads small words and learns what follows"
    return word_corpus(tmp_path_factory.mktemp("corpus"), text, step=7)
