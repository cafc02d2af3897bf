"""The shipped tiles compile for sm_80, sm_90 and sm_100 without a GPU; spills are bounded.

Runs in a process of its own, because kernels decorated under the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys, torch
from stable_attention import aot
from stable_attention.hopper import launch as hopper
from stable_attention.hopper.shapes import FORWARD, TILES, width
from stable_attention.problem import Extras, Problem
from stable_attention.triton.backward import backward
from stable_attention.triton.carrier import carrier
from stable_attention.triton.forward import forward
from stable_attention.triton.preprocess import preprocess

arch, few, rows = sys.argv[1], "few" in sys.argv, []
tiles = (
    (64, 64, -1, "compensated", 0.0), (128, 128, 0, "compensated", 0.0), (256, 256, 0, "none", 0.0),
    (192, 128, 0, "compensated", 0.0), (96, 96, 0, "compensated", 0.0),
    (160, 160, -1, "compensated", 0.0), (256, 256, 0, "compensated", 0.1),
    (64, 64, -1, "projected", 0.0), (128, 128, 0, "compensated_projected", 0.0),
    (128, 128, 0, "projected own_x2", 0.0),
)
for d, dv, right, stabilizer, dropout in tiles[::3] if few else tiles:
    stabilizer, *two = stabilizer.split()
    p = Problem(layout="bshd", dtype=torch.bfloat16, batch=2, sq=4096, sk=4096, heads=8,
                kv_heads=8, d=d, dv=dv, tq=8192, tk=8192, scale=d**-0.5, window_right=right,
                backward=two[0] if two else "own", stabilizer=stabilizer,
                dropout_p=dropout, softcap=30.0 if dropout else 0.0)
    extras = Extras(seed=torch.empty(2, dtype=torch.int64, device="meta"))
    q, k, v, g = (torch.empty(2, 4096, 8, w, dtype=p.dtype, device="meta") for w in (d, d, dv, dv))
    with aot.capture(arch) as launches:
        r = forward(p, q, k, v, extras=extras, with_lse=False)  # as in training
        lse = r.row_lse if r.row_lse.dim() > 1 else r.lse
        delta, _ = preprocess(p, g, r.out, low=r.low, lse=lse, dlse=None, extras=extras)
        carrier(g, delta, layout="bshd", into=r.out, sk=p.sk)
        backward(p, g, q, k, v, lse=lse, delta=delta, extras=extras)
        served = (width(d), width(dv)) in FORWARD and stabilizer in ("none", "compensated")
        if arch == "sm90" and served and not dropout:
            hopper.forward(p, q, k, v, extras=extras, with_lse=False)
            if d in TILES:
                hopper.backward(p, g, q, k, v, lse=lse, delta=delta, extras=extras)
    for launch in launches:
        x = aot.compile_launch(launch, arch)
        rows.append(dict(kernel=x.name, d=d, dv=dv, registers=x.registers,
                         more=bool(dropout or two), gluon=launch.kernel.is_gluon(),
                         spills=x.spill_bytes, shared=x.shared, limit=aot.SHARED_LIMIT[arch],
                         warnings=x.warnings))
print(json.dumps(rows))
"""
# Bytes of spill code in a whole kernel. Hopper's tiles were tuned on the chip; those of the other
# architectures are only bounded until someone measures them. 192 is MLA's 192/128: its dK, dV tile
# spills and was still the fastest on an H200.
MAX_SPILLS = {
    "sm90": {64: 64, 96: 64, 128: 128, 160: 64, 192: 640, 256: 800},
    "sm80": {},
    "sm100": {},
}
ELSEWHERE = 1000
# Of a persistent Gluon kernel, outside its loops for the most part; and what ptxas says of it,
# and of row sums of dS, without harm: that it lets one product start where another may still run.
PERSISTENT, HARMLESS = {"key_gradients_kernel": 0, "query_kernel": 1200}, "C7519"
# The generator of dropout's mask takes registers of its own, and so does the second part of dS.
WITH_MORE = 2000
# Two float32 accumulators, an int32 product beside them. Tiles that spill less are slower (H200).
INT8_SPILLS = 3000


