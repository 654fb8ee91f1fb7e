"""What runs on the device during steps: gaps between kernels, and which kernels take the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.engines import timed_steps
from benchmarks.gpu.measure import Setting
from penstock.engine.loop import Engine

GAP = 5.0  # microseconds without a kernel, from which on the device counts as idle: launches within a step are closer


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel that ran, in microseconds."""

    name: str
    begin: float
    end: float


def traced(setting: Setting, engine: Engine, rows: int, steps: int) -> list[Launch]:
    """Launches of so many steps in which `rows` rows decode, in order; nothing where there is no GPU."""
    if not setting.on_gpu or setting.compiling:
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        timed_steps(setting, engine, rows, steps)
    found = [
        Launch(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if str(event.device_type).endswith("CUDA")
    ]
    return sorted(found, key=lambda launch: launch.begin)


def idle_share(launches: Sequence[Launch], gap: float = GAP) -> tuple[float, float]:
    """Shares of time in gaps longer than `gap`, and in launches, which are sorted by their begin."""
    idle = busy = 0.0
    last = launches[0].begin
    for launch in launches:
        idle += launch.begin - last if launch.begin - last > gap else 0.0
        busy += max(0.0, launch.end - max(launch.begin, last))
        last = max(last, launch.end)
    whole = last - launches[0].begin
    return idle / whole, busy / whole


def by_kernel(launches: Sequence[Launch], steps: int) -> list[tuple[str, float, float]]:
    """(name, microseconds a step, launches a step) of each kernel, those that take most first."""
    times: Counter[str] = Counter()
    counts = Counter(launch.name for launch in launches)
    for launch in launches:
        times[launch.name] += launch.end - launch.begin  # type: ignore[assignment]
    return [(name, time / steps, counts[name] / steps) for name, time in times.most_common()]
