"""What all engines of a process compute with: the native library's instruction set and threads, torch's settings.

None of them is an engine's alone, so the first one chooses and the others agree with it until it is gone.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from dataclasses import replace

from penstock.config.data_parallel import check_one_engine
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.ranks import check_ranks, local_ranks, own_threads
from penstock.kernels.cpu import native


class _Process:
    """What is in use, and who holds it. `threads` is None until the first engine knows how many it takes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.claims: set[int] = set()
        self.taken = 0
        self.isa = "none"
        self.threads: int | None = None


@functools.cache
def _process() -> _Process:
    return _Process()


class Claim:
    """A say in what this process computes with, until it is released or nobody refers to it any more.

    Attributes:
        options: those it was made with; what they leave open is what other engines of this process use.
    """

    def __init__(self, options: EngineOptions) -> None:
        """Chooses the instruction set, unless other claims have.

        Raises:
            ConfigError: there is no such instruction set, or other engines use another one or other threads; or there
                cannot be so many processes.
        """
        process = _process()
        check_ranks(options)
        check_one_engine(options, "here one engine is made")
        asked = own_threads(options)
        if process.claims:
            gc.collect()  # engines that were dropped
        with process.lock:
            if not process.claims:
                process.isa = native.select_isa(options.isa) if native.available() else "none"
                process.threads = None
            elif native.available() and options.isa not in ("auto", process.isa):
                raise _refused("isa", options.isa, process.isa)
            elif asked is not None and process.threads not in (None, asked):
                raise _refused("threads", asked, process.threads)
            process.taken += 1
            self._number = process.taken
            self._closes: list[Callable[[], None]] = []
            process.claims.add(self._number)
            isa = process.isa if native.available() and len(process.claims) > 1 else options.isa
            used = None if process.threads is None else process.threads * local_ranks(options)
            self.options = replace(options, isa=isa, threads=options.threads or used)

    def settle(self, resolved: EngineOptions, *, with_torch: bool = True) -> None:
        """Gives torch and the native library threads and types of sums, as this claim's options were resolved.

        Without torch it gets the threads when it is loaded, if ever (`runtime.places.Host`).

        Raises:
            ConfigError: other engines have taken other threads meanwhile.
        """
        process = _process()
        with process.lock:
            threads = process.threads or resolved.threads or 1
            if own_threads(self.options) not in (None, threads):
                raise _refused("threads", own_threads(self.options), threads)
            if native.available() and process.threads is None:
                native.set_num_threads(threads)
            process.threads = threads
            if with_torch:
                _settle_torch(threads, on_gpu=resolved.on_gpu)

    def closing(self, close: Callable[[], None]) -> None:
        """Has something closed with what this claim is for."""
        self._closes.append(close)

    def release(self) -> None:
        """Leaves the settings to others, and closes what is to be closed; safe to call twice."""
        _process().claims.discard(self._number)
        while self._closes:
            self._closes.pop()()

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            self.release()


def _settle_torch(threads: int, *, on_gpu: bool) -> None:
    import torch

    from penstock.kernels import devices

    torch.set_num_threads(threads)
    if on_gpu:
        devices.multiply_exactly()


def _refused(name: str, value: object, used: object) -> ConfigError:
    return ConfigError(
        f"{name} is {value!r}, but another engine of this process computes with {name} {used!r}, which they share. "
        f"Leave {name} out or give {used!r}, close the other engine first, or use another process."
    )
