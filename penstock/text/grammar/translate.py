"""From a client's grammar to the text the matchers take: llguidance's Lark dialect, or its JSON list of grammars.

Everything here is bounded by the source's size; what a grammar costs to compile is bounded where it is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from penstock.config import limits
from penstock.text.grammar import forcing, lark
from penstock.text.grammar.gbnf import gbnf_to_lark
from penstock.text.grammar.scan import read_json, refused
from penstock.text.grammar.schema import compact_schema
from penstock.text.grammar.tags import tags_to_lark

Special = Mapping[str, int]
"""Control tokens as they are written, and their ids."""


def translate(kind: str, source: str, special: Special = MappingProxyType({})) -> str:
    """The matchers' form of a grammar.

    Args:
        kind: a value of `config.constraint.GrammarKind`.
        source: as that kind says.
        special: of the model's tokenizer; in structural tags they are matched as tokens.

    Raises:
        RequestError: it is too large, too deep, or not what its kind says; `param` is "grammar".
    """
    if len(source) > limits.MAX_GRAMMAR_CHARS:
        raise refused(f"grammar has {len(source)} characters; allowed: at most {limits.MAX_GRAMMAR_CHARS}.")
    if "\0" in source or (not source.isascii() and any("\ud800" <= char <= "\udfff" for char in source)):
        raise refused("grammar holds a NUL character or a lone surrogate; remove it.")
    try:
        return _TRANSLATORS[kind](source, special)
    except RecursionError as error:
        raise refused(f"grammar is nested too deeply; allowed: {limits.MAX_GRAMMAR_DEPTH} levels.") from error


def _schema(source: str, _: Special) -> str:
    return forcing.schema_source(compact_schema(read_json(source, "JSON schema")))


def _object(source: str, special: Special) -> str:
    return _schema('{"type": "object"}', special)


def _regex(source: str, _: Special) -> str:
    if len(source) > limits.MAX_REGEX_CHARS:
        raise refused(
            f"grammar is a regular expression of {len(source)} characters; allowed: {limits.MAX_REGEX_CHARS}."
        )
    return f"start: {lark.regex(source)}" if source else 'start: ""'


def _choice(source: str, _: Special) -> str:
    choices = read_json(source, "list of strings")
    if not isinstance(choices, list) or not choices or not all(isinstance(item, str) for item in choices):
        raise refused("grammar is no list of choices; allowed: at least one string.")
    if len(choices) > limits.MAX_CHOICES:
        raise refused(f"grammar lists {len(choices)} choices; allowed: at most {limits.MAX_CHOICES}.")
    return "start: T\nT: " + " | ".join(lark.literal(choice) for choice in dict.fromkeys(choices))


def _lark(source: str, _: Special) -> str:
    if not source.strip():
        raise refused("grammar is empty; write at least a rule named start.")
    if source.lstrip().startswith("{"):
        return json.dumps(_checked(read_json(source, "Lark grammar, and a list of grammars")))
    return forcing.unforced(source) if lark.check(source) else source


def _checked(grammars: Any) -> Any:
    """llguidance's list of grammars, each within the limits of its kind."""
    entries = grammars.get("grammars") if isinstance(grammars, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise refused("grammar is an object without a list of grammars; write Lark rules instead.")
    skips = False
    for entry in entries:
        if "json_schema" in entry:
            entry["json_schema"] = compact_schema(entry["json_schema"])
            skips = skips or forcing.skips(entry["json_schema"])
        skips = lark.check(str(entry.get("lark_grammar") or "")) or skips
    return {"grammars": forcing.unforced_list(entries) if skips else entries}


def _gbnf(source: str, _: Special) -> str:
    return gbnf_to_lark(source)


def _tags(source: str, special: Special) -> str:
    return forcing.tags_source(tags_to_lark(read_json(source, "structural tag"), special))


_TRANSLATORS: Final[Mapping[str, Callable[[str, Special], str]]] = MappingProxyType(
    {
        "json_schema": _schema,
        "json_object": _object,
        "regex": _regex,
        "choice": _choice,
        "lark": _lark,
        "gbnf": _gbnf,
        "structural_tag": _tags,
    }
)
