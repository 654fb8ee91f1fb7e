"""Reference ops on dense tensors: lookup, norms, projections, activations, rotation with cache write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from penstock.config.cache_spec import RUN
from penstock.kernels.adapters import Adapted
from penstock.kernels.cache import KvTensors
from penstock.kernels.canonical import Canonical
from penstock.kernels.reference import low_rank


def embedding(numbers: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    rows = table.index_select(0, numbers)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype, device=rows.device)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return functional.rms_norm(total.float(), weight.shape, weight, eps).to(x.dtype), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def packable(matrix: Canonical) -> str | None:
    return "computes with plain tensors"


def pack_linear(parts: Sequence[Tensor], segment: int = 0, ends: Sequence[int] = ()) -> Tensor:
    """Plain matrices, one below the other. The order of sums is torch's."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def pack_table(parts: Sequence[Tensor]) -> Tensor:
    return pack_linear(parts)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    if residual is None:
        return functional.linear(x, weight, bias)
    if bias is None:
        return torch.addmm(residual, x, weight.t())
    return functional.linear(x, weight, bias).add_(residual)


def gate_up(gate_up: Tensor, activation: str, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "swigluoai":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate.mul_(torch.sigmoid(gate * alpha)).mul_(up.add_(1.0))
    return activate(gate, activation, limit).mul_(up)


_ACTIVATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "silu": lambda x, _: functional.silu(x),
    "gelu": lambda x, _: functional.gelu(x),
    "gelu_tanh": lambda x, _: functional.gelu(x, approximate="tanh"),
    "relu": lambda x, _: functional.relu(x),
    "relu2": lambda x, _: functional.relu(x).square_(),
    "clip": lambda x, limit: x.clamp(-limit, limit),
}


def activate(x: Tensor, activation: str, limit: float = 0.0) -> Tensor:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; allowed: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation](x, limit)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    activation: str,
    bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    adapters: Adapted | None = None,
) -> Tensor:
    products = linear(x, weight, bias)
    if adapters is not None:
        products = low_rank.adapter(x, products, adapters, bias)
    return gate_up(products, activation, alpha, limit)


def add(a: Tensor, b: Tensor) -> Tensor:
    return (a + b).to(a.dtype)


def multiply(x: Tensor, factors: Tensor) -> Tensor:
    return (x.float() * factors).to(x.dtype)


def weighted_sum(base: Tensor, terms: Sequence[Tensor], weights: Tensor) -> Tensor:
    total = base.float()
    for index, term in enumerate(terms):
        total = total + weights[:, index : index + 1].float() * term
    return total.to(base.dtype)


def match_rms(x: Tensor, like: Tensor, least: float) -> Tensor:
    own, wanted = (part.float().square().mean(dim=-1, keepdim=True) for part in (x, like))
    return (x.float() * (wanted.sqrt() / own.clamp(min=least).sqrt())).to(x.dtype)


def statistical_topk(x: Tensor, deviations: float) -> Tensor:
    wide = x.float()
    deviation, mean = torch.std_mean(wide, dim=-1, correction=0, keepdim=True)
    return (wide - (mean + deviation * deviations)).relu_().to(x.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return (x / cap).tanh_().mul_(cap)


def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    return (x.flatten(1) * factors).to(x.dtype).view(x.shape)


def position_scales(positions: Tensor, length: float, weight: float, offset: int = 0) -> Tensor:
    steps = ((positions + offset).float() / length).floor()
    return (1.0 + weight * steps.log1p()).unsqueeze(1)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows)


def inject(x: Tensor, rows: Tensor, values: Tensor, level: int) -> Tensor:
    given = values[level].to(x.dtype)
    return x.index_add_(0, rows, given) if level else x.index_copy_(0, rows, given)


def rope_tables(
    positions: Tensor, frequencies: Tensor, factor: float = 1.0, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    placed = positions.float()
    angles = torch.outer(placed, frequencies) if axes is None else placed[axes.long()].t() * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    return rotate(x.view(len(x), heads, x.shape[1] // heads).float(), cos, sin).to(x.dtype)


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
    tokens = qkv.shape[0]
    key_cache, value_cache = cache.key, cache.value
    kv_heads, key_dim = key_cache.shape[2:]
    value_width = value_cache.shape[2] * value_cache.shape[3]
    heads = (qkv.shape[1] - value_width) // key_dim - kv_heads
    value = qkv[:, qkv.shape[1] - value_width :]
    qk = qkv[:, : (heads + kv_heads) * key_dim].view(tokens, heads + kv_heads, key_dim).float()
    if qk_norm is not None and head_norm != "rotated":
        qk = _normed(qk, heads, eps, head_norm) * qk_norm
    rotated = rotate(qk, cos, sin)
    if qk_norm is not None and head_norm == "rotated":
        rotated = _normed(rotated, heads, eps, "each") * qk_norm
    rotated = rotated.to(qkv.dtype)
    enter(cache, key_cache.view(-1, kv_heads, key_dim), slot, rotated[:, heads:])
    enter(cache, value_cache.view(-1, value_width), slot, value)
    return rotated[:, :heads]


def enter(cache: KvTensors, kept: Tensor, slot: Tensor, entries: Tensor) -> None:
    """Entries [T, …] into a cache's keys or values, seen as [slots, …]; only those whose slots are kept here."""
    if not cache.stripe.whole:
        here, slot = own_slots(cache, slot)
        entries = entries[here]
    kept.index_copy_(0, slot, entries.to(kept.dtype))


def own_slots(cache: KvTensors, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Which of these slots are kept here, [T] bool, and where those are."""
    run = slot // RUN
    here = run % cache.stripe.ranks == cache.stripe.place
    return here, (run // cache.stripe.ranks * RUN + slot % RUN)[here]


def _normed(qk: Tensor, heads: int, eps: float, head_norm: str) -> Tensor:
    """Heads [T, H + K, D], of which the first `heads` are queries, normalised without a scale."""
    if head_norm == "all":
        parts = (functional.rms_norm(part, part.shape[1:], None, eps) for part in (qk[:, :heads], qk[:, heads:]))
        return torch.cat(tuple(parts), dim=1)
    if head_norm == "layer":
        return functional.layer_norm(qk, qk.shape[-1:], None, None, eps)
    return functional.rms_norm(qk, qk.shape[-1:], None, eps)


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
) -> KvTensors:
    dtype, shape = _CACHE_TYPES[kv_type], (num_blocks, block_size, num_kv_heads)
    # zeros, not empty: a slot that is masked out must not hold NaN, which a multiplication by 0 would keep
    key = torch.zeros(*shape, key_dim, dtype=dtype, device=device)
    if latent:
        return KvTensors(key, key[..., :value_dim], latent=True)
    return KvTensors(key, torch.zeros(*shape, value_dim, dtype=dtype, device=device))


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
