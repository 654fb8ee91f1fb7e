"""Which tokens hold a text, or begin it: all of them, by looking at each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.config.token_mask import masked_tokens
from penstock.engine.text_pipeline import TextPipeline
from penstock.text.spellings import Spelled, Spellings
from penstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return TextPipeline.load("penstock-concierge").tokenizer


@pytest.mark.parametrize("text", ["\n", ":", '"', "*", "e", "the", "is a", "é", "\n\nUser:"])
def test_tokens_that_hold_a_text(tokenizer: Tokenizer, text: str) -> None:
    found = Spellings(tokenizer).find(text)
    spelled = {token: tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
    assert masked_tokens(found.mask) == {token for token, piece in spelled.items() if text.encode() in piece}
    for first, *tail in found.sequences:
        assert text.encode() in spelled[first] + b"".join(spelled[token] for token in tail)
        begun = max(size for size in range(1, len(text.encode())) if spelled[first].endswith(text.encode()[:size]))
        assert begun


def test_sequences_begin_wherever_a_token_may_end(tokenizer: Tokenizer) -> None:
    """However the answer's tokens cut a breaker of two characters in two, a sequence says so."""
    found = Spellings(tokenizer).find("e:")
    ends = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token).endswith(b"e")]
    tail = tuple(tokenizer.encode(":", add_special_tokens=False))
    said = {sequence[0] for sequence in found.sequences if sequence[1:] == tail}
    assert said <= set(ends)
    assert len(said) == min(len(ends), 64) > 1
    assert min(map(len, map(tokenizer.token_bytes, ends))) == min(map(len, map(tokenizer.token_bytes, said)))


def test_what_was_found_is_remembered(tokenizer: Tokenizer) -> None:
    spellings = Spellings(tokenizer, kept_bytes=100_000)
    first = spellings.find("ab")
    assert spellings.find("ab") is first
    for number in range(300):
        spellings.find(f"{number}")
    assert spellings.find("ab") == first
    assert spellings.find("ab") is not first
    assert sum(found.size for found in spellings._found.values()) <= 100_000


def test_a_text_is_searched_for_while_others_are_found(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search does not hold up who asks for what is known."""
    spellings = Spellings(tokenizer)
    known = spellings.find("a")
    search, amid = spellings._search, []

    def searching(wanted: bytes) -> Spelled:
        with ThreadPoolExecutor(1) as other:
            amid.append(other.submit(spellings.find, "a").result(60))
        return search(wanted)

    monkeypatch.setattr(spellings, "_search", searching)
    spellings.find("b")
    assert amid == [known]


def test_texts_without_tokens_break_nothing(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is left of a text has no tokens, its beginning alone is not taken for it."""
    monkeypatch.setattr(tokenizer, "encode", lambda *args, **options: [])
    assert Spellings(tokenizer).find("a\u00ad").sequences == ()
