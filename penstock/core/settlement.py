"""What a step gave: tokens, cache entries, scores, drafts for the next step, finished transfers, or an end."""

from __future__ import annotations

from penstock.core.kv.cache import KVCache
from penstock.core.ledger import Ledger
from penstock.core.plan_builder import InFlight
from penstock.core.protocol import Proposal, SlotResult, StepResult, chain_length
from penstock.core.request import FinishReason
from penstock.core.sequence import Sequence, SequenceState


class Settlement:
    """Takes results for the sequences they belong to."""

    def __init__(self, cache: KVCache, ledger: Ledger) -> None:
        self._cache = cache
        self._ledger = ledger

    def settle(self, entry: InFlight, result: SlotResult, forced: tuple[int, ...]) -> None:
        """Takes what a step gave a sequence: tokens, entries, scores, or its end."""
        sequence = entry.sequence
        sequence.in_flight -= entry.sample
        if forced and sequence.in_flight:
            raise ValueError(f"slot {entry.slot} has forced tokens and a step in flight; plan it without lookahead")
        if result.error is not None or entry.drafts or not result.tokens:
            error = _fault(entry, result)
            if error is not None:
                if sequence.allocation is not None and sequence.allocation.cross is not None:
                    self._cache.cross.forget(sequence.allocation.cross)  # it may be what could not be encoded
                self._ledger.finish(sequence, FinishReason.ERROR, error=error)
                return
        accepted = max(0, len(result.tokens) - 1) if entry.drafts else 0
        if result.prompt_logprobs:
            result = self._unscored(sequence, entry, result)
        if forced:
            result = result._replace(tokens=result.tokens + forced)
        count, reason = self._ledger.accept(sequence, result.tokens)
        if result.sampler_state or result.back is not None:
            sequence.sampler_state = result.sampler_state
        if result.pooled is not None:
            reason = FinishReason.STOP
        if sequence.allocation is not None:
            committed = self._verified(sequence, entry, accepted) if entry.drafts else entry.end
            self._cache.commit(sequence, committed)
        if reason is not None:
            self._ledger.finish(sequence, reason, result, count)
        elif count or result.prompt_logprobs:
            self._ledger.tell(sequence, result, count)
        if result.again and sequence.state is SequenceState.RUNNING:
            self._ledger.send_back(sequence)

    def _verified(self, sequence: Sequence, entry: InFlight, accepted: int) -> int:
        """Takes back what was computed for refused drafts; how many tokens have entries that count."""
        committed = min(entry.end + accepted, len(sequence.tokens))
        counters = self._ledger.counters
        counters.drafts += 1
        counters.drafted_tokens += len(entry.drafts)
        counters.accepted_tokens += accepted
        sequence.drafted += len(entry.drafts)
        sequence.accepted += accepted
        sequence.rewind(committed)
        assert sequence.allocation is not None
        self._cache.ops += self._cache.states.settle(sequence.allocation, entry.slot, committed - entry.end)
        return committed

    def _unscored(self, sequence: Sequence, entry: InFlight, result: SlotResult) -> SlotResult:
        """The result without the prompt's log-probabilities that were told before a preemption."""
        first = sequence.request.sampling.first_scored(entry.start)
        fresh = result.prompt_logprobs[max(0, sequence.scored - first) :]
        sequence.scored += len(fresh)
        return result._replace(prompt_logprobs=fresh)

    def take_proposals(self, proposals: tuple[Proposal, ...], in_flight: list[InFlight]) -> None:
        """Keeps drafts for the next step of those that were in this one, as far as they form a chain."""
        slots = {entry.slot: entry.sequence for entry in in_flight}
        for proposal in proposals:
            sequence = slots.get(proposal.slot)
            if sequence is None or sequence.slot != proposal.slot or not sequence.request.speculate:
                continue
            if sequence.computed == sequence.known - 1:  # else it was forced to go on in another way
                sequence.drafts = proposal.tokens[: chain_length(len(proposal.tokens), proposal.parents)]

    def finish_transfers(self, result: StepResult) -> None:
        """Takes what came from a lower tier, or went there."""
        failed = set(result.failed_transfers)
        for transfer in result.finished_transfers:
            sequence = self._cache.transfers.finish(transfer, failed=transfer in failed)
            if sequence is not None:  # it was to go on from what could not be loaded
                self._ledger.load_failed(sequence)


def _fault(entry: InFlight, result: SlotResult) -> str | None:
    """Why a result cannot be taken, if so."""
    if result.error is not None:
        return result.error
    chosen = result.tokens or result.again or result.back is not None
    if entry.sample and not chosen and result.pooled is None:
        return "the runner returned no token for this request."
    if entry.drafts and result.tokens[:-1] != entry.drafts[: max(0, len(result.tokens) - 1)]:
        return "the runner accepted other drafts than it was given."
    return None
