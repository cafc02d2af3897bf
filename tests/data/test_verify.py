"""Verification: corruption, what sampling misses, tokenizers, ranks, errors at once."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prepared import ENDINGS, check_dataset, make, run_config

from megatron_patch.data import manifest, verify
from megatron_patch.data.errors import DataError
from megatron_patch.data.indexed import TokenFile
from megatron_patch.data.manifest import SAMPLE_PAGE_BYTES, read_manifest, render
from megatron_patch.data.verify import verify_datasets
from megatron_patch.runtime.heartbeat import PULSE
from megatron_patch.schema.data import TokenizerConfig


@pytest.fixture
def copy(tmp_path: Path, corpora: list[Path]) -> Path:
    """A dataset that may be damaged."""
    for ending in ENDINGS:
        (tmp_path / f"copy{ending}").write_bytes(Path(f"{corpora[0]}{ending}").read_bytes())
    return tmp_path / "copy"


def test_good_data_passes_and_is_described(corpora):
    lines = verify_datasets(run_config(*corpora))
    assert len(lines) == 2 and "every byte of" in lines[0] and "300 documents" in lines[0]
    (sampled, _) = verify_datasets(run_config(*corpora, verify="sampled"))
    assert "not every byte" in sampled


def test_every_byte_of_the_manifest_counts(copy):
    path = Path(f"{copy}.manifest.json")
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert check_dataset(copy), f"byte {at} ({content[at : at + 1]!r}) may change"
    for same_meaning in (content + b"\n", content.replace(b"\n ", b"\n  ", 1), content[:-1]):
        path.write_bytes(same_meaning)
        assert "changed since it was written" in check_dataset(copy)[0]
    path.write_bytes(content)
    assert check_dataset(copy) == []
    assert render(read_manifest(copy)) == content


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", "many"), ("tokens", True), ("dtype", None), ("dtype", "float32"), ("bin", {}),
     ("sources", [1]), ("bin.chunks", []), ("bin.chunk_bytes", 0), ("max_token_id", 9999)],
)  # fmt: skip
def test_a_forged_manifest_is_an_error_not_a_traceback(copy, field, value):
    """Its own hash recomputed: only the checks of its content are left."""
    path = Path(f"{copy}.manifest.json")
    tree = json.loads(path.read_bytes())
    node, _, leaf = field.rpartition(".")
    (tree[node] if node else tree)[leaf] = value
    tree.pop("sha256")
    digest = hashlib.sha256(manifest._dump(tree)).hexdigest()
    path.write_bytes(manifest._dump(tree | {"sha256": digest}))
    assert check_dataset(copy)


def test_all_problems_of_all_datasets_are_reported_at_once(copy, corpora, tmp_path):
    os.truncate(f"{copy}.bin", 10)
    Path(f"{copy}.idx").unlink()
    run = run_config(
        copy, corpora[1], tmp_path / "absent", tokenizer=TokenizerConfig(kind="none", vocab_size=99)
    )
    with pytest.raises(DataError) as caught:
        verify_datasets(run)
    text = str(caught.value)
    for expected in (
        f"{copy}.bin: 10 bytes, its manifest says",
        f"{copy}.idx: missing",
        f"{corpora[1]}: prepared with another tokenizer (bytes, 257 ids",
        f"{corpora[1]}: holds token id 256, but data.tokenizer has only 99 ids (0 to 98)",
        f"{tmp_path / 'absent'}.manifest.json: there is no manifest",
    ):
        assert expected in text
    assert len(caught.value.problems) >= 6
    missing = TokenizerConfig(kind="huggingface", path=str(tmp_path / "none.json"))
    with pytest.raises(DataError, match=r"2 problems[\s\S]*no tokenizer\.json file") as caught:
        verify_datasets(run_config(tmp_path / "absent", tokenizer=missing))


def big_dataset(root: Path) -> Path:
    """20 MiB of tokens: larger than what sampling reads."""
    import numpy as np

    raw = root / "raw"
    ids = np.random.default_rng(0).integers(0, 1000, size=10 << 20).astype(np.uint16)
    ids[::999] = 0
    ids.tofile(raw)
    make(root / "big", raw, format="uint16", tokenizer="none", vocab_size=1000, eod_id=0)
    return root / "big"


def test_what_sampling_finds_and_what_it_misses(tmp_path):
    prefix = big_dataset(tmp_path)
    path = Path(f"{prefix}.bin")
    content = path.read_bytes()
    assert len(read_manifest(prefix).bin.chunks) == 20
    between = SAMPLE_PAGE_BYTES + 1000  # the second sampled page starts at 82,000 or so
    for at, seen in ((5, True), (len(content) - 1, True), (between, False)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert bool(check_dataset(prefix, mode="sampled")) == seen
        (problem,) = check_dataset(prefix, mode="full")
        piece = at >> 20
        place = f"{path}: the bytes {piece << 20:,} to {(piece + 1) << 20:,} are not what"
        assert place in problem and "prepare the dataset again, or copy" in problem
    path.write_bytes(content[:-2])
    assert check_dataset(prefix, mode="sampled")
    path.write_bytes(content)
    assert check_dataset(prefix, mode="sampled") == []


def test_a_changed_index_is_found_also_when_the_data_is_sampled(copy):
    index = bytearray(Path(f"{copy}.idx").read_bytes())
    index[34] ^= 1
    Path(f"{copy}.idx").write_bytes(index)
    problems = check_dataset(copy, mode="sampled")
    assert any("pointer of sequence 1 does not follow" in problem for problem in problems)


def fails(number: int) -> Callable[..., bytes]:
    def refuse(*args: object, **options: object) -> bytes:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 1), (errno.ESTALE, 1), (errno.EACCES, 2)])
def test_data_that_may_be_read_later_is_worth_a_retry(copy, monkeypatch, number, code):
    """Exit code 2 ends a run for good: one node's stale mount must not."""
    tokens = TokenFile(copy)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fails(number))
        with pytest.raises(DataError, match="cannot be read") as caught:
            tokens.read(0, 4)
    assert caught.value.exit_code == code
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails(number))
        problems = check_dataset(copy)
    assert problems and DataError(problems).exit_code == code
    assert DataError([*problems, "and something else"]).exit_code == 2
    again = pickle.loads(pickle.dumps(problems))  # as it travels to the other ranks
    assert DataError(again).exit_code == code


