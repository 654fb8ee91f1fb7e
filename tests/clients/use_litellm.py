"""litellm: its OpenAI, Responses, Anthropic and Ollama providers."""

from __future__ import annotations

import json
from typing import Any

import litellm
from scenario import FOUND, HELLO, MODEL, TOOL, WEATHER, main

TOOLS = [{"type": "function", "function": TOOL}]
SCHEMA = {
    "type": "object",
    "properties": {"seats": {"enum": [2, 4, 6]}, "outside": {"type": "boolean"}},
    "required": ["seats", "outside"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "booking", "schema": SCHEMA, "strict": True}}


def ask(url: str, provider: str, text: str | list[Any] = HELLO, **given: Any) -> Any:
    base = f"{url}/v1" if provider == "openai" else url
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    return litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=base,
        api_key="none",
        messages=messages,
        **{"temperature": 0, "max_tokens": 120, "num_retries": 0, **given},
    )


def _chat(url: str, provider: str) -> None:
    answer = ask(url, provider)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def _stream(url: str, provider: str) -> None:
    pieces = [piece.choices[0].delta.content or "" for piece in ask(url, provider, stream=True) if piece.choices]
    assert "".join(pieces) == ask(url, provider).choices[0].message.content


def _tools(url: str, provider: str) -> None:
    asked: list[Any] = [{"role": "user", "content": WEATHER}]
    message = ask(url, provider, asked, tools=TOOLS).choices[0].message
    call = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("GetWeather", {"city": "London"})
    asked += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": FOUND}]
    assert ask(url, provider, asked, tools=TOOLS).choices[0].message.content


def _structured(url: str, provider: str) -> None:
    found = json.loads(ask(url, provider, response_format=FORMAT).choices[0].message.content)
    assert found["seats"] in (2, 4, 6) and isinstance(found["outside"], bool)


def chat(url: str) -> None:
    _chat(url, "openai")


def stream(url: str) -> None:
    _stream(url, "openai")


def tools(url: str) -> None:
    _tools(url, "openai")


def tools_streamed(url: str) -> None:
    pieces = list(ask(url, "openai", WEATHER, tools=TOOLS, stream=True))
    whole = litellm.stream_chunk_builder(pieces)
    assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments) == {"city": "London"}


def structured(url: str) -> None:
    _structured(url, "openai")


def responses(url: str) -> None:
    given: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    answer = litellm.responses(input=HELLO, **given)
    text = answer.output[0].content[0].text
    assert text
    events = list(litellm.responses(input=HELLO, stream=True, **given))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text


def anthropic_structured(url: str) -> None:
    _structured(url, "anthropic")


def anthropic(url: str) -> None:
    _chat(url, "anthropic")
    _stream(url, "anthropic")


def anthropic_tools(url: str) -> None:
    _tools(url, "anthropic")


def ollama(url: str) -> None:
    _chat(url, "ollama_chat")
    _stream(url, "ollama_chat")


def ollama_tools(url: str) -> None:
    _tools(url, "ollama_chat")


def ollama_structured(url: str) -> None:
    _structured(url, "ollama_chat")


if __name__ == "__main__":
    main(
        *(chat, stream, tools, tools_streamed, structured, responses),
        *(anthropic, anthropic_tools, anthropic_structured, ollama, ollama_tools, ollama_structured),
    )
