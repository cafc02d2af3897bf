"""The GPU grid: groups of cases that share one compilation, so that a group costs one compile.

Compiling is what a GPU run of the grid spends its time on (about 2,000 kernels), so the groups vary
what the compiler does not see. ``grid_groups`` is systematic (features x head dims x dtypes, times
shapes; more than 2,000 cases); ``random_groups`` draws both the features and the shapes.
"""

from __future__ import annotations

import dataclasses
import random

from attention_cases import Case, random_case, random_kernel

DIMS = ((32, 0), (40, 0), (64, 0), (80, 0), (96, 0), (128, 0), (192, 0), (256, 0), (192, 128))
# Head dims of the models people train, in both dtypes with every feature; the others take turns.
BOTH_DTYPES = ((64, 0), (128, 0), (192, 128))
# What the kernels are specialised for; layouts and memory orders are spread over the features.
FEATURES = {
    "full": Case(),
    "causal": Case(causal=1, layout="sbhd"),
    "causal-gqa": Case(causal=1, hq=8, hk=2, layout="bhsd"),
    "mqa": Case(hq=4, hk=1),
    "left": Case(causal=1, left=40, memory="strided"),
    "right": Case(right=9),
    "band": Case(left=33, right=20, layout="bhsd"),
    "sink": Case(causal=1, sinks="learned", dlse=1),
    "sink-off-by-one": Case(sinks="off-by-one", layout="sbhd"),
    "sink-gqa-window": Case(causal=1, left=64, hq=4, hk=2, sinks="learned"),
    "softcap": Case(causal=1, softcap=15.0),
    "dropout": Case(dropout=0.17, layout="sbhd"),
    "dropout-causal": Case(causal=1, dropout=0.1, hq=4, hk=2),
    "int8": Case(causal=1, o_lo="int8"),
    "int8-sink": Case(o_lo="int8", sinks="learned", dlse=1),
    "none": Case(causal=1, stabilizer="none"),
    "fused": Case(causal=1, deterministic=0),
    "fused-gqa": Case(deterministic=0, hq=4, hk=2),
    "thd": Case(layout="thd", lens_q="x", lens_k="x"),
    "thd-causal": Case(layout="thd", causal=1, lens_q="x", lens_k="x", memory="fused"),
    "thd-window-sink": Case(
        layout="thd", causal=1, left=50, sinks="learned", lens_q="x", lens_k="x", dlse=1
    ),
    "thd-gqa-dropout": Case(layout="thd", hq=4, dropout=0.17, lens_q="x", lens_k="x"),
}
SHAPES = (
    (1, 1, 1), (1, 1, 239), (2, 113, 203), (1, 128, 217), (2, 256, 256), (1, 513, 512),
    (3, 65, 64), (1, 700, 130),
)  # fmt: skip
PACKED = (
    ("1", "1", 0, 0),
    ("0,5,33,1,20", "4,0,33,1,40", 3, 0),
    ("64,128,65", "64,128,65", 0, 0),
    ("256,1,100", "1,256,100", 0, 7),
    ("0,0,0", "0,0,0", 4, 0),
    ("300,211", "300,211", 0, 0),
    ("17,64,1,3", "65,64,128,1", 0, 0),
    ("129,0,511", "2,7,640", 6, 5),
)
VALUES = ("gauss", "gauss", "outlier", "positive", "gauss", "gauss", "outlier", "gauss")


def _group(name: str, base: Case, seed: int) -> list[Case]:
    cases = []
    for i, values in enumerate(VALUES):
        common = {"values": values, "seed": seed + i}
        if base.layout == "thd":
            lens_q, lens_k, unused, gaps = PACKED[i]
            common |= {"lens_q": lens_q, "lens_k": lens_k, "unused": unused, "gaps": gaps}
        else:
            common |= dict(zip(("b", "sq", "sk"), SHAPES[i], strict=True))
        cases.append(dataclasses.replace(base, **common))
    return cases


def grid_groups() -> list[list[Case]]:
    """Every feature x head dims, in one or both dtypes, eight shapes each."""
    groups = []
    for f, (name, base) in enumerate(FEATURES.items()):
        for n, (d, dv) in enumerate(DIMS):
            both = ("bf16", "fp16")
            dtypes = both if (d, dv) in BOTH_DTYPES else both[(f + n) % 2 :][:1]
            for dtype in dtypes:
                case = dataclasses.replace(base, d=d, dv=dv, dtype=dtype)
                groups.append(_group(name, case, 1000 * f + 20 * n + (dtype == "fp16")))
    return groups


def large_groups() -> list[list[Case]]:
    """Sizes with enough elements for the 2 % comparison with the vendor kernels."""
    groups = []
    for d, dtype in ((64, "bf16"), (128, "bf16"), (256, "bf16"), (64, "fp16"), (128, "fp16")):
        for causal in (0, 1):
            for hq, hk in ((8, 8), (8, 2)):
                base = Case(d=d, causal=causal, hq=hq, hk=hk, layout="bhsd", dtype=dtype)
                groups.append(
                    [
                        dataclasses.replace(base, b=b, sq=s, sk=s, seed=s + d)
                        for b, s in ((2, 1024), (1, 2048))
                    ]
                )
    return groups


def random_groups(seed: int, cases: int, per_group: int = 14) -> list[list[Case]]:
    """``cases`` random problems, ``per_group`` sharing what the compiler sees."""
    rng = random.Random(seed)
    groups = []
    while cases > 0:
        kernel = random_kernel(rng)
        # Strides and head counts are compiled in too: one memory order and kv_heads a group.
        memory = rng.choice(["plain", "plain", "fused", "strided", "expanded"])
        kv_heads = rng.choice([1, 2, 3])
        fixed = {"memory": memory, "hk": kv_heads, "hq": kv_heads * kernel.hq}
        group = [random_case(rng, small=False, kernel=kernel) for _ in range(min(per_group, cases))]
        groups.append([dataclasses.replace(case, **fixed) for case in group])
        cases -= len(group)
    return groups
