"""Damaged datasets are refused before training, by the name of the file (here with full hashing).

The damage: a bit, a page, the length, the whole file, the dtype byte, the configured tokenizer.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from bounded import examples, fuzz, randoms
from byte_corpus import byte_corpus
from damage import extend, flip_bit, missing, swap_pages, truncate, zero_page

from megatron_patch.data.errors import DataError
from megatron_patch.data.verify import verify_datasets
from megatron_patch.schema.data import DataConfig, DatasetConfig, TokenizerConfig
from megatron_patch.schema.model import ModelConfig
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.training import OptimizerConfig, TrainingConfig

DATA, INDEX, MANIFEST = ENDINGS = (".bin", ".idx", ".manifest.json")
BYTES, FOREIGN = TokenizerConfig(), TokenizerConfig(kind="none", vocab_size=300, eod_id=256)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with byte-level datasets: good, an older version of it (stale), and one (other) with
    the same number and lengths of documents, of other words."""
    root = tmp_path_factory.mktemp("corpora")
    rng = random.Random(0)
    words = ["alpha", "bravo", "delta", "hotel", "india", "tango"]
    texts: dict[str, list[str]] = {"good": [], "other": []}
    while sum(map(len, texts["good"])) < 300_000:
        count = rng.randint(5, 400)
        for name in texts:
            texts[name].append(" ".join(rng.choices(words, k=count)))
    texts["stale"] = texts["good"][:-3] + [text.upper() for text in texts["good"][-3:]]
    for name, documents in texts.items():
        byte_corpus(root / name, documents)
    return root


def verify(prefix: Path, tokenizer: TokenizerConfig = BYTES) -> None:
    """What the trainer does before its first step."""
    run = RunConfig(
        name="fuzz",
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=16),
        training=TrainingConfig(
            train_steps=1, global_batch_size=1, micro_batch_size=1, device="cpu"
        ),
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(blend=[DatasetConfig(path=str(prefix))], tokenizer=tokenizer),
    )
    verify_datasets(run, show=False)


def dtype_byte(path: Path, rng: random.Random) -> None:
    """Another valid dtype code in the index: same size, every token read wrongly."""
    data = bytearray(path.read_bytes())
    data[17] = rng.choice([code for code in range(1, 9) if code != data[17]])
    path.write_bytes(data)


def exchanged(name: str) -> Callable[[Path, random.Random], None]:
    """The same file of another dataset."""

    def change(path: Path, rng: random.Random) -> None:
        (ending,) = (e for e in ENDINGS if path.name.endswith(e))
        shutil.copyfile(path.parent.parent / f"{name}{ending}", path)

    return change


EDITS = {
    "bit": (flip_bit, ENDINGS),
    "zeroed page": (zero_page, ENDINGS),
    "exchanged pages": (swap_pages, ENDINGS),
    "truncation": (truncate, ENDINGS),
    "extension": (extend, ENDINGS),
    "missing": (missing, ENDINGS),
    "dtype byte": (dtype_byte, (INDEX,)),
    # The index of the other corpus is the same: documents are as long.
    "other corpus": (exchanged("other"), (DATA, MANIFEST)),
    "stale": (exchanged("stale"), (DATA, MANIFEST)),
}


def copy_of(corpora: Path) -> Path:
    """Prefix of a fresh copy of the good dataset."""
    prefix = corpora / "copy" / "data"
    prefix.parent.mkdir(exist_ok=True)
    for ending in ENDINGS:
        shutil.copyfile(f"{corpora / 'good'}{ending}", f"{prefix}{ending}")
    return prefix


@examples(4, 30)
@pytest.mark.parametrize("kind", EDITS)
def test_damage_is_refused_by_name(corpora, kind, count):
    edit, endings = EDITS[kind]

    def check(rng: random.Random) -> None:
        prefix = copy_of(corpora)
        ending = rng.choice(endings)
        path = Path(f"{prefix}{ending}")
        before = path.read_bytes()
        edit(path, rng)
        if path.exists() and path.read_bytes() == before:
            return  # a page that was zero
        # With a foreign manifest it is the data files that differ from what it says.
        foreign = ending == MANIFEST and kind in ("other corpus", "stale")
        with pytest.raises(DataError) as caught:
            verify(prefix)
        problems = caught.value.problems
        assert all(str(prefix) in problem for problem in problems), problems
        assert any((str(prefix) if foreign else str(path)) in p for p in problems), problems

    fuzz(check, count, rng=randoms)


def test_the_intact_copy_passes_and_a_foreign_tokenizer_does_not(corpora):
    prefix = copy_of(corpora)
    verify(prefix)
    with pytest.raises(DataError, match=str(prefix)):
        verify(prefix, FOREIGN)
