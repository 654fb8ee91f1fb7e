"""A runner without a model: the next token is a hash of all tokens before it, read through the block tables.

Every cache slot holds the hash of the prefix that ends there, so a block that was shared, copied, evicted or reused
wrongly changes the answer; with `check`, every slot a real attention would read is compared as well. So it is with the
states of recurrent models, each of which holds the hash of its row's prefix, and with the entries of an encoder, each
of which holds the hash of what was encoded.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from penstock.config.cache_spec import CacheGroup, CacheKind
from penstock.config.pooling import PoolingKind
from penstock.core.protocol import (
    NULL_BLOCK,
    CacheOp,
    CacheOpKind,
    EncoderWork,
    NewSequence,
    Proposal,
    ScheduledTokens,
    SlotResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)  # fmt: skip

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): 64 well mixed bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def next_token(
    prefix: int, new: NewSequence, generated: int, vocab_size: int, mask: Sequence[int] | None = None
) -> int:
    """The token after a prefix with that hash, of those a mask allows; greedy requests ignore seed and sequence."""
    key = prefix if new.sampling.greedy else mix(prefix ^ mix(new.seed * 1_000_003 + new.sequence))
    if mask is not None:
        allowed = [token for token in range(vocab_size) if int(mask[token // 32]) >> (token % 32) & 1]
        return allowed[mix(key) % len(allowed)]
    token = mix(key) % vocab_size
    while generated < new.sampling.min_tokens and token in new.stop_ids:
        token = (token + 1) % vocab_size
    return token


def encoded(digest: str, position: int) -> int:
    """What an encoder makes of one position."""
    return mix(mix(hash_of(digest)) ^ position)


def hash_of(text: str) -> int:
    """64 bits of a text, the same in every process."""
    value = 0
    for character in text:
        value = mix(value ^ ord(character))
    return value


def shared_prefix(prefix: int, other: int, weight: float) -> int:
    """What two sequences with such hashes draw from that share their draws."""
    return mix(prefix ^ mix(other ^ hash_of(f"{weight:.6f}")))


class Drafter(Protocol):
    """Proposes what may follow. The null form is None: nothing is proposed."""

    def propose(self, new: NewSequence, generated: int, follow: Callable[[int], list[int]]) -> tuple[int, ...]:
        """Drafts for a sequence with so many generated tokens; `follow(n)` tells the next n as they will be."""


class Mover(Protocol):
    """Carries blocks to and from a lower tier. The null form is None: nothing is moved."""

    def start(self, op: CacheOp, read: Callable[[], list[int]]) -> None:
        """Begins a transfer; `read` gives the entries of the block that is saved, as they are when it is called."""

    def finished(self) -> Iterator[tuple[CacheOp, list[int] | None]]:
        """Transfers that have ended since the last call, with the entries they moved; None for one that failed."""

    def abort(self) -> None:
        """Ends all transfers, none of which is told of any more."""


@dataclass(slots=True)
class _Row:
    new: NewSequence
    tables: list[list[int]]
    tokens: list[int] = field(default_factory=list)  # only with `check`


class NullRunner:
    """Implements `core.protocol.Runner` for any cache groups; deterministic, in memory, no dependencies."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        block_size: int,
        vocab_size: int,
        *,
        check: bool,
        recurrent: bool = False,
        drafter: Drafter | None = None,
        mover: Mover | None = None,
    ) -> None:
        self._drafter = drafter
        self._mover = mover
        self._windows = [group.window for group in groups]
        self._own = [g for g, group in enumerate(groups) if group.kind is not CacheKind.CROSS]
        self._cross = [g for g, group in enumerate(groups) if group.kind is CacheKind.CROSS]
        self._optional = [group.optional for group in groups]
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._check = check
        self._slots = [[0] * (count * block_size) for count in num_blocks]
        self._states: dict[int, int] | None = {} if recurrent else None
        self._rows: dict[int, _Row] = {}
        self._last: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # by row, the hash of all its known tokens
        self._after: dict[int, int] = {}  # by row, the hash of all its tokens, the last one drawn included
        self._queue: deque[tuple[StepPlan, Any]] = deque()
        self._aborted = False  # a step failed once, so that releases of slots may be lost

    def submit(self, plan: StepPlan, masks: Any = None) -> None:
        self._queue.append((plan, masks))

    def sample(self, step: int) -> StepResult:
        plan, masks = self._queue.popleft()
        if plan.step != step:
            raise ValueError(f"step {step} was asked for while step {plan.step} is the oldest outstanding")
        for row in plan.released_slots:
            if self._rows.pop(row, None) is None and not self._aborted:
                raise ValueError(f"row {row} was released but never handed out")
        for new in plan.new_sequences:
            if new.slot in self._rows and not self._aborted:
                raise ValueError(f"row {new.slot} was handed out twice")
            known = list(new.prompt_ids + new.generated_ids)[: new.computed] if self._check else []
            self._rows[new.slot] = _Row(new, [list(table) for table in new.blocks], known)
        for op in plan.cache_ops:
            self._move(op)
        for work in plan.encoder_work:
            self._encode(work)
        sampled = [span for span in plan.scheduled if span.sample] if masks is not None else []
        slots = [span.slot for span in sampled for _ in range(len(span.drafts) + 1)]
        words = iter(masks.of(slots) if slots else ())
        masked = {span.slot: list(islice(words, len(span.drafts) + 1)) for span in sampled}
        results = tuple(self._run(span, masked.get(span.slot, ())) for span in plan.scheduled)
        if plan.guidance:
            results = self._guided(plan, results, masked)
        proposals = () if self._drafter is None else tuple(self._propose(plan, results))
        finished, failed = self._finish_transfers()
        return StepResult(step, results, proposals, tuple(finished), tuple(failed))

    def _guided(
        self, plan: StepPlan, results: tuple[SlotResult, ...], masked: Mapping[int, Sequence[Sequence[int]]]
    ) -> tuple[SlotResult, ...]:
        """Results in which pairs share what is drawn from both sequences' tokens."""
        spans = {span.slot: span for span in plan.scheduled if span.sample}
        found = {result.slot: result for result in results}
        for slot, other, weight in plan.guidance:
            if slot not in spans or other not in spans or not self._rows[other].new.follows:
                raise ValueError(f"slots {slot} and {other} cannot share a draw in step {plan.step}")
            new, span = self._rows[slot].new, spans[slot]
            mixed = shared_prefix(self._ends[slot], self._ends[other], weight)
            generated = span.start + len(span.tokens) - len(new.prompt_ids)
            mask = next(iter(masked.get(slot, ())), None)
            token = next_token(mixed, new, generated, self._vocab_size, mask)
            logprobs = (self._logprob(token),) if new.sampling.logprobs is not None else ()
            found[slot] = found[slot]._replace(tokens=(token,), logprobs=logprobs)
            found[other] = found[other]._replace(tokens=(token,), logprobs=())
        return tuple(found[result.slot] for result in results)

    def _move(self, op: CacheOp) -> None:
        size = self._block_size
        if op.kind is CacheOpKind.CANCEL:
            return
        if self._states is not None and op.group == len(self._slots):
            self._move_state(op, self._states)
            return
        slots = self._slots[op.group]
        if op.kind is CacheOpKind.COPY:
            source = op.source * size
            target = op.target * size
            slots[target : target + op.num_tokens] = slots[source : source + op.num_tokens]
        elif self._mover is not None:
            self._mover.start(op, lambda: slots[op.source * size : (op.source + 1) * size])
        else:
            raise ValueError(f"cache operation {op.kind.value} needs a mover")

    def _move_state(self, op: CacheOp, states: dict[int, int]) -> None:
        state = states.get(op.source, 0)
        if op.kind in (CacheOpKind.COPY, CacheOpKind.CHECKPOINT):
            states[op.target] = state
        elif self._mover is not None:
            self._mover.start(op, lambda: [state])  # as it is now: the slot may be another's before the copy is made

    def _finish_transfers(self) -> tuple[list[int], list[int]]:
        finished: list[int] = []
        failed: list[int] = []
        size = self._block_size
        for op, values in self._mover.finished() if self._mover else ():
            finished.append(op.transfer)
            if values is None:
                failed.append(op.transfer)
            elif self._states is not None and op.group == len(self._slots):
                self._states |= {op.target: values[0]} if op.kind is CacheOpKind.LOAD else {}
            elif op.kind is CacheOpKind.LOAD:
                self._slots[op.group][op.target * size : (op.target + 1) * size] = values
        return finished, failed

    def _encode(self, work: EncoderWork) -> None:
        if work.group is None:
            return
        for position in range(work.length):
            block = work.blocks[position // self._block_size]
            self._slots[work.group][block * self._block_size + position % self._block_size] = encoded(
                work.digest, position
            )

    def _propose(self, plan: StepPlan, results: tuple[SlotResult, ...]) -> Iterator[Proposal]:
        assert self._drafter is not None
        for span, result in zip(plan.scheduled, results, strict=True):
            if not result.tokens:
                continue
            new = self._rows[span.slot].new
            prefix = self._after[span.slot]
            generated = span.start + len(span.tokens) - span.draft_tokens + len(result.tokens) - len(new.prompt_ids)

            def follow(
                count: int, new: NewSequence = new, prefix: int = prefix, generated: int = generated
            ) -> list[int]:
                tokens: list[int] = []
                for index in range(count):
                    tokens.append(next_token(prefix, new, generated + index, self._vocab_size))
                    prefix = mix(prefix ^ (tokens[-1] + 1))
                return tokens

            if drafts := self._drafter.propose(new, generated, follow):
                yield Proposal(span.slot, drafts)

    def prepare(self) -> bool:
        return False

    def abort(self) -> None:
        self._queue.clear()
        self._aborted = True
        if self._mover is not None:
            self._mover.abort()

    def close(self) -> None:
        self._rows.clear()

    def _run(self, span: ScheduledTokens, masks: Sequence[Sequence[int]]) -> SlotResult:
        row = self._rows[span.slot]
        for table, blocks in zip(row.tables, span.new_blocks, strict=False):
            table.extend(blocks)
        tokens = [self._last[-1 - token] if token < 0 else token for token in span.tokens]
        prefix = self._before(row, span)
        prefixes = []
        for position, token in enumerate(tokens, span.start):
            prefix = mix(prefix ^ (token + 1))
            prefixes.append(prefix)
            for g in self._own:
                self._slots[g][self._slot(row, g, position)] = prefix
        if self._check:
            self._verify(row, span, tokens)
        self._keep_states(span, prefixes)
        scored = self._score_prompt(row.new, span)
        if not span.sample:
            return SlotResult(span.slot, prompt_logprobs=scored)
        if row.new.pooling is not None:
            count = len(row.new.prompt_ids) if row.new.pooling.kind is PoolingKind.ALL else 1
            return SlotResult(span.slot, pooled=array("f", [prefix % 1000 / 1000] * count).tobytes())
        self._ends[span.slot] = prefixes[-1]
        accepted = self._draw(row, span, prefixes, masks)
        if self._check:
            del row.tokens[span.start + len(tokens) - span.draft_tokens + len(accepted) - 1 :]
        self._last[span.slot] = accepted[-1]
        self._after[span.slot] = mix(prefixes[len(tokens) - span.draft_tokens + len(accepted) - 2] ^ (accepted[-1] + 1))
        wanted = row.new.sampling.logprobs is not None
        return SlotResult(span.slot, accepted, tuple(map(self._logprob, accepted)) if wanted else (), scored)

    def _draw(
        self, row: _Row, span: ScheduledTokens, prefixes: list[int], masks: Sequence[Sequence[int]]
    ) -> tuple[int, ...]:
        """Accepts drafts while each is the token drawn in its place, then takes what is drawn behind them.

        `masks`: one for each place, or none.
        """
        first = len(span.tokens) - span.draft_tokens
        drafts = span.drafts
        accepted: list[int] = []
        for index in range(len(drafts) + 1):
            generated = span.start + first + index - len(row.new.prompt_ids)
            mask = masks[index] if masks else None
            token = next_token(prefixes[first + index - 1], row.new, generated, self._vocab_size, mask)
            accepted.append(token)
            if index == len(drafts) or drafts[index] != token:
                break
        return tuple(accepted)

    def _keep_states(self, span: ScheduledTokens, prefixes: list[int]) -> None:
        if self._states is None:
            return
        if span.draft_tokens and not span.draft_states:
            raise ValueError(f"row {span.slot} has drafts and no slots for the states behind them")
        if span.draft_states:
            kept = prefixes[len(prefixes) - span.draft_tokens - 1 :]
            self._states.update(zip(span.draft_states, kept, strict=True))
        else:
            self._states[span.slot] = prefixes[-1]

    def _before(self, row: _Row, span: ScheduledTokens) -> int:
        """The hash of the tokens before a span: the row's state, or what the cache holds of the last of them."""
        if not span.start:
            return 0
        if self._states is not None:
            return self._states.get(span.slot, 0)
        return self._slots[0][self._slot(row, 0, span.start - 1)]

    def _slot(self, row: _Row, group: int, position: int) -> int:
        block = row.tables[group][position // self._block_size]
        if block == NULL_BLOCK:
            raise ValueError(f"row {row.new.slot} reads or writes position {position}, which has no block")
        return block * self._block_size + position % self._block_size

    def _verify(self, row: _Row, span: ScheduledTokens, tokens: list[int]) -> None:
        """Compares every slot the span's queries see with the truth."""
        if len(row.tokens) != span.start:
            raise ValueError(f"row {row.new.slot} starts at {span.start} but {len(row.tokens)} tokens are computed")
        row.tokens += tokens
        prefix, truth = 0, []
        for token in row.tokens:
            prefix = mix(prefix ^ (token + 1))
            truth.append(prefix)
        for g in self._own:
            window = self._windows[g]
            first = 0 if window is None else max(0, span.start - window + 1)
            if self._optional[g]:
                first = row.new.valid_from[g]
            for position in range(first, len(truth)):
                if self._slots[g][self._slot(row, g, position)] != truth[position]:
                    raise ValueError(f"row {row.new.slot}, group {g}: position {position} holds another prefix")

        encoder = row.new.encoder
        for g in self._cross if encoder is not None else ():
            assert encoder is not None
            for position in range(encoder.length):
                if self._slots[g][self._slot(row, g, position)] != encoded(encoder.digest, position):
                    raise ValueError(f"row {row.new.slot}, group {g}: entry {position} is not the encoder's")

    def _score_prompt(self, new: NewSequence, span: ScheduledTokens) -> tuple[TokenLogprobs, ...]:
        if new.sampling.prompt_logprobs is None or new.sequence:
            return ()
        first = new.sampling.first_scored(span.start)
        end = min(span.start + len(span.tokens), len(new.prompt_ids) - 1)
        return tuple(self._logprob(new.prompt_ids[position + 1]) for position in range(first, end))

    def _logprob(self, token: int) -> TokenLogprobs:
        return TokenLogprobs(token, -float(token), token + 1)
