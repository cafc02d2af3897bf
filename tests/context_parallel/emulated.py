"""A `Case` run by the in-process emulation."""

from __future__ import annotations

from typing import Any

import torch
from cp_cases import Case, Inputs, make_inputs
from emulate import Emulated, emulate

from megatron_patch.context_parallel.api import WIRES


def run(case: Case, given: Inputs | None = None, **changes: Any) -> Emulated:
    """Forward and backward of all virtual ranks."""
    given = make_inputs(case) if given is None else given
    options = case.attention()
    if case.thd:
        real, padded = case.documents(str(given.q.device))
        options |= {"cu_seqlens": real, "cu_seqlens_padded": padded}
    return emulate(
        given.q,
        given.k,
        given.v,
        given.dout,
        size=case.size,
        mode=case.mode,
        backend=case.backend,
        sinks=given.sinks,
        dropout_seed=77,
        want_max_logits=True,
        wire=WIRES[case.gradient_wire],
        o_lo=case.o_lo,
        stabilizer=case.stabilizer,
        **options,
        **changes,
    )


def found(result: Emulated) -> dict[str, torch.Tensor]:
    """In the words of `cp_cases.complaints`."""
    named = {n: getattr(result, n) for n in ("out", "dq", "dk", "dv", "max_logits")}
    return named | ({} if result.dsinks is None else {"dsinks": result.dsinks})
