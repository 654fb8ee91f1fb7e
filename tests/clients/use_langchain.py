"""langchain-openai: chat models over chat completions and over Responses."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from scenario import FOUND, HELLO, MODEL, WEATHER, main


class Booking(BaseModel, extra="forbid"):
    """A table."""

    seats: Literal[2, 4, 6] = Field(description="How many people")
    outside: bool


@tool
def GetWeather(city: str) -> str:
    """Get the weather of a certain location on a date."""
    return FOUND


def model(url: str, **given: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=120, max_retries=0, **given
    )


def chat(url: str) -> None:
    answer = model(url).invoke(HELLO)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


def stream(url: str) -> None:
    chat = model(url, stream_usage=True)
    pieces = list(chat.stream(HELLO))
    whole = chat.invoke(HELLO)
    assert "".join(piece.content for piece in pieces) == whole.content
    assert any(piece.usage_metadata for piece in pieces)


def _conversation(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([GetWeather])
    asked: list[Any] = [HumanMessage(WEATHER)]
    called = bound.invoke(asked)
    assert [call["name"] for call in called.tool_calls] == ["GetWeather"]
    assert called.tool_calls[0]["args"]["city"] == "London"
    result = ToolMessage(FOUND, tool_call_id=called.tool_calls[0]["id"])
    assert bound.invoke([*asked, called, result]).text


def tools(url: str) -> None:
    _conversation(model(url))


def _streamed(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([GetWeather])
    whole: Any = None
    for piece in bound.stream(WEATHER):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls[0]["name"] == "GetWeather" and whole.tool_calls[0]["args"] == {"city": "London"}


def tools_streamed(url: str) -> None:
    _streamed(model(url))


def tools_forced(url: str) -> None:
    bound = model(url).bind_tools([GetWeather], tool_choice="GetWeather")
    assert bound.invoke(HELLO).tool_calls[0]["name"] == "GetWeather"


def structured(url: str) -> None:
    for method in ("json_schema", "function_calling"):
        found = model(url).with_structured_output(Booking, method=method).invoke(HELLO)
        assert isinstance(found, Booking)


def responses(url: str) -> None:
    chat = model(url, use_responses_api=True)
    answer = chat.invoke(HELLO)
    assert answer.text
    assert "".join(piece.text for piece in chat.stream(HELLO)) == answer.text


def responses_continued(url: str) -> None:
    chat = model(url, use_responses_api=True, use_previous_response_id=True)
    first = chat.invoke([HumanMessage(HELLO)])
    second = chat.invoke([HumanMessage(HELLO), first, HumanMessage("At seven.")])
    assert second.text
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def responses_tools(url: str) -> None:
    _conversation(model(url, use_responses_api=True))


def responses_tools_streamed(url: str) -> None:
    _streamed(model(url, use_responses_api=True))


def responses_structured(url: str) -> None:
    found = model(url, use_responses_api=True).with_structured_output(Booking, method="json_schema").invoke(HELLO)
    assert isinstance(found, Booking)


if __name__ == "__main__":
    main(
        *(chat, stream, tools, tools_streamed, tools_forced, structured),
        *(responses, responses_continued, responses_tools, responses_tools_streamed, responses_structured),
    )
