"""The noise of draws on the device has the reference's bits."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from penstock.kernels.reference import noise as reference
from penstock.kernels.triton.noise import noise


@triton.jit
def fill(key, out, first, COUNT: tl.constexpr):
    token = first + tl.arange(0, COUNT)
    drawn = noise(tl.load(key), tl.load(key + 1), tl.load(key + 2), token)
    tl.store(out + tl.arange(0, COUNT), drawn)


def test_noise_has_the_reference_s_bits(device):
    place = "cpu" if device == "interpreter" else device
    for seed, sequence, position, first in ((0, 0, 0, 0), (2**64 - 1, 2**32 - 1, 2**40 + 7, 150_001)):
        key = torch.tensor([seed - (2**64 if seed >= 2**63 else 0), sequence, position], device=place)
        out = torch.empty(4096, dtype=torch.int64, device=place)
        fill[1,](key, out, first, 4096)
        tokens = np.arange(first, first + 4096)
        assert out.tolist() == reference.noise(seed, sequence, position, tokens).tolist()
