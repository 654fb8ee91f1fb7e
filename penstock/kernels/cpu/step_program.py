"""A native program of a step and what a run of it works on. No torch here: memory is taken by its address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu import native

MASKS = ("causal", "bidirectional", "cross", "spans")
Memory = Any
"""An array or a tensor on the CPU, contiguous."""


def address(memory: Memory | None) -> int:
    """Where an array or a tensor lies; 0 for none."""
    if memory is None:
        return 0
    if isinstance(memory, np.ndarray):
        return int(memory.__array_interface__["data"][0])
    return int(memory.data_ptr())


def mask_kinds(masks: Sequence[str]) -> npt.NDArray[np.int32] | None:
    """Masks by number, one a row; None where there are none."""
    return np.array([MASKS.index(mask) for mask in masks], np.int32) if masks else None


class DecodeProgram:
    """Two programs over steps in which every row computes one token and wants its logits: one call fills, one runs.

    What other steps are given by arrays made for each is kept here between steps, at the same addresses.
    """

    def __init__(
        self,
        body: StepProgram,
        head: StepProgram,
        logits: npt.NDArray[np.float32],
        tables: Sequence[npt.NDArray[np.int32]],
        used: Sequence[npt.NDArray[np.int64]],
        block_size: int,
    ) -> None:
        """`logits` [most rows, vocab] is where `head` leaves them; tables as in a BatchBuilder, which appends too."""
        self._keeps = (body, head, tables, used)
        self._body, self._head = body.program, head.program
        self._fast = body.fast
        self._logits = logits
        self._most = len(logits)
        slots, width = tables[0].shape if tables else (self._most, 1)
        places = [(address(table), address(count)) for table, count in zip(tables, used, strict=True)]
        self._rows = native.library().DecodeRows(places, slots, width, block_size)
        self._filled = 0

    def fill(self, spans: tuple[tuple[Any, ...], ...]) -> bool:
        """Enters a step's scheduled tokens and their new blocks; False, and nothing is changed, for other steps."""
        if len(spans) > self._most:
            return False
        self._filled = self._rows.fill(spans, self._fast)
        return self._filled > 0

    def run(self) -> npt.NDArray[np.float32]:
        """Runs what was filled in; logits [rows, vocab], valid until the next run."""
        self._rows.run(self._body, self._head)
        return self._logits[: self._filled]


class StepProgram:
    """A program, and the inputs of its next run.

    With `fast` runs go by level fast: tokens by their kind, logit rows all as generated ones.
    """

    def __init__(self, program: Any, fast: bool = False) -> None:
        self.fast = fast
        self.program = program
        self._step = native.library().StepInputs()

    @property
    def num_ops(self) -> int:
        return int(self.program.num_ops)

    @property
    def arena_bytes(self) -> int:
        return int(self.program.arena_bytes)

    def run(
        self,
        token_ids: Memory,
        positions: Memory,
        query_start: Memory,
        context_len: Memory,
        prompt_tokens: Memory,
        groups: Sequence[tuple[Memory, Memory, Memory | None]],
        logit_rows: Memory,
        state_slot: Memory | None = None,
        adapter_slot: Memory | None = None,
        adapter_scale: Memory | None = None,
        masks: Memory | None = None,
        spans: Memory | None = None,
        token_types: Memory | None = None,
        injected: tuple[Memory, Memory] | None = None,
        state_after: Memory | None = None,
    ) -> None:
        """Runs it for a step; arguments as in a `Batch`, those of a group as in GroupTables, masks by number."""
        step = self._step
        pointers = (address(memory) for memory in (token_ids, positions, query_start, context_len))
        step.set(len(token_ids), len(context_len), *pointers)
        step.set_logits(len(logit_rows), address(logit_rows))
        step.set_masks(address(masks), address(spans))
        step.set_types(address(token_types))
        rows, values = (None, None) if injected is None else injected
        step.set_injected(0 if rows is None else len(rows), address(rows), address(values))
        for group, (table, slot, lengths) in enumerate(groups):
            step.set_group(group, address(table), table.shape[1], address(slot), address(lengths))
        step.set_states(address(state_slot), address(state_after))
        count = 0 if adapter_slot is None else adapter_slot.shape[1]
        step.set_adapters(address(adapter_slot), address(adapter_scale), count)
        if self.fast:
            step.set_kinds(address(prompt_tokens))
        self.program.run(step)

    def run_on(self, rows: Memory, adapter_slot: Memory | None = None, adapter_scale: Memory | None = None) -> None:
        """Runs a program over rows [L] int64 of another's results; adapters as in a Batch, of all those results."""
        self._step.set_logits(len(rows), address(rows))
        count = 0 if adapter_slot is None else adapter_slot.shape[1]
        self._step.set_adapters(address(adapter_slot), address(adapter_scale), count)
        if self.fast:
            self._step.set_all_generated()
        self.program.run(self._step)

    def floats(self, value: int, rows: int, width: int) -> npt.NDArray[np.float32]:
        """A value that was kept, [rows, width], valid until the next run."""
        found: npt.NDArray[np.float32] = self.program.floats(value, rows, width)
        return found
