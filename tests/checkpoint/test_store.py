"""The store by itself: protocol, pointer, signatures, retention, ranks. No torch."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.checkpoint import manifest as manifests
from megatron_patch.checkpoint.errors import BadCheckpoint, CheckpointError, SaveError, describe
from megatron_patch.checkpoint.manifest import MANIFEST, SEAL, read_key, seal
from megatron_patch.checkpoint.store import CheckpointStore
from megatron_patch.schema.checkpoint import CheckpointConfig

KEY = b"0123456789abcdef"


def save(store: CheckpointStore, step: int, content: bytes = b"shard") -> Path:
    attempt = store.begin(step)
    name = f"__{store.ranks.rank}_0.distcp"
    (attempt.path / name).write_bytes(content + str((step, store.ranks.rank)).encode())
    return store.commit(attempt, store.hash_files(attempt, [name]), {"layout": "any"})


def complete(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name.startswith("step_"))


def aside(root: Path) -> list[str]:
    return sorted(p.name for p in (root / "aside").iterdir()) if (root / "aside").exists() else []


class Threads:
    """Ranks of one process, for the store's collectives."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def all_gather(self, value: Any) -> list[Any]:
        self._shared["values"][self.rank] = value
        self.barrier()
        values = list(self._shared["values"])
        self.barrier()
        return values

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]

    def barrier(self) -> None:
        self._shared["barrier"].wait(20)


def on_ranks(size: int, work: Callable[[Threads], Any]) -> list[Any]:
    """``work`` on every rank; results, or the exceptions raised."""
    shared = {"values": [None] * size, "barrier": threading.Barrier(size)}
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, size, shared))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_nothing_there(tmp_path):
    assert CheckpointStore(tmp_path / "none").find() is None
    assert not (tmp_path / "none").exists()


def test_save_and_find(tmp_path):
    store = CheckpointStore(tmp_path)
    path = save(store, 7)
    assert path.name == "step_00000007.attempt-1"
    found = CheckpointStore(tmp_path).find()
    assert found is not None and found.path == path
    assert (found.manifest.step, found.manifest.attempt, found.manifest.world_size) == (7, 1, 1)
    assert found.manifest.info == {"layout": "any"}
    assert (tmp_path / "latest").read_text() == "step_00000007.attempt-1\n"
    body = json.loads((path / MANIFEST).read_bytes())
    assert list(body["files"]) == ["__0_0.distcp"]


def test_a_complete_checkpoint_is_never_overwritten(tmp_path):
    store = CheckpointStore(tmp_path)
    first = save(store, 5)
    before = {p.name: p.read_bytes() for p in first.iterdir()}
    second = save(store, 5, b"other")
    assert second.name == "step_00000005.attempt-2"
    assert {p.name: p.read_bytes() for p in first.iterdir()} == before
    assert store.find().path == second


def test_a_directory_that_appears_in_between_is_not_replaced(tmp_path):
    """The name is taken while the ranks write: the commit refuses instead of replacing."""
    store = CheckpointStore(tmp_path)
    attempt = store.begin(5)
    (attempt.path / "__0_0.distcp").write_bytes(b"x")
    digests = store.hash_files(attempt, ["__0_0.distcp"])
    (tmp_path / attempt.name).mkdir()
    with pytest.raises(SaveError, match="never overwritten"):
        store.commit(attempt, digests, {})
    assert list((tmp_path / attempt.name).iterdir()) == []


def test_an_attempt_that_never_was_complete_gives_its_space_back(tmp_path, caplog):
    """A killed process left half a save: its log is kept, and its number is not used again."""
    attempt = CheckpointStore(tmp_path).begin(3)
    (attempt.path / "__0_0.distcp").write_bytes(b"half")
    assert CheckpointStore(tmp_path).find() is None
    path = save(CheckpointStore(tmp_path), 3)
    assert path.name == "step_00000003.attempt-2"
    (left,) = aside(tmp_path)
    assert left.startswith("step_00000003.attempt-1.tmp.abandoned.")
    assert os.listdir(tmp_path / "aside" / left) == ["reason.txt"]
    text = (tmp_path / "aside" / left / "reason.txt").read_text()
    assert text.startswith("its process ended in the middle of the save\n") and "4 __0_" in text
    (told,) = caplog.messages
    assert told == (
        "step_00000003.attempt-1.tmp was not complete: deleted its files; the reason and their "
        f"names are in {tmp_path / 'aside' / left / 'reason.txt'}"
    )


