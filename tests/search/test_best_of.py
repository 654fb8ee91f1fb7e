"""The best of several answers: each told with what is its own."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config.generation import GenerationRequest
from penstock.engine.frontend import Frontend
from penstock.search.best_of import best_of
from tests.engine.speculation_cells import Cell, Stepped, Workshop, requests_of


def test_drafts_are_those_of_the_answers_that_are_told(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    cell = Cell("suffix", "logprobs", "n", "none", "full", "all")
    engine, info = workshop.engine(cell.cache, cell.drafter, 0)
    client: Any = Stepped(engine, info)
    frontend = Frontend(client, workshop.text(cell), served_name="tiny")

    async def told(generation: Any) -> tuple[dict[int, list[int]], dict[int, tuple[int, int]]]:
        said: dict[int, list[int]] = {}
        running = asyncio.ensure_future(client.run())
        async with aclosing(generation):
            async for delta in generation:
                said.setdefault(delta.index, []).extend(delta.token_ids)
        await running
        return said, generation.drafts

    async def ask(request: GenerationRequest) -> None:
        four = replace(request.sampling, n=4)
        other = replace(request, request_id="all", sampling=four, cache_salt="that earlier answers are not shared")
        every, drafts = await told(await frontend.generate(other))
        best, told_drafts = await told(await best_of(frontend, request, 4))
        places = {index: next(one for one, said in every.items() if said == best[index]) for index in best}
        assert set(best) == {0, 1, 2} and set(told_drafts) == {0, 1, 2}
        assert told_drafts == {index: drafts[place] for index, place in places.items()}
        assert list(places.values()) != [0, 1, 2] and len(set(drafts.values())) > 1

    asyncio.run(ask(requests_of(cell, 7)[0]))
    workshop.close()
