"""Facts of the machine: cores and memory this process may really use. No torch."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU that torch sees.

    Attributes:
        kind: "cuda" (NVIDIA), "rocm" (AMD), "xpu" (Intel) or "mps" (Apple).
        index: its number among the machine's.
        name: the maker's.
        memory_total: bytes.
        memory_free: bytes nobody uses now; memory_total where it was not asked for.
        capability: NVIDIA's compute capability, None for others.
        processors: multiprocessors, 0 if unknown.
        no_bfloat16, no_fp8: a clause that says why it does not multiply them; "" if it does.
        no_kernels: why Triton's kernels do not run on it, so that all ops are the reference's; "" if they do.
    """

    kind: str
    index: int
    name: str
    memory_total: int
    memory_free: int
    capability: tuple[int, int] | None = None
    processors: int = 0
    no_bfloat16: str = ""
    no_fp8: str = ""
    no_kernels: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What options are resolved against.

    Attributes:
        cores: cores this process may use: its affinity, bounded by the control group's quota, at least 1.
        memory_total: bytes of memory, bounded by the control group's limit.
        memory_available: bytes that can be allocated now without swapping.
        isas: instruction sets the native library can use here, best first; empty if it could not be loaded.
        refused_isas: the others it was built for or knows of: (name, a sentence that says why not).
        has_bf16: whether the CPU multiplies bfloat16 natively.
        accelerators: GPUs torch can use, by number.
    """

    cores: int
    memory_total: int
    memory_available: int
    isas: tuple[str, ...] = ()
    refused_isas: tuple[tuple[str, str], ...] = ()
    has_bf16: bool = False
    accelerators: tuple[Accelerator, ...] = ()

    def within(self, memory: int | None) -> Machine:
        """This machine with no more memory to be had than so many bytes; None for what is free."""
        return self if memory is None else replace(self, memory_available=min(memory, self.memory_available))

    def beside(self, memory: int) -> Machine:
        """This machine with so many bytes of others."""
        return replace(self, memory_available=self.memory_available + memory)


_ACCELERATORS = ("nvidia*", "nvmap", "nvhost*", "nvgpu*", "kfd", "dxg", "accel*")
_INTEL = "dri/render*"  # which every graphics unit has


def has_accelerator_files(root: Path = Path("/")) -> bool:
    """Whether there may be a GPU that the installed torch can use: the system has a file for one. Without, torch need
    not be loaded to look for any.
    """
    if sys.platform != "linux":
        return True
    try:
        build = version("torch").partition("+")[2]
    except PackageNotFoundError:
        return False
    names = () if build == "cpu" else (*_ACCELERATORS, _INTEL) if build == "xpu" else _ACCELERATORS
    return any(next((root / "dev").glob(name), None) is not None for name in names)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> int | None:
    """The integer in a file; None where it is absent or says "max"."""
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _memberships(root: Path) -> dict[str, str]:
    """Controller → this process's group path; version 2's one hierarchy is under ""."""
    found: dict[str, str] = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            found.update(dict.fromkeys(parts[1].split(","), parts[2]))
    return found


def _group_folders(root: Path, controller: str, *, unified: bool) -> Iterator[Path]:
    """The group's folder and those above it, innermost first: a limit anywhere on the way binds."""
    base = root / "sys/fs/cgroup" / ("" if unified else controller)
    path = _memberships(root).get("" if unified else controller, "/")
    inside = base / path.lstrip("/")
    while True:
        if inside.is_dir():
            yield inside
        if inside == base or base not in inside.parents:
            return
        inside = inside.parent


def _cpu_quota(root: Path) -> float | None:
    """Cores the control group's quota allows, or None without one."""
    quotas: list[float] = []
    for folder in _group_folders(root, "", unified=True):
        parts = (_read(folder / "cpu.max") or "").split()
        if len(parts) == 2 and parts[0].isdigit() and parts[1].isdigit() and int(parts[1]) > 0:
            quotas.append(int(parts[0]) / int(parts[1]))
    for folder in _group_folders(root, "cpu", unified=False):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota and period and quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _cores(root: Path) -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(root)
    return max(1, count if quota is None else min(count, int(quota + 0.5)))


def _stat_line(folder: Path, name: str) -> int:
    for line in (_read(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _group_memory(root: Path) -> list[tuple[int, int]]:
    """(limit, limit - usage) of every control group that limits this process; reclaimable file pages are not usage."""
    found: list[tuple[int, int]] = []
    versions = (
        (True, "memory.max", "memory.current", "inactive_file"),
        (False, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for unified, limit_name, usage_name, reclaimable in versions:
        for folder in _group_folders(root, "memory", unified=unified):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None and 0 < limit < 2**60:
                used = max(0, usage - _stat_line(folder, reclaimable))
                found.append((limit, max(0, limit - used)))
    return found


def _system_memory(root: Path) -> tuple[int, int]:
    """(total, available) bytes of the whole system."""
    lines = (line.split() for line in (_read(root / "proc/meminfo") or "").splitlines())
    kib = {parts[0]: int(parts[1]) for parts in lines if len(parts) >= 2 and parts[1].isdigit()}
    if "MemTotal:" in kib:
        total = kib["MemTotal:"] * 1024
        return total, kib.get("MemAvailable:", kib.get("MemFree:", 0)) * 1024
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total // 2  # systems without /proc do not say what is free


def read_machine(
    *,
    isas: tuple[str, ...] = (),
    refused_isas: tuple[tuple[str, str], ...] = (),
    has_bf16: bool = False,
    accelerators: tuple[Accelerator, ...] = (),
    root: Path = Path("/"),
) -> Machine:
    """Measures this machine.

    Args:
        isas, refused_isas, has_bf16, accelerators: what the native library and torch report.
        root: where /proc and /sys are looked for.
    """
    total, available = _system_memory(root)
    groups = _group_memory(root)
    return Machine(
        cores=_cores(root),
        memory_total=min([total, *(limit for limit, _ in groups)]),
        memory_available=min([available, *(free for _, free in groups)]),
        isas=isas,
        refused_isas=refused_isas,
        has_bf16=has_bf16,
        accelerators=accelerators,
    )


def free_bytes(folder: Path) -> int:
    """What may be written to the disk of a folder that may not exist yet."""
    there = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    return shutil.disk_usage(there).free
