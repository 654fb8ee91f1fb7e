"""Runs a model's forward pass: replayed from a recording where every op can be recorded, else layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.adapters import TokenAdapters, tokens_of
from penstock.kernels.copies import upload
from penstock.kernels.cpu import native, recording
from penstock.layers.batch import Batch, GroupTables, Injection, LayerCache
from penstock.layers.part import WHOLE, LayerStates, ModelPart, PartOutput, StateWidths
from penstock.models.registry import Model
from penstock.runtime.replay import Rows, decode_program, run_batch

if TYPE_CHECKING:
    from penstock.kernels.cpu.step_program import DecodeProgram
    from penstock.runtime.batch_builder import BatchBuilder


class Executor(Protocol):
    """One model with its KV memory, or a part of one (`layers.part.ModelPart`), the null form of which is the whole.

    Attributes:
        describe: how steps are run, and why not faster, for people.
        fast: whether tokens are multiplied by their kind (level fast).
        gives: of a part that ends before the last layer, how wide what the next one takes is; None if not known.
    """

    describe: str
    fast: bool
    gives: StateWidths | None

    def forward(self, batch: Batch, given: LayerStates | None = None) -> None:
        """Runs a step and writes its keys and values; `given` is what the part before gave, if there is one."""

    def decoding(self, builder: BatchBuilder) -> DecodeProgram | None:
        """What runs the steps of such a builder in which every row computes one token; None where `forward` does."""

    def states(self) -> LayerStates:
        """Of a part that ends before the last layer: what the next one takes; valid until the next step."""

    def tap(self, name: str, count: int | None = None) -> Tensor:
        """The step's hidden states at one of the part's taps; valid until the next step.

        `count`: of tokens, where what `decoding` gave has run the step.
        """

    def scores(self) -> Mapping[int, Tensor]:
        """How the step's last queries weigh keys, where the part tells of that."""

    def hidden(self) -> Tensor:
        """The step's final hidden states of its `logit_rows`, [L, hidden_size]; valid until the next step."""

    def logits(self, rows: Rows | None = None) -> Tensor:
        """Logits [n, vocab] float32 of the last `logit_rows[rows]`, rows [n] or all; valid until the next."""


class EagerExecutor:
    """Calls the layers."""

    fast = False
    gives: StateWidths | None = None

    def __init__(self, model: Model, caches: Sequence[LayerCache], why: str, part: ModelPart = WHOLE) -> None:
        self.describe = f"layer by layer: {why}"
        self._model = model
        self._caches = caches
        self._part = part
        self._output: PartOutput | None = None
        self._adapters: TokenAdapters | None = None

    def forward(self, batch: Batch, given: LayerStates | None = None) -> None:
        self._adapters = batch.adapters
        self._output = self._model.run(batch, self._caches, self._part, given)

    def decoding(self, builder: BatchBuilder) -> DecodeProgram | None:
        return None

    def states(self) -> LayerStates:
        assert self._output is not None
        return self._output.states

    def tap(self, name: str, count: int | None = None) -> Tensor:
        assert self._output is not None
        return self._output.taps[name]

    def scores(self) -> Mapping[int, Tensor]:
        assert self._output is not None
        return self._output.scores

    def hidden(self) -> Tensor:
        assert self._output is not None and self._part.end is None
        return self._output.states.hidden

    def logits(self, rows: Rows | None = None) -> Tensor:
        hidden = self.hidden()
        if rows is None:
            wanted = torch.arange(len(hidden), device=hidden.device)
        else:
            wanted = upload(np.asarray(rows), hidden.device)
        if self._adapters is None:
            return self._model.logits(hidden, wanted)
        return self._model.logits(hidden, wanted, tokens_of(self._adapters, wanted))


