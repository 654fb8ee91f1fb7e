"""What a step's attention is cut into: tiles of queries, and units of parts of the context for programs to take."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.copies import upload
from penstock.kernels.reference.attention import visible
from penstock.kernels.triton.attention_shapes import LONG, SHORT_QUERIES

Numbers = npt.NDArray[np.int64]
FIELDS = 5  # of a unit: row, first query, first part, parts, place of its sums (-1: there is one part, which is all)
WAVES = 4  # programs a multiprocessor, so that none waits long for the last


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
class AttentionPlan:
    """One step and cache group, for all layers.

    Attributes:
        query_start, context_len, block_table: as given, on the device.
        classes: of the rows, LONG or the power of two that bounds their queries.
        kind: WINDOW and SEEN of a Shape.
        window: as given, 0 for none.
        seen: [T, 2] int32 on the device, first position and end of what each query sees; None where all are causal.
    """

    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    classes: tuple[int, ...]
    kind: tuple[int, bool]
    window: int
    seen: Tensor | None
    _lens: Numbers
    _contexts: Numbers
    _of_class: Numbers
    _bounds: Numbers | None
    _made: dict[tuple[int, ...], Tiles] = field(default_factory=dict)

    def tiles(self, kind: int, queries: int, part: int, programs: int) -> Tiles:
        """Tiles of rows of a class: of so many queries, in parts of so many positions, each for so many programs."""
        key = kind, queries, part, programs
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._make(*key)
        return found

    def _make(self, kind: int, queries: int, part: int, programs: int) -> Tiles:
        rows = np.flatnonzero(self._of_class == kind)
        lens = self._lens[rows]
        counts = -(-lens // queries)
        row = rows.repeat(counts)
        first = (np.arange(len(row)) - (counts.cumsum() - counts).repeat(counts)) * queries
        low, end = self._reach(row, first, np.minimum(first + queries, self._lens[row]))
        if kind == LONG:
            order = np.argsort(low - end, kind="stable")  # the longest first
            zero = np.zeros_like(row)
            return self._upload(np.stack((row, first, zero, zero + 1, zero - 1), axis=1)[order], None, 0)
        first_part = low // part
        parts = np.maximum(-(-end // part) - first_part, 1)
        kept = np.where(parts > 1, parts, 0)
        slot = np.where(parts > 1, kept.cumsum() - kept, -1)
        whole = np.stack((row, first, first_part, parts, slot), axis=1)
        each = -(-int(parts.sum()) * programs // (WAVES * _multiprocessors(self.block_table.device)))
        times = -(-parts // each)
        skipped = (np.arange(times.sum()) - (times.cumsum() - times).repeat(times)) * each
        units = whole.repeat(times, axis=0)
        units[:, 2] += skipped
        units[:, 3] = np.minimum(units[:, 3] - skipped, each)
        units[:, 4] += np.where(units[:, 4] < 0, 0, skipped)
        return self._upload(units, whole[parts > 1], int(kept.sum()))

    def _reach(self, row: Numbers, first: Numbers, stop: Numbers) -> tuple[Numbers, Numbers]:
        """First position and end of what the queries [first, stop) of each row see together."""
        if self._bounds is not None:
            token = (self._lens.cumsum() - self._lens)[row] + first
            edges = np.stack((token, token + stop - first), axis=1).reshape(-1)
            padded = np.concatenate((self._bounds, self._bounds[-1:]))
            low, end = np.minimum.reduceat(padded[:, 0], edges)[::2], np.maximum.reduceat(padded[:, 1], edges)[::2]
            return low, end
        place = self._contexts[row] - self._lens[row] + first
        end = place + stop - first
        if not self.window:
            return np.zeros_like(place), end
        return place - place % self.window if self.kind[0] == 2 else np.maximum(place + 1 - self.window, 0), end

    def _upload(self, units: Numbers, split: Numbers | None, slots: int) -> Tiles:
        both = units if split is None else np.concatenate((units, split))
        on_device = upload(both.astype(np.int32), self.block_table.device)
        return Tiles(on_device[: len(units)], on_device[len(units) :] if slots else None, slots)


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
) -> AttentionPlan:
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
    rows = query_start, context_len, block_table
    return AttentionPlan(*rows, classes, (kind, seen is not None), window or 0, seen, lens, contexts, of_class, bounds)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
