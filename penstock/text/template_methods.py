"""What methods of texts may cost a chat template, charged before they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.config.errors import TemplateError
from penstock.text.template_budget import Budget

PIECE_COST: Final = 64  # bytes and time of a small Python string, in characters of a long one
MEMCMP: Final = 64  # characters compared in the time of one operation
SCAN: Final = 16  # characters searched one by one in the time of one operation
_SPLITTING: Final = frozenset(("split", "rsplit", "splitlines"))
_SEARCHING: Final = frozenset(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition"))
_PADDING: Final = frozenset(("ljust", "rjust", "center", "zfill"))
_SPACES: Final = tuple(chr(code) for code in range(0x3001) if chr(code).isspace())
_CODECS: Final = ("utf-8", "utf8", "ascii", "latin-1", "latin1")
_ON_ERRORS: Final = ("strict", "ignore", "replace")


def check_method(
    budget: Budget, owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Charges a method of `owner` that can take long or return more than it was given.

    Returns:
        The positional arguments to call it with.

    Raises:
        TemplateError: nothing is left to spend, or the arguments are not allowed.
    """
    first = args[0] if args else kwargs.get("sep")
    sought = first if isinstance(first, (str, bytes)) else None
    if name in ("encode", "decode"):
        _check_codec(name, {**dict(zip(("encoding", "errors"), args, strict=False)), **kwargs})
    elif name in _PADDING and isinstance(first, int):
        budget.spend(max(0, first))
    elif name == "replace" and len(args) >= 2:
        charge_replace(budget, owner, args[0], args[1])
    elif name in ("startswith", "endswith") and isinstance(first, tuple):
        budget.spend(len(first) * (1 + len(owner) // MEMCMP))
    elif name == "join" and len(args) == 1:
        items = list(args[0])
        charge_join(budget, owner, items)
        return (items,)
    if name in _SPLITTING:
        budget.spend(_pieces(owner, sought) * PIECE_COST)
    if sought is not None and (name == "rsplit" or name in _SEARCHING):
        budget.spend(len(owner) * len(sought) // SCAN)
    return args


def _pieces(owner: str | bytes, separator: str | bytes | None) -> int:
    """At least the places where a text is taken apart."""
    text = owner if isinstance(owner, str) else owner.decode("latin-1")
    mark = separator.decode("latin-1") if isinstance(separator, bytes) else separator
    return text.count(mark) if mark else sum(map(text.count, _SPACES))


def _check_codec(name: str, given: Mapping[str, Any]) -> None:
    for argument, allowed in (("encoding", _CODECS), ("errors", _ON_ERRORS)):
        value = given.get(argument, allowed[0])
        if not isinstance(value, str) or value.lower().replace("_", "-") not in allowed:
            raise TemplateError(
                f"the chat template calls {name} with {argument} {str(value)[:40]!r}; allowed: {', '.join(allowed)}."
            )


def charge_replace(budget: Budget, text: Any, old: Any, new: Any) -> None:
    """Charges what putting `new` in every place of `old` may make."""
    if isinstance(text, (str, bytes)) and type(old) is type(new) and isinstance(old, (str, bytes)):
        found = text.count(old) if type(old) is type(text) else len(text) + 1  # type: ignore[arg-type]
        budget.spend(len(text) + found * len(new))


def charge_join(budget: Budget, separator: Any, items: list[Any]) -> None:
    """Charges what items with a separator between them make."""
    budget.spend(len(items) * len(str(separator)))
    for item in items:
        budget.spend_deep(item)
