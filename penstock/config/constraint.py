"""What an answer is held to: a grammar, a choice of tools, a budget for thinking. The matchers are the runtime's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class GrammarKind(str, Enum):
    """In what language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # any JSON object; the source is empty
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings
    LARK = "lark"  # llguidance's dialect
    GBNF = "gbnf"  # llama.cpp's; EBNF as other engines take it is read as the same
    STRUCTURAL_TAG = "structural_tag"  # JSON: free text in which tagged parts follow schemas


@dataclass(frozen=True, slots=True)
class Grammar:
    """Which texts an answer may be."""

    kind: GrammarKind
    source: str = ""


class ToolMode(str, Enum):
    """Whether an answer may or must call tools."""

    AUTO = "auto"
    NONE = "none"  # the tools are not shown to the model
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which of a request's tools an answer may or must call.

    Attributes:
        mode: whether.
        name: of the one function, with NAMED.
        parallel: several calls in one answer.
    """

    mode: ToolMode = ToolMode.AUTO
    name: str = ""
    parallel: bool = True


ANY_TOOL: Final = ToolChoice()


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks the reasoning before its answer, in tokens. A grammar holds what follows the reasoning.

    Attributes:
        end_ids: tokens that end it, forced once the budget is spent.
        begin_ids: tokens that begin it, where the model may also answer at once; () where the prompt has begun it.
        budget: most tokens of reasoning, None for no limit.
    """

    end_ids: tuple[int, ...]
    begin_ids: tuple[int, ...] = ()
    budget: int | None = None
