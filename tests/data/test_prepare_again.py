"""prepare-data killed, interrupted, out of space, or met by another one: and run again."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from prepared import ENDINGS, check_dataset, content, documents, lines, make, options, tokens_of

from megatron_patch.data import prepare as prepare_module
from megatron_patch.data.errors import DataError
from megatron_patch.data.options import PrepareOptions
from megatron_patch.data.prepare import prepare

PREPARE = """
import os, sys, time
from pathlib import Path
from megatron_patch.data import encode
from megatron_patch.data.prepare import PrepareOptions, prepare

source, out, workers, last = sys.argv[1:]
write = encode.Encoder.write

def stall(encoder, number, batch):
    if number < int(last):
        return write(encoder, number, batch)
    Path(f"{out}.parts/part-{number:08d}.{os.getpid()}.half").write_bytes(b"half a part")
    time.sleep(600)

encode.Encoder.write = stall  # here and, as the script is imported again, in the workers
if __name__ == "__main__":
    prepare(PrepareOptions(inputs=[source], out=out, workers=int(workers), batch_bytes=400,
                           quiet=True))
"""


@pytest.mark.parametrize(("workers", "parts"), [(1, 1), (1, 60), (2, 2), (2, 40)])
def test_killed_and_run_again_equals_unbroken(tmp_path, workers, parts):
    """SIGKILL in the middle of a part; the workers end too, and what is missing is made."""
    source, script, out = tmp_path / "a.jsonl", tmp_path / "run.py", tmp_path / "out"
    source.write_bytes(lines(documents(600, seed=8)))
    script.write_text(PREPARE)
    make(tmp_path / "unbroken", source, batch_bytes=400)
    process = subprocess.Popen(
        [sys.executable, script, source, out, str(workers), str(parts)],
        env=os.environ | {"PYTHONPATH": str(Path(prepare_module.__file__).parents[2])},
    )
    work = Path(f"{out}.parts")
    try:
        until = time.monotonic() + 300
        while len(list(work.glob("part-*.half"))) < workers and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    assert len([path for path in work.glob("part-*") if not path.suffix]) == parts
    assert not Path(f"{out}.manifest.json").exists()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, "workers outlived their killed parent"
    make(out, source, batch_bytes=400)
    assert content(out) == content(tmp_path / "unbroken")
    assert not work.exists()


def test_finished_parts_are_not_made_again(tmp_path, monkeypatch):
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines(documents(100, seed=8)))
    interrupt_joining(monkeypatch, options(tmp_path / "out", source, batch_bytes=400))
    parts = sorted((tmp_path / "out.parts").glob("part-*"))
    parts[3].write_bytes(parts[3].read_bytes()[:-1])
    written = []
    original = prepare_module.Encoder.write
    monkeypatch.setattr(
        prepare_module.Encoder,
        "write",
        lambda self, number, batch: written.append(number) or original(self, number, batch),
    )
    make(tmp_path / "out", source, batch_bytes=400)
    assert written == [3], "only the damaged part"


def test_what_came_to_nothing_is_not_in_the_way(tmp_path):
    empty, source = tmp_path / "empty.txt", tmp_path / "text.txt"
    empty.touch()
    source.write_text("one document\n")
    with pytest.raises(DataError):
        make(tmp_path / "out", empty)
    assert make(tmp_path / "out", source).documents
    assert not (tmp_path / "out.parts").exists()


@pytest.mark.parametrize("out", ["out/", "there"])
def test_a_directory_is_no_beginning_of_file_names(tmp_path, out):
    (tmp_path / "text.txt").write_text("one document\n")
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match="names a directory"):
        prepare(replace(options(tmp_path / "out", tmp_path / "text.txt"), out=f"{tmp_path}/{out}"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text.txt", "there"]


def interrupt_at(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, call: int, *, after: bool = False
) -> None:
    """Interrupt the ``call``-th call of a function, before or after its work."""
    original, count = getattr(where, name), [0]

    def interrupted(*args: object, **kwargs: object) -> object:
        count[0] += 1
        if count[0] == call and not after:
            raise KeyboardInterrupt
        result = original(*args, **kwargs)
        if count[0] == call:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(where, name, interrupted)


def interrupt_joining(monkeypatch: pytest.MonkeyPatch, options: PrepareOptions) -> None:
    """Prepare until every part is made and none is joined."""
    interrupt_at(monkeypatch, prepare_module, "_join", 1)
    with pytest.raises(KeyboardInterrupt):
        prepare(options)
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("where", "name", "call", "after"),
    [
        (prepare_module, "record_file", 1, False),
        (prepare_module, "record_file", 2, False),
        (os, "replace", -3, False),  # joined.bin
        (os, "replace", -3, True),
        (os, "replace", -2, True),  # joined.idx
        (os, "replace", -1, False),  # manifest
        (os, "replace", -1, True),
        (prepare_module, "_clear", 1, False),
        (Path, "unlink", 1, True),
        (Path, "unlink", -1, True),  # only the empty directory is left
    ],
)
def test_interrupted_while_committing(tmp_path, texts, monkeypatch, where, name, call, after):
    """At every step of the commit: no half dataset passes, and the next run finishes it."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines(texts))
    count = [0]
    if call < 0:  # counted from the end
        original = getattr(where, name)
        monkeypatch.setattr(
            where, name,
            lambda *a, **k: count.__setitem__(0, count[0] + 1) or original(*a, **k),
        )  # fmt: skip
    make(tmp_path / "unbroken", source)
    monkeypatch.undo()
    interrupt_at(monkeypatch, where, name, call if call > 0 else count[0] + 1 + call, after=after)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", source)
    monkeypatch.undo()
    if not (tmp_path / "out.manifest.json").exists():
        assert "there is no manifest" in check_dataset(tmp_path / "out")[0]
    make(tmp_path / "out", source)
    assert content(tmp_path / "out") == content(tmp_path / "unbroken")
    assert not (tmp_path / "out.parts").exists()


