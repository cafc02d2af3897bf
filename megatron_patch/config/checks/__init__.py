"""What is wrong with a configuration as a whole: `problems` asks every section and every rule.

A section judges its own values (`problems` in `megatron_patch.schema`). A rule that needs two
sections, or what another room can serve, stands here, in the file of the section whose key it
names. Nothing here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_patch.config.checks import (
    attention,
    checkpoint,
    data,
    faults,
    model,
    optimizer,
    parallel,
    stability,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatron_patch.schema.problem import Problem
    from megatron_patch.schema.run import RunConfig

RULES: dict[str, Callable[[RunConfig], Iterator[Problem]] | None] = {
    "model": model.problems,
    "training": None,
    "optimizer": optimizer.problems,
    "data": data.problems,
    "attention": attention.problems,
    "parallel": parallel.problems,
    "checkpoint": checkpoint.problems,
    "logging": None,
    "stability": stability.problems,
    "faults": faults.problems,
    "cluster": None,
}
"""The rules of each section that other sections decide; None: it has none."""


def problems(run: RunConfig, sections: Sequence[str] = ("", *RULES)) -> Iterator[Problem]:
    """Everything about ``sections`` that can be checked without a GPU and without a cluster.

    ``sections``: names of sections; the empty name stands for the keys outside all of them.
    """
    for name in sections:
        section = getattr(run, name) if name else run
        if hasattr(section, "problems"):
            yield from section.problems()
        rules = RULES.get(name)
        if rules is not None:
            yield from rules(run)
