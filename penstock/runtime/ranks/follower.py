"""A rank that does what the one that leads tells it, and tells nothing of its steps while all is well."""

from __future__ import annotations

import torch

from penstock.core.protocol import ScheduledTokens
from penstock.runtime.adapters import AdapterRoom
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.executor import Executor
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.mover import MOVES, Mover
from penstock.runtime.ranks import messages
from penstock.runtime.ranks.experts import ExpertShelf
from penstock.runtime.ranks.wire import Wire


class Follower:
    """An executor, its memory, and block tables for steps that are told by what is new in them."""

    def __init__(
        self,
        executor: Executor,
        memory: KVMemory,
        builder: BatchBuilder,
        adapters: AdapterRoom | None = None,
        experts: ExpertShelf | None = None,
        mover: Mover | None = None,
        drafts: Executor | None = None,
    ) -> None:
        """`mover` carries this rank's share of blocks to and from a lower tier; `drafts` runs the layers that draft."""
        self._drafts = drafts
        self._adapters = adapters or AdapterRoom()
        self._experts = experts
        self._executor, self._memory = executor, memory
        self._mover = mover or Mover()
        self._builder = builder
        self._decoding = executor.decoding(builder)

    @torch.inference_mode()
    def serve(self, wire: Wire) -> None:
        """Obeys until the wire ends. Whatever is raised is this rank's end."""
        while (frame := wire.receive()) is not None:
            self.obey(messages.command(frame))

    def obey(self, command: messages.Command) -> None:
        """Carries out one command.

        Raises:
            ValueError: it is none of a rank that has started.
        """
        match command:
            case messages.Decode(spans=spans):
                self._decode(spans)
            case messages.Blocks():
                self._enter(command)
            case messages.Forward():
                self._executor.forward(messages.batch_of(command))
            case messages.Logits(rows=rows):
                self._executor.logits(None if rows is None else messages.tensor(rows).numpy())
            case messages.DraftForward(step=step) if self._drafts is not None:
                self._drafts.forward(messages.batch_of(step))
            case messages.DraftLogits(rows=rows) if self._drafts is not None:
                self._drafts.logits(None if rows is None else messages.tensor(rows).numpy())
            case messages.Apply(op=op):
                (self._mover.start if op.kind in MOVES else self._memory.apply)(op)
            case messages.Read(uses=uses):
                self._adapters.read(uses)
            case messages.Place(slot=slot, use=use):
                self._adapters.place_read(slot, use)
            case messages.PassExperts() | messages.PutExperts() if self._experts is not None:
                self._experts.obey(command)
            case _:
                raise ValueError(f"{type(command).__name__} is no command of a rank that has started")

    def _decode(self, spans: tuple[ScheduledTokens, ...]) -> None:
        if self._decoding is None or not self._decoding.fill(spans):
            raise ValueError("a step in which each row computes one token cannot be run by this rank")
        self._decoding.run()

    def _enter(self, new: messages.Blocks) -> None:
        table, used = self._builder.tables[new.group], self._builder.used[new.group]
        table.reshape(-1)[messages.tensor(new.places).numpy()] = messages.tensor(new.blocks).numpy()
        used[list(new.slots)] = new.used
