"""Correct BF16 arithmetic for Triton's CPU interpreter (3.6 and 3.7), in a third of its time.

The interpreter keeps a BF16 value as its uint16 bit pattern. Out of the box it truncates
FP32 -> BF16 (a bias, of all things), multiplies bit patterns in ``tl.dot`` and adds them in
element-wise arithmetic: attention of BF16 tensors would come out as noise of size 1e8, and say
nothing. ``install()`` replaces the casts by round to nearest even, and runs element-wise operations
of BF16 operands in FP32 with one rounding of the result, as the hardware does, and dots of 16-bit
operands in float64, rounded once to FP32. It also leaves out what the interpreter does again and
again to no effect.

`numerics`, which every kernel of the library imports, installs it where kernels are interpreted.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any


def bf16_to_f32(bits: Any) -> Any:
    """uint16 BF16 patterns -> float32, exact."""
    import numpy as np

    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Any) -> Any:
    """float32 -> uint16 BF16 patterns, round to nearest even, NaN stays NaN."""
    import numpy as np

    shape = np.shape(values)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(shape)
    up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits.astype(np.uint64) + up) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def install() -> None:
    """Patch Triton's ``InterpreterBuilder`` once; later calls do nothing."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_bf16_exact", False):
        return
    handle = interpreter.TensorHandle
    cast, dot, binary, unary = (
        builder.cast_impl,
        builder.create_dot,
        builder.binary_op,
        builder.unary_op,
    )

    def is_bf16(x: Any) -> bool:
        return x.dtype.scalar == tl.bfloat16

    def widen(x: Any) -> Any:
        return handle(bf16_to_f32(x.data), tl.float32) if is_bf16(x) else x

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target:
            return cast(self, src, dst_type)
        if source == tl.bfloat16:
            wide = widen(src)
            return wide if target == tl.float32 else cast(self, wide, dst_type)
        if target == tl.bfloat16:
            wide = src if source == tl.float32 else cast(self, src, tl.float32)
            return handle(f32_to_bf16(wide.data), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        sixteen = (tl.bfloat16, tl.float16)
        if a.dtype.scalar not in sixteen or b.dtype.scalar not in sixteen:
            return dot(self, widen(a), widen(b), d, *rest)
        # Products of 16 bits are exact in float64, and so, but for 1e-16, is their sum: rounded
        # once, it has the same bits on every CPU and in tiles of every shape, as BLAS's FP32 has
        # not. Both passes of a backward must see the same dP.
        wide = np.matmul(*(widen(x).data.astype(np.float64) for x in (a, b)))
        return handle(wide.astype(np.float32).astype(d.data.dtype) + d.data, d.dtype.scalar)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not (is_bf16(lhs) and is_bf16(rhs)):
            return binary(self, lhs, rhs, op)
        result = op(bf16_to_f32(lhs.data), bf16_to_f32(rhs.data))
        if result.dtype == np.bool_:
            return handle(result, tl.int1)
        return handle(f32_to_bf16(result), tl.bfloat16)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if not is_bf16(arg):
            return unary(self, arg, op)
        return handle(f32_to_bf16(op(bf16_to_f32(arg.data))), tl.bfloat16)

    # The other conversions and operations of the builder call these four through ``self``.
    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    builder.binary_op, builder.unary_op = binary_op, unary_op
    builder._bf16_exact = True
    _faster(interpreter, tl)


def _faster(interpreter: Any, tl: Any) -> None:
    """Do once what the interpreter does at every step; no value changes, and no check is lost."""
    # Integer arithmetic is checked for overflow in ten operations, whose verdict is then dropped:
    # `device_assert` does nothing without the option `debug`.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # Every call of a device function patches all of triton.language anew, which the launch of its
    # kernel has done.
    patch, patched = interpreter._patch_lang, set()

    @functools.cache
    def languages(function: Any) -> frozenset[str]:
        found = (x for x in function.__globals__.values() if x is tl or x is tl.core)
        return frozenset(x.__name__ for x in found)

    def patch_lang(function: Any) -> Any:
        new = languages(function) not in patched
        scope = patch(function) if new else interpreter._LangPatchScope()
        patched.add(languages(function))
        restore = scope.restore

        def end_of_launch() -> None:  # device functions drop their scope
            patched.clear()
            restore()

        scope.restore = end_of_launch
        return scope

    # It keeps its program's place and its language in one place for all threads.
    run, alone = interpreter.GridExecutor.__call__, threading.RLock()

    @functools.wraps(run)
    def run_alone(*arguments: Any, **named: Any) -> Any:
        with alone:
            return run(*arguments, **named)

    interpreter.GridExecutor.__call__ = run_alone

    # This one builds a table of all types at every look into it.
    np_dtype: dict[str, Any] = {}
    look_up = interpreter._get_np_dtype

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in np_dtype:
            np_dtype[name] = look_up(dtype)
        return np_dtype[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, get_np_dtype
