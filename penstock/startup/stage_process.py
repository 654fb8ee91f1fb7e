"""Stages in processes: what the lead and the others make of the sockets between them."""

from __future__ import annotations

import socket
from collections.abc import Callable

from penstock.runtime.executor import Executor
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.pipeline.lead import StagedSteps
from penstock.runtime.pipeline.links import QueueLink
from penstock.runtime.pipeline.stage import Stage
from penstock.runtime.pipeline.threads import StageThread
from penstock.runtime.pipeline.wire_link import WireLink

_LOGITS = 2  # messages of logits of long prompts that wait for the lead
_STEPS = 1 << 20  # that may wait for the first stage: steps that were given up are more than are outstanding


def lead_stages(
    first: Stage,
    ends: tuple[socket.socket, socket.socket],
    describe: tuple[str, ...],
    dead: Callable[[Exception], Exception],
) -> StagedSteps:
    """The first stage in a thread, before stages in processes.

    Args:
        first: this process's.
        ends: of the sockets to the second stage, and from the last one.
        describe: how each stage runs its steps.
        dead: what is raised once a process has ended.
    """
    stages = len(describe)
    given = QueueLink(_STEPS)
    results = WireLink(ends[1], stages + _LOGITS)
    thread = StageThread(first, given, WireLink(ends[0], 1))

    def close() -> None:
        thread.close()
        results.close()
        for end in ends:
            end.close()

    told = "; ".join(dict.fromkeys(describe))
    return StagedSteps((given, results), stages, f"{stages} stages: {told}", fast=first.fast, close=close, dead=dead)


def serve_stage(executor: Executor, memory: KVMemory, ends: tuple[socket.socket, socket.socket], *, last: bool) -> None:
    """A later stage's life: until the stage before it has ended."""
    source, target = WireLink(ends[0], 2), WireLink(ends[1], 1)
    try:
        Stage(executor, memory, last=last).serve(source, target)
    finally:
        source.close()
        target.close()