def test_a_full_disk_is_named_where_it_is_behind_another_error():
    """As torch's archive writer has it: it cannot finish what it could not write."""
    try:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704")
    except RuntimeError as error:
        text = describe(error)
    assert text.startswith("OSError: [Errno 28] No space left on device (the disk or quota is full")
    assert describe(RuntimeError("else")) == "RuntimeError: else"


@pytest.mark.parametrize("torn", [None, MANIFEST, SEAL])
def test_an_attempt_that_lacks_only_its_name_is_put_aside_whole(tmp_path, torn):
    """Killed between the seal and the rename; with half a seal it is half a save again."""
    store = CheckpointStore(tmp_path)
    path = save(store, 1)
    before = sorted(p.name for p in path.iterdir())
    if torn is not None:
        (path / torn).write_bytes((path / torn).read_bytes()[:-5])
    os.rename(path, path.with_name(path.name + ".tmp"))
    save(store, 2)
    (left,) = aside(tmp_path)
    found = sorted(p.name for p in (tmp_path / "aside" / left).iterdir())
    assert found == (before if torn is None else ["reason.txt"])


@pytest.mark.parametrize("more", [b"\n", b"\0", b"hmac-sha256 \n"])
def test_a_seal_with_anything_behind_it_is_refused(tmp_path, more):
    store = CheckpointStore(tmp_path)
    path = save(store, 1)
    (path / SEAL).write_bytes((path / SEAL).read_bytes() + more)
    with pytest.raises(BadCheckpoint, match=r"manifest\.seal"):
        store.check(path)


def test_bad_ones_are_named_moved_aside_and_passed_over(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    (tmp_path / "step_00000003.attempt-1" / "__0_0.distcp").unlink()
    shard = tmp_path / "step_00000002.attempt-1" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes().swapcase())
    assert store.find().manifest.step == 1
    assert "step_00000003.attempt-1 refused: missing: '__0_0.distcp'" in caplog.text
    assert "step_00000002.attempt-1 refused: __0_0.distcp does not match" in caplog.text
    assert "continuing from the older checkpoint step_00000001.attempt-1" in caplog.text
    assert [name.split(".2")[0] for name in aside(tmp_path)] == [
        "step_00000002.attempt-1.hash",
        "step_00000003.attempt-1.missing",
    ]


def test_where_none_is_good_nothing_moves_and_the_next_try_ends_alike(tmp_path):
    """Put aside, they would be forgotten: the same command would start at step 0."""
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        (save(store, step) / "__0_0.distcp").write_bytes(b"other bytes")
    (tmp_path / "step_00000002.attempt-1" / MANIFEST).unlink()
    for own in (True, True, False):
        with pytest.raises(CheckpointError, match="no good checkpoint") as error:
            store.find(own=own)
        assert "manifest.json is missing" in str(error.value) and error.value.exit_code == 4
    assert complete(tmp_path) == ["step_00000001.attempt-1", "step_00000002.attempt-1"]
    assert aside(tmp_path) == []


def test_the_reader_can_still_refuse(tmp_path):
    """What hashes well may hold something that is not data: then the next one is taken."""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    seen = []

    def accept(found: Any) -> None:
        seen.append(found.manifest.step)
        if found.manifest.step == 2:
            raise BadCheckpoint("hostile", "it names posix.system")

    assert store.find(accept=accept).manifest.step == 1
    assert seen == [2, 1]
    assert aside(tmp_path)[0].startswith("step_00000002.attempt-1.hostile.")


