"""How a row's last queries weigh its keys (SnapKV, Li et al. 2024, arXiv:2404.14469), wherever keys are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SeenRows:
    """The rows of a step, as attention plans know them.

    Attributes:
        lens, contexts: queries of each row, and positions it has in the cache.
        block_table: [R, B] int32.
        seen: [T, 2] int64, first position and end of what each query sees.
    """

    lens: Sequence[int]
    contexts: Sequence[int]
    block_table: Tensor
    seen: Tensor


@dataclass(frozen=True, slots=True)
class Scoring:
    """What attention's scores are made of, as in kernels.api.PagedAttention."""

    scale: float
    sinks: Tensor | None = None
    soft_cap: float | None = None
    slopes: Tensor | None = None


def summed_weights(
    query: Tensor, rows: SeenRows, keys: Callable[[Tensor, int], Tensor], queries: int, scoring: Scoring
) -> Tensor:
    """[R, K, largest context] float32: the weights of each row's last `queries`, summed over them and over the heads

    that read a KV head; zeros behind a row's context. query [T, H, D]; keys(block ids, n) gives the first n keys of
    these blocks, [n, K, D] float32.
    """
    parts: list[Tensor] = []
    start = 0
    for row, (count, context) in enumerate(zip(rows.lens, rows.contexts, strict=True)):
        last = slice(start + max(0, count - queries), start + count)
        start += count
        parts.append(_of_row(query[last], keys(rows.block_table[row].long(), context), rows.seen[last], scoring))
    width = max((part.shape[1] for part in parts), default=0)
    return torch.stack([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


def _of_row(query: Tensor, keys: Tensor, seen: Tensor, scoring: Scoring) -> Tensor:
    """query [w, H, D], keys [C, K, D], seen [w, 2] → [K, C]."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    reads = torch.arange(heads, device=query.device) * kv_heads // heads
    scores = torch.einsum("whd,chd->hwc", query.float(), keys[:, reads]) * scoring.scale
    if scoring.soft_cap is not None:
        scores = (scores / scoring.soft_cap).tanh() * scoring.soft_cap
    place = torch.arange(len(keys), device=query.device)
    low, end = seen[:, :1].to(query.device), seen[:, 1:].to(query.device)
    if scoring.slopes is not None:  # softmax does not see how far all keys of a query are moved
        scores = scores + scoring.slopes.view(-1, 1, 1) * place
    scores = scores.masked_fill((place < low) | (place >= end), float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(keys)].masked_fill(low >= end, 0.0).sum(dim=1)
    return torch.zeros(kv_heads, len(keys), device=query.device).index_add_(0, reads, weights)
