"""Reference ops on dense tensors: lookup, norms, projections, activations, rotation with cache write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cache import KvCache
from penstock.kernels.canonical import Canonical


def embedding(token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    rows = table.index_select(0, token_ids)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype, device=rows.device)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return functional.rms_norm(total.float(), weight.shape, weight, eps).to(x.dtype), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def packable(matrix: Canonical) -> str | None:
    return "computes with plain tensors"


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Plain matrices, one below the other: how the reference packs."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    if residual is None:
        return functional.linear(x, weight, bias)
    if bias is None:
        return torch.addmm(residual, x, weight.t())
    return functional.linear(x, weight, bias).add_(residual)


def gate_up(gate_up: Tensor, activation: str, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    if activation == "gelu":
        return functional.gelu(gate).mul_(up)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh").mul_(up)
    if activation == "swigluoai":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate.mul_(torch.sigmoid(gate * alpha)).mul_(up.add_(1.0))
    raise ValueError(f"activation is {activation!r}; allowed: silu, gelu, gelu_tanh, swigluoai")


def gated_linear(
    x: Tensor,
    weight: Tensor,
    activation: str,
    bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    return gate_up(linear(x, weight, bias), activation, alpha, limit)


def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return (x / cap).tanh_().mul_(cap)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows)


def rope_tables(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    angles = torch.outer(positions.float(), frequencies.to(positions.device))
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def rope_and_cache_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot: Tensor,
    cache: KvCache,
    qk_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    tokens = qkv.shape[0]
    key_cache, value_cache = cache.key, cache.value
    kv_heads, key_dim = key_cache.shape[2:]
    value_width = value_cache.shape[2] * value_cache.shape[3]
    heads = (qkv.shape[1] - value_width) // key_dim - kv_heads
    value = qkv[:, qkv.shape[1] - value_width :]
    qk = qkv[:, : (heads + kv_heads) * key_dim].view(tokens, heads + kv_heads, key_dim).float()
    if qk_norm is not None:
        qk = functional.rms_norm(qk, (key_dim,), None, eps) * qk_norm
    rotated = rotate(qk, cos, sin).to(qkv.dtype)
    key_cache.view(-1, kv_heads, key_dim).index_copy_(0, slot, rotated[:, heads:].to(key_cache.dtype))
    value_cache.view(-1, value_width).index_copy_(0, slot, value.to(value_cache.dtype))
    return rotated[:, :heads]


_CACHE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_cache(
    kv_type: str,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    device: str = "cpu",
    latent: bool = False,
) -> KvCache:
    dtype, shape = _CACHE_TYPES[kv_type], (num_blocks, block_size, num_kv_heads)
    # zeros, not empty: a slot that is masked out must not hold NaN, which a multiplication by 0 would keep
    key = torch.zeros(*shape, key_dim, dtype=dtype, device=device)
    if latent:
        return KvCache(key, key[..., :value_dim], latent=True)
    return KvCache(key, torch.zeros(*shape, value_dim, dtype=dtype, device=device))


def cache_block_bytes(
    kv_type: str, block_size: int, num_kv_heads: int, key_dim: int, value_dim: int, latent: bool = False
) -> int:
    return _CACHE_TYPES[kv_type].itemsize * block_size * num_kv_heads * (key_dim + (0 if latent else value_dim))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, …, D] float32, its first rot elements rotated by tables [T, 1, rot]."""
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        head, tail = x[..., :rotary_dim], x[..., rotary_dim:]
        return torch.cat((rotate(head, cos, sin), tail), dim=-1)
    return torch.addcmul(x * cos, x.roll(rotary_dim // 2, dims=-1), sin)
