"""Modelfiles: how a model is made of another one (Ollama's format: FROM, PARAMETER, TEMPLATE, SYSTEM, ADAPTER, LICENSE,
MESSAGE)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from penstock.config.errors import ConfigError, quoted
from penstock.config.limits import MAX_LAYER_TEXT_BYTES

_WORDS: Final = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE", "REQUIRES")
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_ROLES: Final = ("system", "user", "assistant")
PARAMETERS: Final[Mapping[str, type]] = MappingProxyType(
    {
        **dict.fromkeys(("num_ctx", "num_predict", "top_k", "seed", "repeat_last_n", "num_keep", "num_batch"), int),
        **dict.fromkeys(("num_gpu", "main_gpu", "num_thread", "mirostat", "draft_num_predict"), int),
        **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "tfs_z", "repeat_penalty"), float),
        **dict.fromkeys(("presence_penalty", "frequency_penalty", "mirostat_tau", "mirostat_eta"), float),
        **dict.fromkeys(("penalize_newline", "use_mmap", "use_mlock", "low_vram", "numa", "f16_kv"), bool),
        "stop": str,
    }
)


@dataclass(frozen=True, slots=True)
class Modelfile:
    """What a Modelfile says.

    Attributes:
        base: after FROM: a name, a folder or a file.
        params: by name; lists for those that may stand several times (stop).
        template, system: None where nothing is said.
        adapters, licenses: in order.
        messages: turns that come before a conversation.
    """

    base: str
    params: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    system: str | None = None
    adapters: Sequence[str] = ()
    licenses: Sequence[str] = ()
    messages: Sequence[Mapping[str, str]] = ()


def parse_modelfile(text: str) -> Modelfile:
    """Reads a Modelfile.

    Raises:
        ConfigError: a line is none of its instructions, a parameter of a wrong type, or there is no FROM.
    """
    if len(text) > MAX_LAYER_TEXT_BYTES:
        raise ConfigError(f"the Modelfile has {len(text)} characters; {MAX_LAYER_TEXT_BYTES} are allowed.")
    found: dict[str, list[str]] = {word: [] for word in _WORDS}
    params: dict[str, Any] = {}
    messages: list[dict[str, str]] = []
    for number, word, value in _instructions(text):
        if word == "PARAMETER":
            name, _, given = value.partition(" ")
            _set(params, name.lower(), _unquoted(given.strip()), number)
        elif word == "MESSAGE":
            role, _, said = value.partition(" ")
            if role.lower() not in _ROLES:
                raise _wrong(number, f"MESSAGE {quoted(role, 40)} is no role; allowed: {', '.join(_ROLES)}")
            messages.append({"role": role.lower(), "content": _unquoted(said.strip())})
        else:
            found[word].append(value)
    if len(found["FROM"]) != 1:
        raise ConfigError(
            f"a Modelfile has one FROM, with the model that it starts from; this has {len(found['FROM'])}."
        )
    last = {word: found[word][-1] if found[word] else None for word in ("TEMPLATE", "SYSTEM")}
    return Modelfile(
        found["FROM"][0], params, last["TEMPLATE"], last["SYSTEM"], found["ADAPTER"], found["LICENSE"], messages
    )


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """(line number, instruction, its text) of each; a text between three quotes goes over several lines."""
    found: list[tuple[int, str, str]] = []
    lines = text.replace("\r\n", "\n").split("\n")
    number = 0
    while number < len(lines):
        line = lines[number].strip()
        number += 1
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word.upper() not in _WORDS:
            near = get_close_matches(word[:40].upper(), _WORDS, 1)
            meant = f"; {near[0]} is meant?" if near else f"; there are {', '.join(_WORDS)}"
            raise _wrong(number, f"{quoted(word, 40)} is no instruction{meant}")
        rest, begun = rest.strip(), number
        prefix, opening, body = rest.partition('"""')
        if opening and (not prefix.strip() or word.upper() == "MESSAGE"):
            parts = [body]
            while '"""' not in parts[-1]:
                if number >= len(lines):
                    raise _wrong(begun, 'a text begins with """ and never ends')
                parts.append(lines[number])
                number += 1
            parts[-1] = parts[-1][: parts[-1].index('"""')]
            rest = prefix + "\n".join(parts)
        else:
            rest = _unquoted(rest) if word.upper() != "MESSAGE" else rest
        found.append((begun, word.upper(), rest))
    return found


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _set(params: dict[str, Any], name: str, text: str, number: int) -> None:
    kind = PARAMETERS.get(name)
    if kind is None:
        near = get_close_matches(name[:40], PARAMETERS, 1)
        raise _wrong(number, f"PARAMETER {quoted(name, 40)} is unknown" + (f"; {near[0]} is meant?" if near else ""))
    if kind is str:
        params.setdefault(name, []).append(text)
        return
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise _wrong(number, f"PARAMETER {name} is {quoted(text, 40)}; allowed: true, false")
        params[name] = text.lower() == "true"
        return
    if not (_INTEGER if kind is int else _NUMBER).fullmatch(text):
        raise _wrong(
            number, f"PARAMETER {name} is {quoted(text, 40)}; a{'n integer' if kind is int else ' number'} is needed"
        )
    params[name] = kind(text)


def _wrong(number: int, what: str) -> ConfigError:
    return ConfigError(f"line {number} of the Modelfile: {what}.")
