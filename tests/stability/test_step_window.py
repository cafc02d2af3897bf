"""A record after a resume is of the same steps as that of a run that nothing stopped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import training_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from training_ranks import figures

from megatron_patch.stability import record
from megatron_patch.stability.step_window import StepWindow

WATCH = ["stability.interval=3", "training.train_steps=6", "training.deterministic=true",
         "model.num_layers=2"]  # fmt: skip
STOP, SAVE = "training.exit_at_step=2", "checkpoint.interval=5"
NAN = {"step": 6, "rank": None, "parameter": "decoder.final_layernorm.weight"}
PIPE = "parallel.pipeline_model_parallel_size=2"


def run(name: str, *keys: str, **more: Any) -> dict[str, Any]:
    return {"set": [f"name={name}", *WATCH, *keys], **more}


def test_losses_and_norms_of_other_shapes():
    """They ended the training at its first record, in an error that named neither."""
    groups: Any = SimpleNamespace(device=torch.device("cpu"), rank=0, reports_loss=True)
    window = StepWindow(5, groups)
    for report in (torch.full((1,), 3.0), 3, np.float32(3), torch.full((1, 1), 3.0)):
        window.observe(report, torch.full((1,), 2.0))
    assert window.drain().tolist() == [[3, 1, 2]] * 4
    for report, text in (
        (torch.ones(3), r"loss is of shape \(3,\); allowed: one number, or the tensor"),
        ([6.0, 2.0], "loss is of type list; allowed: one number, or"),
    ):
        with pytest.raises(ValueError, match=text):
            window.observe(report, 1.0)
    with pytest.raises(ValueError, match=r"grad_norm is of shape \(2,\); allowed: one number"):
        window.observe(1.0, torch.ones(2))
    window.observe(1.0, 1.0)
    with pytest.raises(ValueError, match=r"loss is tensor.* was 1.0 before; give a mean in every"):
        window.observe(torch.ones(2), 1.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Two ranks: unbroken, and stopped in order after step 2, by an error after step 5."""
    folder = tmp_path_factory.mktemp("series")
    plan = [
        run("unbroken"),
        run("broken", STOP),
        run("broken", SAVE, nan=NAN),
        run("broken", SAVE),
        run("pipe", PIPE),
        run("pipe_broken", PIPE, STOP),
        run("pipe_broken", PIPE),
    ]
    results = training_ranks.run_ranks(folder, corpus, 2, plan)
    assert [rank["code"] for result in results for rank in result] == [0] * 4 + [3] * 2 + [0] * 8
    return folder / "runs"


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "other"), [("unbroken", "broken"), ("pipe", "pipe_broken")])
def test_a_stop_between_two_records_changes_neither(runs, name, other):
    assert figures(runs / name) == figures(runs / other)
    one, two = record.read(runs / name), record.read(runs / other)
    assert one.steps.tolist() == two.steps.tolist() == [3, 6]
    for key, values in one.scalars.items():
        np.testing.assert_array_equal(values, two.scalars[key], err_msg=key)


def series(interval: int, rank: int = 0) -> StepWindow:
    layout: Any = SimpleNamespace(rank=rank, reports_loss=True, device=torch.device("cpu"))
    return StepWindow(interval, layout)


def note(one: StepWindow, loss: float) -> None:
    one.observe(torch.tensor([loss, 2.0]), loss + 0.5)


@pytest.mark.parametrize(
    ("interval", "kept"), [(10, [6.0, 7.0, 8.0]), (50, [6.0, 7.0, 8.0]), (3, [7.0, 8.0]), (4, [])]
)
def test_another_interval_keeps_the_steps_of_its_next_record(interval, kept):
    saved = {"losses": [[6.0, 2.0], [7.0, 2.0], [8.0, 2.0]], "grad_norms": [6.5, 7.5, 8.5]}
    for rank in (0, 1):
        one = series(interval, rank)
        one.restore(saved, step=8)
        note(one, 9.0)
        losses, tokens, norms = one.drain().T.tolist()
        # The first rank has the sums of all, and the norms are its alone.
        first = [2.0] * len(kept) if rank == 0 else [0.0] * len(kept)
        assert losses == [*(kept if rank == 0 else first), 9.0] and tokens == [*first, 2.0]
        assert norms == ([loss + 0.5 for loss in (*kept, 9.0)] if rank == 0 else [0.0] * len(norms))
        assert len(one.drain()) == 0


def test_checkpoints_of_earlier_versions_have_nothing_to_restore():
    one = series(10)
    one.restore(None, step=8)
    note(one, 9.0)
    assert one.drain().tolist() == [[9.0, 2.0, 9.5]]


class Nothing(TorchDispatchMode):
    """No operation at all, views of tensors neither."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} between two records")


def test_a_step_between_two_records_launches_nothing():
    one = series(10)
    reports = [torch.tensor([float(loss), 2.0]) for loss in range(3)]
    with Nothing():
        for report in reports:
            one.observe(report, 0.5)
    assert one.drain().tolist() == [[0.0, 2.0, 0.5], [1.0, 2.0, 0.5], [2.0, 2.0, 0.5]]


def test_a_mean_loss_counts_as_one_token_and_is_kept():
    one, loss = series(10), torch.tensor(3.0)
    one.observe(loss, 0.5)
    loss.fill_(7.0)
    one.observe(4.0, 0.5)
    assert one.drain().tolist() == [[3.0, 1.0, 0.5], [4.0, 1.0, 0.5]]


def test_a_rank_without_losses_adds_zeros():
    """An earlier pipeline stage: after a resume, too."""
    saved = {"losses": [[6.0, 2.0], [7.0, 2.0]], "grad_norms": [6.5, 7.5]}
    one = series(10, rank=1)
    one.restore(saved, step=2)
    one.observe(None, 1.0)
    assert one.drain().tolist() == [[0.0] * 3] * 3