def test_a_long_check_that_goes_on_is_no_hang(corpora, monkeypatch):
    PULSE.reset()
    first = PULSE.now
    monkeypatch.setattr(verify, "_ROUND_SECONDS", 0.0)
    verify_datasets(run_config(*corpora))
    assert PULSE.now is not first and PULSE.now.phase == "start"


def test_ranks_of_a_node_share_the_hashing(tmp_path, monkeypatch):
    prefix = big_dataset(tmp_path)
    tokenizer = TokenizerConfig(kind="none", vocab_size=1000, eod_id=0)
    run = run_config(prefix, tokenizer=tokenizer)
    hashed: list[verify._Piece] = []
    original = verify._Piece.check
    monkeypatch.setattr(verify._Piece, "check", lambda self: hashed.append(self) or original(self))
    shares = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank in range(4):
        hashed.clear()
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        verify_datasets(run)
        shares.append({(piece.path.suffix, piece.offset) for piece in hashed})
    assert len(set.union(*shares)) == sum(map(len, shares)) == 21
    assert max(map(len, shares)) <= 6


RANK = """
import sys
from pathlib import Path
import torch.distributed as dist
here, store, rank, *paths = sys.argv[1:]
sys.path.insert(0, here)
from prepared import run_config
from megatron_patch.data import verify
from megatron_patch.data.errors import DataError
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
verify._ROUND_SECONDS = 0.0
try:
    verify.verify_datasets(run_config(*paths), show=False)
    print("good", flush=True)
except DataError as error:
    print("refused:", len(error.problems), error, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.multiprocess
def test_all_ranks_learn_what_one_of_them_finds(copy, corpora, tmp_path):
    def outcomes(store: str) -> list[str]:
        here = Path(__file__).parent
        arguments = [sys.executable, "-c", RANK, here, tmp_path / store]
        processes = [
            subprocess.Popen(
                [*arguments, str(rank), copy, corpora[1]],
                env=os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            return [process.communicate(timeout=300)[0].strip() for process in processes]
        finally:
            for process in processes:
                process.kill()

    assert outcomes("first") == ["good", "good"]
    content = bytearray(Path(f"{copy}.bin").read_bytes())
    content[-1] ^= 1
    Path(f"{copy}.bin").write_bytes(content)
    found = outcomes("second")
    assert found[0] == found[1] and found[0].startswith(f"refused: 1 {copy}.bin: the bytes")
