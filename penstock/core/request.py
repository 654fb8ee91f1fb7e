"""What is asked of the engine and what it answers, in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from penstock.config.adapters import AdapterUse
from penstock.config.cache_asks import Ask, Pin
from penstock.config.constraint import Grammar, Thinking
from penstock.config.media import EncoderInput, MediaSpan
from penstock.config.pooling import PoolingParams
from penstock.config.request_facts import NO_FACTS, RequestFacts
from penstock.config.retention import NO_RETENTION, Retention
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import TokenLogprobs

PUBLIC = "*"
"""Owner of prompts that the operator has made known to everybody; digests of keys have other characters."""


class FinishReason(str, Enum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence, stop token or stop string
    LENGTH = "length"  # max_tokens or the context length
    CANCELLED = "cancelled"  # by the client
    ERROR = "error"  # see the output's error


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request in tokens, as it crosses to the engine process.

    Attributes:
        prompt_ids: at least one token id, all below the vocabulary size.
        sampling: with max_tokens resolved (not None) and bad_words_ids filled in.
        stop_ids: token ids that end a sequence: end-of-sequence ids unless ignore_eos, plus stop_token_ids.
        seed: 64-bit key of the random streams.
        owner: who sent it, "" where that is not told apart; a PUBLIC prompt stays in the cache, for everybody.
        pooling: what is computed of the prompt instead of a continuation; n and max_tokens are 1 then.
        grammar: what generated tokens must follow, None for anything.
        thinking: how reasoning before the grammar's text ends, None for a model or prompt without.
        adapters: low-rank adapters that its tokens have.
        speculate: most drafts that may be proposed for it at a time, 0 for none.
        media: placeholders in the prompt, in order, none overlapping.
        encoder: what the decoder attends to besides, of a model with an encoder.
        facts: told of it, and carried.
        pin: its prompt stays in the cache for a time.
        ask: it is a question about the cache, of which nothing is computed.
        retention: how long what it computes is to stay in the cache.
        session: what requests of one conversation have in common, where that is known; routers may keep them together.
        counted: whether metrics count it; what the engine asks of itself is not.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    priority: int = 0
    cache_salt: str = ""
    owner: str = ""
    pooling: PoolingParams | None = None
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    adapters: tuple[AdapterUse, ...] = ()
    speculate: int = 0
    media: tuple[MediaSpan, ...] = ()
    encoder: EncoderInput | None = None
    facts: RequestFacts = NO_FACTS
    pin: Pin | None = None
    ask: Ask | None = None
    retention: Retention = NO_RETENTION
    session: str = ""
    counted: bool = True

    def __post_init__(self) -> None:
        if self.speculate and self.guided:
            raise ValueError("a guided request has no drafts: the two sequences of a draw have read different tokens")

    @property
    def waits_for_tokens(self) -> bool:
        """Whether a step's tokens must be known before the next is planned: they may be forced, drafts follow, or a
        logits processor is shown them."""
        return self.speculate > 0 or self.constrained or self.guided or bool(self.sampling.logits_processors)

    @property
    def guided(self) -> bool:
        """Whether a second sequence, which reads the negative prompt, shares its draws."""
        return self.pooling is None and self.sampling.guidance_scale != 1

    @property
    def constrained(self) -> bool:
        """Whether tokens may be forced on it or taken back: no step is planned before the last one's are known."""
        held = self.grammar is not None or (self.thinking is not None and self.thinking.budget is not None)
        return held or bool(self.sampling.banned_strings or self.sampling.begins_with)


class EngineOutput(NamedTuple):
    """News of one sequence.

    Attributes:
        request_id, sequence: whose.
        tokens: new tokens, in order; a stop token that ended the sequence is the last one.
        logprobs: one entry a new token where asked, else empty.
        prompt_logprobs: entries of prompt positions 1 … n - 1, as they become known (sequence 0 only).
        finish_reason: set on the sequence's last output.
        error: a sentence for the client when finish_reason is ERROR.
        cached_tokens: on the first output: prompt tokens taken from the prefix cache.
        missed: on the first output: why no more of the prompt was taken from there; "" if all was.
        queue_seconds: on the first output: time from arrival to the step that admitted the sequence.
        preemptions: times the sequence was preempted so far.
        pooled: on the last output of a request that pools: its result, float32 in the machine's byte order.
        answer: of a question about the cache.
        drafts: how many of its drafts were verified so far, and how many of those were right.
    """

    request_id: str
    sequence: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    preemptions: int = 0
    pooled: bytes | None = None
    drafts: tuple[int, int] = (0, 0)
    missed: str = ""
    answer: dict[str, Any] | None = None
