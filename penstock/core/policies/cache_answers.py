"""Answers to questions about the cache: what of a prompt would be found, whose prefixes are pinned. Nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.core.scheduler import Scheduler
from penstock.core.sequence import Sequence


def answered(scheduler: Scheduler, request: EngineRequest, seconds_for: Callable[[int], float | None]) -> EngineOutput:
    """The answer to a request's question, or that its order is carried out, as its only output.

    Args:
        scheduler: of the engine that is asked.
        request: which asks.
        seconds_for: how long computing so many tokens of a prompt takes; None where that is not known yet.
    """
    ask, pins = request.ask, scheduler.cache.pins
    assert ask is not None
    pins.expire(monotonic())
    answer: dict[str, Any]
    if ask.kind == "match":
        answer = _match(scheduler, request, seconds_for)
    elif ask.kind == "unpin":
        answer = {"deleted": pins.drop(request.owner, ask.name)}
    else:
        answer = {"pins": pins.of(request.owner)}
    return EngineOutput(request.request_id, 0, finish_reason=FinishReason.STOP, answer=answer)


def _match(scheduler: Scheduler, request: EngineRequest, seconds_for: Callable[[int], float | None]) -> dict[str, Any]:
    """As the prompt would be found now, by who sends it."""
    cache = scheduler.cache
    sequence = Sequence(request, 0, -1, scheduler.namespace(request), list(request.prompt_ids))
    match = cache.match(sequence, sequence.reusable)
    computed = sequence.num_prompt - match.reach
    missed = match.reason if scheduler.options.enable_prefix_caching else "off"
    return {
        "prompt_tokens": sequence.num_prompt,
        "device": match.tokens,
        "below": match.reach - match.tokens,
        "computed": computed,
        "seconds": {
            "computing": seconds_for(computed),
            "loading": cache.transfers.tier.seconds_to_load(match.below) if match.below else 0.0,
            "without_cache": seconds_for(sequence.num_prompt),
        },
        "missed": missed or None,
    }
