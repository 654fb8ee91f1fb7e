"""A rank's process: `penstock.startup.worker_process PACKAGE ENDS`, of `startup.workers` or `penstock worker`.

It takes its orders from the wire whose end lies open in it, and ends with it: when the one that leads closes it or
dies. Linux kills it with its parent, which is the one that leads or, on another machine, `penstock worker`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.config.environment import read_environment, settle_torch
from penstock.config.errors import ConfigError, PenstockError
from penstock.config.logs import log_handler
from penstock.parallel.ranks import Ranks
from penstock.startup.shortage import shortage_as_plan_error

if TYPE_CHECKING:
    from penstock.runtime.ranks import messages
    from penstock.runtime.ranks.group import Group
    from penstock.runtime.ranks.wire import Wire
    from penstock.startup.engine_spec import Declaration

T = TypeVar("T")
LOOK_S: Final = 0.5
_GRACE_S: Final = 4.0  # for what runs, once the wire has ended, and for copies on their way to a store
_PR_SET_PDEATHSIG: Final = 1
_log = logging.getLogger(__name__)


def die_with(parent: int) -> None:
    """Asks Linux to kill this process with its parent's thread that started it, even while it is stopped."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def watch(ends: Sequence[int], group: Group, parent: int) -> None:
    """Ends this process a moment after one of these connections has ended, or its parent; what waits for other ranks is
    stopped.
    """
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLRDHUP if sys.platform == "linux" else 0)
    while os.getppid() == parent and not poll.poll(int(1000 * LOOK_S)):
        pass
    group.stop()
    time.sleep(_GRACE_S)
    os._exit(1)


@dataclass(frozen=True, slots=True)
class Ends:
    """What such a process is started with, as JSON: descriptors that lie open in it, and who it is.

    Attributes:
        wire: to the one that leads.
        parent: process id.
        memory: of the ranks of its stage; None for one alone.
        rank: which of those it is.
        links: from the stage before, and to the one behind; () where there are no stages.
        life: the lifeline to another machine.
        own: fields of `Own`.
    """

    wire: int
    parent: int
    memory: int | None = None
    rank: int = 0
    links: Sequence[int] = ()
    life: int | None = None
    own: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Own:
    """What a worker of another machine does not take from the one that leads.

    Attributes:
        model: where the model lies; None for where the one that leads has it.
        threads: None for those that it was dealt.
        memory: bytes that it may take; None for what is free.
    """

    model: str | None = None
    threads: int | None = None
    memory: int | None = None

    def joined(self) -> messages.Joined:
        """What this machine has for a stage."""
        from penstock.config.machine import read_machine
        from penstock.runtime.ranks import messages
        from penstock.startup.rooms import measured_speed

        machine = read_machine().within(self.memory)
        return messages.Joined(machine.memory_available, measured_speed(self.threads or machine.cores))


def loaded(launch: messages.Launch, group: Group, wire: Wire, own: Own) -> Declaration:
    """The rank's part of the model, its weights filled.

    Raises:
        PenstockError: as for an engine that starts; also for another model.
    """
    from penstock.config.ranks import alone
    from penstock.layers.part import WHOLE, ModelPart
    from penstock.runtime.ranks import messages
    from penstock.startup.build_runner import fill
    from penstock.startup.claim import Claim
    from penstock.startup.engine_spec import declare_rank
    from penstock.startup.kv_probe import choose_kv_types

    options = replace(launch.options, model=own.model or launch.options.model)
    one = replace(alone(options), threads=own.threads or launch.threads)
    Claim(one).settle(one)
    count = options.tensor_parallel_size
    part = WHOLE if launch.layers == (0, None) else ModelPart(*launch.layers, head=launch.head)
    spec = declare_rank(options, launch.max_model_len, Ranks(launch.rank % count, count), group, part)
    if spec.facts.file_bytes != launch.model_bytes:
        raise ConfigError(
            f"{options.model} is another model: its tensors take {spec.facts.file_bytes} bytes, not "
            f"{launch.model_bytes}. Bring the one that is led here, and name its place with --model."
        )
    fill(spec, lambda done, total: wire.send(messages.encode(messages.Progress(done, total))))
    # The one that leads decides; it computes the probe with all ranks.
    choose_kv_types(spec.model, spec.groups, options.kv_cache_dtype, options.block_size)
    return spec


