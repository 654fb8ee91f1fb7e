"""Activations by themselves, and the norms of queries and keys, against their formulas, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cpu import ops
from penstock.kernels.reference import attention as dense_paging
from penstock.kernels.reference import dense

EPS = 1e-5


def rms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x / (x.square().mean(dims, keepdim=True) + EPS).sqrt()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rot = cos.shape[-1]
    return torch.cat((x[..., :rot] * cos + x[..., :rot].roll(rot // 2, -1) * sin, x[..., rot:]), -1)


@pytest.mark.parametrize("head_norm", ops.HEAD_NORMS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rot"), [(6, 2, 10, 6), (3, 3, 32, 32), (4, 1, 65, 40)])
@pytest.mark.parametrize("which", ["native", "reference"])
def test_head_norms(isa: str, which: str, head_norm: str, heads: int, kv_heads: int, dim: int, rot: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    tokens, both = 19, heads + kv_heads
    qkv = torch.randn(tokens, (both + kv_heads) * dim, generator=generator) + 0.7
    scales = torch.randn(both, dim, generator=generator)
    angle = torch.randn(tokens, rot // 2, generator=generator) * 5
    cos = torch.cat((angle.cos(), angle.cos()), 1).unsqueeze(1)
    sin = torch.cat((-angle.sin(), angle.sin()), 1).unsqueeze(1)
    chosen = ops if which == "native" else dense
    cache = chosen.make_cache("float32", 2, 16, kv_heads, dim, dim)
    query = chosen.rope_and_cache_write(qkv, cos, sin, torch.arange(tokens), cache, scales, EPS, head_norm)
    x = qkv.double()[:, : both * dim].view(tokens, both, dim)
    if head_norm == "each":
        want = turned(rms(x, (-1,)) * scales, cos, sin)
    elif head_norm == "all":
        want = turned(torch.cat((rms(x[:, :heads], (1, 2)), rms(x[:, heads:], (1, 2))), 1) * scales, cos, sin)
    elif head_norm == "layer":
        want = turned(functional.layer_norm(x, (dim,), eps=EPS) * scales, cos, sin)
    else:
        want = rms(turned(x, cos, sin), (-1,)) * scales
    torch.testing.assert_close(query.view(tokens, heads, dim).double(), want[:, :heads], rtol=3e-5, atol=3e-6)
    paging = ops if which == "native" else dense_paging
    plan = paging.plan_attention(
        cache,
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32),
        torch.tensor([[0, 1]], dtype=torch.int32),
        (tokens,),
        (tokens,),
        None,
    )
    attend = ops.paged_attention if which == "native" else dense_paging.PagedAttention()
    probe = torch.randn(tokens, heads * dim, generator=generator)
    attended = attend(probe, cache, plan, 0.2)
    keys = want[:, heads:].float().repeat_interleave(heads // kv_heads, 1).transpose(0, 1)
    values = qkv[:, both * dim :].view(tokens, kv_heads, dim).repeat_interleave(heads // kv_heads, 1).transpose(0, 1)
    expected = functional.scaled_dot_product_attention(
        probe.view(tokens, heads, dim).transpose(0, 1), keys, values, is_causal=True, scale=0.2
    )
    torch.testing.assert_close(attended, expected.transpose(0, 1).reshape(tokens, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "clip"])
def test_activate(isa: str, activation: str) -> None:
    x = torch.randn(7, 37, generator=torch.Generator().manual_seed(3)) * 3
    want = {
        "silu": functional.silu(x),
        "gelu": functional.gelu(x),
        "gelu_tanh": functional.gelu(x, approximate="tanh"),
        "relu": x.clamp(min=0),
        "relu2": x.clamp(min=0) ** 2,
        "clip": x.clamp(-1.5, 1.5),
    }[activation]
    for run in (ops.activate, dense.activate):
        torch.testing.assert_close(run(x, activation, 1.5), want, rtol=2e-5, atol=2e-6)
        assert run(torch.full((1, 1), torch.nan), activation, 1.5).isnan().all()
