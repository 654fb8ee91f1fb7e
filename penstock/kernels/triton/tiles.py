"""Tiled products x · wᵀ over plain, coded and eight-bit weights, for whole matrices and for experts' ones.

A program holds a tile [BN, BM] of the transposed result: weights are the left operand, so that a decode step of few
rows still fills the matrix unit and unpacked codes go from registers into it. The inputs of a row fall into segments at
boundaries that depend on the weight alone; each is summed from zero and segments are added in order, whether one
program takes them all or each has its own (split-K). A row's result therefore does not depend on how many rows there
are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.activations import gated
from penstock.kernels.triton.numbers import INTERPRETED, dot, inlined, narrow, operand, wide

PLANES = tl.constexpr(8)

# Two words → a field of their lower or upper halves, as two numbers of 16 bits. Registers: 1 and 2 are the words, 3
# (and 4) selects halves, 5 (and 6) shifts, 7 holds two numbers that are added at last.
_FIELDS = "{ .reg .b32 t, s, o; prmt.b32 t, $1, $2, $3; shr.u32 t, t, $5; "
_NUMBER = "lop3.b32 t, t, 0x000f000f, %s, 0xea; mov.b32 o, %s; fma.rn.%s $0, t, o, $7; }"
_E2M1 = (
    "shl.b32 s, t, 12; and.b32 s, s, 0x80008000; shl.b32 t, t, %s; lop3.b32 t, t, %s, s, 0xea; mov.b32 o, %s; "
    "mov.b32 s, 0x80008000; fma.rn.%s $0, t, o, s; }"
)
_AFFINE_BF16 = tl.constexpr(_FIELDS + _NUMBER % ("0x43004300", "0x3f803f80", "bf16x2"))
_AFFINE_FP16 = tl.constexpr(_FIELDS + _NUMBER % ("0x64006400", "0x3c003c00", "f16x2"))
_SIXTEENS_BF16 = tl.constexpr(_FIELDS + _NUMBER % ("0x45004500", "0x3f803f80", "bf16x2"))
_SIXTEENS_FP16 = tl.constexpr(_FIELDS + _NUMBER % ("0x74007400", "0x3c003c00", "f16x2"))
_E2M1_BF16 = tl.constexpr(_FIELDS + _E2M1 % ("6", "0x01c001c0", "0x7e807e80", "bf16x2"))
_E2M1_FP16 = tl.constexpr(_FIELDS + _E2M1 % ("9", "0x0e000e00", "0x74007400", "f16x2"))


@triton.jit
def fields(words, plane, WIDTH: tl.constexpr):
    """The fields of a plane in words."""
    return (words.to(tl.int32) >> (plane * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def _either(codes, bit: tl.constexpr, table, first: tl.constexpr):
    """What codes choose from `first` on among 2 · bit numbers, by the bits up to `bit`."""
    if bit == 1:
        zero, one = tl.load(table + first), tl.load(table + first + 1)
    else:
        zero, one = _either(codes, bit // 2, table, first), _either(codes, bit // 2, table, first + bit)
    return tl.where((codes & bit) != 0, one, zero)


@triton.jit
def numbers_of(codes, table, KIND: tl.constexpr):
    """What codes stand for, in float32."""
    if KIND == "e2m1":  # the bits of float32 with the exponent 126 too small
        return (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    if KIND == "table":
        return _either(codes, 8, table, 0)  # from registers: 2.5 times as fast as looking up in memory
    return codes.to(tl.float32)


@triton.jit
def coded(lower, upper, weight, place, plane, CODES: tl.constexpr):
    """The values [N, S] of a plane of words, in float32; the scales of their groups lie at `place` [N]."""
    KIND: tl.constexpr = CODES.kind
    LOW: tl.constexpr = CODES.low
    HIGH: tl.constexpr = CODES.high
    OFFSETS: tl.constexpr = CODES.offsets
    codes = fields(lower, plane, LOW)
    if HIGH:
        codes |= fields(upper, plane, HIGH) << LOW
    value = numbers_of(codes, weight.table, KIND)
    scale = wide(tl.load(weight.scales + place))[:, None]
    if OFFSETS == "minimums":
        return value * scale + wide(tl.load(weight.offsets + place))[:, None]
    if OFFSETS == "zeros":
        return (value - wide(tl.load(weight.offsets + place))[:, None]) * scale
    return (value - CODES.zero) * scale


@triton.jit
def _halves(words, like, plane: tl.constexpr, zero: tl.constexpr, KIND: tl.constexpr):
    """A plane of four-bit codes in a type of 16 bits, two at a time: their bits beside those of a power of two.

    The power is subtracted again with the zero point. Kim et al. 2022 (arXiv:2211.10017), section 3. "sixteens" are the
    upper halves of eight bits, times 16; the zero point is a multiple of 16 then.
    """
    selector = tl.full((1, 1), 0x5410 if plane < 4 else 0x7632, tl.int32)
    shift = tl.full((1, 1), 4 * (plane % 4), tl.int32)
    bf16: tl.constexpr = like.dtype == tl.bfloat16
    if KIND == "e2m1":
        asm: tl.constexpr = _E2M1_BF16 if bf16 else _E2M1_FP16
        return tl.inline_asm_elementwise(asm, "=r,r,r,r,r,r,r", [words, selector, shift], like.dtype, True, 2)
    times: tl.constexpr = 16.0 if KIND == "sixteens" else 1.0
    power: tl.constexpr = (128.0 if bf16 else 1024.0) * times
    minus = tl.full((1, 1), -power - zero, like.dtype)  # a constant, so that codes stay in registers
    units: tl.constexpr = _AFFINE_BF16 if bf16 else _AFFINE_FP16
    sixteens: tl.constexpr = _SIXTEENS_BF16 if bf16 else _SIXTEENS_FP16
    code: tl.constexpr = sixteens if KIND == "sixteens" else units
    return tl.inline_asm_elementwise(code, "=r,r,r,r,r,r,r,r", [words, selector, shift, minus], like.dtype, True, 2)


@triton.jit
def _operand(lower, upper, table, like, plane: tl.constexpr, CODES: tl.constexpr):
    """The numbers of a plane without their scales, in the type of the activations they are multiplied with."""
    KIND: tl.constexpr = CODES.kind
    LOW: tl.constexpr = CODES.low
    HIGH: tl.constexpr = CODES.high
    ZERO: tl.constexpr = CODES.zero
    if not INTERPRETED and LOW == 4 and HIGH == 0 and KIND != "table" and like.dtype != tl.float32:
        return _halves(lower, like, plane, ZERO, KIND)
    codes = fields(lower, plane, LOW)
    if HIGH:
        codes |= fields(upper, plane, HIGH) << LOW
    value = numbers_of(codes - ZERO if KIND == "affine" else codes, table, KIND)
    if INTERPRETED:
        return value
    return value.to(like.dtype)


@triton.jit
def _plane_product(fresh, part, lower, upper, weight, group, plane: tl.constexpr, CODES: tl.constexpr):
    """fresh + a plane's numbers · part, without their scales; both halves of eight bits are multiplied by themselves,

    which takes a third of the instructions that joining them would.
    """
    KIND: tl.constexpr = CODES.kind
    LOW: tl.constexpr = CODES.low
    HIGH: tl.constexpr = CODES.high
    OFFSETS: tl.constexpr = CODES.offsets
    ZERO: tl.constexpr = CODES.zero
    if not INTERPRETED and KIND == "affine" and LOW == 4 and HIGH == 4 and part.dtype != tl.float32:
        fresh = dot(_halves(lower, part, plane, ZERO % 16, "affine"), part, fresh)
        value = _halves(upper, part, plane, ZERO // 16 * 16, "sixteens")
    else:
        value = _operand(lower, upper, weight.table, part, plane, CODES)
    if OFFSETS == "zeros":
        value -= wide(tl.load(weight.offsets + group)).to(value.dtype)[:, None]
    return dot(value, part, fresh)


@triton.jit
def _codes_block(
    acc, x, weight, x_row, w_row, real, block, inputs, CODES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """acc += the block of 8 · span inputs. Scales are applied to the products of `run` planes, which share them."""
    SPAN: tl.constexpr = CODES.span
    GROUP: tl.constexpr = CODES.group
    RUN: tl.constexpr = CODES.run
    OFFSETS: tl.constexpr = CODES.offsets
    column = tl.arange(0, SPAN)
    place = w_row[:, None] * weight.words + block * SPAN + column[None, :]
    lower = tl.load(weight.low + place)
    upper = lower
    if weight.high is not None:
        upper = tl.load(weight.high + place)
    for run in tl.static_range(PLANES // RUN):
        first = block * (PLANES * SPAN) + run * (RUN * SPAN)
        group = w_row + tl.minimum(first // GROUP, inputs // GROUP - 1).to(tl.int64) * weight.rows
        fresh = tl.zeros(acc.shape, tl.float32)
        sums = fresh
        for each in tl.static_range(RUN):
            k = first + each * SPAN + column
            mask = real[None, :] if EVEN else (real[None, :] & (k < inputs)[:, None])
            part = tl.load(x.elements + x_row[None, :] + k[:, None], mask=mask, other=0.0)
            if OFFSETS == "minimums":
                ones = operand(tl.full((acc.shape[0], SPAN), 1.0, tl.float32), part.dtype)
                sums = dot(ones, part, sums)  # of x, in every row
            fresh = _plane_product(fresh, part, lower, upper, weight, group, run * RUN + each, CODES)
        acc += fresh * wide(tl.load(weight.scales + group))[:, None]
        if OFFSETS == "minimums":
            acc += sums * wide(tl.load(weight.offsets + group))[:, None]
    return acc


@triton.jit
def _plain_block(
    acc, x, weight, x_row, source, w_row, real, block, inputs, CODES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """acc += a block of values that are multiplied as they lie."""
    KIND: tl.constexpr = CODES.kind
    TILED: tl.constexpr = CODES.tiled
    BK: tl.constexpr = TILE.inputs
    EVEN: tl.constexpr = TILE.even
    k = block * BK + tl.arange(0, BK)
    if EVEN:
        value = tl.load(weight.low + w_row[:, None] * inputs + k[None, :])
        part = tl.load(x.elements + x_row[None, :] + k[:, None], mask=real[None, :], other=0.0)
    else:
        value = tl.load(weight.low + w_row[:, None] * inputs + k[None, :], mask=(k < inputs)[None, :], other=0.0)
        part = tl.load(x.elements + x_row[None, :] + k[:, None], mask=real[None, :] & (k < inputs)[:, None], other=0.0)
    if KIND == "int8":  # branches, not returns: some versions of Triton compile what stands behind a return
        acc = tl.dot(value, part, acc, out_dtype=tl.int32)
    elif TILED:
        fresh = dot(value, part, tl.zeros(acc.shape, tl.float32), True)
        w_scale = tl.load(weight.scales + block * tl.cast(weight.rows, tl.int64) + w_row)
        x_scale = tl.load(x.scales + source * x.groups + block, mask=real, other=0.0)
        acc += fresh * w_scale[:, None] * x_scale[None, :]
    else:
        acc = dot(value, part, acc)
    return acc


@triton.jit
def _tile(tiles_n, tiles_m, NEAR: tl.constexpr):
    """The tile of a program: NEAR tiles of rows take turns over a weight, which stays in the cache."""
    program = tl.program_id(0)
    first = program // (NEAR * tiles_n) * NEAR
    size = tl.minimum(tiles_m - first, NEAR)
    place = program % (NEAR * tiles_n)
    return place // size, first + place % size


@inlined
def _segment(
    x, weight, x_row, source, w_row, real, begin, end, inputs, CODES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sum [outputs, rows] of blocks [begin, end)."""
    KIND: tl.constexpr = CODES.kind
    LOW: tl.constexpr = CODES.low
    TILED: tl.constexpr = CODES.tiled
    BN: tl.constexpr = TILE.outputs
    BM: tl.constexpr = TILE.rows
    EVEN: tl.constexpr = TILE.even
    acc = tl.zeros((BN, BM), tl.int32 if KIND == "int8" else tl.float32)
    for block in range(begin, end):
        if LOW:
            acc = _codes_block(acc, x, weight, x_row, w_row, real, block, inputs, CODES, EVEN)
        else:
            acc = _plain_block(acc, x, weight, x_row, source, w_row, real, block, inputs, CODES, TILE)
    if LOW == 0 and KIND != "plain" and not TILED:
        x_scale = tl.load(x.scales + source * x.groups, mask=real, other=0.0)
        total = wide(acc) * tl.load(weight.scales + w_row)[:, None] * x_scale[None, :]
    else:
        total = acc
    return total


