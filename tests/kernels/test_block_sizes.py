"""Attention's sums do not depend on how large a cache's blocks are."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_native_attention import TYPES, attend
from tests.kernels.test_paged_attention import Case, build, run

ROWS = ((1, 600), (40, 300), (3, 17), (290, 290), (1, 1))
SIZES = (8, 16, 24, 32, 64)


def case(size: int, **options: object) -> Case:
    return Case(ROWS, 4, 2, 16, 16, size, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_type", TYPES)
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"sinks": True, "soft_cap": 1.5}, {"sloped": True}])
def test_native(isa, kv_type, options):
    results = [attend(case(size, **options), build(case(size, **options)), kv_type) for size in SIZES]
    for size, other in zip(SIZES, results, strict=True):
        assert torch.equal(other, results[1]), size


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"sinks": True, "soft_cap": 1.5}])
def test_reference(options):
    results = [run(case(size, **options), build(case(size, **options))) for size in SIZES]
    for size, other in zip(SIZES, results, strict=True):
        assert torch.equal(other, results[1]), size
