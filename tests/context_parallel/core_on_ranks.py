"""`CoreAttention` on context-parallel ranks: the layer's group, the call's own, and none."""

from __future__ import annotations

from typing import Any

import megatron_cpu
import torch
from cp_cases import Case, cut, make_inputs


def core_attention(world: Any, case: Case) -> list[torch.Tensor]:
    """This rank's output with the layer's group, then with a pair for one call, then alone."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.tp = torch.distributed.new_subgroups(1)[0]
    groups.cp = world.groups[world.size]
    groups.hcp = list(world.levels[world.size])
    module = megatron_cpu.core_attention(
        case.h, case.d, groups=groups, cp_comm_type=case.mode, num_query_groups=case.kv,
        options={"gradient_wire": "bf16"}, context_parallel_size=world.size,
    )  # fmt: skip
    given = make_inputs(case)

    def call(size: int, rank: int, **fields: Any) -> torch.Tensor:
        import dataclasses

        part = dataclasses.replace(case, size=size)
        q, k, v = (cut(part, x, rank) for x in (given.q, given.k, given.v))
        packed = PackedSeqParams(qkv_format="sbhd", **fields) if fields else None
        return module(q, k, v, None, packed_seq_params=packed).view(*q.shape[:-1], case.dv)

    out = [call(world.size, world.rank)]
    if case.mode != "a2a+p2p":
        out.append(call(2, world.rank % 2, local_cp_size=2, cp_group=world.groups[2]))
    else:
        try:
            call(2, world.rank % 2, local_cp_size=2, cp_group=world.groups[2])
        except ValueError as error:
            assert "needs two groups" in str(error)
        else:
            raise AssertionError("a call's own group has no levels")
    out.append(call(1, 0, local_cp_size=1))
    return out
