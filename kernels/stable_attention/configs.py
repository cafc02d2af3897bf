"""Tile sizes, warps and pipeline stages per (architecture, pass, head dim, feature): a table.

Nothing is tuned while training runs. The rows come from ``configs.json``, written by
benchmarks/search_tiles.py; a key that is missing there uses its full-mask row.

Shape legend: bm query rows, bn key columns of a tile.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stable_attention.problem import UNLIMITED

if TYPE_CHECKING:
    from stable_attention.problem import Problem

# Bytes of keys and values that one group of neighbouring heads may keep in L2.
L2_BUDGET = 12 * 2**20
# Programs that neighbouring heads should have between them: about one a processor.
PROGRAMS = 128
PASSES = ("forward", "dkdv", "dq")
# Columns of ones that `Tile.ones` may name.
ONES = (8, 16)
# Head dims as the kernels see them; 96 and 192 are two tiles each (triton/parts.py).
WIDTHS = (16, 32, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel configuration."""

    bm: int
    bn: int
    warps: int
    stages: int
    segment: int = 1024
    """Keys the tensor cores sum up before "compensated" adds in float32; a multiple of bn. Equal to
    bn: every tile, an iteration late, for all stabilizers but "paper_bf16". 0: all (head dims above
    128, where the second accumulator may not fit into registers)."""
    ones: int = 8
    """Columns of the matrix of ones that sums the rounded P. 16: the sum is an asynchronous Hopper
    product in the shadow of P V, for 2 KiB of shared memory. Additions on the float32 pipes would
    be cheaper, and lack the truncation that P V has: docs/numerics.md."""
    registers: int = 0
    """Most registers a thread may use, for one more program on a processor; 0: no bound."""
    reverse: int = 0
    """1, with a segment of bn: visit key tiles from the last to the first."""
    early: int = 0
    """1: finish a tile's row sums before its product with V, in the shadow of the exponentials.
    0: the compiler places them. Not with ones=16, whose product would be waited for."""
    query_tma: int = 0
    """1: the forward pass reads its queries through a descriptor too; pointers are often faster."""
    tma: bool = field(default=False, kw_only=True)
    """Load tiles through TMA descriptors (16-byte aligned strides only)."""

    def __post_init__(self) -> None:
        """ValueError for fields that the forward kernel cannot combine."""
        late = self.segment == self.bn
        if self.ones not in ONES:
            raise ValueError(f"ones={self.ones}: not one of {ONES}; 8 is the default")
        if self.reverse and not late:
            raise ValueError(
                f"reverse={self.reverse} with segment={self.segment}: tiles are visited from the "
                f"end only where products join late; set segment={self.bn} (= bn) or reverse=0"
            )
        if self.early and self.ones == 16:
            raise ValueError(
                "early=1 with ones=16: an early sum would wait for an asynchronous product; "
                "set ones=8 or early=0"
            )
        if self.segment % self.bn:
            raise ValueError(
                f"segment={self.segment}: not a multiple of bn={self.bn}; take 0, bn or a multiple"
            )


def arch_of(device: torch.device) -> str:
    """ "sm80", "sm90", "sm100", the name of an architecture that `dispatch` refuses, or
    "interpreter" for the CPU."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = _capability(device.index or 0)
    return {8: "sm80", 9: "sm90", 10: "sm100"}.get(major, f"sm{major}{minor}")


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def table() -> dict[str, dict[str, list[int]]]:
    """The shipped table: {arch: {"pass/width/mask": [fields of `Tile` up to ``query_tma``]}}."""
    text = Path(__file__).with_name("configs.json").read_text()
    return json.loads(text)


@functools.cache
def tile_width(d: int) -> int:
    """The smallest of `WIDTHS` that holds a head dim."""
    return next(width for width in WIDTHS if width >= d)


def key(which: str, widths: tuple[int, int], banded: bool) -> str:
    """Table key of a pass at the padded head dims (wider, narrower) of q, k and of v.

    "forward/128/full" where they are equal, "forward/192x128/band" where they are not; ``banded``
    covers causal and every other window.
    """
    wide, narrow = widths
    name = f"{wide}" if wide == narrow else f"{wide}x{narrow}"
    return f"{which}/{name}/{'band' if banded else 'full'}"


def lookup(which: str, problem: Problem, device: torch.device) -> Tile:
    """The tile of a pass (one of `PASSES`) for a problem on a device."""
    assert which in PASSES, which
    narrow, wide = sorted((tile_width(problem.d), tile_width(problem.dv)))
    banded = problem.window_left != UNLIMITED or problem.window_right != UNLIMITED
    return tile_for(
        which,
        arch=arch_of(device),
        widths=(wide, narrow),
        banded=banded,
        dropout=problem.dropout_p > 0,
    )


@functools.cache
def tile_for(
    which: str, *, arch: str, widths: tuple[int, int], banded: bool, dropout: bool = False
) -> Tile:
    """The tile of a pass by architecture and padded head dims (wider, narrower); see `lookup`.

    Two head dims without a row of their own take that of the wider one, banded masks that of full
    attention, dropout that of its row without "/dropout".
    """
    rows = table()[arch]
    wide, narrow = (_row_width(arch, width) for width in widths)
    names = [
        key(which, both, mask)
        for both in ((wide, narrow), (wide, wide))
        for mask in (banded, False)
    ]
    if dropout:
        # The mask needs shared memory, which a tile may not leave.
        names = [name + kind for name in names for kind in ("/dropout", "")]
    row = next(rows[name] for name in names if name in rows)
    return Tile(*row, tma=arch in ("sm90", "sm100"))


def _row_width(arch: str, width: int) -> int:
    # Head dims up to 64 share a row; the interpreter has one row for all.
    return 0 if arch == "interpreter" else max(width, 64)


def head_block(problem: Problem, programs: int) -> int:
    """How many neighbouring query heads advance together so that their keys stay in L2.

    Few, but no fewer than occupy the chip: ``programs`` is what the heads of one key head have.
    """
    per_head = max(1, problem.sk * (problem.d + problem.dv) * 2)
    kv = max(1, L2_BUDGET // per_head, -(-PROGRAMS // max(1, programs)))
    kv = min(kv, problem.kv_heads)
    return 1 << (kv.bit_length() - 1) if problem.group == 1 else kv * problem.group
