"""Tiles of attention fit what a program may share; heads for which none does go to the reference."""

from __future__ import annotations

import pytest

from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext

HOPPER, ADA, TURING = 232448, 101376, 65536  # bytes a program may share (CUDA C++ programming guide)


@pytest.mark.parametrize(
    ("key", "value", "size", "compiled"),
    [
        (128, 128, 2, 164864), (256, 256, 2, 196608), (512, 512, 2, 196608), (576, 0, 2, 147456), (128, 128, 4, 57600),
        (256, 256, 4, 106752), (512, 512, 4, 196608),
    ],
)  # fmt: skip
def test_the_bound_is_near_what_the_compiler_takes(key: int, value: int, size: int, compiled: int) -> None:
    from penstock.kernels.triton.attention_shapes import fitted, needed

    tile = fitted(True, key, value, size, HOPPER)
    assert tile == fitted(True, key, value, size, 0)
    assert tile is not None
    assert compiled <= needed(tile, key, value, size) <= 1.1 * compiled


@pytest.mark.parametrize("limit", [HOPPER, ADA, TURING])
@pytest.mark.parametrize("size", [2, 4])
def test_tiles_shrink_until_they_fit(limit: int, size: int) -> None:
    from penstock.kernels.triton.attention_shapes import LEAST, fitted, needed

    for key, value in ((64, 64), (128, 128), (256, 256), (192, 128), (512, 512), (576, 0)):
        for long in (True, False):
            tile = fitted(long, key, value, size, limit)
            if tile is None:
                assert (limit, size, key) in ((TURING, 4, 512), (TURING, 4, 576))
                continue
            assert needed(tile, key, value, size) <= limit
            assert min(tile.rows, tile.keys) >= LEAST
            assert 256 % tile.keys == 0


def test_heads_that_are_too_large_get_the_reference() -> None:
    for heads, name in ((((128, 128),), "triton (interpreted)"), (((128, 128), (2048, 2048)), "reference")):
        context = KernelContext("interpreter", "bfloat16", kv_type="bfloat16", heads=heads, shared_memory=ADA)
        found = {choice.op: choice for choice in resolve_kernels(context).choices}
        for op in ("paged_attention", "plan_attention", "make_cache", "rope_and_cache_write", "latent_cache_write"):
            assert found[op].chosen.name == name
        assert found["linear"].chosen.name == "triton (interpreted)"
    reasons = [why for _, why in found["paged_attention"].refused]
    assert "heads of 2048 elements take 131840 bytes of shared memory, and this GPU has 101376" in reasons


@pytest.mark.parametrize(
    ("limit", "size", "stages"), [(0, 2, 2), (HOPPER, 2, 2), (HOPPER, 4, 1), (ADA, 2, 1), (TURING, 2, 1)]
)
def test_products_have_the_stages_that_fit(limit: int, size: int, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.kernels.triton import packing, products
    from tests.kernels.triton import matrices

    (part,) = packing.pack([matrices.coded()["q4_0"]]).parts
    monkeypatch.setattr(products, "shared_memory", lambda _: limit)
    usual = products.ProductTile(64, 128, 256, 8, 2)  # takes 139,264 bytes with elements of two
    assert products._fitting(usual, part, size).stages == stages
