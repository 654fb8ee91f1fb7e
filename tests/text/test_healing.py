"""The end of a prompt that an answer has to begin with, and that is not told again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.config.errors import ParameterError
from penstock.config.sampling import SamplingParams
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.healing import heal
from penstock.text.tokenizer import Tokenizer

Build = Callable[[str], Tokenizer]
ASKED = SamplingParams(token_healing=True)


@pytest.mark.parametrize("name", ["concierge", "llama-spm", "qwen2", "gpt-2"])
def test_the_last_token_becomes_a_beginning(tokenizer: Build, name: str) -> None:
    built = tokenizer(name)
    ids = tuple(built.encode("A table for tw", add_special_tokens=False))
    assert heal(built, ASKED, ids, True) == (built.token_bytes(ids[-1]), ids[:-1])


def test_what_cannot_be_healed_stays(tokenizer: Build) -> None:
    built = tokenizer("qwen2")
    ids = tuple(built.encode("A table for tw"))
    special, part = min(built.special_ids), built.encode("🦜")[-1]
    assert not built.token_bytes(part).decode("utf-8", "ignore")
    for asked, given, continues in [
        (SamplingParams(), ids, True),
        (ASKED, ids, False),
        (ASKED, ids[:1], True),
        (ASKED, (*ids, special), True),
        (ASKED, (*ids, part), True),
    ]:
        assert heal(built, asked, given, continues) == (b"", given)


@pytest.mark.parametrize("stop", [(), ("w",), ("o w",)])
@pytest.mark.parametrize("name", ["concierge", "llama-spm", "qwen2"])
def test_the_beginning_is_not_told_and_stops_nothing(tokenizer: Build, name: str, stop: tuple[str, ...]) -> None:
    built = tokenizer(name)
    begins = b" tw"
    ids = built.encode("x two women", add_special_tokens=False)
    first = next(place for place, token in enumerate(ids) if built.token_bytes(token).startswith(begins[:2]))
    answer, begins = ids[first:], begins[:2]
    whole = b"".join(map(built.token_bytes, answer)).decode()
    for size in (1, len(answer)):
        detokenizer = IncrementalDetokenizer(built, stop=stop, after_prompt=True)
        detokenizer.leave_out(begins)
        text = "".join(detokenizer.push(answer[at : at + size]).text for at in range(0, len(answer), size))
        text += detokenizer.finish().text
        shown = whole.removeprefix(begins.decode())
        assert text == (shown.partition(stop[0])[0] if stop else shown)


def test_it_is_a_switch() -> None:
    with pytest.raises(ParameterError, match="token_healing"):
        SamplingParams(token_healing=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [" tw", None, 7, b"\xff", "é".encode()[:1], bytearray(b"a")])
def test_a_beginning_is_the_bytes_of_a_text(wrong: Any) -> None:
    assert SamplingParams(begins_with="é".encode()).begins_with == b"\xc3\xa9"
    with pytest.raises(ParameterError, match=r"begins_with is .*; allowed: the bytes of a text in UTF-8"):
        SamplingParams(begins_with=wrong)
