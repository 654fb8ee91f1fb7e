"""Two texts as one prompt, for models that judge how one answers the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.errors import ParameterError
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """How a language model is asked about a query and a document.

    Attributes:
        before, after: what stands around the question, with control tokens.
        question: of {instruction}, {query} and {document}.
        instruction: where a request brings none.
    """

    before: str
    question: str
    after: str
    instruction: str


def text_pairs(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """Each text of one with that of the other in the same place, or one text with all of the other.

    Raises:
        ParameterError: the numbers of texts do not go together.
    """
    ones = [first] if isinstance(first, str) else first
    others = [second] if isinstance(second, str) else second
    if len(ones) == 1:
        ones = [*ones] * len(others)
    if len(ones) != len(others):
        allowed = "one text, or as many as the other list has"
        raise ParameterError("text_1", f"{len(ones)} texts for {len(others)}", allowed)
    return list(zip(ones, others, strict=True))


def encode_pair(
    tokenizer: Tokenizer, query: str, document: str, prompt: PairPrompt | None = None, instruction: str | None = None
) -> tuple[tuple[int, ...], int]:
    """Token ids, and the position at which the second text begins (0 where the tokenizer does not tell).

    Control tokens that the texts spell out stay plain text, so that no document can end the question.

    Raises:
        RequestError: a text is too long or not valid Unicode.
    """
    if prompt is None:
        ids, second = tokenizer.encode_pair(query, document)
        return tuple(ids), second
    asked = prompt.question.format(instruction=instruction or prompt.instruction, query=query, document=document)
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt.before, prompt.after))
    return (*before, *tokenizer.encode(asked, add_special_tokens=False, parse_special=False), *after), 0
