"""Turns hidden states into the results of rows that pool, whatever the chunks their prompts come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.pooling import PoolingKind, PoolingParams
from penstock.core.protocol import NewRow, RowSpan
from penstock.layers.weight import Layer, Weight

Head = Callable[[Tensor], Tensor]
"""What a pooled state [1, hidden_size] passes: a classification head, or the dense layers of sentence embeddings."""


@dataclass(slots=True)
class _Row:
    """What a prompt's earlier chunks left: nothing, the first state, the states' sum, or all results."""

    params: PoolingParams
    kept: list[Tensor] = field(default_factory=list)


class Pooler:
    """Pools the rows of one model. Every sum is in the order of the positions, so that chunks do not change it."""

    def __init__(self, classifier: Head | None, projection: Head | None = None) -> None:
        self._classifier = classifier
        self._projection = projection
        self._rows: dict[int, _Row] = {}

    def add_row(self, new: NewRow) -> None:
        """Starts a row, whatever was there before."""
        self._rows.pop(new.row, None)
        if new.pooling is not None:
            self._rows[new.row] = _Row(new.pooling)

    def wanted(self, span: RowSpan) -> range | None:
        """Which of a span's tokens it needs the hidden states of; None if the row does not pool."""
        row, count = self._rows.get(span.row), len(span.tokens)
        if row is None:
            return None
        if row.params.kind is PoolingKind.LAST:
            return range(count - 1, count) if span.sample else range(0)
        if row.params.kind is PoolingKind.CLS:
            return range(0 if span.start else 1)
        return range(count)

    def take(self, span: RowSpan, hidden: Tensor) -> Tensor | None:
        """Takes the wanted states [n, hidden_size]; the pooled state [1 or tokens, hidden_size] at the prompt's end."""
        row = self._rows[span.row]
        states = hidden.detach().to("cpu", torch.float32, copy=True)
        if row.params.kind is PoolingKind.MEAN:
            total = row.kept.pop()[0] if row.kept else torch.zeros(states.shape[1], dtype=torch.float64)
            for state in states:
                total += state
            states = total[None]
        row.kept.append(states)
        if not span.sample:
            return None
        found = torch.cat(row.kept)
        if row.params.kind is PoolingKind.MEAN:
            found = (found / (span.start + len(span.tokens))).float()
        return found

    def result(self, span: RowSpan, pooled: Tensor, logits: Tensor | None) -> bytes:
        """What the row asked for, of its pooled state and, where it asked for choices, its logits [1, vocab]."""
        params = self._rows[span.row].params
        if params.choices:
            assert logits is not None
            pooled = logits[:, list(params.choices)].cpu().float()
        elif params.classify:
            assert self._classifier is not None  # the frontend asks only models that have one
            pooled = torch.cat([_passed(self._classifier, state[None]) for state in pooled])
        elif self._projection is not None and params.kind is not PoolingKind.ALL:
            pooled = _passed(self._projection, pooled)
        if params.activation == "softmax":
            pooled = pooled.softmax(dim=-1)
        elif params.activation == "sigmoid":
            pooled = pooled.sigmoid()
        if params.dimensions is not None:
            pooled = pooled[:, : params.dimensions]
        if params.normalize:
            pooled = torch.cat([functional.normalize(state[None]) for state in pooled])
        return pooled.contiguous().numpy().tobytes()

    def needs_logits(self, span: RowSpan) -> bool:
        """Whether the row's result is made of its last token's logits."""
        row = self._rows.get(span.row)
        return row is not None and bool(row.params.choices)


def _passed(head: Head, states: Tensor) -> Tensor:
    """What a head makes of states [n, hidden_size], which it gets where its weights lie; on the host."""
    weights: list[Weight] = list(head.weights()) if isinstance(head, Layer) else []
    there: Tensor = weights[0].value if weights else states
    return head(states.to(there.device)).cpu()
