"""Documents, options and configurations of the data tests, and what prepare-data made of them."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np

from megatron_patch.data.manifest import Manifest
from megatron_patch.data.prepare import PrepareOptions, prepare
from megatron_patch.data.verify import check_quickly
from megatron_patch.schema.data import DataConfig, DatasetConfig
from megatron_patch.schema.model import ModelConfig
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.training import OptimizerConfig, TrainingConfig

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


def make(out: Path, *inputs: Path, **changes: object) -> Manifest:
    """Prepare a dataset with `options`."""
    return prepare(options(out, *inputs, **changes))


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


ENDINGS = (".bin", ".idx", ".manifest.json")


def content(prefix: Path) -> dict[str, bytes]:
    return {ending: Path(f"{prefix}{ending}").read_bytes() for ending in ENDINGS}


def tokens_of(prefix: Path) -> list[bytes]:
    """Documents of a byte-level dataset, without their end."""
    stream = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    ends = np.flatnonzero(stream == 256)
    starts = np.concatenate([[0], ends[:-1] + 1])
    return [bytes(stream[a:b].astype(np.uint8)) for a, b in zip(starts, ends, strict=True)]


def lines(texts: list[str]) -> bytes:
    records = [json.dumps({"text": text, "id": i}) for i, text in enumerate(texts)]
    return "\n".join(records).encode() + b"\n"


def check_dataset(prefix: Path, *, mode: Literal["full", "sampled"] = "full") -> list[str]:
    """All problems of one dataset, hashes included."""
    findings = check_quickly(prefix, None, mode=mode)
    if not findings.problems:
        findings.problems += [p for piece in findings.pieces if (p := piece.check())]
    return findings.problems


def texts_of(prefix: Path) -> list[str]:
    return [document.decode() for document in tokens_of(prefix)]
