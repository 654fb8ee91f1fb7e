"""Structured output of all sequences of an engine; a step's masks are made while its forward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.config.errors import GRAMMAR_TOO_COMPLEX, RequestError
from penstock.core.policies.order import Admission
from penstock.core.protocol import NewSequence, SlotResult, StepPlan, StepResult
from penstock.core.request import EngineOutput, EngineRequest
from penstock.structured.grammar_compiler import (
    Compilation,
    GrammarCompiler,
    Vocabulary,
    compute_mask,
    unavailable_reason,
)
from penstock.structured.grammar_state import ALL_ALLOWED, BrokenMatcher, GrammarState, SlowMasks, Words

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Forced = Mapping[int, tuple[int, ...]]
_SLOW_S: Final = 0.02  # a mask that takes longer makes the other streams wait
_CHEAP_S: Final = 0.0003
_RETRY_STEPS: Final = 64
_MOST_FORCING_S: Final = 0.01  # of a step; forced tokens not found by then are found during the next forward pass
_NONE_FORCED: Final[Forced] = MappingProxyType({})


_NO_DRAFTS: Final[Mapping[int, tuple[int, ...]]] = MappingProxyType({})


class Masks:
    """A step's masks, being made.

    Attributes:
        seconds: it took to make them, once they are made.
        longest: of these, for those of one place of all sequences: all there would be without drafts.
    """

    def __init__(
        self,
        words: int,
        constrained: Mapping[int, GrammarState],
        pool: ThreadPoolExecutor | None = None,
        together: LLExecutor | None = None,
        *,
        drafts: Mapping[int, tuple[int, ...]] = _NO_DRAFTS,
        timed: bool = False,
    ) -> None:
        """Starts the masks of some slots.

        Args:
            words: of a mask, ceil(V / 32).
            constrained: by slot.
            pool: makes them in a thread; None makes them at once.
            together: makes several at a time.
            drafts: by slot, behind each of which there is a mask too.
            timed: times each, and counts slow ones for their requests; those behind drafts by `slow_behind`.
        """
        self.seconds = self.longest = 0.0
        self._timed = timed
        self._slow: set[int] = set()  # places behind drafts
        self._places: dict[int, int] = {}
        count = 0
        for slot in constrained:
            self._places[slot] = count
            count += 1 + len(drafts.get(slot, ()))
        self._named = tuple(slot for slot in constrained for _ in range(1 + len(drafts.get(slot, ()))))
        self._made = np.empty((count, words), np.uint32)
        self._done: Future[None] | None = None
        states = [(state, self._places[slot], drafts.get(slot, ())) for slot, state in constrained.items()]
        if pool is None:
            self._make_all(states, None)
        else:
            self._done = pool.submit(self._make_all, states, together)

    def _make_all(
        self, states: Sequence[tuple[GrammarState, int, tuple[int, ...]]], together: LLExecutor | None
    ) -> None:
        """Makes the masks of states from their first place on: before their drafts, then behind each in turn."""
        began = perf_counter()
        self._make([(state, place) for state, place, _ in states], together)
        drafted = [entry for entry in states if entry[2]]
        before = [state.snapshot() for state, _, _ in drafted]
        try:
            self._follow(drafted, together)
        finally:
            for (state, _, _), snapshot in zip(drafted, before, strict=True):
                state.restore(snapshot)
        self.seconds = perf_counter() - began

    def _follow(self, going: Sequence[tuple[GrammarState, int, tuple[int, ...]]], together: LLExecutor | None) -> None:
        """Makes the masks behind drafts; those behind one that cannot be drawn, or ends the answer, allow all."""
        while going:
            behind: list[tuple[GrammarState, int, tuple[int, ...]]] = []
            for state, place, drafts in going:
                draft = drafts[0]
                if not state.broken and _allows(self._made[place], draft) and not state.ends_with(draft):
                    state.follow(draft)
                    if not state.broken:
                        behind.append((state, place + 1, drafts[1:]))
                        continue
                self._made[place + 1 : place + 1 + len(drafts)] = ALL_ALLOWED
            self._make([(state, place) for state, place, _ in behind], together, drafted=True)
            going = [entry for entry in behind if entry[2]]

    def _make(
        self, states: Sequence[tuple[GrammarState, int]], together: LLExecutor | None, *, drafted: bool = False
    ) -> None:
        began, made = perf_counter(), self._made
        address, size = made.ctypes.data, made.strides[0]
        wanted: list[tuple[LLMatcher, int]] = []
        masked: list[GrammarState] = []
        unfinished: list[tuple[GrammarState, int]] = []
        for state, place in states:
            matcher, unready = state.mask_source()
            if matcher is not None:
                wanted.append((matcher, place))
                masked.append(state)
            if unready:
                unfinished.append((state, place))
        if self._timed:
            for state, (matcher, place) in zip(masked, wanted, strict=True):
                since = thread_time()
                compute_mask(matcher, made[place])
                if thread_time() - since > _SLOW_S:
                    state.takes_drafts = False
                    if drafted:
                        self._slow.add(place)
                    else:
                        state.slow_masks.count += 1
        elif together is not None and len(wanted) > 1:
            together.unsafe_compute_mask_ptr(wanted, address, size, len(made))
        else:
            for matcher, place in wanted:
                matcher.unsafe_compute_mask_ptr(address + place * size, size)
        for state, (matcher, _) in zip(masked, wanted, strict=True):
            state.broken = matcher.is_error()
        for state, place in unfinished:
            state.finish_mask(made[place])
        self.longest = max(self.longest, perf_counter() - began)

    def slow_behind(self, slot: int, drafts: int) -> int:
        """How many of the masks behind a slot's first drafts took too long: without drafts they would be made too."""
        first = self._places.get(slot, 0) + 1
        return len(self._slow.intersection(range(first, first + drafts))) if self._slow else 0

    def of(self, slots: Sequence[int]) -> Words:
        """[L, ceil(V / 32)]: the masks of these request slots, waited for; all ones for unconstrained ones.

        A slot that has drafts is named again, at once, for the mask behind each.
        """
        if self._done is not None:
            self._done.result()
        if tuple(slots) == self._named:
            return self._made
        masks = np.full((len(slots), self._made.shape[1]), ALL_ALLOWED)
        again = 0
        for place, slot in enumerate(slots):
            again = again + 1 if place and slots[place - 1] == slot else 0
            if slot in self._places:
                masks[place] = self._made[self._places[slot] + again]
        return masks


