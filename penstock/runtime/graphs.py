"""Decode steps recorded once for a number of rows and of tokens of each, then replayed without a launch of each kernel.

A recorded step has fixed buffers. What differs from step to step is copied there in one piece before a replay; unused
rows write to the null block and to a recurrent state that no slot has. Where rows have several tokens, as with drafts,
one that has fewer computes some before its own once more, whose results nobody takes. A replay computes the same as the
layers; steps that fit no recording run layer by layer. Recordings are made between steps, one at a time, and share one
memory pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.protocol import ScheduledTokens
from penstock.kernels.copies import check, refill, upload
from penstock.layers.batch import Batch, GroupTables, LayerCache
from penstock.layers.part import ModelPart
from penstock.models.registry import Model
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.graph_captures import GraphCapture

_WASTE: Final = 4  # a step of n tokens uses recordings of up to 4 n, or up to a few if that is more
_FEW: Final = (8, 64)  # tokens that cost about as much as fewer: of rows of one token, and of several
_DRAFTED: Final = 256  # most tokens of a recording whose rows have several, unless there are more rows
_MOST: Final = 64  # such recordings
_LONGEST: Final = 16  # tokens of a row; kernels plan attention for more in ways that depend on contexts
_SHARE: Final = 0.1  # of the time that captures may take while requests run
_ALIGNMENT: Final = 16
log = logging.getLogger(__name__)


def padded_sizes(most: int) -> tuple[int, ...]:
    """Rows that steps are padded to: 1, 2, 4, multiples of 8 to 64, of 16 to 256 and of 32 beyond; and `most`."""
    usual = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32))
    return (*(size for size in usual if size < most), most)


def padded_queries(most: int) -> tuple[int, ...]:
    """Tokens of a row that steps are padded to, the last known one and drafts: up to 9 all, then some; and `most`."""
    most = min(max(most, 1), _LONGEST)
    return (*(size for size in (*range(1, 10), 12) if size < most), most)


class _Size(NamedTuple):
    """How many rows a recorded step has, and tokens of each."""

    rows: int
    queries: int

    @property
    def tokens(self) -> int:
        return self.rows * self.queries


class _Fields:
    """Named arrays side by side in one buffer, on the host and on the device."""

    def __init__(self, **counts: tuple[int, type[np.int64] | type[np.int32]]) -> None:
        self._places: dict[str, tuple[int, int, type[np.int64] | type[np.int32]]] = {}
        self.size = 0
        for name, (count, kind) in counts.items():
            end = self.size + count * kind().itemsize
            self._places[name] = self.size, end, kind
            self.size = -(-end // _ALIGNMENT) * _ALIGNMENT

    def arrays(self, memory: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        return {name: memory[begin:end].view(kind) for name, (begin, end, kind) in self._places.items()}

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        types = {np.int64: torch.int64, np.int32: torch.int32}
        return {name: memory[begin:end].view(types[kind]) for name, (begin, end, kind) in self._places.items()}


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded step.

    Attributes:
        size: of the step.
        fields, inputs: what is copied to the device before a replay, [fields.size] uint8.
        plans: fixed attention plans, by group.
        replay: launches it.
        logits: [rows · tokens of a row, vocab] float32, what it computes.
    """

    size: _Size
    fields: _Fields
    inputs: Tensor
    plans: dict[int, Any]
    replay: Callable[[], None]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Recordable:
    """What steps are to be recorded.

    Attributes:
        rows: numbers of them, ascending.
        tokens: positions that rows may have in each cache group in all; those that rows share count for each.
        queries: tokens of every row, ascending. Recurrent states are kept behind one token alone.
        padded: whether rows of fewer tokens may be among those of more: all that lies before them is still there.
    """

    rows: Sequence[int]
    tokens: Sequence[int]
    queries: Sequence[int] = (1,)
    padded: bool = False

    def sizes(self) -> list[_Size]:
        """Ascending by tokens."""
        room = max(_DRAFTED, self.rows[-1])
        found = (_Size(rows, many) for many in self.queries for rows in self.rows if many == 1 or rows * many <= room)
        return sorted(found, key=lambda size: (size.tokens, size.queries))


