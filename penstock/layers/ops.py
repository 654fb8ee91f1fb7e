"""The op set as models see it: a value they hand to layers, never call."""

from __future__ import annotations

from penstock.kernels.api import Activation, HeadNorm, KernelSet

__all__ = ["Activation", "HeadNorm", "KernelSet"]
