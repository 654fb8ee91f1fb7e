"""What holds answers to their grammars and budgets of reasoning: one constraint a branch, and a step's masks.

A step's masks are made while its forward pass runs. After sampling, tokens that have to follow become known at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import perf_counter, thread_time
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from penstock.config.errors import RequestError
from penstock.core.constraint import Thinking
from penstock.core.protocol import NewRow, RowResult, StepPlan, StepResult
from penstock.core.request import EngineOutput, EngineRequest
from penstock.core.sampling import SamplingParams
from penstock.runtime.grammar import Compilation, GrammarCompiler, Vocabulary, allows_more, compute_mask

Words = npt.NDArray[np.uint32]
Forced = Mapping[int, tuple[int, ...]]
_SLOW_S: Final = 0.02  # a mask that takes longer keeps the other streams waiting
_CHEAP_S: Final = 0.0003
_RETRY_STEPS: Final = 64
_MOST_STRIKES: Final = 16
_MOST_FORCED: Final = 512  # tokens taken in one step; masks lead to the rest
_ALL: Final = np.uint32(0xFFFFFFFF)
_NONE_FORCED: Final[Forced] = MappingProxyType({})
_LIMITS: Final = ("ParserTooComplex", "LexerTooComplex")
_SPENT: Final = "the grammar became too complex to follow within the limits; simplify it."
_LEFT: Final = "the answer left its grammar, which is an error of the engine; send the request again."


class Constraint:
    """What one branch may say next. It reasons until `end_ids` came; what follows is the grammar's.

    Args:
        matcher: at the grammar's beginning, this branch's own; None for a budget of reasoning alone.
        thinking: how the reasoning ends; None if there is none.
        sampling: the request's parameters.
        eos_ids: tokens that end an answer, the usual one first.

    Attributes:
        strikes: masks that took too long to make.
    """

    def __init__(
        self, matcher: LLMatcher | None, thinking: Thinking | None, sampling: SamplingParams, eos_ids: Sequence[int]
    ) -> None:
        self.strikes = 0
        self._matcher = matcher
        self._thinking = thinking
        self._sampling = sampling
        self._eos_ids = tuple(eos_ids)
        # A client's ban may hit a token that is forced; then all are chosen, one by one, among those that are left.
        self._bans = bool(sampling.bad_words_ids) or sampling.allowed_token_ids is not None
        self._plain = not (thinking or self._bans or sampling.min_tokens) and sampling.logprobs is None
        self._most = min(_MOST_FORCED, sampling.max_tokens or _MOST_FORCED)
        self._tokens: list[int] = []
        self._opened = 0 if thinking is not None and not thinking.begin_ids else -1  # where the reasoning begins
        self._closed = 0 if thinking is None else -1  # where what follows it begins
        self._must: list[int] = []  # the tokens that come next, no other being allowed
        self._look_ahead()

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
            row[:] = _ALL
        elif self._reasons:
            row[:] = _ALL
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

    def take(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Takes sampled tokens; returns those that have to follow, or many of them, which are taken too.

        With log-probabilities asked for, the latter are left to masks that allow no other, for the model to score.

        Raises:
            RequestError: the grammar has become too complex, or does not allow a token.
        """
        if self.strikes > _MOST_STRIKES:
            raise RequestError(_SPENT)
        if self._plain and self._matcher is not None and not self._must and len(tokens) == 1:
            return self._take_plainly(self._matcher, tokens[0])
        self.replay(tokens)
        if self._sampling.logprobs is not None and not self._ends_against_bans:
            return ()
        forced: list[int] = []
        while self._must and len(forced) < self._most:
            forced += (following := tuple(self._must))
            self.replay(following)
        return tuple(forced)

    def _take_plainly(self, matcher: LLMatcher, token: int) -> tuple[int, ...]:
        """As `take`, for nearly all branches in nearly all steps, in few calls."""
        following, forced = [token], list[int]()
        while following:
            if following[-1] in self._eos_ids or not matcher.consume_tokens(following):
                self.replay(following)  # which knows the end, and errors
                break
            self._tokens += following
            following = matcher.compute_ff_tokens()
            if not following and matcher.is_stopped():
                following = [self._eos_ids[0]] if self._at_end(matcher) else []
            if len(forced) >= self._most:
                self._must = list(following)
                break
            forced += following
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
                raise RequestError(_SPENT)
        elif not matcher.consume_token(token):
            raise RequestError(_SPENT if matcher.stop_reason() in _LIMITS else _LEFT)

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


