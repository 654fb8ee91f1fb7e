"""Conversations made short: the model sums up what was said, and the summary stands for it as an opaque item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

Item = dict[str, Any]
_ASK: Final = (
    "Sum up our conversation so far, so that somebody who has only your summary can go on with it. Keep what I asked "
    "for, what was decided and found, names, numbers, paths and code that still matter, results of tools, and what "
    "is left to do. Write the summary alone."
)
_HEAD: Final = "Summary of the conversation so far:\n"
SHARE: Final = 8  # of the context, one part is the most that a summary takes
USERS_SHARE: Final = 4  # of the context, one part is the most that users' messages take beside it
_CHARS_A_TOKEN: Final = 32  # more text than so many of the tokens there is room for is not looked at


def summary_request() -> dict[str, Any]:
    """The message that asks for a summary, as an item in full."""
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _ASK}]}


def told_to_model(summary: str) -> str:
    """What the model is shown in place of the conversation."""
    return _HEAD + summary


def kept(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of a conversation before its last summary the users' messages alone, as they are, and all behind it."""
    last = max((index for index, item in enumerate(items) if item["type"] == "compaction"), default=0)
    before = [item for item in items[:last] if item["type"] == "message" and item["role"] != "assistant"]
    return [*before, *items[last:]]


def newest_users(items: Sequence[Item], room: int, encode: Callable[[str], Sequence[int]]) -> list[Item]:
    """The users' messages that stay beside a summary: the newest, as many as have `room` tokens together."""
    found: list[Item] = []
    for item in reversed(kept(items)):
        if item["type"] != "message" or item["role"] != "user":
            continue
        text = "\n".join(part["text"] for part in item["content"])
        room -= len(encode(text[: (room + 1) * _CHARS_A_TOKEN]))
        if room < 0:
            break
        found.append(item)
    return found[::-1]


def unanswered(items: Sequence[Item]) -> list[Item]:
    """Calls that have no output, which comes in a later turn."""
    outputs = {item["call_id"] for item in items if item["type"].endswith("_output")}
    return [item for item in items if item["type"].endswith("_call") and item["call_id"] not in outputs]
