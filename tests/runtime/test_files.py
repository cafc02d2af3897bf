"""`runtime.files`: a file is the old one or the new one, whatever happens in between."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron_patch.runtime.files import replacing, sync_directory, write_named, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("content", ["zwei Zeilen\nüber Ähren\n", b"\x00\xff", ""])
def test_a_file_is_replaced(tmp_path, content):
    file = tmp_path / "facts.json"
    file.write_text("old")
    write_whole(file, content, durable=False)
    data = content.encode() if isinstance(content, str) else content
    assert file.read_bytes() == data and names(tmp_path) == ["facts.json"]


def test_a_draft_that_fails_leaves_the_old_file_and_goes(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(file, newline="") as out:
        out.write("half")
        assert names(tmp_path) == ["metrics.csv", "metrics.csv.tmp"]
        raise KeyboardInterrupt
    assert file.read_text() == "old" and names(tmp_path) == ["metrics.csv"]


def test_a_rename_that_fails_leaves_the_old_file(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError, match="there"):
        write_whole(tmp_path / "there", "text")
    assert names(tmp_path) == ["there"]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "file", "text")


def test_a_draft_of_somebody_else_stays(tmp_path, monkeypatch):
    file = tmp_path / "facts.json"
    (tmp_path / "facts.json.tmp").write_text("another's")

    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "not yours", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError):
        write_whole(file, "text")
    assert names(tmp_path) == ["facts.json.tmp"]


def test_what_a_person_named_keeps_its_kind(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_named(tmp_path / "link", "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    with pytest.raises(OSError, match="is a directory"):
        write_named(tmp_path / "folder", "text")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert names(tmp_path) == ["folder", "link", "pipe"]


def test_content_is_on_disk_before_the_old_one_is_gone(tmp_path, monkeypatch):
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replace"), replace(a, b)))
    write_whole(tmp_path / "a", "1", draft=tmp_path / "mine")
    write_whole(tmp_path / "b", "2", durable=False)
    assert done == ["fsync", "replace", "replace"] and names(tmp_path) == ["a", "b"]


def test_some_network_file_systems_cannot_sync_a_directory(tmp_path, monkeypatch):
    def refuse(code: int) -> None:
        def fsync(handle: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fsync)

    refuse(errno.EINVAL)
    sync_directory(tmp_path)
    refuse(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        sync_directory(tmp_path)
