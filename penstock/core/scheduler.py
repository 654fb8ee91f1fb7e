"""The scheduler: one rule, no phases. A step gives every sequence tokens until computed meets known.

Iteration-level scheduling: Yu et al., Orca (OSDI 2022). Paged blocks: Kwon et al., 2309.06180. Prompts in chunks beside
decoding sequences: Agrawal et al., Sarathi-Serve, 2403.02310. Drafts verified by the target's own draws: Leviathan et
al., 2211.17192, with equal random numbers on both sides. Integers only; the runner does the rest.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from collections.abc import Mapping
from time import monotonic
from types import MappingProxyType

from penstock.config.cache_spec import CacheGroup
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import RequestError
from penstock.config.options import SchedulerOptions
from penstock.core.admission import AdmissionControl
from penstock.core.guidance import followed, lonely
from penstock.core.kv.cache import KVCache
from penstock.core.kv.node import Namespace
from penstock.core.ledger import Ledger
from penstock.core.plan_builder import InFlight, PlanBuilder
from penstock.core.policies.acceptance import Acceptance
from penstock.core.policies.checkpoints import Checkpoints
from penstock.core.policies.dealing import Dealing, dealing_for
from penstock.core.policies.naming import namespace_of
from penstock.core.policies.order import Gate, Policy, default_gates, policy_named
from penstock.core.policies.pause import PauseGate
from penstock.core.protocol import EncoderWork, NewSequence, ScheduledTokens, SlotResult, StepPlan, StepResult
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.core.request_queues import RequestQueues
from penstock.core.sequence import Sequence, SequenceState
from penstock.core.settlement import Settlement


class Scheduler:
    """Decides what every step computes. Not thread-safe; `plan` and `commit` alternate, `depth` plans ahead at most."""

    def __init__(
        self,
        options: SchedulerOptions,
        groups: abc.Sequence[CacheGroup],
        *,
        policy: Policy | None = None,
        gates: abc.Sequence[Gate] | None = None,
        dealing: Dealing | None = None,
    ) -> None:
        self.options = options
        self._dealing = dealing or dealing_for(options)
        checkpoints = Checkpoints(options.max_num_seqs, options.checkpoints) if options.recurrent else None
        self.cache = KVCache(groups, options.num_blocks, options.block_size, checkpoints)
        self._chunk = options.most_chunk
        self._policy = policy or policy_named(options.policy)
        self._queues = RequestQueues(options.max_num_seqs, self._policy)
        self.ledger = Ledger(self._queues, self.cache, caching=options.enable_prefix_caching)
        self.pause = PauseGate()
        gates = (self.pause, *(default_gates() if gates is None else gates))
        self._acceptance = Acceptance(options, self.cache)
        self._admission = AdmissionControl(options, self._queues, self.cache, self.ledger, gates)
        self._settlement = Settlement(self.cache, self.ledger)
        self._outstanding: OrderedDict[int, list[InFlight]] = OrderedDict()
        self._next_step = 0
        self.arrivals = 0

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Sequence]:
        """Sequences in the batch, in policy order."""
        return self._queues.running

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences in the queue, in policy order."""
        return self._queues.waiting

    @property
    def has_work(self) -> bool:
        works = bool(not self.ledger.is_empty or self._outstanding)
        under_way = self.running or self._outstanding or not self.ledger.is_told
        return works and not self.pause.rests(self.waiting, bool(under_way))

    @property
    def outstanding(self) -> int:
        return len(self._outstanding)

    def add(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
            RequestError: its id is taken, its prompt is empty, or it can never fit into the context or the KV cache.
        """
        if self.ledger.sequences(request.request_id):
            raise RequestError(f"request id {request.request_id!r} is in use; ids of live requests must differ.")
        self._acceptance.check(request)
        if request.pin is not None:
            if not self.options.enable_prefix_caching:
                raise RequestError("This server keeps no prefixes (--no-enable-prefix-caching): nothing can be pinned.")
            self.cache.pins.reserve(request, lambda: self._check_all_fit(request))
        namespace = self.namespace(request)
        now = monotonic()
        unscored = request.sampling.first_scored(0)
        sequences = [
            Sequence(request, index, self.arrivals, namespace, list(request.prompt_ids), arrived=now, scored=unscored)
            for index in range(request.sampling.n)
        ]
        self.arrivals += 1
        self.ledger.open(request.request_id, sequences)

    def namespace(self, request: EngineRequest) -> Namespace:
        """Who finds again what a request computes."""
        options = self.options
        return namespace_of(request, caching=options.enable_prefix_caching, shared=options.share_prefix_cache)

    def _check_all_fit(self, new: EngineRequest) -> None:
        """Raises RequestError where a request, or one that lives, can never be served beside what is pinned."""
        live = (sequence for sequence in self.ledger.live() if not sequence.follows)  # whom the one it follows counts
        for request in {sequence.request.request_id: sequence.request for sequence in live}.values():
            self._acceptance.check(request)
        self._acceptance.check(new)

    def cancel(self, request_id: str) -> None:
        """Ends all sequences of a request now; unknown ids are ignored."""
        for sequence in self.ledger.sequences(request_id):
            if sequence.state is not SequenceState.FINISHED:
                self.ledger.finish(sequence, FinishReason.CANCELLED)

    def preempt(self, request_id: str) -> int:
        """Sends a request's running sequences back to the queue, as if memory had run out; returns how many ran."""
        sequences = self.ledger.sequences(request_id)
        running = [sequence for sequence in sequences if sequence.state is SequenceState.RUNNING]
        for sequence in running:
            self.ledger.send_back(sequence)
        return len(running)

    def fork(self, request_id: str, index: int) -> int:
        """Adds a sequence that goes on from where another of a request is; returns its index.

        It waits in the queue like any other. What the first has computed it finds in the prefix tree: whole blocks are
        shared, the partial one and a recurrent state are copied.

        Raises:
            KeyError: there is no such live sequence.
            ValueError: it is guided.
        """
        parent = self._live_sequence(request_id, index)
        if parent.partner is not None:
            raise ValueError(f"request {request_id!r} is guided; sequences that share their draws do not fork")
        child = Sequence(
            parent.request,
            len(self.ledger.sequences(request_id)),
            parent.order,
            parent.namespace,
            list(parent.tokens),
            arrived=monotonic(),
            scored=parent.scored,
        )
        if parent.state is SequenceState.RUNNING:
            self.cache.offer(parent)
        self.ledger.join(child)
        return child.index

    def rewind(self, request_id: str, index: int, tokens: int) -> bool:
        """Takes back the generated tokens of a sequence behind its first `tokens`, prompt included.

        It goes on from there. What it computed is kept where that is possible, else computed again. False, and nothing
        is changed, while a step of the sequence is in flight.

        Raises:
            KeyError: there is no such live sequence.
            ValueError: that many tokens are fewer than the prompt's or more than there are.
        """
        sequence = self._live_sequence(request_id, index)
        both = (sequence,) if sequence.partner is None else (sequence, sequence.partner)
        if not sequence.num_prompt <= tokens <= len(sequence.tokens):
            raise ValueError(
                f"{tokens} of {len(sequence.tokens)} tokens are to stay, but the prompt has {sequence.num_prompt}"
            )
        if any(one.last_step > self.cache.committed_step for one in both):
            return False
        for one in both:
            self._take_back(one, one.num_prompt + tokens - sequence.num_prompt)
        return True

    def _take_back(self, sequence: Sequence, tokens: int) -> None:
        # the last token is computed anew where all that stay were: its logits are wanted
        if sequence.state is SequenceState.RUNNING and (
            sequence.loading or not self.cache.rewind(sequence, min(tokens - 1, sequence.committed))
        ):
            self.ledger.restart(sequence)
        sequence.truncate(tokens)
        sequence.rewind(tokens - 1)
        if sequence.introduced:
            self._queues.reintroduce(sequence)

    def _live_sequence(self, request_id: str, index: int) -> Sequence:
        sequences = self.ledger.sequences(request_id)
        if index >= len(sequences) or sequences[index].state is SequenceState.FINISHED:
            raise KeyError(f"request {request_id!r} has no live sequence {index}")
        return sequences[index]

    def take_outputs(self) -> list[EngineOutput]:
        """Everything that became known since the last call."""
        return self.ledger.take_outputs()

    def stats(self) -> EngineStats:
        """A snapshot of all but what the engine's loop measures."""
        return self.ledger.stats()

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, *, idle: bool = False) -> StepPlan | None:
        """The next step, or None if nothing can be computed before an outstanding step commits (or at all).

        `idle`: nothing is asked for, so that a step may bring nothing but copies to the tier below.
        """
        self.cache.pins.expire(monotonic())
        for late in self.cache.transfers.overdue():
            self.ledger.load_failed(late, late=True)
        remaining = self._dealing.deal(self.running)
        if remaining is None:
            return None
        builder = PlanBuilder(self._next_step, self._dealing.budget(remaining, self.waiting))
        builder.spare = (builder.budget - len(remaining)) // 2
        for sequence, length in remaining:
            if length == 1:  # these are never starved by prompts
                self._continue(sequence, length, builder)
        for sequence, length in remaining:
            if length > 1:
                self._continue(sequence, length, builder)
        paired = any(sequence.partner is not None for sequence, _ in remaining)
        for sequence in lonely(builder) if paired else ():
            if builder.withdraw(sequence) and sequence.introduced:
                self._queues.reintroduce(sequence)
        if not builder.preempted:
            self._admission.admit(builder)
        moves = self.cache.transfers.owed if idle else self.cache.transfers.loading
        if builder.scheduled or builder.encoder_work or (moves and (self.cache.ops or not self._outstanding)):
            return self._seal(builder)  # without tokens it brings transfers on their way, and tells of those that ended
        if paired and not (self._outstanding or builder.preempted) and len(self.running) == len(remaining):
            self._preempt(self.running[-1], builder)  # what it holds is what an older one's partner lacks
        return None

    def _continue(self, sequence: Sequence, length: int, builder: PlanBuilder) -> None:
        """Gives a running sequence up to so many tokens, preempting later ones if blocks run out."""
        length = min(length, builder.budget, self._chunk)
        if sequence.state is not SequenceState.RUNNING:
            return
        length = self.cache.cut(sequence, sequence.computed, length)
        if length <= 0:
            return
        target = sequence.computed + length
        if sequence.drafts and self._draft(sequence, target, builder):
            return
        while (added := self.cache.extend(sequence, target)) is None:
            if builder.preempted and self.cache.will_fit(sequence, target):
                return  # what the victims held is free once the step in flight has committed
            if later := [other for other in self._queues.later(sequence) if other is not sequence.partner]:
                self._preempt(self._policy.victim(later, self.cache), builder)
            else:
                if self.running[0] in (sequence, sequence.partner) and not self._outstanding:
                    self._preempt(sequence, builder)  # it holds duplicates of cached blocks; it starts again on those
                return
        builder.schedule(sequence, length, added)

    def _draft(self, sequence: Sequence, target: int, builder: PlanBuilder) -> bool:
        """Schedules a sequence with its drafts, if they fit without anybody being preempted for them."""
        length = target - sequence.computed
        room = min(builder.spare, builder.budget - length, self._chunk - length, sequence.longest - sequence.known - 1)
        drafts = sequence.drafts[: max(0, room)]
        sequence.drafts = ()
        if target < sequence.known or not drafts:
            return False
        states = self.cache.states.borrow(len(drafts) + 1)
        if states is None:
            return False
        added = self.cache.extend(sequence, target + len(drafts))
        allocation = sequence.allocation
        assert allocation is not None
        allocation.draft_states = states
        if added is None:
            self.cache.states.return_slots(allocation)
            return False
        sequence.drafts = drafts
        builder.schedule(sequence, length, added)
        return True

    def _preempt(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Sends a running sequence back to the queue; what it computed stays in the tree as long as memory allows."""
        scheduled = builder.scheduled.pop(sequence, None)
        if scheduled is not None:
            builder.budget += len(scheduled.tokens)
        builder.preempted = True
        self.ledger.send_back(sequence)

    def _seal(self, builder: PlanBuilder) -> StepPlan:
        """Turns the builder into a plan and marks it outstanding."""
        new_sequences: list[NewSequence] = []
        spans: list[ScheduledTokens] = []
        in_flight: list[InFlight] = []
        guidance: list[tuple[int, int, float]] = []
        for sequence, tokens in builder.scheduled.items():
            if not sequence.introduced:
                sequence.introduced = True
                new_sequences.append(_new_sequence(sequence, tokens))
                tokens = tokens._replace(new_blocks=())  # it is introduced with its whole tables
            spans.append(tokens)
            for medium in sequence.request.media if tokens.prompt_tokens else ():
                if tokens.start <= medium.start < tokens.start + tokens.prompt_tokens:
                    work = EncoderWork(sequence.slot, medium.digest, medium.start, medium.length)
                    builder.encoder_work.append(work)
            sequence.last_step = builder.step
            sequence.in_flight += tokens.sample
            end = tokens.start + len(tokens.tokens) - tokens.draft_tokens
            shared = sequence.partner.slot if sequence.partner is not None and tokens.sample else None
            if shared is not None and not sequence.follows:
                guidance.append((tokens.slot, shared, sequence.request.sampling.guidance_scale - 1))
                shared = None
            entry = InFlight(sequence, tokens.slot, tokens.start, end, tokens.sample, sequence.drafts, shared)
            in_flight.insert(len(in_flight) if shared is None else 0, entry)  # whose draw ends both is settled last
            sequence.drafts = ()
        self._outstanding[builder.step] = in_flight
        self._next_step += 1
        return StepPlan(
            step=builder.step,
            released_slots=self._queues.take_released(),
            new_sequences=tuple(new_sequences),
            cache_ops=self.cache.take_ops(builder.step),
            encoder_work=tuple(builder.encoder_work),
            scheduled=tuple(spans),
            guidance=tuple(guidance),
        )

    # -- committing ---------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, forced: Mapping[int, tuple[int, ...]] = MappingProxyType({})) -> None:
        """Takes the answer to the oldest outstanding plan.

        Args:
            result: the answer.
            forced: by slot, tokens that must follow the sampled one (a grammar allows no other). They become known
                tokens, are computed together in the next step, and bring no log-probabilities.

        Raises:
            ValueError: the result is of another step, or a slot with forced tokens has a later step in flight, which
                was planned without them.
        """
        step, in_flight = self._outstanding.popitem(last=False)
        if step != result.step:
            raise ValueError(f"the result of step {result.step} came while step {step} was due")
        self._step_over(step)
        self._settlement.finish_transfers(result)
        results = {answer.slot: answer for answer in result.results}
        for entry in in_flight:
            if entry.sequence.state is not SequenceState.FINISHED:
                drawn = entry.slot if entry.shared is None else entry.shared
                answer = results.get(drawn) or SlotResult(drawn)
                if entry.shared is not None:
                    answer = followed(entry.slot, answer)
                self._settlement.settle(entry, answer, forced.get(drawn, ()))
                if answer.back is not None:
                    self._take_back(entry.sequence, entry.sequence.num_prompt + answer.back)
        if result.proposals:
            self._settlement.take_proposals(result.proposals, in_flight)

    def fail_outstanding(self, error: str) -> None:
        """Ends every sequence that has a step in flight with an error, what those did is unknown; others start anew."""
        self.cache.forget_unfinished()
        for sequence in self.cache.transfers.fail_all():
            self.ledger.restart(sequence)
        while self._outstanding:
            step, in_flight = self._outstanding.popitem(last=False)
            self._step_over(step)
            for entry in in_flight:
                if entry.sequence.state is not SequenceState.FINISHED:
                    self.ledger.finish(entry.sequence, FinishReason.ERROR, error=error)
        for sequence in list(self.running):  # what those steps were to copy for it is unknown
            self.ledger.restart(sequence, keep=False)

    def _step_over(self, step: int) -> None:
        self.cache.step_committed(step)
        self._queues.step_over(step)

    def check_integrity(self) -> None:
        """Raises AssertionError if any count, queue or slot disagrees with another. For tests and idle moments."""
        self.ledger.check_integrity()
        self._queues.check_integrity()
        for sequence in self.running:
            assert sequence.committed <= sequence.computed
            assert sequence.computed <= sequence.known or sequence.request.speculate > 0
            assert 0 <= sequence.in_flight <= len(self._outstanding)
        self.cache.check_integrity(self.ledger.live())


def _new_sequence(sequence: Sequence, tokens: ScheduledTokens) -> NewSequence:
    """What the runner has to know of a sequence that enters the batch."""
    allocation = sequence.allocation
    request = sequence.request
    assert allocation is not None
    return NewSequence(
        slot=tokens.slot,
        request_id=request.request_id,
        sequence=sequence.index,
        prompt_ids=request.prompt_ids,
        generated_ids=tuple(sequence.tokens[sequence.num_prompt :]),
        computed=tokens.start,
        blocks=tuple(tuple(table.blocks) for table in allocation.tables),
        sampling=request.sampling,
        stop_ids=request.stop_ids,
        seed=request.seed,
        adapters=sequence.adapter_slots,
        pooling=request.pooling,
        encoder=request.encoder,
        media=request.media,
        speculate=request.speculate,
        valid_from=tuple(table.valid_from for table in allocation.tables),
        sampler_state=sequence.sampler_state,
        follows=sequence.follows,
        namespace=sequence.namespace,
    )
