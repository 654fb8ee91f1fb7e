"""Flags that take an object, whose members may be given one by one: `--hf-overrides.rope_scaling.factor 4`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import typer

OBJECTS: Final = ("--hf-overrides", "--kv-events-config", "--pooler-config", "--speculative-config")
# llama-server's flags of drafts, which are members of one of ours.
MEMBERS: Final = {
    flag: f"--speculative-config.{member}"
    for member, flags in (
        ("method", "--spec-type"),
        ("model", "-md --model-draft --spec-draft-model"),
        ("num_speculative_tokens", "--draft --draft-n --draft-max --spec-draft-n-max"),
        ("draft_min", "--draft-min --draft-n-min --spec-draft-n-min"),
        ("draft_p_min", "--draft-p-min --spec-draft-p-min"),
    )
    for flag in flags.split()
}
_SHORT: Final = {"-sc": "--speculative-config"}
_TEXTS: Final = ("--speculative-config.model",)  # members that are no JSON, whatever they look like
_MOST_PARTS: Final = 16


def joined(words: Sequence[str], members: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """The words with one object for each such flag, at the end; as vLLM reads them.

    A member's value is JSON, else a text; a model's name is always a text. `KEY+` adds it to a list. What is said later
    counts. `members` are other flags that stand for one each.

    Raises:
        typer.BadParameter: a member has no value or no name, or lies in what is no object.
    """
    kept, objects = list[str](), dict[str, dict[str, Any]]()
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        name = members.get(name.replace("_", "-"), name)
        flag, dot, path = name.partition(".")
        flag = _SHORT.get(flag, flag.replace("_", "-"))
        if flag not in OBJECTS:
            kept.append(word)
            continue
        value = value if equals else _next(rest, name)
        found = objects.setdefault(flag, {})
        if dot:
            given = _read(value)
            as_text = flag + dot + path in _TEXTS and not isinstance(given, str)
            _put(found, path.split("."), value if as_text else given, name)
        elif isinstance(whole := _read(value), dict):
            found |= whole
        else:
            kept += [flag, value]  # which our own parser answers
    made = ((flag, json.dumps(value)) for flag, value in objects.items() if value)
    return kept + [part for pair in made for part in pair]


def _next(rest: Iterator[str], name: str) -> str:
    value = next(rest, None)
    if value is None:
        raise typer.BadParameter(f"{name} needs a value.")
    return value


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _put(into: dict[str, Any], path: list[str], value: Any, name: str) -> None:
    if not all(path) or len(path) > _MOST_PARTS:
        raise typer.BadParameter(f"{name}: a member is named as in --hf-overrides.rope_scaling.factor.")
    *outer, last = path
    place: Any = into
    for part in outer:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise typer.BadParameter(f"{name}: {part} is no object.")
    if not last.endswith("+"):
        place[last] = value
    elif isinstance(listed := place.setdefault(last[:-1], []), list):
        listed.append(value)
    else:
        raise typer.BadParameter(f"{name}: {last[:-1]} is no list.")
