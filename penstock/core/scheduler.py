"""The scheduler: one rule, no phases. A step gives every branch tokens until computed meets known.

Iteration-level scheduling: Yu et al., Orca (OSDI 2022). Paged blocks: Kwon et al., 2309.06180. Prompts in chunks beside
decoding rows: Agrawal et al., Sarathi-Serve, 2403.02310. Integers only; the runner does the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic
from types import MappingProxyType

from penstock.config.errors import ContextLengthError, RequestError
from penstock.config.options import SchedulerOptions
from penstock.core.branch import Branch, BranchState, namespace_of
from penstock.core.cache_spec import CacheGroup
from penstock.core.checkpoints import Checkpoints
from penstock.core.counters import Counters
from penstock.core.draft import Draft, Sent
from penstock.core.kv_cache import KVCache
from penstock.core.policies import Admission, Gate, MemoryGate, Policy, default_gates, policy_named
from penstock.core.prefix import Match
from penstock.core.protocol import NewRow, RowResult, RowSpan, StepPlan, StepResult, last_sample
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.core.roster import Roster


class Scheduler:
    """Decides what every step computes. Not thread-safe; `plan` and `commit` alternate, `depth` plans ahead at most."""

    def __init__(
        self,
        options: SchedulerOptions,
        groups: Sequence[CacheGroup],
        *,
        policy: Policy | None = None,
        gates: Sequence[Gate] | None = None,
    ) -> None:
        self.options = options
        states = Checkpoints(options.max_num_seqs, options.checkpoints) if options.recurrent else None
        self.cache = KVCache(groups, options.num_blocks, options.block_size, states)
        self.counters = Counters()
        self._chunk = min(options.max_num_batched_tokens, options.max_chunk_tokens or options.max_num_batched_tokens)
        self._policy = policy or policy_named(options.policy)
        self._gates = tuple(default_gates() if gates is None else gates)
        self._roster = Roster(options.max_num_seqs, self._policy)
        self._requests: dict[str, list[Branch]] = {}
        self._outstanding: OrderedDict[int, list[Sent]] = OrderedDict()
        self._outputs: list[EngineOutput] = []
        self._next_step = 0
        self._arrivals = 0
        self._blocked: tuple[Branch, int] | None = None

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Branch]:
        """Branches in the batch, in policy order."""
        return self._roster.running

    @property
    def waiting(self) -> list[Branch]:
        """Branches in the queue, in policy order."""
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
        branches = [
            Branch(request, index, self._arrivals, namespace, list(request.prompt_ids), arrived=now, scored=unscored)
            for index in range(request.sampling.n)
        ]
        self._arrivals += 1
        self._requests[request.request_id] = branches
        for branch in branches:
            self._roster.enqueue(branch)

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
        """Ends all branches of a request now; unknown ids are ignored."""
        for branch in list(self._requests.get(request_id, ())):
            if branch.state is not BranchState.FINISHED:
                self._finish(branch, FinishReason.CANCELLED)

    def preempt(self, request_id: str) -> int:
        """Sends a request's running branches back to the queue, as if memory had run out; returns how many ran."""
        running = [b for b in self._requests.get(request_id, ()) if b.state is BranchState.RUNNING]
        for branch in running:
            self._send_back(branch)
        return len(running)

    def take_outputs(self) -> list[EngineOutput]:
        """Everything that became known since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed before an outstanding step commits (or at all)."""
        draft = Draft(self._next_step, self.options.max_num_batched_tokens)
        remaining = [(branch, branch.remaining) for branch in self.running]
        if 4 * sum(branch.request.constrained for branch, length in remaining if not length) > len(remaining):
            return None  # a step without so many would gain less than waiting for their tokens
        decoding = [pair for pair in remaining if pair[1] == 1]  # which are never starved by prompts
        for branch, length in (*decoding, *(pair for pair in remaining if pair[1] > 1)):
            self._continue(branch, length, draft)
        if not draft.preempted:
            self._admit(draft)
        if not draft.spans:
            return None
        return self._seal(draft)

    def _continue(self, branch: Branch, length: int, draft: Draft) -> None:
        """Gives a running branch up to so many tokens, preempting later ones if blocks run out."""
        length = min(length, draft.budget, self._chunk)
        if branch.state is not BranchState.RUNNING or (length := self.cache.cut(branch, branch.computed, length)) <= 0:
            return
        target = branch.computed + length
        while (added := self.cache.extend(branch, target)) is None:
            if draft.preempted and self.cache.will_fit(branch, target):
                return  # what the victims held is free once the step in flight has committed
            if later := self._roster.later(branch):
                self._preempt(self._policy.victim(later, self.cache), draft)
            elif self.running[0] is branch and not self._outstanding:
                self._preempt(branch, draft)  # it holds duplicates of cached blocks; it starts again on those
                return
            else:
                return
        self._span(branch, length, added, draft)

    def _span(self, branch: Branch, length: int, added: tuple[tuple[int, ...], ...], draft: Draft) -> None:
        start, end = branch.computed, branch.computed + length
        tokens = tuple(branch.tokens[start:end])
        if len(tokens) < length:
            tokens += (last_sample(branch.row),)
        draft.spans[branch] = RowSpan(
            row=branch.row,
            start=start,
            tokens=tokens,
            prompt_tokens=max(0, min(end, branch.num_prompt) - start),
            draft_tokens=0,
            sample=end == branch.known,
            new_blocks=added,
        )
        branch.computed = end
        draft.budget -= length

    def _admit(self, draft: Draft) -> None:
        """Admits waiting branches in order as long as rows, tokens and gates allow."""
        if not self.waiting or not self._roster.free_rows or draft.budget <= 0:
            return
        reserved = [0] * len(self.cache.pools)
        for branch in self.running:
            self._reserve(branch, reserved)
        index = 0
        while index < len(self.waiting) and self._roster.free_rows and draft.budget > 0:
            branch = self.waiting[index]
            if self.options.whole_prompts and branch.known > draft.budget:
                break
            if branch.last_step > self.cache.committed_step or self._still_waits(branch):
                index += 1
                continue
            if self._blocked == (branch, self.cache.releases) and self.running:
                break  # it lacks memory and nothing was released since: no need to match it again
            match = self.cache.match(branch, branch.reusable)
            gate = self._held_by(branch, match, reserved)
            if gate is not None:
                self.counters.held_back[gate.name] += 1
                branch.awaits = (match.owner, match.pending) if match.pending > match.tokens else None
                if not gate.passable:
                    if isinstance(gate, MemoryGate):
                        self._blocked = (branch, self.cache.releases)
                    break
                index += 1
                continue
            if not self._start(branch, match, draft):
                break
            self._reserve(branch, reserved)
            self.waiting.pop(index)

    def _reserve(self, branch: Branch, reserved: list[int]) -> None:
        """Adds what a running branch will still need, one block of growth included."""
        for g, blocks in enumerate(self.cache.growth(branch, self._chunk)):
            reserved[g] += blocks + 1

    def _held_by(self, branch: Branch, match: Match, reserved: Sequence[int]) -> Gate | None:
        admission = Admission(
            branch=branch,
            match=match,
            reserved=reserved,
            idle_engine=not self.running and not self.cache.coming(),
            free_rows=len(self._roster.free_rows),
            chunk=self._chunk,
            cache=self.cache,
        )
        return next((gate for gate in self._gates if gate.holds(admission)), None)

    def _still_waits(self, branch: Branch) -> bool:
        """Whether the prefix the branch waits for is still being computed (saves matching again in every step)."""
        if branch.awaits is None:
            return False
        owner, until = branch.awaits
        if owner.state is BranchState.RUNNING and owner.committed < until:
            return True
        branch.awaits = None
        return False

    def _start(self, branch: Branch, match: Match, draft: Draft) -> bool:
        """Admission as a transaction: pin the match, take a row and blocks, or undo everything."""
        added = self._take_blocks(branch, match, draft)
        if added is None and match.tail is not None:  # the block to copy from is pinned too: do without it
            match = match.without_tail()
            added = self._take_blocks(branch, match, draft)
        if added is None:
            return False
        self._roster.seat(branch)
        self.cache.copy_match(branch, match, draft.step)
        self.cache.announce(branch)
        self._count_admission(branch, match)
        self._span(branch, self._first_length(branch, match, draft), added, draft)
        return True

    def _first_length(self, branch: Branch, match: Match, draft: Draft) -> int:
        return self.cache.cut(branch, match.tokens, min(branch.known - match.tokens, draft.budget, self._chunk))

    def _take_blocks(self, branch: Branch, match: Match, draft: Draft) -> tuple[tuple[int, ...], ...] | None:
        """Pins the match and takes blocks for the first tokens after it; holds nothing if they cannot be had."""
        self.cache.attach(branch, match)
        added = self.cache.extend(branch, match.tokens + self._first_length(branch, match, draft))
        if added is None:
            self.cache.release(branch, keep=False)
        return added

    def _count_admission(self, branch: Branch, match: Match) -> None:
        if branch.cached_tokens is not None:
            return  # resumed
        branch.cached_tokens = match.tokens
        branch.queue_seconds = monotonic() - branch.arrived
        self.counters.cached_tokens += match.tokens
        self.counters.prompt_tokens += branch.num_prompt
        if branch.index == 0:
            for node in (*match.nodes, *((match.tail,) if match.tail else ())):
                node.uses += 1
            self.counters.prefix_queries += branch.num_prompt - 1
            self.counters.prefix_hits += match.tokens
            if match.reason:
                self.counters.miss_reasons[match.reason] += 1

    def _preempt(self, branch: Branch, draft: Draft) -> None:
        """Sends a running branch back to the queue; what it computed stays in the tree as long as memory allows."""
        span = draft.spans.pop(branch, None)
        if span is not None:
            draft.budget += len(span.tokens)
        draft.preempted = True
        self._send_back(branch)

    def _send_back(self, branch: Branch) -> None:
        branch.preemptions += 1
        self.counters.preemptions += 1
        self._leave_batch(branch, keep=True)
        self._roster.enqueue(branch)

    def _leave_batch(self, branch: Branch, *, keep: bool) -> None:
        self.cache.release(branch, keep=keep)
        self._roster.unseat(branch, self.cache.committed_step)

    def _seal(self, draft: Draft) -> StepPlan:
        """Turns the draft into a plan and marks it outstanding."""
        new_rows: list[NewRow] = []
        spans: list[RowSpan] = []
        sent: list[Sent] = []
        for branch, span in draft.spans.items():
            if not branch.introduced:
                branch.introduced = True
                new_rows.append(self._new_row(branch, span))
                span = replace(span, new_blocks=())  # the row is introduced with its whole tables
            spans.append(span)
            branch.last_step = draft.step
            branch.in_flight += span.sample
            sent.append(Sent(branch, span.row, span.start, span.start + len(span.tokens), span.sample))
        self._outstanding[draft.step] = sent
        self._next_step += 1
        ops, self.cache.ops = tuple(self.cache.ops), []
        return StepPlan(draft.step, self._roster.take_released(), tuple(new_rows), ops, spans=tuple(spans))

    def _new_row(self, branch: Branch, span: RowSpan) -> NewRow:
        hold, request = branch.hold, branch.request
        assert hold is not None
        return NewRow(
            row=span.row,
            request_id=request.request_id,
            branch=branch.index,
            prompt_ids=request.prompt_ids,
            generated_ids=tuple(branch.tokens[branch.num_prompt :]),
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
            branch = entry.branch
            if branch.state is BranchState.FINISHED:
                continue
            branch.in_flight -= entry.sample
            row = rows.get(entry.row) or RowResult(entry.row)
            if entry.sample and not (row.tokens or row.again) and row.error is None and row.pooled is None:
                row = RowResult(entry.row, error="the runner returned no token for this request.")
            if branch.hold is not None and row.error is None:
                self.cache.commit(branch, entry.end)
            if row.prompt_logprobs:
                first = branch.request.sampling.first_scored(entry.start)
                fresh = row.prompt_logprobs[max(0, branch.scored - first) :]
                branch.scored += len(fresh)
                row = replace(row, prompt_logprobs=fresh)
            self._accept(branch, row, forced.get(entry.row, ()))
            if row.again and branch.state is BranchState.RUNNING:
                self._send_back(branch)

    def fail_outstanding(self, error: str) -> None:
        """Ends every branch that has a step in flight with an error: what those steps did is unknown."""
        self.cache.forget_states()
        while self._outstanding:
            step, sent = self._outstanding.popitem(last=False)
            self._step_over(step)
            for entry in sent:
                if entry.branch.state is not BranchState.FINISHED:
                    self._finish(entry.branch, FinishReason.ERROR, error=error)

    def _step_over(self, step: int) -> None:
        self.cache.step_committed(step)
        self._roster.step_over(step)

    def _accept(self, branch: Branch, row: RowResult, forced: tuple[int, ...]) -> None:
        """Appends sampled and forced tokens and ends the branch where they say so."""
        if row.error is not None:
            self._finish(branch, FinishReason.ERROR, error=row.error)
            return
        reason = None if row.pooled is None else FinishReason.STOP
        count = 0
        if forced and branch.in_flight:
            raise ValueError(f"row {row.row} has forced tokens and a step in flight; plan it without lookahead")
        row = replace(row, tokens=row.tokens + forced) if forced else row
        for token in row.tokens:
            branch.tokens.append(token)
            count += 1
            if token in branch.request.stop_ids:
                reason = FinishReason.STOP
            elif len(branch.tokens) >= branch.longest:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        self.counters.generated_tokens += count
        if reason is not None:
            self._finish(branch, reason, row=row, count=count)
        elif count or row.prompt_logprobs:
            self._emit(branch, row, count, None)

    def _emit(
        self, branch: Branch, row: RowResult | None, count: int, reason: FinishReason | None, error: str | None = None
    ) -> None:
        self._outputs.append(
            EngineOutput(
                request_id=branch.request.request_id,
                branch=branch.index,
                tokens=row.tokens[:count] if row else (),
                logprobs=row.logprobs[:count] if row else (),
                prompt_logprobs=row.prompt_logprobs if row else (),
                finish_reason=reason,
                error=error,
                cached_tokens=None if branch.reported else branch.cached_tokens,
                queue_seconds=None if branch.reported else branch.queue_seconds,
                preemptions=branch.preemptions,
                pooled=row.pooled if row else None,
            )
        )
        branch.reported = branch.cached_tokens is not None

    def _finish(
        self,
        branch: Branch,
        reason: FinishReason,
        *,
        row: RowResult | None = None,
        count: int = 0,
        error: str | None = None,
    ) -> None:
        if branch.state is BranchState.RUNNING:
            self._leave_batch(branch, keep=reason is not FinishReason.ERROR)
        else:
            self._roster.dequeue(branch)
        self._roster.finish(branch)
        branch.awaits = None
        self._emit(branch, row, count, reason, error)
        request_id = branch.request.request_id
        if all(other.state is BranchState.FINISHED for other in self._requests[request_id]):
            del self._requests[request_id]
            if not self.options.enable_prefix_caching:
                self.cache.tree.drop_space(branch.namespace.space)
            if reason is FinishReason.CANCELLED:
                self.counters.cancelled += 1
            elif reason is FinishReason.ERROR:
                self.counters.failed += 1
            else:
                self.counters.finished += 1

    def check_integrity(self) -> None:
        """Raises AssertionError if any count, queue or row disagrees with another. For tests and idle moments."""
        live = [b for branches in self._requests.values() for b in branches if b.state is not BranchState.FINISHED]
        assert sorted(map(id, live)) == sorted(map(id, self.running + self.waiting)), "a branch is lost or doubled"
        self._roster.check_integrity()
        for branch in self.running:
            assert branch.committed <= branch.computed <= branch.known
            assert 0 <= branch.in_flight <= len(self._outstanding)
        self.cache.check_integrity(live)
