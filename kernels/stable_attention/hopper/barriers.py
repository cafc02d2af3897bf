"""What Gluon lacks for a persistent kernel: operations of one warp, in assembler; additions by TMA;
the hardware's named barriers, which cost a consumer less than an arrival at one in shared memory.

A *ring* is a buffer of N slots with two barriers a slot, one for "full" and one for "empty". Who
waits for a slot passes the parity of the round it is in, which `advance` flips at the end of the
ring; who waits for it to be empty passes the other parity, so that the first round waits for none.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@_core.builtin
def tma_add(desc, offsets, tile, _semantic=None):
    """Add a tile in shared memory to global memory, float32, without returning anything."""
    where = _semantic._convert_to_ir_values(offsets, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, where, tile.handle
    )


@gluon.jit
def advance(slot, parity, SLOTS: gl.constexpr):
    """The next slot of a ring, and the parity of its round."""
    following = slot + 1
    wraps = following == SLOTS
    return gl.where(wraps, 0, following), gl.where(wraps, parity ^ 1, parity)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, SLOTS: gl.constexpr):
    """A barrier for each slot, which COUNT arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def _lanes(x, DTYPE: gl.constexpr):
    """A scalar in each of the 32 lanes of one warp."""
    return gl.full([32], 0, DTYPE, gl.BlockedLayout([1], [32], [1], [0])) + x


@gluon.jit
def next_item(counter, last):
    """Take a number from a counter in global memory, which is 0 again after ``last``; one warp,
    which gets one number."""
    place = _lanes(counter.to(gl.int64), gl.int64)
    most = _lanes(last, gl.int32)
    got = gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 t;
        mov.u32 t, %laneid;
        setp.eq.u32 first, t, 0;
        mov.u32 $0, 0;
        @first atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;
        shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff;
        }""",
        "=&r,l,r", [place, most], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return gl.max(got, 0)


@gluon.jit
def wait_for_turn(turn_ptr, turn):
    """Until ``turn`` others have passed it on; their bulk writes are then visible. One warp."""
    place = _lanes(turn_ptr.to(gl.int64), gl.int64)
    wanted = _lanes(turn, gl.int32)
    gl.inline_asm_elementwise(
        """{
        .reg .pred early;
        .reg .u32 t;
        again:
        ld.acquire.gpu.global.u32 t, [$1];
        setp.lt.s32 early, t, $2;
        @early bra again;
        fence.proxy.async;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [place, wanted], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pass_turn(turn_ptr):
    """Once this warp's bulk writes are complete (a wait of `tma` is for their reads only)."""
    place = _lanes(turn_ptr.to(gl.int64), gl.int64)
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 t;
        cp.async.bulk.wait_group 0;
        fence.proxy.async;
        bar.warp.sync 0xffffffff;
        mov.u32 t, %laneid;
        setp.eq.u32 first, t, 0;
        @first red.release.gpu.global.add.u32 [$1], 1;
        mov.u32 $0, 0;
        }""",
        "=r,l", [place], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _threads(x, WARPS: gl.constexpr):
    """A scalar in every thread of a partition of so many warps."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.full([32 * WARPS], 0, gl.int32, layout) + x


@gluon.jit
def sync_named(barrier, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """Await THREADS threads at a named barrier, those of this partition of WARPS among them.

    Triton uses the barriers 0 to 4, the hardware has 16.
    """
    gl.inline_asm_elementwise(
        "bar.sync $1, " + THREADS + "; mov.u32 $0, $1;",
        "=r,r", [_threads(barrier, WARPS)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrive_named(barrier, THREADS: gl.constexpr):
    """Count these 4 warps at a named barrier and go on."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, " + THREADS + "; mov.u32 $0, $1;",
        "=r,r", [_threads(barrier, 4)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrive_if(barrier, go, THREADS: gl.constexpr, STORED: gl.constexpr):
    """`arrive_named` if ``go``. STORED: once this thread's stores by TMA have read their source.

    That is awaited in any case: a condition would make it a branch, across which ptxas moves
    nothing.
    """
    after: gl.constexpr = "cp.async.bulk.wait_group.read 0; " if STORED else ""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; " + after + "@p bar.arrive $1, " + THREADS
        + "; mov.u32 $0, $1; }",
        "=r,r,r", [_threads(barrier, 4), _threads(go.to(gl.int32), 4)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def warp_sync(x):
    """What this warp's lanes wrote to shared memory is visible to all of them; one warp."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, $1;",
        "=r,r", [_lanes(x, gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


__all__ = [
    "advance",
    "arrive_if",
    "arrive_named",
    "new_barriers",
    "next_item",
    "pass_turn",
    "sync_named",
    "tma_add",
    "wait_for_turn",
    "warp_sync",
]
