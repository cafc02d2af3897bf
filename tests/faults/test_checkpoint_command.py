"""``megatron-patch checkpoint``: a store of small files, looked at, damaged and pruned."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_patch.checkpoint import inspect
from megatron_patch.checkpoint.directory import CheckpointDirectory
from megatron_patch.checkpoint.store import CheckpointStore
from megatron_patch.cli import app

KEY = b"0123456789abcdef0123456789abcdef"


def save(root: Path, step: int, *, key: bytes | None = None) -> Path:
    store = CheckpointStore(root, keep_last=None, hmac_key=key)
    attempt = store.begin(step)
    for n in range(3):
        (attempt.path / f"__{n}_0.distcp").write_bytes(bytes([step % 251, n]) * (5000 + n))
    names = [f"__{n}_0.distcp" for n in range(3)]
    return store.commit(attempt, store.hash_files(attempt, names), {"layout": {}})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints" / "step_00000060.attempt-1.tmp").mkdir()
    return tmp_path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: object) -> tuple[int, str, str]:
        try:
            code = app.run(["checkpoint", *map(str, words)])
        except SystemExit as error:
            code = int(error.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def names(run_dir: Path) -> list[int]:
    return sorted(int(p.name[5:13]) for p in (run_dir / "checkpoints").glob("step_*.attempt-?"))


def damage(path: Path) -> None:
    file = path / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)


def test_list(run_dir, call):
    code, out, _ = call("list", run_dir)
    assert code == 0
    lines = out.splitlines()
    assert "step_00000060.attempt-1.tmp" in lines[1] and "unfinished" in lines[1]
    assert "complete *" in lines[2] and "50" in lines[2] and " min " in lines[2]
    assert len(lines) == 8


def test_list_json_and_a_single_checkpoint(run_dir, call):
    code, out, _ = call("list", run_dir / "checkpoints" / "step_00000030.attempt-1", "--json")
    (entry,) = json.loads(out)["entries"]
    assert code == 0 and (entry["step"], entry["state"], entry["latest"]) == (30, "complete", False)
    assert entry["size"] > 15_000 and entry["signed"] is False


@pytest.mark.parametrize("name", ["store.json", "latest", "pinned"])
def test_list_names_a_file_that_cannot_be_read(run_dir, call, name):
    """A directory in its place; on a colleague's run one without permission."""
    path = run_dir / "checkpoints" / name
    path.unlink(missing_ok=True)
    path.mkdir()
    code, out, err = call("list", run_dir)
    assert f"{path}" in out + err, (code, out, err)
    assert code == 2 or (code == 0 and "warning: " in out)


def test_verify_good(run_dir, call):
    code, out, err = call("verify", run_dir)
    assert code == 0 and out.count("good  ") == 5 and "5 of 5" in out and err == ""


def test_verify_names_what_is_damaged_and_goes_on(run_dir, call):
    damage(run_dir / "checkpoints" / "step_00000030.attempt-1")
    (run_dir / "checkpoints" / "step_00000020.attempt-1" / "extra").write_text("x")
    code, out, _ = call("verify", run_dir, "--jobs", 2, "--json")
    found = {e["step"]: e for e in json.loads(out)["entries"]}
    assert code == 1
    assert {s: e["state"] for s, e in found.items()} == {
        50: "good", 40: "good", 30: "damaged", 20: "damaged", 10: "good"}  # fmt: skip
    assert "__1_0.distcp does not match its SHA-256" in found[30]["reason"]
    assert "extra" in found[20]["reason"]
    assert names(run_dir) == [10, 20, 30, 40, 50], "verify moves nothing"


def test_verify_with_nothing_good(tmp_path, call):
    damage(save(tmp_path, 10))
    assert call("verify", tmp_path)[0] == 4


def test_signatures(tmp_path, call):
    save(tmp_path, 10, key=KEY)
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    assert "signature not checked" in call("verify", tmp_path)[1]
    code, out, _ = call("verify", tmp_path, "--key-file", file)
    assert code == 0 and "signature good" in out
    file.write_bytes(KEY[::-1])
    code, out, _ = call("verify", tmp_path, "--key-file", file)
    assert code == 4 and out.startswith("unreadable") and "another key" in out
    file.chmod(0o644)
    code, _, err = call("verify", tmp_path, "--key-file", file)
    assert code == 2 and "chmod 600" in err


