"""Where a grammar may be followed by what it forces, and where that would never end.

llguidance writes down the bytes that must come next. Where a text that is skipped and one that is awaited go on with
the same byte, as in `start: "x" "a"` with `%ignore /a+/`, it is forced for ever, which no limit of the parser ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from penstock.text.grammar.schema import OPTIONS

IGNORE: Final = "%ignore"
"""What says in Lark that a text is skipped, at any place of a grammar."""
_UNFORCED: Final = '%llguidance {"no_forcing": true}'
_OWN_SKIPS: Final = ("whitespace_pattern", "item_separator", "key_separator")


def skips(schema: Any) -> bool:
    """Whether a schema says itself what is skipped between its parts, or what stands there."""
    layout = schema.get(OPTIONS) if isinstance(schema, Mapping) else None
    return isinstance(layout, Mapping) and any(name in layout for name in _OWN_SKIPS)


def unforced(source: str) -> str:
    """Lark rules of which nothing is forced; options are merged, the last one holds; lines keep their numbers."""
    return f"{source}\n{_UNFORCED}\n"


def unforced_list(grammars: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A list of grammars of which nothing is forced: one that is followed by none says so for all.

    Options of Lark rules in the list cannot take it back, as one that says so is enough.
    """
    names = {str(entry.get("name")) for entry in grammars}
    name = next(name for number in range(len(names) + 1) if (name := f"unforced-{number}") not in names)
    return [*grammars, {"name": name, "lark_grammar": f'{_UNFORCED}\nstart: ""'}]


def tags_source(text: str) -> str:
    """Rules, or a list of grammars, that were written here for structural tags, whose schemas alone can skip a text."""
    if not any(name in text for name in _OWN_SKIPS):
        return text
    return json.dumps({"grammars": unforced_list(json.loads(text)["grammars"])}) if text[0] == "{" else unforced(text)


def schema_source(schema: dict[str, Any]) -> str:
    """A schema alone, as the matchers take it."""
    entries: list[dict[str, Any]] = [{"json_schema": schema}]
    return json.dumps({"grammars": unforced_list(entries) if skips(schema) else entries})
