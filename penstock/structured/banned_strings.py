"""Texts that must not appear in an answer: where one stands among them, and what is taken back when one has appeared.

An answer that has come to hold a banned string goes on anew from before the first of its tokens, which is forbidden at
that place; what may still become one is not told. So do ExLlamaV2's `banned_strings` and KoboldCpp's phrases.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from penstock.config.errors import BANNED_TOO_OFTEN, RequestError
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineOutput
from penstock.text.automaton import Node, automaton

MOST_HERE: Final = 64  # tokens forbidden at one place
MOST_IN_ALL: Final = 1024  # times that a sequence is taken back


class Search(NamedTuple):
    """What all sequences of a request look for.

    Attributes:
        root: of the automaton over the strings, case folded.
        token_bytes: of a token, and none of those that are not shown.
    """

    root: Node
    token_bytes: Callable[[int], bytes]


def search(strings: Iterable[str], token_bytes: Callable[[int], bytes], hidden: frozenset[int]) -> Search:
    """What finds the strings, whatever their case, in texts without these tokens; linear in the strings."""
    folded = tuple(dict.fromkeys("".join(map(str.casefold, string)) for string in strings))
    return Search(automaton(folded), lambda token: b"" if token in hidden else token_bytes(token))


class _Place(NamedTuple):
    """What is known before a token.

    Attributes:
        node: the longest end of the text that begins a banned string.
        starts: by its characters, the numbers of the tokens in which they begin.
        pending: bytes of a character that is not whole.
        begun: the token in which that begins.
        state: what the sampler had learned.
    """

    node: Node
    starts: tuple[int, ...] = ()
    pending: bytes = b""
    begun: int = 0
    state: tuple[float, ...] = ()


class BannedStrings:
    """Where one sequence stands among the strings that must not appear in its text.

    Attributes:
        length: tokens taken, and not taken back.
    """

    def __init__(self, looked_for: Search) -> None:
        self._token_bytes = looked_for.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = _Place(looked_for.root)
        self._held: list[tuple[_Place, int]] = []  # the last tokens, those that may belong to a banned string
        self._bans: dict[int, set[int]] = {}  # by the number of the token
        self._times = 0
        self.length = 0

    @property
    def held(self) -> int:
        """How many of the last tokens may still be taken back."""
        return len(self._held)

    @property
    def forbidden(self) -> Iterable[int]:
        """Tokens that may not come next."""
        return self._bans.get(self.length, ())

    def take(self, tokens: Iterable[int], state: tuple[float, ...] = ()) -> int | None:
        """Takes further tokens; the number of the first token of a banned string that is whole now, None without one.

        Then `go_back` has to follow. Where the string begins in a token that was told already, for after that there
        was another one that could not become a banned string, the first token counts that was not. `state` is what
        the sampler has learned with these tokens.
        """
        for token in tokens:
            self._held.append((self._at, token))
            found = self._read(token)
            self.length += 1
            if found is not None:
                return max(found, self.length - len(self._held))
            self._at = self._at._replace(state=state)
        self._let_go()
        return None

    def go_on(self, tokens: Iterable[int], state: tuple[float, ...] = ()) -> None:
        """Takes tokens that were told already, before any others."""
        self.take(tokens, state)
        self._held.clear()

    def _read(self, token: int) -> int | None:
        before, number = self._at, self.length
        self._decoder.setstate((before.pending, 0))
        text = self._decoder.decode(self._token_bytes(token))
        pending = self._decoder.getstate()[0]
        begun = before.begun if before.pending else number
        node = before.node
        starts = list(before.starts)
        for index, char in enumerate(text):
            for one in char.casefold():
                node = node.after(one)
                starts.append(number if index else begun)
                if node.match is not None:
                    return starts[-len(node.match)]
        kept = tuple(starts[len(starts) - node.depth :])
        self._at = _Place(node, kept, pending, number if text else begun)
        return None

    def _let_go(self) -> None:
        """Forgets what can belong to no banned string any more."""
        first = min((*self._at.starts[:1], self._at.begun if self._at.pending else self.length, self.length))
        base = self.length - len(self._held)
        if first > base:
            del self._held[: first - base]
            self._bans = {number: tokens for number, tokens in self._bans.items() if number >= first}

    def go_back(self, number: int, known: int) -> tuple[int, tuple[float, ...]]:
        """Takes back the tokens from this number on, of which the first is forbidden there from now on.

        Args:
            number: as `take` told.
            known: tokens that there were before the last step. Further ones are taken back, and drawn again as before.

        Returns:
            How many tokens stay, and what the sampler had learned with them.

        Raises:
            RequestError: that has happened too often.
        """
        base = self.length - len(self._held)
        here = self._bans.setdefault(number, set())
        here.add(self._held[number - base][1])
        self._bans = {place: tokens for place, tokens in self._bans.items() if place <= number}
        self._times += 1
        if len(here) > MOST_HERE or self._times > MOST_IN_ALL:
            raise RequestError(BANNED_TOO_OFTEN)
        self.length = min(number, known)
        self._at = self._held[self.length - base][0]
        del self._held[self.length - base :]
        return self.length, self._at.state


class Withheld:
    """News of one sequence, whose last tokens are not told while they may be taken back."""

    def __init__(self, told: int) -> None:
        """`told`: tokens that were told before."""
        self._told = told
        self._tokens: tuple[int, ...] = ()
        self._logprobs: tuple[TokenLogprobs, ...] = ()

    def take_back(self, length: int) -> None:
        """Only so many tokens stay, all that were told among them."""
        self._tokens = self._tokens[: length - self._told]
        self._logprobs = self._logprobs[: length - self._told]

    def tell(self, output: EngineOutput, held: int) -> EngineOutput:
        """What may be told with an output: all but the last `held` tokens, and all of a sequence that ends."""
        tokens = self._tokens + output.tokens
        logprobs = self._logprobs + output.logprobs
        count = len(tokens) if output.finish_reason is not None else len(tokens) - held
        self._tokens, self._logprobs = tokens[count:], logprobs[count:]
        self._told += count
        return output._replace(tokens=tokens[:count], logprobs=logprobs[:count])
