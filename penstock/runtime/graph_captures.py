"""How the launches of a step are captured once, to be done again without the host's work for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class GraphCapture(Protocol):
    """How launches are captured."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs `run`, then captures it: what is returned does the same again, on the same tensors."""


class CudaGraphCapture:
    """CUDA graphs. They are captured on a stream of their own, behind what was launched before."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """As GraphCapture; the first run compiles kernels, which cannot be done while capturing.

        It runs where steps do, so that what it frees is theirs: torch keeps freed memory for the stream that had it.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        run()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        except BaseException:
            self._renew()  # torch believes that the pool of a capture that failed is still in use
            raise
        current.wait_stream(self._stream)
        return graph.replay


class InterpretedCapture:
    """Stands in for CUDA graphs where there is no GPU: refuses what they refuse, and runs the function again."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """As GraphCapture."""
        run()
        with _NoReads():  # type: ignore[no-untyped-call]
            run()
        return run


class DryRun:
    """Runs once what would be captured."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """As GraphCapture."""
        run()
        return run


class _NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where the host would read a value that a device computes."""

    READS = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal", "bincount", "unique_dim")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.READS:
            raise RuntimeError(f"{func} reads from the device, which cannot be recorded")
        return func(*args, **(kwargs or {}))
