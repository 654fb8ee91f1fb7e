"""Ops of Triton on rows and streams of rows, and gated norms, against the reference."""

from __future__ import annotations

import torch

from tests.kernels.triton.compare import sides


def compare_weighted_sum(device: str, dtype: torch.dtype, terms: int, size: int) -> None:
    """Terms' weights are a part of a wider activation."""
    both = sides(device, dtype, "weighted_sum", "split")
    torch.manual_seed(size)
    base, *given = (torch.randn(3, size).to(dtype) for _ in range(terms + 1))
    merged = torch.randn(3, 2 * terms).to(dtype)
    weights = both.ours.split(both.here(merged), (terms, terms))[1]
    ours = both.ours.weighted_sum(both.here(base), [both.here(term) for term in given], weights)
    both.close(ours, both.reference.weighted_sum(base, given, merged[:, terms:]))


def compare_rows(device: str, dtype: torch.dtype, size: int) -> None:
    """Of a wider activation a part; one row is far smaller than what its mean square counts for."""
    both = sides(device, dtype, "match_rms", "statistical_topk")
    torch.manual_seed(size)
    merged, like = torch.randn(4, 2 * size).to(dtype), (torch.randn(4, size) * 3).to(dtype)
    merged[2] = 1e-4
    part, here = merged[:, size:], both.here(merged)[:, size:]
    both.close(both.ours.match_rms(here, both.here(like), 1e-5), both.reference.match_rms(part, like, 1e-5))
    for deviations in (-0.5, 1.6448536):
        ours = both.ours.statistical_topk(here, deviations)
        both.close(ours, both.reference.statistical_topk(part, deviations))


def compare_position_scales(device: str) -> None:
    both = sides(device, torch.float32, "position_scales")
    positions = torch.tensor([0, 1, 4095, 8190, 8191, 8192, 131_071, 10_000_000] * 20)
    for offset in (0, 1):
        ours = both.ours.position_scales(both.here(positions), 8192.0, 0.1, offset)
        both.close(ours, both.reference.position_scales(positions, 8192.0, 0.1, offset))


def compare_gated_norm(device: str, dtype: torch.dtype, size: int, group: int | None, gated: bool, first: bool) -> None:
    both = sides(device, dtype, "gated_rms_norm")
    torch.manual_seed(size)
    merged, weight = torch.randn(3, 2 * size).to(dtype), torch.randn(size)
    x, gate = merged.split(size, dim=1)
    here, gate_here = both.here(merged).split(size, dim=1)
    more = 1e-5, group, first
    ours = both.ours.gated_rms_norm(here, gate_here if gated else None, both.here(weight), *more)
    both.close(ours, both.reference.gated_rms_norm(x, gate if gated else None, weight, *more))