@triton.jit(do_not_specialize=["count", "segment", "segments"])
def _multiply(
    x, weight, owners, out, partial, outputs, inputs, count, segment, segments,
    CODES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of x · weightᵀ; what arguments consist of stands in `operands`.

    Blocks of inputs divide into `segments` of `segment`: a program has one of them, or all. With `owners` rows are
    those of experts; sums go to `partial` where that is given.
    """
    BN: tl.constexpr = TILE.outputs
    BM: tl.constexpr = TILE.rows
    BK: tl.constexpr = TILE.inputs
    NEAR: tl.constexpr = TILE.near
    ALONE: tl.constexpr = TILE.alone
    blocks = tl.cdiv(inputs, BK)
    tile_n, tile_m = _tile(tl.cdiv(outputs, BN), tl.num_programs(0) // tl.cdiv(outputs, BN), NEAR)
    target = tile_m * BM + tl.arange(0, BM)
    expert = tl.zeros((), tl.int64)
    if owners is not None:
        expert = tl.load(owners.experts + tile_m).to(tl.int64)
        if expert < 0:
            return
        target = tl.load(owners.rows + target)
    real = target < count
    source = tl.where(real, target // TILE.share, 0).to(tl.int64)
    column = tile_n * BN + tl.arange(0, BN)
    w_row = expert * outputs + tl.minimum(column, outputs - 1).to(tl.int64)
    x_row = source * x.stride
    number = tl.program_id(1)  # 0 where one program has all segments
    if ALONE:
        end = tl.minimum(number * segment + segment, blocks)
        total = _segment(x, weight, x_row, source, w_row, real, number * segment, end, inputs, CODES, TILE)
    else:
        total = tl.zeros((BN, BM), tl.float32)
        for each in range(segments):
            end = tl.minimum(each * segment + segment, blocks)
            total += _segment(x, weight, x_row, source, w_row, real, each * segment, end, inputs, CODES, TILE)
    result = tl.trans(total)
    target = target.to(tl.int64)
    mask = real[:, None] & (column < outputs)[None, :]
    if partial is not None:
        row = number * count + target
        tl.store(partial + row[:, None] * outputs + column[None, :], result, mask=mask)
    else:
        if out.bias is not None:
            bias = tl.load(out.bias + expert * outputs + column, mask=column < outputs, other=0.0)
            result += wide(bias)[None, :]
        if out.residual is not None:
            place = target[:, None] * out.residual_stride + column[None, :]
            result += wide(tl.load(out.residual + place, mask=mask, other=0.0))
        place = target[:, None] * out.stride + column[None, :]
        tl.store(out.elements + place, narrow(result, out.elements.dtype.element_ty), mask=mask)


@triton.jit
def _summed(partial, out, row, column, inside, count, outputs, SEGMENTS: tl.constexpr):
    """Segments of some columns of a row, added in order."""
    total = tl.zeros(column.shape, tl.float32)
    for segment in range(SEGMENTS):
        total += tl.load(partial + (segment * count + row) * outputs + column, mask=inside, other=0.0)
    if out.bias is not None:
        total += wide(tl.load(out.bias + column, mask=inside, other=0.0))
    if out.residual is not None:
        total += wide(tl.load(out.residual + row * out.residual_stride + column, mask=inside, other=0.0))
    return total


@triton.jit(do_not_specialize=["count"])
def _finish(
    partial, out, count, outputs, alpha, limit,
    SEGMENTS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What segments add up to; with an activation the first half of it, gates, times the second."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size = outputs if ACTIVATION == "none" else outputs // 2
    inside = column < size
    kind: tl.constexpr = out.elements.dtype.element_ty
    total = _summed(partial, out, row, column, inside, count, outputs, SEGMENTS)
    if ACTIVATION != "none":
        up = _summed(partial, out, row, column + size, inside, count, outputs, SEGMENTS)
        total = gated(wide(narrow(total, kind)), wide(narrow(up, kind)), alpha, limit, ACTIVATION)
    tl.store(out.elements + row * out.stride + column, narrow(total, kind), mask=inside)


@triton.jit
def _quantize(x, values, scales, inputs, stride, groups, TYPE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """A group of a row in eight bits, and its scale: largest magnitude over 448 (E4M3) or 127 (int8)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    column = group * GROUP + place
    inside = (column < inputs) & (place < GROUP)
    value = wide(tl.load(x + row * stride + column, mask=inside, other=0.0))
    limit: tl.constexpr = 1.0 * TYPE
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), axis=0), limit), 1e-12)
    value = value * tl.div_rn(1.0, scale)  # rounded, as a plain quotient is not: its codes would be others
    if TYPE == 127:
        value = (value + 12582912.0) - 12582912.0  # 1.5 · 2^23 leaves whole numbers, to nearest
        tl.store(values + row * inputs + column, value.to(tl.int8), mask=inside)
    else:
        tl.store(values + row * inputs + column, narrow(value, values.dtype.element_ty), mask=inside)
    tl.store(scales + row * groups + group, scale)
