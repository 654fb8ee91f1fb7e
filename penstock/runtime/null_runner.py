"""A runner without a model: the next token is a hash of all tokens before it, read through the block tables.

Every cache slot holds the hash of the prefix that ends there, so a block that was shared, copied, evicted or reused
wrongly changes the answer; with `check`, every slot a real attention would read is compared as well. So it is with the
states of recurrent models, each of which holds the hash of its row's prefix.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.kv.cache_spec import CacheGroup
from penstock.core.pooling import PoolingKind
from penstock.core.protocol import (
    NULL_BLOCK,
    CacheOpKind,
    NewSequence,
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
    ) -> None:
        self._windows = [group.window for group in groups]
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._check = check
        self._slots = [[0] * (count * block_size) for count in num_blocks]
        self._states: dict[int, int] | None = {} if recurrent else None
        self._rows: dict[int, _Row] = {}
        self._last: dict[int, int] = {}
        self._queue: deque[tuple[StepPlan, Any]] = deque()
        self._aborted = False  # a step failed once: what it said of rows may be lost

    def submit(self, plan: StepPlan, masks: Any = None) -> None:
        self._queue.append((plan, masks))

    def sample(self, step: int) -> StepResult:
        plan, masks = self._queue.popleft()
        if plan.step != step:
            raise ValueError(f"step {step} was asked for while step {plan.step} is the oldest outstanding")
        for row in plan.released_rows:
            if self._rows.pop(row, None) is None and not self._aborted:
                raise ValueError(f"row {row} was released but never handed out")
        for new in plan.new_rows:
            if new.row in self._rows and not self._aborted:
                raise ValueError(f"row {new.row} was handed out twice")
            known = list(new.prompt_ids + new.generated_ids)[: new.computed] if self._check else []
            self._rows[new.row] = _Row(new, [list(table) for table in new.blocks], known)
        for op in plan.cache_ops:
            if self._states is not None and op.group == len(self._slots):
                self._states[op.target] = self._states.get(op.source, 0)
                continue
            if op.kind is not CacheOpKind.COPY:
                raise ValueError(f"cache operation {op.kind.value} is not served by the null runner")
            slots, size = self._slots[op.group], self._block_size
            source, target = op.source * size, op.target * size
            slots[target : target + op.num_tokens] = slots[source : source + op.num_tokens]
        sampled = [span.row for span in plan.spans if span.sample] if masks is not None else []
        words = dict(zip(sampled, masks.of(sampled), strict=True)) if sampled else {}
        return StepResult(step, tuple(self._run(span, words.get(span.row)) for span in plan.spans))

    def prepare(self) -> bool:
        return False

    def abort(self) -> None:
        self._queue.clear()
        self._aborted = True

    def close(self) -> None:
        self._rows.clear()

    def _run(self, span: ScheduledTokens, mask: Sequence[int] | None) -> SlotResult:
        row = self._rows[span.row]
        for table, blocks in zip(row.tables, span.new_blocks, strict=False):
            table.extend(blocks)
        tokens = [self._last[-1 - token] if token < 0 else token for token in span.tokens]
        prefix = self._before(row, span)
        for position, token in enumerate(tokens, span.start):
            prefix = mix(prefix ^ (token + 1))
            for g in range(len(self._slots)):
                self._slots[g][self._slot(row, g, position)] = prefix
        if self._check:
            self._verify(row, span, tokens)
        if self._states is not None:
            self._states[span.row] = prefix
        scored = self._score_prompt(row.new, span)
        if not span.sample:
            return SlotResult(span.row, prompt_logprobs=scored)
        if row.new.pooling is not None:
            count = len(row.new.prompt_ids) if row.new.pooling.kind is PoolingKind.ALL else 1
            return SlotResult(span.row, pooled=array("f", [prefix % 1000 / 1000] * count).tobytes())
        end = span.start + len(tokens)
        token = next_token(prefix, row.new, end - len(row.new.prompt_ids), self._vocab_size, mask)
        self._last[span.row] = token
        wanted = row.new.sampling.logprobs is not None
        return SlotResult(span.row, (token,), (self._logprob(token),) if wanted else (), scored)

    def _before(self, row: _Row, span: ScheduledTokens) -> int:
        """The hash of the tokens before a span: the row's state, or what the cache holds of the last of them."""
        if not span.start:
            return 0
        if self._states is not None:
            return self._states.get(span.row, 0)
        return self._slots[0][self._slot(row, 0, span.start - 1)]

    def _slot(self, row: _Row, group: int, position: int) -> int:
        block = row.tables[group][position // self._block_size]
        if block == NULL_BLOCK:
            raise ValueError(f"row {row.new.row} reads or writes position {position}, which has no block")
        return block * self._block_size + position % self._block_size

    def _verify(self, row: _Row, span: ScheduledTokens, tokens: list[int]) -> None:
        """Compares every slot the span's queries see with the truth."""
        if len(row.tokens) != span.start:
            raise ValueError(f"row {row.new.row} starts at {span.start} but {len(row.tokens)} tokens are computed")
        row.tokens += tokens
        prefix, truth = 0, []
        for token in row.tokens:
            prefix = mix(prefix ^ (token + 1))
            truth.append(prefix)
        for g, window in enumerate(self._windows):
            first = 0 if window is None else max(0, span.start - window + 1)
            for position in range(first, len(truth)):
                if self._slots[g][self._slot(row, g, position)] != truth[position]:
                    raise ValueError(f"row {row.new.row}, group {g}: position {position} holds another prefix")

    def _score_prompt(self, new: NewSequence, span: ScheduledTokens) -> tuple[TokenLogprobs, ...]:
        if new.sampling.prompt_logprobs is None or new.sequence:
            return ()
        first = new.sampling.first_scored(span.start)
        end = min(span.start + len(span.tokens), len(new.prompt_ids) - 1)
        return tuple(self._logprob(new.prompt_ids[position + 1]) for position in range(first, end))

    def _logprob(self, token: int) -> TokenLogprobs:
        return TokenLogprobs(token, -float(token), token + 1)