class TestSignatures:
    def test_signed_and_found(self, tmp_path):
        save(CheckpointStore(tmp_path, hmac_key=KEY), 1)
        assert CheckpointStore(tmp_path, hmac_key=KEY).find().manifest.step == 1
        assert CheckpointStore(tmp_path).find().manifest.step == 1  # no key: hashes only

    @pytest.mark.parametrize(
        ("key", "reason"), [(None, "not signed"), (KEY[::-1], "another key, or was forged")]
    )
    def test_what_this_key_did_not_sign_is_refused_and_left_in_place(self, tmp_path, key, reason):
        path = save(CheckpointStore(tmp_path, hmac_key=key), 1)
        with pytest.raises(CheckpointError, match=reason):
            CheckpointStore(tmp_path, hmac_key=KEY).find()
        assert path.exists()

    def test_a_writer_without_the_key_cannot_forge(self, tmp_path):
        """Shard and manifest rewritten consistently, the seal's plain hash too."""
        store = CheckpointStore(tmp_path, hmac_key=KEY)
        path = save(store, 1)
        old_seal = (path / SEAL).read_bytes()
        (path / "__0_0.distcp").write_bytes(b"evil")
        attempt = CheckpointStore(tmp_path / "x").begin(1)
        (attempt.path / "__0_0.distcp").write_bytes(b"evil")
        digest = store.hash_files(attempt, ["__0_0.distcp"])["__0_0.distcp"]
        body = json.loads((path / MANIFEST).read_bytes())
        body["files"]["__0_0.distcp"] = {
            "size": digest.size,
            "sha256": digest.sha256,
            "pages": digest.pages,
        }
        raw = json.dumps(body).encode()
        (path / MANIFEST).write_bytes(raw)
        for forged in (seal(raw, None), seal(raw, None) + old_seal.split(b"\n")[1] + b"\n"):
            (path / SEAL).write_bytes(forged)
            with pytest.raises(CheckpointError):
                store.find(own=False)
            assert CheckpointStore(tmp_path).check(path).manifest.step == 1  # only the key helps

    def test_the_seal_is_checked_before_the_json_is_parsed(self, tmp_path, monkeypatch):
        path = save(CheckpointStore(tmp_path, hmac_key=KEY), 1)
        (path / MANIFEST).write_bytes(b"[" * 100_000)
        monkeypatch.setattr(manifests.json, "loads", lambda *a: pytest.fail("parsed"))
        with pytest.raises(BadCheckpoint, match="does not match its seal"):
            CheckpointStore(tmp_path, hmac_key=KEY).check(path)

    @pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o700])
    def test_a_key_others_can_read_is_refused(self, tmp_path, mode):
        key = tmp_path / "key"
        key.write_bytes(KEY)
        key.chmod(mode)
        with pytest.raises(ValueError, match="chmod 600"):
            read_key(key)

    def test_key_files(self, tmp_path):
        key = tmp_path / "key"
        with pytest.raises(ValueError, match="cannot read the key file"):
            read_key(key)
        key.write_bytes(b"short\n")
        key.chmod(0o600)
        with pytest.raises(ValueError, match="at least 16"):
            read_key(key)
        key.write_bytes(KEY + b"\n")
        assert read_key(key) == KEY


class TestManifestInput:
    """Manifests of someone who can reseal them: refused before a file is touched."""

    @staticmethod
    def refuse(tmp_path: Path, edit: Callable[[dict[str, Any]], Any]) -> str:
        store = CheckpointStore(tmp_path)
        path = save(store, 1)
        body = json.loads((path / MANIFEST).read_bytes())
        raw = edit(body)
        raw = raw if isinstance(raw, bytes) else json.dumps(body).encode()
        (path / MANIFEST).write_bytes(raw)
        (path / SEAL).write_bytes(seal(raw, None))
        with pytest.raises(BadCheckpoint) as bad:
            store.check(path)
        return bad.value.reason

    @pytest.mark.parametrize(
        "name", ["../outside", "/etc/passwd", "a/b", "..", ".", "", "-x", "a\0b", "manifest.json"]
    )
    def test_names_that_leave_the_directory(self, tmp_path, name):
        def edit(body: dict[str, Any]) -> None:
            body["files"][name] = body["files"]["__0_0.distcp"]

        assert "names a file" in self.refuse(tmp_path, edit)

    @pytest.mark.parametrize("size", [1 << 61, -1, 1.5, True, "9", None, 10**30])
    def test_sizes_that_are_none(self, tmp_path, size):
        def edit(body: dict[str, Any]) -> None:
            body["files"]["__0_0.distcp"]["size"] = size

        assert "malformed" in self.refuse(tmp_path, edit)

    @pytest.mark.parametrize(
        "raw", [b"", b"null", b"[]", b"{}", b"[" * 200_000, b'{"format": 1}', b"\xff\xfe"]
    )
    def test_things_that_are_no_manifest(self, tmp_path, raw):
        assert "malformed" in self.refuse(tmp_path, lambda body: raw)

    def test_another_step(self, tmp_path):
        why = self.refuse(tmp_path, lambda body: body.update(step=2))
        assert why == "step_00000001.attempt-1 holds step 2 attempt 1"