class RecordedExecutor:
    """Replays the native program of the forward pass, and a second one for logits; `caches` are those it works on."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCache],
        max_tokens: int,
        max_logit_rows: int,
        fast: bool = False,
        part: ModelPart = WHOLE,
        *,
        kept: bool = False,
    ) -> None:
        """`kept`: journals of the recordings are made, for later starts."""
        self.fast, self.caches = fast, caches
        self._part = part
        body = recording.Recording(fast, kept=kept)
        batch = _symbolic(body, 1 + max(cache.group for cache in caches))
        self._inputs = _inputs(model, caches, part, max_tokens)
        given = None if self._inputs is None else self._inputs.each(body.input)
        output = model.run(batch, caches, part, given)
        for value in (*output.states.tensors(), *output.taps.values()):
            body.keep(value)  # type: ignore[arg-type]  # a handle
        body.finish(output.states.hidden, max_tokens, max_tokens)
        self._body, self._output = body, output
        self.gives: StateWidths | None = None
        if part.end is not None:
            self.gives = output.states.widths(lambda value: cast(recording.Handle, value).width)
        self._tokens = self._rows = 0
        self._adapters: TokenAdapters | None = None  # of the step, where logits have such
        self._adapts_logits = model.head is not None and bool(model.head.adapters)
        head = recording.Recording(fast, kept=kept)
        if model.head is not None and part.end is None and part.with_head:
            hidden, rows = head.result_of(body, output.states.hidden), head.logit_index
            head.finish(model.logits(hidden, rows, TokenAdapters(rows, rows, rows)), 0, max_logit_rows)
        self._head = head
        self._max_logit_rows = max_logit_rows
        self._all: Rows = np.arange(max_tokens, dtype=np.int64)
        arena = (body.arena_bytes + head.arena_bytes) >> 20
        self.describe = f"recorded: {body.num_ops + head.num_ops} native ops in an arena of {arena} MiB"

    def forward(self, batch: Batch, given: LayerStates | None = None) -> None:
        self._tokens, self._rows = len(batch.token_ids), len(batch.logit_rows)
        self._adapters = batch.adapters if self._adapts_logits else None
        if self._inputs is not None:
            assert given is not None
            for memory, states in zip(self._inputs.tensors(), given.tensors(), strict=True):
                memory[: self._tokens] = states
        run_batch(self._body, batch)

    def decoding(self, builder: BatchBuilder) -> DecodeProgram | None:
        if self._inputs is not None or self._part.end is not None or not self._head.num_ops:
            return None
        return decode_program(self._body, self._head, self._head.result_place, self._max_logit_rows, builder)

    @property
    def recordings(self) -> tuple[recording.Recording, recording.Recording]:
        """Of the forward pass, and of logits."""
        return self._body, self._head

    def states(self) -> LayerStates:
        return self._output.states.each(self._read)

    def tap(self, name: str, count: int | None = None) -> Tensor:
        value: Any = self._output.taps[name]
        return self._read(value) if count is None else self._body.read(value, count)

    def scores(self) -> Mapping[int, Tensor]:
        return {}  # who asks for them is not recorded

    def _read(self, value: Any) -> Tensor:
        return self._body.read(value, self._tokens if value.extent == recording.TOKENS else self._rows)

    def hidden(self) -> Tensor:
        assert self._part.end is None
        return self._body.result(self._rows)

    def logits(self, rows: Rows | None = None) -> Tensor:
        assert self._part.end is None
        if rows is None:
            rows = self._all[: self._rows]
        most = self._max_logit_rows
        if len(rows) <= most:
            return self._run_head(rows)
        parts = (rows[begin : begin + most] for begin in range(0, len(rows), most))
        return torch.cat([self._run_head(part).clone() for part in parts])

    def _run_head(self, rows: Rows) -> Tensor:
        if self._adapters is None:
            return self._head.run_rows(rows)
        own = self._adapters.rows
        return self._head.run_rows(rows, self._adapters.slot[own], self._adapters.scale[own])


def _inputs(model: Model, caches: Sequence[LayerCache], part: ModelPart, max_tokens: int) -> LayerStates | None:
    """Memory for what the part takes, as wide as what the layers before it give; None where it takes the tokens."""
    if part.first == 0:
        return LayerStates(torch.zeros(max_tokens, model.takes)) if model.takes else None
    if (wide := part.given) is None:
        if model.part.first > 0:
            raise recording.NotRecordableError("how wide the states of the layers before are is not known")
        symbolic = _symbolic(recording.Recording(), 1 + max(cache.group for cache in caches))
        before = model.run(symbolic, caches, ModelPart(0, part.first)).states
        wide = before.widths(lambda value: cast(recording.Handle, value).width)
    vectors = wide.per_layer_embeddings
    return LayerStates(
        torch.zeros(max_tokens, wide.hidden),
        tuple(torch.zeros(max_tokens, width) for width in wide.streams),
        torch.zeros(max_tokens, vectors) if vectors else None,
    )


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
        adapter_scale=tape.unreadable,
        token_types=tape.token_types,
        injected=Injection(tape.unreadable, tape.unreadable),
    )


@torch.inference_mode()
def make_executor(
    model: Model,
    caches: Sequence[LayerCache],
    max_tokens: int,
    max_logit_rows: int,
    fast: bool = False,
    part: ModelPart = WHOLE,
    *,
    kept: bool = False,
) -> Executor:
    """The fastest executor that can run this model.

    Args:
        model: loaded.
        caches: one an attention layer.
        max_tokens: tokens of the largest step.
        max_logit_rows: most rows whose logits are made at once.
        fast: multiply tokens by their kind, if steps can be recorded and the instruction set has two ways.
        part: the layers that are run, and the hidden states that are kept.
        kept: journals of recordings are made.
    """
    try:
        return RecordedExecutor(model, caches, max_tokens, max_logit_rows, fast and native.two_ways(), part, kept=kept)
    except recording.NotRecordableError as reason:
        return EagerExecutor(model, caches, str(reason), part)
