"""Starts an engine in this process for a command, and shows a terminal how that goes and what memory it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.async_llm import AsyncLLM
from penstock.cli.options import option_fields
from penstock.cli.terminal import STARTING, loading_bar, tell
from penstock.config.options import EngineOptions


async def start(engine: EngineOptions, sampling: Mapping[str, Any] | None = None) -> AsyncLLM:
    """A loaded engine; the caller closes it.

    Args:
        engine: what it is asked to be.
        sampling: parameters that are checked before anything is loaded.

    Raises:
        PenstockError: a parameter is refused, or the engine cannot start.
    """
    with loading_bar(waiting=STARTING) as told:
        llm = AsyncLLM(**option_fields(engine), progress=told)
        try:
            llm.sampling(**sampling or {})
            await llm.start()
        except BaseException:
            await llm.close()
            raise
    tell("; ".join(f"{row.name} {row.value} ({row.reason})".replace(" ()", "") for row in llm.info.memory))
    return llm
