"""KV memory as the kernels here read it: in a block, all tokens of a KV head lie one after the other.

A block is [K, block_size, D]. With FP8 (E4M3) each head of a block begins with one float32 a token, which multiplies
that token's elements; the kernels get scales and elements as two views of the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from penstock.kernels.cache import KvTensors
from penstock.kernels.devices import lacks_fp8
from penstock.kernels.registry import KernelContext
from penstock.kernels.triton.attention_shapes import refuse_heads
from penstock.kernels.triton.numbers import inlined, narrow

TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
ALIGNMENT = 16  # bytes of one load of a thread


@dataclass(frozen=True, slots=True)
class Entries:
    """Where keys, or values, lie.

    Attributes:
        data: elements; block b, head h, token t, element d is at b · page + h · head + t · dim + d.
        scale: float32 view for FP8, element t of head h in block b is at (b · page + h · head) / 4 + t; else `data`.
        page, head, dim: see above, in elements.
    """

    data: Tensor
    scale: Tensor
    page: int
    head: int
    dim: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What a cache made here is: `scaled` for FP8. A latent one's values are its keys' beginnings."""

    key: Entries
    value: Entries
    block_size: int
    heads: int
    key_dim: int
    value_dim: int
    scaled: bool


def refuse(context: KernelContext) -> str | None:
    """Shared by all ops that read or write caches: they are chosen together."""
    if context.kv_type not in TYPES:
        return f"keeps keys and values in {', '.join(TYPES)}, not {context.kv_type}"
    if context.kv_type == "fp8" and (lacking := lacks_fp8(context.device)):
        return lacking
    size = getattr(torch, context.dtype).itemsize
    refused = (refuse_heads(*dims, size, context.shared_memory) for dims in context.heads)
    return next(filter(None, refused), None)


def _head_bytes(kv_type: str, block_size: int, dim: int) -> int:
    size = TYPES[kv_type].itemsize * block_size * dim
    return -(-(size + 4 * block_size) // ALIGNMENT) * ALIGNMENT if kv_type == "fp8" else size


def _entries(kv_type: str, blocks: int, block_size: int, heads: int, dim: int, device: str) -> tuple[Tensor, Entries]:
    dtype = TYPES[kv_type]
    head = _head_bytes(kv_type, block_size, dim) // dtype.itemsize
    # zeros, not empty: what is masked out must not hold NaN, which a multiplication by 0 would keep
    if kv_type == "fp8":
        memory = torch.zeros(blocks, heads * head, dtype=torch.uint8, device=device)
        data = memory.view(dtype).view(-1)[4 * block_size :]
        return memory, Entries(data, memory.view(torch.float32), heads * head, head, dim)
    memory = torch.zeros(blocks, heads, block_size, dim, dtype=dtype, device=device)
    return memory, Entries(memory, memory, heads * head, head, dim)


def make_cache(
    kv_type: str,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    device: str = "cpu",
    latent: bool = False,
) -> KvTensors:
    memory, key = _entries(kv_type, num_blocks, block_size, num_kv_heads, key_dim, device)
    value_memory, value = memory, key
    if not latent:
        value_memory, value = _entries(kv_type, num_blocks, block_size, num_kv_heads, value_dim, device)
    layout = Layout(key, value, block_size, num_kv_heads, key_dim, value_dim, kv_type == "fp8")
    return KvTensors(memory, value_memory, layout, latent)


def cache_block_bytes(
    kv_type: str, block_size: int, num_kv_heads: int, key_dim: int, value_dim: int, latent: bool = False
) -> int:
    dims = (key_dim,) if latent else (key_dim, value_dim)
    return num_kv_heads * sum(_head_bytes(kv_type, block_size, dim) for dim in dims)


@inlined
def store_entries(
    x, data, scale, slot, head, place, inside, page, head_stride, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Writes float32 x [heads, elements], where `inside`, as entries `head` [heads, 1] of one token's slot."""
    at = (slot // BLOCK_SIZE) * page + head * head_stride
    token = slot % BLOCK_SIZE
    if SCALED:
        size = tl.max(tl.where(inside, tl.abs(x), 0.0), axis=1, keep_dims=True)
        factor = tl.maximum(size, 1e-30) / 448.0
        first = tl.max(inside.to(tl.int32), axis=1, keep_dims=True) != 0
        tl.store(scale + at // 4 + token, factor, mask=first)
        x = x / factor
    tl.store(data + at + token * DIM + place, narrow(x, data.dtype.element_ty), mask=inside)
