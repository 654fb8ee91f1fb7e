"""How many answers are made and which are told, and where one that goes round in circles ends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.config import limits
from penstock.config.errors import ParameterError, RequestError
from penstock.config.lengths import Repetition
from penstock.search.beam import BeamParams
from penstock.server.sampling import SamplingBody
from penstock.server.shapes import Body


class RepetitionDetection(Body):
    """When an answer that goes round in circles ends."""

    max_pattern_size: Annotated[int, Field(ge=0, le=limits.MAX_PATTERN)] = 0
    min_pattern_size: Annotated[int, Field(ge=0, le=limits.MAX_PATTERN)] = 0
    min_count: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] = 0


class EndingBody(SamplingBody):
    """Fields of answers that are searched for, ranked, or ended early."""

    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    stream: bool | None = None
    use_beam_search: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    repetition_detection: RepetitionDetection | None = None


def repetition(body: EndingBody) -> Repetition | None:
    """When an answer that goes round in circles ends, None where it may.

    Raises:
        ParameterError: sizes or counts that mean nothing.
    """
    asked = body.repetition_detection
    if asked is None or not asked.max_pattern_size:
        return None
    if asked.min_count < 2:
        allowed = "at least 2, or max_pattern_size 0"
        raise ParameterError("repetition_detection.min_count", asked.min_count, allowed)
    if asked.min_pattern_size > asked.max_pattern_size:
        allowed = f"at most max_pattern_size ({asked.max_pattern_size})"
        raise ParameterError("repetition_detection.min_pattern_size", asked.min_pattern_size, allowed)
    if body.use_beam_search:
        raise RequestError(
            "use_beam_search does not go with repetition_detection; leave one of them out.",
            param="use_beam_search",
            code="unsupported_parameter",
        )
    return Repetition(asked.max_pattern_size, max(1, asked.min_pattern_size), asked.min_count)


def beams(body: EndingBody, max_tokens: int | None) -> BeamParams | None:
    """Beam search with `best_of` beams, None where it is not asked for."""
    n = body.n or 1
    width = n if body.best_of is None else body.best_of
    if width < n:
        raise ParameterError("best_of", body.best_of, f"at least n ({n})")
    if not body.use_beam_search:
        return None
    return BeamParams(
        width=width,
        n=n,
        max_tokens=max_tokens,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping or False,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
    )


def best_of(body: EndingBody) -> int | None:
    """How many sequences the best are chosen of, None where that is not asked for."""
    if body.use_beam_search:
        return None
    for name, harmless in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(body, name) not in (None, harmless):
            raise ParameterError(name, getattr(body, name), "only together with use_beam_search: true")
    n = body.n or 1
    sequences = body.best_of or n
    if sequences > n and body.stream:
        allowed = f"n ({n}) with stream: true, as answers are ranked when all are there"
        raise ParameterError("best_of", sequences, allowed)
    return sequences if sequences > n else None
