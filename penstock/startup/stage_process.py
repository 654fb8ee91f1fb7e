"""Stages in processes: what the lead and the others make of the sockets between them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from penstock.layers.part import ModelPart
from penstock.runtime.adapters import OtherRooms
from penstock.runtime.executor import Executor
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.mover import Mover
from penstock.runtime.pipeline.lead import HeadHere, StagedSteps
from penstock.runtime.pipeline.links import QueueLink, Tee, Unheard
from penstock.runtime.pipeline.stage import Stage
from penstock.runtime.pipeline.threads import StageThread
from penstock.runtime.pipeline.wire_link import WireLink
from penstock.startup.stage_sockets import StageSockets

_LOGITS = 2  # messages of logits of long prompts that wait for the lead
_STEPS = 1 << 20  # that may wait for the first stage: steps that were given up are more than are outstanding


def lead_stages(
    first: Stage,
    sockets: StageSockets,
    describe: tuple[str, ...],
    dead: Callable[[Exception], Exception],
    head: HeadHere | None = None,
) -> StagedSteps:
    """The first stage in a thread, before stages in processes.

    Args:
        first: this process's.
        sockets: to the second stage and the other ranks of this one, and from the last stage.
        describe: how each stage runs its steps.
        dead: what is raised once a process has ended.
        head: of the model, where the last stage has none.
    """
    stages = len(describe)
    assert sockets.results is not None
    kept = (*sockets.columns, sockets.results)
    given = QueueLink(_STEPS)
    results = WireLink(sockets.results, stages + _LOGITS)
    behind, *others = sockets.columns
    besides = [WireLink(other, _STEPS) for other in others]
    thread = StageThread(first, given, WireLink(behind, 1))

    def close() -> None:
        thread.close()
        for link in (results, *besides):
            link.close()
        for end in kept:
            end.close()

    told = f"{stages} stages: {'; '.join(dict.fromkeys(describe))}"
    links = (Tee((given, *besides)), results)
    return StagedSteps(links, stages, told, fast=first.fast, close=close, dead=dead, head=head)


def serve_stage(
    executor: Executor,
    memory: KVMemory,
    ends: Sequence[socket.socket],
    mover: Mover,
    rooms: OtherRooms | None,
    part: ModelPart,
) -> None:
    """A later stage's life, or another rank's of the first: until what is before it has ended.

    `ends`: of the sockets from there and to what is behind it, if somebody takes what it gives. `mover` carries its
    share of blocks; `rooms` has what adapters change of its layers.
    """
    source = WireLink(ends[0], 2)
    target = WireLink(ends[1], 1) if len(ends) > 1 else Unheard()
    try:
        stage = Stage(executor, memory, last=part.end is None, head=part.with_head)
        stage.mover = mover
        stage.rooms = rooms
        stage.serve(source, target)
    finally:
        source.close()
        target.close()
