"""What a resumed run may change: its configuration, its software, its data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megatron_patch.runtime.environment import DISTRIBUTIONS
from megatron_patch.runtime.files import write_whole
from megatron_patch.schema.problem import DEFAULT, Problem

if TYPE_CHECKING:
    from megatron_patch.schema.run import Loaded

Change = tuple[str, str, str]
"""(key, old, new); a key that one of the two lacks is ``absent`` there."""

CHANGEABLE = (
    "name",
    "run_dir",
    "training.train_steps",
    "training.micro_batch_size",
    "training.device",
    "training.deterministic",
    "training.recompute",
    "training.eval_interval",
    "training.eval_steps",
    "training.exit_after_minutes",
    "training.exit_at_step",
    "training.check_finite",
    "optimizer.implementation",
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.clip_grad",
    "parallel",
    "attention",
    "checkpoint",
    "logging",
    "stability",
    "faults",
    "data.num_workers",
    "data.verify",
    "model.layer_spec",
    "cluster",
)
"""Keys a resumed run may change: they say how, how long and where, not what is trained. Learning
rate and clip are what saves a run that diverges; new values count from the next step on."""

SOFTWARE = ("python", *DISTRIBUTIONS, "cuda", "cudnn", "nccl", "gpu")
"""Of the environment report: what may change the rounding of a result."""


def check_settings(loaded: Loaded, path: Path) -> tuple[list[Problem], list[str]]:
    """Compare the configuration with that of a run directory in which something was trained.

    Returns:
        What stands against going on, and a line for every allowed change.
    """
    if loaded.config.checkpoint.resume == "never":
        text = (
            f"never, but {path} holds a run already; choose another name or run_dir, or "
            "set checkpoint.resume: auto to continue it"
        )
        return [Problem("checkpoint.resume", text)], []
    saved = path / "config.yaml"
    if not saved.exists():
        return [], []
    try:
        changed = differences(saved.read_text(), loaded.dump_yaml())
    except (ValueError, yaml.YAMLError) as error:
        text = (
            f"{saved} says what the run was started with, and is damaged "
            f"({str(error).splitlines()[0]}): put it back, or delete it if you are sure that the "
            "settings are the same"
        )
        return [Problem("run_dir", text)], []
    advice = "use another name or run_dir for a new run, or checkpoint.load_from to start from it"
    problems = [
        Problem(key, f"{new}, but the run in {path} was started with {old}; {advice}")
        for key, old, new in _refused(changed, loaded)
    ]
    notes = [
        f"configuration changed since the last attempt: {key}: {old} -> {new}"
        for key, old, new in changed
        if _may_change(key) and key not in ("name", "run_dir")
    ]
    return problems, notes


def another_run(saved: str, loaded: Loaded) -> str | None:
    """Why a checkpoint saved with the configuration ``saved`` is not this run's, by the same rule.

    The run directory's own copy cannot tell: a new one may name an old ``checkpoint.directory``.
    """
    refused = _refused(differences(saved, loaded.dump_yaml()), loaded)
    if not refused:
        return None
    listed = "".join(f"\n  {key}: {new}, but it was saved with {old}" for key, old, new in refused)
    return (
        f"another run's checkpoint, by its settings:{listed}\nuse another checkpoint.directory "
        "for a new run, and checkpoint.load_from to start it from this one"
    )


def _refused(changed: list[Change], loaded: Loaded) -> list[Change]:
    def came_with_an_update(key: str, old: str) -> bool:  # and nobody has set it
        return old == "absent" and loaded.origins.get(key) == DEFAULT

    return [c for c in changed if not (_may_change(c[0]) or came_with_an_update(c[0], c[1]))]


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(allowed + ".") for allowed in CHANGEABLE)


def differences(before: str, after: str) -> list[Change]:
    """Changes between two resolved configurations as ``Loaded.dump_yaml`` writes them.

    Raises:
        ValueError: ``before`` holds no settings; a YAMLError: it is no YAML.
    """
    # Both texts come from one renderer, so scalars are compared as they are written.
    trees = [yaml.load(text, Loader=yaml.BaseLoader) for text in (before, after)]
    if not (isinstance(trees[0], dict) and trees[0]):
        raise ValueError("no settings in it")
    old, new = map(_flat, trees)
    keys = list(dict.fromkeys([*new, *old]))
    return [
        (k, old.get(k, "absent"), new.get(k, "absent")) for k in keys if old.get(k) != new.get(k)
    ]


def _flat(node: Any, path: str = "") -> dict[str, str]:
    """Dotted path -> text of every scalar."""
    if isinstance(node, dict):
        items = [(str(k), v) for k, v in node.items()]
    elif isinstance(node, list):
        items = [(str(n), v) for n, v in enumerate(node)]
    else:
        return {path: str(node)}
    flat: dict[str, str] = {} if items else {path: "[]" if isinstance(node, list) else "{}"}
    for key, value in items:
        flat |= _flat(value, f"{path}.{key}" if path else key)
    return flat


def software_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lines about two environment reports: what differs of `SOFTWARE`."""
    return [
        f"software changed since the last attempt: {name}: {before[name]} -> {now[name]}; the "
        "same bits as before are not promised"
        for name in SOFTWARE
        if name in before and name in now and str(before[name]) != str(now[name])
    ]


def check_data(file: Path, fingerprint: str, *, step: int) -> list[Problem]:
    """Compare the data's fingerprint with that of the steps before, then record it.

    Args:
        file: ``<run_dir>/data.sha256``.
        fingerprint: ``Loaders.fingerprint``: everything the order of samples depends on.
        step: steps done; nothing is compared at step 0.
    """
    before = file.read_bytes().strip() if step > 0 and file.exists() else None
    if before is not None and not re.fullmatch(rb"[0-9a-f]{64}", before):
        text = (
            f"{file} holds {before[:40]!r} and no SHA-256 of the data so far: it is damaged; "
            "put it right, or delete it if the token files are the same as before"
        )
        return [Problem("data", text)]
    if before is not None and before.decode() != fingerprint:
        text = (
            f"the token files are not those the first {step} steps were trained on (their "
            "manifests differ): put the old ones back, or start a new run with "
            "checkpoint.load_from"
        )
        return [Problem("data", text)]
    write_whole(file, fingerprint + "\n")
    return []
