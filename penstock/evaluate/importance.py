"""Collects importance matrices: mean squared inputs of every linear layer while the model reads a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.evaluate.scoring import Progress, Scorer, Window
from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.reference import dense
from penstock.kernels.reference.experts import grouped_experts
from penstock.kernels.registry import KernelContext
from penstock.layers.weight import Weight
from penstock.startup.engine_spec import EngineSpec
from penstock.weights.imatrix import Entry, ImportanceMatrix
from penstock.weights.writers.gguf_model import gguf_name


@dataclass(slots=True)
class _Seen:
    """Sums over the inputs of one matrix."""

    squares: Tensor
    count: int = 0


@dataclass(slots=True)
class _Tap:
    """Records the inputs of every product. Matrices, also those of experts, are known by their addresses."""

    seen: dict[int, _Seen] = field(default_factory=dict)

    def listen(self, x: Tensor, weight: Tensor) -> None:
        squares = x.detach().double().square().sum(0)
        found = self.seen.get(weight.data_ptr())
        if found is None:
            found = self.seen[weight.data_ptr()] = _Seen(torch.zeros_like(squares))
        found.squares += squares
        found.count += len(x)

    def linear(self, x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
        self.listen(x, weight)
        return dense.linear(x, weight, *rest, **named)


def _tapped(tap: _Tap, spec: EngineSpec) -> KernelSet:
    """The reference ops, with the inputs of products recorded."""
    options = spec.options
    context = KernelContext(
        options.device_kind, options.dtype, options.isa, options.kv_cache_dtype, prefer_reference=True
    )
    kernels = resolve_kernels(context)
    gated = kernels.gated_linear

    def gated_linear(x: Tensor, weight: Any, *rest: Any, **named: Any) -> Tensor:
        tap.listen(x, weight)
        return gated(x, weight, *rest, **named)

    experts: Any = partial(grouped_experts, linear=tap.linear)
    return replace(kernels, linear=tap.linear, gated_linear=gated_linear, grouped_experts=experts)


def collect_importance(
    options: EngineOptions,
    windows: Sequence[Window],
    output: Path,
    dataset: str,
    *,
    loading: Progress | None = None,
    progress: Progress | None = None,
) -> ImportanceMatrix:
    """Runs a text through the reference ops of a model.

    Args:
        options: which model, and the compute type.
        windows: stretches of the text, all of one length.
        output: the path of the matrix (not written here).
        dataset: the text's name.
        loading: called with (bytes read, bytes in all) while weights load.
        progress: called with (windows done, windows in all).

    Raises:
        PenstockError: the model cannot be loaded, or its family has no names in GGUF files.
        ConfigError: an input is not finite.
    """
    tap = _Tap()
    length = max(len(window.tokens) for window in windows)
    scorer = Scorer(options, length, kernels=partial(_tapped, tap), progress=loading)
    try:
        for done, window in enumerate(windows, start=1):
            scorer.run(window)
            if progress is not None:
                progress(done, len(windows))
        names = partial(gguf_name, scorer.spec.checkpoint)
        entries: dict[str, Entry] = {}
        for weight in scorer.model.weights():
            if weight.pack is not None and isinstance(weight.value, Tensor):
                entries |= _entries(weight, tap, names)
    finally:
        scorer.close()
    return ImportanceMatrix(output, entries, (dataset,), len(windows), length)


def _entries(weight: Weight, tap: _Tap, gguf: Callable[[str], str | None]) -> dict[str, Entry]:
    """One entry for each name of a weight in GGUF files; matrices that were merged have the same input."""
    matrices = weight.value if weight.value.dim() == 3 else weight.value[None]
    seen = [tap.seen.get(matrix.data_ptr()) for matrix in matrices]
    if not any(seen):
        return {}
    sums = np.zeros((len(seen), matrices.shape[-1]), np.float32)
    counts = np.zeros(len(seen), np.float32)
    for index, found in enumerate(seen):
        if found is not None:
            sums[index], counts[index] = found.squares.float().cpu().numpy(), found.count
    if not np.isfinite(sums).all():
        raise ConfigError(f"inputs of {weight.parts[0].key} are not finite; use --dtype float32.")
    names = dict.fromkeys(gguf(part.key) for part in weight.parts)
    return {name: Entry(sums, counts) for name in names if name is not None}
