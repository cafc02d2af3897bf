"""Compile the attention kernels of a run once, before the ranks of a node start.

``python -m megatron_patch.launcher.warm --config X``: one forward and backward of every kind of
attention layer on the node's first GPU fills the node's Triton cache; the ranks find it there.
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
    from megatron_patch.attention import registry
    from megatron_patch.attention.backends import BACKENDS

    run = config.load(args.config).config
    warm = BACKENDS[run.attention.backend].warm
    if warm is None:
        print(f"warm-up: attention.backend {run.attention.backend} compiles nothing")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("warm-up: no GPU on this node", file=sys.stderr)
        return 1
    warm(run, registry.layer_kinds(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