def serve(wire: Wire, group: Group, own: Own, links: Sequence[socket.socket] = ()) -> None:
    """Loads, makes and runs what it is told, or what a stage before gives. Whatever is raised is this rank's end.

    `links`: of a stage, sockets from the one before it and to the one behind it.
    """
    from penstock.runtime.adapters import FollowingRoom
    from penstock.runtime.mover import Mover
    from penstock.runtime.ranks import messages
    from penstock.runtime.ranks.experts import ExpertShelf
    from penstock.runtime.ranks.follower import Follower
    from penstock.startup.adapters import make_adapter_room
    from penstock.startup.build_runner import rank_parts
    from penstock.startup.draft_self import rank_drafts
    from penstock.startup.shares import keeps_below, kv_sizes, share_mover
    from penstock.weights.weight_plan import planned_bytes

    launch = _next(wire, messages.Launch)
    if launch is None:
        return
    logging.getLogger().setLevel(launch.log_level)
    began = time.monotonic()
    spec = loaded(launch, group, wire, own)
    wire.send(messages.encode(messages.Loaded(planned_bytes(spec.weights), time.monotonic() - began)))
    make = _next(wire, messages.Make)
    if make is None:
        return
    adapters = make_adapter_room(spec)
    memory, builder, executor = rank_parts(spec, make.sizes)
    experts = ExpertShelf(spec.model, group)
    wire.send(messages.encode(messages.Ready(executor.describe, kv_sizes(launch.options, memory))))
    mover = Mover()
    if keeps_below(launch.options):
        asked = _next(wire, messages.KeepShare)
        if asked is None:
            return
        name = Ranks(launch.rank, launch.count)
        mover = share_mover(launch.options, memory, name, asked, partial(_tell_moved, wire))
        wire.send(messages.encode(messages.Kept()))
    if links:
        from penstock.startup.stage_process import serve_stage

        rooms = FollowingRoom(adapters) if launch.options.enable_lora else None
        serve_stage(executor, memory, links, mover, rooms, spec.model.part)
    else:
        drafts = rank_drafts(spec.model, launch.options, memory.caches)
        Follower(executor, memory, builder, adapters, experts, mover, drafts).serve(wire)
    mover.close()  # after an error this process is gone at once


def _tell_moved(wire: Wire, transfer: int, failed: bool) -> None:
    from penstock.runtime.ranks import messages
    from penstock.runtime.ranks.wire import WireClosed

    with suppress(WireClosed):  # this process ends with it
        wire.send(messages.encode(messages.Moved(transfer, failed)))


def _next(wire: Wire, kind: type[T]) -> T | None:
    """The next command, which is of that kind; None at the end."""
    from penstock.runtime.ranks import messages

    frame = wire.receive()
    if frame is None:
        return None
    command = messages.command(frame)
    if not isinstance(command, kind):
        raise ValueError(f"{type(command).__name__} came where {kind.__name__} was to come")
    return command


def last_words(error: BaseException) -> messages.Failed:
    """What the one that leads is told: a deliberate error's own text; of another a line, the rest is logged."""
    from penstock.runtime.ranks import messages

    said = shortage_as_plan_error(error)
    if isinstance(said, PenstockError):
        return messages.Failed(type(said).__name__, str(said))
    return messages.Failed("EngineDeadError", f"{type(error).__name__}: {error}")


def _joined(memory: int | None, rank: int) -> Group:
    """The group of a rank, whose memory lies open at a descriptor; the null form on another machine."""
    from penstock.kernels.cpu.rank_group import RankGroup
    from penstock.runtime.ranks.group import NullGroup

    if memory is None:
        return NullGroup()
    group = RankGroup(memory, rank)
    os.close(memory)
    return group


def main() -> int:
    """The process's life; returns its exit status."""
    ends = Ends(**json.loads(sys.argv[2]))
    die_with(ends.parent)
    logging.basicConfig(handlers=[log_handler(form=read_environment().log_format)])
    settle_torch()
    from penstock.runtime.ranks import messages
    from penstock.runtime.ranks.wire import Wire, WireClosed

    wire, group = Wire(socket.socket(fileno=ends.wire)), _joined(ends.memory, ends.rank)
    watched = [ends.wire] if ends.life is None else [ends.wire, ends.life]
    threading.Thread(target=watch, args=(watched, group, ends.parent), name="lead-watch", daemon=True).start()
    own = Own(**ends.own)
    try:
        if ends.life is not None:
            wire.send(messages.encode(own.joined()))
        serve(wire, group, own, [socket.socket(fileno=link) for link in ends.links])
    except WireClosed:
        return 0
    except BaseException as error:
        with suppress(WireClosed):
            wire.send(messages.encode(last_words(error)))
        if not isinstance(error, PenstockError):
            _log.debug("a rank ends", exc_info=error)
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())  # without a finalizer, which may meet threads of libraries at work and crash
