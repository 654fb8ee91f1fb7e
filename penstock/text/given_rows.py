"""Rows that stand in the place of a prompt's tokens: what they go with, and where a chat has them.

A template writes texts, so a chat's rows have marks in their messages: texts that nobody can know beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.errors import ContextLengthError, ParameterError, RequestError
from penstock.config.given_rows import GivenRows
from penstock.config.sampling import SamplingParams

FIELD = "prompt_embeds"


def row_mark(request_id: str, number: int) -> str:
    """The text that stands for a request's rows of this number; request ids are random."""
    return f"[[{request_id} {number}]]"


def split_at_rows(text: str, request_id: str, count: int) -> list[str]:
    """What stands before, between and behind the marks of so many rows.

    Raises:
        RequestError: the template has left one out, or written them twice or in another order.
    """
    pieces = [text]
    for number in range(count):
        before, found, behind = pieces.pop().partition(row_mark(request_id, number))
        if not found:
            break
        pieces += [before, behind]
    if len(pieces) != count + 1 or f"[[{request_id} " in pieces[-1]:
        raise RequestError(
            f"the chat template does not write each of the {count} {FIELD} parts once, in their order; send them where "
            "it does, or the whole prompt to /v1/completions.",
            param="messages",
            code="invalid_value",
        )
    return pieces


def check_rows(rows: Sequence[GivenRows], width: int, context: int, *, asked: SamplingParams, cut: bool) -> None:
    """Refuses rows that a model does not take, and what would need tokens in their places.

    Args:
        rows: the rows.
        width: values of a row that the model takes; 0 where it takes none.
        context: tokens that the model's context holds.
        asked: what is asked of the sampler.
        cut: a prompt that is too long is to be cut.

    Raises:
        RequestError: as said.
    """
    if not width:
        raise RequestError(
            f"{FIELD} is not available: start the server with --enable-prompt-embeds, or send the prompt as text.",
            param=FIELD,
            code="unsupported_parameter",
        )
    for given in rows:
        if given.width != width:
            told = f"rows of {width} values, as this model's embedding has"
            raise ParameterError(FIELD, f"of shape ({len(given)}, {given.width})", told)
    if (count := sum(map(len, rows))) >= context:
        told = f"{FIELD} has {count} rows; this model's context is {context} tokens. Send fewer."
        raise ContextLengthError(told, param=FIELD)
    needs_tokens = {
        "prompt_logprobs": asked.prompt_logprobs is not None,
        "token_healing": asked.token_healing,
        "truncate_prompt_tokens": cut,
    }
    for field, wanted in needs_tokens.items():
        if wanted:
            message = f"{field} is only possible without {FIELD}, whose rows are no tokens; leave one of them out."
            raise RequestError(message, param=field, code="unsupported_parameter")
