"""GET /v1/cache: what caches hold and count, as figures."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from penstock.config.engine_stats import EngineStats
from penstock.engine.text_pipeline import TextPipeline
from penstock.kernels.cpu import native
from penstock.server.dialects.cache import _told
from penstock.server.metrics import EngineFigures
from tests.server.support import Serving, until
from tests.server.test_owners import KEYS, concierge

SECRET = "The password of the north tower is a heron that sleeps on one leg all winter. " * 2


def told(server: Serving) -> tuple[dict[str, Any], str]:
    answer = httpx.get(f"{server.url}/v1/cache", headers={"x-api-key": KEYS[1]})
    assert answer.status_code == 200 and answer.json()["object"] == "list"
    (one,) = answer.json()["data"]
    return one, answer.text


def test_what_is_zero_is_told() -> None:
    stats = EngineStats(kv_below=(("saved", 3),), kv_below_places=9, kv_below_blocks=3)
    below = _told("m", EngineFigures(stats, {"block_size": "16"}))["below"]
    assert below == {
        "places": 9, "blocks": 3, "saved": 3, "loaded": 0, "failed": 0, "dropped": 0, "declined": 0, "failed_loads": 0,
    }  # fmt: skip


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
def test_what_caches_hold_is_told(text: TextPipeline) -> None:
    with concierge(text, kv_ram=64 << 20) as (server, engine):
        first, _ = told(server)
        assert first["blocks"]["total"] == engine.stats().blocks_total > 0
        assert first["below"]["blocks"] == 0 < first["below"]["places"]
        for _ in range(2):
            body = {"prompt": SECRET, "max_tokens": 1, "cache_salt": "pepper"}
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-api-key": KEYS[0]}).is_success
        until(lambda: told(server)[0]["below"]["saved"] > 0)
        after, whole = told(server)
        assert after["prefixes"]["queried_tokens"] > after["prefixes"]["found_tokens"] > 0
        assert sum(after["prefixes"]["misses"].values()) > 0
        assert after["below"]["blocks"] == after["below"]["saved"] and not after["below"]["failed_loads"]
        assert "heron" not in whole and "pepper" not in whole


def test_without_a_tier_there_is_none(text: TextPipeline) -> None:
    with concierge(text) as (server, _):
        one, _ = told(server)
        assert one["below"] is None and one["block_size"] > 0 and one["blocks"]["used"] == 0
