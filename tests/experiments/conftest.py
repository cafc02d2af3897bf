"""A tiny corpus and a protocol over it; fake training processes for the runner."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a byte-tokenized dataset."""
    from megatron_patch.data.prepare import PrepareOptions, prepare

    folder = tmp_path_factory.mktemp("corpus")
    words = ["runs", "of", "one", "seed", "see", "the", "same", "batches"]
    documents = [
        " ".join(words[(5 * d + k * k) % len(words)] for k in range(40 + d)) for d in range(60)
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


PROTOCOL = """\
name: tiny
config: {config}
steps: {steps}
seeds: [1, 2]
save_seconds: 0
explosion: {{window: 10, from_step: 20, loss: 5.0, stop_after: 30}}
cells:
  - {{name: a, asks: the control}}
  - {{name: b, set: [optimizer.lr=2e-3], seeds: [1]}}
"""


@pytest.fixture
def protocol(tmp_path: Path) -> Path:
    """Two cells, three runs: a-s1, b-s1, a-s2."""
    path = tmp_path / "protocol.yaml"
    config = ROOT / "configs" / "stability" / "base" / "tiny_cpu.yaml"
    path.write_text(PROTOCOL.format(config=config, steps=100))
    return path
