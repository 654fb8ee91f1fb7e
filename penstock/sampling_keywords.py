"""The fields of `SamplingParams` as keywords, for type checkers; `tests/test_keywords.py` keeps them equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from penstock.config.constraint import Grammar
from penstock.config.logits_processors import ProcessorCall

Adapters = str | Path | Mapping[str | Path, float]
"""An adapter's folder or file; or of several how much each counts."""


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
    repeat_last_n: int
    repetition_decay: int
    no_repeat_ngram_size: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str] | None
    dry_breaker_ids: Sequence[int] | None
    dry_breaker_mask: bytes
    dry_breaker_sequences: Sequence[Sequence[int]] | None
    watermark: bool
    watermark_gamma: float
    watermark_delta: float
    watermark_key: int
    top_n_sigma: float
    dynatemp_range: float
    dynatemp_exponent: float
    smoothing_factor: float
    smoothing_curve: float
    top_a: float
    tfs: float
    epsilon_cutoff: float
    eta_cutoff: float
    xtc_probability: float
    xtc_threshold: float
    xtc_protected_ids: Sequence[int] | None
    adaptive_target: float
    adaptive_decay: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    temperature_last: bool
    samplers: str | Sequence[str] | None
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    bad_words_ids: Sequence[Sequence[int]] | None
    stop: str | Sequence[str] | None
    num_speculative_tokens: int | None
    stop_regex: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool
    ignore_eos: bool
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_logprobs_start: int
    logprob_token_ids: Sequence[int] | None
    skip_special_tokens: bool
    banned_strings: str | Sequence[str] | None
    guidance_scale: float
    negative_prompt: str | None
    negative_prompt_ids: Sequence[int] | None
    token_healing: bool
    begins_with: bytes
    logits_processors: str | Sequence[str | Mapping[str, Any] | ProcessorCall] | None


class AnswerKeywords(SamplingKeywords, total=False):
    """Sampling parameters, what form an answer has (one of these) and its adapters, as `LLM.generate` says."""

    adapter: Adapters
    grammar: Grammar | str
    json_schema: Mapping[str, Any] | str
    regex: str
    choice: Sequence[str] | str
