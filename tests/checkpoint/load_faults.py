"""What ranks do in tests of loads that fail; `scenarios` has the model they load into."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scenarios import Live, config

from megatron_patch.checkpoint import content, inspect, last_checkpoint
from megatron_patch.checkpoint.errors import CheckpointError
from megatron_patch.checkpoint.safe_reader import SafeReader
from megatron_patch.checkpoint.train_state import TrainState


def failing_load(root: str, *, rank: int, places: list[str]) -> dict[str, Any]:
    """Loads in which one rank's file system fails once, by place; what this rank ends with."""
    from megatron.core.dist_checkpointing import serialization

    # A rank that waits for the failed one ends with gloo's words instead of the true cause.
    live = Live(config("dp", parallel={"distributed_timeout_minutes": 0.5}), root)
    live.checkpointer.save(TrainState(step=1))
    verify, read = serialization.verify_checkpoint, SafeReader.read_data
    found: dict[str, Any] = {}
    for place in [*places, "nowhere"]:
        reads = [0]

        def fail(*args: Any) -> Any:
            raise OSError(5, "Input/output error", "a shard")

        def fail_once(self: Any, *args: Any, reads: list[int] = reads, place: str = place) -> Any:
            reads[0] += 1
            return fail() if reads[0] == int(place) else read(self, *args)

        if live.layout.rank == rank and place == "metadata.json":
            serialization.verify_checkpoint = fail
        elif live.layout.rank == rank and place != "nowhere":
            SafeReader.read_data = fail_once  # type: ignore[method-assign]
        begin = time.monotonic()
        try:
            progress = live.checkpointer.load()
            text = f"step {progress.step if progress else None}"
        except CheckpointError as error:
            text = f"{type(error).__name__}, exit code {error.exit_code}: {error}"
        finally:
            serialization.verify_checkpoint = verify
            SafeReader.read_data = read  # type: ignore[method-assign]
        found[place] = {"text": text, "seconds": time.monotonic() - begin}
    return found


def failing_request(root: str, *, rank: int) -> str:
    """A good checkpoint, and one rank that cannot say what it wants of it."""
    live = Live(config("dp"), root)
    live.checkpointer.save(TrainState(step=1))

    original = content.model_state
    if live.layout.rank == rank:
        content.model_state = lambda *_: 1 / 0
    try:
        live.checkpointer.load()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        content.model_state = original
    return ""


def overlapping_request(root: str) -> str:
    """A load in which both ranks claim to hold the first copy of every parameter."""
    live = Live(config("dp"), root)
    live.checkpointer.save(TrainState(step=1))
    original = content.describe

    def twice(request: dict[str, Any]) -> list[Any]:
        return [replace(entry, replica_id=0) for entry in original(request)]

    content.describe = twice
    try:
        live.checkpointer.load()
    except CheckpointError as error:
        return str(error)
    finally:
        content.describe = original
    return "loaded"


def forgotten(root: str) -> dict[str, Any]:
    """Loads of a run whose checkpoints vanish and come back, are pruned, rewound, taken over."""
    live = Live(config("dp"), root)
    checkpointer, home = live.checkpointer, Path(root)
    checkpointer._run_dir, memory = home.parent, home.parent / last_checkpoint.FILE
    found: dict[str, Any] = {}

    def look(name: str, work: Callable[[], Any] = lambda: None) -> None:
        """Load after ``work`` on the first rank."""
        checkpointer.ranks.barrier()
        if live.layout.rank == 0:
            work()
        checkpointer.ranks.barrier()
        try:
            progress = checkpointer.load()
            found[name] = f"step {progress.step if progress else None}"
        except CheckpointError as error:
            found[name] = f"{type(error).__name__}: {error}"
        checkpointer.ranks.barrier()
        if memory.exists():
            found[f"{name}, remembered"] = json.loads(memory.read_text())["step"]

    look("new")
    for step in (1, 2, 3):
        checkpointer.save(TrainState(step=step))
    checkpointer.abandon_after(2)
    look("rewound")

    def prune() -> None:
        inspect.delete(home, inspect.plan(home, inspect.survey(home), last=1, every=None))

    look("pruned", prune)
    away = home.with_name("away")
    look("not mounted", lambda: home.rename(away))
    look("back", lambda: away.rename(home))
    look("without the file", memory.unlink)
    checkpointer._foreign = lambda text: f"another run's: {text}"
    look("foreign")
    checkpointer._foreign = None
    checkpointer.run = replace(live.run, checkpoint=replace(live.run.checkpoint, resume="never"))
    look("never", lambda: home.rename(away))
    checkpointer.run = live.run
    look("anew", memory.unlink)
    return found


def rewound_while_saving(root: str) -> dict[str, Any]:
    """Back to step 1 while step 2 is saved in the background and only one checkpoint is kept."""
    live = Live(config("dp", checkpoint={"async_save": True, "keep_last": 1}), root)
    checkpointer = live.checkpointer
    checkpointer.save(TrainState(step=1))
    checkpointer.finalize(blocking=True)
    checkpointer.save(TrainState(step=2))
    checkpointer.abandon_after(1)
    back = checkpointer.reload().step
    checkpointer.save(TrainState(step=2))
    checkpointer.finalize(blocking=True)
    return {"back": back, "saved": checkpointer.load()}
