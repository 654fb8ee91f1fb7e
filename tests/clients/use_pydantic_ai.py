"""pydantic-ai: an agent with a tool, typed answers, streams, over chat completions and over Responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from scenario import FOUND, HELLO, MODEL, WEATHER, main


class Booking(BaseModel, extra="forbid"):
    """A table."""

    seats: Literal[2, 4, 6]
    outside: bool


def _agent(url: str, kind: Any = OpenAIChatModel, **given: Any) -> Agent[None, Any]:
    model = kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    return Agent(model, model_settings=ModelSettings(temperature=0, max_tokens=120), retries=0, **given)


def chat(url: str) -> None:
    assert _agent(url).run_sync(HELLO).output


def _streamed(agent: Agent[None, Any]) -> str:
    async def work() -> str:
        async with agent.run_stream(HELLO) as result:
            return "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])

    return asyncio.run(work())


def stream(url: str) -> None:
    assert _streamed(_agent(url)) == _agent(url).run_sync(HELLO).output


def _with_tool(agent: Agent[None, Any]) -> None:
    asked = []

    @agent.tool_plain
    def GetWeather(city: str) -> str:
        """Get the weather of a certain location on a date."""
        asked.append(city)
        return FOUND

    assert agent.run_sync(WEATHER).output
    assert asked == ["London"]


def agent_with_a_tool(url: str) -> None:
    _with_tool(_agent(url))


def _with_tool_streamed(agent: Agent[None, Any]) -> None:
    asked = []

    @agent.tool_plain
    def GetWeather(city: str) -> str:
        """Get the weather of a certain location on a date."""
        asked.append(city)
        return FOUND

    async def work() -> str:
        async with agent.run_stream(WEATHER) as result:
            return str(await result.get_output())

    assert asyncio.run(work())
    assert asked == ["London"]


def agent_with_a_tool_streamed(url: str) -> None:
    _with_tool_streamed(_agent(url))


def structured_by_tool(url: str) -> None:
    assert isinstance(_agent(url, output_type=ToolOutput(Booking)).run_sync(HELLO).output, Booking)


def structured(url: str) -> None:
    assert isinstance(_agent(url, output_type=NativeOutput(Booking)).run_sync(HELLO).output, Booking)


def responses(url: str) -> None:
    whole = _agent(url, OpenAIResponsesModel).run_sync(HELLO)
    assert whole.output == _streamed(_agent(url, OpenAIResponsesModel))
    again = _agent(url, OpenAIResponsesModel).run_sync("At seven.", message_history=whole.all_messages())
    assert again.output


def responses_agent_with_a_tool(url: str) -> None:
    _with_tool(_agent(url, OpenAIResponsesModel))


def responses_agent_with_a_tool_streamed(url: str) -> None:
    _with_tool_streamed(_agent(url, OpenAIResponsesModel))


def responses_structured(url: str) -> None:
    agent = _agent(url, OpenAIResponsesModel, output_type=NativeOutput(Booking))
    assert isinstance(agent.run_sync(HELLO).output, Booking)


if __name__ == "__main__":
    main(
        *(chat, stream, agent_with_a_tool, agent_with_a_tool_streamed, structured_by_tool, structured),
        *(responses, responses_agent_with_a_tool, responses_agent_with_a_tool_streamed, responses_structured),
    )
