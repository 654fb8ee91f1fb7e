"""Rows of a step sorted by the matrix that each is multiplied with: an expert's, a head's or an adapter's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.products import GroupedRows, row_tile

_IDS = 1024  # numbers of matrices read at once


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, counts, pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, pairs, BLOCK):
        total += (tl.load(ids + begin + place, mask=begin + place < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _sort(
    ids, counts, rows, tile_experts, pairs, tiles, experts, SIZE: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Puts the rows of an expert, in order, into tiles behind those of the experts before it."""
    expert, number = tl.program_id(0), tl.arange(0, EXPERTS)
    whole = (tl.load(counts + number, mask=number < experts, other=0) + SIZE - 1) // SIZE
    first = tl.sum(tl.where(number < expert, whole, 0), axis=0)
    own = tl.sum(tl.where(number == expert, whole, 0), axis=0)
    place = tl.arange(0, BLOCK)
    done = 0
    for begin in range(0, pairs, BLOCK):
        hit = tl.load(ids + begin + place, mask=begin + place < pairs, other=-1) == expert
        rank = done + tl.cumsum(hit.to(tl.int32), axis=0) - 1
        tl.store(rows + first * SIZE + rank, (begin + place).to(tl.int32), mask=hit)
        done += tl.sum(hit.to(tl.int32), axis=0)
    for begin in range(0, SIZE, BLOCK):
        free = done + begin + place
        tl.store(rows + first * SIZE + free, tl.zeros((BLOCK,), tl.int32) + pairs, mask=free < own * SIZE)
    for begin in range(0, own, BLOCK):
        mark = tl.zeros((BLOCK,), tl.int32) + expert
        tl.store(tile_experts + first + begin + place, mark, mask=begin + place < own)
    if expert == experts - 1:
        for begin in range(first + own, tiles, BLOCK):
            tl.store(tile_experts + begin + place, tl.zeros((BLOCK,), tl.int32) - 1, mask=begin + place < tiles)


def sorted_rows(ids: Tensor, experts: int) -> GroupedRows:
    """Rows token · top_k + slot of ids [T, top_k], by expert."""
    pairs = ids.numel()
    size = row_tile(2 * pairs // experts)
    tiles = min(pairs, pairs // size + experts)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    rows = torch.empty(tiles * size, dtype=torch.int32, device=ids.device)
    tile_experts = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    _count[(experts,)](ids, counts, pairs, _IDS)
    _sort[(experts,)](
        ids, counts, rows, tile_experts, pairs, tiles, experts, size, triton.next_power_of_2(experts), _IDS
    )
    return GroupedRows(rows, tile_experts, size, pairs, ids.shape[1])
