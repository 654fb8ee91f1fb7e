"""Items of a Responses conversation: checked as they come in, and turned into the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config import limits
from penstock.config.errors import ParameterError
from penstock.server.errors import bad_value

Item = dict[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_TYPES = "'message', 'function_call', 'function_call_output', 'reasoning', 'item_reference'"


def references(given: object) -> list[str]:
    """Ids of stored items that a body's `input` refers to."""
    items = [raw for raw in given if isinstance(raw, dict)] if isinstance(given, list) else []
    return [raw["id"] for raw in items if _kind(raw) == "item_reference" and isinstance(raw.get("id"), str)]


def _kind(raw: Item) -> Any:
    return raw.get("type") or ("message" if "role" in raw else "item_reference" if "id" in raw else None)


def checked_items(given: object, earlier: Sequence[Item], known: Mapping[str, Item], suffix: str) -> list[Item]:
    """A body's `input` as items in full: each with its type, an id, and its content as a list of parts.

    Args:
        given: a text or a list of items.
        earlier: items that come before them.
        known: stored items that references may name, by id.
        suffix: what ids given to items hold besides their kind and number.

    Raises:
        RequestError: an item of another type, content other than text, or an output of a call that is not there.
    """
    if given is None and earlier:
        given = []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not (given or earlier):
        raise bad_value("input", given, "a string or a list of items, not empty")
    if len(given) + len(earlier) > limits.MAX_MESSAGES:
        raise ParameterError("input", f"{len(given) + len(earlier)} items", f"at most {limits.MAX_MESSAGES}")
    calls = {item["call_id"] for item in earlier if item["type"] == "function_call"}
    result = []
    for index, raw in enumerate(given):
        where = f"input[{index}]"
        item = _item(where, raw, f"{suffix}_i{index}")
        if item["type"] == "item_reference":
            if item["id"] not in known:
                raise bad_value(f"{where}.id", item["id"], "the id of a stored item; send the item itself")
            item = known[item["id"]]
        if item["type"] == "function_call":
            calls.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in calls:
            raise bad_value(f"{where}.call_id", item["call_id"], "the call_id of a function_call that comes before it")
        result.append(item)
    return result


def _item(where: str, raw: object, suffix: str) -> Item:
    if not isinstance(raw, dict):
        raise bad_value(where, raw, "an object")
    kind = _kind(raw)
    if kind == "message":
        role = raw.get("role")
        if role not in _ROLES:
            raise bad_value(f"{where}.role", role, ", ".join(_ROLES))
        part = "output_text" if role == "assistant" else "input_text"
        content = _parts(f"{where}.content", raw.get("content"), part)
        item: Item = {"type": kind, "role": role, "status": "completed", "content": content}
    elif kind == "function_call":
        item = {"type": kind, "status": "completed"}
        item |= {name: _string(where, raw, name) for name in ("call_id", "name", "arguments")}
    elif kind == "function_call_output":
        item = {"type": kind, "status": "completed", "call_id": _string(where, raw, "call_id")}
        output = raw.get("output")
        item["output"] = output if isinstance(output, str) else _parts(f"{where}.output", output, "input_text")
    elif kind == "reasoning":
        item = {"type": kind, "summary": _parts(f"{where}.summary", raw.get("summary") or [], "summary_text")}
        item["content"] = _parts(f"{where}.content", raw.get("content") or [], "reasoning_text")
    elif kind == "item_reference":
        item = {"type": kind, "id": _string(where, raw, "id")}
    else:
        raise bad_value(f"{where}.type", kind, _TYPES, "unsupported_content")
    given = raw.get("id")
    if given is not None and not isinstance(given, str):
        raise bad_value(f"{where}.id", given, "a string")
    return {"id": given or f"{PREFIXES[item['type']]}_{suffix}", **item}


PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "item_reference": "ref",
}
"""How ids of items begin, by type."""


def _string(where: str, raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str):
        raise bad_value(f"{where}.{name}", value, "a string")
    return value


def _parts(where: str, content: object, kind: str) -> list[Item]:
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise bad_value(where, content, "a string or a list of text parts")
    return [_part(f"{where}[{index}]", part, kind) for index, part in enumerate(content)]


def _part(where: str, part: object, kind: str) -> Item:
    given = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and given == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": kind, "text": part["refusal"]} | ({"annotations": []} if kind == "output_text" else {})
    if given not in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
        allowed = f"{kind!r} (media and files are not available)"
        raise bad_value(f"{where}.type", given, allowed, "unsupported_content")
    text = _string(where, part, "text")  # type: ignore[arg-type]
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})


def messages_of(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """The chat that items make up: what the assistant thought, said and called in one turn is one message."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    names: dict[str, str] = {}
    for item in items:
        kind, last = item["type"], messages[-1] if messages else {"role": ""}
        if kind == "message" and item["role"] != "assistant":
            role, text = item["role"], _text(item["content"])
            if role != "user" and last["role"] == "system" and len(messages) == 1:  # many templates know one alone
                last["content"] += "\n\n" + text
            else:
                messages.append({"role": "system" if role == "developer" else role, "content": text})
        elif kind == "function_call_output":
            output = item["output"] if isinstance(item["output"], str) else _text(item["output"])
            called = {"tool_call_id": item["call_id"], "name": names.get(item["call_id"], "")}
            messages.append({"role": "tool", "content": output, **called})
        else:
            if last["role"] != "assistant" or (kind != "function_call" and (last["content"] or "tool_calls" in last)):
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            _join(last, item)
            if kind == "function_call":
                names[item["call_id"]] = item["name"]
    return messages


def _join(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        turn["content"] = _text(item["content"])
    elif item["type"] == "reasoning":
        turn["reasoning_content"] = _text(item.get("content") or item["summary"])
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _text(parts: Sequence[Item]) -> str:
    return "\n".join(part["text"] for part in parts)
