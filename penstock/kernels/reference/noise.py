"""The noise of draws: one Gumbel number for each (seed, sequence, position, token), as an integer.

The draw of a distribution p is the token with the largest log p + noise (Gumbel's trick; Maddison et al. 2014,
arXiv:1411.0030). It is made of integer operations alone, so that every instruction set and device has the same bits.
With 32 random bits r it is -ln(-ln((2 r + 1) / 2^33)) in units of 2^-NOISE_BITS, off by less than 2^-24.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

NOISE_BITS = 40
NOISE_RANGE = (-3.14, 22.88)
"""Between these lies all noise."""

LEAST_DISTANCE = -64.0
"""Scaled distances from the largest logit count as no less: they are beyond the range of the noise."""

# ln(1 + f) / f on [-1/4, 1/2] in units of 2^-30: a polynomial of degree 11 through Chebyshev points.
LOG_COEFFICIENTS = (
    1073741824, -536870909, 357913893, -268435895, 214753608, -178941705, 153184005, -134194957, 122539236, -113810753,
    86068139, -33533226,
)  # fmt: skip
_LN2_58, _LN2_40 = 199786072581291488, 762123384786
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: Sequence[int | Words], key: Sequence[int]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), of words or arrays of them."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    k0, k1 = (np.uint64(word) for word in key)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0 = (b >> _HALF) ^ c1 ^ k0
        c1 = b & _LOW
        c2 = (a >> _HALF) ^ c3 ^ k1
        c3 = a & _LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return c0, c1, c2, c3


def random_bits(seed: int, sequence: int, position: int, tokens: Ints) -> Words:
    """32 random bits a token: four neighbours share one call of Philox."""
    low = 0xFFFFFFFF
    seed &= 2**64 - 1
    counter = (position & low, position >> 32, sequence, (tokens >> 2).astype(np.uint64))
    lanes = np.stack(philox4x32(counter, (seed & low, seed >> 32)))
    return np.asarray(np.take_along_axis(lanes, (tokens & 3)[None], axis=0)[0])


def _logarithm(value: Ints, width: int) -> tuple[Ints, Ints]:
    """(n, l) with ln(value / 2^width) = l / 2^63 - n ln 2; value is positive, of at most `width` bits, width ≥ 33."""
    used = np.frexp((value & ~1023 if width > 53 else value).astype(np.float64))[1].astype(np.int64)
    mantissa = (value << (width - used)) >> (width - 33)
    low = mantissa < 3 << 31
    fraction = np.where(low, 2 * mantissa, mantissa) - (1 << 33)
    argument, factor = fraction >> 3, np.full_like(fraction, LOG_COEFFICIENTS[-1])
    for coefficient in LOG_COEFFICIENTS[-2::-1]:
        factor = coefficient + ((factor * argument) >> 30)
    return width - used + low, fraction * factor


def gumbel(bits: Words) -> Ints:
    """The noise that 32 random bits stand for."""
    halvings, log = _logarithm(2 * bits.astype(np.int64) + 1, 33)
    time = halvings * _LN2_58 - (log >> 5)  # an exponential waiting time, in units of 2^-58
    halvings, log = _logarithm(time, 63)
    return np.asarray((halvings - 5) * _LN2_40 - (log >> 63 - NOISE_BITS))


def noise(seed: int, sequence: int, position: int, tokens: Ints) -> Ints:
    """The noise of tokens [n], int64 [n]."""
    return gumbel(random_bits(seed, sequence, position, tokens))


def scores(distances: npt.NDArray[np.float64], drawn: Ints) -> Ints:
    """What a draw compares: scaled distances from the largest logit plus noise, in the noise's units."""
    bounded = np.maximum(distances, LEAST_DISTANCE)
    return np.asarray((bounded * 2.0**NOISE_BITS).astype(np.int64) + drawn)
