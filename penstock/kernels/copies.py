"""Copies between host and device that do not keep the host waiting: from and to pinned memory, queued with the work.

Every copy has memory of its own. Torch's allocator of pinned memory gives a block out again only once the copies that
use it are over, so that none is overwritten under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config.errors import EngineDeadError

_OF_DEVICES = ("CUDA error", "HIP error", "Triton Error")


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, behind what was queued there before; on a CPU the array's own memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def refill(target: Tensor, array: npt.NDArray[Any]) -> None:
    """As `upload`, into a tensor that is there, of the array's type and shape."""
    tensor = torch.from_numpy(array)
    target.copy_(tensor if target.device.type == "cpu" else tensor.pin_memory(), non_blocking=True)


class AsyncCopy:
    """A copy of tensors to the host, queued behind the work that was queued before it.

    Args:
        tensors: of one device; work that is queued later may overwrite them.
    """

    __slots__ = ("_event", "_here")

    def __init__(self, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            self._here = tuple(tensor.to("cpu", copy=True) for tensor in tensors)
            return
        self._here = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        )
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors on the host. Waits for their copies alone, not for what was queued after them."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._here


class Event:
    """Marks the end of all that was queued on a device so far; nothing where computing is not queued."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Waits until the device has reached it."""
        if self._event is not None:
            self._event.synchronize()


class DevicePlace:
    """A device on which steps are computed with torch; as `runtime.places.Place`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cpu = device.type == "cpu"  # saves a call for each of a step's tensors

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """As Place."""
        return torch.from_numpy(array) if self._on_cpu else upload(array, self._device)

    def tensor(self, values: Tensor) -> Tensor:
        """As Place."""
        return values

    @contextmanager
    def guard(self) -> Iterator[None]:
        """As Place."""
        with device_errors(), torch.inference_mode():
            yield

    def end(self) -> Event:
        """As Place."""
        return Event(self._device)


@contextmanager
def device_errors() -> Iterator[None]:
    """Raises EngineDeadError for errors of a device, after which nothing can be computed there by this process.

    They come late: what is raised names where they were noticed, not what caused them. A lack of memory is none, nor is
    a call that the device refuses and then goes on.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if (isinstance(error, torch.AcceleratorError) or any(sign in text for sign in _OF_DEVICES)) and _is_lost():
            raise EngineDeadError(f"The device failed: {text.partition(chr(10))[0]}") from error
        raise


def check(device: torch.device | str) -> None:
    """Waits for what is queued on a device; raises EngineDeadError if that, or anything before, was the device's end.

    For whoever caught an error and goes on: what is wrong with the device, not with the call, shows again.
    """
    with device_errors():
        Event(torch.device(device)).wait()


def _is_lost() -> bool:
    """Whether a device that failed fails again: the fault of a kernel stays until the process ends."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return False
    except RuntimeError:
        pass
    return True
