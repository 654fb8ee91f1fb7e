"""What is asked of an engine in text: what every dialect translates to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.config.cache_asks import Pin
from penstock.config.constraint import ANY_TOOL, Grammar, ToolChoice
from penstock.config.given_rows import GivenRows
from penstock.config.lengths import Repetition, Truncation
from penstock.config.retention import NO_RETENTION, Retention
from penstock.config.sampling import SamplingParams


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
        retention: how long what it computes is to stay in the prefix cache.
        session: what requests of one conversation have in common, where clients say so; routers may keep them together.
        owner: who sent it: the digest of an API key, "" where there are none.
        grammar: what the answer must follow (what comes after the reasoning, of a model that reasons).
        tool_choice: whether the answer may or must call the tools.
        parse: whether deltas tell reasoning and tool calls apart from the text; else all is text, as generated.
        thinking_budget: most tokens of reasoning, None for no limit.
        truncation: how a prompt is cut that is too long; None to refuse it.
        repetition: when an answer that repeats itself ends; None for never.
        pin: its prompt stays in the cache for a time.
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
    session: str = ""
    owner: str = ""
    grammar: Grammar | None = None
    tool_choice: ToolChoice = ANY_TOOL
    parse: bool = False
    thinking_budget: int | None = None
    truncation: Truncation | None = None
    repetition: Repetition | None = None
    pin: Pin | None = None
    decides: bool = False
    retention: Retention = NO_RETENTION

    @property
    def live_id(self) -> str:
        """What the engine knows it by: no owner can use up, or find out, the ids of another."""
        return f"{self.owner}:{self.request_id}" if self.owner else self.request_id
