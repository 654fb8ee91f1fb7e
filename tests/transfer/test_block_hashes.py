"""Hashes of blocks are those that vLLM computes: golden values of cbor2 6.2 and of Python's own pickle."""

from __future__ import annotations

import pickle

import pytest

from penstock.transfer.block_hashes import BlockHasher, as_number, as_pickle, cbor

CHAIN = (  # (algorithm, hash before the first block, hashes of the blocks below) with PYTHONHASHSEED=0
    (
        "sha256_cbor",
        "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
        "c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb",
        "94b92346d8bac30ddf26fe8f18e43a620bcbface111b83def824256ae9fa8e5e",
        "76fb4be94b3221bc93769578e6b937b8d2bbb2ce4dd6d4d81eaf7671d8d15940",
    ),
    (
        "sha256",
        "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
        "762b2e7e1520febd3a0aedb7358e8602facf3924440e18538fce057e23bae91d",
        "bbe99b97a3e4fe74bb86675c8e04b5f83cefe57f3d8e1a625789f2cc6f385fdc",
        None,
    ),
)


@pytest.mark.parametrize(("algorithm", "none", "first", "second", "with_extra"), CHAIN)
def test_a_chain_has_the_published_hashes(
    algorithm: str, none: str, first: str, second: str, with_extra: str | None
) -> None:
    hasher = BlockHasher(algorithm, "0")
    assert hasher.none.hex() == none
    assert hasher.hash(b"", (1, 2, 3, 4), None).hex() == first
    assert hasher.hash(bytes.fromhex(first), (0, 23, 24, 65536), None).hex() == second
    if with_extra is not None:
        extra = ("my-adapter", ("img-abc", -3), "tenant-a")
        assert hasher.hash(b"", (255, 256, 2**31, 7), extra).hex() == with_extra
    assert BlockHasher(algorithm, None).none != BlockHasher(algorithm, None).none


def test_what_is_hashed_is_canonical() -> None:
    assert cbor((b"\x01" * 2, (1, 24), ("x", ("y", -3)))).hex() == "834201018201181882617882617922"
    assert cbor([0, 23, 24, 255, 256, 65_535, 65_536, 2**32, -1, -25, None]).hex() == (
        "8b0017181818ff19010019ffff1a000100001b0000000100000000203818f6"
    )
    for value in ((b"x" * 32, (1, 255, 256, 70_000, -3), ("a", ("b", 2), "c" * 300)), "0", (b"y", (5,) * 4, None)):
        assert as_pickle(value) == pickle.dumps(value, protocol=5)
    for writer in (cbor, as_pickle):
        with pytest.raises(TypeError, match="float"):
            writer((1, 2.0))
    assert as_number(bytes(24) + b"\xff" * 8) == 2**64 - 1
