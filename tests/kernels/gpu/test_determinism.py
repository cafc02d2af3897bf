"""Bitwise equality: over repeats, processes, batch sizes and orders."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_cases import DEVICE, Case, make_inputs
from error_rule import Results, run_ours

pytestmark = pytest.mark.gpu
REPEATS = 1000
HERE = Path(__file__).resolve().parent

CASES = [
    "b=2 sq=513 sk=513 hq=8 hk=2 d=64 causal=1 sinks=learned",
    "b=2 sq=256 sk=384 hq=4 hk=4 d=128 dlse=1",
    "layout=thd lens_q=300,5,129 lens_k=300,5,129 hq=4 hk=1 d=128 causal=1 left=100 sinks=learned",
    "sq=200 sk=200 d=96 dropout=0.1 causal=1 dtype=fp16",
    "sq=256 sk=256 d=192 dv=128 causal=1 o_lo=int8",
    "sq=512 sk=512 d=256 causal=1",
    "sq=512 sk=512 hq=4 hk=2 d=192 dv=128",
    "sq=700 sk=700 hq=4 hk=1 d=128 causal=1 deterministic=0",
]


def digest(results: Results) -> str:
    """Hash of every output's bits."""
    joined = hashlib.sha256()
    for name, x in sorted(results.named().items()):
        joined.update(name.encode())
        joined.update(x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return joined.hexdigest()


@pytest.mark.parametrize("line", CASES)
def test_a_thousand_repeats(line: str) -> None:
    """O, LSE, largest logits, dQ, dK, dV and dSink; differences are counted on the device."""
    case = Case.parse(line)
    given = make_inputs(case, DEVICE)
    first = run_ours(case, given, poison=False).named()
    other = torch.cuda.Stream()
    differ = {name: torch.zeros((), dtype=torch.int64, device=DEVICE) for name in first}
    for i in range(REPEATS):
        if i % 50 == 0:
            with torch.cuda.stream(other):  # changes which program runs where and when
                torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda")
        again = run_ours(case, given, poison=False).named()
        assert again.keys() == first.keys()
        for name, x in first.items():
            differ[name] += (x.view(torch.uint8) != again[name].view(torch.uint8)).any()
    counts = {name: int(n) for name, n in differ.items() if int(n)}
    assert not counts, f"of {REPEATS} repeats differ: {counts}\n{case.repro()}"


@pytest.mark.parametrize("line", CASES[:3])
def test_a_fresh_process_gives_the_same_bits(line: str) -> None:
    here = digest(run_ours(Case.parse(line), make_inputs(Case.parse(line), DEVICE), poison=False))
    code = (
        "import sys; sys.path[:0] = sys.argv[1:4]\n"
        "from attention_cases import DEVICE, Case, make_inputs; from error_rule import run_ours\n"
        "from test_determinism import digest\n"
        "case = Case.parse(sys.argv[4])\n"
        "print(digest(run_ours(case, make_inputs(case, DEVICE), poison=False)))\n"
    )
    folders = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    path = os.pathsep.join([str(HERE.parents[2] / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, *folders, line],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == here, done.stderr


def test_batch_one_equals_batch_sixty() -> None:
    batch = 60
    case = Case(b=batch, sq=130, sk=130, hq=4, hk=2, d=64, causal=1, sinks="learned", seed=5)
    given = make_inputs(case, DEVICE)
    whole = run_ours(case, given, poison=False)
    one = replace(case, b=1)
    for i in (0, batch // 3, batch - 1):
        part = make_inputs(one, DEVICE)
        part.sinks = given.sinks
        part.q, part.k, part.v, part.dout = (
            x[i : i + 1].contiguous() for x in (given.q, given.k, given.v, given.dout)
        )
        single = run_ours(one, part, poison=False)
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert torch.equal(getattr(single, name)[0], getattr(whole, name)[i]), (i, name)


@pytest.mark.parametrize("group", [1, 2])
def test_permutations_of_batch_and_heads(group: int) -> None:
    """Heads move with their group of key heads; everything but dSink follows bit by bit."""
    kv_heads, batch_size, rows = 4, 6, 200
    case = Case(
        b=batch_size, sq=rows, sk=rows, hq=kv_heads * group, hk=kv_heads, d=64, causal=1, seed=6
    )
    given = make_inputs(case, DEVICE)
    whole = run_ours(case, given, poison=False)
    batch = torch.randperm(batch_size, device=DEVICE)
    keys = torch.randperm(kv_heads, device=DEVICE)
    heads = (keys[:, None] * group + torch.arange(group, device=DEVICE)).flatten()
    moved = make_inputs(case, DEVICE)
    for name in ("q", "k", "v", "dout"):
        order = keys if name in ("k", "v") else heads
        setattr(moved, name, getattr(given, name)[batch][:, :, order].contiguous())
    found = run_ours(case, moved, poison=False)
    for name in ("out", "dq", "dk", "dv"):
        order = keys if name in ("dk", "dv") else heads
        assert torch.equal(getattr(found, name), getattr(whole, name)[batch][:, :, order]), name
    assert torch.equal(found.lse, whole.lse[batch][:, heads])
