"""Latent attention of Triton against the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.canonical import Canonical
from tests.kernels.triton.compare import TOLERANCE, sides
from tests.kernels.triton.compare_rope import KV_TOLERANCE, entries


def compare_latent(
    device: str,
    dtype: torch.dtype,
    latent: int,
    rotated: int,
    heads: int,
    interleaved: bool = False,
    kv_type: str = "float32",
) -> None:
    """Entries are written, then attended to, on both sides."""
    both = sides(device, dtype, "latent_cache_write", "paged_attention", kv_type=kv_type)
    torch.manual_seed(latent)
    context, width, block_size = 40, latent + rotated, 16
    x, norm = torch.randn(context, width).to(dtype), torch.rand(latent) + 0.5
    angles = torch.randn(context, 1, rotated // 2)
    tables = torch.cat((angles.cos(),) * 2, dim=2), torch.cat((-angles.sin(), angles.sin()), dim=2)
    query = torch.randn(3, heads * width).to(dtype)
    start, contexts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
    blocks = torch.tensor([[3, 0, 2]], dtype=torch.int32)
    slot = torch.cat([torch.arange(16) + 16 * block for block in blocks[0].tolist()])[:context]
    found, kept = [], []
    for ops, place, kind in (
        (both.ours, both.torch_device, kv_type),
        (both.reference, "cpu", "float32" if kv_type == "fp8" else kv_type),
    ):
        here = [x.to(place) for x in (x, norm, *tables, slot, start, contexts, blocks, query)]
        cache = ops.make_cache(kind, 4, block_size, 1, width, latent, place, True)
        ops.latent_cache_write(*here[:2], 1e-5, *here[2:5], cache, interleaved)
        plan = ops.plan_attention(cache, *here[5:8], (3,), (context,), None)
        found.append(ops.paged_attention(here[8], cache, plan, width**-0.5).cpu().float())
        kept.append(entries(cache)[0] if cache.layout else cache.key.float())
    limit = max(TOLERANCE[dtype], KV_TOLERANCE[kv_type])
    torch.testing.assert_close(kept[0], kept[1], rtol=limit, atol=limit)
    torch.testing.assert_close(found[0], found[1], rtol=limit, atol=limit)


def compare_head_linear(
    device: str, dtype: torch.dtype, tokens: int, sizes: tuple[int, int, int, int], interleaved: bool = False
) -> None:
    """Sizes: heads, inputs, outputs, rotated elements."""
    both = sides(device, dtype, "pack_heads", "head_linear")
    heads, inputs, outputs, turning = sizes
    torch.manual_seed(inputs)
    x, matrix = torch.randn(tokens, heads * (inputs + turning)).to(dtype), torch.randn(heads * outputs, inputs)
    angles = torch.randn(tokens, 1, turning // 2)
    rotation = (torch.cat((angles.cos(),) * 2, dim=2), torch.cat((-angles.sin(), angles.sin()), dim=2))
    tables: tuple[Tensor, ...] = rotation if turning else ()
    matrix = (matrix * inputs**-0.5).to(dtype)
    weight = both.ours.pack_heads([both.here(matrix)], heads)
    ours = both.ours.head_linear(both.here(x), weight, *map(both.here, tables), interleaved=interleaved)
    expected = both.reference.head_linear(
        x, both.reference.pack_heads([matrix], heads), *tables, interleaved=interleaved
    )
    both.close(ours, expected)


def compare_coded_heads(device: str, matrix: Canonical, heads: int, plain: Tensor) -> None:
    """A matrix a head that stays coded, `plain` being its values."""
    both = sides(device, torch.float32, "pack_heads", "head_linear")
    x = torch.randn(5, heads * plain.shape[1])
    ours = both.ours.head_linear(both.here(x), both.ours.pack_heads([matrix], heads))
    expected = both.reference.head_linear(x, both.reference.pack_heads([plain], heads))
    both.close(ours, expected, 1e-3 * float(expected.std()))
