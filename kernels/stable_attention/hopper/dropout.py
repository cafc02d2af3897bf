"""Dropout's mask (`stable_attention.philox`) in the registers of one warpgroup, as bits.

The lane that needs a weight's word is one of several that need words of the same counter. Each lane
makes an equal share of its neighbours' counters, keeps a bit of every word, and lanes exchange bits
by shuffles.

Shape legend: `softmax.LANES` [64, 4] int32: of each of its rows, bits of what a lane holds; bit
j + 16 e belongs to column 8 j + 2 c + e for c = 0..3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from stable_attention.hopper.softmax import LANES

_ROUNDS = 10


def _words(first: str, second: str) -> str:
    """PTX: c0..c3 become the words of counter (first, second, head, batch)."""
    lines = [f"mov.b32 c0, {first}; mov.b32 c1, {second}; mov.b32 c2, head; mov.b32 c3, batch;"]
    for i in range(_ROUNDS):
        lines += [
            "mul.wide.u32 wa, c0, 0xD2511F53; mul.wide.u32 wb, c2, 0xCD9E8D57;",
            "mov.b64 {la, ha}, wa; mov.b64 {lb, hb}, wb;",
            f"xor.b32 c0, hb, c1; xor.b32 c0, c0, ka{i};",
            f"xor.b32 c2, ha, c3; xor.b32 c2, c2, kb{i};",
            "mov.b32 c1, lb; mov.b32 c3, la;",
        ]
    return "\n".join(lines)


def _start() -> str:
    """PTX: registers, the operands by name, and the keys of all rounds."""
    keys = [f"ka{i}, kb{i}" for i in range(_ROUNDS)]
    lines = [
        "{",
        ".reg .b64 wa, wb;",
        ".reg .pred kept;",
        f".reg .b32 {', '.join(keys)};",
        ".reg .b32 c0, c1, c2, c3, la, ha, lb, hb, head, batch, share, lane, t, u, y;",
        ".reg .b32 own, first, bits0;",
        "mov.b32 own, $2; mov.b32 first, $4; mov.b32 head, $6; mov.b32 batch, $8;",
        "mov.b32 ka0, $10; mov.b32 kb0, $12; mov.b32 share, $14;",
        "mov.u32 lane, %laneid;",
    ]
    for i in range(1, _ROUNDS):
        lines.append(f"add.u32 ka{i}, ka{i - 1}, 0x9E3779B9; add.u32 kb{i}, kb{i - 1}, 0xBB67AE85;")
    return "\n".join(lines)


def _keep(word: int, bit: int) -> str:
    return f"setp.hs.u32 kept, c{word}, share; @kept or.b32 bits0, bits0, {1 << bit:#x};"


def _by_key(columns: int) -> str:
    """A lane's two rows are keys, ``first`` is its first query less what makes it the lane's.

    Four lanes need the words of keys r .. r + 3 and r + 8 .. r + 11 for the same queries: each
    makes those of one of both fours for every second query, and the lanes exchange eight queries'
    bits of a key, one byte of four, at a time.
    """
    lines = [_start()]
    lines += [
        # own: row r; key counter (r + 8 h) / 4 for h = bit 2 of the lane, and its bit 3 is e.
        "and.b32 t, lane, 4; shl.b32 t, t, 1; add.u32 own, own, t; shr.u32 own, own, 2;",
        "and.b32 t, lane, 3; shl.b32 t, t, 1; add.u32 first, first, t;",
        "bfe.u32 t, lane, 3, 1; add.u32 first, first, t;",
        "mov.b32 $0, 0; mov.b32 $1, 0;",
        "bfe.u32 y, lane, 2, 2; shl.b32 y, y, 3; and.b32 lane, lane, 0x13;",
    ]
    for eight in range(columns // 64):
        lines.append("mov.b32 bits0, 0;")
        for j in range(8):
            lines += [f"add.u32 t, first, {8 * (8 * eight + j)};", _words("own", "t")]
            lines += [_keep(i, j + 8 * i) for i in range(4)]
        for x in range(4):
            lines += [
                f"or.b32 t, lane, {4 * x}; shfl.sync.idx.b32 u, bits0, t, 0x1f, 0xffffffff;",
                "shr.u32 u, u, y; and.b32 u, u, 255;",
                f"shl.b32 u, u, {16 * (x // 2) + 8 * eight}; or.b32 ${x % 2}, ${x % 2}, u;",
            ]
    lines.append("}")
    return "\n".join(lines)


_KEYS_64 = gl.constexpr(_by_key(64))
_KEYS_128 = gl.constexpr(_by_key(128))


@gluon.jit
def kept_bits(seed_ptr, row, first, head, batch, threshold, N: gl.constexpr):
    """Bits of a tile [64 keys, N queries] whose weights stay.

    Args:
        seed_ptr: int64; row: global index of the tile's first key, a multiple of 4; first: that of
            its first query; head, batch: global too; threshold: 32 bits of `philox.keep_mask`'s.
    """
    seed = gl.load(seed_ptr)
    zero = gl.zeros([64, 4], gl.int32, LANES)
    rows = zero + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LANES)), 1) + row
    PTX: gl.constexpr = _KEYS_64 if N == 64 else _KEYS_128
    return gl.inline_asm_elementwise(
        PTX, "=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [
            rows, zero + first, zero + head, zero + batch, zero + seed.to(gl.int32),
            zero + (seed >> 32).to(gl.int32), zero + threshold,
        ],
        dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def dropped(x, bits):
    """x [64, N] of a product, 0 where its bit is 0."""
    kept: gl.constexpr = x.type.layout
    y = gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])
    split: gl.constexpr = y.type.layout
    eights: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, split)))
    ones: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, split)))
    c8 = gl.arange(0, x.shape[1] // 8, eights)
    c1 = gl.arange(0, 2, ones)
    c8 = gl.expand_dims(gl.expand_dims(gl.expand_dims(c8, 0), 2), 3)
    c1 = gl.expand_dims(gl.expand_dims(gl.expand_dims(c1, 0), 1), 2)
    own = gl.convert_layout(bits, gl.SliceLayout(1, gl.SliceLayout(3, split)), assert_trivial=True)
    own = gl.expand_dims(gl.expand_dims(own, 1), 3)
    y = gl.where(((own >> (c8 + 16 * c1)) & 1) != 0, y, 0.0)
    return gl.convert_layout(gl.reshape(y, [x.shape[0], x.shape[1]]), kept, assert_trivial=True)


__all__ = ["dropped", "kept_bits"]
