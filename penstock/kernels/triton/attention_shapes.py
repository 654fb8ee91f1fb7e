"""Constants of an attention kernel: sizes of heads and tiles, and which changes of scores are compiled in."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.kernels.devices import shared_memory
from penstock.kernels.triton.numbers import INTERPRETED

if TYPE_CHECKING:
    from penstock.kernels.triton.cache import Layout

LONG = 0  # stands for the number of queries of rows that have many
LEAST = 16  # rows and keys of a tile
SHORT_QUERIES = 16  # rows with at most this many have their contexts split
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class ScoreChanges:
    """What is done to scores beside scaling: sinks beside them, a cap, slopes by distance."""

    sinks: bool
    caps: bool
    slopes: bool


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one compiled kernel is made for. A tile has QUERIES queries with TILE_HEADS of a KV head's GROUP heads.

    Heads are loaded in two pieces of powers of two: K0 elements from 0, of which K_CUT count, and K1 from K_CUT on;
    values in V0 and V1 likewise. PART positions of a context are summed by themselves; if FIXED, parts are merged one
    after the other, if WHOLE by the program that has them all.
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
    FIXED: bool
    WHOLE: bool
    WARPS: int
    STAGES: int

    @property
    def waves(self) -> int:
        """Programs a multiprocessor among which contexts are dealt out: as many as run at once, or twice that.

        Registers leave room for three programs of four warps; of FP8, whose conversion takes more, for two.
        """
        return 3 if self.WARPS <= 4 and not self.SCALED else 4


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


class Tile(NamedTuple):
    """Most rows, keys, warps and stages of a program."""

    rows: int
    keys: int
    warps: int
    stages: int


def _usual(long: bool, elements: int, wide: bool, scaled: bool) -> Tile:
    """For so many elements of a padded key and value; `wide`: of four bytes; `scaled`: kept as FP8.

    The fastest on an H200 (benchmarks/gpu/tiles.py).
    """
    if wide:
        return Tile(64, 32, 4, 1)
    if elements <= 256:
        if scaled:
            return Tile(128, 64, 8, 3) if long else Tile(64, 128, 4, 2)
        return Tile(128, 128, 8, 3) if long else Tile(64, 64, 4, 2)
    if elements <= 512:
        return Tile(128, 64, 8, 2) if long else Tile(64, 64, 4, 2)
    return Tile(64, 32, 8, 2) if long else Tile(64, 64, 8, 2)


def needed(tile: Tile, key: int, value: int, size: int) -> int:
    """Bytes of shared memory a program takes at most, as compiled for Hopper.

    Args:
        tile: of the program.
        key, value: padded elements; value 0 where it is part of the key.
        size: bytes of an element as it is multiplied.
    """
    queries = tile.rows * key
    if tile.stages > 1:  # two tiles of keys and values are on their way at once, whatever more is allowed
        return size * (queries + 2 * tile.keys * (key + value)) + 1024
    return size * (queries + tile.keys * max(key, value) + tile.rows * tile.keys) + 256


@functools.cache
def fitted(long: bool, key: int, value: int, size: int, limit: int, scaled: bool = False) -> Tile | None:
    """The usual tile, made smaller where it needs more than `limit` bytes (0 for none); None if the smallest does."""
    tile = _usual(long, key + value, size == 4, scaled)
    while limit and needed(tile, key, value, size) > limit:
        if tile.stages > 1:
            tile = tile._replace(stages=1)
        elif tile.rows > LEAST and tile.rows >= tile.keys:
            tile = tile._replace(rows=tile.rows // 2)
        elif tile.keys > LEAST:
            tile = tile._replace(keys=tile.keys // 2)
        else:
            return None
    return tile


def refuse_heads(key_dim: int, value_dim: int, size: int, limit: int) -> str | None:
    """Why heads of so many elements (value_dim 0 where values are part of the keys) have no tile, or None."""
    value = sum(pieces(value_dim)[1:]) if value_dim else 0
    key = sum(pieces(key_dim)[1:])
    if all(fitted(long, key, value, size, limit) for long in (True, False)):
        return None
    least = needed(Tile(LEAST, LEAST, 4, 1), key, value, size)
    return f"heads of {key_dim} elements take {least} bytes of shared memory, and this GPU has {limit}"


def _tile(long: bool, key: int, value: int, size: int, limit: int, scaled: bool, fixed: bool) -> Tile:
    """The tile that fits. If `fixed`, long rows have that of short ones, or a larger one that computes rows alike."""
    few, many = (
        fitted(each, key, value, size, limit, scaled) or _usual(each, key + value, size == 4, scaled)
        for each in (False, True)
    )
    if not fixed:
        return many if long else few
    large = many._replace(keys=few.keys)
    room = not limit or needed(large, key, value, size) <= limit
    return large if long and room and key + value <= 256 and many.rows >= few.rows >= 64 else few


def shape_of(
    queries: int, heads: int, layout: Layout, dtype: torch.dtype, latent: bool, kind: tuple[int, bool],
    changes: ScoreChanges, fixed: bool = False,
) -> AttentionShape:  # fmt: skip
    """For rows of up to `queries` queries, a power of two, or LONG.

    Args:
        queries, heads, layout, dtype, latent: of the queries and the cache.
        kind: `WINDOW` and `SEEN` (TritonAttentionPlan.kind).
        changes: of the scores.
        fixed: rows of few queries and of many are to get the same bits: both have the same parts and tiles of keys, and
            no tile of queries is too small for the instructions that large ones get.
    """
    group = heads // layout.heads
    value_cut, v0, v1 = pieces(layout.value_dim)
    if latent:
        value_cut = layout.value_dim
        v0 = max(16, triton.next_power_of_2(layout.value_dim))
        v1 = 0
    key_cut, k0, k1 = pieces(layout.key_dim, layout.value_dim if latent else None)
    elements = k0 + k1 + (0 if latent else v0 + v1)
    limit = shared_memory("interpreter" if INTERPRETED.value else "cuda")
    rows, keys, warps, stages = _tile(
        queries == LONG, k0 + k1, elements - k0 - k1, dtype.itemsize, limit, layout.scaled, fixed
    )
    least = rows if fixed else LEAST
    tile_heads = min(group, rows)
    of_tile = rows // tile_heads if queries == LONG else max(1, min(queries, rows // tile_heads))
    block = rows if queries == LONG else max(least, triton.next_power_of_2(of_tile * tile_heads))
    part = 1 << 30 if queries == LONG and not fixed else part_size(group, layout.value_dim)
    return AttentionShape(
        heads, layout.heads, group, tile_heads, -(-group // tile_heads), of_tile, block, keys, part,
        layout.block_size, layout.key_dim, key_cut, k0, k1, layout.value_dim, value_cut, v0, v1,
        TYPES[dtype], latent, layout.scaled, kind[0], kind[1],
        changes.sinks, changes.caps, changes.slopes, fixed, fixed and queries == LONG,
        warps, stages,
    )  # fmt: skip
