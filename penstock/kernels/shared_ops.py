"""Ops over ranks that compute one model together: what `kernels.api` declares of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.kernels.cache import KvTensors


class TensorGroup(Protocol):
    """Ranks that compute one model together, as ops over them take it.

    Implementations that need more of it say so: native ones take a `kernels.cpu.rank_group.RankGroup`.

    Attributes:
        rank: of this one, below `count`.
        count: of ranks.
    """

    rank: int
    count: int

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, by rank; all have one shape and type."""


class SharedLinear(Protocol):
    """A dense layer whose inputs lie with several ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3)."""

    def __call__(
        self,
        x: Tensor,
        weight: Any,
        group: Any,
        place: tuple[int, int],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        width: int = 0,
    ) -> Tensor:
        """All ranks' x · weightᵀ added, + bias + residual, [T, M] on every rank.

        Where `linear` has the bits of one order (the native library), so has this: segments, as in PackLinear, are
        added in their order, whoever has them.

        Args:
            x: [T, K], this rank's inputs.
            weight: [M, K] from `pack_linear`, of one matrix, cut into this rank's segments; None where it has none.
            group: of the ranks; a `TensorGroup`.
            place: the number of this rank's first segment, and how many all ranks have. Ranks have them in order.
            bias: [M], the same on every rank, as is
            residual: [T, M].
            width: M, where there is no weight.
        """


class GatherColumns(Protocol):
    """Activations whose columns lie with several ranks, such as logits of a vocabulary that is dealt out."""

    def __call__(self, x: Tensor, widths: Sequence[int], group: Any) -> Tensor:
        """x [L, widths[rank]] → every rank's columns side by side, [L, sum of widths], on every rank."""


class SharedAttention(Protocol):
    """Attention over contexts whose positions lie with several ranks, merged as in Milakov & Gimelshein 2018,
    arXiv:1805.02867."""

    def __call__(
        self,
        query: Tensor,
        cache: KvTensors,
        plan: Any,
        scale: float,
        sinks: Tensor | None = None,
        soft_cap: float | None = None,
        slopes: Tensor | None = None,
        *,
        group: Any,
        heads: Sequence[int],
    ) -> Tensor:
        """As PagedAttention, of this rank's heads, with the same bits where its sums have one order.

        Args:
            query: [T, H, D], of this rank's heads.
            cache: whose `stripe` says how many neighbours of the group share contexts, and which of them this is. It
                has the KV heads of all of them.
            plan: from `plan_attention`.
            scale, soft_cap: as in PagedAttention.
            sinks: [H], of this rank's heads.
            slopes: of the heads of all ranks that share contexts.
            group: of the ranks; a `TensorGroup`.
            heads: query heads of every rank of the group, in order of the ranks.
        """


class SharedEmbedding(Protocol):
    """Rows of a table that lie with several ranks."""

    def __call__(self, numbers: Tensor, table: Any, scale: float, first: int, group: Any, width: int = 0) -> Tensor:
        """As `embedding`, on every rank; `table` [V, N] has the rows from `first` on, and is None where it has none.

        `width` is N, where there is no table. Each number is in one rank's table.
        """


class ExpertPlaces(Protocol):
    """Which of several ranks compute which of E experts, in memory that is written between steps, and read in them.

    An expert that several ranks have is computed for each token by one of them.

    Attributes:
        table: int32 [3 * E + 1]: of each expert this rank's place of it among its own, or -1; how many ranks have it;
            and which of them this one is, from 0: it computes tokens whose number, modulo those ranks, is that. The
            last is the number of the table, which all ranks have to be at.
        counts: int64 [E], to which an op adds the tokens of each expert, whoever computes them.
    """

    table: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]


class SharedExperts(Protocol):
    """Experts that lie with several ranks, each of which has some whole ones (GShard, arXiv:2006.16668)."""

    def __call__(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Any,
        down: Any,
        activation: str,
        group: Any,
        first: int,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        alpha: float = 1.702,
        limit: float = 7.0,
        residual: Tensor | None = None,
        gated: bool = True,
        places: ExpertPlaces | None = None,
    ) -> Tensor:
        """As GroupedExperts, on every rank, with the same bits where its sums have one order; without adapters.

        `x`, `weights`, `ids` (of all experts) and `residual` are the same on every rank; gate_up, down and biases are
        of this rank's experts alone, of which there is one at least and whose first has number `first`. Ranks have
        them in order: rank 0 has expert 0. With `places`, `first` is 0, and they tell which experts ranks have.
        """
