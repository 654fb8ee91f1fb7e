"""What passes through the stages: a step from each to the next, and what the last one has found back to the lead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.config.adapters import AdapterUse
from penstock.core.protocol import CacheOp
from penstock.layers.batch import Batch
from penstock.layers.part import LayerStates
from penstock.runtime.replay import Rows

if TYPE_CHECKING:
    from torch import Tensor


Placed = tuple[int, AdapterUse]
"""A slot, and the adapter that it holds."""


@dataclass(frozen=True, slots=True)
class StageStep:
    """A step on its way.

    Attributes:
        number: counts the steps that were launched.
        ops: cache operations, which every stage carries out before it computes.
        places: adapters that slots hold from here on.
        batch: of the step.
        logits: the places among the batch's `logit_rows` whose logits are wanted, call by call; None for all.
        hidden: whether the final hidden states are wanted.
        states: what the stage before gives; None for the first.
        taps: hidden states that stages before were to keep.
        seconds: that each stage before has computed.
        error: why a stage before has failed: those behind it carry out the operations alone.
    """

    number: int
    ops: tuple[CacheOp, ...]
    batch: Batch
    logits: tuple[Rows | None, ...] = ()
    hidden: bool = False
    states: LayerStates | None = None
    taps: Mapping[str, Tensor] = field(default_factory=dict)
    seconds: tuple[float, ...] = ()
    error: str | None = None
    places: tuple[Placed, ...] = ()


@dataclass(frozen=True, slots=True)
class StageOps:
    """What no step waits for: each stage does it in its turn, and hands it on.

    Attributes:
        ops, places: as of StageStep.
        reads: adapters that are going to be placed.
    """

    ops: tuple[CacheOp, ...] = ()
    places: tuple[Placed, ...] = ()
    reads: tuple[AdapterUse, ...] = ()


@dataclass(frozen=True, slots=True)
class StageResult:
    """What the last stage found. Further logits follow, `LogitsPart` by `LogitsPart`, in the order asked for.

    Attributes:
        number: of the step.
        logits: [n, vocab] float32 of the first call, if there is one.
        hidden: [L, hidden_size], if they were wanted.
        taps, seconds, error: as in StageStep, of all stages.
    """

    number: int
    logits: Tensor | None
    hidden: Tensor | None
    taps: Mapping[str, Tensor]
    seconds: tuple[float, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LogitsPart:
    """Logits [n, vocab] float32 of a later call of a step, the first being number 0; or why there are none."""

    number: int
    call: int
    values: Tensor | None
    error: str | None = None


Message = StageStep | StageOps | StageResult | LogitsPart


class Link(Protocol):
    """One way for messages, from one thread or process to another, in order."""

    def send(self, message: Message) -> None:
        """Hands a message over; waits while more than there is room for are on their way."""

    def receive(self) -> Message | None:
        """The next message, which is waited for; None once the link was closed.

        Raises:
            EngineDeadError: whoever was to send has ended.
        """

    def close(self) -> None:
        """Nothing is sent any more. Safe to call from any thread, and twice."""
