"""The description of a call: options to text and back, remembered problems, traced numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stable_attention import AttentionArgumentError, stable_attention
from stable_attention.describe import describe
from stable_attention.problem import Options, Problem, options_of

OTHER = {
    "layout": "sbhd",
    "scale": 1 / 3,
    "softcap": 1e5,
    "dropout_p": 0.1,
    "batch_offset": 7,
    "head_offset": 2**31 - 2**16,
    "stabilizer": "dynamic_max",
    "o_lo": "int8",
    "beta": -7.25,
    "eps": 1e-30,
    "deterministic": True,
    "backward": "sdpa_flash",
}


def tensors(length: int = 8) -> list[torch.Tensor]:
    return [torch.zeros(2, length, 2, 16, dtype=torch.bfloat16) for _ in range(3)]


def test_every_option_has_another_value_here() -> None:
    """A new field joins the tests below, and has a rule of its own."""
    names = {x.name for x in dataclasses.fields(Options)}
    assert set(OTHER) == names - {"window_left", "window_right"}
    assert Options.of(**OTHER) == Options(**OTHER)


@pytest.mark.parametrize("window", [None, (3, -1), (-1, 0), (2, 5)])
@pytest.mark.parametrize("name", [*OTHER, "all"])
def test_a_spec_says_all_that_was_asked(name: str, window: tuple[int, int] | None) -> None:
    given = OTHER if name == "all" else {name: OTHER[name]}
    q, k, v = tensors()
    problem, extras = describe(q, k, v, Options.of(window=window, **given), dropout_seed=1)
    again = Problem.decode(problem.encode(), q, k, v, sq=8, sk=8, sinks=None, cu_q=None)
    # Batch and length change places in another layout, so that only 8 of 2 tokens differ.
    lengths = {"sq": again.sq, "sk": again.sk}
    assert dataclasses.replace(problem, **lengths) == again
    named = options_of(problem.encode()).keywords()
    assert Options.of(**named) == options_of(problem.encode())
    assert (extras.seed is not None) == (problem.dropout_p > 0)


def test_a_spec_names_no_length() -> None:
    specs = {describe(*tensors(n), Options.of(causal=True))[0].encode() for n in (8, 24, 40)}
    assert specs == {"scale=0.25 window_right=0"}


def test_only_what_is_an_option_is_one() -> None:
    with pytest.raises(TypeError, match="'causl'"):
        Options.of(causl=True)
    with pytest.raises(TypeError, match="'window_left'"):
        Options.of(window_left=3)


def test_what_was_served_once_is_still_checked() -> None:
    """Problems are remembered by values: those that compare equal need not be of a right type."""
    q, k, v = tensors()
    want = stable_attention(q, k, v, causal=True, window=(1, 2))
    for bad in ({"window": (1.0, 2)}, {"causal": 1.5}, {"batch_offset": 0.0}, {"o_lo": None}):
        with pytest.raises(AttentionArgumentError):
            stable_attention(q, k, v, **{"causal": True, "window": (1, 2)} | bad)
    for bad in (k[:1], k[..., :8], k.float()):
        with pytest.raises(AttentionArgumentError):
            stable_attention(q, bad, v, causal=True, window=(1, 2))
    assert torch.equal(stable_attention(q, k, v, causal=1, window=[1, 2]), want)


def test_traced_numbers_are_constants_of_the_graph() -> None:
    """Floats and offsets that a compiled function is given: symbols, but not in a spec."""
    specs = []

    def see(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        for node in graph.graph.nodes:
            specs.extend(x for x in node.args if isinstance(x, str))
        return graph

    def run(q, k, v, scale, offset):
        return stable_attention(q, k, v, scale=scale, head_offset=offset, window=(offset, 0))

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=see)
    for length, scale, offset in ((8, 0.5, 3), (24, 0.25, 4)):
        q, k, v = (torch.randn(2, length, 2, 16).bfloat16() for _ in range(3))
        got = compiled(q, k, v, scale, offset)
        assert torch.equal(got, run(q, k, v, scale, offset))
    assert specs[0] == "scale=0.5 window_left=3 window_right=0 head_offset=3"
    assert specs[-1] == "scale=0.25 window_left=4 window_right=0 head_offset=4"
