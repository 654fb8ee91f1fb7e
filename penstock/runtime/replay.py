"""Runs native programs of steps on arrays, without torch: how every recording runs, and the executor of kept ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu.step_program import DecodeProgram, StepProgram, mask_kinds

if TYPE_CHECKING:
    from penstock.layers.batch import Batch
    from penstock.runtime.batch_builder import BatchBuilder

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def run_batch(program: StepProgram, batch: Batch) -> None:
    """Runs the program of a forward pass on a step's batch, of arrays or of tensors on the CPU."""
    program.run(
        batch.token_ids,
        batch.positions,
        batch.query_start,
        batch.context_len,
        batch.prompt_tokens,
        groups=[(group.block_table, group.slot, group.context_len) for group in batch.groups],
        logit_rows=batch.logit_rows,
        state_slot=batch.state_slot,
        state_after=batch.state_after,
        adapter_slot=batch.adapter_slot,
        adapter_scale=batch.adapter_scale,
        masks=mask_kinds([mask.value for mask in batch.masks]),
        spans=batch.spans,
        token_types=batch.token_types,
        injected=None if batch.injected is None else (batch.injected.rows, batch.injected.values),
    )


def decode_program(
    body: StepProgram, head: StepProgram, logits: tuple[int, int], most: int, builder: BatchBuilder
) -> DecodeProgram | None:
    """What runs the builder's decode steps on these programs; None where its batches tell more than such steps have.

    `logits`: (value, width) in `head`, at most `most` rows.
    """
    if not builder.plain:
        return None
    found = head.floats(logits[0], most, logits[1])
    return DecodeProgram(body, head, found, builder.tables, builder.used, builder.block_size)


class ReplayExecutor:
    """As `runtime.executor.Executor`, of two programs: the forward pass, and logits of its results. Gives arrays."""

    def __init__(
        self,
        body: StepProgram,
        head: StepProgram,
        results: tuple[tuple[int, int], tuple[int, int]],
        max_tokens: int,
        max_logit_rows: int,
        keeps: Any,
    ) -> None:
        """`results`: (value, width) of the final hidden states in `body` and of the logits in `head`.

        `keeps` is what the programs' memory belongs to.
        """
        self._body, self._head = body, head
        self._hidden, self._logits = results
        self._keeps = keeps
        self._rows = 0
        self._all: Rows = np.arange(max_tokens, dtype=np.int64)
        self._most = max_logit_rows
        self.fast = body.fast
        arena = (body.arena_bytes + head.arena_bytes) >> 20
        self.describe = f"recorded: {body.num_ops + head.num_ops} native ops in an arena of {arena} MiB"

    def forward(self, batch: Batch) -> None:
        """Runs a step and writes its keys and values."""
        self._rows = len(batch.logit_rows)
        run_batch(self._body, batch)

    def decoding(self, builder: BatchBuilder) -> DecodeProgram | None:
        """As `Executor.decoding`."""
        return decode_program(self._body, self._head, self._logits, self._most, builder)

    def hidden(self) -> Floats:
        """The step's final hidden states of its `logit_rows`, [L, hidden_size]; valid until the next step."""
        return self._body.floats(self._hidden[0], self._rows, self._hidden[1])

    def logits(self, rows: Rows | None = None) -> Floats:
        """Logits [n, vocab] float32 of the last `logit_rows[rows]`, or of all; valid until the next."""
        if rows is None:
            rows = self._all[: self._rows]
        if len(rows) <= self._most:
            return self._of(rows)
        parts = (rows[begin : begin + self._most] for begin in range(0, len(rows), self._most))
        return np.concatenate([self._of(part).copy() for part in parts])

    def _of(self, rows: Rows) -> Floats:
        self._head.run_on(rows)
        return self._head.floats(self._logits[0], len(rows), self._logits[1])