def test_links_are_refused(tmp_path):
    store = CheckpointStore(tmp_path / "root")
    path = save(store, 1)
    shard = path / "__0_0.distcp"
    os.rename(shard, tmp_path / "outside")
    shard.symlink_to(tmp_path / "outside")
    with pytest.raises(BadCheckpoint, match="not a plain file"):
        store.check(path)
    os.rename(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadCheckpoint, match="symbolic link"):
        store.check(path)


class TestRetention:
    def test_keeps_the_last(self, tmp_path):
        store = CheckpointStore(tmp_path, keep_last=2)
        for step in (1, 2, 3, 3, 4):
            save(store, step)
        assert complete(tmp_path) == ["step_00000003.attempt-2", "step_00000004.attempt-1"]

    def test_keeps_what_is_not_its_own_or_not_good(self, tmp_path):
        """A copied-in checkpoint, a damaged one and other files are not the store's to delete."""
        foreign = save(CheckpointStore(tmp_path / "other"), 1)
        store = CheckpointStore(tmp_path / "root", keep_last=1)
        damaged = save(store, 2)
        os.rename(foreign, tmp_path / "root" / foreign.name)
        (damaged / SEAL).write_bytes(b"?")
        (tmp_path / "root" / "step_notes").mkdir()
        save(store, 3)
        save(store, 4)
        assert complete(tmp_path / "root") == [
            "step_00000001.attempt-1",
            "step_00000002.attempt-1",
            "step_00000004.attempt-1",
            "step_notes",
        ]

    def test_nothing_is_deleted_before_the_new_one_is_complete(self, tmp_path):
        store = CheckpointStore(tmp_path, keep_last=1)
        first = save(store, 1)
        attempt = store.begin(2)
        with pytest.raises(SaveError):
            store.commit(attempt, {}, {})
        assert store.find().path == first

    def test_what_a_rewind_needs_stays(self, tmp_path):
        """Steps 5 to 7 are graceful stops; one that is 4 steps older than the newest stays."""
        store = CheckpointStore(tmp_path, keep_last=2, keep_behind=4)
        kept = []
        for step in (4, 5, 6, 7, 8, 9, 10, 12, 16):
            save(store, step)
            kept.append([int(left[5:13]) for left in complete(tmp_path)])
        assert kept[:5] == [[4], [4, 5], [4, 5, 6], [4, 6, 7], [4, 7, 8]]
        assert kept[5:] == [[4, 8, 9], [4, 9, 10], [4, 10, 12], [12, 16]]

    def test_half_deleted_ones_are_finished_later(self, tmp_path):
        store = CheckpointStore(tmp_path, keep_last=1)
        path = save(store, 1)
        os.rename(path, path.with_name(path.name + ".deleting"))
        assert store.find() is None
        save(store, 2)
        assert complete(tmp_path) == ["step_00000002.attempt-1"]

    def test_one_that_cannot_be_deleted_does_not_make_the_others_stay(
        self, tmp_path, monkeypatch, caplog
    ):
        """Write-protected, or open on a network file system: it is named, and tried again."""
        delete = shutil.rmtree

        def rmtree(path, **options):
            if os.path.basename(path).startswith("step_00000001."):
                raise PermissionError(errno.EACCES, "Permission denied", "__0_0.distcp")
            delete(path, **options)

        monkeypatch.setattr(shutil, "rmtree", rmtree)
        store = CheckpointStore(tmp_path, keep_last=1)
        for step in (1, 2, 3):
            save(store, step)
        assert complete(tmp_path) == ["step_00000001.attempt-1.deleting", "step_00000003.attempt-1"]
        assert caplog.text.count("step_00000001.attempt-1 cannot be deleted: [Errno 13]") == 1
        monkeypatch.undo()
        save(store, 4)
        assert complete(tmp_path) == ["step_00000004.attempt-1"]

    @pytest.mark.parametrize("keep", [0, -1])
    def test_keeping_none_is_refused(self, tmp_path, keep):
        with pytest.raises(ValueError, match="at least 1"):
            CheckpointStore(tmp_path, keep_last=keep)


