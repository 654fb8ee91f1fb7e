"""Functions and classes of the operator's that change logits: how they are registered, and how requests name them.

They are registered when an engine starts, and never by a request: what a request sends are names and arguments.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from penstock.config import limits
from penstock.config.errors import ConfigError, ParameterError

FIELD: Final = "logits_processors"
_FLAG: Final = "--logits-processors"
_SPELLING: Final = "module:Class, module:function or name=module:function"
_NAME = re.compile(r"[\w.:/-]{1,128}")
_ALLOWED: Final = (
    'names of registered processors, or objects such as {"name": "mine", "args": [], "kwargs": {}} for those that take '
    f"arguments; at most {limits.MAX_LOGITS_PROCESSORS}"
)
_MEMBERS: Final = frozenset(("name", "qualname", "args", "kwargs"))
_TOLD: Final = frozenset(("name", "arguments"))


class Registered(NamedTuple):
    """A processor that an operator registered.

    Attributes:
        name: what requests call it.
        module, attribute: where it is.
    """

    name: str
    module: str
    attribute: str


@dataclass(frozen=True, slots=True)
class ProcessorCall:
    """What a request says of one processor.

    Attributes:
        name: a registered one's.
        arguments: JSON of an object with `args` and `kwargs`; "" for none.
    """

    name: str
    arguments: str = ""

    def given(self) -> tuple[list[Any], dict[str, Any]]:
        """Its arguments: those by place and those by name."""
        found = json.loads(self.arguments) if self.arguments else {}
        return list(found.get("args", ())), dict(found.get("kwargs", {}))


def spellings(given: object) -> tuple[str, ...]:
    """What an option says, as texts: functions and classes are named by where they are.

    Raises:
        ConfigError: it is no list of those, or one of them is nowhere that it could be found again.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigError(f"logits_processors is {given!r}; allowed: a list of {_SPELLING}.")
    return tuple(one if isinstance(one, str) else _place_of(one) for one in given)


def _place_of(processor: Any) -> str:
    module, name = getattr(processor, "__module__", ""), getattr(processor, "__qualname__", "")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None or found is not processor:
        raise ConfigError(f"logits_processors has {processor!r}, which is no function or class of a module's own.")
    return f"{module}:{name}"


def registered(texts: Sequence[str]) -> tuple[Registered, ...]:
    """The processors that an option names.

    Raises:
        ConfigError: a text is not spelt as it has to be, or two have one name.
    """
    found: dict[str, Registered] = {}
    for text in texts:
        name, equals, place = text.rpartition("=")
        module, colon, attribute = place.partition(":")
        name = name if equals else attribute
        if not colon or not module or not attribute or not _NAME.fullmatch(name):
            raise ConfigError(f"{_FLAG} is {text!r}; allowed: {_SPELLING}.")
        if name in found:
            raise ConfigError(f"{_FLAG} registers {name!r} twice; give one of them another name: name=module:function.")
        found[name] = Registered(name, module, attribute)
    return tuple(found.values())


def as_calls(value: Any) -> tuple[ProcessorCall, ...]:
    """What a request says of processors, in one form.

    Args:
        value: a name, or a list of names, of objects with `name` (vLLM's `qualname`), `args` and `kwargs`, or of calls,
            which may be objects too.

    Raises:
        ParameterError: it is none of those, or too much.
    """
    if value is None:
        return ()
    listed = [value] if isinstance(value, (str, ProcessorCall)) else value
    if not isinstance(listed, (list, tuple)) or len(listed) > limits.MAX_LOGITS_PROCESSORS:
        raise ParameterError(FIELD, value, _ALLOWED)
    return tuple(map(_as_call, listed))


def _as_call(one: Any) -> ProcessorCall:
    if isinstance(one, ProcessorCall):
        return one
    if isinstance(one, str):
        one = {"name": one}
    if isinstance(one, Mapping) and one.keys() == _TOLD:
        one = {"name": one["name"], **_told_arguments(one["arguments"])}
    if not isinstance(one, Mapping) or not one.keys() <= _MEMBERS:
        raise ParameterError(FIELD, one, _ALLOWED)
    name, other = one.get("name"), one.get("qualname")
    args, kwargs = one.get("args"), one.get("kwargs")
    name = other if name is None else name
    listed = args is None or isinstance(args, (list, tuple))
    named = kwargs is None or (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs))
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not listed or not named:
        raise ParameterError(FIELD, one, _ALLOWED)
    if not args and not kwargs:
        return ProcessorCall(name)
    return ProcessorCall(name, _as_json({"args": list(args or ()), "kwargs": dict(kwargs or {})}))


def _told_arguments(text: object) -> dict[str, Any]:
    """The arguments of a call that was told of as an object."""
    most = limits.MAX_PROCESSOR_ARGUMENT_CHARS
    found: Any = None
    if isinstance(text, str) and len(text) <= most:
        with suppress(ValueError, RecursionError):
            found = json.loads(text or "{}")
    if not isinstance(found, dict) or not found.keys() <= {"args", "kwargs"}:
        raise ParameterError(
            FIELD, text, f"arguments in JSON: an object with args and kwargs, at most {most} characters"
        )
    return found


def _as_json(arguments: Mapping[str, Any]) -> str:
    most = limits.MAX_PROCESSOR_ARGUMENT_CHARS
    try:
        text = json.dumps(arguments, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(FIELD, "arguments of other kinds", "arguments that JSON can say") from error
    if len(text) > most:
        raise ParameterError(FIELD, f"arguments of {len(text)} characters of JSON", f"at most {most} a processor")
    return text


def check_known(calls: Sequence[ProcessorCall], names: Sequence[str], field: str = FIELD) -> None:
    """Raises ParameterError for a processor that was not registered."""
    for call in calls:
        if call.name in names:
            continue
        known = f"one of {', '.join(names)}" if names else "none"
        told = f"{known}; processors are registered by {_FLAG} when the server starts, never by a request"
        raise ParameterError(field, call.name, told)


Processor = Callable[..., Any]
"""Gets prompt ids, generated ids, a row of logits and what a request gives besides; changes the row, or gives one."""
