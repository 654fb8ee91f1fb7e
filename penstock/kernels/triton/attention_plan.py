"""What a step's attention is cut into: tiles of queries, and units of parts of the context for programs to take."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.copies import upload
from penstock.kernels.reference.attention import visible
from penstock.kernels.triton.attention_shapes import LONG, SHORT_QUERIES

Numbers = npt.NDArray[np.int64]
FIELDS = 5  # of a unit: row, first query, first part, parts, place of its sums (-1: there is one part, which is all)
NO_QUERY = 1 << 30  # first query of a tile that has none


@dataclass(frozen=True, slots=True)
class TileKey:
    """What tiles are asked for: arguments of `TritonAttentionPlan.tiles`."""

    kind: int
    queries: int
    part: int
    programs: int
    waves: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launches for rows of one class.

    Attributes:
        units: [n, FIELDS] int32.
        split: those whole tiles, [n, FIELDS] int32, whose parts are to be joined; None if there are none.
        slots: parts of which sums are kept.
    """

    units: Tensor
    split: Tensor | None
    slots: int


@dataclass(frozen=True, slots=True)
class TritonAttentionPlan:
    """One step and cache group, for all layers.

    Attributes:
        query_start, context_len, block_table: as given, on the device.
        classes: of the rows, LONG or the power of two that bounds their queries.
        kind: WINDOW and SEEN of an AttentionShape.
        window: as given, 0 for none.
        lens, contexts: the rows' queries, and positions they have in the cache.
        seen: [T, 2] int32 on the device, first position and end of what each query sees; None where all are causal.
    """

    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    classes: tuple[int, ...]
    kind: tuple[int, bool]
    window: int
    seen: Tensor | None
    lens: Numbers
    contexts: Numbers
    _of_class: Numbers
    _bounds: Numbers | None
    _made: dict[TileKey, Tiles] = field(default_factory=dict)

    def tiles(self, kind: int, queries: int, part: int, programs: int, waves: int) -> Tiles:
        """Tiles of rows of a class: of so many queries, in parts of so many positions, each for so many programs.

        A multiprocessor should get about `waves` programs.
        """
        key = TileKey(kind, queries, part, programs, waves)
        found = self._made.get(key)
        if found is None:
            units, split, slots = self.cut(key)
            both = units if split is None else np.concatenate((units, split))
            here = upload(both.astype(np.int32), self.block_table.device)
            found = self._made[key] = Tiles(here[: len(units)], here[len(units) :] if slots else None, slots)
        return found

    def cut(self, key: TileKey) -> tuple[Numbers, Numbers | None, int]:
        """`Tiles` on the host, [n, FIELDS] int64 each."""
        queries, part = key.queries, key.part
        rows = np.flatnonzero(self._of_class == key.kind)
        lens = self.lens[rows]
        counts = -(-lens // queries)
        row = rows.repeat(counts)
        first = (np.arange(len(row)) - (counts.cumsum() - counts).repeat(counts)) * queries
        low, end = self._reach(row, first, np.minimum(first + queries, self.lens[row]))
        if key.kind == LONG:
            order = np.argsort(low - end, kind="stable")  # the longest first
            zero = np.zeros_like(row)
            return np.stack((row, first, zero, zero + 1, zero - 1), axis=1)[order], None, 0
        first_part = low // part
        parts = np.maximum(-(-end // part) - first_part, 1)
        kept = np.where(parts > 1, parts, 0)
        slot = np.where(parts > 1, kept.cumsum() - kept, -1)
        whole = np.stack((row, first, first_part, parts, slot), axis=1)
        usual = int(parts.sum()) * key.programs / (key.waves * _multiprocessors(self.block_table.device))
        times = np.minimum(parts, np.maximum(1, np.rint(parts / usual))).astype(np.int64)
        units = whole.repeat(times, axis=0)
        of = times.repeat(times)
        parts = parts.repeat(times)
        number = np.arange(len(units)) - (times.cumsum() - times).repeat(times)
        begin = number * parts // of
        units[:, 2] += begin
        units[:, 3] = (number + 1) * parts // of - begin
        units[:, 4] += np.where(units[:, 4] < 0, 0, begin)
        return units, whole[kept > 0], int(kept.sum())

    def _reach(self, row: Numbers, first: Numbers, stop: Numbers) -> tuple[Numbers, Numbers]:
        """First position and end of what the queries [first, stop) of each row see together."""
        if self._bounds is not None:
            token = (self.lens.cumsum() - self.lens)[row] + first
            edges = np.stack((token, token + stop - first), axis=1).reshape(-1)
            padded = np.concatenate((self._bounds, self._bounds[-1:]))
            low, end = np.minimum.reduceat(padded[:, 0], edges)[::2], np.maximum.reduceat(padded[:, 1], edges)[::2]
            return low, end
        place = self.contexts[row] - self.lens[row] + first
        end = place + stop - first
        if not self.window:
            return np.zeros_like(place), end
        return place - place % self.window if self.kind[0] == 2 else np.maximum(place + 1 - self.window, 0), end

    def fixed(self, tokens: int) -> FixedPlan:
        """A plan for every step of as many rows with as many queries, whatever their contexts.

        Args:
            tokens: most positions of the cache that such a step attends to, counted for each row.

        Raises:
            ValueError: rows have many queries, or masks of their own.
        """
        if self.seen is not None or LONG in self.classes:
            raise ValueError("only causal rows of few queries have a fixed plan")
        return FixedPlan(self, tuple(self._made), tokens)


class FixedPlan:
    """A TritonAttentionPlan whose tensors keep their places, sizes and meanings, for launches that are recorded once.

    Attributes:
        query_start, context_len, block_table, classes, kind, window, seen: as of TritonAttentionPlan; those on the
            device are filled by others before each step.
        size: int32 elements that `fill` writes.
    """

    def __init__(self, plan: TritonAttentionPlan, keys: tuple[TileKey, ...], tokens: int) -> None:
        """`keys`: what tiles were asked for of `plan`, which is like all steps but for its contexts."""
        self.query_start = plan.query_start
        self.context_len = plan.context_len
        self.block_table = plan.block_table
        self.classes = plan.classes
        self.kind = plan.kind
        self.window = plan.window
        self.seen = None
        self._plan = plan
        self._room: dict[TileKey, tuple[int, int, int]] = {}
        for key in keys:
            tiles = int((-(-plan.lens // key.queries)).sum())
            spread = -(-key.waves * _multiprocessors(plan.block_table.device) // key.programs)
            self._room[key] = (
                tiles + spread,
                tiles,
                (tokens // key.part + 2 * len(plan.lens)) * -(-tiles // len(plan.lens)),
            )
        self.size = sum(FIELDS * (units + split) for units, split, _ in self._room.values())
        self._made: dict[TileKey, Tiles] = {}

    def place(self, memory: Tensor, query_start: Tensor, context_len: Tensor, block_table: Tensor) -> None:
        """Takes [size] int32 on the device, where what `fill` writes will lie, and the places of the rows' facts."""
        self.query_start = query_start
        self.context_len = context_len
        self.block_table = block_table
        begin = 0
        for key, (units, split, slots) in self._room.items():
            both = memory[begin : begin + FIELDS * (units + split)].view(-1, FIELDS)
            self._made[key] = Tiles(both[:units], both[units:], slots)
            begin += both.numel()

    def tiles(self, kind: int, queries: int, part: int, programs: int, waves: int) -> Tiles:
        """As TritonAttentionPlan.tiles, for those that were foreseen."""
        return self._made[TileKey(kind, queries, part, programs, waves)]

    def fill(self, context_lens: Numbers, out: npt.NDArray[np.int32]) -> bool:
        """Writes [size] numbers for rows of these contexts; False if they are too long together for the room there is.

        Units that are left over have no parts, and tiles no queries.
        """
        plan, begin = replace(self._plan, contexts=context_lens), 0
        for key, (most_units, most_split, most_slots) in self._room.items():
            units, split, slots = plan.cut(key)
            if slots > most_slots or len(units) > most_units:
                return False
            both = out[begin : begin + FIELDS * (most_units + most_split)].reshape(-1, FIELDS)
            both[len(units) :] = 0
            both[: len(units)] = units
            both[most_units:, 1] = NO_QUERY
            if split is not None:
                both[most_units : most_units + len(split)] = split
            begin += both.size
        return True


def make_plan(
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    window: int | None,
    masks: Sequence[str] = (),
    spans: Tensor | None = None,
    chunked: bool = False,
) -> TritonAttentionPlan:
    """Arguments as of kernels.api.PlanAttention."""
    lens, contexts = np.array(query_lens, np.int64), np.array(context_lens, np.int64)
    bounded = np.left_shift(1, np.ceil(np.log2(np.maximum(lens, 1))).astype(np.int64))
    of_class = np.where(lens > SHORT_QUERIES, LONG, np.where(lens == 0, -1, bounded))
    classes = tuple(int(kind) for kind in np.unique(of_class) if kind >= 0)
    seen, bounds = None, None
    if any(mask != "causal" for mask in masks):
        table = visible(query_lens, context_lens, window, masks, spans, chunked)
        bounds, seen = table.numpy(), table.int().to(block_table.device)
    kind = 0 if window is None or seen is not None else 2 if chunked else 1
    return TritonAttentionPlan(
        query_start,
        context_len,
        block_table,
        classes,
        (kind, seen is not None),
        window or 0,
        seen,
        lens,
        contexts,
        of_class,
        bounds,
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
