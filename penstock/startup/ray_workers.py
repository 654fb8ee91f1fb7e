"""Workers that Ray starts on the nodes of its cluster, each of which joins as any worker of another machine. No torch.

A placement group has a bundle for each (https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html).
"""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from typing import Any, Final

from penstock.config.errors import ConfigError, EngineDeadError
from penstock.config.machine import read_machine
from penstock.config.options import EngineOptions
from penstock.startup.door import Door

ROOM_S: Final = 60.0  # for which room for all workers is waited for
_UNREACHED: Final = ("192.0.2.1", 9)  # of RFC 5737: no packet is sent there


class RayWorkers:
    """Workers, one a bundle, spread over nodes as far as there are any. Used by one thread at a time."""

    def __init__(self, options: EngineOptions) -> None:
        """Raises ConfigError if Ray is not installed."""
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                f"--distributed-executor-backend ray needs Ray, which is not installed: pip install "
                f"'penstock-llm[ray]' ({error})."
            ) from None
        self._ray: Any = ray
        self._threads = options.threads or read_machine().cores  # a stage has a node for itself
        self._address = options.workers_address
        self._token = secrets.token_hex(32)
        self._group: Any = None
        self._tasks: list[Any] = []

    def door(self) -> Door:
        """Where they join, by a token that nobody else is told."""
        return Door(self._address or _own_address(), self._token)

    def start(self, count: int, door: Door) -> None:
        """Has Ray keep room for so many, and start them.

        Raises:
            ConfigError: Ray is not running, or it has no room.
        """
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = self._ray
        if not ray.is_initialized():
            try:
                ray.init(address="auto", namespace="penstock", log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError) as error:
                raise ConfigError(f"no Ray cluster is reached: {error} Start one with `ray start --head`.") from None
        self._group = placement_group([{"CPU": self._threads}] * count, strategy="SPREAD")
        if not self._group.wait(ROOM_S):
            free = ray.available_resources().get("CPU", 0)
            raise ConfigError(
                f"Ray has no room for {count} workers of {self._threads} processors each: {free:g} are free in its "
                "cluster. Take less --threads, or start `ray start --address …` on more machines."
            )
        task = ray.remote(_joined)
        for place in range(count):
            where = PlacementGroupSchedulingStrategy(self._group, place, True)
            options = task.options(num_cpus=self._threads, max_retries=0, scheduling_strategy=where)
            self._tasks.append(options.remote(door.address, self._token, {"threads": self._threads}))

    def check(self) -> None:
        """Raises EngineDeadError where a worker has ended, or could not be started."""
        ended, _ = self._ray.wait(self._tasks, timeout=0) if self._tasks else ([], [])
        for task in ended:
            try:
                why = f"with status {self._ray.get(task)}"
            except Exception as error:
                why = f": {type(error).__name__}: {error}"
            raise EngineDeadError(f"a worker that Ray started has ended {why}.")

    def close(self) -> None:
        """Ends those that still run, and gives their room back. Safe to call twice."""
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            with suppress(Exception):  # the cluster may be gone
                remove_placement_group(self._group)


def _own_address() -> str:
    """This machine's address, as others reach it, with any port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward, suppress(OSError):
        outward.connect(_UNREACHED)
        return f"{outward.getsockname()[0]}:0"
    return "127.0.0.1:0"


def _joined(address: tuple[str, int], token: str, own: dict[str, object]) -> int:
    """A worker's life, on a node of the cluster."""
    from penstock.startup.remote_worker import work

    return work(address, token, own, once=True)
