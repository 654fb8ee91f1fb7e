"""MXFP4 pairs of GPT-OSS checkpoints against transformers' own decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.config.errors import CheckpointError
from penstock.kernels.canonical import Blocks
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.decode import canonical_tensor
from penstock.quant.methods import method_of
from tests.quant.stored import stored

METHOD = method_of({"quant_method": "mxfp4"}, {})


def test_experts_equal_those_of_transformers() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = rng.integers(120, 131, (2, 6, 3), dtype=np.uint8)
    pair = {"_blocks": stored("e_blocks", blocks), "_scales": stored("e_scales", scales)}
    matrix = METHOD.canonical("e_blocks", pair, (12, 96))
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    assert isinstance(matrix, Blocks) and matrix.format == "mxfp4"
    assert np.array_equal(decode_canonical(matrix).reshape(2, 6, 96), theirs.transpose(1, 2).numpy())
    assert torch.equal(canonical_tensor(matrix, torch.bfloat16).reshape(2, 6, 96), theirs.transpose(1, 2).bfloat16())
    assert METHOD.count({f"x{suffix}": tensor.info for suffix, tensor in pair.items()})[0] == 12 * 96


def test_pairs_that_do_not_fit_are_named() -> None:
    good = stored("e_blocks", np.zeros((2, 3, 16), np.uint8)), stored("e_scales", np.full((2, 3), 127, np.uint8))
    pair = dict(zip(("_blocks", "_scales"), good, strict=True))
    with pytest.raises(CheckpointError, match="'e_scales' has shape"):
        METHOD.canonical("e_blocks", pair, (3, 64))
    with pytest.raises(CheckpointError, match="'e_scales' has shape"):
        METHOD.canonical("e_blocks", pair, (2, 97))
    short = stored("e_blocks", np.zeros((2, 3, 8), np.uint8))
    with pytest.raises(CheckpointError, match=r"'e_blocks' is u8\[2, 3, 8\]"):
        METHOD.canonical("e_blocks", pair | {"_blocks": short}, (2, 96))
    with pytest.raises(CheckpointError, match="'e_scales' holds NaN"):
        METHOD.canonical("e_blocks", pair | {"_scales": stored("e_scales", np.full((2, 3), 255, np.uint8))}, (2, 96))
