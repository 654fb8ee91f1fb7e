"""What tensors of this process hold, counted while it runs: stands for a GPU's own count."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.kernels.devices import MemoryUse


class Tracker(TorchDispatchMode):
    """Bytes of all storages that ops have made while it was entered and that still live; a MemoryMeter."""

    def __init__(self, total: int = 1 << 30, others: int = 0) -> None:
        super().__init__()
        self.total, self.others = total, others
        self.live: dict[int, int] = {}
        self.allocated = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.live or not storage.nbytes():
            return
        self.live[key] = storage.nbytes()
        self.allocated += storage.nbytes()
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.allocated -= self.live.pop(key)

    def collect(self) -> None:
        """Frees what Triton's interpreter leaves in cycles."""
        gc.collect()

    def reset(self) -> None:
        self.collect()
        self.peak = self.allocated

    def read(self) -> MemoryUse:
        free = self.total - self.others - self.allocated
        return MemoryUse(self.allocated, self.peak, self.allocated, free, self.total)
