"""The target's hidden states of sequences that are drafted for, until they are used: they are there once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.core.protocol import StepPlan
from penstock.layers.part import FINAL

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Taps:
    """Which hidden states of each step a drafter is told.

    Attributes:
        names: as in `layers.part.ModelPart`; () for none.
        every: of all tokens; else FINAL is told of those alone behind which tokens are drawn.
        best: and the most probable token behind each draft.
    """

    names: tuple[str, ...] = ()
    every: bool = False
    best: bool = False

    @property
    def widens(self) -> bool:
        """Whether final states are wanted that nobody else wants."""
        return self.every and FINAL in self.names


NO_TAPS = Taps()


class Tapped(NamedTuple):
    """What a step's taps hold.

    Attributes:
        states: by name, [tokens of the step, hidden_size], or of FINAL [wanted, hidden_size].
        wanted: indices of those tokens in the step, rising; None for all.
        best: by slot whose drafts are verified, the most probable tokens [drafts + 1] behind the last known token and
            behind each draft.
    """

    states: Mapping[str, Any]
    wanted: Sequence[int] | None
    best: Mapping[int, Any] = MappingProxyType({})


@dataclass(slots=True)
class Pending:
    """Consecutive hidden states of one sequence.

    Attributes:
        begin: position of the first.
        states: [n, width], or None for none.
    """

    begin: int = 0
    states: Tensor | None = None

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.begin + (0 if self.states is None else len(self.states))

    def add(self, begin: int, states: Tensor) -> bool:
        """States from a position on; those that were there of it and behind were of drafts that are gone.

        Returns:
            Whether none is missing between those before and these.
        """
        import torch

        if self.states is None and begin < self.begin:  # the first are not wanted
            self.states = states[self.begin - begin :] if begin + len(states) > self.begin else None
            return True
        goes_on = self.begin <= begin <= self.end
        kept = self.states[: begin - self.begin] if self.states is not None and goes_on and begin > self.begin else None
        if kept is None:
            self.begin, self.states = begin, states
        else:
            self.states = torch.cat((kept, states))
        return goes_on

    def take(self, end: int) -> Tensor:
        """States before a position, which are no longer kept."""
        assert self.states is not None
        count = end - self.begin
        found = self.states[:count]
        self.states = self.states[count:] if count < len(self.states) else None
        self.begin = end
        return found

    def drop(self, end: int) -> None:
        """Those before a position are not wanted."""
        if self.states is not None and self.begin < end:
            self.states = self.states[end - self.begin :] if end < self.end else None
        self.begin = max(self.begin, end)


def read(taps: Taps, tap: Callable[[str], Tensor], wanted: Sequence[int] | None, lasts: bool) -> Tapped | None:
    """What the taps of a step hold, or None where there are none; copied, unless it lasts until it is looked at."""
    if not taps.names:
        return None
    states = {name: tap(name) if lasts else tap(name).clone() for name in taps.names}
    return Tapped(states, wanted if FINAL in states else None)


def best_behind(logits: Any, drafted: Sequence[tuple[int, int, int]], on_device: bool) -> Tapped:
    """The most probable tokens of slots whose drafts are verified: (slot, first row of the logits, drafts)."""
    values = logits if on_device else np.asarray(logits)
    return Tapped({}, None, {slot: values[row : row + drafts + 1].argmax(-1) for slot, row, drafts in drafted})


def of_spans(plan: StepPlan, tapped: Tapped, names: Sequence[str]) -> list[tuple[int, int, Tensor]]:
    """(slot, first position, states [n, width]) of each span that has any, in memory that stays; names side by side."""
    import torch

    parts = [torch.as_tensor(tapped.states[name]) for name in names]
    joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].clone()
    wanted = None if tapped.wanted is None else np.asarray(tapped.wanted)
    found, first = [], 0
    for span in plan.scheduled:
        end = first + len(span.tokens)
        if wanted is None:
            found.append((span.slot, span.start, joined[first:end]))
        else:
            low, high = np.searchsorted(wanted, (first, end)).tolist()
            if low < high:
                found.append((span.slot, span.start + int(wanted[low]) - first, joined[low:high]))
        first = end
    return found
