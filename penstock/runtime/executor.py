"""Runs a model's forward pass: replayed from a recording where every op can be recorded, else layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.copies import upload
from penstock.kernels.cpu import native, recording
from penstock.kernels.cpu.ops import mask_kinds
from penstock.layers.batch import Batch, GroupTables, LayerCache
from penstock.models.registry import Model


class Executor(Protocol):
    """One model with its KV memory.

    Attributes:
        describe: how steps are run, and why not faster, for people.
        fast: whether tokens are multiplied by their kind (level fast).
    """

    describe: str
    fast: bool

    def forward(self, batch: Batch) -> None:
        """Runs a step and writes its keys and values."""

    def hidden(self) -> Tensor:
        """The step's final hidden states of its `logit_rows`, [L, hidden_size]; valid until the next step."""

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """Logits [n, vocab] float32 of the last `logit_rows[rows]`, rows [n] int64 or all; valid until the next."""


class EagerExecutor:
    """Calls the layers."""

    fast = False

    def __init__(self, model: Model, caches: Sequence[LayerCache], why: str) -> None:
        self.describe = f"layer by layer: {why}"
        self._model = model
        self._caches = caches
        self._hidden: Tensor | None = None

    def forward(self, batch: Batch) -> None:
        self._hidden = self._model.forward(batch, self._caches)

    def hidden(self) -> Tensor:
        assert self._hidden is not None
        return self._hidden

    def logits(self, rows: Tensor | None = None) -> Tensor:
        hidden = self.hidden()
        if rows is None:
            return self._model.logits(hidden, torch.arange(len(hidden), device=hidden.device))
        return self._model.logits(hidden, upload(rows.numpy(), hidden.device))


class RecordedExecutor:
    """Replays the native program of the forward pass, and a second one for logits."""

    def __init__(
        self, model: Model, caches: Sequence[LayerCache], max_tokens: int, max_logit_rows: int, fast: bool = False
    ) -> None:
        self.fast = fast
        body = recording.Recording(fast)
        hidden = model.forward(_symbolic(body, 1 + max(cache.group for cache in caches)), caches)
        body.finish(hidden, max_tokens, max_tokens)
        self._body, self._rows = body, 0
        head = recording.Recording(fast)
        if model.head is not None:
            head.finish(model.logits(head.result_of(body, hidden), head.logit_index), 0, max_logit_rows)
        self._head = head
        self._max_logit_rows = max_logit_rows
        self._all = torch.arange(max_tokens)
        arena = (body.arena_bytes + head.arena_bytes) >> 20
        self.describe = f"recorded: {body.num_ops + head.num_ops} native ops in an arena of {arena} MiB"

    def forward(self, batch: Batch) -> None:
        self._body.run(
            batch.token_ids,
            batch.positions,
            batch.query_start,
            batch.context_len,
            batch.prompt_tokens,
            groups=[(group.block_table, group.slot) for group in batch.groups],
            logit_rows=batch.logit_rows,
            state_slot=batch.state_slot,
            adapter_slot=batch.adapter_slot,
            masks=mask_kinds([mask.value for mask in batch.masks]),
            spans=batch.spans,
            token_types=batch.token_types,
        )
        self._rows = len(batch.logit_rows)

    def hidden(self) -> Tensor:
        return self._body.result(self._rows)

    def logits(self, rows: Tensor | None = None) -> Tensor:
        if rows is None:
            rows = self._all[: self._rows]
        if len(rows) <= self._max_logit_rows:
            return self._head.run_rows(rows)
        return torch.cat([self._head.run_rows(part).clone() for part in torch.split(rows, self._max_logit_rows)])


def _symbolic(tape: recording.Recording, groups: int) -> Batch:
    """A batch of handles: layers may only pass them to ops."""
    tables = tuple(GroupTables(tape.block_table(group), tape.slot(group)) for group in range(groups))
    return Batch(
        token_ids=tape.token_ids,
        positions=tape.positions,
        query_start=tape.unreadable,
        context_len=tape.unreadable,
        groups=tables,
        prompt_tokens=tape.unreadable,
        draft_tokens=tape.unreadable,
        logit_rows=tape.logit_index,
        query_lens=(),
        context_lens=(),
        state_slot=tape.unreadable,
        adapter_slot=tape.unreadable,
        token_types=tape.token_types,
    )


@torch.inference_mode()
def make_executor(
    model: Model, caches: Sequence[LayerCache], max_tokens: int, max_logit_rows: int, fast: bool = False
) -> Executor:
    """The fastest executor that can run this model.

    Args:
        model: loaded.
        caches: one an attention layer.
        max_tokens: tokens of the largest step.
        max_logit_rows: most rows whose logits are made at once.
        fast: multiply tokens by their kind, if steps can be recorded and the instruction set has two ways.
    """
    try:
        return RecordedExecutor(model, caches, max_tokens, max_logit_rows, fast and native.two_ways())
    except recording.NotRecordableError as reason:
        return EagerExecutor(model, caches, str(reason))
