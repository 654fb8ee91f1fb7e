"""The constraints of all sequences of an engine, and a step's masks, which are made while its forward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import perf_counter, thread_time
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.config.errors import GRAMMAR_TOO_COMPLEX, RequestError
from penstock.core.policies import Admission
from penstock.core.protocol import NewSequence, SlotResult, StepPlan, StepResult
from penstock.core.request import EngineOutput, EngineRequest
from penstock.structured.grammar_compiler import (
    Compilation,
    GrammarCompiler,
    Vocabulary,
    compute_mask,
    unavailable_reason,
)
from penstock.structured.grammar_state import ALL, BrokenMatcher, Constraint, Words

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Forced = Mapping[int, tuple[int, ...]]
_SLOW_S: Final = 0.02  # a mask that takes longer keeps the other streams waiting
_CHEAP_S: Final = 0.0003
_RETRY_STEPS: Final = 64
_MOST_FORCING_S: Final = 0.01  # of a step: what is forced on further sequences is found beside the next forward pass
_NONE_FORCED: Final[Forced] = MappingProxyType({})


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
                if thread_time() - since > _SLOW_S:
                    constraints[place].strike()
        elif together is not None and len(wanted) > 1:
            together.unsafe_compute_mask_ptr(wanted, address, size, len(made))
        else:
            for matcher, place in wanted:
                matcher.unsafe_compute_mask_ptr(address + place * size, size)
        for matcher, place in wanted:
            constraints[place].broken = matcher.is_error()
        for constraint, place in unfinished:
            constraint.finish(made[place])
        self.seconds = perf_counter() - began

    def of(self, rows: Sequence[int]) -> Words:
        """[L, ceil(V / 32)]: the masks of these rows, waited for; all ones for rows that are free."""
        if self._done is not None:
            self._done.result()
        if tuple(rows) == tuple(self._places):
            return self._made
        masks = np.full((len(rows), self._made.shape[1]), ALL)
        for place, row in enumerate(rows):
            if row in self._places:
                masks[place] = self._made[self._places[row]]
        return masks


@dataclass(slots=True)
class _Request:
    """A live request with constraints.

    Attributes:
        job: its grammar's, None without one.
        sequences: constraints of its sequences, by number, made as they enter the batch.
        finished: sequences that ended.
        tally: masks that took too long, of all sequences.
    """

    request: EngineRequest
    job: Compilation | None
    matcher: LLMatcher | None = None
    sequences: dict[int, Constraint] = field(default_factory=dict)
    finished: int = 0
    tally: list[int] = field(default_factory=lambda: [0])


class Constraints:
    """The constraints of all sequences of an engine. Belongs to the thread of its step loop.

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
        self._renewals: dict[tuple[str, int], tuple[Constraint, Compilation]] = {}

    def warm(self) -> None:
        """Prepares for grammars in the background: the first one would keep the steps of others waiting for it."""
        if self._compiler is not None and unavailable_reason() is None:
            self._compiler.warm()

    @property
    def pending(self) -> bool:
        """Whether requests wait for their grammars."""
        return bool(self._held)

    @property
    def renewing(self) -> bool:
        """Whether sequences wait for matchers in place of failed ones."""
        return bool(self._renewals)

    def waits(self, request_id: str, sequence: int) -> bool:
        """Whether a sequence waits for a matcher in place of one that has failed."""
        return (request_id, sequence) in self._renewals

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
        if (reason := unavailable_reason()) is not None:
            raise RequestError(reason, param="grammar")
        self._held[request.request_id] = _Request(request, self._compiler.want(request.grammar.source, request.owner))
        return True

    def ready(self) -> list[tuple[EngineRequest, RequestError | None]]:
        """Requests that wait no longer, and why they are refused, if so; sequences with a new matcher go on."""
        for owner, (constraint, job) in list(self._renewals.items()):
            assert self._compiler is not None
            if (renewed := self._compiler.outcome(job)) is not None:
                constraint.renew(RequestError(GRAMMAR_TOO_COMPLEX) if isinstance(renewed, RequestError) else renewed)
                del self._renewals[owner]
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
        if (self._held or self._renewals) and self._compiler is not None:
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
        """Forgets the sequences that ended."""
        for output in outputs if self._live else ():
            if output.finish_reason is not None and (live := self._live.get(output.request_id)) is not None:
                constraint = live.sequences.pop(output.sequence, None)
                self._give_up(output.request_id, output.sequence)
                if constraint is not None and live.job is not None and self._compiler is not None:
                    self._compiler.used(live.job, constraint.length)
                live.finished += 1
                if live.finished >= live.request.sampling.n:
                    del self._live[output.request_id]

    def _give_up(self, request_id: str, sequence: int) -> None:
        _, job = self._renewals.pop((request_id, sequence), (None, None))
        if job is not None and self._compiler is not None:
            self._compiler.drop(job)

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
        late = any(constraint.late for constraint in masked.values())
        if not late and (before < _CHEAP_S or plan.step % _RETRY_STEPS == 0):  # handing them over would cost more
            self._masks = Masks(self._words, masked, timed=True)
            return self._masks
        if self._pool is None:
            from llguidance import LLExecutor

            self._pool = ThreadPoolExecutor(1, "penstock-masks")
            self._together = LLExecutor()
        self._masks = Masks(self._words, masked, self._pool, self._together, timed=before > _SLOW_S)
        return self._masks

    def _constraint(self, live: _Request, new: NewSequence) -> Constraint:
        found = live.sequences.get(new.sequence)
        if found is None:
            matcher = None if live.matcher is None else live.matcher.deep_copy()
            eos_ids = () if self._compiler is None or matcher is None else self._compiler.vocabulary.eos_ids
            owner = new.request_id, new.sequence
            found = Constraint(matcher, live.request.thinking, live.request.sampling, eos_ids, live.tally, owner)
            found.replay(new.generated_ids)
            live.sequences[new.sequence] = found
        return found

    def end(self, result: StepResult) -> tuple[StepResult, Forced]:
        """Takes a step's tokens; the result, in which a row may now have failed, and by row what is forced."""
        step = self._steps.pop(result.step, None)
        if not step:
            return result, _NONE_FORCED
        forced: dict[int, tuple[int, ...]] = {}
        changed: dict[int, SlotResult] = {}
        latest = perf_counter() + _MOST_FORCING_S
        for row in result.rows:
            constraint = step.get(row.row)
            if constraint is None or not row.tokens:
                continue
            try:
                if following := constraint.take(row.tokens, later=perf_counter() > latest):
                    forced[row.row] = following
            except RequestError as error:
                changed[row.row] = SlotResult(row.row, error=str(error))
            except BrokenMatcher:
                changed[row.row] = self._renew(constraint, row)
        if changed:
            result = replace(result, rows=tuple(changed.get(row.row, row) for row in result.rows))
        return result, forced

    def _renew(self, constraint: Constraint, row: SlotResult) -> SlotResult:
        """A row without its token, which comes again with a matcher of its sequence's own; fails where that one has."""
        live = self._live[constraint.owner[0]]
        if constraint.renewed:
            return SlotResult(row.row, error=GRAMMAR_TOO_COMPLEX)
        assert self._compiler is not None and live.job is not None
        if constraint.owner not in self._renewals:
            self._renewals[constraint.owner] = constraint, self._compiler.renew(live.job, constraint.matched)
        return replace(row, tokens=(), logprobs=(), again=True)

    def abort(self) -> None:
        """Forgets outstanding steps."""
        self._steps.clear()

    def close(self) -> None:
        """Ends the threads."""
        if self._compiler is not None:
            self._compiler.close()
        if self._pool is not None:
            self._pool.shutdown()


class GrammarGate:
    """A sequence whose matcher has failed waits for another one."""

    name = "grammar"
    passable = True
    until_release = False

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints

    def holds(self, admission: Admission) -> bool:
        return self._constraints.waits(admission.sequence.request.request_id, admission.sequence.index)
