"""Who enters the batch: waiting sequences in order, as long as slots, tokens and gates allow."""

from __future__ import annotations

from collections import abc
from time import monotonic

from penstock.config.errors import ContextLengthError, RequestError
from penstock.config.options import SchedulerOptions
from penstock.core.kv.cache import KVCache
from penstock.core.kv.node import Match
from penstock.core.ledger import Ledger
from penstock.core.plan_builder import PlanBuilder
from penstock.core.policies.order import Admission, Gate
from penstock.core.protocol import EncoderWork
from penstock.core.request import EngineRequest
from penstock.core.request_queues import RequestQueues
from penstock.core.sequence import Sequence, SequenceState


def most_chunk(options: SchedulerOptions) -> int:
    """Most tokens of one sequence in a step."""
    return min(options.max_num_batched_tokens, options.max_chunk_tokens or options.max_num_batched_tokens)


class AdmissionControl:
    """Admits sequences from the queue, each as a transaction: all it needs, or nothing is changed."""

    def __init__(
        self,
        options: SchedulerOptions,
        queues: RequestQueues,
        cache: KVCache,
        ledger: Ledger,
        gates: abc.Sequence[Gate],
    ) -> None:
        self._options = options
        self._queues = queues
        self._cache = cache
        self._ledger = ledger
        self._gates = tuple(gates)
        self._chunk = most_chunk(options)
        self._blocked: tuple[Sequence, int] | None = None

    def check_fits(self, request: EngineRequest) -> None:
        """Raises RequestError if a request is empty or can never fit into the context or the KV cache."""
        prompt = len(request.prompt_ids)
        most = request.sampling.max_tokens
        if not prompt:
            raise RequestError("the prompt is empty; it needs at least one token.", param="prompt")
        if most is None:
            raise RequestError("max_tokens is not resolved; the frontend sets it.", param="max_tokens")
        if prompt + (most if request.pooling is None else 0) > self._options.max_model_len:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and {most} more are asked for: {prompt + most} in all, but the "
                f"context holds {self._options.max_model_len}. Shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )
        if request.encoder is not None and self._cache.cross_group < 0:
            raise RequestError("the model has no encoder whose output a prompt could attend to.", param="messages")
        encoder = 0 if request.encoder is None else request.encoder.length
        lengths = [prompt + most - 1]
        if request.guided:
            lengths.append(self._negative(request) + most - 1)
        if not self._cache.can_hold(lengths, self._chunk) or not self._cache.cross.can_hold(encoder):
            told = f", beside the negative prompt's {lengths[1] - most + 1}" if request.guided else ""
            raise RequestError(
                f"the prompt has {prompt} tokens{told} and {most} more are asked for, but the KV cache holds "
                f"{self._cache.capacity} tokens in all. Lower max_tokens, or start with a larger --kv-cache-memory.",
                param="max_tokens",
                code="kv_cache_too_small",
            )
        self._check_media(request)

    def _negative(self, request: EngineRequest) -> int:
        """Tokens of a guided request's negative prompt; raises RequestError where it cannot be computed beside."""
        negative, most = len(request.sampling.negative_prompt_ids), request.sampling.max_tokens or 1
        options, field = self._options, "negative_prompt"
        if not negative:
            raise RequestError("negative_prompt_ids is empty; the frontend fills it in.", param=field)
        if negative + most > options.max_model_len:
            raise ContextLengthError(
                f"the negative prompt has {negative} tokens and {most} are asked for: {negative + most} in all, but "
                f"the context holds {options.max_model_len}. Shorten it or lower max_tokens.",
                param=field,
            )
        if options.whole_prompts or min(options.max_num_seqs, options.max_num_batched_tokens) < 2 or request.media:
            raise RequestError(
                "guidance_scale needs a second sequence in every step, beside a prompt that is computed in parts. Here "
                "prompts are computed whole, --max-num-seqs is 1, or the prompt has media; send 1.",
                param="guidance_scale",
            )
        return negative

    def _check_media(self, request: EngineRequest) -> None:
        end = 0
        for span in request.media:
            if span.length < 1 or not end <= span.start < span.end <= len(request.prompt_ids):
                raise RequestError(
                    f"a medium is said to lie at tokens {span.start} to {span.end} of a prompt of "
                    f"{len(request.prompt_ids)}, behind another that ends at {end}; media lie in order and apart.",
                    param="messages",
                )
            if span.length > self._chunk:
                raise RequestError(
                    f"a medium of the prompt takes {span.length} tokens, but a step computes at most {self._chunk} of "
                    "a prompt, and a medium is computed in one. Send it smaller, or raise --max-num-batched-tokens.",
                    param="messages",
                )
            end = span.end

    def admit(self, builder: PlanBuilder) -> None:
        """Admits waiting sequences in order as long as slots, tokens and gates allow."""
        if not self._queues.waiting or not self._queues.free_slots or builder.budget <= 0:
            return
        reserved = [0] * len(self._cache.pools)
        for sequence in self._queues.running:
            self._reserve(sequence, reserved)
        index = 0
        while index < len(self._queues.waiting) and self._queues.free_slots and builder.budget > 0:
            sequence = self._queues.waiting[index]
            if self._options.whole_prompts and sequence.known > builder.budget:
                break
            if sequence.last_step > self._cache.committed_step or self._still_waits(sequence):
                index += 1
                continue
            if self._blocked == (sequence, self._cache.releases) and self._queues.running:
                break  # it lacks memory and nothing was released since: no need to match it again
            match = self._cache.match(sequence, sequence.reusable)
            gate = self._held_by(sequence, match, reserved)
            if gate is not None:
                self._ledger.counters.held_back[gate.name] += 1
                sequence.awaits = (match.owner, match.pending) if match.pending > match.tokens else None
                if not gate.passable:
                    if gate.until_release:
                        self._blocked = (sequence, self._cache.releases)
                    break
                index += 1
                continue
            if not self._start(sequence, match, builder):
                break
            self._reserve(sequence, reserved)
            self._queues.waiting.pop(index)

    def _reserve(self, sequence: Sequence, reserved: list[int]) -> None:
        """Adds what a running sequence will still need, one block of growth included, where there is growth."""
        for g, blocks in enumerate(self._cache.growth(sequence, self._chunk)):
            reserved[g] += blocks + (g != self._cache.cross_group)

    def _held_by(self, sequence: Sequence, match: Match, reserved: abc.Sequence[int]) -> Gate | None:
        admission = Admission(
            sequence=sequence,
            match=match,
            reserved=reserved,
            idle_engine=not self._queues.running and not self._cache.coming(),
            free_slots=len(self._queues.free_slots),
            chunk=self._chunk,
            cache=self._cache,
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

    def _start(self, sequence: Sequence, match: Match, builder: PlanBuilder) -> bool:
        """Admission as a transaction: pin the match, take a slot and blocks, or undo everything."""
        added = self._take_blocks(sequence, match, builder)
        if added is None and (match.tail is not None or match.below):  # which take room besides: do without them
            match = match.without_tail()
            added = self._take_blocks(sequence, match, builder)
        if added is None:
            return False
        self._queues.assign_slot(sequence)
        self._cache.start(sequence, match)
        self._count_admission(sequence, match)
        self._encode(sequence, builder)
        length = self._first_length(sequence, match, builder)
        if length > 0 and not sequence.loading:
            builder.schedule(sequence, length, added)
        return True

    def _first_length(self, sequence: Sequence, match: Match, builder: PlanBuilder) -> int:
        paired = sequence.partner is not None  # whose last token is computed when both are there
        length = min(sequence.known - match.tokens - paired, builder.budget, self._chunk)
        return self._cache.cut(sequence, match.tokens, length)

    def _take_blocks(
        self, sequence: Sequence, match: Match, builder: PlanBuilder
    ) -> tuple[tuple[int, ...], ...] | None:
        """Pins the match and takes blocks for what is computed or loaded first; holds nothing if they cannot be had."""
        added = None
        if self._cache.attach(sequence, match):
            length = self._first_length(sequence, match, builder)
            if match.below:
                added = self._cache.extend_for_loads(sequence, match)
            elif length > 0 or sequence.partner is not None:
                added = self._cache.extend(sequence, match.tokens + length)
        if added is None:
            self._cache.release(sequence, keep=False)
        return added

    def _encode(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Has the encoder compute what the sequence attends to, and nobody has yet."""
        allocation = sequence.allocation
        entry = allocation.cross if allocation else None
        if entry is not None and not entry.filled:
            entry.filled = True
            work = EncoderWork(sequence.slot, entry.key[1], 0, entry.tokens, self._cache.cross_group, entry.blocks)
            builder.encoder_work.append(work)

    def _count_admission(self, sequence: Sequence, match: Match) -> None:
        if sequence.cached_tokens is not None:
            return  # resumed
        sequence.cached_tokens = match.reach
        sequence.queue_seconds = monotonic() - sequence.arrived
        counters = self._ledger.counters
        counters.cached_tokens += match.reach
        counters.prompt_tokens += sequence.num_prompt
        if sequence.index == 0:
            for node in (*match.nodes, *((match.tail,) if match.tail else ())):
                node.uses += 1
            counters.prefix_queries += sequence.num_prompt - 1
            counters.prefix_hits += match.reach
            if match.reason:
                counters.miss_reasons[match.reason] += 1
