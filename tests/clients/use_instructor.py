"""instructor: typed answers by tools, by JSON Schema and by JSON mode."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel
from scenario import HELLO, MODEL, main


class Booking(BaseModel, extra="forbid"):
    """A table."""

    seats: Literal[2, 4, 6]
    outside: bool


def _client(url: str, mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


def _ask(url: str, mode: instructor.Mode, **given: Any) -> Any:
    asked = [{"role": "user", "content": HELLO}]
    return _client(url, mode).create(
        model=MODEL, messages=asked, response_model=Booking, temperature=0, max_retries=0, **given
    )


def chat(url: str) -> None:
    answer = _client(url, instructor.Mode.TOOLS).create(
        model=MODEL, messages=[{"role": "user", "content": HELLO}], response_model=None, temperature=0, max_tokens=60
    )
    assert answer.choices[0].message.content


def tools(url: str) -> None:
    assert isinstance(_ask(url, instructor.Mode.TOOLS, max_tokens=120), Booking)


def tools_strict(url: str) -> None:
    assert isinstance(_ask(url, instructor.Mode.TOOLS_STRICT, max_tokens=120), Booking)


def structured(url: str) -> None:
    assert isinstance(_ask(url, instructor.Mode.JSON_SCHEMA, max_tokens=120), Booking)


def structured_partially(url: str) -> None:
    client = _client(url, instructor.Mode.JSON_SCHEMA)
    parts = list(
        client.create_partial(
            model=MODEL,
            messages=[{"role": "user", "content": HELLO}],
            response_model=Booking,
            temperature=0,
            max_tokens=120,
            max_retries=0,
        )
    )
    assert parts[-1].seats in (2, 4, 6)


def responses_tools(url: str) -> None:
    assert isinstance(_ask(url, instructor.Mode.RESPONSES_TOOLS, max_output_tokens=120), Booking)


if __name__ == "__main__":
    main(chat, tools, tools_strict, structured, structured_partially, responses_tools)
