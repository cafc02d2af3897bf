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

    from megatron_patch.schema.run import RunConfig

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
LATER_KEYS = {"data_sha256", "model"}
"""What the fingerprints of earlier versions do not have: it is compared where both have it."""
_ADD_NONE = (
    *("hidden_dropout", "attention_dropout", "init_std", "norm_epsilon"),
    *("rotary_base", "rotary_percent", "window", "window_skip_freq"),
)
ADDED_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ADD_NONE, ()),
    "qk_layernorm": (".q_layernorm.", ".k_layernorm.", ".kv_layernorm."),
}
"""By key of the model's section: what the names of the weights contain that it adds."""
SHOWN = 5


def comparable(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """What runs of one seed share wherever they were made: a machine's first run may be of another
    commit or, by a key of `ADDED_BY`, have more weights than another machine's.

    Every run's own commit is in its record, and the tables name them when they differ; in one
    invocation other commits are refused. Without `LATER_KEYS`, too: what earlier versions recorded
    must have the same digest as now.

    Raises:
        ExperimentError: it is something else.
    """
    environment, weights = fingerprint.get("environment"), fingerprint.get("weights", {})
    if not isinstance(environment, dict) or not isinstance(weights, dict):
        raise ExperimentError("no fingerprint of a seed: its environment or weights are no mapping")
    kept = {key: value for key, value in fingerprint.items() if key not in LATER_KEYS}
    added = [part for parts in ADDED_BY.values() for part in parts]
    shared = {
        name: digest for name, digest in weights.items() if not any(part in name for part in added)
    }
    if len(shared) < len(weights):
        kept |= {"weights": shared, "weights_sha256": combined(shared)}
    return kept | {"environment": {k: v for k, v in environment.items() if k != "commit"}}


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether runs of two fingerprints can stand beside each other: what both have is the same.

    More than `comparable`, whose digest cannot tell values of weights that not all models have.
    """
    ours, theirs = one.get("weights", {}), other.get("weights", {})
    same = all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())
    return comparable(one) == comparable(other) and same


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What runs of one seed must share."""

    weights: dict[str, str]
    """SHA-256 of every initial weight by name: dtype, shape and bytes."""
    batches: str
    """SHA-256 of the token ids of the first steps' global batches, in order."""
    data: str
    """``Loaders.fingerprint``: the order and, by the manifests, the tokens of the whole run."""
    model: dict[str, Any]
    """The model's section. Where it differs, the models may have other weights."""
    checked_steps: int
    environment: dict[str, Any]
    """The `COMPARED` part of the environment report."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "weights": self.weights,
            "weights_sha256": combined(self.weights),
            "batches_sha256": self.batches,
            "data_sha256": self.data,
            "model": self.model,
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


def hash_batches(run: RunConfig, steps: int) -> tuple[str, str]:
    """SHA-256 of the tokens and labels of the first ``steps`` global batches, and all data's.

    Read as one data-parallel rank would: the hash does not depend on the number of GPUs. Batches
    are hashed beside the data's manifests because they see what the loader makes of these.
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
    return digest.hexdigest(), loaders.fingerprint


def differences(mine: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """What a run's fingerprint differs in from its seed's reference; empty if nothing."""
    found = _weights(mine, reference)
    if mine["checked_steps"] != reference["checked_steps"]:
        found.append(
            f"{mine['checked_steps']} steps of batches were hashed, "
            f"{reference['checked_steps']} in the reference"
        )
    elif mine["batches_sha256"] != reference["batches_sha256"]:
        found.append(f"the batches of the first {mine['checked_steps']} steps differ")
    data, had = mine.get("data_sha256"), reference.get("data_sha256")
    if None not in (data, had) and data != had:
        found.append(
            "the data of the whole run differ (token files by their manifests, shares, split, "
            "seed or batch size)"
        )
    before, now = reference["environment"], mine["environment"]
    found += [
        f"{key} is {now.get(key)}, it was {before.get(key)}"
        for key in COMPARED
        if now.get(key) != before.get(key)
    ]
    return found


def _weights(mine: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """What the initial weights differ in: values, and names that no key of the model explains."""
    ours, theirs = mine["weights"], reference["weights"]
    if not ours.keys() & theirs.keys():
        return ["initial weights cannot be compared: the models share no parameter name"]
    changed = [n for n in ours.keys() & theirs.keys() if ours[n] != theirs[n]]
    found = [f"initial weights differ: {_some(changed)}"] if changed else []
    missing = _unexplained(theirs.keys() - ours.keys(), mine, reference)
    more = _unexplained(ours.keys() - theirs.keys(), mine, reference)
    no_key = "and no key of its model says why"
    if missing:
        found.append(
            f"{len(missing)} of the reference's {len(theirs)} initial weights are missing, "
            f"{no_key}: {_some(missing)}"
        )
    if more:
        found.append(
            f"{len(more)} initial weights are not among the reference's {len(theirs)}, {no_key}: "
            f"{_some(more)}"
        )
    return found


def _unexplained(names: set[str], mine: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Those of the names that only one of two models has and that their configurations do not say.

    A key that is not in `ADDED_BY` may explain any name. A reference that does not say its model is
    of an earlier version; of what `ADDED_BY` knows, the name itself says which of both has the key.
    """
    ours, theirs = mine.get("model"), reference.get("model")
    if ours is None or theirs is None:
        keys = set(ADDED_BY)
    else:
        keys = {k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)}
    if keys - ADDED_BY.keys():
        return []
    parts = [part for key in keys for part in ADDED_BY[key]]
    return [name for name in names if not any(part in name for part in parts)]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + more


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
