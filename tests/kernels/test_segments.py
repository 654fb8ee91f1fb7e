"""Inputs that ranks may share are summed in segments: ranks that own some of them give the bits of one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.canonical import Affine, Blocks, Canonical, Codebook, Plain
from penstock.kernels.cpu import native, ops, packing
from penstock.kernels.segments import MAX_SEGMENTS, segment_ends
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.formats import FORMATS
from tests.kernels.test_packing import ALL

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
FORMS = {name.split(",")[0].split(" of ")[0]: matrix for name, matrix in ALL}


def columns(matrix: Canonical, first: int, end: int) -> Canonical:
    """A rank's part of a matrix, as it would be read from the checkpoint."""
    rows = matrix.shape[0]
    if isinstance(matrix, Blocks):
        stored = FORMATS[matrix.format]
        data = matrix.data.reshape(rows, -1, stored.block_bytes)
        part = data[:, first // stored.block_size : end // stored.block_size]
        return Blocks(matrix.format, (rows, end - first), np.ascontiguousarray(part).reshape(-1))
    if isinstance(matrix, Plain):
        values = np.ascontiguousarray(matrix.data.reshape(rows, matrix.shape[1], -1)[:, first:end]).reshape(-1)
        if matrix.scales is None:
            return Plain(matrix.format, (rows, end - first), values)
        high, wide = matrix.tile
        scales = np.ascontiguousarray(matrix.scales[:, first // wide : -(-end // wide)])
        return Plain(matrix.format, (rows, end - first), values, scales, (high, min(wide, end - first)))
    group = slice(first // matrix.group, end // matrix.group)
    scales, codes = np.ascontiguousarray(matrix.scales[:, group]), np.ascontiguousarray(matrix.codes[:, first:end])
    if isinstance(matrix, Codebook):
        return Codebook(codes, matrix.table, matrix.group, scales)
    others = [
        None if part is None else np.ascontiguousarray(part[:, group]) for part in (matrix.zeros, matrix.minimums)
    ]
    return Affine(codes, matrix.bits, matrix.group, scales, matrix.zero, *others)


def ranked(matrix: Canonical, x: Tensor, ends: list[int], ranks: int) -> Tensor:
    """What so many ranks compute: each its own segments, whose sums are then added in order."""
    total: Any = None
    edges = [0, *ends]
    owners = [round(len(ends) * rank / ranks) for rank in range(ranks + 1)]
    for begin, stop in pairwise(owners):
        if begin == stop:
            continue
        first = edges[begin]
        packed = packing.pack(columns(matrix, first, edges[stop]))
        packed.cut([end - first for end in ends[begin:stop]])
        for segment in range(begin, stop):
            own = torch.zeros(len(x), edges[stop] - first)
            place = slice(edges[segment] - first, edges[segment + 1] - first)
            own[:, place] = x[:, edges[segment] : edges[segment + 1]]
            part = ops.linear(own, ops.Packed((packed,)))
            total = part if total is None else total + part
    return total


@pytest.mark.parametrize("form", FORMS)
def test_ranks_give_the_bits_of_one_process(product_isa: str, form: str) -> None:
    matrix = FORMS[form]
    packed = packing.pack(matrix, segment=1)
    ends = packed.segments
    if len(ends) == 1:
        assert packed.segment_unit == 0 or matrix.shape[1] < 2 * packed.segment_unit
        return
    if isinstance(matrix, Affine) and matrix.group > packed.segment_unit:
        packed.cut(ends := [end for end in ends if end % matrix.group == 0])
    generator = torch.Generator().manual_seed(4)
    for count in (1, 3, 7, 40):
        x = torch.randn(count, matrix.shape[1], generator=generator)
        whole = ops.linear(x, ops.Packed((packed,)))
        for ranks in (1, 2, 3):
            assert torch.equal(ranked(matrix, x, ends, ranks), whole), (count, ranks)


def test_most_formats_are_cut() -> None:
    cut = {name for name, matrix in FORMS.items() if len(packing.pack(matrix, segment=1).segments) > 1}
    assert {"q4_0", "q4_k", "q6_k", "q8_0", "iq2_xxs", "f32 None", "bf16 None", "f8_e4m3 None", "nf4 64"} <= cut


@pytest.mark.parametrize("form", ["q4_k", "q6_k", "f32 None", "bf16 None"])
def test_sums_in_segments_are_near_the_exact_ones(product_isa: str, form: str) -> None:
    matrix = FORMS[form]
    x = torch.randn(5, matrix.shape[1], generator=torch.Generator().manual_seed(1))
    exact = x.double() @ torch.from_numpy(decode_canonical(matrix)).double().T
    plain, cut = (ops.linear(x, ops.pack_linear([matrix], segment)) for segment in (0, 1))
    limit = (plain - exact).abs().max()
    assert (cut - exact).abs().max() <= 2 * limit
    assert not torch.equal(plain, cut)


@pytest.mark.parametrize(("inputs", "unit"), [(4096, 128), (3072, 256), (320, 64), (130, 64), (100, 128), (64, 64)])
def test_segments_follow_from_the_weight(inputs: int, unit: int) -> None:
    ends = segment_ends(inputs, unit)
    assert len(ends) == max(1, min(MAX_SEGMENTS, inputs // unit))
    assert ends[-1] == inputs and all(end % unit == 0 for end in ends[:-1])
    widths = [end - begin for begin, end in pairwise((0, *ends))]
    assert max(widths) - min(widths) < 2 * (256 if inputs >= 2048 else unit)


def test_groups_of_heads_stay_together() -> None:
    matrix = FORMS["bf16 None"]
    assert packing.pack(matrix, segment=1).segments == [64, 130]
    assert packing.pack(matrix, segment=40).segments == [130]
    assert packing.pack(matrix).segments == [130]


def test_cuts_that_do_not_fit_are_refused() -> None:
    packed = packing.pack(FORMS["q8_0"])
    for ends in ([], [96, 96], [32], [16, 96], [64, 32, 96], [96] * 9):
        with pytest.raises(ValueError, match=r"multiples of 32"):
            packed.cut(ends)
    ordered = next(matrix for name, matrix in ALL if name.endswith("order"))
    with pytest.raises(ValueError, match="nowhere"):
        packing.pack(ordered).cut([256, 512])


def test_segments_are_kept_with_the_packed_weight() -> None:
    packed = packing.pack(FORMS["q8_0"], segment=1)
    again = native.library().PackedMatrix.from_memory(packed.header, packed.data.ctypes.data, packed)
    assert again.segments == packed.segments == [32, 64, 96]
    damaged = bytearray(packed.header)
    at = bytes(damaged).index(np.array([3, 32, 64, 96], np.int32).tobytes())
    damaged[at + 4] = 33
    with pytest.raises(ValueError, match="segments"):
        native.library().PackedMatrix.from_memory(bytes(damaged), packed.data.ctypes.data, packed)


def test_experts_are_added_by_rising_expert(product_isa: str) -> None:
    """In whatever order the router names them."""
    generator = torch.Generator().manual_seed(2)
    count, hidden, inner, top_k = 7, 48, 96, 4
    gates, ups = (torch.randn(count * inner, hidden, generator=generator) for _ in range(2))
    gate_up = ops.pack_experts([gates, ups], count)
    down = ops.pack_experts([torch.randn(count * hidden, inner, generator=generator)], count, segment=1)
    x, weights = torch.randn(9, hidden, generator=generator), torch.rand(9, top_k, generator=generator)
    ids = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(9)])
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        routed = weights[:, order].contiguous(), ids[:, order].contiguous()
        results.append(ops.grouped_experts(x, *routed, gate_up, down, "silu"))
    assert all(torch.equal(other, results[0]) for other in results[1:])
