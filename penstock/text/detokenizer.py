"""Text from tokens as they come: whole characters only, cut at stop strings, in linear time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.text.automaton import automaton
from penstock.text.stop_patterns import Patterns, PatternSearch
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What can be said after some tokens.

    Attributes:
        text: new text, safe to show: whole characters, and no beginning of a stop string.
        stopped: the stop string or pattern that ended the output, else None.
        tokens_used: how many of the pushed tokens were consumed; all of them unless a stop string was found.
    """

    text: str
    stopped: str | None = None
    tokens_used: int = 0


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text. The pieces joined equal `tokenizer.decode` of all tokens, up to a stop.

    Args:
        tokenizer: whose tokens these are.
        stop: strings that end the output. The one completed first wins; of several completed by the same character,
            the longest. The result does not depend on how tokens are grouped into pushes.
        include_stop: leave the stop string in the text.
        skip_special_tokens: leave control tokens out of the text.
        min_tokens: a stop string completed before this many tokens is ordinary text.
        patterns: patterns that end the output likewise, by the rules of stop strings; None for none. What may be the
            beginning of a match is held back.
        after_prompt: the text continues other text, so a leading space is kept (SentencePiece drops the first one).
        visible: control tokens that stay in the text all the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        after_prompt: bool = False,
        visible: frozenset[int] = frozenset(),
        patterns: Patterns | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - visible if skip_special_tokens else frozenset[int]()
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._strip_next = tokenizer.strip_first and not after_prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._root = automaton(tuple(text for text in stop if text))
        self._state = self._root
        self._search = None if patterns is None else PatternSearch(patterns)
        self._held = ""  # text not yet given away; it ends with the state's text
        self._seen = 0
        self._left_out = 0
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the output, None while there is none."""
        return self._stopped

    def leave_out(self, begins_with: bytes) -> None:
        """What the tokens that come begin with is no part of the text."""
        self._left_out = len(begins_with)

    def push(self, tokens: Sequence[int]) -> Piece:
        """Takes further tokens. After a stop string nothing more is consumed."""
        if self.stopped is not None:
            return Piece("", self.stopped, 0)
        if not self._root.children and self._search is None:
            self._seen += len(tokens)
            return Piece(self._decoder.decode(self._bytes(tokens)), None, len(tokens))
        given: list[str] = []
        for index, token in enumerate(tokens):
            self._seen += 1
            given.append(self._advance(self._decoder.decode(self._bytes((token,)))))
            if self._stopped is not None:
                return Piece("".join(given), self._stopped, index + 1)
        return Piece("".join(given), None, len(tokens))

    def finish(self) -> Piece:
        """Gives what was held back; an unfinished character becomes U+FFFD. Call once, after the last token."""
        if self._stopped is not None:
            return Piece("", self._stopped, 0)
        text = self._advance(self._decoder.decode(b"", True)) + self._held
        self._held = ""
        return Piece(text, self._stopped, 0)

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        skipped, spell = self._skipped, self._tokenizer.token_bytes
        data = b"".join([spell(token) for token in tokens if token not in skipped])
        if self._left_out:
            data, self._left_out = data[self._left_out :], max(0, self._left_out - len(data))
        if self._strip_next and data:
            self._strip_next = False
            data = data.removeprefix(b" ")
        return data

    def _advance(self, text: str) -> str:
        """Runs new text through the automaton; returns what is safe now, up to a stop string if one is complete."""
        state, search = self._state, self._search
        looking = self._seen >= self._min_tokens
        for index, char in enumerate(text):
            state = state.after(char)
            found = None if search is None else search.take(char)
            if looking and (state.match is not None or found is not None):
                return self._stop(state.match, found, text[: index + 1])
        while not state.children and state.fallback is not None:
            state = state.fallback  # a match that was too early to count cannot grow
        self._state = state
        whole = self._held + text
        safe = len(whole) - max(state.depth, 0 if search is None else search.pending)
        self._held = whole[safe:]
        return whole[:safe]

    def _stop(self, match: str | None, found: tuple[str, int] | None, text: str) -> str:
        """Ends the output, with a stop string or with a pattern and the length of what it matched: the longer one."""
        length = len(match or "")
        if found is not None and found[1] > length:
            match, length = found
        self._stopped = match
        whole = self._held + text
        self._held = ""
        return whole if self._include_stop else whole[: len(whole) - length]
