"""GET /v1/cache: what engines' KV caches hold and have counted; nothing that any prompt says, or of one client."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from penstock.core.policies.bounded_tier import TierCounters
from penstock.server.context import ServerContext
from penstock.server.document import gives
from penstock.server.encoding import json_response
from penstock.server.metrics import EngineFigures


def cache_router(context: ServerContext) -> APIRouter:
    """The route over one server's context."""
    router = APIRouter()

    @router.get("/v1/cache", summary="What KV caches hold", openapi_extra=gives("application/json"))
    async def cache() -> Response:
        figures = await context.all_figures()
        return json_response({"object": "list", "data": [_told(*one) for one in figures.items() if one[1].cache]})

    return router


def _told(model: str, figures: EngineFigures) -> dict[str, Any]:
    stats = figures.stats
    below = {
        "places": stats.kv_below_places,
        "blocks": stats.kv_below_blocks,
        **asdict(TierCounters()),  # sums over restarts leave out what is 0
        **dict(stats.kv_below),
        "failed_loads": stats.failed_loads,
    }
    return {
        "model": model,
        "block_size": int(figures.cache["block_size"]),
        "blocks": {"total": stats.blocks_total, "used": stats.blocks_used, "cached": stats.blocks_cached},
        "prefixes": {
            "queried_tokens": stats.prefix_queries,
            "found_tokens": stats.prefix_hits,
            "misses": dict(stats.miss_reasons),
        },
        "below": below if stats.kv_below_places else None,
    }