def _allows(mask: Words, token: int) -> bool:
    return token // 32 < len(mask) and bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))


@dataclass(slots=True)
class _Request:
    """A request with a grammar or a budget of reasoning.

    Attributes:
        job: its grammar's, None without one.
        sequences: the states of its sequences, by number, made as they enter the batch.
        finished: sequences that ended.
        slow_masks: of all its sequences.
    """

    request: EngineRequest
    job: Compilation | None
    matcher: LLMatcher | None = None
    sequences: dict[int, GrammarState] = field(default_factory=dict)
    finished: int = 0
    slow_masks: SlowMasks = field(default_factory=SlowMasks)


class StructuredOutputManager:
    """The grammar states of all sequences of an engine. Belongs to the thread of its step loop.

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
        self._compiling: dict[str, _Request] = {}
        self._active: dict[str, _Request] = {}
        self._slots: dict[int, GrammarState] = {}
        self._steps: dict[int, tuple[dict[int, GrammarState], Masks | None]] = {}
        self._renewals: dict[tuple[str, int], tuple[GrammarState, Compilation]] = {}

    def warm(self) -> None:
        """Prepares for grammars in the background: the first one would keep the steps of others waiting for it."""
        if self._compiler is not None and unavailable_reason() is None:
            self._compiler.warm()

    @property
    def pending(self) -> bool:
        """Whether requests wait for their grammars."""
        return bool(self._compiling)

    @property
    def compiling(self) -> Iterable[str]:
        """Requests that wait for their grammars."""
        return self._compiling.keys()

    @property
    def renewing(self) -> bool:
        """Whether sequences wait for matchers in place of failed ones."""
        return bool(self._renewals)

    def waits(self, request_id: str, sequence: int) -> bool:
        """Whether a sequence waits for a matcher in place of one that has failed."""
        return (request_id, sequence) in self._renewals

    def add(self, request: EngineRequest) -> bool:
        """Takes a request; whether it has to wait for its grammar, until `ready` returns it.

        Raises:
            RequestError: it has a grammar, and this engine takes none.
        """
        if not request.constrained:
            return False
        if request.grammar is None:
            self._active[request.request_id] = _Request(request, None)
            return False
        if self._compiler is None:
            raise RequestError("this engine takes no grammars.", param="grammar")
        if (reason := unavailable_reason()) is not None:
            raise RequestError(reason, param="grammar")
        job = self._compiler.want(request.grammar.source, request.owner)
        self._compiling[request.request_id] = _Request(request, job)
        return True

    def ready(self) -> list[tuple[EngineRequest, RequestError | None]]:
        """Requests whose grammars are compiled, and refused ones with the reason. Renews failed matchers too."""
        for owner, (state, job) in list(self._renewals.items()):
            assert self._compiler is not None
            if (renewed := self._compiler.outcome(job)) is not None:
                state.renew(RequestError(GRAMMAR_TOO_COMPLEX) if isinstance(renewed, RequestError) else renewed)
                del self._renewals[owner]
        if not self._compiling or self._compiler is None:
            return []
        found: list[tuple[EngineRequest, RequestError | None]] = []
        for request_id, waiting in list(self._compiling.items()):
            assert waiting.job is not None
            outcome = self._compiler.outcome(waiting.job)
            if outcome is None:
                continue
            del self._compiling[request_id]
            if isinstance(outcome, RequestError):
                found.append((waiting.request, outcome))
            else:
                waiting.matcher = outcome
                self._active[request_id] = waiting
                found.append((waiting.request, None))
        return found

    def wait(self, seconds: float) -> None:
        """Sleeps until a grammar was compiled, at most so long; not at all if none is."""
        if (self._compiling or self._renewals) and self._compiler is not None:
            self._compiler.wait(seconds)

    def cancel(self, request_id: str) -> bool:
        """Forgets a request that waits for its grammar; whether it did."""
        waiting = self._compiling.pop(request_id, None)
        if waiting is None:
            return False
        assert self._compiler is not None and waiting.job is not None
        if all(other.job is not waiting.job for other in self._compiling.values()):
            self._compiler.drop(waiting.job)
        return True

    def drop(self, request_id: str) -> None:
        """Forgets a request that was not admitted."""
        self._active.pop(request_id, None)

    def forget(self, outputs: Iterable[EngineOutput]) -> None:
        """Forgets the sequences that ended."""
        for output in outputs if self._active else ():
            if output.finish_reason is not None and (live := self._active.get(output.request_id)) is not None:
                state = live.sequences.pop(output.sequence, None)
                self._give_up(output.request_id, output.sequence)
                if state is not None and live.job is not None and self._compiler is not None:
                    self._compiler.used(live.job, state.length)
                live.finished += 1
                if live.finished >= live.request.sampling.n:
                    del self._active[output.request_id]

    def _give_up(self, request_id: str, sequence: int) -> None:
        _, job = self._renewals.pop((request_id, sequence), (None, None))
        if job is not None and self._compiler is not None:
            self._compiler.drop(job)

    def begin(self, plan: StepPlan) -> Masks | None:
        """Starts a step's masks; None if every token is allowed everywhere."""
        if not self._active and not self._slots:
            return None
        for slot in plan.released_slots:
            self._slots.pop(slot, None)
        for new in plan.new_sequences:
            self._slots.pop(new.slot, None)
            if (live := self._active.get(new.request_id)) is not None:
                self._slots[new.slot] = self._state_of(live, new)
        step = {
            span.slot: self._slots[span.slot] for span in plan.scheduled if span.sample and span.slot in self._slots
        }
        masks = self._masks_of(plan, step)
        self._steps[plan.step] = step, masks
        return masks

    def _masks_of(self, plan: StepPlan, step: Mapping[int, GrammarState]) -> Masks | None:
        """Starts the masks of sequences under constraints, where not every token is allowed everywhere."""
        drafts = {span.slot: span.drafts for span in plan.scheduled if span.draft_tokens and span.slot in step}
        masked = {slot: state for slot, state in step.items() if slot in drafts or not state.unconstrained}
        if not masked:
            return None
        before, longest = (self._masks.seconds, self._masks.longest) if self._masks is not None else (0.0, 0.0)
        deferred = any(state.deferred for state in masked.values())
        if not deferred and (before < _CHEAP_S or plan.step % _RETRY_STEPS == 0):  # handing them over would cost more
            self._masks = Masks(self._words, masked, drafts=drafts, timed=True)
            return self._masks
        if self._pool is None:
            from llguidance import LLExecutor

            self._pool = ThreadPoolExecutor(1, "penstock-masks")
            self._together = LLExecutor()
        self._masks = Masks(self._words, masked, self._pool, self._together, drafts=drafts, timed=longest > _SLOW_S)
        return self._masks

    def _state_of(self, live: _Request, new: NewSequence) -> GrammarState:
        found = live.sequences.get(new.sequence)
        if found is None:
            matcher = None if live.matcher is None else live.matcher.deep_copy()
            eos_ids = () if self._compiler is None or matcher is None else self._compiler.vocabulary.eos_ids
            owner = new.request_id, new.sequence
            request = live.request
            found = GrammarState(matcher, request.thinking, request.sampling, eos_ids, live.slow_masks, owner)
            found.replay(new.generated_ids)
            live.sequences[new.sequence] = found
        return found

    def end(self, result: StepResult) -> tuple[StepResult, Forced]:
        """Takes a step's tokens; the result, in which a slot may now have failed, and the forced tokens by slot."""
        step, masks = self._steps.pop(result.step, (None, None))
        if not step:
            return result, _NONE_FORCED
        forced: dict[int, tuple[int, ...]] = {}
        changed: dict[int, SlotResult] = {}
        latest = perf_counter() + _MOST_FORCING_S
        for row in result.results:
            state = step.get(row.slot)
            if state is None or not row.tokens:
                continue
            try:
                tokens = self._up_to_stop(state, row.tokens)
                if following := state.accept(tokens, defer=perf_counter() > latest):
                    forced[row.slot] = following
                if masks is not None:
                    state.slow_masks.count += masks.slow_behind(row.slot, len(tokens) - 1)
            except RequestError as error:
                changed[row.slot] = SlotResult(row.slot, error=str(error))
            except BrokenMatcher:
                changed[row.slot] = self._renew(state, row)
        if changed:
            result = result._replace(results=tuple(changed.get(row.slot, row) for row in result.results))
        if result.proposals:
            wanted = (one for one in result.proposals if one.slot not in step or step[one.slot].takes_drafts)
            result = result._replace(proposals=tuple(wanted))
        return result, forced

    def _up_to_stop(self, state: GrammarState, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens up to one that ends the answer: accepted drafts may go on behind it."""
        if len(tokens) == 1:
            return tokens
        stop_ids = self._active[state.owner[0]].request.stop_ids
        end = next((count for count, token in enumerate(tokens, 1) if token in stop_ids), len(tokens))
        return tokens[:end]

    def _renew(self, state: GrammarState, row: SlotResult) -> SlotResult:
        """A result without its token, which is drawn again with a new matcher; an error where that one failed too."""
        live = self._active[state.owner[0]]
        if state.renewed and not state.drafted:
            return SlotResult(row.slot, error=GRAMMAR_TOO_COMPLEX)
        assert self._compiler is not None and live.job is not None
        if state.owner not in self._renewals:
            self._renewals[state.owner] = state, self._compiler.renew(live.job, state.matched)
        return row._replace(tokens=(), logprobs=(), again=True)

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

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager

    def holds(self, admission: Admission) -> bool:
        return self._manager.waits(admission.sequence.request.request_id, admission.sequence.index)
