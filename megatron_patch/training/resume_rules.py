"""What a resumed run may change: its configuration, its software, its data.

Values are compared, not texts (`megatron_patch.schema.effective`). Two things are judged where the
checkpoint has been read: data by the hashes of their sequences, the schedule by the learning rates
that the checkpoint goes on with (`training.schedule`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatron_patch.checkpoint import last_checkpoint
from megatron_patch.checkpoint.directory import CheckpointDirectory
from megatron_patch.data.loader import Loaders
from megatron_patch.parallel.first_rank import on_first_rank
from megatron_patch.parallel.setup import Layout
from megatron_patch.runtime.environment import DISTRIBUTIONS
from megatron_patch.runtime.files import write_whole
from megatron_patch.schema import render
from megatron_patch.schema.effective import EARLIER, Absent, changes
from megatron_patch.schema.problem import DEFAULT, ConfigError, Problem
from megatron_patch.schema.run import Loaded
from megatron_patch.training import schedule

DATA_RECORD = "sequences"
"""Key of `Loaders.identities` in what a checkpoint carries beside the state."""

Change = tuple[str, str, str]
"""(key, old, new); a key that one of the two lacks is ``absent`` there."""

_CHANGEABLE = """
    name run_dir parallel attention checkpoint logging stability faults cluster
    training.train_steps training.micro_batch_size training.device training.deterministic
    training.recompute training.eval_interval training.eval_steps training.eval_test
    training.exit_after_minutes training.exit_at_step training.check_finite
    training.compile_fusions training.gradient_accumulation_fusion training.grouped_experts
    training.fp8 optimizer.implementation optimizer.lr optimizer.min_lr optimizer.clip_grad
    optimizer.qk_clip optimizer.schedule_from data.num_workers data.verify model.layer_spec
    model.rope_fusion
"""
CHANGEABLE = tuple(_CHANGEABLE.split())
"""Keys a resumed run may change: they say how, how long and where, not what is trained. Learning
rate and clip are what saves a run that diverges; new values count from the next step on."""

_SCHEDULE = "schedule warmup_steps begin_step decay_steps wsd_decay_steps wsd_decay_style"
SCHEDULE = tuple(f"optimizer.{name}" for name in _SCHEDULE.split())
"""Keys of the schedule: they change under ``optimizer.schedule_from: now`` only. Of `decay_steps`
the checkpoint knows the value in effect, and a configuration does not."""

DATA = ("data.blend", "data.split", "data.train", "data.valid", "data.test", "data.tokenizer")
"""Keys that say where the tokens are; `check_data` compares what they are."""

SOFTWARE = ("python", *DISTRIBUTIONS, "cuda", "cudnn", "nccl", "gpu")
"""Of the environment report: what may change the rounding of a result."""


def check_settings(loaded: Loaded, path: Path) -> tuple[list[Problem], list[str]]:
    """Compare the configuration with that of a run directory in which something was trained.

    Returns what stands against going on, and a line for every allowed change.
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
    refused = _refused(changed, loaded)
    anew = "use another name or run_dir for a new run, or checkpoint.load_from to start from it"
    now = "set it back, or ask for the change with optimizer.schedule_from: now"
    started = f"but the run in {path} was started with"
    problems = [
        Problem(key, f"{new}, {started} {old}; {now if key in SCHEDULE else anew}")
        for key, old, new in refused
    ]
    notes = [
        f"configuration changed since the last attempt: {key}: {old} -> {new}{_effect(key, loaded)}"
        for key, old, new in changed
        if (key, old, new) not in refused and key not in UNLOGGED
    ]
    return problems, notes