def test_prune_says_first(run_dir, call):
    code, out, _ = call("prune", run_dir, "--keep-last", 2, "--keep-every", 20)
    assert code == 0 and names(run_dir) == [10, 20, 30, 40, 50]
    assert out.count("would go  ") == 2 and "2 checkpoint(s)" in out and "--delete does it" in out


def test_prune_deletes_by_the_rule(run_dir, call):
    code, out, _ = call("prune", run_dir, "--keep-last", 2, "--keep-every", 20, "--delete")
    assert code == 0 and names(run_dir) == [20, 40, 50]
    assert "deleted 2 checkpoint(s)" in out
    assert (run_dir / "checkpoints" / "step_00000060.attempt-1.tmp").is_dir()
    assert call("verify", run_dir)[0] == 0


def test_prune_keeps_what_latest_names_and_what_is_damaged(run_dir, call):
    root = run_dir / "checkpoints"
    (root / "latest").write_text("step_00000020.attempt-1\n")
    (root / "step_00000030.attempt-1" / "extra").write_text("x")
    assert call("prune", run_dir, "--keep-last", 1, "--delete")[0] == 0
    assert names(run_dir) == [20, 30, 50]


def test_prune_never_takes_the_only_good_one(run_dir, call):
    for step in (40, 50):
        damage(run_dir / "checkpoints" / f"step_{step:08d}.attempt-1")
    code, _, err = call("prune", run_dir, "--keep-last", 2, "--delete")
    assert code == 4 and "nothing was deleted" in err
    assert names(run_dir) == [10, 20, 30, 40, 50]
    assert call("prune", run_dir, "--keep-last", 3, "--delete")[0] == 0
    assert names(run_dir) == [30, 40, 50]


def test_prune_says_that_nothing_good_is_there(run_dir, call):
    for step in (10, 20, 30, 40, 50):
        (run_dir / "checkpoints" / f"step_{step:08d}.attempt-1" / "extra").write_text("x")
    assert call("list", run_dir)[0] == call("prune", run_dir, "--keep-last", 1)[0] == 4
    assert call("prune", run_dir, "--keep-last", 1, "--delete")[0] == 4
    assert names(run_dir) == [10, 20, 30, 40, 50]


def test_prune_keeps_out_of_a_running_training(run_dir, call):
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = call("prune", run_dir, "--keep-last", 1, "--delete")
        assert code == 2 and "a trainer uses this run right now" in err
        assert call("prune", run_dir, "--keep-last", 1)[0] == 0
    assert len(names(run_dir)) == 5


def test_prune_finishes_a_deletion_that_was_killed(run_dir, call):
    """Of a run that has ended no start does it, and the disk stays full."""
    path = run_dir / "checkpoints" / "step_00000020.attempt-1"
    path.rename(f"{path}.deleting")
    rule = ("prune", run_dir, "--keep-every", 10)
    assert "would go  step_00000020.attempt-1.deleting" in call(*rule)[1]
    assert call(*rule, "--delete")[0] == 0
    assert not list((run_dir / "checkpoints").glob("*.deleting"))
    assert names(run_dir) == [10, 30, 40, 50]


def test_prune_deletes_nothing_while_a_rollback_is_unfinished(run_dir, call, monkeypatch):
    """Killed after the first move; the one gone back to would be one of the old ones."""
    moves = []

    def killed(self: CheckpointDirectory, path: Path, kind: str) -> Path:
        if moves:
            raise KeyboardInterrupt
        moves.append(path)
        return aside(self, path, kind)

    aside = CheckpointDirectory._rename_aside
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointDirectory, "_rename_aside", killed)
        assert call("rollback", run_dir, "--to", 20)[0] == 130
    assert names(run_dir) == [10, 20, 30, 40]
    for more in ((), ("--delete",)):
        code, _, err = call("prune", run_dir, "--keep-last", 1, *more)
        assert code == 2 and "going back to step_00000020.attempt-1 was interrupted" in err
    assert names(run_dir) == [10, 20, 30, 40]
    assert "--to step_00000020.attempt-1" in call("list", run_dir)[1]
    assert call("rollback", run_dir, "--to", 20)[0] == 0
    assert call("prune", run_dir, "--keep-last", 1, "--delete")[0] == 0
    assert names(run_dir) == [20] and "interrupted" not in call("list", run_dir)[1]


def test_prune_leaves_another_stores_checkpoints(run_dir, call):
    (run_dir / "checkpoints" / "store.json").write_text(json.dumps({"store": "f" * 32}))
    assert call("prune", run_dir, "--keep-last", 1, "--delete")[0] == 0
    assert len(names(run_dir)) == 5


