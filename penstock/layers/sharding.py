"""What layers need to know to take their share of a model that several ranks compute: tensor and expert parallel.

A pass over a declared model, before it is loaded: each layer that can be shared changes what it declares, and how it
puts the ranks' results together. Those that cannot are computed whole by every rank, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.config.cache_spec import Stripe
from penstock.parallel.ranks import Ranks

if TYPE_CHECKING:
    from penstock.layers.decoder import DecoderModel
    from penstock.layers.weight import Layer, Weight

TABLE_UNIT = 64  # rows of a table that stay together: packings keep as many in one panel


class Columns(NamedTuple):
    """A rank's run of the inputs of a weight whose inputs ranks share.

    Attributes:
        first, end: inputs.
        ends: of its segments, counted from `first`.
        place: number of its first segment, and of all segments of the weight.
        widths: inputs of every rank.
    """

    first: int
    end: int
    ends: tuple[int, ...]
    place: tuple[int, int]
    widths: tuple[int, ...]

    def of_ranks(self, ranks: range) -> range:
        """The inputs of some neighbouring ranks."""
        first = sum(self.widths[: ranks.start])
        return range(first, first + sum(self.widths[ranks.start : ranks.stop]))

    @property
    def inputs(self) -> npt.NDArray[np.int64]:
        """All of them."""
        return np.arange(self.first, self.end, dtype=np.int64)


@dataclass(slots=True)
class Shards:
    """How a model is shared.

    Attributes:
        ranks: which rank this is.
        group: what the ranks put their results together with (kernels.api); None before there is one.
        segment_ends: where the inputs of a weight are cut, of its checkpoint's format; one end where they cannot be.
        tables: whether embedding and head are shared too.
        adapters: whether layers may have low-rank ones; experts and latent attention are whole in every rank then.
        heads: whether attention is, which it is not where layers read keys and values that others have written.
        copies: experts that a layer's ranks have more often than once, where what each has changes with the load; None
            where each has a run of them for good.
        contexts: neighbouring ranks that share contexts, where they would else keep the same keys and values.
        whole: kinds of layers that every rank computes, and why.
    """

    ranks: Ranks
    group: Any
    segment_ends: Callable[[Weight], tuple[int, ...]]
    tables: bool = True
    adapters: bool = False
    heads: bool = True
    copies: int | None = None
    contexts: int = 1
    whole: dict[str, str] = field(default_factory=dict)

    def columns(self, weight: Weight) -> Columns | None:
        """This rank's run of a weight's inputs; None where there are fewer segments than ranks."""
        ends = self.segment_ends(weight)
        if len(ends) < self.ranks.count:
            return None
        edges = (0, *ends)
        runs = [Ranks(rank, self.ranks.count).run(len(ends)) for rank in range(self.ranks.count)]
        begin, stop = runs[self.ranks.rank]
        first = edges[begin]
        own = tuple(end - first for end in ends[begin:stop])
        widths = tuple(edges[last] - edges[start] for start, last in runs)
        return Columns(first, edges[stop], own, (begin, len(ends)), widths)

    @property
    def stripe(self) -> Stripe:
        """Of a context that ranks share, this one's positions."""
        return Stripe(self.ranks.rank % self.contexts, self.contexts)

    def neighbours(self, rank: int) -> range:
        """The ranks that share contexts with this one, itself included."""
        first = rank // self.contexts * self.contexts
        return range(first, first + self.contexts)

    def deals(self, rows: int) -> bool:
        """Whether ranks share a table of so many rows."""
        return self.tables and -(-rows // TABLE_UNIT) >= self.ranks.count

    def table_runs(self, rows: int) -> list[tuple[int, int]]:
        """The ranks' runs of a table's rows: first, and last plus one."""
        units = -(-rows // TABLE_UNIT)
        runs = (Ranks(rank, self.ranks.count).run(units) for rank in range(self.ranks.count))
        return [(first * TABLE_UNIT, min(rows, end * TABLE_UNIT)) for first, end in runs]

    def keep_whole(self, layer: Layer, why: str) -> None:
        """Notes that every rank computes such layers."""
        self.whole.setdefault(type(layer).__name__, why)


def shard_model(model: DecoderModel, shards: Shards) -> None:
    """Has a declared model's layers take a rank's share, as far as they can be shared."""
    shards.heads = all(block.attention.spec is not None for block in model.blocks)
    shapes = {id(weight): weight.shape for weight in model.weights()}
    for layer in model.walk():
        layer.shard(shards)
    for layer in (part for block in model.blocks for part in _parts(block)):
        packed = [weight for weight in layer.weights() if weight.pack is not None]
        if packed and all(weight.shape == shapes[id(weight)] for weight in packed):
            shards.keep_whole(layer, "its sums and states are not cut")
    model.kept_whole = dict(shards.whole)
    model.declare_caches()


def _parts(block: object) -> Iterator[Layer]:
    """The layers of a block that compute side by side or one after the other."""
    for part in vars(block).values():
        if hasattr(part, "first") and hasattr(part, "second"):
            yield from (part.first, part.second)
        elif hasattr(part, "weights"):
            yield part


def rows_of(units: Iterable[int], size: int) -> npt.NDArray[np.int64]:
    """Rows of units of `size` rows each."""
    starts = np.array([*units], np.int64) * size
    return (starts[:, None] + np.arange(size, dtype=np.int64)).reshape(-1)
