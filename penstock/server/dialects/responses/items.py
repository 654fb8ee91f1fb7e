"""Items of a Responses conversation: checked as they come in, and turned into the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config import limits
from penstock.config.errors import ParameterError, RequestError, format_value
from penstock.server.conversation import check_kind, string_of
from penstock.server.custom_tools import arguments_for
from penstock.server.dialects.responses.compaction import kept, told_to_model
from penstock.server.errors import bad_value
from penstock.server.opaque import text_of
from penstock.server.turns import ChatTurns

Item = dict[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_OUTPUTS: Mapping[str, str] = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
}
"""What calls have given back, and the calls."""
_CALLS = frozenset(_OUTPUTS.values())


def references(given: object) -> list[str]:
    """Ids of stored items that a body's `input` refers to."""
    items = [raw for raw in given if isinstance(raw, dict)] if isinstance(given, list) else []
    return [raw["id"] for raw in items if _kind(raw) == "item_reference" and isinstance(raw.get("id"), str)]


def _kind(raw: Item) -> Any:
    return raw.get("type") or ("message" if "role" in raw else "item_reference" if "id" in raw else None)


def checked_items(
    given: object, earlier: Sequence[Item], known: dict[str, Item], suffix: str, field: str = "input"
) -> list[Item]:
    """A body's `input` as items in full: each with its type, an id, and its content as a list of parts.

    Args:
        given: a text or a list of items.
        earlier: items that come before them.
        known: stored items that references may name, once each, by id; those that are named are taken out.
        suffix: what ids given to items hold besides their kind and number.
        field: of the body, in which they came.

    Raises:
        RequestError: an item of another type, content other than text, or an output of a call that is not there.
    """
    if given is None and earlier:
        given = []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not (given or earlier):
        raise bad_value(field, given, "a string or a list of items, not empty")
    if len(given) + len(earlier) > limits.MAX_MESSAGES:
        raise ParameterError(field, f"{len(given) + len(earlier)} items", f"at most {limits.MAX_MESSAGES}")
    calls = {item["call_id"] for item in earlier if item["type"] in _CALLS}
    result = []
    for index, raw in enumerate(given):
        where = f"{field}[{index}]"
        item = _item(where, raw, f"{suffix}_i{index}")
        if item["type"] == "item_reference":
            if item["id"] not in known:
                raise bad_value(f"{where}.id", item["id"], "the id of a stored item, once; send the item itself")
            item = known.pop(item["id"])
        if item["type"] in _CALLS:
            calls.add(item["call_id"])
        elif (call := _OUTPUTS.get(item["type"])) and item["call_id"] not in calls:
            raise bad_value(f"{where}.call_id", item["call_id"], f"the call_id of a {call} that comes before it")
        result.append(item)
    return result


_FORMS: Mapping[str, tuple[str, tuple[str, ...], Mapping[str, str]]] = {
    "message": ("msg", (), {"content": "input_text"}),
    "function_call": ("fc", ("call_id", "name", "arguments"), {}),
    "custom_tool_call": ("ctc", ("call_id", "name", "input"), {}),
    "custom_tool_call_output": ("ctco", ("call_id",), {"output": "input_text"}),
    "function_call_output": ("fco", ("call_id",), {"output": "input_text"}),
    "compaction": ("cmp", ("encrypted_content",), {}),
    "reasoning": ("rs", (), {"summary": "summary_text", "content": "reasoning_text"}),
    "item_reference": ("ref", ("id",), {}),
}
"""By type of item: how its id begins, its strings, and its lists of parts with the type of those."""
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def item_id(kind: str, suffix: str) -> str:
    """The id of an item of a type."""
    return f"{_FORMS[kind][0]}_{suffix}"


def _item(where: str, raw: object, suffix: str) -> Item:
    if not isinstance(raw, dict):
        raise bad_value(where, raw, "an object")
    kind, role = _kind(raw), raw.get("role")
    if not isinstance(kind, str) or kind not in _FORMS:
        raise bad_value(f"{where}.type", kind, ", ".join(map(format_value, _FORMS)), "unsupported_content")
    check_kind(f"{where}.id", raw.get("id"), str, "a string")
    item: Item = {"id": raw.get("id") or item_id(kind, suffix), "type": kind, "status": "completed"}
    if kind == "message":
        if role not in _ROLES:
            raise bad_value(f"{where}.role", role, ", ".join(_ROLES))
        item["role"] = role
    strings, lists = _FORMS[kind][1:]
    item |= {name: string_of(where, raw, name) for name in strings}
    if kind == "compaction":
        text_of(where, item["encrypted_content"])
    if kind == "reasoning" and raw.get("encrypted_content") is not None:
        item["encrypted_content"] = string_of(where, raw, "encrypted_content")
    for name, part in lists.items():
        content = raw.get(name) or [] if kind == "reasoning" else raw.get(name)
        told = "output_text" if role == "assistant" else part
        same = name == "output" and isinstance(content, str)
        item[name] = content if same else _parts(f"{where}.{name}", content, told)
    if not (item.get("content") or item.get("summary")) and "encrypted_content" in item:
        _thought(item, where)
    return item


def _thought(item: Item, where: str = "input") -> str:
    """What a reasoning item says: in full, else as its opaque content holds it, else in short."""
    opaque = item.get("encrypted_content")
    if item.get("content") or opaque is None:
        return _text(item.get("content") or item["summary"])
    try:
        return text_of(where, opaque)
    except RequestError:
        if item["summary"]:  # another server's, whose summary is told in the clear
            return _text(item["summary"])
        raise


def _parts(where: str, content: object, kind: str) -> list[Item]:
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise bad_value(where, content, "a string or a list of text parts")
    return [_part(f"{where}[{index}]", part, kind) for index, part in enumerate(content)]


def _part(where: str, part: object, kind: str) -> Item:
    given = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or given not in (*_TEXTS, "refusal"):
        raise bad_value(f"{where}.type", given, f"{format_value(kind)} (no media, no files)", "unsupported_content")
    text = string_of(where, part, "refusal" if given == "refusal" else "text")
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})


def messages_of(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """The chat that items make up: what the assistant thought, said and called in one turn is one message."""
    turns = ChatTurns()
    if instructions:
        turns.add("system", instructions)
    summary = False  # whether the last turn ends with one, which the user's next message then follows
    for item in kept(items):
        kind, role = item["type"], item.get("role", "assistant")
        joins, summary = summary, kind == "compaction"
        if kind in _OUTPUTS:
            turns.result(item["call_id"], _text(item["output"]))
        elif kind == "function_call":
            turns.call(item["call_id"], item["name"], item["arguments"])
        elif kind == "compaction":
            turns.add("user", told_to_model(text_of("input", item["encrypted_content"])), joint="\n\n")
        elif kind == "custom_tool_call":
            turns.call(item["call_id"], item["name"], arguments_for(item["input"]))
        elif kind == "reasoning":
            turns.add(role, thought=_thought(item), joint=_joint(turns))
        elif role in ("user", "assistant"):
            joint = _joint(turns) if role == "assistant" else "\n\n" if joins else None
            turns.add(role, _text(item["content"]), joint=joint)
        else:  # many templates know one system message alone
            turns.add("system", _text(item["content"]), joint="\n\n" if len(turns.turns) == 1 else None)
    return turns.messages()


def _joint(turns: ChatTurns) -> str | None:
    """The assistant goes on with its turn until it has said or called something."""
    return None if turns.turns and (turns.turns[-1].texts or turns.turns[-1].calls) else "\n"


def _text(content: str | Sequence[Item]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
