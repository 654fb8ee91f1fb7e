"""Damaged or mismatched tensors end in an error that names one of them, whatever the method."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.config.errors import CheckpointError
from penstock.kernels.canonical import Affine, Canonical
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.methods import METHODS, method_of
from penstock.quant.tensor import StoredTensor, TensorInfo
from tests.quant.goldens import Golden, goldens
from tests.quant.stored import stored

CASES = sorted(goldens())
FLOATS = {"f16": np.uint16(0x7E00), "f32": np.uint32(0x7FC00000), "bf16": np.uint16(0x7FC0), "f8_e4m3": np.uint8(0x7F)}
NO_SCALES = {".weight", ".compute_dtype"}


def canonical(golden: Golden, changed: dict[str, StoredTensor], shape: tuple[int, int]) -> Canonical:
    tensors = golden.tensors | changed
    infos = {f"w{suffix}": tensor.info for suffix, tensor in golden.tensors.items()}
    method = method_of(golden.config, infos)
    sources = method.sources("w.weight", {key: key for key in infos})
    assert sources is not None
    return method.canonical("w.weight", {suffix: tensors[suffix] for suffix in sources}, shape)


@pytest.mark.parametrize("name", CASES)
def test_scales_that_are_no_numbers(name: str) -> None:
    golden, poisoned = goldens()[name], 0
    for suffix, tensor in golden.tensors.items():
        nan = FLOATS.get(tensor.info.format)
        if nan is None or suffix in NO_SCALES:
            continue
        data = tensor.data.copy().view(nan.dtype)  # type: ignore[attr-defined]
        data[-1] = nan
        damaged = StoredTensor(tensor.info, data.view(np.uint8))
        with pytest.raises(CheckpointError, match=rf"tensor 'w{suffix}' holds NaN"):
            canonical(golden, {suffix: damaged}, golden.weights.shape)
        poisoned += 1
    assert poisoned or name.startswith("mlx") or "mxfp4" in name


@pytest.mark.parametrize("name", [name for name in CASES if "mxfp" in name or "nvfp4-4" in name])
def test_byte_scales_that_are_no_numbers(name: str) -> None:
    golden = goldens()[name]
    suffix = ".weight_scale" if name.startswith("ct") else ".scales"
    data = golden.tensors[suffix].data.copy()
    data[-1] = 0x7F if "nvfp4" in name else 0xFF
    with pytest.raises(CheckpointError, match=rf"'w{suffix}'"):
        canonical(golden, {suffix: StoredTensor(golden.tensors[suffix].info, data)}, golden.weights.shape)


def damages(tensor: StoredTensor) -> Iterator[StoredTensor]:
    info, data = tensor.info, tensor.data
    yield StoredTensor(TensorInfo(info.name, (0,), info.format, 0), data[:0])
    if info.shape and info.shape[0] > 1:
        less = data.size // info.shape[0] * (info.shape[0] - 1)
        yield StoredTensor(TensorInfo(info.name, (info.shape[0] - 1, *info.shape[1:]), info.format, less), data[:less])
        yield StoredTensor(TensorInfo(info.name, info.shape[::-1], info.format, data.size), data)
    yield stored(info.name, np.zeros((3, 5), dtype=np.float32))
    yield stored(info.name, np.full(info.shape, 200, dtype=np.uint8))
    yield stored(info.name, np.full(info.shape, -1, dtype=np.int32))


def refusal(golden: Golden, suffix: str, damaged: StoredTensor) -> str | None:
    """Why the tensors are refused, or None where they still make a matrix of the right shape."""
    try:
        assert (
            decode_canonical(canonical(golden, {suffix: damaged}, golden.weights.shape)).shape == golden.weights.shape
        )
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", CASES)
def test_no_damage_ends_in_another_error(name: str) -> None:
    """Either the tensors still make a matrix of the right shape, or a CheckpointError names a tensor."""
    golden, refused = goldens()[name], 0
    for suffix, tensor in golden.tensors.items():
        for damaged in damages(tensor):
            message = refusal(golden, suffix, damaged)
            refused += message is not None
            assert message is None or "tensor 'w." in message
    assert refused > 5


@pytest.mark.parametrize("name", CASES)
def test_another_shape_is_refused(name: str) -> None:
    golden = goldens()[name]
    rows, inputs = golden.weights.shape
    for shape in itertools.product(
        (rows, rows // 2, rows + 1, rows * 3), (inputs, inputs // 2, inputs + 8, inputs * 3)
    ):
        if shape == (rows, inputs) or (name.startswith("bnb-") and shape[0] * shape[1] == rows * inputs):
            continue
        with pytest.raises(CheckpointError, match="tensor 'w"):
            canonical(golden, {}, shape)


@pytest.mark.parametrize("method", METHODS)
def test_settings_of_any_type(method: str) -> None:
    """Odd settings are refused by name or make no difference; nothing else happens."""
    names = (
        "bits", "group_size", "checkpoint_format", "packing_format", "format", "version", "config_groups",
        "weight_block_size", "quant_config", "linear_class", "mode", "quant_algo", "transform_config", "backend",
    )  # fmt: skip
    for name, value in itertools.product(names, (None, -1, 5, 2.5, "x", [], [1, "a"], {}, {"group_0": 3}, True)):
        message = ""
        try:
            method_of({"quant_method": method, name: value}, {})
        except CheckpointError as error:
            message = str(error)
        assert not message or ("quantization_config" in message and "allowed: " in message)


def test_codes_and_orders_stay_in_range() -> None:
    for name in CASES:
        matrix = canonical(goldens()[name], {}, goldens()[name].weights.shape)
        if isinstance(matrix, Affine):
            assert matrix.codes.dtype == np.uint8 and matrix.codes.flags.c_contiguous
            assert matrix.scales.dtype == np.float32 and matrix.scales.flags.c_contiguous
            assert matrix.scales.shape == (matrix.shape[0], matrix.shape[1] // matrix.group)
            assert matrix.zeros is None or matrix.zeros.flags.c_contiguous
            assert matrix.zeros is None or matrix.zeros.dtype in (np.uint8, np.float32)  # HQQ's are fractions
            assert matrix.minimums is None or matrix.minimums.flags.c_contiguous
