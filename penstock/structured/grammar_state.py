"""Where one sequence of an answer stands in its grammar and its reasoning, and so which tokens may come next.

Tokens that have to follow a sampled one become known at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from penstock.config.constraint import Thinking
from penstock.config.errors import GRAMMAR_TOO_COMPLEX, RequestError
from penstock.config.sampling import SamplingParams
from penstock.structured.banned_strings import BannedStrings
from penstock.structured.grammar_compiler import allows_more

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = npt.NDArray[np.uint32]
ALL_ALLOWED: Final = np.uint32(0xFFFFFFFF)  # a word of a mask
_MOST_SLOW_MASKS: Final = 16
_MOST_FORCED: Final = 512  # tokens taken in one step; masks lead to the rest
_NOT_ALLOWED: Final = "satisfy the grammar"  # in what the library says of a token that its mask did not allow
_LEFT: Final = "the answer left its grammar, which is an error of the engine; send the request again."


class BrokenMatcher(Exception):
    """A matcher has failed: from what it was given, or from what another one that shares its lexer was given."""


@dataclass(slots=True)
class SlowMasks:
    """How many masks of one request took too long to make; all its sequences share it."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a grammar state was before it took drafts; see `GrammarState.restore`."""

    length: int
    think_start: int
    think_end: int
    forced: list[int]
    deferred: bool
    consumed: int


