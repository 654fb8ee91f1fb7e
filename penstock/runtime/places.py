"""Where steps are computed, and what arrays become there: the host as it is, or a device of torch. No torch here."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from penstock.kernels.cpu import native

if TYPE_CHECKING:
    import torch

    from penstock.kernels.copies import Event


class Place(Protocol):
    """Where steps are computed."""

    def put(self, array: npt.NDArray[Any]) -> Any:
        """The array there, behind what was queued before; on the host its own memory."""

    def tensor(self, values: Any) -> torch.Tensor:
        """What was computed there, for torch, without a copy."""

    def guard(self) -> AbstractContextManager[None]:
        """Is entered around all that computes there."""

    def end(self) -> Event | None:
        """The end of all that was queued; None where nothing is queued."""


class Host:
    """Native programs on arrays."""

    def __init__(self) -> None:
        self._bounded = False  # whether torch has been given the engine's threads

    def put(self, array: npt.NDArray[Any]) -> Any:
        """As Place."""
        return array

    def tensor(self, values: Any) -> torch.Tensor:
        """As Place. The first call loads torch, which gets as many threads as native programs have."""
        import torch

        if not self._bounded:
            torch.set_num_threads(native.library().num_threads())
            self._bounded = True
        return torch.as_tensor(values)

    def guard(self) -> AbstractContextManager[None]:
        """As Place."""
        return nullcontext()

    def end(self) -> Event | None:
        """As Place."""
        return None


def place_of(device: torch.device | None) -> Place:
    """A device of torch; None is the host without torch."""
    if device is None:
        return Host()
    from penstock.kernels.copies import DevicePlace

    return DevicePlace(device)
