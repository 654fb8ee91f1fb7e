"""The noise of draws on the device: integer operations alone, and the bits of `reference.noise`, which defines it."""

from __future__ import annotations

import triton.language as tl

from penstock.kernels.reference.noise import LEAST_DISTANCE, NOISE_BITS
from penstock.kernels.triton.numbers import inlined

_LEAST_DISTANCE, _UNIT = tl.constexpr(LEAST_DISTANCE), tl.constexpr(2.0**NOISE_BITS)


@inlined
def _random_bits(seed, sequence, position, token):
    """32 bits of Philox4x32-10 (Salmon et al. 2011) a token, uint32; four neighbours have the lanes of one call."""
    zero = token.to(tl.uint32) & 0
    c0, c1 = zero + position.to(tl.uint32), zero + (position >> 32).to(tl.uint32)
    c2, c3 = zero + sequence.to(tl.uint32), (token >> 2).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    first, second = tl.full((), 0xD2511F53, tl.uint32), tl.full((), 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        a, b = c0, c2
        c0 = tl.umulhi(b, second) ^ c1 ^ k0
        c2 = tl.umulhi(a, first) ^ c3 ^ k1
        c1, c3 = second * b, first * a
        k0 += tl.full((), 0x9E3779B9, tl.uint32)
        k1 += tl.full((), 0xBB67AE85, tl.uint32)
    lane = token & 3
    return tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3))


@inlined
def _logarithm(value, close, WIDTH: tl.constexpr):
    """(n, l) with ln(value / 2^WIDTH) = l / 2^63 - n ln 2; `close` is a float64 of the same exponent."""
    used = (close.to(tl.int64, bitcast=True) >> 52) - 1022
    mantissa = (value << (WIDTH - used)) >> (WIDTH - 33)
    low = (mantissa < 6442450944).to(tl.int64)
    fraction = (mantissa << low) - 8589934592
    argument = fraction >> 3
    factor = 86068139 + ((argument * -33533226) >> 30)
    factor = -113810753 + ((factor * argument) >> 30)
    factor = 122539236 + ((factor * argument) >> 30)
    factor = -134194957 + ((factor * argument) >> 30)
    factor = 153184005 + ((factor * argument) >> 30)
    factor = -178941705 + ((factor * argument) >> 30)
    factor = 214753608 + ((factor * argument) >> 30)
    factor = -268435895 + ((factor * argument) >> 30)
    factor = 357913893 + ((factor * argument) >> 30)
    factor = -536870909 + ((factor * argument) >> 30)
    factor = 1073741824 + ((factor * argument) >> 30)
    return WIDTH - used + low, fraction * factor


@inlined
def noise(seed, sequence, position, token):
    """The noise of tokens [n], int64 [n]; the stream's key is three scalars."""
    value = _random_bits(seed, sequence, position, token).to(tl.int64) * 2 + 1
    halvings, log = _logarithm(value, value.to(tl.float64), 33)
    time = halvings * 199786072581291488 - (log >> 5)
    halvings, log = _logarithm(time, (time & -1024).to(tl.float64), 63)
    return (halvings - 5) * 762123384786 - (log >> 23)


@inlined
def score(distance, drawn):
    """What a draw compares: scaled distances from the largest logit, float64, plus noise, in the noise's units."""
    return (tl.maximum(distance, _LEAST_DISTANCE) * _UNIT).to(tl.int64) + drawn