class GrammarState:
    """Which tokens one sequence may take next. It reasons until `end_ids` came; the grammar is about what follows.

    Args:
        matcher: at the grammar's beginning, this sequence's own; None for a budget of reasoning alone.
        thinking: how the reasoning ends; None if there is none.
        sampling: the request's parameters.
        eos_ids: tokens that end an answer, the usual one first.
        slow_masks: the request's.
        owner: the request's id and the sequence's number.
        banned: texts that must not appear; None for none.
        first: the mask of its first token, [ceil(V / 32)] words; None for any.

    Attributes:
        owner, slow_masks, banned: as given.
        broken: whether the matcher has failed, so that the last mask means nothing; see `renew`.
        renewed: whether this is a matcher in place of one that failed without drafts.
        drafted: whether the matcher was led along drafts, so that a failure may be theirs.
        takes_drafts: whether drafts are worth their masks: not once a mask was slow, or a matcher that followed drafts
            has failed.
        deferred: whether forced tokens are still to be looked for; `mask_source` does.
    """

    def __init__(
        self,
        matcher: LLMatcher | None,
        thinking: Thinking | None,
        sampling: SamplingParams,
        eos_ids: Sequence[int],
        slow_masks: SlowMasks | None = None,
        owner: tuple[str, int] = ("", 0),
        banned: BannedStrings | None = None,
        first: Words | None = None,
    ) -> None:
        self._first = first
        self.owner = owner
        self.banned = banned
        self.slow_masks = slow_masks or SlowMasks()
        self.broken = False
        self.renewed = False
        self.drafted = False
        self.takes_drafts = True
        self.deferred = False
        self._fault: RequestError | None = None
        self._matcher = matcher
        self._thinking = thinking
        self._sampling = sampling
        self._eos_ids = tuple(eos_ids)
        # A client may ban a token that the grammar forces. Then no token is forced: each is drawn from what is left.
        self._bans = bool(sampling.bad_words_ids or banned) or sampling.allowed_token_ids is not None
        self._plain = not (self._bans or sampling.min_tokens) and sampling.logprobs is None
        self._most_forced = min(_MOST_FORCED, sampling.max_tokens or _MOST_FORCED)
        self._tokens: list[int] = []
        self._consumed = 0  # tokens the matcher has taken one by one
        # Places in `_tokens`: the first of the reasoning, and the first behind it; -1 while there is none.
        self._think_start = 0 if thinking is not None and not thinking.begin_ids else -1
        self._think_end = 0 if thinking is None else -1
        self._forced: list[int] = []  # the tokens that come next, no other being allowed
        self._look_ahead()

    @property
    def unconstrained(self) -> bool:
        """Whether any token may come next."""
        return not self._forced and self._matcher is None and not self._forbidden and self._beginning is None

    @property
    def _beginning(self) -> Words | None:
        """The mask of the next token, if that is the first and not any may come."""
        return None if self._tokens else self._first

    @property
    def _forbidden(self) -> Iterable[int]:
        return self.banned.forbidden if self.banned is not None and len(self._tokens) == self.banned.length else ()

    @property
    def length(self) -> int:
        """Tokens taken."""
        return len(self._tokens)

    def mask_source(self) -> tuple[LLMatcher | None, bool]:
        """The matcher that makes the next mask, None if none is needed; and whether `finish_mask` has to follow."""
        if self.deferred:
            self._look_ahead()
        if self._forced or self._reasons or self._matcher is None:
            return None, True
        ends = self._sampling.ignore_eos and self._matcher.is_accepting()
        return self._matcher, self._think_end < 0 or ends or bool(self._forbidden)

    @property
    def _reasons(self) -> bool:
        return self._think_start >= 0 and self._think_end < 0

    def finish_mask(self, mask: Words) -> None:
        """Turns the matcher's mask into that of the next token; [ceil(V / 32)] words, changed in place."""
        if self._forced:
            mask[:] = 0
            mask[self._forced[0] // 32] = 1 << (self._forced[0] % 32)
        elif self._matcher is None:
            mask[:] = ALL_ALLOWED
        elif self._reasons:
            mask[:] = ALL_ALLOWED
            _ban(mask, self._eos_ids)
        else:
            if self._think_end < 0 and self._thinking is not None:
                begin = self._thinking.begin_ids[0]
                mask[begin // 32] |= np.uint32(1 << (begin % 32))
            if self._sampling.ignore_eos and allows_more(mask, self._eos_ids):
                _ban(mask, self._eos_ids)
        _ban(mask, self._forbidden)
        if (beginning := self._beginning) is not None:
            mask &= beginning

    def accept(self, tokens: Sequence[int], *, defer: bool = False) -> tuple[int, ...]:
        """Takes sampled tokens; returns those that have to follow, or many of them, which are taken too.

        Forced tokens that are not returned come one by one, from masks that allow nothing else: all of them where
        log-probabilities are asked for, since the model has to score them, and all with `defer`, since it takes long
        to find them. The tokens are the same either way.

        Raises:
            RequestError: the grammar has become too complex, or does not allow a token.
            BrokenMatcher: the matcher has failed; nothing was taken.
        """
        if self._fault is not None:
            raise self._fault
        if self.slow_masks.count > _MOST_SLOW_MASKS:
            raise RequestError(GRAMMAR_TOO_COMPLEX)
        if self.broken:
            raise BrokenMatcher
        length = len(self._tokens)
        start, end = self._think_start, self._think_end
        forced, deferred = self._forced, self.deferred
        try:
            return self._accept(tokens, defer)
        except BrokenMatcher:
            del self._tokens[length:]
            self._think_start, self._think_end = start, end
            self._forced, self.deferred = forced, deferred
            raise

    def _accept(self, tokens: Sequence[int], defer: bool) -> tuple[int, ...]:
        if self._plain and self._think_end >= 0 and self._matcher is not None and len(tokens) == 1:
            return self._accept_plainly(self._matcher, tokens[0], defer)
        self.replay(tokens)
        if self._sampling.logprobs is not None and not self._ends_against_bans:
            return ()
        forced: list[int] = []
        while self._forced and len(forced) < self._most_forced:
            following = tuple(self._forced)
            forced += following
            self.replay(following)
        return tuple(forced)

    def _accept_plainly(self, matcher: LLMatcher, token: int, defer: bool) -> tuple[int, ...]:
        """As `_accept`, in fewer calls, for the usual case: behind the reasoning, without bans or log-probabilities."""
        taken, forced = [token], list[int]()
        following = self._forced[1:] if self._forced[:1] == [token] else []
        self._forced, self.deferred = [], False
        while taken:
            if taken[-1] in self._eos_ids or not matcher.consume_tokens(taken):
                self.replay(taken)  # handles the end of the answer and raises the errors
                break
            self._tokens += taken
            if defer:
                self._forced, self.deferred = following, not following
                break
            following = following or matcher.compute_ff_tokens()
            if not following and matcher.is_stopped():
                following = [self._eos_ids[0]] if self._at_end(matcher) else []
            if len(forced) >= self._most_forced:
                self._forced = following
                break
            forced += following
            taken, following = following, []
        return tuple(forced)

    def replay(self, tokens: Iterable[int]) -> None:
        """Takes tokens that are known, and no forced ones; raises as `accept`."""
        for token in tokens:
            self._step(token)
        self._look_ahead()

    @property
    def _ends_against_bans(self) -> bool:
        """Whether only the end is allowed, but cannot be drawn, as the client's bans or min_tokens forbid it."""
        if not self._eos_ids or self._forced != [self._eos_ids[0]]:
            return False
        end, sampling = self._eos_ids[0], self._sampling
        allowed = sampling.allowed_token_ids
        return (
            len(self._tokens) < sampling.min_tokens
            or (allowed is not None and end not in allowed)
            or end in self._forbidden
            or any(word[-1] == end and self._ends_in(word[:-1]) for word in sampling.bad_words_ids)
        )

    def _ends_in(self, tokens: tuple[int, ...]) -> bool:
        """Whether these are the last tokens that were taken."""
        return tuple(self._tokens[max(0, len(self._tokens) - len(tokens)) :]) == tokens

    def _step(self, token: int) -> None:
        self._tokens.append(token)
        if self._think_end >= 0 and not self._forced:
            self._match(token)
            return
        self._forced = self._forced[1:] if self._forced[:1] == [token] else []
        if self._think_end >= 0:
            self._match(token)
        elif self._think_start < 0:
            self._begin(token)
        else:
            assert self._thinking is not None
            end = self._thinking.end_ids
            if tuple(self._tokens[self._think_start :][-len(end) :]) == end:
                self._think_end = len(self._tokens)

    def _match(self, token: int) -> None:
        matcher = self._matcher
        if matcher is None:
            return
        if token in self._eos_ids:
            if matcher.is_error():
                raise BrokenMatcher
        elif not matcher.consume_token(token):
            raise RequestError(_LEFT) if _NOT_ALLOWED in matcher.get_error() else BrokenMatcher
        else:
            self._consumed += 1

    def _begin(self, token: int) -> None:
        """Decides whether reasoning begins or the model answers at once."""
        assert self._thinking is not None
        begin, so_far = self._thinking.begin_ids, tuple(self._tokens)
        if so_far == begin:
            self._think_start = len(so_far)
        elif so_far != begin[: len(so_far)]:
            self._think_end = 0
            for known in so_far:
                self._match(known)
        elif self._matcher is not None:
            self._forced = list(begin[len(so_far) :])

    def _look_ahead(self) -> None:
        """Finds what has to come next, as far as that is known."""
        self.deferred = False
        if self._forced:
            return
        if self._think_end < 0:
            self._end_spent_reasoning()
        elif self._matcher is not None and not (self._tokens and self._tokens[-1] in self._eos_ids):
            self._forced = [] if self._bans else self._matcher.compute_ff_tokens()
            if not self._forced and self._at_end(self._matcher):
                self._forced = [self._eos_ids[0]]

    def _end_spent_reasoning(self) -> None:
        """Forces the end of the reasoning, or the rest of it, once the budget is spent."""
        thinking = self._thinking
        if self._think_start < 0 or thinking is None or thinking.budget is None:
            return
        spent = self._tokens[self._think_start :]
        if len(spent) >= thinking.budget:
            self._forced = list(thinking.end_ids[_overlap(spent, thinking.end_ids) :])

    def _at_end(self, matcher: LLMatcher) -> bool:
        """Whether nothing but the end is allowed.

        Only a mask tells for certain. It takes longest and is made only where the client's bans may forbid the end.
        """
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
        answer = self._tokens[self._think_end :] if self._think_end >= 0 else ()
        return tuple(token for token in answer if token not in self._eos_ids)

    def renew(self, found: LLMatcher | RequestError) -> None:
        """Continues with a matcher of the same grammar that has taken `matched`; with an error, `accept` raises it.

        Where drafts may have been too much for the last one, that counts for nothing, and there are no more of them.
        """
        self.broken = False
        if self.drafted:
            self.takes_drafts = self.drafted = False
        else:
            self.renewed = True
        if isinstance(found, RequestError):
            self._fault = found
            self._matcher = None
            self._forced = []
        else:
            self._matcher = found
            self._look_ahead()

    def end_reasoning(self) -> None:
        """Spends the budget of reasoning: its end is forced behind the next token that is taken."""
        if self._thinking is not None:
            self._thinking = replace(self._thinking, budget=0)

    def snapshot(self) -> Snapshot:
        """What `restore` goes back to."""
        return Snapshot(
            len(self._tokens), self._think_start, self._think_end, self._forced, self.deferred, self._consumed
        )

    def ends_with(self, token: int) -> bool:
        """Whether the answer is over behind this token."""
        return token in self._eos_ids and not self._sampling.ignore_eos

    def follow(self, token: int) -> None:
        """Takes a draft that the last mask allowed; a matcher that fails is `broken`."""
        self.drafted = True
        try:
            self.replay((token,))
        except (RequestError, BrokenMatcher):
            self.broken = True

    def restore(self, before: Snapshot) -> None:
        """Takes back the drafts since a snapshot; a matcher that cannot go back is `broken`."""
        taken = self._consumed - before.consumed
        if taken and self._matcher is not None and not self._matcher.rollback(taken):
            self.broken = True
        del self._tokens[before.length :]
        self._think_start, self._think_end = before.think_start, before.think_end
        self._forced, self.deferred = before.forced, before.deferred
        self._consumed = before.consumed

    def rewind(self, count: int) -> None:
        """Takes back the last tokens, as if they had not come.

        Raises:
            ValueError: fewer were taken, or the matcher cannot go back.
        """
        left = len(self._tokens) - count
        if count < 0 or left < 0:
            raise ValueError(f"{count} tokens cannot be taken back; {len(self._tokens)} were taken")
        thinking, matched = self._thinking, self._think_end
        if thinking is not None:
            begin = thinking.begin_ids
            if self._think_end > left or (left < len(begin) and tuple(self._tokens[:left]) == begin[:left]):
                self._think_end = -1
            if begin and self._think_start > left:
                self._think_start = -1
        if self._matcher is not None and matched >= 0:
            first = matched if self._think_end < 0 else left
            gone = [token for token in self._tokens[first:] if token not in self._eos_ids]
            if gone and not self._matcher.rollback(len(gone)):
                raise ValueError(f"the grammar cannot take back {len(gone)} tokens")
        del self._tokens[left:]
        self._forced = []
        self._look_ahead()


def _ban(mask: Words, tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token // 32] &= ~np.uint32(1 << (token % 32))


def _overlap(tokens: Sequence[int], end: Sequence[int]) -> int:
    """How many leading tokens of `end` the tokens end with."""
    lengths = range(min(len(tokens), len(end)), 0, -1)
    return next((length for length in lengths if tuple(tokens[-length:]) == tuple(end[:length])), 0)
