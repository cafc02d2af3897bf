"""Writing and loading small configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from minimal_config import MINIMAL

from megatron_patch import config


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """``write(text, name)``: a file with that text."""

    def write_file(text: str | bytes, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_file


@pytest.fixture
def minimal(write: Callable[..., Path]) -> Path:
    """A configuration with nothing but the required keys."""
    return write(MINIMAL, "minimal.yaml")


@pytest.fixture
def refused() -> Callable[..., config.ConfigError]:
    """``refused(path, overrides)``: the error that loading raises."""

    def load(path: Path, overrides: tuple[str, ...] = (), **options: object) -> config.ConfigError:
        with pytest.raises(config.ConfigError) as caught:
            config.load(path, overrides, **options)  # type: ignore[arg-type]
        return caught.value

    return load
