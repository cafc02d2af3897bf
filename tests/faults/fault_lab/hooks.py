"""What happens inside a rank: recording what it trained on, and faults at named places of the code.

Called in a rank process before the trainer starts. ``record`` writes what a comparison needs;
``at("forward", step=5, do=kill)`` plants a fault. Nothing of the product is changed on disk.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from session_digest import digest


class _State:
    step = 0
    """Step that has begun last, 0 before the first."""
    folder = Path()
    rank = 0
    data: Any = None


def wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> None:
    """Call ``before(*args)`` and ``after(result, *args)`` around an attribute of ``owner``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        result = original(*args, **kwargs)
        if after is not None:
            after(result, *args)
        return result

    setattr(owner, name, wrapped)


# ------------------------------------------------------------------------------------------ record


def record(folder: Path, rank: int) -> None:
    """Leave in ``folder``: pid, steps done, hashes of the data by step, a digest at the end."""
    from megatron_patch.training import trainer

    _State.folder, _State.rank, _State.step = folder, rank, 0
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    note = functools.partial(os.write, os.open(folder / f"trace.{rank}", _APPEND, 0o644))

    def begun(session: Any, batches: Any, step: int) -> None:
        _State.step = step
        found = hashlib.sha256()
        for batch in batches:
            for tensor in batch.values() if batch is not None else ():
                found.update(tensor.numpy().tobytes())
        note(f"begin {step} {found.hexdigest()[:16]}\n".encode())

    def done(result: Any, session: Any, batches: Any, step: int) -> None:
        note(f"done {step}\n".encode())

    def resumed(result: Any, training: Any) -> None:
        note(f"resume {training.position.step}\n".encode())

    def ended(result: Any, training: Any) -> None:
        found = digest(training.session) | {"random": streams(), "step": training.position.step}
        (folder / f"digest.{rank}").write_text(json.dumps(found))

    wrap(trainer, "train_step", before=begun, after=done)
    wrap(trainer.Trainer, "_resume", after=resumed)
    wrap(trainer.Trainer, "run_to_end", after=ended)


_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def streams() -> str:
    """Hash of this rank's random streams."""
    from megatron.core import tensor_parallel

    found = hashlib.sha256(repr(random.getstate()).encode())
    found.update(np.random.get_state()[1].tobytes())  # type: ignore[index,union-attr]
    found.update(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available():
        found.update(torch.cuda.get_rng_state().numpy().tobytes())
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    for name in sorted(tracked):
        found.update(name.encode() + torch.as_tensor(tracked[name]).numpy().tobytes())
    return found.hexdigest()


# ------------------------------------------------------------------------------------------ faults


def injected(what: str) -> None:
    """Leave the time of the (first) fault."""
    with contextlib.suppress(FileExistsError), (_State.folder / "injected").open("x") as out:
        out.write(f"{time.time():.3f} rank {_State.rank}, step {_State.step}: {what}")


def send(number: signal.Signals) -> Callable[[], None]:
    """A signal to this very process, here and now."""

    def do() -> None:
        injected(f"{number.name} to itself")
        os.kill(os.getpid(), number)

    return do


kill = send(signal.SIGKILL)


def at(place: str, do: Callable[[], None], *, step: int = 0) -> None:
    """Do something once, the first time ``place`` is reached in or after ``step``.

    Args:
        place: key of ``PLACES``.
        do: the fault.
        step: step that must have begun (a save belongs to the step before it).
    """
    fired = False

    def fire() -> None:
        nonlocal fired
        if not fired and _State.step >= step:
            fired = True
            do()

    PLACES[place](fire)


def _before(module: str, path: str) -> Callable[[Callable[[], None]], None]:
    return lambda fire: wrap(*_owner(module, path), before=lambda *a: fire())


def _after(module: str, path: str) -> Callable[[Callable[[], None]], None]:
    return lambda fire: wrap(*_owner(module, path), after=lambda *a: fire())


def _owner(module: str, path: str) -> tuple[Any, str]:
    import importlib

    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def _backward(fire: Callable[[], None]) -> None:
    """Inside autograd, when the gradient of the loss comes by."""

    def seen(result: Any, *args: Any) -> None:
        if result[0].requires_grad:
            result[0].register_hook(lambda gradient: fire())

    wrap(*_owner("megatron_patch.training.step", "token_loss"), after=seen)


def _sealed(fire: Callable[[], None]) -> None:
    """Manifest and seal are written, the directory is not renamed yet."""

    def seen(result: Any, path: Path, data: bytes) -> None:
        if path.name == "manifest.seal":
            fire()

    wrap(*_owner("megatron_patch.checkpoint.store", "write_file"), after=seen)


def _deleting(fire: Callable[[], None]) -> None:
    """An old checkpoint is renamed and about to be deleted."""

    def seen(path: Any) -> None:
        if str(path).endswith(".deleting"):
            fire()

    wrap(*_owner("shutil", "rmtree"), before=seen)


_LOOP, _STORE = "megatron_patch.training.trainer", "megatron_patch.checkpoint.store"
PLACES: dict[str, Callable[[Callable[[], None]], None]] = {
    "rendezvous": _before("megatron_patch.parallel.setup", "initialize"),
    "model": _before("megatron_patch.training.trainer", "build_session"),
    "load": _before("megatron_patch.checkpoint.megatron", "Checkpointer._put"),
    "data": _before(_LOOP, "fetch"),
    "forward": _before("megatron_patch.training.step", "place"),
    "backward": _backward,
    "reduction": _before("megatron_patch.training.finite", "StepGuard.before_reduction"),
    "update": _after("megatron_patch.training.agreement", "Agreement.send"),
    "step end": _after(_LOOP, "train_step"),
    "evaluation": _before("megatron_patch.training.evaluate", "evaluate"),
    "save begin": _after(_STORE, "CheckpointStore.begin"),
    "save write": _before("megatron_patch.checkpoint.writer", "Plan.write"),
    "save hash": _before(_STORE, "CheckpointStore.hash_files"),
    "save index": _before("megatron_patch.checkpoint.writer", "Plan.finish"),
    "save manifest": _sealed,
    "save pointer": _before("megatron_patch.checkpoint.directory", "CheckpointDirectory.publish"),
    "save retire": _deleting,
    "finish": _before("megatron_patch.training.run_directory", "mark_finished"),
    "shutdown": _before("megatron_patch.parallel.setup", "destroy"),
}
SAVE_PLACES = ("save begin", "save write", "save hash", "save index", "save manifest",
               "save pointer", "save retire")  # fmt: skip
