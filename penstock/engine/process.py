"""The engine process: `python -m penstock.engine.process`, started by ProcessClient with a Launch on standard input.

It binds one socket for the commands of all its clients and connects one for events to each, all inside a directory
only its user may enter. It ends on SIGTERM and when its parent, the first client, ends; SIGINT is the parent's to
judge. Other clients come and go.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from penstock.config.cores import AllCores, CoreShare
from penstock.config.environment import read_environment, settle_torch
from penstock.config.errors import ConfigError, EngineDeadError, PenstockError
from penstock.config.logs import log_handler
from penstock.engine import messages, request_names
from penstock.engine.driver import EngineDriver
from penstock.engine.event_sockets import Clients, EventSocket
from penstock.engine.messages import MessageError
from penstock.engine.watched_time import WatchedTime
from penstock.engine.work_record import WorkRecord
from penstock.startup.prefix_news import telling_prefixes
from penstock.startup.shortage import shortage_as_plan_error

if TYPE_CHECKING:
    from penstock.engine.api import EngineInfo
    from penstock.engine.loop import Engine

HEARTBEAT_S = 0.4
STEP_TIMEOUT_S = 600.0
_COMMANDS_A_STEP = 1024
_PR_SET_PDEATHSIG = 1
_ORPHANED = signal.SIGUSR2  # a signal of its own: the parent's id may change only after its first thread's death
_log = logging.getLogger(__name__)


class Heart:
    """A thread that sends heartbeats; it ends the process when its parent is gone or a step hangs for STEP_TIMEOUT_S.

    Attributes:
        step_began: when the running step began (monotonic seconds), None between steps.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], launch: messages.Launch) -> None:
        self.step_began: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(context, launch), name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self, context: zmq.Context[zmq.Socket[bytes]], launch: messages.Launch) -> None:
        events, clock = EventSocket(context, launch.events), WatchedTime(2 * HEARTBEAT_S)
        step, since = self.step_began, 0.0
        while not self._stop.wait(HEARTBEAT_S):
            if os.getppid() != launch.parent:
                remove_files(launch)
                os._exit(1)
            now = clock.seconds()
            if step != self.step_began:
                step, since = self.step_began, now
            elif step is not None and now - since > STEP_TIMEOUT_S:
                _log.critical("a step has taken more than %g s; the engine process ends", STEP_TIMEOUT_S)
                os._exit(2)
            events.send(messages.Heartbeat())
        events.close()


def remove_files(launch: messages.Launch) -> None:
    """Removes what the parent did not live to remove."""
    files = [Path(name.removeprefix("ipc://")) for name in (launch.commands, launch.events, launch.work)]
    with contextlib.suppress(OSError):
        for path in files:
            path.unlink(missing_ok=True)
        files[0].parent.rmdir()


