"""Rotation, head norms and cache writes of Triton against the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cache import KvTensors
from tests.kernels.triton.compare import Sides, sides

KV_TOLERANCE = {"float32": 2e-5, "bfloat16": 1.6e-2, "float16": 2e-3, "fp8": 7e-2}


def entries(cache: KvTensors) -> tuple[Tensor, Tensor]:
    """Keys and values of a cache of Triton, [num_blocks, block_size, K, D] float32 on the CPU."""
    layout = cache.layout
    found = []
    for part in (layout.key, layout.value):
        shape = (len(cache.key), layout.heads, layout.block_size)
        strides = (part.page, part.head)
        values = part.data.cpu().float().as_strided((*shape, part.dim), (*strides, part.dim, 1))
        if layout.scaled:
            scales = part.scale.cpu().reshape(-1).as_strided(shape, (part.page // 4, part.head // 4, 1))
            values = values * scales.unsqueeze(-1)
        found.append(values.transpose(1, 2))
    return found[0], found[1]


def compare_rope(
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    rotated: int,
    norm: str | None = None,
    kv_type: str = "float32",
    tokens: int = 5,
    block_size: int = 4,
) -> None:
    both = sides(device, dtype, "rope_and_cache_write", "make_cache", "rope_tables", kv_type=kv_type)
    torch.manual_seed(heads[0] * dims[0])
    qkv = torch.randn(tokens, (sum(heads)) * dims[0] + heads[1] * dims[1]).to(dtype)
    scales = None if norm is None else torch.rand(sum(heads), dims[0]) + 0.5
    slot = torch.randperm(6 * block_size)[:tokens]
    positions = torch.randint(0, 100_000, (tokens,))
    frequencies = 10_000.0 ** -(torch.arange(rotated // 2) / max(1, rotated // 2))
    about = heads[1], *dims
    kept = kv_type if kv_type != "fp8" else "float32"
    cache = both.reference.make_cache(kept, 6, block_size, *about)
    tables = both.reference.rope_tables(positions, frequencies, 1.3)
    rest = () if scales is None else (scales, 1e-5, norm)
    query = both.reference.rope_and_cache_write(qkv, *tables, slot, cache, *rest)
    ours = both.ours.make_cache(kv_type, 6, block_size, *about, device=both.torch_device)
    assert _bytes(ours) == 6 * both.ours.cache_block_bytes(kv_type, block_size, *about)
    tables = both.ours.rope_tables(both.here(positions), both.here(frequencies), 1.3)
    rest = () if scales is None else (both.here(scales), 1e-5, norm)
    both.close(both.ours.rope_and_cache_write(both.here(qkv), *tables, both.here(slot), ours, *rest), query)
    _close_entries(both, ours, cache, slot, kv_type)


def _bytes(cache: KvTensors) -> int:
    return cache.key.nbytes + (0 if cache.latent else cache.value.nbytes)


def _close_entries(both: Sides, ours: KvTensors, reference: KvTensors, slot: Tensor, kv_type: str) -> None:
    limit = max(KV_TOLERANCE[kv_type], KV_TOLERANCE[str(both.dtype).removeprefix("torch.")])
    untouched = torch.ones(reference.key.shape[:2].numel(), dtype=torch.bool)
    untouched[slot] = False
    for mine, theirs in zip(entries(ours), (reference.key, reference.value), strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=limit, atol=limit)
        assert not mine.flatten(0, 1)[untouched].any()


def compare_rope_tables(
    device: str, positions: Tensor, frequencies: Tensor, factor: float, axes: Tensor | None = None
) -> None:
    both = sides(device, torch.float32, "rope_tables")
    there = None if axes is None else both.here(axes)
    ours = both.ours.rope_tables(both.here(positions), both.here(frequencies), factor, there)
    for mine, theirs in zip(ours, both.reference.rope_tables(positions, frequencies, factor, axes), strict=True):
        both.close(mine, theirs, 4e-7)


def compare_rotate_heads(device: str, dtype: torch.dtype, heads: int, dim: int, rotated: int) -> None:
    both = sides(device, dtype, "rotate_heads")
    x, angles = torch.randn(3, heads * dim).to(dtype), torch.randn(3, 1, rotated // 2)
    cos, sin = torch.cat((angles.cos(),) * 2, dim=2), torch.cat((-angles.sin(), angles.sin()), dim=2)
    ours = both.ours.rotate_heads(both.here(x), both.here(cos), both.here(sin), heads)
    both.close(ours, both.reference.rotate_heads(x, cos, sin, heads))
