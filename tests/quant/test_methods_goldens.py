"""Every method against the library that defines it."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.kernels.canonical import Affine, Blocks, Codebook, Plain
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.methods import METHODS, method_of
from tests.quant.goldens import goldens

CASES = sorted(goldens())
# Where a library rounds otherwise than once a product: an affine minimum, or float16 on the way.
LOOSE = {"bnb-int8": 6e-4, "mlx-affine": 1e-6}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_library(name: str) -> None:
    golden = goldens()[name]
    infos = {f"w{suffix}": tensor.info for suffix, tensor in golden.tensors.items()}
    method = method_of(golden.config, infos)
    sources = method.sources("w.weight", {key: key for key in infos})
    assert sources is not None and set(sources.values()) == infos.keys()  # nothing is left over
    used = {suffix: golden.tensors[source[1:]] for suffix, source in sources.items()}
    matrix = method.canonical("w.weight", used, golden.weights.shape)
    loose = next((bound for start, bound in LOOSE.items() if name.startswith(start)), 0.0)
    assert np.abs(decode_canonical(matrix) - golden.weights).max() <= loose * np.abs(golden.weights).max()
    assert method.count(infos)[0] == golden.weights.size
    assert method.name in METHODS


def kind(name: str) -> object:
    golden = goldens()[name]
    infos = {f"w{suffix}": tensor.info for suffix, tensor in golden.tensors.items()}
    method = method_of(golden.config, infos)
    sources = method.sources("w.weight", {key: key for key in infos}) or {}
    used = {suffix: golden.tensors[suffix] for suffix in sources}
    return method.canonical("w.weight", used, golden.weights.shape)


def test_matrices_stay_as_small_as_they_are_stored() -> None:
    """What a method makes is what a kernel can read: codes of the stored width, no decoded floats."""
    affine = {"ct-w3-asym": 3, "ct-w8-channel": 8, "mlx-affine-6-32": 6, "hqq-1-axis1": 1, "auto_round:auto_gptq-3": 3}
    for name, bits in affine.items():
        matrix = kind(name)
        assert isinstance(matrix, Affine) and matrix.bits == bits and matrix.codes.max() < 2**bits
    for name in ("bnb-nf4-nested", "bnb-fp4", "ct-nvfp4", "modelopt-nvfp4", "mlx-nvfp4-4-16"):
        assert isinstance(kind(name), Codebook)
    for name in ("ct-mxfp4", "mlx-mxfp4-4-32"):
        matrix = kind(name)
        assert isinstance(matrix, Blocks) and matrix.format == "mxfp4"
    for name, tile in {"ct-fp8-block": (8, 16), "ct-fp8-channel": (1, 64), "ct-fp8-tensor": (16, 64)}.items():
        matrix = kind(name)
        assert isinstance(matrix, Plain) and (matrix.format, matrix.tile) == ("f8_e4m3", tile)
    converted = {method_of(goldens()[name].config, {}).name for name in CASES if isinstance(kind(name), Plain)}
    assert converted == {"aqlm", "hqq", "compressed-tensors", "mlx"}


def test_symmetric_integers_have_one_zero_point() -> None:
    for name, zero in {"ct-w4-sym": 8, "ct-int8": 128, "bnb-int8": 128}.items():
        matrix = kind(name)
        assert isinstance(matrix, Affine) and matrix.zero == zero and matrix.zeros is None


def test_blocks_run_over_the_ends_of_rows() -> None:
    """Blocks of 64 count through the matrix, so rows of 32 share them in pairs."""
    for name in ("bnb-nf4", "bnb-nf4-nested"):
        golden = goldens()[name]
        matrix = method_of(golden.config, {}).canonical("w.weight", golden.tensors, (16, 32))
        assert np.array_equal(decode_canonical(matrix), golden.weights.reshape(16, 32))
