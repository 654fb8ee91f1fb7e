"""What is told of a token's chances in other ways than the usual: many alternatives, named ones, or another mode.

A row's logits come to the host whole for it, and one row is looked at after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.config.logprobs import is_many, packed
from penstock.core.protocol import NewSequence, TokenLogprobs
from penstock.kernels.sampling import LogprobTable, RowSettings

if TYPE_CHECKING:
    from penstock.runtime.processed import ProcessedRow

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Masks = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token was drawn: its absolute position, and the grammar's mask there."""

    position: int
    mask: Masks | None = None


@dataclass(slots=True)
class ScoredRow:
    """A row whose log-probabilities are told in one of those ways.

    Attributes:
        mode: one of `config.logprobs.LOGPROBS_MODES`.
        count: alternatives told with each token.
        named: tokens that are told in the place of the likeliest.
        processed: what masks and samplers leave, for the modes that tell of that.
    """

    mode: str
    count: int
    named: tuple[int, ...]
    processed: ProcessedRow | None

    @classmethod
    def of(cls, new: NewSequence, settings: RowSettings, mode: str) -> ScoredRow | None:
        """None for a row whose log-probabilities are told in the usual way, or not at all."""
        asked = new.sampling
        count = asked.told_with_each
        if asked.logprobs is None or count is None:
            return None
        if mode == "raw_logprobs" and not asked.logprob_token_ids and not is_many(count):
            return None
        processed = None
        if mode.startswith("processed"):
            from penstock.runtime.processed import ProcessedRow

            processed = ProcessedRow(settings)
        return cls(mode, count, asked.logprob_token_ids, processed)

    def extend(self, token: int) -> None:
        """Takes a token that is known without having been drawn."""
        if self.processed is not None:
            self.processed.extend(token)

    def entry(self, logits: Floats, token: int, place: Place) -> TokenLogprobs:
        """What is told of a token that was drawn from logits [V]; the row takes it as generated."""
        if self.processed is not None:
            logits = self.processed.left(logits, place.position, place.mask)
            self.processed.extend(token)
        values = logits.astype(np.float64)
        if self.mode.endswith("logprobs"):
            values = _log_softmax(values)
        known = [one for one in self.named if one < len(logits)]
        ids = np.array(known, np.int64) if self.named else likeliest(logits, self.count)
        rank = 1 + int((logits > logits[token]).sum()) + int((logits[:token] == logits[token]).sum())
        return told(token, float(values[token]), rank, ids, values[ids])


def told(token: int, value: float, rank: int, ids: npt.NDArray[Any], values: Doubles) -> TokenLogprobs:
    """A token with its alternatives, packed where they are many."""
    if is_many(len(ids)):
        return TokenLogprobs(token, value, rank, packed=packed(ids.tolist(), values.tolist()))
    return TokenLogprobs(token, value, rank, tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def likeliest(logits: Floats, count: int) -> Ids:
    """The ids of so many of the largest of [V], the largest first; of equal ones the lower id comes first."""
    if 0 < count < len(logits):
        least = np.partition(logits, len(logits) - count)[len(logits) - count]
        found = np.flatnonzero(logits >= least)
    else:
        found = np.arange(len(logits) if count else 0)
    order = np.argsort(-logits[found], kind="stable")
    return np.asarray(found[order][:count], np.int64)


def as_logits(table: Callable[[], LogprobTable], logits: Callable[[], Floats], targets: Ids) -> LogprobTable:
    """A table of log-probabilities [L] as one of the logits [L, V] that they were computed from."""
    found, values = table(), logits()
    own = values[np.arange(len(targets)), targets].astype(np.float64)
    top = np.take_along_axis(values, found.top_ids.astype(np.int64), axis=1).astype(np.float64)
    return replace(found, logprobs=own, top_logprobs=top)


def _log_softmax(values: Doubles) -> Doubles:
    shifted = values - values.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
