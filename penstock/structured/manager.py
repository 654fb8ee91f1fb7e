"""Structured output of all sequences of an engine; a step's masks are made while its forward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.config.errors import BANNED_AND_HELD, GRAMMAR_TOO_COMPLEX, NO_TOKEN_ALLOWED, RequestError
from penstock.core.policies.order import Admission
from penstock.core.protocol import NewSequence, SlotResult, StepPlan, StepResult
from penstock.core.request import EngineOutput, EngineRequest
from penstock.structured.banned_strings import BannedStrings, Search, Withheld, search
from penstock.structured.first_tokens import FirstTokens
from penstock.structured.grammar_compiler import (
    Compilation,
    GrammarCompiler,
    Vocabulary,
    unavailable_reason,
)
from penstock.structured.grammar_state import BrokenMatcher, GrammarState, SlowMasks, Words
from penstock.structured.lazy_vocabulary import LazyVocabulary
from penstock.structured.masks import SLOW_S, Masks

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Made = TypeVar("Made")
Forced = Mapping[int, tuple[int, ...]]
_CHEAP_S: Final = 0.0003
_RETRY_STEPS: Final = 64
_MOST_FORCING_S: Final = 0.01  # of a step; forced tokens not found by then are found during the next forward pass
_NONE_FORCED: Final[Forced] = MappingProxyType({})


@dataclass(slots=True)
class _Request:
    """A request with a grammar, a budget of reasoning, banned strings or a given beginning.

    Attributes:
        job: its grammar's, None without one.
        search: for banned strings, being made; None without any.
        first: the mask of the first token, being made; None where any may come.
        sequences: the states of its sequences, by number, made as they enter the batch.
        finished: sequences that ended.
        slow_masks: of all its sequences.
        withheld: news of those sequences that may yet be taken back, by number.
    """

    request: EngineRequest
    job: Compilation | None
    matcher: LLMatcher | None = None
    sequences: dict[int, GrammarState] = field(default_factory=dict)
    finished: int = 0
    slow_masks: SlowMasks = field(default_factory=SlowMasks)
    search: Future[Search] | None = None
    first: Future[Words] | None = None
    withheld: dict[int, Withheld] = field(default_factory=dict)

    @property
    def beside(self) -> list[Future[Any]]:
        """What is made of the vocabulary, beside the step loop."""
        return [made for made in (self.search, self.first) if made is not None]


class StructuredOutputManager:
    """The grammar states of all sequences of an engine. Belongs to the thread of its step loop.

    Args:
        vocab_size: logits a position.
        vocabulary: the model's, for grammars; None refuses them.
    """

    def __init__(self, vocab_size: int = 0, vocabulary: Callable[[], Vocabulary] | None = None) -> None:
        self._words = (vocab_size + 31) // 32
        self._vocabulary = None if vocabulary is None else LazyVocabulary(vocabulary)
        self._compiler = None if self._vocabulary is None else GrammarCompiler(self._vocabulary)
        self._searches: ThreadPoolExecutor | None = None
        self._first_tokens: FirstTokens | None = None
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
        """Takes a request; whether it has to wait for what it has, until `ready` returns it.

        Raises:
            RequestError: this engine takes no such request, or two of what it has do not go together.
        """
        if not request.constrained:
            return False
        live = _Request(request, None)
        if request.grammar is not None:
            if self._compiler is None:
                raise RequestError("this engine takes no grammars.", param="grammar")
            if (reason := unavailable_reason()) is not None:
                raise RequestError(reason, param="grammar")
            live.job = self._compiler.want(request.grammar.source, request.owner)
        if request.sampling.banned_strings:
            live.search = self._look_for(request)
        if request.sampling.begins_with:
            live.first = self._begin_with(request)
        waits = live.job is not None or bool(live.beside)
        (self._compiling if waits else self._active)[request.request_id] = live
        return waits

    def _look_for(self, request: EngineRequest) -> Future[Search]:
        """Makes what finds a request's banned strings, beside the step loop: a vocabulary may have to be read."""
        params = request.sampling

        def make(known: Vocabulary) -> Search:
            hidden = known.special_ids if params.skip_special_tokens else frozenset[int]()
            return search(params.banned_strings, known.token_bytes, hidden)

        return self._beside("banned_strings", make)

    def _begin_with(self, request: EngineRequest) -> Future[Words]:
        """Makes the mask of a first token that is to begin with the prompt's end, likewise."""
        if request.grammar is not None or request.thinking is not None:
            told = "token_healing goes with no grammar, no tools and no budget of reasoning: the first token is partly "
            raise RequestError(f"{told}the prompt's. Leave it out.", param="token_healing")

        def make(known: Vocabulary) -> Words:
            if self._first_tokens is None:
                self._first_tokens = FirstTokens(known)
            return self._first_tokens.mask(request.sampling.begins_with)

        return self._beside("token_healing", make)

    def _beside(self, field: str, make: Callable[[Vocabulary], Made]) -> Future[Made]:
        vocabulary = self._vocabulary
        if vocabulary is None:
            raise RequestError(f"this engine takes no {field}.", param=field)
        if self._searches is None:
            self._searches = ThreadPoolExecutor(1, "penstock-vocabulary")
        return self._searches.submit(lambda: make(vocabulary()))

    def ready(self) -> list[tuple[EngineRequest, RequestError | None]]:
        """Requests that wait for nothing any more, and refused ones with the reason. Renews failed matchers too."""
        for owner, (state, job) in list(self._renewals.items()):
            assert self._compiler is not None
            if (renewed := self._compiler.outcome(job)) is not None:
                state.renew(RequestError(GRAMMAR_TOO_COMPLEX) if isinstance(renewed, RequestError) else renewed)
                del self._renewals[owner]
        found: list[tuple[EngineRequest, RequestError | None]] = []
        for request_id, waiting in list(self._compiling.items()):
            if any(not made.done() for made in waiting.beside):
                continue
            if any(made.exception() is not None for made in waiting.beside):
                self.cancel(request_id)
                field = "token_healing" if waiting.search is None else "banned_strings"
                refused = RequestError(f"the vocabulary cannot be read for {field}.", param=field)
                found.append((waiting.request, refused))
                continue
            if waiting.job is not None:
                assert self._compiler is not None
                outcome = self._compiler.outcome(waiting.job)
                if outcome is None:
                    continue
                if isinstance(outcome, RequestError):
                    del self._compiling[request_id]
                    found.append((waiting.request, outcome))
                    continue
                waiting.matcher = outcome
            del self._compiling[request_id]
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
        for made in waiting.beside:
            made.cancel()
        if waiting.job is None:
            return True
        assert self._compiler is not None
        if all(other.job is not waiting.job for other in self._compiling.values()):
            self._compiler.drop(waiting.job)
        return True

    def end_reasoning(self, request_id: str) -> None:
        """Ends the reasoning of all sequences of a request; of requests without a budget of it nothing is known."""
        live = self._active.get(request_id) or self._compiling.get(request_id)
        if live is None or live.request.thinking is None:
            return
        live.request = replace(live.request, thinking=replace(live.request.thinking, budget=0))
        for state in live.sequences.values():
            state.end_reasoning()

    def drop(self, request_id: str) -> None:
        """Forgets a request that was not admitted."""
        self._active.pop(request_id, None)

    def told(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """What may be told of these: tokens that may yet be taken back are withheld. Forgets sequences that ended."""
        for place, output in enumerate(outputs) if self._active else ():
            live = self._active.get(output.request_id)
            if live is not None and (withheld := live.withheld.get(output.sequence)) is not None:
                banned = live.sequences[output.sequence].banned
                outputs[place] = withheld.tell(output, 0 if banned is None else banned.held)
        self._forget(outputs)
        return outputs

    def _forget(self, outputs: Iterable[EngineOutput]) -> None:
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
            if (live := self._active.get(new.request_id)) is not None and not new.follows:
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
        self._masks = Masks(self._words, masked, self._pool, self._together, drafts=drafts, timed=longest > SLOW_S)
        return self._masks

    def _state_of(self, live: _Request, new: NewSequence) -> GrammarState:
        found = live.sequences.get(new.sequence)
        if found is None:
            matcher = None if live.matcher is None else live.matcher.deep_copy()
            eos_ids = () if self._compiler is None or matcher is None else self._compiler.vocabulary.eos_ids
            owner = new.request_id, new.sequence
            request = live.request
            banned = None if live.search is None else BannedStrings(live.search.result())
            first = None if live.first is None else live.first.result()
            found = GrammarState(
                matcher, request.thinking, request.sampling, eos_ids, live.slow_masks, owner, banned, first
            )
            found.replay(new.generated_ids)
            if banned is not None:
                banned.go_on(new.generated_ids, new.sampler_state)
                live.withheld[new.sequence] = Withheld(len(new.generated_ids))
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
            if state is not None and row.error == NO_TOKEN_ALLOWED and state.banned is not None:
                changed[row.slot] = row._replace(error=BANNED_AND_HELD)
            if state is None or not row.tokens or state.owner[0] not in self._active:
                continue  # where its request has ended meanwhile, nobody takes the token
            try:
                tokens = self._up_to_stop(state, row.tokens)
                following = state.accept(tokens, defer=perf_counter() > latest)
                if state.banned is not None and (back := self._taken_back(state, row, tokens + following)) is not None:
                    changed[row.slot] = back
                    continue
                if following:
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
            wanted = (
                one
                for one in result.proposals
                if one.slot not in step or (one.slot not in changed and step[one.slot].takes_drafts)
            )
            result = result._replace(proposals=tuple(one for one in wanted if one.slot not in changed))
        return result, forced

    def _taken_back(self, state: GrammarState, row: SlotResult, tokens: tuple[int, ...]) -> SlotResult | None:
        """A result without its tokens, where with them the answer holds a banned string; it goes on before that."""
        banned = state.banned
        assert banned is not None
        known = banned.length
        number = banned.take(tokens, row.sampler_state)
        if number is None:
            return None
        length, learned = banned.go_back(number, known)
        try:
            state.rewind(state.length - length)
        except ValueError as error:
            raise RequestError(f"{error}, as banned_strings would need.") from error
        request_id, sequence = state.owner
        self._active[request_id].withheld[sequence].take_back(length)
        return row._replace(tokens=(), logprobs=(), back=length, sampler_state=learned)

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
        return row._replace(tokens=(), logprobs=(), again=True, sampler_state=())

    def abort(self) -> None:
        """Forgets outstanding steps."""
        self._steps.clear()

    def close(self) -> None:
        """Ends the threads."""
        if self._compiler is not None:
            self._compiler.close()
        for pool in (self._pool, self._searches):
            if pool is not None:
                pool.shutdown()


class GrammarGate:
    """A sequence whose matcher has failed waits for another one."""

    name = "grammar"
    passable = True
    until_release = False

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager

    def holds(self, admission: Admission) -> bool:
        return self._manager.waits(admission.sequence.request.request_id, admission.sequence.index)
