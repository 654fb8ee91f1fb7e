"""Who answers a conversation: an engine in this process, or a running server."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.cli.conversation import Conversation
from penstock.cli.server_client import Server
from penstock.config.errors import ConfigError, RequestError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import FinishReason
from penstock.engine.api import Delta, ToolCallDelta

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM


@dataclass(slots=True)
class Usage:
    """Tokens of a question, and how many of them were cached; None where nobody has told."""

    prompt: int | None = None
    cached: int | None = None
    output: int = 0

    def as_json(self) -> dict[str, Any]:
        """As OpenAI spells it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": None if self.prompt is None else self.prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def take(self, told: Mapping[str, Any]) -> None:
        """Reads what a server tells in an event, if it does."""
        if told:
            self.prompt = told.get("prompt_tokens")
            self.output = told.get("completion_tokens") or self.output
            self.cached = (told.get("prompt_tokens_details") or {}).get("cached_tokens")


class Talker(Protocol):
    """Answers conversations. All methods belong to one event loop, but `facts` and `check`."""

    @property
    def model(self) -> str:
        """The name of the model that answers."""

    def answer(self, conversation: Conversation, sampling: Mapping[str, Any], usage: Usage) -> AsyncIterator[Delta]:
        """The pieces of an answer; what it cost is written into `usage`."""

    def check(self, sampling: Mapping[str, Any]) -> None:
        """Raises RequestError for parameters that would be refused."""

    def facts(self) -> Sequence[tuple[str, str]]:
        """What there is to know of the model."""

    async def change(self, model: str) -> None:
        """Takes another model. Raises PenstockError if there is none such; the one before stays."""

    async def close(self) -> None:
        """Ends what was started."""


class LocalTalker:
    """An engine in this process."""

    def __init__(self, llm: AsyncLLM, options: EngineOptions) -> None:
        self._llm = llm
        self._options = options

    @classmethod
    async def start(cls, options: EngineOptions, sampling: Mapping[str, Any]) -> LocalTalker:
        """Loads the model.

        Raises:
            PenstockError: it cannot be loaded, or cannot chat.
        """
        from penstock.cli.start import start

        llm = await start(options, sampling)
        frontend = await llm.start()
        if frontend.text.template is None:
            name = frontend.info.model
            await llm.close()
            raise ConfigError(f"{name} has no chat template; `penstock generate` continues a text without one.")
        return cls(llm, options)

    @property
    def model(self) -> str:
        return self._llm.info.model

    async def answer(
        self, conversation: Conversation, sampling: Mapping[str, Any], usage: Usage
    ) -> AsyncIterator[Delta]:
        """As Talker says."""
        tools = conversation.tools or None
        answer = self._llm.chat(conversation.all(), tools=tools, parse=True, **_keywords(sampling))
        async for delta in answer:
            usage.prompt, usage.cached = answer.prompt_tokens, answer.cached_tokens
            usage.output += len(delta.token_ids)
            yield delta

    def check(self, sampling: Mapping[str, Any]) -> None:
        """As Talker says."""
        self._llm.sampling(**_keywords(sampling))

    def facts(self) -> Sequence[tuple[str, str]]:
        """As Talker says."""
        info = self._llm.info
        settings = [(row.name, row.value) for row in info.settings]
        head = [("model", info.model), ("architecture", info.architecture), ("context", f"{info.max_model_len} tokens")]
        return [*head, ("weights", info.numbers), ("type", f"{info.dtype} on {info.device}"), *settings]

    async def change(self, model: str) -> None:
        """As Talker says: the other one is loaded before this one goes, if both fit."""
        from penstock.cli.named_model import find_model

        found = find_model(model)
        options = replace(self._options, model=str(found.path), served_model_name=found.name)
        other = await LocalTalker.start(options, {})
        await self._llm.close()
        self._llm, self._options = other._llm, options

    async def close(self) -> None:
        """As Talker says."""
        await self._llm.close()


class ServerTalker:
    """A running server that speaks OpenAI's API."""

    def __init__(self, server: Server, model: str | None) -> None:
        """Without a model's name the first one that the server lists.

        Raises:
            PenstockError: there is no server, or no such model.
        """
        self._server = server
        self._model = self._server.model(model)

    @property
    def model(self) -> str:
        return self._model

    async def answer(
        self, conversation: Conversation, sampling: Mapping[str, Any], usage: Usage
    ) -> AsyncIterator[Delta]:
        """As Talker says."""
        body = {**sampling, "model": self._model, "messages": conversation.all(), "stream": True}
        body["stream_options"] = {"include_usage": True}
        if conversation.tools:
            body["tools"] = list(conversation.tools)
        async for event in self._server.stream("/v1/chat/completions", body):
            usage.take(event.get("usage") or {})
            for choice in event.get("choices") or ():
                yield _delta(choice)

    def check(self, sampling: Mapping[str, Any]) -> None:
        """As Talker says; what only the server knows it refuses itself."""
        SamplingParams(**sampling)

    def facts(self) -> Sequence[tuple[str, str]]:
        """As Talker says."""
        return [("model", self._model), ("server", self._server.url), ("its models", ", ".join(self._server.models()))]

    async def change(self, model: str) -> None:
        """As Talker says."""
        self._model = self._server.model(model)

    async def close(self) -> None:
        """As Talker says: the server goes on."""


def _keywords(sampling: Mapping[str, Any]) -> Any:
    return dict(sampling)


def _delta(choice: Mapping[str, Any]) -> Delta:
    found = choice.get("delta") or {}
    calls = [
        ToolCallDelta(
            int(call.get("index") or 0),
            call.get("id"),
            (call.get("function") or {}).get("name"),
            (call.get("function") or {}).get("arguments") or "",
        )
        for call in found.get("tool_calls") or ()
    ]
    reason = choice.get("finish_reason")
    return Delta(
        int(choice.get("index") or 0),
        found.get("content") or "",
        reasoning=found.get("reasoning_content") or found.get("reasoning") or "",
        tool_calls=tuple(calls),
        finish_reason=FinishReason.LENGTH if reason == "length" else FinishReason.STOP if reason else None,
    )


def another_seed(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters with another draw."""
    return {**sampling, "seed": secrets.randbits(32)}


def refuse_nothing(question: str) -> str:
    """The question, unless nothing is asked.

    Raises:
        RequestError: PROMPT and standard input are empty.
    """
    if not question:
        raise RequestError("there is no question: PROMPT and standard input are empty.")
    return question