PINNED = "step_00000020.attempt-1 danger at step 28, signs since step 25\n"


def test_prune_keeps_what_is_pinned(run_dir, call):
    (run_dir / "checkpoints" / "pinned").write_text(PINNED)
    code, out, _ = call("prune", run_dir, "--keep-last", 1, "--delete")
    assert code == 0 and names(run_dir) == [20, 50]
    assert "KiB  pinned: danger at step 28, signs since step 25" in out
    code, out, _ = call("list", run_dir)
    assert code == 0
    (line,) = (line for line in out.splitlines() if "pinned" in line)
    assert line.endswith("-1  (pinned: danger at step 28, signs since step 25)")
    told = json.loads(call("list", run_dir, "--json")[1])
    assert {e["step"]: e["pinned"] for e in told["entries"]} == {
        60: None, 50: None, 20: "danger at step 28, signs since step 25"}  # fmt: skip
    assert told["pinned_problem"] == ""
    (run_dir / "checkpoints" / "pinned").unlink()
    assert call("prune", run_dir, "--keep-last", 1, "--delete")[0] == 0
    assert names(run_dir) == [50]


def test_prune_keeps_what_an_earlier_version_kept(run_dir, call):
    kept = {"step_00000020.attempt-1": "a milestone"}
    (run_dir / "checkpoints" / "kept.json").write_text(json.dumps(kept))
    assert "pinned: a milestone" in call("prune", run_dir, "--keep-last", 1, "--delete")[1]
    assert names(run_dir) == [20, 50]


def test_prune_keeps_what_a_trainer_pinned_meanwhile(run_dir):
    """Between the list and the lock: its last record was at danger."""
    root = run_dir / "checkpoints"
    found = inspect.plan(root, inspect.survey(root), last=1, every=None)
    (root / "pinned").write_text(PINNED)
    inspect.delete(root, found)
    assert names(run_dir) == [20, 50]
    assert [e.step for e in found.doomed] == [40, 30, 10]
    assert [(e.step, why) for e, why in found.kept if e.step == 20] == [
        (20, "pinned: danger at step 28, signs since step 25")
    ]


@pytest.mark.parametrize("file", ["pinned", "kept.json"])
def test_prune_deletes_nothing_while_that_file_is_damaged(run_dir, call, file):
    (run_dir / "checkpoints" / file).write_text('{"step_00000020')
    for words in ((), ("--delete",)):
        code, _, err = call("prune", run_dir, "--keep-last", 1, *words)
        assert code == 2 and f"{file}: " in err and "mend it, or delete it to pin none" in err
    assert names(run_dir) == [10, 20, 30, 40, 50]
    code, out, _ = call("list", run_dir)
    assert code == 0 and "warning: " in out and "or delete it to pin none" in out
    assert file in json.loads(call("list", run_dir, "--json")[1])["pinned_problem"]


