"""What sections share: where they run, how they time, and what they report."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.registry import Choice, KernelContext

COLD_BYTES = 400 << 20  # read in turn, so that no cache holds what is read next
REPEATS = 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One result.

    Attributes:
        name: what was measured.
        value, unit: the result.
        share: of the card's limit that `of` names, or of another figure; None where there is none.
        least, most: targets, of the share where there is one, else of the value.
        note: what else a reader must know.
    """

    name: str
    value: float
    unit: str
    share: float | None = None
    of: str = ""
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        value = self.value if self.share is None else self.share
        if self.least is None and self.most is None:
            return None
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclass(slots=True)
class Setting:
    """One run of the benchmark.

    Attributes:
        device: "cuda", or "interpreter": Triton's kernels on the CPU.
        tiny: shapes that say nothing but that a section works.
        quick: fewer sizes.
        compiling: run everything once, so that kernels are compiled.
        deadline: time.monotonic() at which the section that runs should end.
        limits: the card's, from section "card": "read" in bytes a second, "bf16" and "fp8" in operations a second.
        references: ops that got the reference where there is a kernel, with the reason.
        kept: figures that later sections compare with.
    """

    device: str
    tiny: bool = False
    quick: bool = False
    compiling: bool = False
    deadline: float = float("inf")
    limits: dict[str, float] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    kept: dict[str, float] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def torch_device(self) -> str:
        return "cuda" if self.on_gpu else "cpu"

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.tiny else torch.bfloat16

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def share(self, rate: float, limit: str) -> float | None:
        """Of a limit, if it was measured."""
        return rate / self.limits[limit] if self.limits.get(limit) else None

    def kernels(self, kv_type: str | None = None, **more: Any) -> KernelSet:
        """The ops as an engine would get them; notes which of them are references."""
        name = str(self.dtype).removeprefix("torch.")
        found = resolve_kernels(KernelContext(self.device, name, kv_type=kv_type or name, **more))
        self.note_references(found.choices)
        return found

    def note_references(self, choices: Sequence[Choice]) -> None:
        self.note_chosen({choice.op: (choice.chosen.name, str(choice.refused)) for choice in choices})

    def note_chosen(self, chosen: Mapping[str, tuple[str, str]]) -> None:
        """The same of op → (implementation, why not another), but for what the host does while a model is loaded."""
        for op, (name, why) in chosen.items():
            if name.startswith("reference") and op.partition(" ")[0] != "dequantize":
                self.references[op] = why

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.torch_device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.torch_device)

    def seconds(self, runs: Sequence[Callable[[], object]], graph: bool = True) -> float:
        """Median seconds of all runs, one after the other; from a graph, so that launching them takes no part.

        Args:
            runs: what is timed; together they should read more than a cache holds.
            graph: whether the calls can be captured.
        """
        started = time.perf_counter()
        for run in runs:
            run()
        self.synchronize()
        if self.compiling:
            return float("nan")
        if not self.on_gpu:
            return time.perf_counter() - started
        return _on_the_device(_captured(runs) if graph else lambda: [run() for run in runs])


def _captured(runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph.replay


def _on_the_device(run: Callable[[], object]) -> float:
    """Median seconds between events around a run; fewer runs where one takes long."""
    run()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = time.perf_counter() - started
    repeats = max(3, min(REPEATS, int(0.5 / max(once, 1e-6))))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1e3
