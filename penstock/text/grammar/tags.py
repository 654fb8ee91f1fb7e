"""Structural tags: free text in which tagged parts follow schemas, to llguidance's Lark dialect.

Two forms are read: the older one with `structures` and `triggers`, and the newer one whose `format` is a tree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from penstock.config import limits
from penstock.config.errors import format_value
from penstock.text.grammar import lark
from penstock.text.grammar.gbnf import gbnf_to_lark
from penstock.text.grammar.scan import refused
from penstock.text.grammar.schema import compact_schema

_FREE: Final = r"/(.|\n)*/"


def tags_to_lark(tag: Any, special: Mapping[str, int]) -> str:
    """The grammar of a structural tag.

    Args:
        tag: the object, with or without `"type": "structural_tag"`.
        special: control tokens, which texts in the tag name as they are written.

    Raises:
        RequestError: it is no structural tag.
    """
    if not isinstance(tag, dict):
        raise refused(f"a structural tag is an object, not {format_value(tag)}.")
    writer = _Writer(special)
    if "format" in tag:
        return writer.grammar(writer.node(tag["format"], "format"))
    return writer.grammar(writer.triggered(_older(tag), "structures"))


def _older(tag: Mapping[str, Any]) -> dict[str, Any]:
    """The older form as the newer `triggered_tags`."""
    structures = _list(tag, "structures", "structural tag")
    tags = []
    for entry in structures:
        if not isinstance(entry, dict):
            raise refused("structures holds something that is no object; allowed: begin, schema and end.")
        content = {"type": "json_schema", "json_schema": entry.get("schema", {})}
        tags.append({"begin": entry.get("begin"), "content": content, "end": entry.get("end", "")})
    return {"triggers": tag.get("triggers"), "tags": tags}


def _list(node: Mapping[str, Any], name: str, path: str) -> list[Any]:
    value = node.get(name)
    if not isinstance(value, list) or not value:
        raise refused(f"{path}: {name} is {format_value(value)}; allowed: a list that is not empty.")
    if len(value) > limits.MAX_STRUCTURAL_TAGS:
        raise refused(f"{path}: {name} has {len(value)} entries; allowed: at most {limits.MAX_STRUCTURAL_TAGS}.")
    return value


def _text(node: Mapping[str, Any], name: str, path: str, default: str | None = None) -> str:
    value = node.get(name, default)
    if not isinstance(value, str):
        raise refused(f"{path}: {name} is {format_value(value)}; allowed: a string.")
    return value


class _Writer:
    """Collects rules, one a node of the tree, and grammars beside them."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: list[str] = []
        self._beside: list[dict[str, Any]] = []
        self._depth = 0
        self._kinds: dict[str, Callable[[Mapping[str, Any], str], str]] = {
            "const_string": lambda node, path: self._const(_text(node, "value", path)),
            "json_schema": lambda node, path: f"%json {json.dumps(compact_schema(node.get('json_schema', {})))}",
            "any_text": lambda node, path: _FREE,
            "regex": lambda node, path: lark.regex(_text(node, "pattern", path)),
            "grammar": self._grammar,
            "sequence": lambda node, path: " ".join(self._parts(node, "elements", path)),
            "or": lambda node, path: " | ".join(self._parts(node, "elements", path)),
            "tag": self._tag,
            "triggered_tags": self.triggered,
            "tags_with_separator": self._separated,
        }

    def grammar(self, start: str) -> str:
        """The whole, beginning with the rule body `start`."""
        text = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        if not self._beside:
            return text
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": text}, *self._beside]})

    def node(self, node: Any, path: str) -> str:
        """The name of a rule for a node."""
        if not isinstance(node, dict) or node.get("type") not in self._kinds:
            kind = node.get("type") if isinstance(node, dict) else node
            raise refused(f"{path}: type is {format_value(kind)}; allowed: {', '.join(self._kinds)}.")
        self._depth += 1
        if self._depth > limits.MAX_GRAMMAR_DEPTH:
            raise refused(f"the structural tag is nested deeper than {limits.MAX_GRAMMAR_DEPTH} levels.")
        body = self._kinds[node["type"]](node, f"{path}.{node['type']}")
        self._depth -= 1
        return self._rule(body)

    def _rule(self, body: str, options: str = "") -> str:
        if len(self._rules) > 16 * limits.MAX_STRUCTURAL_TAGS:
            raise refused("the structural tag has too many parts; send a smaller one.")
        name = f"n{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _const(self, text: str) -> str:
        return lark.sequence(text, self._special) or '""'

    def _parts(self, node: Mapping[str, Any], name: str, path: str) -> Sequence[str]:
        return [self.node(part, f"{path}.{name}[{i}]") for i, part in enumerate(_list(node, name, path))]

    def _grammar(self, node: Mapping[str, Any], path: str) -> str:
        name = f"beside{len(self._beside)}"
        self._beside.append({"name": name, "lark_grammar": gbnf_to_lark(_text(node, "grammar", path))})
        return f"@{name}"

    def _tag(self, node: Mapping[str, Any], path: str) -> str:
        begin, end = _text(node, "begin", path), self._end(node, path)
        return f"{self._const(begin)} {self._content(node, end, path)}"

    def _end(self, node: Mapping[str, Any], path: str) -> str:
        end = node.get("end", "")
        if isinstance(end, list) and len(end) == 1:
            end = end[0]
        return _text({"end": end}, "end", path)

    def _content(self, node: Mapping[str, Any], end: str, path: str) -> str:
        """A tag's content and end. Free text runs up to the first end."""
        content = node.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and end and end not in self._special:
            return self._rule(f"{_FREE} {lark.literal(end)}", "[lazy]") if end else _FREE
        return f"{self.node(content, f'{path}.content')} {lark.sequence(end, self._special)}"

    def triggered(self, node: Mapping[str, Any], path: str) -> str:
        """Free text; where a trigger comes up, one of the tags that begin with it has to follow."""
        triggers = _list(node, "triggers", path)
        tags = _list(node, "tags", path)
        options: list[str] = []
        for index, tag in enumerate(tags):
            if not isinstance(tag, dict):
                raise refused(f"{path}: tags[{index}] is no object.")
            where = f"{path}.tags[{index}]"
            begin = _text(tag, "begin", where)
            trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
            if trigger is None:
                raise refused(f"{where}: begin is {format_value(begin)}, which starts with none of the triggers.")
            rest = lark.sequence(begin[len(trigger) :], self._special)
            options.append(f"{self._trigger(trigger)} {rest} {self._content(tag, self._end(tag, where), where)}")
        choice = self._rule(" | ".join(map(self._rule, options)))
        if node.get("at_least_one"):
            choice_part = choice if node.get("stop_after_first") else f"{choice}+"
        else:
            choice_part = f"{choice}?" if node.get("stop_after_first") else f"{choice}*"
        return choice_part if node.get("stop_after_first") else f"{choice_part} {self._rule(_FREE)}"

    def _trigger(self, trigger: str) -> str:
        if trigger in self._special:
            return f"{self._rule(_FREE)} {self._const(trigger)}"
        return self._rule(f"{_FREE} {lark.literal(trigger)}", "[lazy]")

    def _separated(self, node: Mapping[str, Any], path: str) -> str:
        tags = " | ".join(self._parts(node, "tags", path))
        separator = self._const(_text(node, "separator", path))
        one = self._rule(tags)
        every = one if node.get("stop_after_first") else f"{one} ({separator} {one})*"
        return every if node.get("at_least_one") else f"({every})?"
