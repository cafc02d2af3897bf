"""Same batches, initial weights and software: checked inside every run before its first step.

The first run of a seed writes what it found to ``reference/seed_<n>.json`` of the experiment; every
later one, and every later attempt, must find the same, or it does not start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_patch.experiments.errors import ExperimentError

if TYPE_CHECKING:
    import torch

    from megatron_patch.config.root import RunConfig

# What must be equal; the rest of the environment (platform, driver, number of GPUs) is recorded.
COMPARED = (
    "python",
    "torch",
    "triton",
    "megatron-core",
    "megatron-patch-stable",
    "transformer-engine",
    "apex",
    "numpy",
    "cuda",
    "cudnn",
    "nccl",
    "gpu",
    "commit",
)
FINGERPRINT_KEYS = {"weights", "batches_sha256", "checked_steps", "environment"}
SHOWN = 5


def without_commit(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Runs of other commits can be put beside each other: every run's own is in its record, and
    the tables name them when they differ. In one invocation they are refused."""
    environment = {k: v for k, v in fingerprint["environment"].items() if k != "commit"}
    return fingerprint | {"environment": environment}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What runs of one seed must share."""

    weights: dict[str, str]
    """SHA-256 of every initial weight by name: dtype, shape and bytes."""
    batches: str
    """SHA-256 of the token ids of the first steps' global batches, in order."""
    checked_steps: int
    environment: dict[str, Any]
    """The `COMPARED` part of the environment report."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "weights": self.weights,
            "weights_sha256": combined(self.weights),
            "batches_sha256": self.batches,
            "checked_steps": self.checked_steps,
            "environment": self.environment,
        }


def combined(weights: dict[str, str]) -> str:
    """One hash of all weights."""
    return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()


def hash_weights(chunks: list[Any]) -> dict[str, str]:
    """SHA-256 of every parameter, by its name in the GPTModel (wrappers' prefixes dropped)."""
    found = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            while name.startswith("module."):
                name = name.removeprefix("module.")
            found[name] = hash_tensor(parameter)
    return found


def hash_tensor(x: torch.Tensor) -> str:
    """SHA-256 over dtype, shape and bytes."""
    import torch

    data = x.detach().cpu().contiguous()
    head = f"{data.dtype}{tuple(data.shape)}".encode()
    return hashlib.sha256(head + data.view(torch.uint8).numpy().tobytes()).hexdigest()


def hash_batches(run: RunConfig, steps: int) -> str:
    """SHA-256 of the tokens and labels of the first ``steps`` global batches.

    Read as one data-parallel rank would: the hash does not depend on the number of GPUs.
    """
    from megatron_patch.data.loader import build_loaders

    alone = SimpleNamespace(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1)
    loaders = build_loaders(run, alone)  # type: ignore[arg-type]
    digest = hashlib.sha256()
    try:
        for step in range(steps):
            for micro in range(loaders.micro_batches):
                batch = loaders.batch("train", step, micro)
                # Sequence by sequence: the hash must not depend on how a batch is cut.
                for pair in zip(batch["tokens"], batch["labels"], strict=True):
                    for row in pair:
                        digest.update(row.numpy().tobytes())
    finally:
        loaders.close()
    return digest.hexdigest()


def differences(mine: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """What a run's fingerprint differs in from its seed's reference; empty if nothing.

    Weights that only one of the two models has (QK-norm's scales, for example) are no difference.
    """
    found = []
    ours, theirs = mine["weights"], reference["weights"]
    changed = sorted(n for n in ours.keys() & theirs.keys() if ours[n] != theirs[n])
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        found.append(f"initial weights differ: {', '.join(changed[:SHOWN])}{more}")
    if not ours.keys() & theirs.keys():
        found.append("initial weights cannot be compared: the models share no parameter name")
    if mine["checked_steps"] != reference["checked_steps"]:
        found.append(
            f"{mine['checked_steps']} steps of batches were hashed, "
            f"{reference['checked_steps']} in the reference"
        )
    elif mine["batches_sha256"] != reference["batches_sha256"]:
        found.append(f"the batches of the first {mine['checked_steps']} steps differ")
    before, now = reference["environment"], mine["environment"]
    found += [
        f"{key} is {now.get(key)}, it was {before.get(key)}"
        for key in COMPARED
        if now.get(key) != before.get(key)
    ]
    return found


def read(reference: Path) -> dict[str, Any] | None:
    """The fingerprint in a reference file; None: there is no such file yet.

    Raises:
        ExperimentError: the file is something else, or cannot be read.
    """
    try:
        found = json.loads(reference.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
    else:
        if isinstance(found, dict) and found.keys() >= FINGERPRINT_KEYS:
            return found
        reason = f"it has not {', '.join(sorted(FINGERPRINT_KEYS))}"
    raise ExperimentError(
        f"--reference {reference}: is no fingerprint of a seed ({reason}); name the file that the "
        "first run of the seed wrote, or one that is not there yet"
    )


def check(mine: dict[str, Any], reference: Path) -> None:
    """Compare with the reference file of the seed; the first run of a seed writes it.

    Raises:
        ExperimentError: anything differs, or the file cannot be used.
    """
    draft = reference.with_name(f"{reference.name}.{os.getpid()}")
    try:
        reference.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(json.dumps(mine, indent=1, sort_keys=True) + "\n")
            # A link appears whole or not at all, and of several first runs exactly one makes it.
            with contextlib.suppress(FileExistsError):
                os.link(draft, reference)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ExperimentError(
            f"--reference {reference}: cannot be written ({error.strerror or error}); name a file "
            "in a directory that you can write"
        ) from None
    before = read(reference)
    assert before is not None  # made above, unless it was there
    found = differences(mine, before)
    if found:
        listed = "\n".join(f"  - {text}" for text in found)
        raise ExperimentError(
            f"this run cannot be compared with the others of its seed ({reference}):\n{listed}\n"
            "Runs of one experiment share batches, initial weights, software, commit and GPU. "
            "Restore what changed, or start the whole experiment anew with another --out"
        )