def die_with_parent(parent: int) -> None:
    """Asks Linux for a signal when the parent ends; where that does not help, the heartbeat thread notices."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _ORPHANED, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def serve(
    driver: EngineDriver,
    info: EngineInfo,
    commands: zmq.Socket[bytes],
    clients: Clients,
    heart: Heart,
    wake: socket.socket,
    cores: CoreShare | AllCores,
    tell: Callable[[], None],
) -> int:
    """Takes commands and steps until a signal makes `wake` readable; sleeps while there is nothing to do. `tell` tells
    what is known only after a step.

    Returns:
        The signal's number.

    Raises:
        EngineDeadError: the engine cannot go on.
    """
    poller = zmq.Poller()
    poller.register(commands, zmq.POLLIN)
    poller.register(wake.fileno(), zmq.POLLIN)
    alarm = driver.alarm
    if alarm is not None:
        poller.register(alarm.fileno(), zmq.POLLIN)
    while True:
        if not driver.has_work:
            cores.rest()
        ready = dict(poller.poll(0 if driver.has_work else None))
        if wake.fileno() in ready:
            return wake.recv(1)[0]
        if alarm is not None and alarm.error is not None:
            raise alarm.error
        for _ in range(_COMMANDS_A_STEP):
            try:
                frame = commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            obey(driver, info, clients, frame)
        if driver.has_work:
            cores.work()
        heart.step_began = time.monotonic()
        driver.step()
        tell()
        heart.step_began = None


def obey(driver: EngineDriver, info: EngineInfo, clients: Clients, frame: bytes) -> None:
    """Carries out one command; a frame that is none is logged and dropped."""
    try:
        command = messages.decode_command(frame)
    except MessageError as error:
        _log.warning("dropped: %s", error)
        return
    match command:
        case messages.Submit(request=request, so_far=so_far):
            if request_names.client_of(request.request_id) in clients:  # else it left this behind
                driver.submit(request, so_far)
        case messages.Cancel(request_id=request_id):
            driver.cancel(request_id)
        case messages.EndReasoning(request_id=request_id):
            driver.end_reasoning(request_id)
        case messages.Tell(control=control):
            driver.control(control)
        case messages.StatsQuery(client=client):
            clients.send(client, messages.Stats(driver.stats()))
        case messages.Attach(client=client, events=endpoint):
            clients.attach(client, endpoint)
            clients.send(client, messages.Ready(info))
        case messages.Detach(client=client):
            clients.detach(client)
            driver.leave(request_names.prefix(client))


@contextlib.contextmanager
def wake_on_signal() -> Iterator[socket.socket]:
    """Yields a socket on which a signal to end can be read; before this, while loading, SIGTERM ends it at once."""
    wake, signalled = socket.socketpair()
    signalled.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, _ORPHANED):
        signal.signal(number, lambda *_: None)
    with wake, signalled:
        yield wake
        signal.set_wakeup_fd(-1)


def build(launch: messages.Launch, events: EventSocket) -> tuple[Engine, EngineInfo]:
    """Builds the engine, reporting progress."""
    settle_torch()
    try:
        from penstock.engine.build import build_engine
    except Exception as error:  # libraries that find no room
        raise shortage_as_plan_error(error) from None

    return build_engine(launch.options, events.progress, grammars=True)


def share_of_cores(launch: messages.Launch) -> CoreShare | AllCores:
    """What this engine, which is built, notes and learns of those beside it."""
    from penstock.kernels.cpu import native

    if launch.cores is None or not native.available():
        return AllCores()
    try:
        threads = int(native.library().num_threads())
        return CoreShare(launch.cores, launch.place, threads, native.set_num_threads)
    except (OSError, ValueError) as error:
        _log.warning("the cores are not shared with the other engines: %s", error)
        return AllCores()


def run(launch: messages.Launch) -> int:
    """The process's life; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events = EventSocket(context, launch.events)
    heart = Heart(context, launch)
    commands = context.socket(zmq.PULL)
    commands.set(zmq.RCVHWM, 0)
    commands.set(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
    orphaned = False
    try:
        logging.getLogger().setLevel(read_environment().log_level.upper())
        commands.bind(launch.commands)
        engine, info = build(launch, events)
        engine.works_on = WorkRecord(Path(launch.work)).note
        clients = Clients(context, events)
        driver = EngineDriver(engine, clients)
        cores = share_of_cores(launch)
        cache = engine.scheduler.cache
        tell = telling_prefixes(cache, launch.prefixes, lambda news: events.send(messages.Prefixes(news)))
        closing = contextlib.closing
        with closing(clients), closing(driver), closing(cores), wake_on_signal() as wake:
            events.send(messages.Ready(info))
            orphaned = serve(driver, info, commands, clients, heart, wake, cores, tell) == _ORPHANED
    except Exception as error:
        events.send(last_words(error))
        return 1
    finally:
        heart.stop()
        events.close()
        commands.close(0)
        context.term()
        if orphaned:
            remove_files(launch)
    return 0


def last_words(error: Exception) -> messages.Fatal:
    """What the client is told: a deliberate error's own text; of an unexpected one a line, the rest is logged."""
    if isinstance(error, EngineDeadError) or not isinstance(error, PenstockError):
        _log.error("the engine process ends", exc_info=error)
    if isinstance(error, PenstockError):
        return messages.Fatal(type(error).__name__, str(error))
    return messages.Fatal("EngineDeadError", f"The engine failed: {type(error).__name__}: {error}")


def main() -> int:
    """Reads the Launch and runs."""
    logging.basicConfig(handlers=[log_handler(form=read_environment().log_format)])
    signal.signal(_ORPHANED, signal.SIG_IGN)  # while it loads: the heartbeat thread sees it too, and tidies up
    try:
        launch = messages.decode_launch(sys.stdin.buffer.read())
    except MessageError as error:
        raise ConfigError("this module is started by Penstock itself, with its options on standard input") from error
    die_with_parent(launch.parent)
    return run(launch)


if __name__ == "__main__":
    os._exit(main())  # without a finalizer, which may meet threads of libraries at work and crash
