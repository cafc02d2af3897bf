"""What ``verify: sampled`` reads, and what it can miss. No torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_patch.checkpoint import manifest as manifests
from megatron_patch.checkpoint.errors import BadCheckpoint
from megatron_patch.checkpoint.store import CheckpointStore

PAGE = 4096


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "PAGE_BYTES", PAGE)


@pytest.mark.usefixtures("small_pages")
class TestSampling:
    """What ``verify: sampled`` reads: small files whole, large ones in pages."""

    @staticmethod
    def big(tmp_path: Path, pages: int) -> tuple[CheckpointStore, Path]:
        store = CheckpointStore(tmp_path, verify="sampled")
        attempt = store.begin(1)
        with (attempt.path / "big").open("wb") as file:
            file.truncate(pages * PAGE)
        path = store.commit(attempt, store.hash_files(attempt, ["big"]), {})
        return store, path

    def damage(self, path: Path, page: int) -> None:
        with (path / "big").open("r+b") as file:
            file.seek(page * PAGE + 77)
            file.write(b"!")

    def test_it_finds_damage_in_its_pages_and_misses_the_rest(self, tmp_path):
        store, path = self.big(tmp_path, 80)
        digest = store.check(path).manifest.files["big"]
        sampled = manifests.sample_pages("big", digest)
        assert len(sampled) == manifests.SAMPLED_PAGES and {0, 79} <= set(sampled)
        missed = next(page for page in range(80) if page not in sampled)
        self.damage(path, missed)
        assert store.check(path)
        with pytest.raises(BadCheckpoint, match=rf"bytes {missed * PAGE}\.\. of"):
            CheckpointStore(tmp_path).check(path)
        self.damage(path, sampled[30])
        with pytest.raises(BadCheckpoint, match=rf"bytes {sampled[30] * PAGE}\.\. of"):
            store.check(path)

    def test_sizes_are_always_checked(self, tmp_path):
        store, path = self.big(tmp_path, 80)
        os.truncate(path / "big", 80 * PAGE - 1)
        with pytest.raises(BadCheckpoint, match="expected 327680"):
            store.check(path)

    def test_small_files_are_read_whole(self, tmp_path):
        store, path = self.big(tmp_path, 3)
        self.damage(path, 1)
        with pytest.raises(BadCheckpoint, match="does not match"):
            store.check(path)