@pytest.mark.parametrize(
    ("arch", "which"),
    [
        ("sm90", "few"),  # the golden set has more of its tiles
        ("sm80", "few"),
        ("sm100", "few"),
        pytest.param("sm90", "all", marks=pytest.mark.slow),
        pytest.param("sm80", "all", marks=pytest.mark.slow),
        pytest.param("sm100", "all", marks=pytest.mark.slow),
    ],
)
def test_shipped_tiles_compile_and_fit(arch, which, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arch, which], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    counts = {"few": 20, "all": 50} if arch != "sm90" else {"few": 28, "all": 67}
    assert len(rows) == counts[which]
    for row in rows:
        assert row["shared"] <= row["limit"], row
        spills = MAX_SPILLS[arch].get(row["d"], ELSEWHERE)
        if row["gluon"]:
            spills = PERSISTENT.get(row["kernel"], 900)
        row["warnings"] = [x for x in row["warnings"] if HARMLESS not in x]
        assert row["spills"] <= (WITH_MORE if row["more"] else spills), row
        if arch == "sm90" and (row["d"] < 256 or row["gluon"]):
            assert not row["warnings"], row


INT8 = """
import json, sys, torch
from stable_attention import aot
from stable_attention.int8 import launch
from stable_attention.int8.settings import DEFAULT, PAPER, Settings
from stable_attention.problem import Extras, Problem

arch, rows = sys.argv[1], []
for d in map(int, sys.argv[3].split(",")):
    for settings in (DEFAULT, PAPER, Settings(smooth_q=True))[: 1 if sys.argv[2] == "few" else 3]:
        p = Problem(layout="bshd", dtype=torch.bfloat16, batch=2, sq=4096, sk=4096, heads=8,
                    kv_heads=8, d=d, dv=d, tq=8192, tk=8192, scale=d**-0.5, window_right=0,
                    stabilizer="none")
        x = torch.empty(2, 4096, 8, d, dtype=p.dtype, device="meta")
        with aot.capture(arch) as launches:
            kept = launch.forward(x, x, x, p, Extras(), settings)
            launch.backward(x, x, kept, p, Extras(), settings)
        for one in launches:
            name = one.kernel.fn.__name__
            if name in ("preprocess_kernel", "quantise_kernel", "mean_kernel", "turn_kernel"):
                continue
            found = aot.compile_launch(one, arch)
            rows.append(dict(kernel=name, d=d, spills=found.spill_bytes, shared=found.shared,
                             limit=aot.SHARED_LIMIT[arch], int8=".s32.s8.s8" in found.ptx))
print(json.dumps(rows))
"""


