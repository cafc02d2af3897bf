"""The command that trains the tiny model of research/protocols, for tests in processes."""

from __future__ import annotations

from pathlib import Path

CONFIG = Path(__file__).resolve().parents[1] / "research" / "protocols" / "base" / "tiny_cpu.yaml"


def train(run_dir: Path, corpus: Path, *keys: str) -> list[str]:
    """``train --config ...``, with ``keys`` set; what comes before it is the caller's."""
    named = [f"run_dir={run_dir}", f"data.blend.0.path={corpus}", *keys]
    return ["train", "--config", str(CONFIG), *(part for key in named for part in ("--set", key))]
