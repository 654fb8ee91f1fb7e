"""Fixtures of the quantisation tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.quant.formats import FORMATS


def _random_blocks(name: str, count: int) -> np.ndarray:
    """Random bytes; every float16 among them is then finite by construction of its exponent."""
    block = FORMATS[name.lower()]
    data = np.random.default_rng(count).integers(0, 256, (count, block.block_bytes), dtype=np.uint8)
    halves = {
        "q2_k": (80, 82),
        "q3_k": (108,),
        "q6_k": (208,),
        "q4_1": (0, 2),
        "q5_1": (0, 2),
        "q4_k": (0, 2),
        "q5_k": (0, 2),
        "q8_k": (2,),  # the upper half of a float32
        "iq1_m": (54,),  # the top bits of its float16 lie in the last of four words
        "tq1_0": (52,),
        "tq2_0": (64,),
    }
    for offset in () if name == "MXFP4" else halves.get(name.lower(), (0,)):
        data[:, offset + 1] &= 0xBF  # clears the exponent's top bit
    return data


@pytest.fixture(scope="session")
def random_blocks() -> Callable[[str, int], np.ndarray]:
    """(GGUF type name, count) → [count, block bytes] uint8."""
    return _random_blocks
