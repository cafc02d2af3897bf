"""A run goes on from a checkpoint of its own: with the data and schedule of the steps before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron_patch.schema.problem import ConfigError
from megatron_patch.training import schedule
from megatron_patch.training.resume_rules import SavedData, check_data

if TYPE_CHECKING:
    from megatron_patch.data.loader import Loaders
    from megatron_patch.schema.run import Loaded
    from megatron_patch.training.saver import Saver
    from megatron_patch.training.session import Session


def go_on(loaded: Loaded, session: Session, loaders: Loaders, saver: Saver, step: int) -> list[str]:
    """Compare data with those of the checkpoint that was loaded, and take its schedule. Collective.

    Returns:
        Lines about what a change of the configuration changes.

    Raises:
        ConfigError: data or schedule are others, and no key asks for that.
    """
    run = loaded.config
    own = saver.own
    verdict: list[Any] = [[], []]
    if session.layout.print_rank:
        verdict = list(
            check_data(
                run.directory / "data.sha256",
                loaders.fingerprint,
                step=step if own is not None else 0,  # of another run: none is done here
                identities=loaders.identities,
                saved=None if own is None else SavedData.of(own, loaded),
            )
        )
    torch.distributed.broadcast_object_list(verdict, src=0)
    problems, lines = verdict
    if own is not None:
        found, said = schedule.go_on(run, session.schedule, own, step=step)
        problems, lines = problems + found, lines + said
    if problems:
        raise ConfigError(problems)
    return lines
