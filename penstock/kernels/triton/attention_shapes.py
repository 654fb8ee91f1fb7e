"""Constants of an attention kernel: sizes of heads and tiles, and which changes of scores are compiled in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.cache import Layout

LONG = 0  # stands for the number of queries of rows that have many
SHORT_QUERIES = 8  # rows with at most this many have their contexts split
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Shape:
    """What one compiled kernel is made for. A tile has QUERIES queries with TILE_HEADS of a KV head's GROUP heads.

    Heads are loaded in two pieces of powers of two: K0 elements from 0, of which K_CUT count, and K1 from K_CUT on;
    values in V0 and V1 likewise. PART positions of a context are summed by themselves.
    """

    HEADS: int
    KV_HEADS: int
    GROUP: int
    TILE_HEADS: int
    HEAD_TILES: int
    QUERIES: int
    BLOCK_M: int
    BLOCK_N: int
    PART: int
    BLOCK_SIZE: int
    DIM: int
    K_CUT: int
    K0: int
    K1: int
    VALUE_DIM: int
    V_CUT: int
    V0: int
    V1: int
    TYPE: tl.dtype
    LATENT: bool
    SCALED: bool
    WINDOW: int
    SEEN: bool
    SINKS: bool
    CAPS: bool
    SLOPES: bool
    WARPS: int
    STAGES: int


def pieces(dim: int, cut: int | None = None) -> tuple[int, int, int]:
    """(elements in the first piece, its padded size, the second's padded size, 0 if there is none)."""
    first = 1 << (dim.bit_length() - 1) if cut is None else cut
    if cut is None and (first < 16 or first == dim or triton.next_power_of_2(dim - first) == first):
        first = dim
    padded = max(16, triton.next_power_of_2(first))
    return first, padded, 0 if first == dim else max(16, triton.next_power_of_2(dim - first))


def part_size(heads: int, value_dim: int) -> int:
    """Positions summed by themselves: what is kept of a part should be small beside its keys and values."""
    return 256 if heads * value_dim <= 2048 else 512


def _tile(long: bool, elements: int, wide: bool) -> tuple[int, int, int, int]:
    """(most rows, keys, warps, stages) for so many elements of a padded key and value; `wide`: of four bytes."""
    if long:
        if wide:
            return 64, 32, 4, 1
        if elements <= 256:
            return 128, 64, 8, 3
        return (128, 64, 8, 2) if elements <= 512 else (64, 32, 8, 2)
    if wide:
        return 64, 32, 4, 1
    if elements <= 256:
        return 64, 64, 4, 3
    return (64, 64, 4, 2) if elements <= 512 else (64, 32, 8, 2)


def shape_of(
    queries: int, heads: int, layout: Layout, dtype: torch.dtype, latent: bool, kind: tuple[int, bool],
    changes: tuple[bool, bool, bool],
) -> Shape:  # fmt: skip
    """For rows of up to `queries` queries, a power of two, or LONG.

    Args:
        queries, heads, layout, dtype, latent: of the queries and the cache.
        kind: `WINDOW` and `SEEN` (AttentionPlan.kind).
        changes: sinks, a cap, slopes.
    """
    group = heads // layout.heads
    value_cut, v0, v1 = pieces(layout.value_dim)
    if latent:
        value_cut, v0, v1 = layout.value_dim, max(16, triton.next_power_of_2(layout.value_dim)), 0
    key_cut, k0, k1 = pieces(layout.key_dim, layout.value_dim if latent else None)
    elements = k0 + k1 + (0 if latent else v0 + v1)
    rows, keys, warps, stages = _tile(queries == LONG, elements, dtype == torch.float32)
    tile_heads = min(group, rows)
    of_tile = rows // tile_heads if queries == LONG else max(1, min(queries, rows // tile_heads))
    block = rows if queries == LONG else max(16, triton.next_power_of_2(of_tile * tile_heads))
    part = 1 << 30 if queries == LONG else part_size(group, layout.value_dim)
    return Shape(
        heads, layout.heads, group, tile_heads, -(-group // tile_heads), of_tile, block, keys, part,
        layout.block_size, layout.key_dim, key_cut, k0, k1, layout.value_dim, value_cut, v0, v1,
        TYPES[dtype], latent, layout.scaled, *kind, *changes, warps, stages,
    )  # fmt: skip