class DecodeGraphs:
    """The recorded steps of one model.

    Attributes:
        longest: tokens of a row at most.
        failed: sizes that could not be recorded.
    """

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCache],
        builder: BatchBuilder,
        capture: GraphCapture,
        recordable: Recordable,
        taps: Sequence[str] = (),
    ) -> None:
        """Records nothing yet.

        Args:
            model, caches, builder: of the steps.
            capture: how to capture.
            recordable: what steps are.
            taps: hidden states that are kept of every step, as in `layers.part.ModelPart`.
        """
        self._model = model
        self._caches = caches
        self._builder = builder
        self._capture = capture
        self._sizes = recordable.sizes()
        self.longest = recordable.queries[-1]
        self._capacity = tuple(recordable.tokens)
        self._padded = recordable.padded
        self._part = ModelPart(taps=tuple(taps))
        self._tapped: dict[str, Tensor] = {}  # [tokens of the largest step, hidden_size]
        self._places: Tensor | slice = slice(0)  # of the last step's tokens
        self._axes = model.position_axes
        self._graphs: dict[_Size, _Graph] = {}
        self.failed: set[_Size] = set()
        self._asked: _Size | None = None
        self._answered = 0
        self._next = 0.0
        assert builder.device is not None  # what is recorded are steps of torch
        self._device = builder.device
        self._free_row, self._width = builder.tables[0].shape  # behind the last slot; it has null blocks
        self._free_state = next((len(cache.state[0]) for cache in caches if cache.state), 0) - 1
        self._tables: list[Tensor] = []

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self, spans: Sequence[ScheduledTokens]) -> Tensor | None:
        """Logits [tokens of the step, vocab] float32, valid until the next; None if no recording fits the step.

        Every span has to be sampled and to want the logits of all its tokens and nothing else.
        """
        if self._builder.adapted(spans) or any(span.parents for span in spans):
            return None
        lens = np.array([len(span.tokens) for span in spans])
        size = self._find(lens, min(span.start + len(span.tokens) for span in spans))
        if size is None:
            return None
        graph = self._graphs[size]
        memory = np.zeros(graph.fields.size, np.uint8)
        if not self._fill(graph, graph.fields.arrays(memory), spans, lens):
            return None
        refill(graph.inputs, memory)
        graph.replay()
        tokens = int(lens.sum())
        if tokens == len(spans) * size.queries:
            self._places = slice(tokens)
        else:
            self._places = upload(np.flatnonzero(_own(lens, size.queries)), self._device)
        return graph.logits[self._places]

    def tap(self, name: str) -> Tensor:
        """Hidden states [tokens, hidden_size] of the last step that was run, valid until the next."""
        return self._tapped[name][self._places]

    def _find(self, lens: npt.NDArray[np.int64], shortest: int) -> _Size | None:
        """The smallest recording that is not much too large; a better size that is missing is noted for capture.

        Args:
            lens: tokens of each row.
            shortest: tokens of the row that has the fewest in the cache, once the step has written its own.
        """
        longest, tokens = int(lens.max()), int(lens.sum())
        most = max(_WASTE * tokens, _FEW[longest > 1])
        alike = tokens == longest * len(lens)
        roomy = shortest if self._padded and longest > 1 else 0
        fitting = [
            size
            for size in self._sizes
            if size.rows >= len(lens) and size.tokens <= most
            if (alike and size.queries == longest) or longest <= size.queries <= roomy
        ]
        if fitting and fitting[0] not in self._graphs and not self._full(fitting[0]):
            self._asked = fitting[0]
        return next((size for size in fitting if size in self._graphs), None)

    def _fill(
        self,
        graph: _Graph,
        out: dict[str, npt.NDArray[Any]],
        spans: Sequence[ScheduledTokens],
        lens: npt.NDArray[np.int64],
    ) -> bool:
        """Writes a step's inputs; False, and nothing is changed, if attention has no room for its contexts."""
        rows, queries = graph.size
        count, contexts = len(spans), np.full(rows, queries)
        contexts[:count] = [span.start + len(span.tokens) for span in spans]
        if not all(plan.fill(contexts, out[f"plan{g}"]) for g, plan in graph.plans.items()):
            return False
        builder = self._builder
        columns = builder.columns(spans)
        own = np.flatnonzero(_own(lens, queries))
        out["sources"][:] = self._free_row
        given = builder.sources([token for span in spans for token in span.tokens])
        out["sources"][own], out["known"][own] = given
        positions = contexts[:, None] - queries + np.arange(queries)
        out["positions"][:] = positions.reshape(-1) if self._axes == 1 else 0
        out["rows"][:] = self._free_row
        out["rows"][:count] = columns.slots
        out["prompt_tokens"][:count] = columns.prompt_tokens
        out["draft_tokens"][:count] = columns.draft_tokens
        out["context_len"][:] = contexts
        if self._axes > 1:
            placed = builder.places(columns.slots.repeat(queries), positions[:count].reshape(-1))
            out["positions"].reshape(self._axes, -1)[:, : count * queries] = placed
        self._fill_tables(out, columns.slots, columns.slots.repeat(lens), positions[:count].reshape(-1)[own], own)
        return True

    def _fill_tables(
        self,
        out: dict[str, npt.NDArray[Any]],
        rows: npt.NDArray[np.int64],
        token_rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        own: npt.NDArray[np.int64],
    ) -> None:
        """Writes the slots of the step's own tokens, and what has changed in the tables of the rows."""
        builder, device = self._builder, self._device
        logical, offset = np.divmod(positions, builder.block_size)
        for g, table in enumerate(builder.tables):
            out[f"slot{g}"][own] = table[token_rows, logical].astype(np.int64) * builder.block_size + offset
            places, blocks = builder.changes(g, rows.tolist())
            out[f"places{g}"][:] = self._free_row * table.shape[1]
            if len(places) <= len(out[f"places{g}"]):
                out[f"places{g}"][: len(places)], out[f"blocks{g}"][: len(places)] = places, blocks
            else:
                self._tables[g].view(-1)[upload(places, device)] = upload(blocks, device)

    # -- recording ----------------------------------------------------------------------------------------------------

    def note_answer(self) -> None:
        """A request is over: recordings may be made from now on."""
        self._answered = 1

    def capture_missed(self) -> None:
        """While requests run: captures the size that a step lacked, unless captures took too much time lately."""
        if self._asked and self._answered and perf_counter() >= self._next:
            size, self._asked = self._asked, None
            if size not in self._graphs and size not in self.failed:
                started = perf_counter()
                self._record(size)
                ended = perf_counter()
                self._next = ended + (ended - started) * (1 / _SHARE - 1)

    def capture_next(self) -> bool:
        """While nothing runs: captures the largest size that is left; returns whether there are more.

        Those of several tokens a row are captured for the fewest rows alone, others when a step lacks them.
        """
        fewest = self._sizes[0].rows
        wanted = [size for size in self._sizes if size.queries == 1 or size.rows == fewest or size == self._asked]
        left = [size for size in wanted if size not in self._graphs and size not in self.failed]
        if not left or not self._answered:
            return False
        self._record(left[-1])
        return len(left) > 1

    def dry_run(self) -> None:
        """Makes the largest recordings to see what memory they take: as much as all of them, since they share a pool.

        Rows have tables and plans, tokens have activations: that of most rows may take more than that of most tokens.
        """
        for size in dict.fromkeys((max(self._sizes, key=lambda size: size.rows), self._sizes[-1])):
            self._make(size)

    def _full(self, size: _Size) -> bool:
        """Whether there are so many recordings of that kind that there are to be no more."""
        return size.queries > 1 and sum(made.queries > 1 for made in self._graphs) >= _MOST

    def _record(self, size: _Size) -> None:
        started = perf_counter()
        what = f"{size.rows} rows" + (f" of {size.queries} tokens" if size.queries > 1 else "")
        try:
            self._graphs[size] = self._make(size)
            log.info("steps of %s are recorded, in %.0f ms", what, 1e3 * (perf_counter() - started))
        except Exception:
            check(self._device)
            if not self.failed:
                log.warning("steps of %s cannot be recorded; they run layer by layer", what, exc_info=True)
            self.failed.add(size)

    def _allocate(self) -> None:
        """Allocates what recordings share, when the first is made: block tables, those of a step's rows, logits."""
        rows, tokens = max(size.rows for size in self._sizes), self._sizes[-1].tokens
        kind: dict[str, Any] = {"dtype": torch.int32, "device": self._device}
        self._logits = torch.empty(tokens, self._model.vocab_size, device=self._device)
        self._all = torch.arange(tokens, device=self._device)
        self._taken = [torch.zeros(rows, self._width, **kind) for _ in self._capacity]
        self._tables = [torch.zeros(self._free_row + 1, self._width, **kind) for _ in self._capacity]

    def _make(self, size: _Size) -> _Graph:
        if not self._tables:
            self._allocate()
        plans = self._fixed_plans(size)
        rows, queries = size
        tokens, groups = size.tokens, range(len(self._tables))
        changes = rows * (1 + -(-queries // self._builder.block_size))
        fields = _Fields(
            sources=(tokens, np.int64),
            known=(tokens, np.int64),
            positions=(tokens * self._axes, np.int64),
            rows=(rows, np.int64),
            **{f"slot{g}": (tokens, np.int64) for g in groups},
            **{f"places{g}": (changes, np.int64) for g in groups},
            **{f"blocks{g}": (changes, np.int32) for g in groups},
            **dict.fromkeys(("context_len", "prompt_tokens", "draft_tokens"), (rows, np.int32)),
            **{f"plan{g}": (plan.size, np.int32) for g, plan in plans.items()},
        )
        inputs = torch.zeros(fields.size, dtype=torch.uint8, device=self._device)
        given = fields.tensors(inputs)
        batch = self._batch(size, given, plans)
        for g, plan in plans.items():
            plan.place(given[f"plan{g}"], batch.query_start, batch.context_len, batch.groups[g].block_table)
        logits, every = self._logits[:tokens], self._all[:tokens]

        def run() -> None:
            for g, table in enumerate(self._tables):
                table.view(-1)[given[f"places{g}"]] = given[f"blocks{g}"]
                torch.index_select(table, 0, given["rows"], out=batch.groups[g].block_table)
            ids = self._builder.samples.index_select(0, given["sources"]).add_(given["known"])
            given_now = replace(batch, token_ids=ids, state_slot=self._state_slots(given["rows"]))
            output = self._model.run(given_now, self._caches, self._part)
            logits.copy_(self._model.logits(output.states.hidden, every))
            for name, hidden in output.taps.items():
                self._tapped[name][:tokens].copy_(hidden)

        memory = np.zeros(fields.size, np.uint8)
        graph = _Graph(size, fields, inputs, plans, run, logits)
        assert self._fill_free(graph, fields.arrays(memory))
        refill(inputs, memory)
        return replace(graph, replay=self._capture.capture(run))

    def _fill_free(self, graph: _Graph, out: dict[str, npt.NDArray[Any]]) -> bool:
        """Inputs of a step that has free rows only."""
        contexts = np.full(graph.size.rows, graph.size.queries)
        out["rows"][:] = out["sources"][:] = self._free_row
        out["context_len"][:] = contexts
        for g, table in enumerate(self._builder.tables):
            out[f"places{g}"][:] = self._free_row * table.shape[1]
        return all(plan.fill(contexts, out[f"plan{g}"]) for g, plan in graph.plans.items())

    def _batch(self, size: _Size, given: dict[str, Tensor], plans: dict[int, Any]) -> Batch:
        """The batch of a recording, made of views of its inputs."""
        rows, queries = size
        lens = (queries,) * rows
        return Batch(
            token_ids=given["known"],
            positions=given["positions"].view(self._axes, -1),
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=self._device) * queries,
            context_len=given["context_len"],
            groups=tuple(GroupTables(taken[:rows], given[f"slot{g}"]) for g, taken in enumerate(self._taken)),
            prompt_tokens=given["prompt_tokens"],
            draft_tokens=given["draft_tokens"],
            logit_rows=self._all[: size.tokens],
            query_lens=lens,
            context_lens=lens,
            state_slot=self._state_slots(given["rows"]),
            plans=plans,
        )

    def _state_slots(self, rows: Tensor) -> Tensor:
        """Where rows keep recurrent states; unused rows, which start anew with every step, share the last place."""
        return torch.where(rows == self._free_row, self._free_state, rows)

    def _fixed_plans(self, size: _Size) -> dict[int, Any]:
        """Attention plans for a size: a step of unused rows is run layer by layer to see which plans layers ask for."""
        rows, queries = size
        device, tokens = self._device, size.tokens
        names = ("known", *(f"slot{g}" for g in range(len(self._tables))))
        given = {name: torch.zeros(tokens, dtype=torch.int64, device=device) for name in names}
        given["positions"] = torch.zeros(tokens * self._axes, dtype=torch.int64, device=device)
        given |= {
            name: torch.zeros(rows, dtype=torch.int32, device=device) for name in ("prompt_tokens", "draft_tokens")
        }
        given["context_len"] = torch.full((rows,), queries, dtype=torch.int32, device=device)
        given["rows"] = torch.full((rows,), self._free_row, device=device)
        found: dict[int, Any] = {}
        for taken in self._taken:
            taken[:rows] = 0
        output = self._model.run(self._batch(size, given, found), self._caches, self._part)
        for name, hidden in output.taps.items():
            if name not in self._tapped:
                self._tapped[name] = hidden.new_empty(self._sizes[-1].tokens, hidden.shape[1])
        width = self._width * self._builder.block_size
        return {g: plan.fixed(min(self._capacity[g], rows * width)) for g, plan in found.items()}


def _own(lens: npt.NDArray[np.int64], queries: int) -> npt.NDArray[np.bool_]:
    """Which tokens of a recorded step [rows · queries] are those of the step that is run: the last ones of each row."""
    found: npt.NDArray[np.bool_] = np.arange(queries) >= queries - lens[:, None]
    return found.reshape(-1)
