"""Decode steps recorded once for a number of rows, then replayed without the host's work for every launch.

A recorded step has fixed buffers. What differs from step to step is copied there in one piece before a replay; unused
rows write to the null block and to a recurrent state that no slot has. A replay computes the same as the layers; steps
that fit no recording run layer by layer. Recordings are made between steps, one at a time, and share one memory pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.core.protocol import ScheduledTokens
from penstock.kernels.copies import check, refill, upload
from penstock.layers.batch import Batch, GroupTables, LayerCache
from penstock.layers.part import ModelPart
from penstock.models.registry import Model
from penstock.runtime.batch_builder import BatchBuilder

_WASTE: Final = 4  # a step of n rows uses recordings of up to 4 n rows, or up to 8 if that is more
_SHARE: Final = 0.1  # of the time that captures may take while requests run
_ALIGNMENT: Final = 16
log = logging.getLogger(__name__)


def padded_sizes(most: int) -> tuple[int, ...]:
    """Rows that steps are padded to: 1, 2, 4, multiples of 8 to 64, of 16 to 256 and of 32 beyond; and `most`."""
    usual = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32))
    return (*(size for size in usual if size < most), most)


class GraphCapture(Protocol):
    """How launches are captured."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs `run`, then captures it: what is returned does the same again, on the same tensors."""


class CudaGraphCapture:
    """CUDA graphs. They are captured on a stream of their own, behind what was launched before."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """As GraphCapture; the first run compiles kernels, which cannot be done while capturing.

        It runs where steps do, so that what it frees is theirs: torch keeps freed memory for the stream that had it.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        run()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        except BaseException:
            self._renew()  # torch believes that the pool of a capture that failed is still in use
            raise
        current.wait_stream(self._stream)
        return graph.replay


