"""Two texts as one prompt, for models that judge how one answers the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.errors import ParameterError
from penstock.text.cut import cut_text
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


@dataclass(frozen=True, slots=True)
class PairCut:
    """How pairs are cut that are too long: so many tokens of a query, of a document and of both together; 0 for all.

    What is too long together is cut from the document, whose end is kept where `keep_end` says so.
    """

    query: int = 0
    document: int = 0
    together: int = 0
    keep_end: bool = False

    def texts(self, tokenizer: Tokenizer, query: str, document: str) -> tuple[str, str]:
        """The two, each cut to what it may have."""
        query = cut_text(tokenizer, query, self.query, self.keep_end) if self.query else query
        return query, cut_text(tokenizer, document, self.document, self.keep_end) if self.document else document


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


def encode_cut_pair(
    tokenizer: Tokenizer, query: str, document: str, prompt: PairPrompt | None, instruction: str | None, cut: PairCut
) -> tuple[tuple[int, ...], int]:
    """As `encode_pair`, of texts that are cut first.

    Raises:
        RequestError: besides those, what stands before the document has no room.
    """
    query, document = cut.texts(tokenizer, query, document)
    found = encode_pair(tokenizer, query, document, prompt, instruction)
    if not cut.together or (over := len(found[0]) - cut.together) <= 0:
        return found
    size = len(tokenizer.encode(document, add_special_tokens=False, parse_special=False))
    if size > over:
        document = cut_text(tokenizer, document, size - over, cut.keep_end)
        found = encode_pair(tokenizer, query, document, prompt, instruction)
        if document and len(found[0]) <= cut.together:
            return found
    allowed = "room for the query and some of the document; send more"
    raise ParameterError("truncate_prompt_tokens", cut.together, allowed)


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
