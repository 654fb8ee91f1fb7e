"""Latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434): what is written to the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cache import KvTensors
from penstock.kernels.triton.cache import Layout, refuse, store_entries
from penstock.kernels.triton.numbers import inlined, narrow, wide

__all__ = ["latent_cache_write", "refuse"]


@inlined
def rotated(x, place, cos, sin, inside, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Elements `place` of vectors of SIZE that begin at x, rotated by the token's tables; as two halves in any case."""
    half: tl.constexpr = SIZE // 2
    partner = (place + half) % SIZE
    if INTERLEAVED:
        own, other = place % half * 2 + place // half, partner % half * 2 + partner // half
    else:
        own, other = place, partner
    value = wide(tl.load(x + own, mask=inside, other=0.0))
    turned = wide(tl.load(x + other, mask=inside, other=0.0))
    return value * tl.load(cos + place, mask=inside, other=0.0) + turned * tl.load(sin + place, mask=inside, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _latent_write(
    x, stride, norm, eps, cos, sin, slots, data, scale, page, head, LATENT: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)[None, :]
    of_latent = place < LATENT
    latent = wide(tl.load(x + row * stride + place, mask=of_latent, other=0.0))
    factor = tl.rsqrt(tl.sum(latent * latent, axis=1, keep_dims=True) / LATENT + eps)
    value = latent * factor * tl.load(norm + place, mask=of_latent, other=0.0)
    inside = place < LATENT + ROTATED
    if ROTATED > 0:
        behind = tl.where(of_latent, 0, place - LATENT)
        start = x + row * stride + LATENT
        cos = cos + row * ROTATED
        sin = sin + row * ROTATED
        turned = rotated(start, behind, cos, sin, inside & (place >= LATENT), ROTATED, INTERLEAVED)
        value = tl.where(of_latent, value, turned)
    value = wide(narrow(value, x.dtype.element_ty))
    store_entries(
        value, data, scale, tl.load(slots + row), tl.zeros([1, 1], tl.int32), place, inside, page, head, BLOCK_SIZE,
        LATENT + ROTATED, SCALED,
    )  # fmt: skip


def latent_cache_write(
    x: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slot: Tensor,
    cache: KvTensors,
    interleaved: bool = False,
) -> None:
    layout: Layout = cache.layout
    x = x if x.stride(1) == 1 else x.contiguous()
    key = layout.key
    latent = len(norm)
    width = x.shape[1]
    if len(x):
        _latent_write[(len(x),)](
            x, x.stride(0), norm, eps, cos, sin, slot, key.data, key.scale, key.page, key.head, latent, width - latent,
            interleaved, layout.block_size, layout.scaled, triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
