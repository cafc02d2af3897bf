"""The process of a run: its command line, its GPUs, and what its end says."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path

import pytest

from megatron_patch.experiments import process, runner
from megatron_patch.experiments.errors import ExperimentError
from megatron_patch.experiments.process import cell_command, check_data
from megatron_patch.experiments.protocol import read
from megatron_patch.experiments.store import Store


def test_the_command_of_a_run(protocol: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "out", read(protocol))
    run = store.experiment.runs[1]
    one = cell_command(store, run, gpus=1, steps=50, left=90.0)
    assert one[1:5] == ["-m", "megatron_patch", "experiment", "cell"]
    keys = [b for a, b in itertools.pairwise(one) if a == "--set"]
    assert keys[0] == "optimizer.lr=2e-3" and "training.seed=1" in keys
    assert "training.train_steps=100" in keys and "training.exit_at_step=50" in keys
    assert "training.exit_after_minutes=1.500" in keys
    two = cell_command(store, run, gpus=2, steps=100, left=float("inf"))
    assert two[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert not any("exit_" in part for part in two)
    store.close()


def test_every_problem_of_the_data_of_all_runs_at_once(
    protocol: Path, corpus: Path, tmp_path: Path
) -> None:
    """Each named once, though the runs share their data; only what is to be started counts."""
    good = f"set: [optimizer.lr=2e-3, 'data.blend.0.path={corpus}'"
    text = protocol.read_text().replace("set: [optimizer.lr=2e-3", good)
    protocol.write_text(text)
    experiment = read(protocol, [f"data.blend.0.path={tmp_path / 'nowhere'}"])
    check_data(experiment, [experiment.by_id("b-s1")], pytest.fail)
    check_data(experiment, [], pytest.fail)
    with pytest.raises(ExperimentError, match="is no manifest") as error:
        check_data(experiment, experiment.runs, pytest.fail)
    assert str(error.value).count("\n  - ") == 1
    tokenizer = ["data.tokenizer.kind=huggingface", f"data.tokenizer.path={tmp_path / 'none.json'}"]
    with pytest.raises(ExperimentError) as error:
        other = read(protocol, [f"data.blend.0.path={tmp_path / 'nowhere'}", *tokenizer])
        check_data(other, other.runs, pytest.fail)
    assert str(error.value).count("\n  - ") == 2 and "none.json" in str(error.value)
    vocabulary = ["data.tokenizer.kind=none", "data.tokenizer.vocab_size=257"]
    with pytest.raises(ExperimentError, match="prepared with another tokenizer"):
        check_data(read(protocol, vocabulary), [read(protocol, vocabulary).by_id("b-s1")], print)


def test_a_file_system_that_does_not_answer_is_left_to_the_runs(
    protocol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may answer when they ask; a run that finds it silent fails and is started once more."""

    whole = Path.read_bytes

    def silent(path: Path) -> bytes:
        if path.name.endswith(".manifest.json"):
            raise OSError(errno.EIO, "Input/output error")
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", silent)
    said: list[str] = []
    check_data(read(protocol), read(protocol).runs, said.append)
    assert len(said) == 1 and "Input/output error" in said[0] and said[0].startswith("warning: ")


def test_seats_are_counted_among_the_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runner.visible_devices([0, 3]) == "0,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-abc,6")
    assert runner.visible_devices([1, 2]) == "GPU-abc,6"
    with pytest.raises(ValueError, match="number 3 of 3 in CUDA_VISIBLE_DEVICES=4,GPU-abc,6"):
        runner.visible_devices([0, 3])


TORCHRUN = """\
megatron-patch: step 7: gradients not finite; stopped before the update
  parameters with a non-finite gradient ...
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 18085)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 3 (pid: 18084)
============================================================
"""


def test_the_exit_code_behind_torchrun() -> None:
    """torchrun ends with 1 whatever its ranks ended with; the state must not depend on that."""
    assert process.rank_exit_code(TORCHRUN) == 3
    assert process.rank_exit_code("killed") == 1
    assert process.last_words(TORCHRUN).startswith("step 7: gradients not finite")
    assert process.last_words("a\n\n[rank0]: OutOfMemoryError\n") == "OutOfMemoryError"
    assert process.last_words("") == ""
    reasons = "a\nmegatron-patch: no backend; unmet:\n  - device is cpu\n  - no x\nothers: none\n"
    assert process.last_words(reasons) == "no backend; unmet: device is cpu; no x"
