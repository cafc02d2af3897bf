"""Dropout's bits of the sm_90 kernels, without a GPU: their PTX on 32 lanes of integers."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from stable_attention.hopper import dropout
from stable_attention.reference.dropout import keep_mask

SEED, HEAD, BATCH, SHARE = -81985529216486896, 3, 5, 0.37
Lanes = np.ndarray


def run(ptx: str, operands: dict[str, Lanes]) -> tuple[Lanes, Lanes]:
    """What the statements that `dropout` uses do; a register is 32 lanes of uint64."""
    known: dict[str, Lanes] = dict(operands)
    lanes = np.arange(32, dtype=np.uint64)
    low = np.uint64(2**32 - 1)

    def value(name: str) -> Lanes:
        if name == "%laneid":
            return lanes
        if name in known:
            return known[name]
        return np.full(32, int(name, 0), dtype=np.uint64)

    plain = {
        "mov": lambda a: a,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        "add": lambda a, b: (a + b) & low, "shr": np.right_shift,
        "shl": lambda a, b: (a << b) & low, "mul": np.multiply,
        "bfe": lambda a, at, n: (a >> at) & ((np.uint64(1) << n) - np.uint64(1)),
        "setp.hs": np.greater_equal,
        "shfl.sync.idx": lambda a, lane, *_: a[lane.astype(int)],
    }  # fmt: skip
    for statement in re.sub(r"\{\n|\n\}$", "", ptx).replace("\n", " ").split(";"):
        statement = statement.strip()
        if not statement or statement.startswith(".reg"):
            continue
        guard = None
        if statement.startswith("@"):
            guard, statement = statement[1:].split(" ", 1)
        operation, rest = statement.split(" ", 1)
        if operation == "mov.b64":
            a, b, whole = (x.strip(" {}") for x in rest.split(","))
            known[a], known[b] = value(whole) & low, value(whole) >> np.uint64(32)
            continue
        target, *sources = (x.strip() for x in rest.split(","))
        name = next(x for x in sorted(plain, key=len, reverse=True) if operation.startswith(x))
        found = plain[name](*map(value, sources))
        known[target] = found if guard is None else np.where(known[guard], found, known[target])
    return known["$0"], known["$1"]


@pytest.mark.parametrize("columns", [64, 128])
def test_bits_are_those_of_the_portable_mask(columns: int) -> None:
    row0, column0, warp = 192, 384, 2
    ptx = {64: dropout._KEYS_64, 128: dropout._KEYS_128}[columns].value
    lanes = np.arange(32, dtype=np.uint64)
    rows = np.uint64(row0 + 16 * warp) + lanes // np.uint64(4)
    whole = lambda x: np.full(32, x % 2**32, dtype=np.uint64)  # noqa: E731
    given = {
        "$2": rows, "$4": whole(column0), "$6": whole(HEAD), "$8": whole(BATCH),
        "$10": whole(SEED), "$12": whole(SEED >> 32), "$14": whole(int(SHARE * 2**32)),
    }  # fmt: skip
    bits = run(ptx, given)
    a, b = (torch.arange(x, x + n) for x, n in ((row0, 64), (column0, columns)))
    keep = keep_mask(
        SEED, SHARE, batches=torch.tensor([BATCH]), heads=torch.tensor([HEAD]),
        rows=b, columns=a,
    )[0, 0]  # fmt: skip
    wanted = keep.T[16 * warp : 16 * warp + 16]
    for half, words in enumerate(bits):
        for lane in range(32):
            for j in range(columns // 8):
                for e in range(2):
                    kept = bool((int(words[lane]) >> (j + 16 * e)) & 1)
                    row, column = lane // 4 + 8 * half, 8 * j + 2 * (lane % 4) + e
                    assert kept == bool(wanted[row, column]), (half, lane, j, e)
