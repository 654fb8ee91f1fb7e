"""Number types inside kernels, the same compiled and interpreted.

Triton's interpreter keeps bfloat16 and FP8 values as integers: arithmetic on them gives garbage, casts to them do not
round to nearest. Kernels therefore widen what they load with `wide`, store `narrow` values and multiply with `dot`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# Four E4M3 → four bfloat16, two in a register: their bits in the place of those of a number 2^-120 times as large, and
# times 2^120. What the compiler makes of a cast goes over float16 and float32, at a quarter of the rate.
# NaN becomes 480: a cache has none, since what is written is bounded.
_PAIR = (
    "prmt.b32 t, $2, 0, %s; and.b32 s, t, 0x80008000; shr.u32 t, t, 4; lop3.b32 t, t, 0x07f007f0, s, 0xea; "
    "fma.rn.bf16x2 $%d, t, m, z; "
)
_E4M3_BF16 = tl.constexpr(
    "{ .reg .b32 t, s, m, z; mov.b32 m, 0x7b807b80; mov.b32 z, 0x80008000; "
    + _PAIR % ("0x1404", 0)
    + _PAIR % ("0x3424", 1)
    + "}"
)
INTERPRETED = tl.constexpr(not isinstance(tl.cdiv, triton.runtime.JITFunction))


def inlined(function: Callable[..., Any]) -> Any:
    """Decorates functions that kernels call.

    The interpreter takes a millisecond to enter a function of Triton's, and runs plain ones just as well.
    """
    return function if INTERPRETED.value else triton.jit(function)


@inlined
def wide(x):
    """x in float32."""
    return x.to(tl.float32)


@inlined
def narrow(x, dtype: tl.constexpr):
    """float32 x in a narrower type, rounded to nearest, ties to even; FP8 (E4M3) is bounded to ±448."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -448.0, 448.0)
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            bits += 0x7FFF + ((bits >> 16) & 1)
            return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        if dtype == tl.float8e4nv:
            return _narrow_e4m3(x)
    return x.to(dtype)


@inlined
def _narrow_e4m3(x):
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    steps = (tl.abs(x) * 512.0 + 8388608.0) - 8388608.0  # 2^23 leaves whole numbers, of smallest subnormals here
    code = tl.where(tl.abs(x) < 0.015625, steps.to(tl.uint32), normal)
    return (code | sign).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@inlined
def operand(x, dtype: tl.constexpr):
    """x in the type in which it is to be multiplied."""
    if INTERPRETED:
        return wide(x)
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_E4M3_BF16, "=&r,=&r,r", [x], tl.bfloat16, True, 4)
    return x.to(dtype)


@inlined
def dot(a, b, total, ZERO: tl.constexpr = False):
    """a · b + total, accumulated in float32; float32 operands are multiplied as such, never as TF32.

    A row's result does not depend on the other rows. The interpreter, whose products of float32 round by a row's place,
    makes them in float64. Matrix units of Hopper cards keep 14 bits of sums of FP8, so a sum is not left in them for
    longer than one product (DeepSeek-V3, arXiv:2412.19437, section 3.3.2), which costs nothing if `total` is ZERO.
    """
    if INTERPRETED:
        product = tl.dot(wide(a).to(tl.float64), wide(b).to(tl.float64), out_dtype=tl.float64)
        return total + product.to(tl.float32)
    if a.dtype == tl.float8e4nv and not ZERO:
        return tl.dot(a, b, total, max_num_imprecise_acc=a.shape[1])
    return tl.dot(a, b, total, input_precision="ieee")
