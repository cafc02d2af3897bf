"""Attention inside ``torch.compile``: a graph on either side, and nothing of it traced."""

import torch
from cp_cases import Case, cut, make_inputs

from megatron_patch.context_parallel.api import context_parallel_attention


def test_a_compiled_function_breaks_its_graph_around_the_attention(group):
    case = Case(size=1, mode="p2p")
    given = make_inputs(case)
    leaves = [cut(case, x, 0).requires_grad_() for x in (given.q, given.k, given.v)]

    def around(q, k, v):
        out = context_parallel_attention(2 * q, k, v, group=group, backend="reference", causal=True)
        return torch.sin(out)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = []
    for function in (around, torch.compile(around, backend="eager")):
        out = function(*leaves)
        found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    (reason,) = torch._dynamo.utils.counters["graph_break"]
    assert "torch.compiler.disable" in reason
