"""What is asked of the engine and what it answers, at the two levels: text (edge) and tokens (engine)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from penstock.config.adapters import AdapterUse
from penstock.config.constraint import ANY_TOOL, Grammar, Thinking, ToolChoice
from penstock.config.given_rows import GivenRows
from penstock.config.lengths import Repetition, Truncation
from penstock.config.pooling import PoolingParams
from penstock.config.request_facts import NO_FACTS, RequestFacts
from penstock.config.sampling import SamplingParams
from penstock.core.media import EncoderInput, MediaSpan
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
class GenerationRequest:
    """The one internal request every dialect translates to. Exactly one of prompt, prompt_ids, messages is given, or
    none of them where rows are the whole prompt.

    Attributes:
        request_id: unique among its owner's live requests.
        sampling: how to choose tokens.
        prompt: raw text.
        prompt_ids: token ids, taken as they are.
        messages: a chat, rendered with the model's own template; OpenAI's message objects as plain dicts.
        rows: given in the place of tokens, in their order; a chat's where its texts have their marks
            (`text.row_marks`).
        tools: function declarations for the template, as plain dicts.
        add_generation_prompt, continue_final_message: as in Hugging Face's apply_chat_template.
        template_kwargs: further variables for the template.
        add_special_tokens: whether the tokenizer adds its own (beginning of text …); None for those of a `prompt`
            alone, as chat templates write them.
        priority: lower is sooner, under the priority policy.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        owner: who sent it: the digest of an API key, "" where there are none.
        grammar: what the answer must follow (what comes after the reasoning, of a model that reasons).
        tool_choice: whether the answer may or must call the tools.
        parse: whether deltas tell reasoning and tool calls apart from the text; else all is text, as generated.
        thinking_budget: most tokens of reasoning, None for no limit.
        truncation: how a prompt is cut that is too long; None to refuse it.
        repetition: when an answer that repeats itself ends; None for never.
        decides: the named tokens are options that the server gave, of which more are told than of others.
    """

    request_id: str
    sampling: SamplingParams
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    rows: tuple[GivenRows, ...] = ()
    tools: tuple[Mapping[str, Any], ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool | None = None
    priority: int = 0
    cache_salt: str = ""
    owner: str = ""
    grammar: Grammar | None = None
    tool_choice: ToolChoice = ANY_TOOL
    parse: bool = False
    thinking_budget: int | None = None
    truncation: Truncation | None = None
    repetition: Repetition | None = None
    decides: bool = False

    @property
    def live_id(self) -> str:
        """What the engine knows it by: no owner can use up, or find out, the ids of another."""
        return f"{self.owner}:{self.request_id}" if self.owner else self.request_id


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
        queue_seconds: on the first output: time from arrival to the step that admitted the sequence.
        preemptions: times the sequence was preempted so far.
        pooled: on the last output of a request that pools: its result, float32 in the machine's byte order.
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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics; counters grow since the engine started, or its client where that restarts engines.

    Attributes:
        running, waiting: sequences in the batch, sequences queued.
        waiting_tokens: tokens of queued sequences.
        waiting_seconds: how long what waits is expected to take, as the engine's client reckons.
        blocks_used, blocks_cached, blocks_total: over all groups: referenced by sequences, only by the prefix
            tree, and all that exist.
        slots_used, slots_allocated: token slots written and allocated by running sequences (group 0).
        steps, prompt_tokens, cached_tokens, generated_tokens, preemptions, finished, cancelled, failed: counters.
        prefix_queries: prompt tokens looked up in the prefix tree; prefix_hits: of those, found.
        miss_reasons: (reason, count) of lookups that found less than the whole prompt.
        held_back: (gate, count) of steps in which a gate kept a sequence in the queue.
        drafts: times that a sequence's drafts were verified.
        drafted_tokens, accepted_tokens: tokens of these, and those of them that were right.
        drafter_failures: times a drafter failed and was switched off.
        draft_decisions: (reason, count) of why sequences had the drafts they had, one for each that drew in a step.
        accepted_now, accepted_usually: accepted drafts of a verified proposal, of the last few hundred and thousands.
        failed_loads: blocks that could not be loaded from a lower tier.
        restarts, resumed: times an engine was started in place of one that died, and requests that went on there.
        paused: 1 while the engine is told to hold still, 2 while it computes nothing at all (`keep`, `retract`), 3 as 1
            while some that came before that still wait to run.
        plan_seconds, commit_seconds, build_seconds, forward_seconds, sample_seconds: time in the parts of all steps.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    waiting_seconds: float = 0.0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    slots_used: int = 0
    slots_allocated: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    miss_reasons: tuple[tuple[str, int], ...] = ()
    held_back: tuple[tuple[str, int], ...] = ()
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafter_failures: int = 0
    draft_decisions: tuple[tuple[str, int], ...] = ()
    accepted_now: float = 0.0
    accepted_usually: float = 0.0
    failed_loads: int = 0
    restarts: int = 0
    resumed: int = 0
    paused: int = 0
    plan_seconds: float = 0.0
    commit_seconds: float = 0.0
    build_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
