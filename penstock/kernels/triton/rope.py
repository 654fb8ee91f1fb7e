"""Rotary embedding: tables of a step's positions; heads normalised, rotated and written to the cache in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cache import KvTensors
from penstock.kernels.triton.cache import Entries, Layout, refuse, store_entries
from penstock.kernels.triton.numbers import inlined, narrow, wide

__all__ = ["refuse", "rope_and_cache_write", "rope_tables", "rotate_heads"]

HEAD_NORMS = ("none", "each", "all", "layer", "rotated")
TILE = 2048  # elements of the heads that a program holds


@inlined
def _sine_and_cosine(x):
    """Of float32 x ≥ 0 up to some millions, to 1e-7: the hardware's own lose what a large angle leaves of a turn.

    x is brought to ±π/4 by multiples of π/2 in two parts (Cody & Waite 1980); the polynomials are those of the Cephes
    library (Moshier 1992).
    """
    turns = tl.floor(x * 0.6366197723675814 + 0.5)
    r = tl.fma(turns, -1.5707963705062866, x)
    r = tl.fma(turns, 4.371139000186241e-08, r)
    z = r * r
    sine = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r
    cosine = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    quarter = turns.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    s, c = tl.where(odd, cosine, sine), tl.where(odd, sine, cosine)
    return tl.where(quarter >= 2, -s, s), tl.where((quarter == 1) | (quarter == 2), -c, c)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rope_tables(
    positions, axes, frequencies, cos, sin, factor, HALF: tl.constexpr, BLOCK: tl.constexpr, AXES: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < HALF
    if AXES:
        axis = tl.load(axes + place, mask=inside, other=0)
        position = tl.load(positions + axis * tl.num_programs(0) + token)
    else:
        position = tl.load(positions + token)
    angle = position.to(tl.float32) * tl.load(frequencies + place, mask=inside, other=0.0)
    s, c = _sine_and_cosine(tl.abs(angle))
    s = tl.where(angle < 0, -s, s) * factor
    c = c * factor
    at = token * (2 * HALF) + place
    tl.store(cos + at, c, mask=inside)
    tl.store(cos + at + HALF, c, mask=inside)
    tl.store(sin + at, -s, mask=inside)
    tl.store(sin + at + HALF, s, mask=inside)


def rope_tables(
    positions: Tensor, frequencies: Tensor, factor: float = 1.0, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    positions = positions.contiguous()
    tokens, half = positions.shape[-1], len(frequencies)
    cos = torch.empty(tokens, 1, 2 * half, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    if tokens:
        _rope_tables[(tokens,)](
            positions, frequencies if axes is None else axes, frequencies, cos, sin, factor, half,
            triton.next_power_of_2(half), axes is not None, num_warps=1,
        )  # fmt: skip
    return cos, sin


@inlined
def _mean_square(start, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Of HEADS heads that begin at `start`, together."""
    total = 0.0
    for first in range(0, HEADS * DIM, BLOCK):
        place = first + tl.arange(0, BLOCK)
        value = wide(tl.load(start + place, mask=place < HEADS * DIM, other=0.0))
        total += tl.sum(value * value, axis=0)
    return total / (HEADS * DIM)


