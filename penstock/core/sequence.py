"""One continuation of a request: the tokens known, the tokens computed, and what it holds of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from penstock.config.adapters import AdapterUse
from penstock.config.pooling import PoolingKind
from penstock.core.kv.node import Namespace
from penstock.core.policies.naming import prefix_keys
from penstock.core.request import EngineRequest

if TYPE_CHECKING:
    from penstock.core.kv.allocation import Allocation


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence. The one rule: a step gives it tokens until `computed` meets `known`.

    `computed` and `committed` are written by its methods alone.

    Attributes:
        request: what it belongs to.
        index: 0 … n - 1; forks count on from there.
        order: arrival number of the request; smaller is older.
        turn: when it is its owner's turn, see `Turns`; -1 before it was queued.
        namespace: of the prefix tree.
        tokens: prompt and generated tokens known here.
        keys: what the prefix tree knows them by: the same list, or others where media or activated adapters are.
        tag: what is added to the keys of tokens that become known.
        drafts: tokens proposed to follow the known ones, to be verified by the next step.
        in_flight: sampled tokens of outstanding steps, not yet known here.
        computed: tokens whose cache entries exist once all submitted steps have run.
        committed: tokens whose cache entries certainly exist.
        last_step: number of the last submitted step that touches its blocks.
        slot: its request slot while running, else -1.
        introduced: whether the runner was told of the slot.
        allocation: what it holds of the KV cache while running, else None.
        loading: whether entries of its prefix are on their way from a lower tier; it computes nothing meanwhile.
        arrived: when it was queued, on the monotonic clock.
        cached_tokens: prompt tokens found in the cache at first admission; None before it.
        missed: why no more of its prompt was found; "" if all was.
        queue_seconds: from arrival to first admission; None before it.
        drafted, accepted: drafts that were verified, and those that were right.
        reported: whether its first output, which carries cached_tokens, was sent.
        scored: prompt positions whose log-probabilities were reported.
        awaits: the sequence that is computing its prefix, and how many committed tokens it waits for.
        num_prompt: tokens of its prompt.
        longest: tokens it may have in the end.
        sampler_state: what its sampler has learned with the tokens known.
        adapter_slots: where its adapters lie while it runs.
        partner, follows: the sequence that it shares draws with, and whether that one draws (`core.guidance`).
    """

    request: EngineRequest
    index: int
    order: int
    namespace: Namespace
    tokens: list[int]
    state: SequenceState = SequenceState.WAITING
    turn: int = -1
    drafts: tuple[int, ...] = ()
    in_flight: int = 0
    computed: int = 0
    committed: int = 0
    last_step: int = -1
    slot: int = -1
    introduced: bool = False
    allocation: Allocation | None = None
    loading: bool = False
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    arrived: float = 0.0
    cached_tokens: int | None = None
    missed: str = ""
    queue_seconds: float | None = None
    reported: bool = False
    scored: int = 0
    awaits: tuple[Sequence, int] | None = None
    sampler_state: tuple[float, ...] = ()
    adapter_slots: tuple[tuple[int, AdapterUse], ...] = ()
    partner: Sequence | None = None
    follows: bool = False
    keys: list[int] = field(init=False)
    tag: int = field(init=False)
    num_prompt: int = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        self.keys, self.tag = prefix_keys(self.tokens, self.request)
        self.num_prompt = len(self.request.prompt_ids)
        self.longest = self.num_prompt + (self.request.sampling.max_tokens or 1)

    # -- what changes it ----------------------------------------------------------------------------------------------

    def place(self, tokens: int) -> None:
        """It starts, or starts anew, with that many tokens in the cache."""
        self.computed = tokens
        self.committed = tokens

    def advance(self, tokens: int) -> None:
        """A step that computes so many more was planned."""
        self.computed += tokens

    def commit(self, tokens: int) -> None:
        """The entries of its first `tokens` tokens exist now."""
        self.committed = tokens

    def accept(self, token: int) -> None:
        """A token becomes known."""
        self.tokens.append(token)
        if self.keys is not self.tokens:
            self.keys.append(token + self.tag)

    def go_on(self, tokens: tuple[int, ...]) -> None:
        """It had these generated before it came here, as had its partner."""
        for token in tokens:
            self.accept(token)
            if self.partner is not None:
                self.partner.accept(token)

    def rewind(self, computed: int) -> None:
        """Entries behind the first `computed` do not count: drafts that were refused, or tokens taken back."""
        self.computed = min(self.computed, computed)
        self.committed = min(self.committed, computed)

    def truncate(self, tokens: int) -> None:
        """Forgets the known tokens behind the first `tokens`."""
        del self.tokens[tokens:]
        if self.keys is not self.tokens:
            del self.keys[tokens:]
        self.drafts = ()
        self.rewind(tokens)

    # -- what it tells ------------------------------------------------------------------------------------------------

    @property
    def reusable(self) -> int:
        """Leading tokens whose cache entries are enough: those of which nothing else is wanted."""
        pooling, scored = self.request.pooling, self.request.sampling.prompt_logprobs is not None and self.index == 0
        if pooling is not None and pooling.kind is not PoolingKind.LAST:
            return 0
        if scored and self.scored < self.num_prompt - 1:
            return self.scored
        return max(0, len(self.tokens) - (1 if self.partner is None else 2))  # its first step has a token to compute

    @property
    def public(self) -> bool:
        """Whether everybody finds its prompt again."""
        return self.namespace.owner is None

    @property
    def known(self) -> int:
        """Tokens known, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens to compute now; 0 while the last token allowed is in flight, or one whose successors it decides."""
        known = len(self.tokens) + self.in_flight
        if known >= self.longest or self.loading or (self.in_flight and self.request.waits_for_tokens):
            return 0
        return known - self.computed - self.held

    @property
    def held(self) -> int:
        """Tokens at its end that are not computed yet because its partner is not as far: the last one, or none."""
        return int(self.partner is not None and not (self._can_draw and self.partner._can_draw))

    @property
    def _can_draw(self) -> bool:
        ready = self.state is SequenceState.RUNNING and not self.in_flight
        return ready and self.computed == len(self.tokens) - 1
