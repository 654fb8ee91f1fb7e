"""Random chains of samplers: what is drawn follows the exact distribution, by chi-square, whatever the order."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.config.samplers import BY_NAME
from penstock.kernels.cpu import native
from penstock.kernels.reference.sampling import ReferenceSampling
from tests.runtime.random_chains import CHAINS, DRAWN, LEAST, drawn, p_value


def test_the_chains_are_of_all_samplers() -> None:
    chains = [drawn(number)[0] for number in range(CHAINS)]
    often = Counter(name for chain in chains for name in chain)
    assert often.keys() == BY_NAME.keys() and min(often.values()) > 10 and len(set(chains)) > 150
    assert {drawn(number)[0] for number in range(len(DRAWN))} == {(name,) for name in DRAWN}


@pytest.mark.parametrize("which", ["native", "reference"])
def test_draws_follow_the_exact_distribution(which: str) -> None:
    """By the native kernel from all chains, by the reference, which computes the same, from each sampler alone."""
    kernel = native.NativeSampling() if which == "native" else ReferenceSampling()
    for number in range(CHAINS if which == "native" else len(DRAWN)):
        chain, options, *_ = drawn(number)
        assert p_value(number, kernel, 512, 2) > LEAST / (2 * CHAINS), (number, chain, options)
