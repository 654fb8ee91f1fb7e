"""One continuation of a request: the tokens known, the tokens computed, and the cache blocks that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from penstock.core.kv.node import Namespace, Node
from penstock.core.pooling import PoolingKind
from penstock.core.request import PUBLIC, EngineRequest


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class CacheHold:
    """What a sequence holds of the KV cache.

    Attributes:
        tables: per group, block ids by logical block; NULL_BLOCK where a sliding window passed.
        live_from: per group, first logical block not yet dropped.
        cursor: tree node where the sequence's computed whole blocks end.
        tail: the node made for its partial last block, if any.
        announced: nodes it promised to fill.
        pins: (group, block) of nodes on its path whose content it holds in blocks of its own.
        marks: token counts still to come at which its recurrent state is to be kept.
    """

    tables: list[list[int]]
    live_from: list[int]
    cursor: Node
    tail: Node | None = None
    announced: list[Node] = field(default_factory=list)
    pins: list[tuple[int, int]] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)


def namespace_of(request: EngineRequest, *, caching: bool, shared: bool) -> Namespace:
    """Who finds again what a request computes: its owner, everybody if `shared`; without `caching` itself."""
    if not caching:
        return Namespace(request.request_id)
    if request.owner == PUBLIC:
        return Namespace(request.adapter, None)
    return Namespace(request.adapter, (request.cache_salt, "" if shared else request.owner))


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence. The one rule: a step gives it tokens until `computed` meets `known`.

    Attributes:
        request: what it belongs to.
        index: 0 … n - 1.
        order: arrival number of the request; smaller is older.
        turn: when it is its owner's turn, see `Turns`; -1 before it was queued.
        namespace: of the prefix tree.
        tokens: prompt and generated tokens known here.
        in_flight: sampled tokens of outstanding steps, not yet known here.
        computed: tokens whose cache entries exist once all submitted steps have run.
        committed: tokens whose cache entries certainly exist.
        last_step: number of the last submitted step that touches its blocks.
        row: its row in the batch while running, else -1.
        introduced: whether the runner was told of the row.
        hold: its cache blocks while running, else None.
        arrived: when it was queued, on the monotonic clock.
        cached_tokens: prompt tokens found in the cache at first admission; None before it.
        queue_seconds: from arrival to first admission; None before it.
        reported: whether its first output, which carries cached_tokens, was sent.
        scored: prompt positions whose log-probabilities were reported.
        awaits: the sequence that is computing its prefix, and how many committed tokens it waits for.
        num_prompt: tokens of its prompt.
        longest: tokens it may have in the end.
    """

    request: EngineRequest
    index: int
    order: int
    namespace: Namespace
    tokens: list[int]
    state: SequenceState = SequenceState.WAITING
    turn: int = -1
    in_flight: int = 0
    computed: int = 0
    committed: int = 0
    last_step: int = -1
    row: int = -1
    introduced: bool = False
    hold: CacheHold | None = None
    preemptions: int = 0
    arrived: float = 0.0
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    reported: bool = False
    scored: int = 0
    awaits: tuple[Sequence, int] | None = None
    num_prompt: int = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_ids)
        self.longest = self.num_prompt + (self.request.sampling.max_tokens or 1)

    @property
    def reusable(self) -> int:
        """Leading tokens whose cache entries are enough: those of which nothing else is wanted."""
        pooling, scored = self.request.pooling, self.request.sampling.prompt_logprobs is not None and self.index == 0
        if pooling is not None and pooling.kind is not PoolingKind.LAST:
            return 0
        return self.scored if scored and self.scored < self.num_prompt - 1 else len(self.tokens) - 1

    @property
    def public(self) -> bool:
        """Whether everybody finds its prompt again."""
        return self.namespace.owner is None

    @property
    def known(self) -> int:
        """Tokens known, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def generated(self) -> int:
        """Generated tokens, those in flight included."""
        return self.known - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens to compute now; 0 while the last token allowed is in flight, or one that may force others."""
        known = len(self.tokens) + self.in_flight
        return 0 if known >= self.longest or (self.in_flight and self.request.constrained) else known - self.computed
