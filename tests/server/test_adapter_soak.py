"""Adapters that come and go on a real server: nobody is answered by another's (see benchmarks.adapter_soak)."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.adapter_soak import soak
from penstock.kernels.cpu import native


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason="the native library is not built")
def test_random_loads_unloads_requests_and_cancels() -> None:
    found = asyncio.run(soak(5.0))
    assert found.wrong == []
    assert min(found.compared, found.loaded, found.unloaded) > 0