class InterpretedCapture:
    """Stands in for CUDA graphs where there is no GPU: refuses what they refuse, and runs the function again."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """As GraphCapture."""
        run()
        with _NoReads():  # type: ignore[no-untyped-call]
            run()
        return run


class DryRun:
    """Runs once what would be captured."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """As GraphCapture."""
        run()
        return run


class _NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where the host would read a value that a device computes."""

    READS = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal", "bincount", "unique_dim")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.READS:
            raise RuntimeError(f"{func} reads from the device, which cannot be recorded")
        return func(*args, **(kwargs or {}))


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
        fields, inputs: what is copied to the device before a replay, [fields.size] uint8.
        plans: fixed attention plans, by group.
        replay: launches it.
        logits: [rows · tokens of a row, vocab] float32, what it computes.
    """

    fields: _Fields
    inputs: Tensor
    plans: dict[int, Any]
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """The recorded steps of one model.

    Attributes:
        failed: sizes that could not be recorded.
    """

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCache],
        builder: BatchBuilder,
        capture: GraphCapture,
        sizes: Sequence[int],
        tokens: Sequence[int],
        queries: int = 1,
        taps: Sequence[str] = (),
    ) -> None:
        """Records nothing yet.

        Args:
            model, caches, builder: of the steps.
            capture: how to capture.
            sizes: numbers of rows to record for, ascending.
            tokens: positions that rows may have in each cache group in all; those that rows share count for each.
            queries: tokens of every row. Steps with drafts, which would have more, run layer by layer.
            taps: hidden states that are kept of every step, as in `layers.part.ModelPart`.
        """
        self._model = model
        self._caches = caches
        self._builder = builder
        self._capture = capture
        self._sizes = tuple(sizes)
        self._capacity = tuple(tokens)
        self._queries = queries
        self._part = ModelPart(taps=tuple(taps))
        self._tapped: dict[str, Tensor] = {}  # [tokens of the largest step, hidden_size]
        self._count = 0  # tokens of the last step
        self._axes = model.position_axes
        self._graphs: dict[int, _Graph] = {}
        self.failed: set[int] = set()
        self._asked = self._answered = 0
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
        queries = self._queries
        if len(spans) > self._sizes[-1] or any(len(span.tokens) != queries for span in spans):
            return None
        size = self._find(len(spans))
        if size is None or self._builder.adapted(spans):
            return None
        graph = self._graphs[size]
        memory = np.zeros(graph.fields.size, np.uint8)
        if not self._fill(graph, graph.fields.arrays(memory), spans, size):
            return None
        refill(graph.inputs, memory)
        graph.replay()
        self._count = len(spans) * queries
        return graph.logits[: self._count]

    def tap(self, name: str) -> Tensor:
        """Hidden states [tokens, hidden_size] of the last step that was run, valid until the next."""
        return self._tapped[name][: self._count]

    def _find(self, rows: int) -> int | None:
        """The smallest recording that is not much too large; a better size that is missing is noted for capture."""
        fitting = [size for size in self._sizes if size >= rows]
        if fitting[0] not in self._graphs:
            self._asked = fitting[0]
        return next((size for size in fitting if size in self._graphs and size <= max(_WASTE * rows, 8)), None)

    def _fill(
        self, graph: _Graph, out: dict[str, npt.NDArray[Any]], spans: Sequence[ScheduledTokens], size: int
    ) -> bool:
        """Writes a step's inputs; False, and nothing is changed, if attention has no room for its contexts."""
        queries, count = self._queries, len(spans)
        contexts = np.full(size, queries)
        contexts[:count] = [span.start + queries for span in spans]
        if not all(plan.fill(contexts, out[f"plan{g}"]) for g, plan in graph.plans.items()):
            return False
        builder = self._builder
        columns = builder.columns(spans)
        tokens = count * queries
        out["sources"][:] = self._free_row
        given = builder.sources([token for span in spans for token in span.tokens])
        out["sources"][:tokens], out["known"][:tokens] = given
        positions = np.tile(np.arange(queries), size).reshape(size, queries)
        positions[:count] += columns.starts[:, None]
        out["positions"][:] = positions.reshape(-1) if self._axes == 1 else 0
        out["rows"][:] = self._free_row
        out["rows"][:count] = columns.slots
        out["prompt_tokens"][:count] = columns.prompt_tokens
        out["draft_tokens"][:count] = columns.draft_tokens
        out["context_len"][:] = contexts
        if self._axes > 1:
            placed = builder.places(columns.slots.repeat(queries), positions[:count].reshape(-1))
            out["positions"].reshape(self._axes, -1)[:, :tokens] = placed
        self._fill_tables(out, columns.slots, positions[:count])
        return True

    def _fill_tables(
        self, out: dict[str, npt.NDArray[Any]], rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> None:
        """Writes the slots of positions [R, queries], and what has changed in the tables of the rows."""
        builder, device = self._builder, self._device
        logical, offset = np.divmod(positions, builder.block_size)
        for g, table in enumerate(builder.tables):
            slots = table[rows[:, None], logical].astype(np.int64) * builder.block_size + offset
            out[f"slot{g}"][: slots.size] = slots.reshape(-1)
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
            size, self._asked = self._asked, 0
            if size not in self._graphs and size not in self.failed:
                started = perf_counter()
                self._record(size)
                ended = perf_counter()
                self._next = ended + (ended - started) * (1 / _SHARE - 1)

    def capture_next(self) -> bool:
        """While nothing runs: captures the largest size that is left; returns whether there are more."""
        left = [size for size in self._sizes if size not in self._graphs and size not in self.failed]
        if not left or not self._answered:
            return False
        self._record(left[-1])
        return len(left) > 1

    def dry_run(self) -> None:
        """Makes the largest recording to see what memory it takes: as much as all of them, since they share a pool."""
        self._make(self._sizes[-1])

    def _record(self, size: int) -> None:
        started = perf_counter()
        try:
            self._graphs[size] = self._make(size)
            log.info("steps of %d rows are recorded, in %.0f ms", size, 1e3 * (perf_counter() - started))
        except Exception:
            check(self._device)
            if not self.failed:
                log.warning("steps of %d rows cannot be recorded; they run layer by layer", size, exc_info=True)
            self.failed.add(size)

    def _allocate(self) -> None:
        """Allocates what recordings share, when the first is made: block tables, those of a step's rows, logits."""
        rows, tokens = self._sizes[-1], self._sizes[-1] * self._queries
        kind: dict[str, Any] = {"dtype": torch.int32, "device": self._device}
        self._logits = torch.empty(tokens, self._model.vocab_size, device=self._device)
        self._all = torch.arange(tokens, device=self._device)
        self._starts = torch.arange(rows + 1, **kind) * self._queries
        self._taken = [torch.zeros(rows, self._width, **kind) for _ in self._capacity]
        self._tables = [torch.zeros(self._free_row + 1, self._width, **kind) for _ in self._capacity]

    def _make(self, size: int) -> _Graph:
        if not self._tables:
            self._allocate()
        plans = self._fixed_plans(size)
        tokens, groups = size * self._queries, range(len(self._tables))
        changes = size * (1 + -(-self._queries // self._builder.block_size))
        fields = _Fields(
            sources=(tokens, np.int64),
            known=(tokens, np.int64),
            positions=(tokens * self._axes, np.int64),
            rows=(size, np.int64),
            **{f"slot{g}": (tokens, np.int64) for g in groups},
            **{f"places{g}": (changes, np.int64) for g in groups},
            **{f"blocks{g}": (changes, np.int32) for g in groups},
            **dict.fromkeys(("context_len", "prompt_tokens", "draft_tokens"), (size, np.int32)),
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
        graph = _Graph(fields, inputs, plans, run, logits)
        assert self._fill_free(graph, fields.arrays(memory), size)
        refill(inputs, memory)
        return replace(graph, replay=self._capture.capture(run))

    def _fill_free(self, graph: _Graph, out: dict[str, npt.NDArray[Any]], size: int) -> bool:
        """Inputs of a step that has free rows only."""
        contexts = np.full(size, self._queries)
        out["rows"][:] = out["sources"][:] = self._free_row
        out["context_len"][:] = contexts
        for g, table in enumerate(self._builder.tables):
            out[f"places{g}"][:] = self._free_row * table.shape[1]
        return all(plan.fill(contexts, out[f"plan{g}"]) for g, plan in graph.plans.items())

    def _batch(self, size: int, given: dict[str, Tensor], plans: dict[int, Any]) -> Batch:
        """The batch of a recording, made of views of its inputs."""
        tokens, lens = size * self._queries, (self._queries,) * size
        return Batch(
            token_ids=given["known"],
            positions=given["positions"].view(self._axes, -1),
            query_start=self._starts[: size + 1],
            context_len=given["context_len"],
            groups=tuple(GroupTables(taken[:size], given[f"slot{g}"]) for g, taken in enumerate(self._taken)),
            prompt_tokens=given["prompt_tokens"],
            draft_tokens=given["draft_tokens"],
            logit_rows=self._all[:tokens],
            query_lens=lens,
            context_lens=lens,
            state_slot=self._state_slots(given["rows"]),
            plans=plans,
        )

    def _state_slots(self, rows: Tensor) -> Tensor:
        """Where rows keep recurrent states; unused rows, which start anew with every step, share the last place."""
        return torch.where(rows == self._free_row, self._free_state, rows)

    def _fixed_plans(self, size: int) -> dict[int, Any]:
        """Attention plans for a size: a step of unused rows is run layer by layer to see which plans layers ask for."""
        device, tokens = self._device, size * self._queries
        names = ("known", *(f"slot{g}" for g in range(len(self._tables))))
        given = {name: torch.zeros(tokens, dtype=torch.int64, device=device) for name in names}
        given["positions"] = torch.zeros(tokens * self._axes, dtype=torch.int64, device=device)
        given |= {
            name: torch.zeros(size, dtype=torch.int32, device=device) for name in ("prompt_tokens", "draft_tokens")
        }
        given["context_len"] = torch.full((size,), self._queries, dtype=torch.int32, device=device)
        given["rows"] = torch.full((size,), self._free_row, device=device)
        found: dict[int, Any] = {}
        for taken in self._taken:
            taken[:size] = 0
        output = self._model.run(self._batch(size, given, found), self._caches, self._part)
        for name, hidden in output.taps.items():
            if name not in self._tapped:
                self._tapped[name] = hidden.new_empty(self._sizes[-1] * self._queries, hidden.shape[1])
        width = self._width * self._builder.block_size
        return {g: plan.fixed(min(self._capacity[g], size * width)) for g, plan in found.items()}
