"""When a transfer fails: which rank is gone, said by those that are left.

A transfer fails on every survivor, but only some of them were talking to the dead rank; the others
see the survivors leave. So each rank that fails writes down whom it blames, in the store that the
process groups were made with, and reads what the others wrote first.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch.distributed as dist

GRACE_SECONDS = 3.0
"""How long a rank that ran into a timeout waits for the others to say that they are alive."""

_GONE = ("connection reset", "connection closed", "broken pipe", "connection refused", "aborted")


class RankLostError(RuntimeError):
    """A context-parallel rank died or hangs; the text names it."""


def explain(error: RuntimeError, *, group: Any, peers: list[int], what: str) -> RuntimeError:
    """The error to raise for a failed transfer with ``peers`` (ranks of ``group``)."""
    if isinstance(error, RankLostError):
        return error
    ranks = dist.get_process_group_ranks(group)
    text = str(error).strip()
    hung_up = any(sign in text.lower() for sign in _GONE)
    lost, why = [ranks[p] for p in peers], "closed the connection" if hung_up else "did not answer"
    with contextlib.suppress(Exception):  # the store may have died with its host
        lost, why = _inquire(group, ranks, peers, hung_up=hung_up)
    names = " or ".join(f"{r} (context-parallel rank {ranks.index(r)})" for r in lost)
    host = os.environ.get("HOSTNAME", "")
    me = f"rank {dist.get_rank()}" + (f" on {host}" if host else "")
    return RankLostError(
        f"context parallelism: lost rank {names}: it {why} while {me} of the group {ranks} was "
        f"waiting for {what}. Look at that rank's log first. Underlying error: {text}"
    )


def _inquire(
    group: Any, ranks: list[int], peers: list[int], *, hung_up: bool
) -> tuple[list[int], str]:
    """(global ranks that are gone, how we know)."""
    store = dist.distributed_c10d._get_default_store()
    me = dist.get_rank()
    prefix = f"context_parallel_failure/{getattr(group, 'group_name', '')}"

    def messages() -> dict[int, str]:
        there = [r for r in ranks if r != me and store.check([f"{prefix}/{r}"])]
        return {r: store.get(f"{prefix}/{r}").decode() for r in there}

    # A collective says that someone hung up, not who.
    suspects = [ranks[p] for p in peers] if hung_up and len(peers) == 1 else []
    # Someone who failed before us and then left is not the one to blame.
    words = messages()
    suspects = [r for r in suspects if r not in words]
    store.set(f"{prefix}/{me}", ",".join(map(str, suspects)))
    if suspects:
        return suspects, "closed the connection"
    end = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < end:
        words = messages()
        blamed = sorted({int(r) for word in words.values() for r in word.split(",") if r})
        blamed = [r for r in blamed if r != me and r not in words]
        if blamed:
            reporters = ", ".join(str(r) for r, word in words.items() if word)
            return blamed, f"closed the connection to rank {reporters}"
        if len(words) == len(ranks) - 1:
            break
        time.sleep(0.05)
    silent = [r for r in ranks if r != me and r not in words]
    if silent:
        return silent, f"gave no sign of life, also not in the {GRACE_SECONDS:g} s after"
    return [ranks[p] for p in peers], "answered too late; every rank is alive"
