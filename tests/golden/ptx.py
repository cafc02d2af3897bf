"""PTX of the shipped kernels, compiled without a GPU: prints {case: {kernel: SHA-256}} as JSON.

Run as a script by `record`, with the checkout to record on PYTHONPATH and without the interpreter.
It asks the public `stable_attention` for an output and its gradients and catches the launches, so
it needs nothing of how the kernels are called.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # read when Triton is imported

import torch

from stable_attention import aot, ops, stable_attention

# name: (architecture, layout, query heads, key heads, d of Q and K, d of V, options)
COMPENSATED = {"stabilizer": "compensated"}
CASES = {
    "sm90 causal GQA d64": ("sm90", 4, 2, 64, 64, {**COMPENSATED, "causal": True}),
    "sm90 varlen d96": ("sm90", 2, 2, 96, 96, {**COMPENSATED, "causal": True, "packed": True}),
    "sm90 causal d256": ("sm90", 2, 2, 256, 256, {**COMPENSATED, "causal": True}),
    "sm90 dropout d64": ("sm90", 2, 2, 64, 64, {"dropout_p": 0.1, "dropout_seed": 1}),
    "sm80 causal d64": ("sm80", 2, 2, 64, 64, {"causal": True}),
}


def launches_of(case):
    """Arch and launches of one forward and backward pass."""
    arch, heads, kv_heads, d, dv, options = case
    options = dict(options)
    sizes = [(heads, d), (kv_heads, d), (kv_heads, dv)]
    if options.pop("packed", False):
        starts = torch.tensor([0, 256, 512], dtype=torch.int32)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options |= {"max_seqlen_q": 256, "max_seqlen_k": 256, "layout": "thd"}
        shapes = [(512, *size) for size in sizes]
    else:
        shapes = [(2, 256, *size) for size in sizes]
    tensors = [torch.zeros(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    with aot.capture(arch) as launches:
        stable_attention(*tensors, **options).sum().backward()
    return arch, launches


def digest(ptx: str) -> str:
    """Hash of what is executed: no comments, no debug sections."""
    ptx = re.sub(r"//.*", "", ptx.split(".section\t.debug")[0])
    lines = [line.rstrip() for line in ptx.splitlines() if not re.match(r"\s*\.(loc|file)\b", line)]
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()


def main() -> None:
    ops.interpreting = lambda: True  # the tensors are on the CPU, and no kernel runs
    found = {}
    for name, case in CASES.items():
        arch, launches = launches_of(case)
        found[name] = {
            launch.kernel.fn.__name__: digest(aot.compile_launch(launch, arch).ptx)
            for launch in launches
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
