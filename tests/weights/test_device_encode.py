"""Weights are quantised where the model goes, to the host's bits."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from penstock.config.errors import ConfigError
from penstock.kernels.plain import plain_matrix
from penstock.quant.encode import quantize_matrix
from penstock.weights import device_encode
from tests.weights.compare_device_encode import FORMATS, compare_encoding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("format", FORMATS)
def test_bits_are_those_of_the_host(format: str, dtype: torch.dtype) -> None:
    compare_encoding("cpu", format, dtype, 50, 96)
    with patch.object(device_encode, "_PIECE", 1):  # pieces of 128 rows
        compare_encoding("cpu", format, dtype, 300, 160)


def test_the_rest_is_left_to_the_host() -> None:
    floats = plain_matrix(torch.zeros(4, 40))
    assert device_encode.device_encoder("int4", floats) is None
    assert device_encode.device_encoder("q8_0", floats) is None  # rows are not whole blocks
    scaled = quantize_matrix("fp8", torch.ones(4, 32).numpy())
    assert device_encode.device_encoder("int8", scaled) is None


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_no_number_is_refused(format: str) -> None:
    values = torch.zeros(4, 32)
    values[2, 3] = torch.nan
    encode = device_encode.device_encoder(format, plain_matrix(values))
    assert encode is not None
    with pytest.raises(ConfigError, match="infinite or not a number"):
        encode(torch.device("cpu"))
