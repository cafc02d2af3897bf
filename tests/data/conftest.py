"""Small corpora and run configurations for the data tests."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_patch.data.prepare import PrepareOptions, prepare
from megatron_patch.schema.data import DataConfig, DatasetConfig
from megatron_patch.schema.model import ModelConfig
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.training import OptimizerConfig, TrainingConfig

# Helpers are a plain module beside this file (importmode=importlib adds no path).
sys.path.append(str(Path(__file__).resolve().parent))

WORDS = [
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "und", "läuft", "weiter",
    "漢字", "🙂", "return", "self",
]  # fmt: skip


def documents(count: int, seed: int, words: int = 40) -> list[str]:
    """Reproducible documents of 1 to ``words`` words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, words))) for _ in range(count)]


def options(out: Path, *inputs: Path, **changes: object) -> PrepareOptions:
    """Quiet options on one process, unless changed."""
    values: dict = {"workers": 1, "quiet": True} | changes
    return PrepareOptions(out=str(out), inputs=[str(path) for path in inputs], **values)


def run_config(*paths: Path | str | DatasetConfig, **changes: object) -> RunConfig:
    """A run over the given datasets; keys of any section can be changed by name."""
    datasets = [p if isinstance(p, DatasetConfig) else DatasetConfig(path=str(p)) for p in paths]
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=16)
    training = TrainingConfig(
        train_steps=20, global_batch_size=12, micro_batch_size=1, device="cpu", eval_steps=2
    )
    data = DataConfig(blend=datasets, split=[0.8, 0.1, 0.1], num_workers=0)

    def changed(section: object) -> object:
        names = {item.name for item in dataclasses.fields(section)}  # type: ignore[arg-type]
        return dataclasses.replace(  # type: ignore[type-var]
            section, **{key: value for key, value in changes.items() if key in names}
        )

    return RunConfig(
        name="data-test",
        model=changed(model),
        training=changed(training),
        optimizer=OptimizerConfig(lr=1e-3),
        data=changed(data),
    )


def layout(rank: int = 0, size: int = 1, cp_rank: int = 0, cp_size: int = 1) -> SimpleNamespace:
    """What the loader reads of a parallel layout."""
    return SimpleNamespace(dp_rank=rank, dp_size=size, cp_rank=cp_rank, cp_size=cp_size)


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers above, for test modules."""
    return SimpleNamespace(
        documents=documents, options=options, run_config=run_config, layout=layout
    )


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Prefixes of two prepared byte-level datasets of different size; do not change them."""
    root = tmp_path_factory.mktemp("corpora")
    prefixes = []
    for number, count in enumerate((300, 120)):
        text = root / f"text{number}.txt"
        text.write_text("\n\n".join(documents(count, seed=number)), encoding="utf-8")
        prefix = root / f"corpus{number}"
        prepare(options(prefix, text, document_separator="\n\n"))
        prefixes.append(prefix)
    return prefixes


@pytest.fixture
def texts(kit: SimpleNamespace) -> list[str]:
    return kit.documents(200, seed=5)
