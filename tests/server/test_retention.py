"""How long what a request computes stays: what bodies of every dialect say of it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.config.errors import ParameterError
from penstock.config.retention import NO_RETENTION, Retention, TokenRange, kept_for
from penstock.server.dialects.anthropic.schema import MessagesBody
from penstock.server.dialects.anthropic.translate import messages_call
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody
from penstock.server.dialects.openai.translate import chat_call, completion_call
from penstock.server.retention import retention_of

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
RANGES = [{"token_start": 0, "token_end": 4, "priority": 90, "duration_ms": 1500}, {"token_start": 4, "priority": 0}]
SAID: list[tuple[dict[str, Any], Retention]] = [
    ({}, NO_RETENTION),
    ({"kv_cache_retention_config": {}}, NO_RETENTION),
    ({"preserve_cache": True}, kept_for(600.0)),
    ({"preserve_cache": False}, NO_RETENTION),
    ({"prompt_cache_retention": "24h"}, kept_for(86_400.0)),
    ({"prompt_cache_retention": "in_memory"}, NO_RETENTION),
    (
        {"kv_cache_retention_config": {"token_range_retention_configs": RANGES, "decode_retention_priority": 70}},
        Retention((TokenRange(0, 4, 90, 1.5), TokenRange(4, None, 0)), TokenRange(0, None, 70)),
    ),
]


@pytest.mark.parametrize(("said", "meant"), SAID)
def test_openai(said: dict[str, Any], meant: Retention) -> None:
    assert chat_call(ChatBody(**CHAT, **said), {}).requests[0].retention == meant
    assert completion_call(CompletionBody(prompt="a", **said), {}).requests[0].retention == meant


@pytest.mark.parametrize("place", ["tools", "system", "message", "top"])
@pytest.mark.parametrize(("ttl", "seconds"), [(None, 300.0), ("5m", 300.0), ("1h", 3600.0)])
def test_anthropic(place: str, ttl: str | None, seconds: float) -> None:
    mark = {"cache_control": {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}}
    text = {"type": "text", "text": "hi"}
    body: dict[str, Any] = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": [text]}]}
    assert messages_call(MessagesBody(**body), {}).request.retention == NO_RETENTION
    if place == "tools":
        body["tools"] = [{"name": "f", "input_schema": {"type": "object"}, **mark}]
    elif place == "system":
        body["system"] = [text, {**text, **mark}]
    elif place == "message":
        body["messages"] = [{"role": "user", "content": [{**text, **mark}]}]
    else:
        body |= mark
    assert messages_call(MessagesBody(**body), {}).request.retention == kept_for(seconds)


@pytest.mark.parametrize(
    "config",
    [{"token_range_retention_configs": [{"token_start": 0, "priority": 101}]}, {"decode_retention_priority": -1},
     {"token_range_retention_configs": [{"token_start": -1, "priority": 1}]}, {"decode_duration_ms": 0},
     {"token_range_retention_configs": [{"token_start": 0, "priority": 1}] * 65}, [], "high"],
)  # fmt: skip
def test_what_is_no_hint_is_refused(config: Any) -> None:
    with pytest.raises(ValidationError):
        ChatBody(**CHAT, kv_cache_retention_config=config)


def test_a_range_ends_behind_its_beginning() -> None:
    config = {"token_range_retention_configs": [{"token_start": 5, "token_end": 5, "priority": 1}]}
    with pytest.raises(ParameterError, match=r"configs\[0\].token_end is 5.*more than token_start \(5\)"):
        retention_of(ChatBody(**CHAT, kv_cache_retention_config=config))
