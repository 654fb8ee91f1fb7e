"""How many log-probabilities the calls of one key may tell, so that others have some left."""

from __future__ import annotations

import pytest

from penstock.config import limits
from penstock.config.errors import OverloadedError, ParameterError
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.server.told import ToldLogprobs

VOCABULARY = 1000


def asking(owner: str, tokens: int = 100) -> list[GenerationRequest]:
    return [GenerationRequest("x", SamplingParams(max_tokens=tokens, logprobs=-1), prompt="x", owner=owner)]


def test_one_key_has_half_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ToldLogprobs()
    one = told.take(asking("a"), VOCABULARY)
    monkeypatch.setattr(limits, "MAX_TOLD_LOGPROBS_IN_FLIGHT", 4 * one)
    told.take(asking("a"), VOCABULARY)
    with pytest.raises(OverloadedError, match="Your calls"):
        told.take(asking("a"), VOCABULARY)
    for owner in ("b", "c"):
        told.take(asking(owner), VOCABULARY)
    with pytest.raises(OverloadedError, match="There are"):
        told.take(asking("d"), VOCABULARY)
    told.give_back(asking("a"), one)
    assert told.take(asking("d"), VOCABULARY) == one


def test_one_call_may_have_more_and_an_open_server_tells_nobody_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ToldLogprobs()
    one = told.take(asking(""), VOCABULARY)
    monkeypatch.setattr(limits, "MAX_TOLD_LOGPROBS_IN_FLIGHT", 4 * one)
    for _ in range(3):
        told.take(asking(""), VOCABULARY)
    assert told.in_flight == 4 * one
    alone = ToldLogprobs()
    alone.take(asking("a", 300), VOCABULARY)
    with pytest.raises(ParameterError):
        alone.take(asking("b", 500), VOCABULARY)
