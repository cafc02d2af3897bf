"""How large the gradients of captured heads are, true and wrong, before and after they have gone.

    python benchmarks/gradient_sizes.py [CAPTURE ...]

`megatron-patch probe` tells errors relative to the true gradient. In a head whose rows see one key
each that is next to nothing, and a large ratio says little: this tells what both are. Per head,
Frobenius norms over all rows of the float64 gradients by q and k, and of their errors under plain
numerics, under `compensated` (both emulated) and with attention in float32, whose gradients are
rounded to 16 bits as a trainer's are. Default: the heads of the captures in
tests/experiments/captures. Writes docs/results/gradient_sizes.json. CPU. ``--keep`` adds to the
heads of an earlier result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import captured
import torch

from megatron_patch.experiments import probing

DTYPES = (torch.bfloat16, torch.float16)
Gradients = tuple[torch.Tensor, torch.Tensor]
RUNNERS = {
    "none": probing.emulated(probing.FLASH2),
    "compensated": probing.emulated(probing.COMPENSATED),
    "float32": probing.reference,
}


def exact(one: captured.Head) -> Gradients:
    """dQ and dK in float64."""
    p = torch.softmax(one.scores() * one.scale, -1)
    dp = one.dout @ one.v.T
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * one.scale
    return ds @ one.k, ds.T @ one.q


def computed(one: captured.Head, run: Callable[[probing.Tensors], Any]) -> Gradients:
    """The same by an implementation, from the 16-bit tensors that were captured."""
    tensors = (one.q, one.k, one.v, one.dout)
    exactly = [d for d in DTYPES if all((x.to(d).double() == x).all() for x in tensors)]
    if not exactly:
        raise ValueError(f"{one.place}: its tensors are in none of {DTYPES}")
    q, k, v, dout = (x.to(exactly[0])[None, None] for x in tensors)
    found = run(probing.Tensors(q, k, v, dout, one.scale, True, None))
    return found.dq[0, 0].double(), found.dk[0, 0].double()


def examine(one: captured.Head) -> dict[str, Any]:
    """Figures of one head."""
    true = exact(one)
    sizes = {"dq": float(true[0].norm()), "dk": float(true[1].norm())}
    errors = {}
    for name, run in RUNNERS.items():
        wrong = [a - b for a, b in zip(computed(one, run), true, strict=True)]
        errors[name] = {of: float(x.norm()) for of, x in zip(("dq", "dk"), wrong, strict=True)}
    logit = float(one.scores().max() * one.scale)
    return one.place | {"largest_logit": logit, "true": sizes, "errors": errors}


def main() -> int:
    return captured.write("gradient_sizes", __doc__, examine)


if __name__ == "__main__":
    sys.exit(main())