def keep_recorded(loaded: Loaded) -> Loaded:
    """The configuration of a run that goes on: defaults are those it recorded, not newer ones.

    Of the keys in `EARLIER` that nobody has set. A record that cannot be read is judged by
    `check_settings`. Without a checkpoint nothing goes on, and what failed before may have failed
    for a value that is recorded.
    """
    path, store = loaded.config.directory, loaded.config.checkpoint_directory
    try:
        if not (last_checkpoint.has_saved(path) or CheckpointDirectory(store).complete_names()):
            return loaded
        record = yaml.safe_load((path / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return loaded
    run, tree = loaded.config, dict(loaded.tree)
    for key, earlier in EARLIER.items():
        section, name = key.split(".")
        before = record.get(section) if isinstance(record, dict) else None
        if loaded.origins.get(key) != DEFAULT or not isinstance(before, dict):
            continue
        value = before.get(name, earlier)
        if isinstance(value, (str, bool, list, type(None))):
            run = replace(run, **{section: replace(getattr(run, section), **{name: value})})
            tree[section] = tree[section] | {name: value}
    return replace(loaded, config=run, tree=tree)


DROPOUT = ("training.micro_batch_size", "parallel.sequence_parallel", "attention.backend",
           "model.layer_spec")  # fmt: skip
"""Keys that decide in which order dropout draws; other layouts are told when they are loaded."""

UNLOGGED = ("name", "run_dir", "optimizer.decay_steps", "optimizer.schedule_from")
"""Changes that need no line, or have one of their own where the schedule goes on."""


def _effect(key: str, loaded: Loaded) -> str:
    """What else a change changes, where it is more than rounding."""
    model, what = loaded.config.model, []
    if key in DROPOUT and model.hidden_dropout + model.attention_dropout > 0:
        what.append("dropout masks")
    balancing = "none" if model.moe is None else model.moe.load_balancing
    if key == DROPOUT[0] and balancing in ("aux_loss", "sinkhorn"):
        what.append("the balancing of experts, which is done in each micro-batch")
    return f" (changes {' and '.join(what)})" if what else ""


def another_run(saved: str, loaded: Loaded) -> str | None:
    """Why a checkpoint saved with the configuration ``saved`` is another run's; None: it is not."""
    refused = _refused(differences(saved, loaded.dump_yaml()), loaded)
    if not refused:
        return None
    listed = "".join(f"\n  {key}: {new}, but it was saved with {old}" for key, old, new in refused)
    return (
        f"another run's checkpoint, by its settings:{listed}\nuse another checkpoint.directory "
        "for a new run, and checkpoint.load_from to start it from this one"
    )


def _refused(changed: list[Change], loaded: Loaded) -> list[Change]:
    now = loaded.config.optimizer.schedule_from == "now"
    free = (*CHANGEABLE, *DATA, *(SCHEDULE if now else ("optimizer.decay_steps",)))
    return [change for change in changed if not _under(change[0], free)]


def _under(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def differences(before: str, after: str) -> list[Change]:
    """Effective values that differ between two configurations as ``Loaded.dump_yaml`` writes them.

    Raises ValueError: ``before`` holds no settings; a YAMLError: it is no YAML.
    """
    trees = [yaml.safe_load(text) for text in (before, after)]
    if not (isinstance(trees[0], dict) and trees[0]):
        raise ValueError("no settings in it")
    return [(key, _text(old), _text(new)) for key, old, new in changes(*trees)]


def _text(value: Any) -> str:
    return str(value) if isinstance(value, (str, Absent)) else render.scalar(value)


def software_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lines about two environment reports: what differs of `SOFTWARE`."""
    return [
        f"software changed since the last attempt: {name}: {before[name]} -> {now[name]}; the "
        "same bits as before are not promised"
        for name in SOFTWARE
        if name in before and name in now and str(before[name]) != str(now[name])
    ]


def continue_run(
    loaded: Loaded,
    layout: Layout,
    loaders: Loaders,
    *,
    scheduler: Any,
    checkpoint: Mapping[str, Any] | None,
    step: int,
) -> list[str]:
    """Compare the data with those of the steps before, and go on with their schedule. Collective.

    Args:
        checkpoint: plain data of the loaded checkpoint of this run; None for a fresh start, and at
            a start from another run's.
        step: steps that this run has done.

    Returns lines about what a change of the configuration changes.

    Raises ConfigError: data or schedule are others, and no key asks for that.
    """
    run = loaded.config
    before: Mapping[str, Any] = checkpoint or {}
    problems, lines = on_first_rank(
        lambda: check_data(
            run.directory / "data.sha256",
            loaders.fingerprint,
            step=step if checkpoint is not None else 0,
            identities=loaders.identities,
            recorded=dict(before.get("extra") or {}).get(DATA_RECORD),
            moved=data_keys(before, loaded),
        ),
        rank=layout.rank,
    )
    if checkpoint is not None:
        found, changes = schedule.go_on(run, scheduler, checkpoint, step=step)
        problems, lines = problems + found, lines + changes
    if problems:
        raise ConfigError(problems)
    return lines


def data_keys(checkpoint: Mapping[str, Any], loaded: Loaded) -> list[Change]:
    """Where the configuration of a checkpoint names other data than this one."""
    text = str(checkpoint.get("config") or "")
    changed = differences(text, loaded.dump_yaml()) if text else []
    return [change for change in changed if _under(change[0], DATA)]


def check_data(
    file: Path,
    fingerprint: str,
    *,
    step: int,
    identities: Mapping[str, str],
    recorded: Mapping[str, str] | None,
    moved: list[Change],
) -> tuple[list[Problem], list[str]]:
    """Compare the data with those of the steps before, then record their fingerprint.

    Args:
        file: ``<run_dir>/data.sha256``; decides where the checkpoint is of an earlier version,
            which did not record the data.
        fingerprint: ``Loaders.fingerprint``: everything the order of samples depends on.
        step: steps done; nothing is compared at step 0.
        recorded: ``Loaders.identities`` when the checkpoint was saved; None: it is of an earlier
            version, or there is none.
        moved: keys by which that checkpoint names other data (`data_keys`).

    Returns what stands against going on, and lines about other evaluation data.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    other = f"are not those the first {step} steps were trained on"
    remedy = "put the old ones back, or start a new run with checkpoint.load_from"
    if recorded is not None:
        if recorded.get("train") != identities["train"]:
            problems = [Problem("data", f"the tokens, or their order, {other}: {remedy}")]
        notes = [
            f"warning: data {split}: not the sequences of the first {step} steps; losses of before "
            "and after are not comparable"
            for split in sorted({*recorded, *identities} - {"train"})
            if recorded.get(split) != identities.get(split)
        ]
    elif step > 0 and file.exists():
        found = file.read_bytes().strip()
        if not re.fullmatch(rb"[0-9a-f]{64}", found):
            text = (
                f"{file} holds {found[:40]!r} and no SHA-256 of the data so far: it is damaged; "
                "put it right, or delete it if the token files are the same as before"
            )
            problems = [Problem("data", text)]
        elif found.decode() != fingerprint:
            text = f"the token files {other} (their manifests differ): {remedy}"
            problems = [Problem("data", text)]
    else:
        unknown = "nothing records which tokens these are: name them as they were named then"
        problems = [
            Problem(key, f"{new}, but the checkpoint was saved with {old}, and {unknown}, or start "
                    "a new run with checkpoint.load_from")
            for key, old, new in moved
        ]  # fmt: skip
    if not problems:
        write_whole(file, fingerprint + "\n")
    return problems, notes
