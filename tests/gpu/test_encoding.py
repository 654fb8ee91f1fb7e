"""Weights quantised on the GPU have the host's bits."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.sizes import Sizes
from tests.weights.compare_device_encode import FORMATS, compare_encoding


@pytest.mark.parametrize("format", FORMATS)
def test_bits_are_those_of_the_host(device: str, sizes: Sizes, format: str) -> None:
    for outputs, inputs in sizes.matrices:
        compare_encoding("cuda" if device == "cuda" else "cpu", format, torch.bfloat16, outputs, inputs)
