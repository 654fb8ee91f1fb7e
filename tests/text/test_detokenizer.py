"""The pieces joined are the text, whatever the grouping; stop strings are found across every border."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer

Build = Callable[[str], Tokenizer]
NAMES = ["concierge", "stories", "llama-spm", "qwen2", "gpt-2", "phi-3", "gemma-4", "llama-bpe"]


def pushed(detokenizer: IncrementalDetokenizer, ids: list[int], cuts: list[int]) -> tuple[list[str], str | None, int]:
    """Pushes ids in groups of the given sizes; returns the pieces, the stop string and the tokens used."""
    texts, used, at = [], 0, 0
    for size in [*cuts, len(ids)]:
        piece = detokenizer.push(ids[at : at + size])
        at += size
        texts.append(piece.text)
        used += piece.tokens_used
    last = detokenizer.finish()
    return [*texts, last.text], last.stopped, used


def random_ids(tokenizer: Tokenizer, data: st.DataObject) -> list[int]:
    """Any tokens: real text, random ids (broken UTF-8 in plenty), control tokens and ids outside the vocabulary."""
    text = data.draw(st.text(max_size=30))
    ids = tokenizer.encode(text.encode("utf-8", "ignore").decode(), add_special_tokens=False)
    small = st.integers(0, min(tokenizer.vocab_size, 300))
    noise = data.draw(st.lists(small | st.integers(0, tokenizer.vocab_size + 3), max_size=25))
    at = data.draw(st.integers(0, len(ids)))
    return [*ids[:at], *noise, *ids[at:]]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_join_to_decode(tokenizer: Build, name: str, data: st.DataObject) -> None:
    built = tokenizer(name)
    ids = random_ids(built, data)
    skip = data.draw(st.booleans())
    stop = data.draw(st.sampled_from([(), ("\x00never\x00",)]))
    cuts = data.draw(st.lists(st.integers(0, 4), max_size=12))
    detokenizer = IncrementalDetokenizer(built, skip_special_tokens=skip, stop=stop)
    texts, stopped, used = pushed(detokenizer, ids, cuts)
    assert "".join(texts) == built.decode(ids, skip_special_tokens=skip)
    assert stopped is None
    assert used == len(ids)


@pytest.mark.parametrize("name", ["concierge", "qwen2", "gpt-2"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_byte_level_decode_equals_the_library(tokenizer: Build, name: str, data: st.DataObject) -> None:
    built = tokenizer(name)
    ids = [i for i in random_ids(built, data) if i < built.vocab_size and i not in built.special_ids]
    oracle = tokenizers.decoders.ByteLevel()
    pieces = [piece for i in ids if (piece := built.piece(i)) is not None]
    assert built.decode(ids) == oracle.decode(pieces)


def first_stop(prefixes: list[str], stop: list[str], min_tokens: int) -> tuple[str, str | None, int]:
    """Oracle: looks at ever longer texts, character by character, for a stop string that just became complete."""
    seen = ""
    for count, prefix in enumerate(prefixes, 1):
        for end in range(len(seen) + 1, len(prefix) + 1):
            found = [text for text in stop if prefix[:end].endswith(text)]
            if found and count >= min_tokens:
                longest = max(found, key=len)
                return prefix[: end - len(longest)], longest, count
        seen = prefix
    return seen, None, len(prefixes)


@pytest.mark.parametrize("name", ["concierge", "llama-spm"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stop_strings_cut_at_the_first_to_be_complete(tokenizer: Build, name: str, data: st.DataObject) -> None:
    built = tokenizer(name)
    alphabet = "ab é\n"
    ids = built.encode(data.draw(st.text(alphabet, max_size=25)), add_special_tokens=False)
    stop = data.draw(st.lists(st.text(alphabet, min_size=1, max_size=4), min_size=1, max_size=4))
    min_tokens = data.draw(st.integers(0, 6))
    include = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, 4), max_size=12))
    # Only whole characters count as text after each token.
    prefixes = [built.decode(ids[:n]).rstrip("\ufffd") for n in range(1, len(ids) + 1)]
    text, stopped, used = first_stop(prefixes, stop, min_tokens)
    detokenizer = IncrementalDetokenizer(built, stop=stop, include_stop=include, min_tokens=min_tokens)
    texts, found, consumed = pushed(detokenizer, ids, cuts)
    assert ("".join(texts), found) == (text + (stopped if stopped and include else ""), stopped)
    assert consumed == used
    assert detokenizer.stopped == stopped


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_nothing_given_away_is_ever_part_of_a_stop_string(tokenizer: Build, data: st.DataObject) -> None:
    built = tokenizer("concierge")
    stop = data.draw(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3))
    ids = built.encode(data.draw(st.text("abc", max_size=30)))
    detokenizer = IncrementalDetokenizer(built, stop=stop)
    given_text = ""
    for token in ids:
        given_text += detokenizer.push([token]).text
        assert not any(text in given_text for text in stop)
        if detokenizer.stopped:
            break


def test_half_a_character_is_never_given(tokenizer: Build) -> None:
    built = tokenizer("concierge")
    detokenizer = IncrementalDetokenizer(built)
    ids = built.encode("🎉")
    assert len(ids) > 1
    assert [detokenizer.push([token]).text for token in ids] == [""] * (len(ids) - 1) + ["🎉"]
    unfinished = IncrementalDetokenizer(built)
    assert unfinished.push(ids[:-1]).text == ""
    assert unfinished.finish().text == "\ufffd"


def test_after_a_prompt_the_leading_space_stays(tokenizer: Build) -> None:
    built = tokenizer("llama-spm")
    assert IncrementalDetokenizer(built).push([15043]).text == "Hello"
    assert IncrementalDetokenizer(built, after_prompt=True).push([15043]).text == " Hello"
    detokenizer = IncrementalDetokenizer(built)
    assert [detokenizer.push([token]).text for token in (1, 15043, 15043)] == ["", "Hello", " Hello"]


def test_after_a_stop_nothing_is_consumed(tokenizer: Build) -> None:
    built = tokenizer("concierge")
    detokenizer = IncrementalDetokenizer(built, stop=["b"])
    assert detokenizer.push(built.encode("a")).text == "a"
    assert detokenizer.push(built.encode("b")).stopped == "b"
    later = detokenizer.push(built.encode("a"))
    assert (later.text, later.stopped, later.tokens_used) == ("", "b", 0)
    assert detokenizer.finish().text == ""


def test_a_min_tokens_match_is_ordinary_text(tokenizer: Build) -> None:
    built = tokenizer("concierge")
    ids = [built.token_to_id(char) for char in "abab"]
    assert None not in ids
    detokenizer = IncrementalDetokenizer(built, stop=["ab"], min_tokens=3)
    texts, stopped, used = pushed(detokenizer, [i for i in ids if i is not None], [1, 1, 1])
    assert ("".join(texts), stopped, used) == ("ab", "ab", 4)
    exact = IncrementalDetokenizer(built, stop=["ab"], min_tokens=2)
    assert pushed(exact, [i for i in ids if i is not None], [1, 1, 1])[1:] == ("ab", 2)


class Counting(Tokenizer):
    """Counts how often it is asked for a token's bytes."""

    asked = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.asked += 1
        return super().token_bytes(token_id)


@pytest.mark.parametrize("stop", [(), ("a" * 1023 + "b", "\n\n\n")])
def test_every_token_is_decoded_once_and_little_is_held(shared_data: Path, stop: tuple[str, ...]) -> None:
    counting = Counting.from_folder(shared_data / "models" / "penstock-concierge")
    assert isinstance(counting, Counting)
    letters = [token for token in (counting.token_to_id("a"), counting.token_to_id("Ġ")) if token is not None]
    ids = random.Random(1).choices(letters, weights=(99, 1), k=50_000)
    detokenizer = IncrementalDetokenizer(counting, stop=stop)
    size = 0
    for count, token in enumerate(ids, 1):
        size += len(detokenizer.push([token]).text)
        assert count - size <= max(map(len, stop), default=1) - 1
    assert size + len(detokenizer.finish().text) == len(ids) == counting.asked
