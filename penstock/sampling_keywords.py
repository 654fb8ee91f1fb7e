"""The fields of `SamplingParams` as keywords, for type checkers; `tests/test_keywords.py` keeps them equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from penstock.core.constraint import Grammar


class SamplingKeywords(TypedDict, total=False):
    """What `SamplingParams` says. Lists are taken where it has tuples."""

    n: int
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool
    ignore_eos: bool
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_logprobs_start: int
    skip_special_tokens: bool


class AnswerKeywords(SamplingKeywords, total=False):
    """Sampling parameters, and what form an answer has: one of these, as `LLM.generate` says."""

    grammar: Grammar | str
    json_schema: Mapping[str, Any] | str
    regex: str
    choice: Sequence[str] | str
