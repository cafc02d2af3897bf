"""`CoreAttention` on context-parallel ranks: the layer's group, the call's own, and none."""

from __future__ import annotations

from typing import Any

import torch
from cp_cases import Case, cut, make_inputs


def core_attention(world: Any, case: Case) -> list[torch.Tensor]:
    """This rank's output with the layer's group, then with a pair for one call, then alone."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patch.attention.core import CoreAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.h * case.d,
        num_attention_heads=case.h,
        num_query_groups=case.kv,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        cuda_graph_modules=[],
        context_parallel_size=world.size,
    )
    groups = ProcessGroupCollection()
    groups.tp = torch.distributed.new_subgroups(1)[0]
    groups.cp = world.groups[world.size]
    groups.hcp = list(world.levels[world.size])
    module = CoreAttention(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=case.mode,
        pg_collection=groups,
        backend="reference",
        options={"gradient_wire": "bf16"},
    )
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