class TestRanks:
    def test_every_rank_hashes_its_own_and_agrees(self, tmp_path):
        paths = on_ranks(3, lambda ranks: save(CheckpointStore(tmp_path, collective=ranks), 1))
        assert set(paths) == {tmp_path / "step_00000001.attempt-1"}
        found = on_ranks(3, lambda ranks: CheckpointStore(tmp_path, collective=ranks).find())
        assert all(f.manifest == found[0].manifest for f in found)
        assert sorted(found[0].manifest.files) == [f"__{r}_0.distcp" for r in range(3)]

    def test_one_failing_rank_abandons_on_all(self, tmp_path):
        def work(ranks: Threads) -> None:
            store = CheckpointStore(tmp_path, collective=ranks)
            attempt = store.begin(1)
            store.agree(
                attempt, OSError(28, "No space left on device") if ranks.rank == 1 else None
            )

        for error in on_ranks(3, work):
            assert isinstance(error, SaveError) and "rank 1: OSError" in str(error)
        (left,) = aside(tmp_path)
        assert left.startswith("step_00000001.attempt-1.tmp.write-failed")
        assert "rank 1: OSError" in (tmp_path / "aside" / left / "reason.txt").read_text()

    def test_a_node_without_the_directory_damages_nothing(self, tmp_path):
        """One rank does not see what the first one sees: refused, said, and left where it is."""
        on_ranks(2, lambda ranks: save(CheckpointStore(tmp_path / "shared", collective=ranks), 1))

        def work(ranks: Threads) -> None:
            root = tmp_path / ("shared" if ranks.rank == 0 else "not-mounted")
            CheckpointStore(root, collective=ranks).find()

        for error in on_ranks(2, work):
            assert isinstance(error, CheckpointError)
            assert "on rank 1: __" in str(error) and "mount the directory" in str(error)
        assert complete(tmp_path / "shared") == ["step_00000001.attempt-1"]

    def test_a_file_nobody_claims_is_not_committed(self, tmp_path):
        def work(ranks: Threads) -> None:
            store = CheckpointStore(tmp_path, collective=ranks)
            attempt = store.begin(1)
            (attempt.path / f"__{ranks.rank}_0.distcp").write_bytes(b"x")
            ranks.barrier()
            names = [] if ranks.rank == 1 else [f"__{ranks.rank}_0.distcp"]
            store.commit(attempt, store.hash_files(attempt, names), {})

        for error in on_ranks(2, work):
            assert isinstance(error, SaveError) and "'__1_0.distcp'" in str(error)

    def test_all_ranks_refuse_for_the_same_reason(self, tmp_path):
        on_ranks(3, lambda ranks: save(CheckpointStore(tmp_path, collective=ranks), 1))
        on_ranks(3, lambda ranks: save(CheckpointStore(tmp_path, collective=ranks), 2))
        shard = tmp_path / "step_00000002.attempt-1" / "__2_0.distcp"
        shard.write_bytes(shard.read_bytes().swapcase())
        found = on_ranks(3, lambda ranks: CheckpointStore(tmp_path, collective=ranks).find())
        assert [f.manifest.step for f in found] == [1, 1, 1]

    def test_what_a_rewind_goes_to_is_good_on_all_ranks(self, tmp_path):
        on_ranks(2, lambda ranks: save(CheckpointStore(tmp_path, collective=ranks), 1))
        on_ranks(2, lambda ranks: save(CheckpointStore(tmp_path, collective=ranks), 2))
        for step, good in ((2, 1), (1, None)):
            shard = tmp_path / f"step_{step:08d}.attempt-1" / "__1_0.distcp"
            shard.write_bytes(shard.read_bytes().swapcase())
            found = on_ranks(2, lambda r: CheckpointStore(tmp_path, collective=r).newest_at(2))
            assert found == [good, good]
        assert len(complete(tmp_path)) == 2 and aside(tmp_path) == []


def test_the_checkpoint_of_a_step(tmp_path):
    from megatron_patch.checkpoint.newest import of_step

    store = CheckpointStore(tmp_path / "checkpoints", keep_last=None)
    first, *_ = [save(store, step) for step in (5, 10)]
    for named in (tmp_path, store.root, first):
        assert of_step(named, 5) == first
    with pytest.raises(CheckpointError, match=r"load_step 7: .* has the steps 5, 10"):
        of_step(tmp_path, 7)
    with pytest.raises(CheckpointError, match=r"load_step 10: .* has the steps 5"):
        of_step(first, 10)
    (problem,) = CheckpointConfig(load_step=5).problems()
    assert problem.path == "checkpoint.load_step" and "rollback" in problem.message
