"""Reference ops of latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1.3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.adapters import Adapted, rows_of
from penstock.kernels.cache import KvTensors
from penstock.kernels.reference import dense, low_rank


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
    latent, rest = x[:, : len(norm)].float(), x[:, len(norm) :]
    latent = functional.rms_norm(latent, norm.shape, norm, eps)
    rotated = _rotate(rest.unsqueeze(1), cos, sin, interleaved).squeeze(1)
    entries = torch.cat((latent, rotated), dim=-1).to(x.dtype)
    dense.enter(cache, cache.key.view(-1, x.shape[1]), slot, entries)


def head_linear(
    x: Tensor,
    weight: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    adapters: Adapted | None = None,
) -> Tensor:
    heads, outputs, inputs = weight.shape
    rows = x.view(x.shape[0], heads, x.shape[1] // heads)
    out = torch.einsum("thk,hmk->thm", rows[..., :inputs], weight)
    if adapters is not None:
        out = out.contiguous()
        given = rows[..., :inputs].reshape(-1, inputs)
        each = rows_of(adapters.tokens, x).repeated(heads, torch.arange(heads, device=x.device).repeat(len(x)))
        low_rank.change_parts(given, out.view(-1, outputs), adapters.parts, each)
    if cos is not None and sin is not None:
        rotated = _rotate(rows[..., inputs:], cos, sin, interleaved).to(x.dtype)
        out = torch.cat((out, rotated), dim=-1)
    return out.flatten(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    x = x.float()
    if interleaved:
        x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    return dense.rotate(x, cos, sin)
