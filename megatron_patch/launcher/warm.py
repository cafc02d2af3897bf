"""Compile the attention kernels of a run once, before the ranks of a node start.

``python -m megatron_patch.launcher.warm --config X``: one forward and backward of the configured
head dimensions on the node's first GPU fills the node's Triton cache; the ranks find it there.
"""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    """Warm the cache; says what was compiled, or why nothing is."""
    parser = argparse.ArgumentParser(prog="warm", allow_abbrev=False)
    parser.add_argument("--config", required=True)
    args = parser.parse_args(argv)
    from megatron_patch import config

    run = config.load(args.config).config
    if run.attention.backend != "stable_flash":
        print(f"warm-up: attention.backend {run.attention.backend} compiles nothing")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("warm-up: no GPU on this node", file=sys.stderr)
        return 1
    from megatron_patch.schema.model import attention_head_dim, query_groups
    from stable_attention import stable_attention

    m = run.model
    heads = m.num_attention_heads // run.parallel.tensor_model_parallel_size
    groups = query_groups(m) // run.parallel.tensor_model_parallel_size
    width, length = attention_head_dim(m), min(m.seq_length, 4096)
    q, k, v = (
        torch.randn(1, n, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, max(groups, 1), max(groups, 1))
    )
    out = stable_attention(q, k, v, layout="bhsd", causal=True, stabilizer=run.attention.stabilizer)
    assert isinstance(out, torch.Tensor)  # no LSE was asked for
    out.sum().backward()
    torch.cuda.synchronize()
    print(f"warm-up: stable_flash, {heads} heads, {groups} KV heads, head dimension {width}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