class Masks:
    """A step's masks, being made.

    Attributes:
        seconds: it took to make them, once they are made.
    """

    def __init__(
        self,
        words: int,
        constrained: Mapping[int, Constraint],
        pool: ThreadPoolExecutor | None = None,
        together: LLExecutor | None = None,
        *,
        timed: bool = False,
    ) -> None:
        """With a `pool` they are made there, with `together` several at a time; `timed` counts strikes of slow ones."""
        self.seconds = 0.0
        self._timed = timed
        self._made = np.empty((len(constrained), words), np.uint32)
        self._places = {row: place for place, row in enumerate(constrained)}
        self._done: Future[None] | None = None
        if pool is None:
            self._make(list(constrained.values()), None)
        else:
            self._done = pool.submit(self._make, list(constrained.values()), together)

    def _make(self, constraints: Sequence[Constraint], together: LLExecutor | None) -> None:
        began, made = perf_counter(), self._made
        address, size = made.ctypes.data, made.strides[0]
        wanted: list[tuple[LLMatcher, int]] = []
        unfinished: list[tuple[Constraint, int]] = []
        for place, constraint in enumerate(constraints):
            matcher, unready = constraint.source()
            if matcher is not None:
                wanted.append((matcher, place))
            if unready:
                unfinished.append((constraint, place))
        if self._timed:
            for matcher, place in wanted:
                since = thread_time()
                compute_mask(matcher, made[place])
                constraints[place].strikes += thread_time() - since > _SLOW_S
        elif together is not None and len(wanted) > 1:
            together.unsafe_compute_mask_ptr(wanted, address, size, len(made))
        else:
            for matcher, place in wanted:
                matcher.unsafe_compute_mask_ptr(address + place * size, size)
        for constraint, place in unfinished:
            constraint.finish(made[place])
        self.seconds = perf_counter() - began

    def of(self, rows: Sequence[int]) -> Words:
        """[L, ceil(V / 32)]: the masks of these rows, waited for; all ones for rows that are free."""
        if self._done is not None:
            self._done.result()
        if tuple(rows) == tuple(self._places):
            return self._made
        masks = np.full((len(rows), self._made.shape[1]), _ALL)
        for place, row in enumerate(rows):
            if row in self._places:
                masks[place] = self._made[self._places[row]]
        return masks


@dataclass(slots=True)
class _Request:
    """A live request with constraints.

    Attributes:
        job: its grammar's, None without one.
        branches: constraints of its branches, by number, made as they enter the batch.
        finished: branches that ended.
    """

    request: EngineRequest
    job: Compilation | None
    matcher: LLMatcher | None = None
    branches: dict[int, Constraint] = field(default_factory=dict)
    finished: int = 0


