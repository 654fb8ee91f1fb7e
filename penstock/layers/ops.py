"""The op set as models see it: a value they hand to layers, never call; and what steps tell of adapters."""

from __future__ import annotations

from penstock.kernels.adapters import TokenAdapters
from penstock.kernels.api import Activation, HeadNorm, KernelSet

__all__ = ["Activation", "HeadNorm", "KernelSet", "TokenAdapters"]