@inlined
def _turned(
    x, row, head, place, inside, cos, sin, scales, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, ROTATED: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads [heads, 1] of a token whose projection begins at x, normalised and rotated: [heads, elements] float32."""
    partner = tl.where(place < ROTATED, (place + ROTATED // 2) % ROTATED, place)
    at = head * DIM
    value = wide(tl.load(x + at + place, mask=inside, other=0.0))
    other = wide(tl.load(x + at + partner, mask=inside, other=0.0))
    if NORM == 1:
        scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / DIM + eps)
    if NORM == 2:
        of_queries = _mean_square(x, HEADS, DIM, BLOCK)
        of_keys = _mean_square(x + HEADS * DIM, KV_HEADS, DIM, BLOCK)
        scale = tl.rsqrt(tl.where(head < HEADS, of_queries, of_keys) + eps)
    if NORM == 3:
        mean = tl.sum(value, axis=1, keep_dims=True) / DIM
        value = tl.where(inside, value - mean, 0.0)
        other = other - mean
        scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / DIM + eps)
    if NORM == 1 or NORM == 2 or NORM == 3:
        value = value * scale * tl.load(scales + at + place, mask=inside, other=0.0)
        other = other * scale * tl.load(scales + at + partner, mask=inside, other=0.0)
    rotates = place < ROTATED
    c = tl.load(cos + row * ROTATED + place, mask=rotates, other=1.0)
    s = tl.load(sin + row * ROTATED + place, mask=rotates, other=0.0)
    value = value * c + other * s
    if NORM == 4:  # a rotation keeps lengths, but for the tables' factor
        scale = tl.rsqrt(tl.sum(tl.where(inside, value * value, 0.0), axis=1, keep_dims=True) / DIM + eps)
        value = value * scale * tl.load(scales + at + place, mask=inside, other=0.0)
    return value


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rope(
    qkv, stride, cos, sin, scales, eps, query, slots, key, key_scale, key_page, key_head, value, value_scale,
    value_page, value_head, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROTATED: tl.constexpr, NORM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, TILE_HEADS: tl.constexpr,
    BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs (token, i): the first of a token take queries and keys, TILE_HEADS each, the others values."""
    row = tl.program_id(0).to(tl.int64)
    turning: tl.constexpr = (HEADS + KV_HEADS + TILE_HEADS - 1) // TILE_HEADS
    x = qkv + row * stride
    head = tl.arange(0, TILE_HEADS)[:, None]
    if tl.program_id(1) < turning:
        place = tl.arange(0, BLOCK)[None, :]
        head += tl.program_id(1) * TILE_HEADS
        inside = (head < HEADS + KV_HEADS) & (place < DIM)
        turned = _turned(
            x, row, head, place, inside, cos, sin, scales, eps, HEADS, KV_HEADS, DIM, ROTATED, NORM, BLOCK
        )  # fmt: skip
        turned = narrow(turned, query.dtype.element_ty)
        tl.store(query + (row * HEADS + head) * DIM + place, turned, mask=inside & (head < HEADS))
        if KV_HEADS > 0:
            store_entries(
                wide(turned), key, key_scale, tl.load(slots + row), head - HEADS, place, inside & (head >= HEADS),
                key_page, key_head, BLOCK_SIZE, DIM, SCALED,
            )  # fmt: skip
    elif KV_HEADS > 0:
        place = tl.arange(0, VALUE_BLOCK)[None, :]
        head += (tl.program_id(1) - turning) * TILE_HEADS
        inside = (head < KV_HEADS) & (place < VALUE_DIM)
        at = (HEADS + KV_HEADS) * DIM + head * VALUE_DIM + place
        of_heads = wide(tl.load(x + at, mask=inside, other=0.0))
        store_entries(
            of_heads, value, value_scale, tl.load(slots + row), head, place, inside,
            value_page, value_head, BLOCK_SIZE, VALUE_DIM, SCALED,
        )  # fmt: skip


def _launch(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, slot: Tensor, layout: Layout, scales: Tensor | None,
    eps: float, norm: str,
) -> Tensor:  # fmt: skip
    tokens = qkv.shape[0]
    kv_heads = layout.heads
    dim = layout.key_dim
    value_dim = layout.value_dim
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    query = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    block, value_block = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    tile = max(1, min(TILE // max(block, value_block), triton.next_power_of_2(heads + kv_heads)))
    programs = triton.cdiv(heads + kv_heads, tile) + triton.cdiv(kv_heads, tile)
    key, value = layout.key, layout.value
    if tokens:
        _rope[(tokens, programs)](
            qkv, qkv.stride(0), cos, sin, cos if scales is None else scales, eps, query, slot,
            key.data, key.scale, key.page, key.head, value.data, value.scale, value.page, value.head,
            heads, kv_heads, dim, value_dim, cos.shape[2], HEAD_NORMS.index(norm), layout.block_size, layout.scaled,
            tile, block, value_block, num_warps=4,
        )  # fmt: skip
    return query


def rope_and_cache_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot: Tensor,
    cache: KvTensors,
    qk_norm: Tensor | None = None,
    eps: float = 0.0,
    head_norm: str = "each",
) -> Tensor:
    layout: Layout = cache.layout
    heads = (qkv.shape[1] - layout.heads * (layout.key_dim + layout.value_dim)) // layout.key_dim
    norm = "none" if qk_norm is None else head_norm
    return _launch(qkv, cos, sin, heads, slot, layout, qk_norm, eps, norm)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    dim = x.shape[1] // heads
    nothing = Entries(x, x, 0, 0, dim)
    return _launch(x, cos, sin, heads, x, Layout(nothing, nothing, 1, 0, dim, dim, False), None, 0.0, "none")
