"""System prompts that the operator shares: computed once at start, kept, and found again by every owner."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

from penstock.config.errors import ConfigError, RequestError, TemplateError
from penstock.config.sampling import SamplingParams
from penstock.core.counters import Counters
from penstock.core.request import PUBLIC, EngineOutput, EngineRequest
from penstock.core.scheduler import Scheduler
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

_QUESTIONS = ("a", "1", "\n", "<", "日")  # what begins differently, so that only what comes before them is shared
_COMPUTED = SamplingParams(max_tokens=2, temperature=0.0)  # the second token's step carries what the prompt leaves
_log = logging.getLogger(__name__)


class Stepped(Protocol):
    """An engine that nobody else uses yet."""

    scheduler: Scheduler

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute."""

    def add(self, request: EngineRequest) -> bool:
        """Queues a request. Raises RequestError if it can never be served."""

    def step(self) -> list[EngineOutput]:
        """Computes one step."""


class Text(Protocol):
    """How a model's prompts become tokens."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def template(self) -> ChatTemplate | None: ...


def pin_shared_prompts(engine: Stepped, text: Text, prompts: Sequence[str]) -> None:
    """Computes prompts as chats and as plain texts begin with them, in whole blocks, and keeps them in the cache.

    Raises:
        ConfigError: the chat template refuses one, it does not fit, or nothing is left to keep.
    """
    size = engine.scheduler.cache.block_size
    for number, prompt in enumerate(prompts, 1):
        kept = [_pinned(engine, number, ids[: len(ids) // size * size]) for ids in _beginnings(text, number, prompt)]
        if not any(kept):
            raise ConfigError(
                f"shared prompt {number} fills no block of {size} tokens, so that nothing can be shared; "
                "use a longer one, or a smaller --block-size."
            )
        _log.info("shared prompt %d: %s tokens are kept for all", number, " and ".join(map(str, kept)))
    engine.scheduler.ledger.counters = Counters()  # what metrics tell begins with the first client


def _beginnings(text: Text, number: int, prompt: str) -> Iterator[list[int]]:
    """How prompts in tokens begin that have this one: chats with this system message, and texts."""
    if text.template is not None:
        system = {"role": "system", "content": prompt}
        try:
            chats = [
                text.template.render([system, {"role": "user", "content": question}], add_generation_prompt=True)
                for question in _QUESTIONS
            ]
        except TemplateError as error:
            raise ConfigError(f"shared prompt {number} cannot be a system message of this model: {error}") from error
        encode, begin = text.tokenizer.encode, text.tokenizer.begin_chat
        yield _common([begin(tuple(encode(chat, add_special_tokens=False))) for chat in chats])
    yield _common([text.tokenizer.encode(prompt + question) for question in _QUESTIONS])


def _common(texts: Sequence[Sequence[int]]) -> list[int]:
    """What all begin with."""
    same = 0
    for tokens in zip(*texts, strict=False):
        if len(set(tokens)) > 1:
            break
        same += 1
    return list(texts[0][:same])


def _pinned(engine: Stepped, number: int, ids: Sequence[int]) -> int:
    """Computes and keeps these tokens; how many they are."""
    if not ids:
        return 0
    request = EngineRequest(f"shared prompt {number}", tuple(ids), _COMPUTED, owner=PUBLIC)
    try:
        engine.add(request)
    except RequestError as error:
        raise ConfigError(f"shared prompt {number} cannot be kept: {error}") from error
    while engine.has_work:
        if failed := next((output.error for output in engine.step() if output.error), None):
            raise ConfigError(f"shared prompt {number} could not be computed: {failed}")
    return len(ids)
