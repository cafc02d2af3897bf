"""What the table says of runs that continue another one, whatever became of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_patch.experiments import results, stability
from megatron_patch.experiments.protocol import read
from megatron_patch.experiments.stability import Request
from megatron_patch.experiments.store import Store

Go = Callable[..., tuple[Store, list[str]]]

CELLS = """\
cells:
  - {name: base, set: [checkpoint.interval=10, checkpoint.keep_last=null]}
  - {name: early, from_cell: base, before: 25, follow: 40}
  - {name: late, from_cell: base, before: -10, follow: 50}
"""


@pytest.fixture
def made(protocol: Path, tmp_path: Path, quick: dict[str, str], go: Go) -> Path:
    """A base with its event at 50, and runs that continue it from 20 and from 60."""
    head = protocol.read_text().split("cells:")[0].replace("seeds: [1, 2]", "seeds: [1]")
    protocol.write_text(head.replace("stop_after: 30", "stop_after: 60, grad_norm: 1.0") + CELLS)
    quick |= {"base-s1": "explode", "pause": "0.01"}
    go(protocol, tmp_path / "out", devices=[0, 1])
    return protocol


def table(store: Store) -> str:
    rows = {run.id: store.rows(run) for run in store.experiment.runs}
    return results.markdown(results.collect(store, rows))


def test_every_run_stands_beside_the_event_that_it_was_started_from(
    made: Path, tmp_path: Path
) -> None:
    """On another machine the base is another attempt, with its event at another step."""
    store = Store(tmp_path / "out", read(made))
    store.states["late-s1"].origin = {"base": "base-s1", "event": 40, "step": 60}
    store.close()
    said = table(store)
    assert "| early | 1 | 50 | continued | 30 before | yes |" in said
    assert "| late | 1 | 40 | continued | 20 after | yes |" in said


def test_a_failed_run_that_is_to_be_retried_began_where_it_did(made: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "out", read(made))
    store.states["early-s1"].state = "failed"
    shutil.rmtree(store.run_dir(store.experiment.by_id("early-s1")) / "checkpoints")
    store.save()
    store.close()
    asked = Request(
        config=made, out=tmp_path / "out", gpus=1, minutes=None, steps=None, only=["base"],
        overrides=[], retry=True,
    )  # fmt: skip
    assert stability.run(asked) == 0
    store = Store(tmp_path / "out", read(made))
    store.close()
    assert "| early | 1 | unfinished | 20 | 90 |" in table(store)


def test_a_run_that_begins_again_starts_from_the_base_that_is_here(
    made: Path, tmp_path: Path, go: Go
) -> None:
    """Unpacked on a machine where the base was made anew, with its event at another step."""
    store = Store(tmp_path / "out", read(made))
    state, folder = store.states["early-s1"], store.run_dir(store.experiment.by_id("early-s1"))
    state.state, state.origin = "paused", {"base": "base-s1", "event": 40, "step": 10}
    shutil.rmtree(folder / "checkpoints")
    store.save()
    store.close()
    store, said = go(made, tmp_path / "out", only={"early"})
    assert any("from step 20 of base-s1 (event at 50)" in line for line in said)
    assert store.states["early-s1"].origin == {"base": "base-s1", "event": 50, "step": 20}
    assert store.states["early-s1"].state == "finished"
