"""Inputs that ranks may share are summed in segments: ranks that own some of them give the bits of one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.canonical import Affine, Blocks, Canonical, Codebook, Plain
from penstock.kernels.cpu import native, ops, packing, recurrent
from penstock.kernels.cpu.packed import Packed
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
            part = ops.linear(own, Packed((packed,)))
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
        whole = ops.linear(x, Packed((packed,)))
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


def factor(squares: list[float], size: int) -> np.float32:
    """What brings a root mean square to one whose sum of squares is these, added in order in float32."""
    total = np.float32(0.0)
    for part in squares:
        total = total + np.float32(part)
    return np.float32(1.0) / np.sqrt(total / np.float32(size))


# 2 ** 24 swallows ones that are added singly behind it, and not their sum: so the order of the segments shows.
PARTS = {"large first": [4096.0, *[1.0] * 7], "large last": [*[1.0] * 7, 4096.0]}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("gate_first", [False, True])
def test_a_norm_over_all_heads_adds_what_ranks_sum(parts: list[float], gate_first: bool, isa: str) -> None:
    unit = 24  # eight heads, and as many segments
    size = 8 * unit
    assert len(segment_ends(size, unit)) == 8
    x = torch.zeros(1, size)
    x[0, ::unit] = torch.tensor(parts)
    whole = recurrent.gated_rms_norm(x, None, torch.ones(size), 0.0, None, gate_first, unit)
    expected = factor([part * part for part in parts], size)
    assert whole[0, ::unit].tolist() == [float(np.float32(part) * expected) for part in parts]
    assert factor([4096.0**2, *[1.0] * 7], size) != factor([*[1.0] * 7, 4096.0**2], size)


@pytest.mark.parametrize("gated", [False, True])
def test_a_segment_of_a_norm_is_summed_as_by_the_rank_that_has_it(gated: bool, isa: str) -> None:
    unit, eps = 72, 1e-3
    generator = torch.Generator().manual_seed(4)
    x, gate, weight = (torch.randn(3, 4 * unit, generator=generator) for _ in range(3))
    given = gate if gated else None
    for index in range(4):
        own = slice(index * unit, (index + 1) * unit)
        alone = torch.zeros_like(x)
        alone[:, own] = x[:, own]
        whole = recurrent.gated_rms_norm(alone, given, weight[0], eps, None, True, unit)
        gates = None if given is None else given[:, own].contiguous()
        part = recurrent.gated_rms_norm(x[:, own].contiguous(), gates, weight[0, own].contiguous(), 4 * eps, None, True)
        assert torch.equal(whole[:, own], 2.0 * part)  # its mean is over a fourth of the elements


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_norms_of_all_queries_and_of_all_keys_are_summed_by_kv_heads(parts: list[float], isa: str) -> None:
    heads, kv_heads, dim = 16, 8, 16
    cache = ops.make_cache("float32", 2, 16, kv_heads, dim, dim)
    qkv = torch.zeros(1, (heads + 2 * kv_heads) * dim)
    qkv[0, : heads * dim : 2 * dim] = torch.tensor(parts)  # one element for each group of query heads
    still = torch.ones(1, 1, dim), torch.zeros(1, 1, dim)
    scales, slot = torch.ones(heads + kv_heads, dim), torch.tensor([3])
    query = ops.rope_and_cache_write(qkv, still[0], still[1], slot, cache, scales, 0.0, "all")
    expected = factor([part * part for part in parts], heads * dim)
    assert query.flatten()[:: 2 * dim].tolist() == [float(np.float32(part) * expected) for part in parts]