class TestRollback:
    @staticmethod
    def start(run_dir: Path) -> int:
        """Step that the next start continues."""
        found = CheckpointStore(run_dir / "checkpoints").find()
        assert found is not None
        return found.manifest.step

    def test_it_says_what_moved_and_how_to_undo_it(self, run_dir, call):
        code, out, _ = call("rollback", run_dir, "--to", 30)
        assert code == 0 and names(run_dir) == [10, 20, 30] and self.start(run_dir) == 30
        assert out.count("moved   step_000000") == 2
        assert "the next start continues from step_00000030.attempt-1\n" in out
        assert (run_dir / "checkpoints" / "latest").read_text() == "step_00000030.attempt-1\n"
        undo = [line.strip() for line in out.partition("to undo:\n")[2].splitlines()]
        assert len(undo) == 3 and undo[-1].endswith("--to step_00000050.attempt-1")
        for line in undo[:-1]:
            subprocess.run(line, shell=True, check=True)
        assert call(*undo[-1].split()[2:])[0] == 0
        assert names(run_dir) == [10, 20, 30, 40, 50] and self.start(run_dir) == 50

    def test_to_the_newest_moves_nothing(self, run_dir, call):
        """What an edited latest asks for; a name tells one attempt of a step from another."""
        (run_dir / "checkpoints" / "latest").write_text("step_00000010.attempt-1\n")
        code, out, _ = call("rollback", run_dir, "--to", "step_00000050.attempt-1", "--json")
        answer = json.loads(out)
        assert code == 0 and answer["moved"] == {} and answer["undo"] == []
        assert (
            self.start(run_dir) == 50
            and "nothing was newer" in call("rollback", run_dir, "--to", "50")[1]
        )

    def test_an_unknown_step_is_refused_with_the_list(self, run_dir, call):
        for to in (35, "step_00000035.attempt-1", "x"):
            code, _, err = call("rollback", run_dir, "--to", to)
            assert code == 2 and f"no checkpoint of step {to}; there are: 10, 20, 30, 40, 50" in err
        assert names(run_dir) == [10, 20, 30, 40, 50]

    def test_a_damaged_one_is_refused(self, run_dir, call):
        (run_dir / "checkpoints" / "step_00000030.attempt-1" / "__1_0.distcp").unlink()
        code, _, err = call("rollback", run_dir, "--to", 30)
        assert code == 2 and "missing: '__1_0.distcp'; nothing was moved" in err
        assert names(run_dir) == [10, 20, 30, 40, 50]

    def test_not_while_the_run_trains(self, run_dir, call):
        with (run_dir / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            code, _, err = call("rollback", run_dir, "--to", 30)
        assert code == 2 and "a trainer uses this run right now; stop it first" in err
        assert names(run_dir) == [10, 20, 30, 40, 50]

    def test_a_store_of_an_earlier_version(self, run_dir, call):
        """20 and 40 are one branch, 30 and 50 the one that was left behind."""
        root = run_dir / "checkpoints"
        facts = json.loads((root / "store.json").read_text())
        (root / "store.json").write_text(json.dumps({"store": facts["store"]}))
        name = "step_{:08d}.attempt-1".format
        lines = [f"{name(10)} -", f"{name(30)} {name(10)}", f"{name(50)} {name(30)}",
                 f"{name(20)} {name(10)}", f"{name(40)} {name(20)}"]  # fmt: skip
        (root / "lineage").write_text("\n".join(lines) + "\n")
        assert call("rollback", run_dir, "--to", 40)[0] == 0
        assert names(run_dir) == [10, 20, 40] and self.start(run_dir) == 40

    def test_a_finished_run_is_told(self, run_dir, call):
        (run_dir / "FINISHED").touch()
        assert f"delete {run_dir / 'FINISHED'}" in call("rollback", run_dir, "--to", 30)[1]


@pytest.mark.parametrize("words", [
    ["list", "missing"], ["verify", "."], ["prune", "RUN"], ["prune", "RUN", "--keep-last", "0"],
    ["prune", "RUN", "--keep-last", "-1"], ["prune", "RUN", "--keep-every", "x"],
    ["prune", "RUN/checkpoints/step_00000010.attempt-1", "--keep-last", "1"],
    ["verify", "RUN", "--jobs", "many"], ["verify", "RUN", "--key-file", "missing"],
    ["list", "RUN/checkpoints/latest"], ["rollback", "RUN"],
    ["rollback", "RUN/checkpoints/step_00000010.attempt-1", "--to", "10"],
    [], ["list"], ["frobnicate", "RUN"],
])  # fmt: skip
def test_bad_input_is_refused_in_words(run_dir, call, words, monkeypatch):
    (run_dir / "empty").mkdir()
    monkeypatch.chdir(run_dir / "empty")
    code, _, err = call(*[w.replace("RUN", str(run_dir)) for w in words])
    assert code == 2 and err.strip() and "Traceback" not in err
    assert len(names(run_dir)) == 5


def test_it_needs_no_torch(run_dir):
    program = ("import sys; from megatron_patch.cli import app; code = app.run(sys.argv[1:]); "
               "assert 'torch' not in sys.modules; sys.exit(code)")  # fmt: skip
    words = ["checkpoint", "verify", str(run_dir)]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False,
        env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_the_run_deletes_meanwhile_is_not_damaged(run_dir, call, monkeypatch):
    """Hashing takes long, and a run that trains goes on deleting what it need not keep."""
    check, directory = inspect.check_file, CheckpointDirectory(run_dir / "checkpoints")

    def deleted(path: Path, *args: Any, **options: Any) -> None:
        if path.is_dir() and path.name == "step_00000010.attempt-1":
            directory.delete(path.name)
        check(path, *args, **options)

    monkeypatch.setattr(inspect, "check_file", deleted)
    code, out, _ = call("verify", run_dir, "--jobs", 1)
    assert code == 0 and "4 of 4 complete checkpoints are good" in out
    assert "gone       step_00000010.attempt-1" in out and "keep_last" in out
