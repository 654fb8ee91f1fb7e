"""What the integer methods have in common: zero points and the order of inputs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.kernels.canonical import Affine
from penstock.quant.formats.record import Bytes, Floats
from penstock.quant.methods.record import Matrix


def with_zeros(
    codes: Bytes,
    bits: int,
    group: int,
    scales: Floats,
    zeros: Bytes,
    order: npt.NDArray[np.int32] | None = None,
) -> Affine:
    """An affine matrix of zero points [N, K / group]; one number where all are alike."""
    first = int(zeros.flat[0])
    if (zeros == first).all():
        return Affine(codes, bits, group, scales, zero=first, order=order)
    return Affine(codes, bits, group, scales, zeros=zeros, order=order)


def group_order(matrix: Matrix, suffix: str, group: int) -> npt.NDArray[np.int32] | None:
    """Inputs sorted by their group (GPTQ's activation order); None where they lie in order.

    Raises:
        CheckpointError: a group does not have `group` inputs.
    """
    inputs = matrix.shape[1]
    if not matrix.has(suffix):
        return None
    groups = matrix.array(suffix, "i32", (inputs,))
    unset = bool((groups == groups[0]).all())  # writers that keep the order leave all 0 or all -1
    if unset or np.array_equal(groups, np.arange(inputs) // group):
        return None
    if groups.min() < 0 or (np.bincount(groups, minlength=inputs // group) != group).any():
        raise matrix.error(suffix, f"does not give each of {inputs // group} groups {group} inputs")
    return np.argsort(groups, kind="stable").astype(np.int32)
