"""Turns hidden states into the results of rows that pool, whatever the chunks their prompts come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from penstock.config.pooling import PoolingKind, PoolingParams
from penstock.core.protocol import NewSequence, ScheduledTokens
from penstock.kernels.copies import AsyncCopy

_SUMMED = 256  # states at once, which are copied as float64
Head = Callable[[Tensor], Tensor]
"""What a pooled state [1, hidden_size] passes: a classification head, or the dense layers of sentence embeddings."""


@dataclass(slots=True)
class _Row:
    """What a prompt's earlier chunks left: the first state, the sum of states, or results being copied to the host."""

    params: PoolingParams
    kept: Tensor | None = None
    parts: list[AsyncCopy] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pooled:
    """A row's result, being computed.

    Attributes:
        slot: whose.
    """

    slot: int
    _params: PoolingParams
    _parts: list[AsyncCopy]

    def wait(self) -> bytes:
        """Waits for what the row asked for."""
        params = self._params
        found = torch.cat([part.wait()[0] for part in self._parts]).float()
        if params.choices:
            found = found[:, list(params.choices)]
        if params.activation == "softmax":
            found = found.softmax(dim=-1)
        elif params.activation == "sigmoid":
            found = found.sigmoid()
        if params.dimensions is not None:
            found = found[:, : params.dimensions]
        if params.normalize:
            found = torch.cat([functional.normalize(state[None]) for state in found])
        return found.contiguous().numpy().tobytes()


class Pooler:
    """Pools the rows of one model where its states lie, so that the host does not wait for them.

    Every sum is in the order of the positions, so that chunks do not change it.
    """

    def __init__(self, classifier: Head | None, projection: Head | None = None) -> None:
        self._classifier = classifier
        self._projection = projection
        self._rows: dict[int, _Row] = {}

    def add_row(self, new: NewSequence) -> None:
        """Starts a row, whatever was there before."""
        self._rows.pop(new.slot, None)
        if new.pooling is not None:
            self._rows[new.slot] = _Row(new.pooling)

    def wanted(self, span: ScheduledTokens) -> range | None:
        """The tokens of a span whose hidden states are needed; None if the slot does not pool."""
        row, count = self._rows.get(span.slot), len(span.tokens)
        if row is None:
            return None
        if row.params.kind is PoolingKind.LAST:
            return range(count - 1, count) if span.sample else range(0)
        if row.params.kind is PoolingKind.CLS:
            return range(0 if span.start else 1)
        return range(count)

    def begin(self, span: ScheduledTokens, states: Tensor, logits: Callable[[], Tensor]) -> Pooled | None:
        """Takes the wanted states of a span; at the prompt's end, the row's result.

        Args:
            states: [n, hidden_size], which may be overwritten by the next step.
            logits: makes those of the last of them, [1, vocab].
        """
        row = self._rows[span.slot]
        params, kind = row.params, row.params.kind
        if kind is PoolingKind.ALL and not params.choices:
            row.parts.append(AsyncCopy(self._passed(params, states, states.dtype)))
        elif kind is PoolingKind.MEAN:
            row.kept = _summed(row.kept, states)
        elif len(states):
            row.kept = states.clone()
        if not span.sample:
            return None
        if params.choices:
            row.parts.append(AsyncCopy(logits()))
        elif kind is not PoolingKind.ALL:
            assert row.kept is not None
            mean = kind is PoolingKind.MEAN
            pooled = (row.kept / (span.start + len(span.tokens))).float() if mean else row.kept
            row.parts.append(AsyncCopy(self._passed(params, pooled, states.dtype)))
        return Pooled(span.slot, params, row.parts)

    def _passed(self, params: PoolingParams, states: Tensor, dtype: torch.dtype) -> Tensor:
        """States [n, hidden_size] after the head that the request asks for, if any; the head computes in `dtype`."""
        if params.classify:
            assert self._classifier is not None  # the frontend asks only models that have one
            return torch.cat([self._classifier(state[None].to(dtype)) for state in states])
        if self._projection is not None and params.kind is not PoolingKind.ALL:
            return self._projection(states.to(dtype))
        return states


def _summed(before: Tensor | None, states: Tensor) -> Tensor:
    """The sum [1, hidden_size] float64 of what was summed before and of the states, one after the other."""
    total = states.new_zeros(1, states.shape[1], dtype=torch.float64) if before is None else before
    for part in torch.split(states, _SUMMED):
        total = torch.cat((total, part.double())).cumsum(0)[-1:]
    return total.clone()
