"""Who has asked for what: live requests, what became known of them, how they end, and all that is counted."""

from __future__ import annotations

from penstock.config.engine_stats import EngineStats
from penstock.core.counters import Counters
from penstock.core.guidance import followers_of
from penstock.core.kv.cache import KVCache
from penstock.core.protocol import SlotResult
from penstock.core.request import EngineOutput, FinishReason
from penstock.core.request_queues import RequestQueues
from penstock.core.sequence import Sequence, SequenceState

FAILED_LOADS = ("load_failed", "load_late")  # why a prompt was not found that lay below
NOTHING = SlotResult(-1)  # of a sequence that ends without a step


class Ledger:
    """Requests and their sequences, from when they are queued until they end."""

    def __init__(self, queues: RequestQueues, cache: KVCache, *, caching: bool) -> None:
        """Without `caching` what a request computed is forgotten with it."""
        self.counters = Counters()
        self._queues = queues
        self._cache = cache
        self._caching = caching
        self._requests: dict[str, list[Sequence]] = {}
        self._outputs: list[EngineOutput] = []

    @property
    def is_empty(self) -> bool:
        """Whether no request lives and everything was told."""
        return not (self._requests or self._outputs)

    @property
    def is_told(self) -> bool:
        """Whether everything that became known was told."""
        return not self._outputs

    def open(self, request_id: str, sequences: list[Sequence]) -> None:
        """Takes a request."""
        self._requests[request_id] = sequences + followers_of(sequences)
        for sequence in sequences:
            self._queues.enqueue(sequence)
            if sequence.partner is not None:
                self._queues.enqueue(sequence.partner)

    def join(self, sequence: Sequence) -> None:
        """Takes one more sequence of a live request."""
        self._requests[sequence.request.request_id].append(sequence)
        self._queues.enqueue(sequence)

    def sequences(self, request_id: str) -> list[Sequence]:
        """Those of a request, finished ones among them; none of an unknown one."""
        return list(self._requests.get(request_id, ()))

    def live(self) -> list[Sequence]:
        """All sequences that have not finished."""
        every = (sequence for sequences in self._requests.values() for sequence in sequences)
        return [sequence for sequence in every if sequence.state is not SequenceState.FINISHED]

    def take_outputs(self) -> list[EngineOutput]:
        """Everything that became known since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- what happens to a sequence -----------------------------------------------------------------------------------

    def send_back(self, sequence: Sequence) -> None:
        """Takes a running sequence out of the batch and queues it again; what it computed stays, if memory allows."""
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.restart(sequence)

    def restart(self, sequence: Sequence, *, keep: bool = True) -> None:
        """As `send_back`, but not for want of memory; what loads ahead of others, which has no slot, just ends."""
        if sequence.slot < 0:
            self._cache.end_preload(sequence)
            return
        self._leave_batch(sequence, keep=keep)
        self._queues.enqueue(sequence)

    def load_failed(self, sequence: Sequence, *, late: bool = False) -> None:
        """It was to go on from what could not be loaded, or not soon: it starts anew."""
        self.counters.failed_loads += not late
        if sequence.slot >= 0:
            sequence.missed = FAILED_LOADS[late]
            self.counters.miss_reasons[sequence.missed] += sequence.request.counted and sequence.index == 0
        self.restart(sequence)

    def accept(self, sequence: Sequence, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Adds tokens as far as the sequence may go on; how many, and why it ends there, if it does."""
        for count, token in enumerate(tokens, 1):
            sequence.accept(token)
            if token in sequence.request.stop_ids:
                return count, FinishReason.STOP
            if len(sequence.tokens) >= sequence.longest:
                return count, FinishReason.LENGTH
        return len(tokens), None

    def tell(
        self,
        sequence: Sequence,
        result: SlotResult = NOTHING,
        count: int = 0,
        reason: FinishReason | None = None,
        error: str | None = None,
    ) -> None:
        """Notes the first `count` tokens of a result as an output, with all else that it tells."""
        if sequence.follows:
            return
        self.counters.generated_tokens += count * sequence.request.counted
        self._outputs.append(
            EngineOutput(
                sequence.request.request_id,
                sequence.index,
                result.tokens[:count],
                result.logprobs[:count],
                result.prompt_logprobs,
                reason,
                error,
                None if sequence.reported else sequence.cached_tokens,
                None if sequence.reported else sequence.queue_seconds,
                sequence.preemptions,
                result.pooled,
                (sequence.drafted, sequence.accepted),
                "" if sequence.reported else sequence.missed,
            )
        )
        sequence.reported = sequence.cached_tokens is not None

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        result: SlotResult = NOTHING,
        count: int = 0,
        error: str | None = None,
    ) -> None:
        """Ends a sequence, and its request with the last of them."""
        if sequence.state is SequenceState.RUNNING:
            self._leave_batch(sequence, keep=reason is not FinishReason.ERROR)
        else:
            self._queues.dequeue(sequence)
        self._queues.finish(sequence)
        sequence.awaits = None
        self.tell(sequence, result, count, reason, error)
        other = sequence.partner
        lives = other is not None and other.state is not SequenceState.FINISHED
        if other is not None and lives and (not sequence.follows or reason is FinishReason.ERROR):
            self.finish(other, reason, error=error)
            return
        request_id = sequence.request.request_id
        if all(other.state is SequenceState.FINISHED for other in self._requests[request_id]):
            del self._requests[request_id]
            self._cache.pins.ended(request_id)
            if not self._caching:
                self._cache.tree.drop_space(sequence.namespace.space)
            if sequence.request.counted:
                self.counters.end(reason)

    def _leave_batch(self, sequence: Sequence, *, keep: bool) -> None:
        self._cache.release(sequence, keep=keep)
        sequence.drafts = ()
        self._queues.free_slot(sequence, self._cache.committed_step)

    def stats(self) -> EngineStats:
        """A snapshot of queues, cache and counters."""
        queues = self._queues
        return EngineStats(
            running=len(queues.running),
            waiting=len(queues.waiting),
            waiting_tokens=sum(len(sequence.tokens) for sequence in queues.waiting),
            **self._cache.usage(queues.running),
            **self.counters.snapshot(),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if requests and queues disagree."""
        queued = self._queues.running + self._queues.waiting
        assert sorted(map(id, self.live())) == sorted(map(id, queued)), "a sequence is lost or doubled"