def test_nothing_is_overwritten(tmp_path, texts):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(lines(texts))
    make(out, source)
    before = content(out)
    for changes in ({}, {"restart": True}):
        with pytest.raises(DataError, match="never overwritten"):
            make(out, source, **changes)
    (tmp_path / "out.manifest.json").unlink()
    with pytest.raises(DataError, match="not written by an interrupted prepare-data"):
        make(out, source)
    assert (tmp_path / "out.bin").read_bytes() == before[".bin"]


def test_an_interrupted_attempt_with_other_options_is_in_the_way(tmp_path, texts, monkeypatch):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(lines(texts))
    interrupt_joining(monkeypatch, options(out, source))
    with pytest.raises(DataError, match=r"other options is there.*--restart"):
        make(out, source, json_key="body")
    other = [{"body": text} for text in texts]
    source.write_text("\n".join(map(json.dumps, other)))
    made = make(out, source, json_key="body", restart=True)
    assert made.documents == len(texts) and check_dataset(out) == []


@pytest.mark.parametrize("name", ["a.jsonl", "part-00000000", "lock/a.jsonl"])
def test_a_directory_of_inputs_is_not_taken_for_parts(tmp_path, texts, name):
    """OUT.parts is deleted in the end."""
    source = tmp_path / "out.parts" / name
    source.parent.mkdir(parents=True)
    source.write_bytes(lines(texts))
    for changes in ({}, {"restart": True}):
        with pytest.raises(DataError, match=r"which no prepare-data wrote.*another --out"):
            make(tmp_path / "out", source, **changes)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [source]
    assert source.read_bytes() == lines(texts)


def test_parts_of_unknown_options_are_not_taken(tmp_path, texts, monkeypatch):
    """A clean-up was killed when the plan had gone; the text is the same, and not the ids."""
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text("\n".join(json.dumps({"text": t, "body": t[:3]}) for t in texts))
    interrupt_joining(monkeypatch, options(out, source))
    (tmp_path / "out.parts" / "plan.json").unlink()
    make(out, source, json_key="body")
    make(tmp_path / "fresh", source, json_key="body")
    assert content(out) == content(tmp_path / "fresh")


def test_two_at_a_time_are_refused(tmp_path, texts):
    source, work = tmp_path / "a.jsonl", tmp_path / "out.parts"
    source.write_bytes(lines(texts))
    work.mkdir()
    with (
        prepare_module._locked(work),
        pytest.raises(DataError, match="another prepare-data is working"),
    ):
        make(tmp_path / "out", source)


@pytest.mark.parametrize("same", [True, False])
def test_what_another_process_finishes_meanwhile_is_not_overwritten(
    tmp_path, texts, monkeypatch, same
):
    """Between the look at the output and the lock."""
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(lines(texts))
    locked = prepare_module._locked

    def late(parts):
        monkeypatch.undo()
        make(out, source)
        return locked(parts)

    monkeypatch.setattr(prepare_module, "_locked", late)
    if same:
        assert make(out, source).documents == len(texts)
    else:
        with pytest.raises(DataError, match="never overwritten"):
            make(out, source, invalid_text="skip")
    make(tmp_path / "alone", source)
    assert content(out) == content(tmp_path / "alone")


def test_changed_inputs_are_read_again(tmp_path, texts, monkeypatch):
    """A part is used only for the very bytes it was made from, sizes alone are not trusted."""
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(lines(texts))
    interrupt_joining(monkeypatch, options(out, source, batch_bytes=500))
    swapped = [text.swapcase() for text in texts]
    source.write_bytes(lines(swapped))
    make(out, source, batch_bytes=500)
    assert tokens_of(out) == [text.encode() for text in swapped]


@pytest.mark.parametrize("call", [1, 3, 8])
def test_a_full_disk_is_an_error_and_the_rest_is_made_later(tmp_path, texts, monkeypatch, call):
    source, out, count = tmp_path / "a.jsonl", tmp_path / "out", [0]
    source.write_bytes(lines(texts))
    make(tmp_path / "unbroken", source, batch_bytes=3000)

    def full(handle: int) -> None:
        count[0] += 1
        if count[0] == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"out: cannot be written \(No space left on device\)"):
        make(out, source, batch_bytes=3000)
    monkeypatch.undo()
    assert not any(Path(f"{out}{ending}").exists() for ending in ENDINGS)
    make(out, source, batch_bytes=3000)
    assert content(out) == content(tmp_path / "unbroken")
