"""The processes of the ranks that follow, as the one that leads sees them: started, told, watched, and surely gone.

One thread starts them, reads what they report and waits for their ends, so that a worker that dies is noticed at once,
whatever the engine's thread is doing. A worker's end is the end of all: the group's collectives are stopped, the wires
are ended, and the step that runs raises EngineDeadError with the reason.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.config.environment import worker_token
from penstock.config.errors import CheckpointError, ConfigError, EngineDeadError, MemoryPlanError, PenstockError
from penstock.config.options import EngineOptions
from penstock.config.ranks import local_ranks, rank_count, rank_threads
from penstock.kernels.cpu.rank_group import WATCHER, RankGroup, make_memory
from penstock.parallel.ranks import Ranks
from penstock.runtime.ranks import joining, messages
from penstock.runtime.ranks.alarm import Alarm
from penstock.runtime.ranks.balance import ExpertBalancer
from penstock.runtime.ranks.gathered import GatheredMover
from penstock.runtime.ranks.group import Group
from penstock.runtime.ranks.lead import LeadAdapters, LeadDrafts, LeadExecutor, told
from penstock.runtime.ranks.wire import Wire, WireClosed
from penstock.startup.door import Door, relay
from penstock.startup.memory_plan import format_bytes
from penstock.startup.ray_workers import RayWorkers
from penstock.startup.rooms import Room
from penstock.startup.run_worker import run_worker
from penstock.startup.stage_sockets import StageSockets

if TYPE_CHECKING:
    from penstock.core.protocol import CacheOp
    from penstock.runtime.adapters import AdapterRoom
    from penstock.runtime.executor import Executor
    from penstock.runtime.kv_memory import KVMemory
    from penstock.runtime.mover import Mover
    from penstock.runtime.pipeline.lead import HeadHere, StagedSteps
    from penstock.runtime.pipeline.stage import Stage
    from penstock.runtime.ranks.experts import ExpertShelf
    from penstock.runtime.ranks.step_sizes import StepSizes
    from penstock.startup.build_runner import Loading
    from penstock.startup.engine_spec import EngineSpec

END_S: Final = 5.0  # that workers get to end by themselves
_WHY_S: Final = 1.0  # until it is known why a wire or a collective has ended
_ERRORS: Final = MappingProxyType({kind.__name__: kind for kind in (ConfigError, CheckpointError, MemoryPlanError)})
_LOOK_S: Final = 0.5
log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


class Worker:
    """One of them.

    Attributes:
        ranks: which rank it is.
        wire: to it.
        life: the lifeline to one of another machine.
        answers: Loaded and Ready, as they come.
    """

    def __init__(self, ranks: Ranks, wire: Wire, life: socket.socket | None = None) -> None:
        self.ranks = ranks
        self.wire, self.life = wire, life
        self.answers: list[messages.Report] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.ended = False  # nothing comes from it any more

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.ranks.rank} of {self.ranks.count}"

    def start(self, far_end: socket.socket, place: tuple[int, int], links: Sequence[socket.socket] = ()) -> None:
        """Starts the process, in which the far end of the wire is open, the memory that ranks share, and a stage's ends
        of sockets to others. `place`: that memory, and which of its ranks this is."""
        memory, rank = place
        ends = {"wire": far_end.fileno(), "parent": os.getpid(), "memory": memory, "rank": rank}
        numbers = [link.fileno() for link in links]
        self.process = run_worker({**ends, "links": numbers}, (far_end.fileno(), memory, *numbers))

    def cut(self) -> None:
        """Ends what connects it with this process."""
        self.wire.end()
        if self.life is not None:
            with suppress(OSError):
                self.life.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of the sockets."""
        self.wire.close()
        if self.life is not None:
            self.life.close()

    def reap(self, seconds: float) -> str:
        """Waits for the process, which is killed after so many seconds; how it ended, in a sentence."""
        if self.process is None:
            return f"{self.name}, which is of another machine, has gone."
        try:
            status = self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if status < 0:
            hint = " Signal 9 often means that memory ran out." if status == -signal.SIGKILL else ""
            return f"{self.name} was killed by signal {-status}.{hint}"
        return f"{self.name} ended with status {status}."