@pytest.mark.parametrize(
    ("arch", "which", "head_dims"),
    [("sm89", "few", "128")]  # of the least shared memory
    + [
        pytest.param(arch, "all", "64,128", marks=pytest.mark.slow)
        for arch in ("sm80", "sm89", "sm90")
    ],
)
def test_int8_kernels_multiply_integers_and_fit(arch, which, head_dims, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", INT8, arch, which, head_dims]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == (3 if which == "few" else 18)
    for row in rows:
        assert row["int8"] and row["shared"] <= row["limit"], row
        assert row["spills"] <= INT8_SPILLS, row


BANDS = """
import json, torch
from stable_attention import aot
from stable_attention.hopper import launch as hopper
from stable_attention.problem import Extras, Problem

rows = []
whole = dict(window_left=1023)
chunks = dict(chunked=True, pos_q=2048, pos_k=1500)
dropped = dict(dropout_p=0.1)
projected = dict(stabilizer="compensated_projected")
cases = ((128, "thd", 1, whole), (64, "bshd", 8, whole), (128, "bshd", 8, dict(softcap=30.0)),
         (256, "thd", 1, whole), (256, "bshd", 8, whole), (192, "thd", 2, whole),
         (64, "bshd", 8, chunks), (128, "bshd", 2, chunks),
         (64, "bshd", 2, dropped), (128, "bshd", 8, dropped),
         (64, "bshd", 8, projected), (128, "bshd", 8, projected), (64, "thd", 1, projected),
         (128, "thd", 1, whole | projected), (64, "bshd", 8, chunks | projected),
         (128, "bshd", 2, chunks | projected), (256, "bshd", 8, projected),
         (192, "bshd", 2, projected), (256, "thd", 1, whole | projected))
# Of more keys than a segment has.
cases = [(2048, *case) for case in cases] + [
    (8192, 256, "bshd", 8, {}), (8192, 256, "bshd", 2, dict(window_right=-1)),
    (8192, 256, "thd", 1, whole), (8192, 256, "bshd", 8, projected),
    (8192, 256, "bshd", 2, dict(window_left=4000, window_right=30)), (8192, 256, "bshd", 8, chunks)]
for n, d, layout, kv_heads, options in cases:
    dv = 128 if d == 192 else d
    p = Problem(layout=layout, dtype=torch.bfloat16, batch=2, sq=n, sk=n, heads=8, d=d, dv=dv,
                kv_heads=kv_heads, tq=2 * n, tk=2 * n, scale=d**-0.5,
                **({"window_right": 0} | options))
    packed = layout == "thd"
    tokens = (2 * n,) if packed else (2, n)
    q, k, v, g = (torch.empty(*tokens, h, width, dtype=p.dtype, device="meta")
                  for h, width in ((8, d), (kv_heads, d), (kv_heads, dv), (8, dv)))
    cu = torch.empty(3, dtype=torch.int32, device="meta") if packed else None
    delta = torch.empty(*((8, 2 * n) if packed else (2, 8, n)), device="meta")
    lse = delta if p.planes == 1 else torch.stack([delta, delta])
    extras = Extras(cu_q=cu, cu_k=cu, seed=torch.empty((), dtype=torch.int64, device="meta"))
    partial = torch.float32 if p.chunked else None
    sums = [torch.empty(x.shape, device="meta") for x in (q, k, v)] if p.chunked else None
    kept = (delta, delta, q) if p.chunked and p.stabilizer != "compensated" else None
    with aot.capture("sm90") as launches:
        if not p.dropout_p:
            hopper.forward(p, q, k, v, extras=extras, out_dtype=partial, with_lse=False)
        if n == 2048:
            hopper.backward(
                p, g, q, k, v, lse=lse, delta=delta, extras=extras, accumulators=sums, kept=kept
            )
    for x in (aot.compile_launch(launch, "sm90") for launch in launches):
        rows.append(dict(kernel=x.name, spills=x.spill_bytes, shared=x.shared, warnings=x.warnings))
print(json.dumps(rows))
"""


@pytest.mark.slow
def test_bands_and_packed_sequences_compile_for_hopper(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", BANDS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for row in json.loads(done.stdout.splitlines()[-1]):
        # Most in the backward pass of a band that sums rows of dS.
        assert row["shared"] <= 232448 and row["spills"] <= 2700, row
        assert not [x for x in row["warnings"] if HARMLESS not in x], row


SEARCH = """
import json, sys
sys.path.insert(0, sys.argv[1])
import search_tiles

common = {"pass": "dq", "width": 256, "banded": True, "bm": 128, "bn": 32, "warps": 8}
records = [common | {"stages": stages, "ms": ms} for stages, ms in ((2, 2.0), (3, 1.0), (1, 3.0))]
print(json.dumps(search_tiles.winners(records, "sm90")))
"""


def test_search_gives_dropout_a_tile_that_fits(tmp_path):
    """Three stages of dQ at d 256 leave no room for the mask: dropout failed there on a GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    folder = Path(__file__).parents[2] / "benchmarks"
    done = subprocess.run(
        [sys.executable, "-c", SEARCH, folder], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert rows == {
        "dq/256/band": [128, 32, 8, 3],
        "dq/256/band/dropout": [128, 32, 8, 2],
    }
