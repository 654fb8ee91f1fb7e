"""The executor and the memory of the rank that leads: each tells the others what it is about to do, then does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.config.errors import EngineDeadError
from penstock.layers.batch import Batch
from penstock.runtime.ranks import messages

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.config.adapters import AdapterUse
    from penstock.core.protocol import CacheOp
    from penstock.kernels.cpu.step_program import DecodeProgram
    from penstock.layers.part import LayerStates
    from penstock.runtime.batch_builder import BatchBuilder
    from penstock.runtime.executor import Executor
    from penstock.runtime.replay import Rows

T = TypeVar("T")


def _nothing() -> None:
    """Between steps of which each begins at once."""


class Followers(Protocol):
    """The other ranks, as the one that leads sees them."""

    def tell(self, command: messages.Command) -> None:
        """Sends a command to all of them; waits while one is far behind.

        Raises:
            EngineDeadError: one of them has ended.
        """

    def failed(self, error: Exception) -> EngineDeadError:
        """Why no step can be computed any more, after an error here; they are stopped."""


class LeadExecutor:
    """An executor whose calls all ranks make, in one order. Any rank's failure is the end of all."""

    def __init__(
        self, executor: Executor, followers: Followers, count: int, between: Callable[[], None] | None = None
    ) -> None:
        """`executor` is this rank's own, of `count` ranks; `between` is called ahead of each step."""
        self._own = executor
        self._between = between or _nothing
        self._followers = followers
        self.fast, self.gives = executor.fast, executor.gives
        self.describe = f"{executor.describe}, in each of {count} processes"

    def forward(self, batch: Batch, given: LayerStates | None = None) -> None:
        self._together(self._between)
        self._followers.tell(messages.forward(batch))
        self._together(lambda: self._own.forward(batch, given))

    def logits(self, rows: Rows | None = None) -> Tensor:
        self._followers.tell(messages.Logits(_rows(rows)))
        return self._together(lambda: self._own.logits(rows))

    def decoding(self, builder: BatchBuilder) -> Any:
        program = self._own.decoding(builder)
        return None if program is None else LeadDecoding(program, builder, self._followers, self._between)

    def states(self) -> LayerStates:
        return self._own.states()

    def tap(self, name: str, count: int | None = None) -> Tensor:
        return self._own.tap(name, count)

    def scores(self) -> Mapping[int, Tensor]:
        return self._own.scores()

    def hidden(self) -> Tensor:
        return self._own.hidden()

    def _together(self, call: Callable[[], T]) -> T:
        return _together(self._followers, call)


class LeadDrafts(LeadExecutor):
    """As a LeadExecutor, of the layers that draft, beside those of all steps."""

    def forward(self, batch: Batch, given: LayerStates | None = None) -> None:
        self._followers.tell(messages.DraftForward(messages.forward(batch)))
        self._together(lambda: self._own.forward(batch, given))

    def logits(self, rows: Rows | None = None) -> Tensor:
        self._followers.tell(messages.DraftLogits(_rows(rows)))
        return self._together(lambda: self._own.logits(rows))

    def decoding(self, builder: BatchBuilder) -> Any:
        return None  # the others have no tables of these


class LeadDecoding:
    """As `DecodeProgram`, of all ranks. Each keeps block tables, which are told what the builder's have got."""

    def __init__(
        self,
        program: DecodeProgram,
        builder: BatchBuilder,
        followers: Followers,
        between: Callable[[], None],
    ) -> None:
        self._program, self._builder = program, builder
        self._followers, self._between = followers, between
        self._spans: tuple[Any, ...] = ()

    def fill(self, spans: tuple[Any, ...]) -> bool:
        """As of DecodeProgram."""
        slots = tuple(span.slot for span in spans)
        for group in range(len(self._builder.tables)):
            if (blocks := self._entered(group, slots)) is not None:
                self._followers.tell(blocks)
        self._spans = spans
        return self._program.fill(spans)

    def run(self) -> npt.NDArray[np.float32]:
        """As of DecodeProgram."""
        return _together(self._followers, self._run)

    def _run(self) -> npt.NDArray[np.float32]:
        self._between()
        self._followers.tell(messages.Decode(self._spans))
        return self._program.run()

    def _entered(self, group: int, slots: tuple[int, ...]) -> messages.Blocks | None:
        """What has entered a group's table for these slots since they decoded last."""
        places, blocks = self._builder.changes(group, slots)
        if not len(places):
            return None
        used = tuple(self._builder.used[group][list(slots)].tolist())
        return messages.Blocks(group, messages.array(places), messages.array(blocks), slots, used)


def _rows(rows: Rows | None) -> messages.Array | None:
    return None if rows is None else messages.array(np.asarray(rows, np.int64))


def _together(followers: Followers, call: Callable[[], T]) -> T:
    """What a call gives that all ranks make; if it raises here, the others may have gone on, and all end."""
    try:
        return call()
    except Exception as error:
        raise followers.failed(error) from error


class LeadAdapters:
    """What this rank reads and places of adapters the others read and place too; implements `OtherRooms`."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers

    def read(self, uses: tuple[AdapterUse, ...]) -> None:
        """As OtherRooms."""
        self._followers.tell(messages.Read(uses))

    def place(self, slot: int, use: AdapterUse) -> None:
        """As OtherRooms."""
        self._followers.tell(messages.Place(slot, use))


def told(followers: Followers) -> Callable[[CacheOp], None]:
    """What a KV memory calls ahead of each operation."""
    return lambda op: followers.tell(messages.Apply(op))
