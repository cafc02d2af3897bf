"""Corrupt prepared datasets in random ways; every one must be refused before training, in words.

    python benchmarks/fuzz_data.py --cases 300 --seed 0

Each case copies a good dataset, corrupts one thing (a bit, a page, the length, the whole file, the
dtype byte, the configured tokenizer) and asks ``verify_datasets`` with full hashing. It must raise
``DataError`` that names the damaged file (or the dataset, for a foreign tokenizer); the intact
copy must pass. Beside it, what Megatron-Core's own reader does with the same files, in a process of
its own: refuse, crash, or serve tokens that differ from those prepared without saying so. Writes
docs/results/data_corruption.json.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from machine import write_result

from megatron_patch.data.errors import DataError
from megatron_patch.data.prepare import PrepareOptions, prepare
from megatron_patch.data.verify import verify_datasets
from megatron_patch.schema.data import DataConfig, DatasetConfig, TokenizerConfig
from megatron_patch.schema.model import ModelConfig
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.training import OptimizerConfig, TrainingConfig

PAGE = 4096
ENDINGS = (".bin", ".idx", ".manifest.json")
BYTES, FOREIGN = TokenizerConfig(), TokenizerConfig(kind="none", vocab_size=300, eod_id=256)


@dataclass(frozen=True, slots=True)
class Corpora:
    """Prefixes: the dataset under test, an older version of it, and another of equal size."""

    good: Path
    stale: Path
    other: Path


@dataclass(frozen=True, slots=True)
class Case:
    """One corrupted copy."""

    kind: str
    target: str
    """What the error must name: a file ending, or "" for the dataset."""
    tokenizer: TokenizerConfig


def make_corpora(root: Path, kilobytes: int = 300) -> Corpora:
    """Three byte-level datasets: same number and lengths of documents, other words."""
    rng = random.Random(0)
    words = ["alpha", "bravo", "delta", "hotel", "india", "tango"]
    texts = {"good": [], "stale": [], "other": []}  # type: dict[str, list[str]]
    size = 0
    while size < kilobytes * 1000:
        count = rng.randint(5, 400)
        texts["good"].append(" ".join(rng.choices(words, k=count)))
        texts["other"].append(" ".join(rng.choices(words, k=count)))
        size += len(texts["good"][-1])
    texts["stale"] = texts["good"][:-3] + [text.upper() for text in texts["good"][-3:]]
    prefixes = {}
    for name, documents in texts.items():
        source = root / f"{name}.txt"
        source.write_text("\n\n".join(documents))
        prefixes[name] = root / name
        prepare(
            PrepareOptions(
                inputs=[str(source)],
                out=str(prefixes[name]),
                document_separator="\n\n",
                workers=1,
                quiet=True,
            )
        )
    return Corpora(**prefixes)


def flip_bit(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def zero_page(path: Path, rng: random.Random) -> None:
    """A hole, as a lost write leaves it."""
    data = bytearray(path.read_bytes())
    start = rng.randrange(0, len(data), PAGE)
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    path.write_bytes(data)


def swap_pages(path: Path, rng: random.Random) -> None:
    """Two pages in each other's place: same bytes, same sum, same size."""
    data = bytearray(path.read_bytes())
    if len(data) < 2 * PAGE:
        flip_bit(path, rng)
        return
    a, b = (PAGE * page for page in rng.sample(range(len(data) // PAGE), 2))
    data[a : a + PAGE], data[b : b + PAGE] = data[b : b + PAGE], data[a : a + PAGE]
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice([0, rng.randrange(path.stat().st_size), path.stat().st_size - 1]))


def extend(path: Path, rng: random.Random) -> None:
    with path.open("ab") as stream:
        stream.write(rng.choice([b"\0", b"\n", rng.randbytes(rng.randint(1, 9999))]))


def missing(path: Path, rng: random.Random) -> None:
    path.unlink()


def wrong_dtype(path: Path, rng: random.Random) -> None:
    """Another valid dtype code in the index: same size, every token read wrongly."""
    data = bytearray(path.read_bytes())
    data[17] = rng.choice([code for code in range(1, 9) if code != data[17]])
    path.write_bytes(data)


EDITS: dict[str, Callable[[Path, random.Random], None]] = {
    "bit": flip_bit,
    "zeroed page": zero_page,
    "exchanged pages": swap_pages,
    "truncation": truncate,
    "extension": extend,
    "missing": missing,
}
KINDS = (*EDITS, "dtype byte", "other corpus", "stale", "foreign tokenizer")


def corrupt(corpora: Corpora, copy: Path, rng: random.Random, kind: str) -> Case:
    """Corrupt the files at ``copy`` in the given way; what must be refused, and for which file."""
    if kind == "foreign tokenizer":
        return Case(kind, "", FOREIGN)
    ending = ".idx" if kind == "dtype byte" else rng.choice(ENDINGS)
    path = Path(f"{copy}{ending}")
    before = path.read_bytes()
    while path.exists() and path.read_bytes() == before:
        if kind in ("other corpus", "stale"):
            source = corpora.other if kind == "other corpus" else corpora.stale
            # Equal documents lengths make equal indices: then another file is exchanged.
            ending = rng.choice(ENDINGS)
            path = Path(f"{copy}{ending}")
            before = path.read_bytes()
            shutil.copyfile(f"{source}{ending}", path)
        else:
            (wrong_dtype if kind == "dtype byte" else EDITS[kind])(path, rng)
    # With a foreign manifest it is the data files that differ from what it says.
    return Case(kind, ending if ending != ".manifest.json" or kind in EDITS else "", BYTES)


def run_over(prefix: Path, tokenizer: TokenizerConfig) -> RunConfig:
    """A run that trains on the dataset."""
    return RunConfig(
        name="fuzz",
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=16),
        training=TrainingConfig(
            train_steps=1, global_batch_size=1, micro_batch_size=1, device="cpu"
        ),
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(blend=[DatasetConfig(path=str(prefix))], tokenizer=tokenizer),
    )


def ours(copy: Path, case: Case) -> str:
    """``refused``, or what went wrong."""
    try:
        verify_datasets(run_over(copy, case.tokenizer), show=False)
    except DataError as error:
        named = all(str(copy) in problem for problem in error.problems)
        right = any(f"{copy}{case.target}" in problem for problem in error.problems)
        return "refused" if named and right else f"refused without its name: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def megatron(copy: Path, good: Path) -> str:
    """What Megatron-Core's reader does with the files, in a child process."""
    from megatron.core.datasets import indexed_dataset  # noqa: F401 (once, not in every child)

    child = os.fork()
    if child == 0:
        os._exit(_read_with_megatron(copy, good))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "crash"
    return {0: "same tokens", 1: "wrong tokens, silently", 2: "exception"}[
        os.waitstatus_to_exitcode(status)
    ]


def _read_with_megatron(copy: Path, good: Path) -> int:
    import logging

    from megatron.core.datasets.indexed_dataset import IndexedDataset

    logging.disable()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (a child that ends here)
    right = IndexedDataset(str(good))
    try:
        found = IndexedDataset(str(copy))
        same = len(found) == len(right) and all(
            len(found[i]) == len(right[i]) and (found[i] == right[i]).all()
            for i in range(len(right))
        )
        return 0 if same else 1
    except Exception:
        return 2


def fuzz(cases: int, seed: int, root: Path, *, with_megatron: bool = False) -> dict:
    """Run the cases and count outcomes; ``failures`` is empty when all were refused."""
    corpora = make_corpora(root)
    copy = root / "case" / "data"
    copy.parent.mkdir()
    refused: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    theirs: dict[str, Counter[str]] = {}
    failures = []
    for number in range(cases):
        rng = random.Random(f"{seed}:{number}")
        for ending in ENDINGS:
            shutil.copyfile(f"{corpora.good}{ending}", f"{copy}{ending}")
        if number % 50 == 0:
            verify_datasets(run_over(copy, BYTES), show=False)  # the intact copy passes
        case = corrupt(corpora, copy, rng, KINDS[number % len(KINDS)])
        tried[case.kind] += 1
        outcome = ours(copy, case)
        if outcome == "refused":
            refused[case.kind] += 1
        else:
            failures.append(f"case {number} ({case.kind} {case.target}): {outcome}")
        if with_megatron and case.tokenizer == BYTES:  # its reader knows of no tokenizer
            theirs.setdefault(case.kind, Counter())[megatron(copy, corpora.good)] += 1
    return {
        "cases": cases,
        "seed": seed,
        "refused": sum(refused.values()),
        "by_kind": {kind: {"tried": tried[kind], "refused": refused[kind]} for kind in tried},
        "megatron_core_reader": {kind: dict(count) for kind, count in theirs.items()},
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300, help="corruptions to try [300]")
    parser.add_argument("--seed", type=int, default=0, help="seed of all cases [0]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = fuzz(args.cases, args.seed, Path(folder), with_megatron=True)
    path = write_result("data_corruption", figures)
    print(f"{figures['refused']} of {figures['cases']} refused; {path}")
    for failure in figures["failures"]:
        print(failure)
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
