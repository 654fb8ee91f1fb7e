"""The scheduler: one rule, no phases. A step gives every sequence tokens until computed meets known.

Iteration-level scheduling: Yu et al., Orca (OSDI 2022). Paged blocks: Kwon et al., 2309.06180. Prompts in chunks beside
decoding rows: Agrawal et al., Sarathi-Serve, 2403.02310. Integers only; the runner does the rest.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from types import MappingProxyType

from penstock.config.errors import ContextLengthError, RequestError
from penstock.config.options import SchedulerOptions
from penstock.core.counters import Counters
from penstock.core.kv.cache import KVCache
from penstock.core.kv.cache_spec import CacheGroup
from penstock.core.kv.checkpoints import Checkpoints
from penstock.core.kv.node import Match
from penstock.core.plan_builder import Draft, Sent
from penstock.core.policies import Admission, Gate, MemoryGate, Policy, default_gates, policy_named
from penstock.core.protocol import NewSequence, ScheduledTokens, SlotResult, StepPlan, StepResult, last_sample
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.core.request_queues import RequestQueues
from penstock.core.sequence import Sequence, SequenceState, namespace_of


class Scheduler:
    """Decides what every step computes. Not thread-safe; `plan` and `commit` alternate, `depth` plans ahead at most."""

    def __init__(
        self,
        options: SchedulerOptions,
        groups: abc.Sequence[CacheGroup],
        *,
        policy: Policy | None = None,
        gates: abc.Sequence[Gate] | None = None,
    ) -> None:
        self.options = options
        states = Checkpoints(options.max_num_seqs, options.checkpoints) if options.recurrent else None
        self.cache = KVCache(groups, options.num_blocks, options.block_size, states)
        self.counters = Counters()
        self._chunk = min(options.max_num_batched_tokens, options.max_chunk_tokens or options.max_num_batched_tokens)
        self._policy = policy or policy_named(options.policy)
        self._gates = tuple(default_gates() if gates is None else gates)
        self._roster = RequestQueues(options.max_num_seqs, self._policy)
        self._requests: dict[str, list[Sequence]] = {}
        self._outstanding: OrderedDict[int, list[Sent]] = OrderedDict()
        self._outputs: list[EngineOutput] = []
        self._next_step = 0
        self._arrivals = 0
        self._blocked: tuple[Sequence, int] | None = None

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Sequence]:
        """Sequences in the batch, in policy order."""
        return self._roster.running

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences in the queue, in policy order."""
        return self._roster.waiting

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._outputs or self._outstanding)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def outstanding(self) -> int:
        return len(self._outstanding)

    def add(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
            RequestError: its id is taken, its prompt is empty, or it can never fit into the context or the KV cache.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; ids of live requests must differ.")
        self._check_fits(request)
        options = self.options
        namespace = namespace_of(request, caching=options.enable_prefix_caching, shared=options.share_prefix_cache)
        now, unscored = monotonic(), request.sampling.first_scored(0)
        sequences = [
            Sequence(request, index, self._arrivals, namespace, list(request.prompt_ids), arrived=now, scored=unscored)
            for index in range(request.sampling.n)
        ]
        self._arrivals += 1
        self._requests[request.request_id] = sequences
        for sequence in sequences:
            self._roster.enqueue(sequence)

    def _check_fits(self, request: EngineRequest) -> None:
        prompt, most = len(request.prompt_ids), request.sampling.max_tokens
        if not prompt:
            raise RequestError("the prompt is empty; it needs at least one token.", param="prompt")
        if most is None:
            raise RequestError("max_tokens is not resolved; the frontend sets it.", param="max_tokens")
        if prompt + (most if request.pooling is None else 0) > self.options.max_model_len:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and {most} more are asked for: {prompt + most} in all, but the "
                f"context holds {self.options.max_model_len}. Shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )
        if not self.cache.can_hold(prompt + most - 1, self._chunk):
            raise RequestError(
                f"the prompt has {prompt} tokens and {most} more are asked for, but the KV cache holds "
                f"{self.cache.capacity} tokens in all. Lower max_tokens, or start with a larger --kv-cache-memory.",
                param="max_tokens",
                code="kv_cache_too_small",
            )

    def cancel(self, request_id: str) -> None:
        """Ends all sequences of a request now; unknown ids are ignored."""
        for sequence in list(self._requests.get(request_id, ())):
            if sequence.state is not SequenceState.FINISHED:
                self._finish(sequence, FinishReason.CANCELLED)

    def preempt(self, request_id: str) -> int:
        """Sends a request's running sequences back to the queue, as if memory had run out; returns how many ran."""
        running = [b for b in self._requests.get(request_id, ()) if b.state is SequenceState.RUNNING]
        for sequence in running:
            self._send_back(sequence)
        return len(running)

    def take_outputs(self) -> list[EngineOutput]:
        """Everything that became known since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed before an outstanding step commits (or at all)."""
        draft = Draft(self._next_step, self.options.max_num_batched_tokens)
        remaining = [(sequence, sequence.remaining) for sequence in self.running]
        if 4 * sum(sequence.request.constrained for sequence, length in remaining if not length) > len(remaining):
            return None  # a step without so many would gain less than waiting for their tokens
        decoding = [pair for pair in remaining if pair[1] == 1]  # which are never starved by prompts
        for sequence, length in (*decoding, *(pair for pair in remaining if pair[1] > 1)):
            self._continue(sequence, length, draft)
        if not draft.preempted:
            self._admit(draft)
        if not draft.spans:
            return None
        return self._seal(draft)

    def _continue(self, sequence: Sequence, length: int, draft: Draft) -> None:
        """Gives a running sequence up to so many tokens, preempting later ones if blocks run out."""
        length = min(length, draft.budget, self._chunk)
        if (
            sequence.state is not SequenceState.RUNNING
            or (length := self.cache.cut(sequence, sequence.computed, length)) <= 0
        ):
            return
        target = sequence.computed + length
        while (added := self.cache.extend(sequence, target)) is None:
            if draft.preempted and self.cache.will_fit(sequence, target):
                return  # what the victims held is free once the step in flight has committed
            if later := self._roster.later(sequence):
                self._preempt(self._policy.victim(later, self.cache), draft)
            elif self.running[0] is sequence and not self._outstanding:
                self._preempt(sequence, draft)  # it holds duplicates of cached blocks; it starts again on those
                return
            else:
                return
        self._span(sequence, length, added, draft)

    def _span(self, sequence: Sequence, length: int, added: tuple[tuple[int, ...], ...], draft: Draft) -> None:
        start, end = sequence.computed, sequence.computed + length
        tokens = tuple(sequence.tokens[start:end])
        if len(tokens) < length:
            tokens += (last_sample(sequence.row),)
        draft.spans[sequence] = ScheduledTokens(
            row=sequence.row,
            start=start,
            tokens=tokens,
            prompt_tokens=max(0, min(end, sequence.num_prompt) - start),
            draft_tokens=0,
            sample=end == sequence.known,
            new_blocks=added,
        )
        sequence.computed = end
        draft.budget -= length

    def _admit(self, draft: Draft) -> None:
        """Admits waiting sequences in order as long as rows, tokens and gates allow."""
        if not self.waiting or not self._roster.free_rows or draft.budget <= 0:
            return
        reserved = [0] * len(self.cache.pools)
        for sequence in self.running:
            self._reserve(sequence, reserved)
        index = 0
        while index < len(self.waiting) and self._roster.free_rows and draft.budget > 0:
            sequence = self.waiting[index]
            if self.options.whole_prompts and sequence.known > draft.budget:
                break
            if sequence.last_step > self.cache.committed_step or self._still_waits(sequence):
                index += 1
                continue
            if self._blocked == (sequence, self.cache.releases) and self.running:
                break  # it lacks memory and nothing was released since: no need to match it again
            match = self.cache.match(sequence, sequence.reusable)
            gate = self._held_by(sequence, match, reserved)
            if gate is not None:
                self.counters.held_back[gate.name] += 1
                sequence.awaits = (match.owner, match.pending) if match.pending > match.tokens else None
                if not gate.passable:
                    if isinstance(gate, MemoryGate):
                        self._blocked = (sequence, self.cache.releases)
                    break
                index += 1
                continue
            if not self._start(sequence, match, draft):
                break
            self._reserve(sequence, reserved)
            self.waiting.pop(index)

    def _reserve(self, sequence: Sequence, reserved: list[int]) -> None:
        """Adds what a running sequence will still need, one block of growth included."""
        for g, blocks in enumerate(self.cache.growth(sequence, self._chunk)):
            reserved[g] += blocks + 1

    def _held_by(self, sequence: Sequence, match: Match, reserved: abc.Sequence[int]) -> Gate | None:
        admission = Admission(
            sequence=sequence,
            match=match,
            reserved=reserved,
            idle_engine=not self.running and not self.cache.coming(),
            free_rows=len(self._roster.free_rows),
            chunk=self._chunk,
            cache=self.cache,
        )
        return next((gate for gate in self._gates if gate.holds(admission)), None)

    def _still_waits(self, sequence: Sequence) -> bool:
        """Whether the prefix the sequence waits for is still being computed (saves matching again in every step)."""
        if sequence.awaits is None:
            return False
        owner, until = sequence.awaits
        if owner.state is SequenceState.RUNNING and owner.committed < until:
            return True
        sequence.awaits = None
        return False

    def _start(self, sequence: Sequence, match: Match, draft: Draft) -> bool:
        """Admission as a transaction: pin the match, take a row and blocks, or undo everything."""
        added = self._take_blocks(sequence, match, draft)
        if added is None and match.tail is not None:  # the block to copy from is pinned too: do without it
            match = match.without_tail()
            added = self._take_blocks(sequence, match, draft)
        if added is None:
            return False
        self._roster.seat(sequence)
        self.cache.copy_match(sequence, match, draft.step)
        self.cache.announce(sequence)
        self._count_admission(sequence, match)
        self._span(sequence, self._first_length(sequence, match, draft), added, draft)
        return True

    def _first_length(self, sequence: Sequence, match: Match, draft: Draft) -> int:
        return self.cache.cut(sequence, match.tokens, min(sequence.known - match.tokens, draft.budget, self._chunk))

    def _take_blocks(self, sequence: Sequence, match: Match, draft: Draft) -> tuple[tuple[int, ...], ...] | None:
        """Pins the match and takes blocks for the first tokens after it; holds nothing if they cannot be had."""
        self.cache.attach(sequence, match)
        added = self.cache.extend(sequence, match.tokens + self._first_length(sequence, match, draft))
        if added is None:
            self.cache.release(sequence, keep=False)
        return added

    def _count_admission(self, sequence: Sequence, match: Match) -> None:
        if sequence.cached_tokens is not None:
            return  # resumed
        sequence.cached_tokens = match.tokens
        sequence.queue_seconds = monotonic() - sequence.arrived
        self.counters.cached_tokens += match.tokens
        self.counters.prompt_tokens += sequence.num_prompt
        if sequence.index == 0:
            for node in (*match.nodes, *((match.tail,) if match.tail else ())):
                node.uses += 1
            self.counters.prefix_queries += sequence.num_prompt - 1
            self.counters.prefix_hits += match.tokens
            if match.reason:
                self.counters.miss_reasons[match.reason] += 1

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        """Sends a running sequence back to the queue; what it computed stays in the tree as long as memory allows."""
        span = draft.spans.pop(sequence, None)
        if span is not None:
            draft.budget += len(span.tokens)
        draft.preempted = True
        self._send_back(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self._leave_batch(sequence, keep=True)
        self._roster.enqueue(sequence)

    def _leave_batch(self, sequence: Sequence, *, keep: bool) -> None:
        self.cache.release(sequence, keep=keep)
        self._roster.unseat(sequence, self.cache.committed_step)

    def _seal(self, draft: Draft) -> StepPlan:
        """Turns the draft into a plan and marks it outstanding."""
        new_rows: list[NewSequence] = []
        spans: list[ScheduledTokens] = []
        sent: list[Sent] = []
        for sequence, span in draft.spans.items():
            if not sequence.introduced:
                sequence.introduced = True
                new_rows.append(self._new_row(sequence, span))
                span = replace(span, new_blocks=())  # the row is introduced with its whole tables
            spans.append(span)
            sequence.last_step = draft.step
            sequence.in_flight += span.sample
            sent.append(Sent(sequence, span.row, span.start, span.start + len(span.tokens), span.sample))
        self._outstanding[draft.step] = sent
        self._next_step += 1
        ops, self.cache.ops = tuple(self.cache.ops), []
        return StepPlan(draft.step, self._roster.take_released(), tuple(new_rows), ops, spans=tuple(spans))

    def _new_row(self, sequence: Sequence, span: ScheduledTokens) -> NewSequence:
        hold, request = sequence.hold, sequence.request
        assert hold is not None
        return NewSequence(
            row=span.row,
            request_id=request.request_id,
            sequence=sequence.index,
            prompt_ids=request.prompt_ids,
            generated_ids=tuple(sequence.tokens[sequence.num_prompt :]),
            computed=span.start,
            blocks=tuple(map(tuple, hold.tables)),
            sampling=request.sampling,
            stop_ids=request.stop_ids,
            seed=request.seed,
            adapter=request.adapter,
            pooling=request.pooling,
        )

    # -- committing ---------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, forced: Mapping[int, tuple[int, ...]] = MappingProxyType({})) -> None:
        """Takes the answer to the oldest outstanding plan.

        Args:
            result: the answer.
            forced: by row, tokens that must follow the sampled one (a grammar allows no other). They become known
                tokens, are computed together in the next step, and bring no log-probabilities.

        Raises:
            ValueError: the result is of another step, or a row with forced tokens has a later step in flight, which was
                planned without them.
        """
        step, sent = self._outstanding.popitem(last=False)
        if step != result.step:
            raise ValueError(f"the result of step {result.step} came while step {step} was due")
        self._step_over(step)
        rows = {row.row: row for row in result.rows}
        for entry in sent:
            sequence = entry.sequence
            if sequence.state is SequenceState.FINISHED:
                continue
            sequence.in_flight -= entry.sample
            row = rows.get(entry.row) or SlotResult(entry.row)
            if entry.sample and not (row.tokens or row.again) and row.error is None and row.pooled is None:
                row = SlotResult(entry.row, error="the runner returned no token for this request.")
            if sequence.hold is not None and row.error is None:
                self.cache.commit(sequence, entry.end)
            if row.prompt_logprobs:
                first = sequence.request.sampling.first_scored(entry.start)
                fresh = row.prompt_logprobs[max(0, sequence.scored - first) :]
                sequence.scored += len(fresh)
                row = replace(row, prompt_logprobs=fresh)
            self._accept(sequence, row, forced.get(entry.row, ()))
            if row.again and sequence.state is SequenceState.RUNNING:
                self._send_back(sequence)

    def fail_outstanding(self, error: str) -> None:
        """Ends every sequence that has a step in flight with an error: what those steps did is unknown."""
        self.cache.forget_states()
        while self._outstanding:
            step, sent = self._outstanding.popitem(last=False)
            self._step_over(step)
            for entry in sent:
                if entry.sequence.state is not SequenceState.FINISHED:
                    self._finish(entry.sequence, FinishReason.ERROR, error=error)

    def _step_over(self, step: int) -> None:
        self.cache.step_committed(step)
        self._roster.step_over(step)

    def _accept(self, sequence: Sequence, row: SlotResult, forced: tuple[int, ...]) -> None:
        """Appends sampled and forced tokens and ends the sequence where they say so."""
        if row.error is not None:
            self._finish(sequence, FinishReason.ERROR, error=row.error)
            return
        reason = None if row.pooled is None else FinishReason.STOP
        count = 0
        if forced and sequence.in_flight:
            raise ValueError(f"row {row.row} has forced tokens and a step in flight; plan it without lookahead")
        row = replace(row, tokens=row.tokens + forced) if forced else row
        for token in row.tokens:
            sequence.tokens.append(token)
            count += 1
            if token in sequence.request.stop_ids:
                reason = FinishReason.STOP
            elif len(sequence.tokens) >= sequence.longest:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        self.counters.generated_tokens += count
        if reason is not None:
            self._finish(sequence, reason, row=row, count=count)
        elif count or row.prompt_logprobs:
            self._emit(sequence, row, count, None)

    def _emit(
        self,
        sequence: Sequence,
        row: SlotResult | None,
        count: int,
        reason: FinishReason | None,
        error: str | None = None,
    ) -> None:
        self._outputs.append(
            EngineOutput(
                request_id=sequence.request.request_id,
                sequence=sequence.index,
                tokens=row.tokens[:count] if row else (),
                logprobs=row.logprobs[:count] if row else (),
                prompt_logprobs=row.prompt_logprobs if row else (),
                finish_reason=reason,
                error=error,
                cached_tokens=None if sequence.reported else sequence.cached_tokens,
                queue_seconds=None if sequence.reported else sequence.queue_seconds,
                preemptions=sequence.preemptions,
                pooled=row.pooled if row else None,
            )
        )
        sequence.reported = sequence.cached_tokens is not None

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        row: SlotResult | None = None,
        count: int = 0,
        error: str | None = None,
    ) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._leave_batch(sequence, keep=reason is not FinishReason.ERROR)
        else:
            self._roster.dequeue(sequence)
        self._roster.finish(sequence)
        sequence.awaits = None
        self._emit(sequence, row, count, reason, error)
        request_id = sequence.request.request_id
        if all(other.state is SequenceState.FINISHED for other in self._requests[request_id]):
            del self._requests[request_id]
            if not self.options.enable_prefix_caching:
                self.cache.tree.drop_space(sequence.namespace.space)
            if reason is FinishReason.CANCELLED:
                self.counters.cancelled += 1
            elif reason is FinishReason.ERROR:
                self.counters.failed += 1
            else:
                self.counters.finished += 1

    def check_integrity(self) -> None:
        """Raises AssertionError if any count, queue or row disagrees with another. For tests and idle moments."""
        live = [b for sequences in self._requests.values() for b in sequences if b.state is not SequenceState.FINISHED]
        assert sorted(map(id, live)) == sorted(map(id, self.running + self.waiting)), "a sequence is lost or doubled"
        self._roster.check_integrity()
        for sequence in self.running:
            assert sequence.committed <= sequence.computed <= sequence.known
            assert 0 <= sequence.in_flight <= len(self._outstanding)
        self.cache.check_integrity(live)