class Constraints:
    """The constraints of all branches of an engine. Belongs to the thread of its step loop.

    Args:
        vocab_size: logits a position.
        vocabulary: the model's, for grammars; None refuses them.
    """

    def __init__(self, vocab_size: int = 0, vocabulary: Callable[[], Vocabulary] | None = None) -> None:
        self._words = (vocab_size + 31) // 32
        self._compiler = None if vocabulary is None else GrammarCompiler(vocabulary)
        self._pool: ThreadPoolExecutor | None = None
        self._together: LLExecutor | None = None
        self._masks: Masks | None = None
        self._held: dict[str, _Request] = {}
        self._live: dict[str, _Request] = {}
        self._rows: dict[int, Constraint] = {}
        self._steps: dict[int, dict[int, Constraint]] = {}

    @property
    def pending(self) -> bool:
        """Whether requests wait for their grammars."""
        return bool(self._held)

    def hold(self, request: EngineRequest) -> bool:
        """Takes a request's constraints; whether it has to wait for `ready`.

        Raises:
            RequestError: it has a grammar, and this engine takes none.
        """
        if not request.constrained:
            return False
        if request.grammar is None:
            self._live[request.request_id] = _Request(request, None)
            return False
        if self._compiler is None:
            raise RequestError("this engine takes no grammars.", param="grammar")
        self._held[request.request_id] = _Request(request, self._compiler.want(request.grammar.source))
        return True

    def ready(self) -> list[tuple[EngineRequest, RequestError | None]]:
        """Requests that wait no longer, and why they are refused, if so."""
        if not self._held or self._compiler is None:
            return []
        found: list[tuple[EngineRequest, RequestError | None]] = []
        for request_id, held in list(self._held.items()):
            assert held.job is not None
            outcome = self._compiler.outcome(held.job)
            if outcome is None:
                continue
            del self._held[request_id]
            if isinstance(outcome, RequestError):
                found.append((held.request, outcome))
            else:
                held.matcher = outcome
                self._live[request_id] = held
                found.append((held.request, None))
        return found

    def wait(self, seconds: float) -> None:
        """Sleeps until a grammar was compiled, at most so long; not at all if none is."""
        if self._held and self._compiler is not None:
            self._compiler.wait(seconds)

    def cancel(self, request_id: str) -> bool:
        """Forgets a request that waits for its grammar; whether it did."""
        held = self._held.pop(request_id, None)
        if held is None:
            return False
        assert self._compiler is not None and held.job is not None
        if all(other.job is not held.job for other in self._held.values()):
            self._compiler.drop(held.job)
        return True

    def drop(self, request_id: str) -> None:
        """Forgets a request that was not admitted."""
        self._live.pop(request_id, None)

    def forget(self, outputs: Iterable[EngineOutput]) -> None:
        """Forgets the branches that ended."""
        for output in outputs if self._live else ():
            if output.finish_reason is not None and (live := self._live.get(output.request_id)) is not None:
                constraint = live.branches.pop(output.branch, None)
                if constraint is not None and live.job is not None and self._compiler is not None:
                    self._compiler.used(live.job, constraint.length)
                live.finished += 1
                if live.finished >= live.request.sampling.n:
                    del self._live[output.request_id]

    def begin(self, plan: StepPlan) -> Masks | None:
        """Starts a step's masks; None if every token is allowed everywhere."""
        if not self._live and not self._rows:
            return None
        for row in plan.released_rows:
            self._rows.pop(row, None)
        for new in plan.new_rows:
            self._rows.pop(new.row, None)
            if (live := self._live.get(new.request_id)) is not None:
                self._rows[new.row] = self._constraint(live, new)
        step = {span.row: self._rows[span.row] for span in plan.spans if span.sample and span.row in self._rows}
        self._steps[plan.step] = step
        masked = {row: constraint for row, constraint in step.items() if not constraint.idle}
        if not masked:
            return None
        before = self._masks.seconds if self._masks is not None else 0.0
        if before < _CHEAP_S or plan.step % _RETRY_STEPS == 0:  # handing them over would cost more than they do
            self._masks = Masks(self._words, masked)
            return self._masks
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "penstock-masks")
            self._together = LLExecutor()
        self._masks = Masks(self._words, masked, self._pool, self._together, timed=before > _SLOW_S)
        return self._masks

    def _constraint(self, live: _Request, new: NewRow) -> Constraint:
        found = live.branches.get(new.branch)
        if found is None:
            matcher = None if live.matcher is None else live.matcher.deep_copy()
            eos_ids = () if self._compiler is None or matcher is None else self._compiler.vocabulary.eos_ids
            found = Constraint(matcher, live.request.thinking, live.request.sampling, eos_ids)
            found.replay(new.generated_ids)
            live.branches[new.branch] = found
        return found

    def end(self, result: StepResult) -> tuple[StepResult, Forced]:
        """Takes a step's tokens; the result, in which a row may now have failed, and by row what is forced."""
        step = self._steps.pop(result.step, None)
        if not step:
            return result, _NONE_FORCED
        forced: dict[int, tuple[int, ...]] = {}
        failed: dict[int, str] = {}
        for row in result.rows:
            constraint = step.get(row.row)
            if constraint is None or not row.tokens:
                continue
            try:
                if following := constraint.take(row.tokens):
                    forced[row.row] = following
            except RequestError as error:
                failed[row.row] = str(error)
        if failed:
            rows = (RowResult(r.row, error=failed[r.row]) if r.row in failed else r for r in result.rows)
            result = replace(result, rows=tuple(rows))
        return result, forced

    def abort(self) -> None:
        """Forgets outstanding steps."""
        self._steps.clear()

    def close(self) -> None:
        """Ends the threads."""
        if self._compiler is not None:
            self._compiler.close()
        if self._pool is not None:
            self._pool.shutdown()