class Workers:
    """All of them; implements `runtime.ranks.lead.Followers`. Belongs to the engine's thread but for the watching.

    Attributes:
        group: what the ranks wait on while they compute.
        alarm, kv_sizes, layout: as of `runtime.ranks.gathered.OtherShares`, which this implements too.
    """

    def __init__(self, options: EngineOptions) -> None:
        """Starts the processes, which load their libraries meanwhile. `options` as they were asked for.

        Raises:
            EngineDeadError: one cannot be started.
        """
        self.count, self._local = rank_count(options), local_ranks(options)
        self._address = options.workers_address
        self._started = RayWorkers(options) if options.distributed_executor_backend == "ray" else None
        self._columns = options.tensor_parallel_size  # ranks of a stage
        self._memories = [make_memory(self._columns) for _ in range(options.pipeline_parallel_size)]
        self.group: Group = RankGroup(self._memories[0], 0)
        self._groups = [self.group, *(RankGroup(memory, WATCHER) for memory in self._memories[1:])]
        self._threads = options.threads
        self.alarm = Alarm()
        self.kv_sizes: list[tuple[int, ...]] = []
        self.layout = ""
        self._moved: Callable[[int, bool], None] = lambda transfer, failed: None
        self._first: tuple[Stage, StagedSteps] | None = None
        self._adapters: AdapterRoom | None = None
        self._sockets = StageSockets(options.pipeline_parallel_size, self._columns)
        self._workers: list[Worker] = []
        self._error: PenstockError | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._serving = False
        self._watcher = threading.Thread(target=self._watch, name="penstock-ranks", daemon=True)
        self._watcher.start()
        with self._changed:
            self._changed.wait_for(lambda: len(self._workers) >= self._local - 1 or self._error is not None)
        self.check()

    def rooms(self) -> tuple[Room, ...]:
        """What the machines have for their stages whose workers join, which is waited for.

        Raises:
            PenstockError: a worker has failed.
        """
        self._wait_for_all()
        found = self._answers(self._workers[self._local - 1 :])
        return tuple(Room(one.memory, one.speed) for one in found if isinstance(one, messages.Joined))

    def load(self, spec: EngineSpec, progress: Progress | None = None) -> Loading:
        """As `startup.build_runner.load`, of all ranks at once.

        Raises:
            PenstockError: as for one process; also of another rank, which is named.
        """
        from penstock.startup.build_runner import load  # and torch with it

        self._wait_for_all()
        options = replace(spec.options, logits_processors=(), shared_prompts=())
        cores = self._threads or (spec.options.threads or 1) * self._local
        level = logging.getLogger("penstock").getEffectiveLevel()
        self.layout = f"{self._columns} ranks of layers from {', '.join(str(part.first) for part in spec.stages)}"
        for worker in self._workers:
            part = spec.stages[worker.ranks.rank // options.tensor_parallel_size]
            launch = messages.Launch(
                options=options,
                rank=worker.ranks.rank,
                count=self.count,
                layers=(part.first, part.end),
                head=part.with_head,
                max_model_len=spec.plan.max_model_len,
                threads=rank_threads(cores, worker.ranks.rank, self._local),
                log_level=level,
                model_bytes=spec.facts.file_bytes,
            )
            self._send(worker, messages.encode(launch))

        def told_of(done: int, total: int) -> None:
            self.check()
            if progress is not None:
                progress(done, total)

        with self._together():
            found = load(spec, told_of)
        for worker, answer in zip(self._workers, self._answers(), strict=True):
            if isinstance(answer, messages.Loaded):
                size = format_bytes(answer.weights_bytes)
                log.info("%s has loaded its part, %s, in %.1f s", worker.name, size, answer.seconds)
        return found

    def make(self, sizes: StepSizes) -> None:
        """Has all make memory and executors."""
        self.check()
        for worker in self._workers:
            self._send(worker, messages.encode(messages.Make(sizes)))

    def join(self, executor: Executor, memory: KVMemory, experts: ExpertShelf, interval: int) -> Executor:
        """This rank's executor and memory with those of the others, which have made theirs.

        `experts` of this rank, which change with the load every `interval` steps.
        """
        self._ready()
        memory.told = told(self)
        between = ExpertBalancer(self, experts, interval).between_steps if experts.layers else None
        return LeadExecutor(executor, self, self.count, between)

    def share(self, adapters: AdapterRoom) -> None:
        """The other ranks read and place what this one does; where layers are dealt, in the turn of their steps."""
        self._adapters = adapters
        if not self._sockets.columns:
            adapters.others = LeadAdapters(self)

    def draft(self, executor: Executor) -> Executor:
        """This rank's executor of the layers that draft, with those of the others."""
        return LeadDrafts(executor, self, self.count)

    def behind(self, first: Stage, head: HeadHere | None) -> StagedSteps:
        """This rank's stage with those of the others, which have made theirs; `head` where the last has none."""
        from penstock.startup.stage_process import lead_stages

        described = (first.describe, *(ready.describe for ready in self._ready()))[:: self._columns]
        steps = lead_stages(first, self._sockets, described, self.failed, head)
        self._first = first, steps
        if self._adapters is not None:
            from penstock.runtime.adapters import LateFills

            self._adapters.others, first.rooms = steps, LateFills(self._adapters)
        return steps

    def _ready(self) -> list[messages.Ready]:
        """What all say who have made memory and executors."""
        found = [answer for answer in self._answers() if isinstance(answer, messages.Ready)]
        self.kv_sizes = [ready.kv_sizes for ready in found]
        self._serving = True
        return found

    def keep(self, asked: list[messages.KeepShare]) -> None:
        """As of OtherShares."""
        for worker, share in zip(self._workers, asked, strict=True):
            self._send(worker, messages.encode(share))
        self._answers()

    def gather(self, own: Callable[[Callable[[int, bool], None]], Mover], digest_of: Callable[[int], bytes]) -> Mover:
        """As of OtherShares."""

        def tell_ranks(op: CacheOp) -> None:
            mover.start(op)
            self.tell(messages.Apply(op))

        first, tell = (None, tell_ranks) if self._first is None else (self._first[0], self._first[1].apply)
        gathered = GatheredMover(self.count, tell, digest_of, lambda: mover.close())
        mover = own(gathered.note)
        self._moved = gathered.note
        if first is not None:
            first.mover = mover
        return gathered

    def check(self) -> None:
        """Raises the error of a worker that has failed, if one has."""
        if self._error is not None:
            raise self._error

    def tell(self, command: messages.Command) -> None:
        """As of `runtime.ranks.lead.Followers`."""
        if self._error is not None:
            raise self._dead()
        frame = messages.encode(command)
        for worker in self._workers:
            self._send(worker, frame)

    def failed(self, error: Exception) -> EngineDeadError:
        """As of `runtime.ranks.lead.Followers`."""
        if isinstance(error, EngineDeadError):
            return error
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None, _WHY_S)
            if self._error is None:
                self._error = EngineDeadError(f"rank 0 of {self.count} failed: {type(error).__name__}: {error}")
        self._stop()
        return self._dead()

    def close(self) -> None:
        """Ends the processes and waits for them; safe to call twice."""
        self._closing = True
        self._stop()
        if threading.current_thread() is not self._watcher:  # which may be collecting garbage
            self._watcher.join()
        self.alarm.close()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Within, what this rank cannot do since another has failed is that one's error."""
        try:
            yield
        except RuntimeError:
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None, _WHY_S)
            self.check()
            raise

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"The engine cannot go on: {self._error}")

    def _send(self, worker: Worker, frame: bytes) -> None:
        try:
            worker.wire.send(frame)
        except WireClosed as error:
            dead = self.failed(error)
            if not self._serving and self._error is not None:
                raise self._error from None  # why it could not start, as what it is
            raise dead from None

    def _wait_for_all(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._workers) == self.count - 1 or self._error is not None)
        self.check()

    def _answers(self, workers: Sequence[Worker] | None = None) -> list[messages.Report]:
        """The next answer of each, or of each of these."""
        asked = self._workers if workers is None else workers
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or all(one.answers for one in asked))
            self.check()
            return [worker.answers.pop(0) for worker in asked]

    def _stop(self) -> None:
        for group in self._groups:
            group.stop()
        for worker in self._workers:
            worker.cut()

    # ---- below: the watching thread

    def _watch(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                self._start(selector)
                while selector.get_map():
                    for key, _ in selector.select():
                        self._hear(key.data)
                    for key in [key for key in selector.get_map().values() if key.data.ended]:
                        selector.unregister(key.fileobj)
        except Exception as error:
            log.exception("the ranks are not watched any more")
            self._note(EngineDeadError(f"the ranks are not watched any more: {type(error).__name__}: {error}"))
        until = time.monotonic() + END_S
        for worker in self._workers:
            worker.reap(until - time.monotonic())
            worker.close()
        if self._started is not None:
            self._started.close()

    def _start(self, selector: selectors.BaseSelector) -> None:
        try:
            self._start_local(selector)
        finally:
            for memory in self._memories:  # which all have now
                os.close(memory)
        if self._local < self.count and self._error is None:
            try:
                self._gather(selector)
            except (ConfigError, EngineDeadError) as error:
                self._note(error)
        self._sockets.handed_over()

    def _start_local(self, selector: selectors.BaseSelector) -> None:
        for rank in range(1, self._local):
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            worker = Worker(Ranks(rank, self.count), Wire(near))
            with far:
                try:
                    stage, column = divmod(rank, self._columns)
                    worker.start(far, (self._memories[stage], column), self._sockets.of(stage, column))
                except OSError as error:
                    near.close()
                    self._note(EngineDeadError(f"{worker.name} cannot be started: {error}."))
                    return
            self._add(worker, selector)

    def _add(self, worker: Worker, selector: selectors.BaseSelector) -> None:
        selector.register(worker.wire, selectors.EVENT_READ, worker)
        if worker.life is not None:
            selector.register(worker.life, selectors.EVENT_READ, worker)
        with self._changed:
            self._workers.append(worker)
            self._changed.notify_all()

    def _gather(self, selector: selectors.BaseSelector) -> None:
        """Lets workers of other machines join until all are there; those that are may go meanwhile."""
        missing = self.count - self._local
        with self._started.door() if self._started else Door(self._address or "", worker_token()) as door:
            if self._started is not None:
                self._started.start(missing, door)
            log.info("waiting for %d workers at %s:%d", missing, *door.address)
            while len(self._workers) < self.count - 1 and not self._closing and self._error is None:
                for key, _ in selector.select(0):
                    self._hear(key.data)
                if self._started is not None:
                    self._started.check()
                joined = door.next(_LOOK_S)
                if joined is None:
                    continue
                rank = 1 + len(self._workers)
                source, target = self._sockets.of(rank // self._columns, rank % self._columns)
                relay(source.dup(), joined[joining.FROM])
                relay(joined[joining.TO], target.dup())
                wire = Wire(joined[joining.WIRE])
                self._add(Worker(Ranks(rank, self.count), wire, joined[joining.LIFE]), selector)

    def _hear(self, worker: Worker) -> None:
        if worker.life is not None and gone(worker.life):
            worker.wire.end()
        for frame in worker.wire.arrived():
            if frame is None:
                worker.ended = True
                if not self._closing and self._error is None:
                    self._note(EngineDeadError(worker.reap(_WHY_S)))
                return
            self._take(worker, frame)

    def _take(self, worker: Worker, frame: bytes) -> None:
        try:
            report = messages.report(frame)
        except msgspec.DecodeError as error:
            self._note(EngineDeadError(f"{worker.name} reports what is no report: {error}"))
            return
        match report:
            case messages.Progress():
                pass
            case messages.Moved(transfer=transfer, failed=failed):
                self._moved(transfer, failed)
            case messages.Failed(kind=kind, message=message):
                self._note(_ERRORS.get(kind, EngineDeadError)(f"{worker.name}: {message}"))
            case _:
                with self._changed:
                    worker.answers.append(report)
                    self._changed.notify_all()

    def _note(self, error: PenstockError) -> None:
        """A worker's failure, of which the first counts: all are stopped."""
        with self._changed:
            if self._error is None:
                self._error = error
                if self._serving and not self._closing:
                    log.error("%s", error)
                    self.alarm.ring(self._dead())
            self._changed.notify_all()
        self._stop()


def gone(life: socket.socket) -> bool:
    """Whether a lifeline has ended; nothing is ever said on one."""
    try:
        life.recv(1, socket.MSG_DONTWAIT)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
    return True
