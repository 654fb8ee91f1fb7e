"""Pooling by a model that makes text: nothing is loaded for it before a request asks. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.core.protocol import NewSequence, ScheduledTokens

if TYPE_CHECKING:
    from penstock.runtime.pooling import Pooled, Pooler


class LatePooler:
    """As `runtime.pooling.Pooler` without heads, which is made, and torch with it, when a first row pools."""

    def __init__(self) -> None:
        self._pooler: Pooler | None = None

    def add_row(self, new: NewSequence) -> None:
        """As Pooler."""
        if self._pooler is None and new.pooling is not None:
            from penstock.runtime.pooling import Pooler

            self._pooler = Pooler(None)
        if self._pooler is not None:
            self._pooler.add_row(new)

    def wanted(self, span: ScheduledTokens) -> range | None:
        """As Pooler."""
        return None if self._pooler is None else self._pooler.wanted(span)

    def begin(self, span: ScheduledTokens, states: Any, logits: Callable[[], Any]) -> Pooled | None:
        """As Pooler."""
        assert self._pooler is not None  # a row pools
        return self._pooler.begin(span, states, logits)
