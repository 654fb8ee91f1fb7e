"""What a layer needs kept between steps, and how layers with equal needs form one cache group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class CacheKind(str, Enum):
    """The kinds of memory a layer may declare."""

    FULL = "full"  # keys and values of every position
    SLIDING = "sliding"  # keys and values of the last `window` positions
    LATENT = "latent"  # one compressed vector a position (MLA), every position
    STATE = "state"  # a recurrent state, one a sequence, with checkpoints
    CROSS = "cross"  # keys and values of encoder output, fixed once computed


RUN = 256
"""Positions that one rank has of a context that lies with several: what attention sums at a time."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """Which positions of each context are kept here: of runs of RUN positions, dealt to ranks in turn, one rank's.

    Attributes:
        place: of this rank, below `ranks`.
        ranks: how many share contexts; 1 is the null form, which has every position.
    """

    place: int = 0
    ranks: int = 1

    @property
    def whole(self) -> bool:
        """Whether every position is here."""
        return self.ranks == 1


WHOLE_CONTEXT = Stripe()


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One layer's cache declaration.

    Attributes:
        kind: what is kept.
        num_kv_heads: KV heads.
        key_dim: elements of one head's key.
        value_dim: elements of one head's value; of a LATENT cache, the first of the key, kept once.
        window: for SLIDING, how many positions (the current one included) a query sees; else None.
        state: for STATE, the shapes of the float32 arrays kept for a sequence; else ().
        stripe: of the positions, those that are kept here.
    """

    kind: CacheKind
    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    state: tuple[tuple[int, ...], ...] = ()
    stripe: Stripe = WHOLE_CONTEXT

    def __post_init__(self) -> None:
        if (self.kind is CacheKind.SLIDING) != (self.window is not None):
            raise ValueError(f"window is {self.window} for a {self.kind.value} cache; only sliding caches have one")
        if (self.kind is CacheKind.STATE) != bool(self.state):
            raise ValueError(f"state is {self.state} for a {self.kind.value} cache; only recurrent ones have shapes")

    @property
    def latent(self) -> bool:
        """Whether values are the beginnings of the keys."""
        return self.kind is CacheKind.LATENT

    @property
    def elements_per_token(self) -> int:
        """Kept here of a token; of a context that ranks share, on an average over its positions."""
        all_ranks = self.num_kv_heads * (self.key_dim + (0 if self.latent else self.value_dim))
        return -(-all_ranks // self.stripe.ranks)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table: they keep the same positions.

    Attributes:
        kind, window: as in CacheSpec, equal for all layers of the group.
        layers: indices of the model's layers, ascending.
        elements_per_token: sum over the group's layers.
        optional: whether a prefix can be continued without its entries, as without a drafter's.
    """

    kind: CacheKind
    window: int | None
    layers: tuple[int, ...]
    elements_per_token: int
    optional: bool = False


def group_layers(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Groups layers by (kind, window), in order of first appearance.

    Recurrent layers have no blocks and are in none; a model that has no others gets a group without layers, so that its
    tokens are counted in blocks like everyone's.
    """
    found: dict[tuple[CacheKind, int | None], list[int]] = {}
    for index, spec in enumerate(specs):
        if spec.kind is not CacheKind.STATE:
            found.setdefault((spec.kind, spec.window), []).append(index)
    if not found:
        found[CacheKind.FULL, None] = []
    return tuple(
        CacheGroup(kind, window, tuple(layers), sum(specs[i].elements_per_token for i in layers))
        for (kind, window), layers in found.items()
    )
