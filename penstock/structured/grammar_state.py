"""What holds one sequence of an answer to its grammar and its budget of reasoning.

After sampling, tokens that have to follow become known at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from penstock.config.errors import GRAMMAR_TOO_COMPLEX, RequestError
from penstock.core.constraint import Thinking
from penstock.core.sampling import SamplingParams
from penstock.structured.grammar_compiler import allows_more

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = npt.NDArray[np.uint32]
ALL: Final = np.uint32(0xFFFFFFFF)
_MOST_STRIKES: Final = 16
_MOST_FORCED: Final = 512  # tokens taken in one step; masks lead to the rest
_NOT_ALLOWED: Final = "satisfy the grammar"  # in what the library says of a token that its mask did not allow
_LEFT: Final = "the answer left its grammar, which is an error of the engine; send the request again."


class BrokenMatcher(Exception):
    """A matcher has failed: by what it was given, or by what another one that shares its lexer was."""


class Constraint:
    """What one sequence may say next. It reasons until `end_ids` came; what follows is the grammar's.

    Args:
        matcher: at the grammar's beginning, this sequence's own; None for a budget of reasoning alone.
        thinking: how the reasoning ends; None if there is none.
        sampling: the request's parameters.
        eos_ids: tokens that end an answer, the usual one first.
        tally: masks that took too long to make, one number, which all sequences of a request share.
        owner: the request's id and the sequence's number.

    Attributes:
        owner: as given.
        broken: whether the matcher has failed, so that the last mask says nothing; see `renew`.
        renewed: whether this is not the first matcher.
    """

    def __init__(
        self,
        matcher: LLMatcher | None,
        thinking: Thinking | None,
        sampling: SamplingParams,
        eos_ids: Sequence[int],
        tally: list[int] | None = None,
        owner: tuple[str, int] = ("", 0),
    ) -> None:
        self.owner = owner
        self.broken = self.renewed = False
        self._fault: RequestError | None = None
        self._tally = [0] if tally is None else tally
        self._matcher = matcher
        self._thinking = thinking
        self._sampling = sampling
        self._eos_ids = tuple(eos_ids)
        # A client's ban may hit a token that is forced; then all are chosen, one by one, among those that are left.
        self._bans = bool(sampling.bad_words_ids) or sampling.allowed_token_ids is not None
        self._plain = not (self._bans or sampling.min_tokens) and sampling.logprobs is None
        self._most = min(_MOST_FORCED, sampling.max_tokens or _MOST_FORCED)
        self._tokens: list[int] = []
        self._opened = 0 if thinking is not None and not thinking.begin_ids else -1  # where the reasoning begins
        self._closed = 0 if thinking is None else -1  # where what follows it begins
        self._must: list[int] = []  # the tokens that come next, no other being allowed
        self.late = False
        """Whether it has not been looked yet for those; `source` does."""
        self._look_ahead()

    @property
    def strikes(self) -> int:
        """Masks of the request that took too long to make."""
        return self._tally[0]

    def strike(self) -> None:
        """Counts a mask that took too long."""
        self._tally[0] += 1

    @property
    def idle(self) -> bool:
        """Whether any token may come next."""
        return not self._must and self._matcher is None

    @property
    def length(self) -> int:
        """Tokens taken."""
        return len(self._tokens)

    def source(self) -> tuple[LLMatcher | None, bool]:
        """Whose mask `finish` wants to find in the row, None if it does not matter; and whether `finish` is needed."""
        if self.late:
            self._look_ahead()
        if self._must or self._reasons or self._matcher is None:
            return None, True
        return self._matcher, self._closed < 0 or (self._sampling.ignore_eos and self._matcher.is_accepting())

    @property
    def _reasons(self) -> bool:
        return self._opened >= 0 and self._closed < 0

    def finish(self, row: Words) -> None:
        """Turns the matcher's mask into that of the next token; [ceil(V / 32)] words, changed in place."""
        if self._must:
            row[:] = 0
            row[self._must[0] // 32] = 1 << (self._must[0] % 32)
        elif self._matcher is None:
            row[:] = ALL
        elif self._reasons:
            row[:] = ALL
            self._ban_end(row)
        else:
            if self._closed < 0 and self._thinking is not None:
                begin = self._thinking.begin_ids[0]
                row[begin // 32] |= np.uint32(1 << (begin % 32))
            if self._sampling.ignore_eos and allows_more(row, self._eos_ids):
                self._ban_end(row)

    def _ban_end(self, row: Words) -> None:
        for token in self._eos_ids:
            row[token // 32] &= ~np.uint32(1 << (token % 32))

    def take(self, tokens: Sequence[int], *, later: bool = False) -> tuple[int, ...]:
        """Takes sampled tokens; returns those that have to follow, or many of them, which are taken too.

        The others are left to masks that allow no other: all with log-probabilities asked for, for the model to score,
        and with `later`, as it takes long to find them. The same tokens come.

        Raises:
            RequestError: the grammar has become too complex, or does not allow a token.
            BrokenMatcher: the matcher has failed; nothing was taken.
        """
        if self._fault is not None:
            raise self._fault
        if self.strikes > _MOST_STRIKES:
            raise RequestError(GRAMMAR_TOO_COMPLEX)
        if self.broken:
            raise BrokenMatcher
        length, before = len(self._tokens), (self._opened, self._closed, self._must, self.late)
        try:
            return self._take(tokens, later)
        except BrokenMatcher:
            del self._tokens[length:]
            self._opened, self._closed, self._must, self.late = before
            raise

    def _take(self, tokens: Sequence[int], later: bool) -> tuple[int, ...]:
        if self._plain and self._closed >= 0 and self._matcher is not None and len(tokens) == 1:
            return self._take_plainly(self._matcher, tokens[0], later)
        self.replay(tokens)
        if self._sampling.logprobs is not None and not self._ends_against_bans:
            return ()
        forced: list[int] = []
        while self._must and len(forced) < self._most:
            forced += (following := tuple(self._must))
            self.replay(following)
        return tuple(forced)

    def _take_plainly(self, matcher: LLMatcher, token: int, later: bool) -> tuple[int, ...]:
        """As `take`, for nearly all sequences in nearly all steps, in few calls."""
        taken, forced = [token], list[int]()
        following = self._must[1:] if self._must[:1] == [token] else []
        self._must, self.late = [], False
        while taken:
            if taken[-1] in self._eos_ids or not matcher.consume_tokens(taken):
                self.replay(taken)  # which knows the end, and errors
                break
            self._tokens += taken
            if later:
                self._must, self.late = following, not following
                break
            following = following or matcher.compute_ff_tokens()
            if not following and matcher.is_stopped():
                following = [self._eos_ids[0]] if self._at_end(matcher) else []
            if len(forced) >= self._most:
                self._must = following
                break
            forced += following
            taken, following = following, []
        return tuple(forced)

    def replay(self, tokens: Iterable[int]) -> None:
        """Takes tokens that are known, and those alone; raises as `take`."""
        for token in tokens:
            self._step(token)
        self._look_ahead()

    @property
    def _ends_against_bans(self) -> bool:
        """Whether only the end can come, and sampling would not allow it."""
        early = self._bans or len(self._tokens) < self._sampling.min_tokens
        return early and self._must == [self._eos_ids[0]]

    def _step(self, token: int) -> None:
        self._tokens.append(token)
        if self._closed >= 0 and not self._must:
            self._match(token)
            return
        self._must = self._must[1:] if self._must[:1] == [token] else []
        if self._closed >= 0:
            self._match(token)
        elif self._opened < 0:
            self._begin(token)
        else:
            assert self._thinking is not None
            end = self._thinking.end_ids
            if tuple(self._tokens[self._opened :][-len(end) :]) == end:
                self._closed = len(self._tokens)

    def _match(self, token: int) -> None:
        matcher = self._matcher
        if matcher is None:
            return
        if token in self._eos_ids:
            if matcher.is_error():
                raise BrokenMatcher
        elif not matcher.consume_token(token):
            raise RequestError(_LEFT) if _NOT_ALLOWED in matcher.get_error() else BrokenMatcher

    def _begin(self, token: int) -> None:
        """Decides whether reasoning begins or the model answers at once."""
        assert self._thinking is not None
        begin, so_far = self._thinking.begin_ids, tuple(self._tokens)
        if so_far == begin:
            self._opened = len(so_far)
        elif so_far != begin[: len(so_far)]:
            self._closed = 0
            for known in so_far:
                self._match(known)
        elif self._matcher is not None:
            self._must = list(begin[len(so_far) :])

    def _look_ahead(self) -> None:
        """Finds what has to come next, as far as that is known."""
        self.late = False
        if self._must:
            return
        if self._closed < 0:
            self._spend()
        elif self._matcher is not None and not (self._tokens and self._tokens[-1] in self._eos_ids):
            self._must = [] if self._bans else self._matcher.compute_ff_tokens()
            if not self._must and self._at_end(self._matcher):
                self._must = [self._eos_ids[0]]

    def _spend(self) -> None:
        """Forces the end of the reasoning, or the rest of it, once the budget is spent."""
        thinking = self._thinking
        if self._opened < 0 or thinking is None or thinking.budget is None:
            return
        spent = self._tokens[self._opened :]
        if len(spent) >= thinking.budget:
            self._must = list(thinking.end_ids[_overlap(spent, thinking.end_ids) :])

    def _at_end(self, matcher: LLMatcher) -> bool:
        """Whether nothing but the end is allowed. A mask tells at last; it is asked where sampling may ban the end."""
        if matcher.is_error() or not matcher.is_accepting():
            return False
        if matcher.is_stopped():
            return True
        if not self._bans and len(self._tokens) >= self._sampling.min_tokens:
            return False
        return not allows_more(np.frombuffer(matcher.compute_bitmask(), np.uint32), self._eos_ids)

    @property
    def matched(self) -> tuple[int, ...]:
        """The tokens the matcher has taken."""
        return () if self._closed < 0 else tuple(t for t in self._tokens[self._closed :] if t not in self._eos_ids)

    def renew(self, found: LLMatcher | RequestError) -> None:
        """Goes on with a matcher of the same grammar that has taken `matched`, or fails where there is none."""
        self.broken, self.renewed = False, True
        if isinstance(found, RequestError):
            self._fault = found
            self._matcher = None
            self._must = []
        else:
            self._matcher = found
            self._look_ahead()

    def rewind(self, count: int) -> None:
        """Takes back the last tokens, as if they had not come.

        Raises:
            ValueError: fewer were taken, or the matcher cannot go back.
        """
        left = len(self._tokens) - count
        if count < 0 or left < 0:
            raise ValueError(f"{count} tokens cannot be taken back; {len(self._tokens)} were taken")
        thinking, matched = self._thinking, self._closed
        if thinking is not None:
            begin = thinking.begin_ids
            if self._closed > left or (left < len(begin) and tuple(self._tokens[:left]) == begin[:left]):
                self._closed = -1
            if begin and self._opened > left:
                self._opened = -1
        if self._matcher is not None and matched >= 0:
            first = matched if self._closed < 0 else left
            gone = [token for token in self._tokens[first:] if token not in self._eos_ids]
            if gone and not self._matcher.rollback(len(gone)):
                raise ValueError(f"the grammar cannot take back {len(gone)} tokens")
        del self._tokens[left:]
        self._must = []
        self._look_ahead()


def _overlap(tokens: Sequence[int], end: Sequence[int]) -> int:
    """How many leading tokens of `end` the tokens end with."""
    lengths = range(min(len(tokens), len(end)), 0, -1)
    return next((length for length in lengths if tuple(tokens[-length:]) == tuple(end[:length])), 0)
