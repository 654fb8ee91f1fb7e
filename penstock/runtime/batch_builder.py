"""Builds the ragged batch of a step from its plan, with work proportional to the step's tokens, not to contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.protocol import NewSequence, ScheduledTokens
from penstock.kernels.copies import upload
from penstock.layers.batch import Batch, GroupTables, MaskKind


class SpanColumns(NamedTuple):
    """The spans of a step, each field [R] int64."""

    slots: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    prompt_tokens: npt.NDArray[np.int64]
    draft_tokens: npt.NDArray[np.int64]


class BatchBuilder:
    """Keeps the block tables of every request slot, its adapter and the last token it sampled.

    A recurrent state lies at the number of its request slot, so none is handed out; the places behind those of the
    slots are free for checkpoints.

    Attributes:
        tables: per group [max_rows, max_blocks] int32, block ids by row and logical block.
        block_size: tokens in a block.
        device: of the batches.
    """

    def __init__(
        self,
        num_groups: int,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        mask: MaskKind = MaskKind.CAUSAL,
        types: int = 0,
    ) -> None:
        """`mask`: of all rows. `types`: token types of the model, of which a pair's second text has the second."""
        self._mask = mask
        self._second: npt.NDArray[np.int64] | None = np.zeros(max_rows, np.int64) if types else None
        self._one_type = types == 1
        self.block_size = block_size
        self.device = device
        self._on_cpu = device.type == "cpu"  # saves a call for each of a step's tensors
        self.tables = [np.zeros((max_rows, max_blocks), np.int32) for _ in range(num_groups)]
        self._used = [[0] * max_rows for _ in range(num_groups)]
        self._seen = [[0] * max_rows for _ in range(num_groups)]  # leading entries that `changes` has returned
        self._adapters = [0] * max_rows
        self._last = [0] * max_rows
        self._samples: torch.Tensor | None = None  # as `_last`, where samples stay on the device; then a 0
        self._counts: npt.NDArray[np.int32] = np.arange(max_rows + 1, dtype=np.int32)

    def add_row(self, new: NewSequence) -> None:
        """Starts a row's tables with the blocks it was admitted with."""
        self._adapters[new.slot] = new.adapter
        if self._second is not None and not self._one_type:
            self._second[new.slot] = new.pooling.second if new.pooling else 0
        for g, blocks in enumerate(new.blocks):
            self.tables[g][new.slot, : len(blocks)] = blocks
            self._used[g][new.slot], self._seen[g][new.slot] = len(blocks), 0

    def note_sample(self, row: int, token: int) -> None:
        """Remembers what `last_sample(slot)` stands for in later plans."""
        self._last[row] = token

    def keep_samples(self, rows: Sequence[int], tokens: torch.Tensor) -> None:
        """As `note_sample`, for tokens [L] int64 that stay on the device; those below 0 are errors, never looked up."""
        self.samples[self._tensor(np.array(rows, np.int64))] = tokens.clamp(min=0)

    @property
    def samples(self) -> torch.Tensor:
        """[max_rows + 1] int64 on the device: each slot's last sample, then a 0. Once used, samples stay there."""
        if self._samples is None:
            self._samples = torch.zeros(len(self._last) + 1, dtype=torch.int64, device=self.device)
        return self._samples

    def sources(self, tokens: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Each token as a place in `samples` and a number to add to it; known tokens take the place that holds 0."""
        given = np.array(tokens, np.int64)
        return np.where(given < 0, -1 - given, len(self._last)), np.maximum(given, 0)

    def columns(self, spans: Sequence[ScheduledTokens]) -> SpanColumns:
        """Enters the spans' new blocks into the tables; returns the rest of the spans as columns."""
        for span in spans:
            self._append_blocks(span)
        said = [(span.slot, span.start, len(span.tokens), span.prompt_tokens, span.draft_tokens) for span in spans]
        return SpanColumns._make(np.ascontiguousarray(np.array(said, np.int64).T))

    def adapted(self, spans: Sequence[ScheduledTokens]) -> bool:
        """Whether a row among these has an adapter."""
        return any(self._adapters[span.slot] for span in spans)

    def changes(self, group: int, rows: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """What entered a group's table for these slots since the last call: places in the flat table, and blocks."""
        seen = self._seen[group]
        used = self._used[group]
        table = self.tables[group]
        parts = [np.arange(seen[row], used[row]) + row * table.shape[1] for row in rows if seen[row] < used[row]]
        for row in rows:
            seen[row] = used[row]
        places = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return places, table.reshape(-1)[places]

    def build(self, spans: Sequence[ScheduledTokens], logit_rows: Sequence[int]) -> Batch:
        """The batch of these spans, in their order."""
        count = len(spans)
        columns = self.columns(spans)
        rows, starts = columns.slots, columns.starts
        lens = columns.lengths
        tokens = self._tokens(spans)
        contexts = starts + lens
        if len(tokens) == count:  # one token a row
            query_start = self._counts[: count + 1]
            token_rows = rows
            positions = starts
        else:
            ends: npt.NDArray[np.int64] = lens.cumsum()
            query_start = np.zeros(count + 1, np.int32)
            query_start[1:] = ends
            token_rows = rows.repeat(lens)
            positions = np.arange(len(tokens)) + (starts - (ends - lens)).repeat(lens)
        context_lens = contexts.tolist()
        widest = -(-max(context_lens) // self.block_size)
        logical, offset = np.divmod(positions, self.block_size)
        groups = tuple(
            GroupTables(
                self._tensor(table[rows, :widest]),
                self._tensor(table[token_rows, logical].astype(np.int64) * self.block_size + offset),
            )
            for table in self.tables
        )
        adapters = [self._adapters[span.slot] for span in spans]
        return Batch(
            token_ids=self._token_ids(tokens),
            positions=self._tensor(positions[None]),
            query_start=self._tensor(query_start),
            context_len=self._tensor(contexts.astype(np.int32)),
            groups=groups,
            prompt_tokens=self._tensor(columns.prompt_tokens.astype(np.int32)),
            draft_tokens=self._tensor(columns.draft_tokens.astype(np.int32)),
            logit_rows=self._tensor(np.asarray(logit_rows, np.int64)),
            query_lens=tuple(lens.tolist()),
            context_lens=tuple(context_lens),
            state_slot=self._tensor(rows),
            adapter_slot=self._tensor(np.array(adapters, np.int64)) if any(adapters) else None,
            masks=() if self._mask is MaskKind.CAUSAL else (self._mask,) * count,
            token_types=None if self._second is None else self._types(self._second[token_rows], positions),
        )

    def _tokens(self, spans: Sequence[ScheduledTokens]) -> list[int]:
        """All tokens; samples that are on the device stay placeholders."""
        if self._samples is not None:
            return [token for span in spans for token in span.tokens]
        last = self._last
        return [token if token >= 0 else last[-1 - token] for span in spans for token in span.tokens]

    def _token_ids(self, tokens: list[int]) -> torch.Tensor:
        if self._samples is None or min(tokens) >= 0:
            return self._tensor(np.array(tokens, np.int64))
        places, known = map(self._tensor, self.sources(tokens))
        return self._samples[places].add_(known)

    def _types(self, second: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """1 for tokens at or behind the position where their row's second text begins, if there is one."""
        return self._tensor(((second > 0) & (positions >= second)).astype(np.int64))

    def _append_blocks(self, span: ScheduledTokens) -> None:
        for g, blocks in enumerate(span.new_blocks):
            if blocks:
                used = self._used[g][span.slot]
                self.tables[g][span.slot, used : used + len(blocks)] = blocks
                self._used[g][span.slot] = used + len(blocks)

    def _tensor(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array) if self._on_cpu else upload(array, self.device)
