"""Cores and memory out of /proc and control groups, from made-up file trees."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.config import machine as machine_module
from penstock.config.machine import has_accelerator_files, read_machine

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = f"MemTotal: {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {8 * 2**20} kB\n"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def test_no_control_groups(tmp_path: Path) -> None:
    machine = read_machine(root=tree(tmp_path, {"proc/meminfo": MEMINFO}), isas=("avx2",), has_bf16=True)
    assert (machine.cores, machine.memory_total, machine.memory_available) == (8, 16 * GIB, 8 * GIB)
    assert machine.isas == ("avx2",)
    assert machine.has_bf16


def test_version_2_limits_of_the_group_and_those_above_bind(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
            "sys/fs/cgroup/outer/memory.max": str(4 * GIB),
            "sys/fs/cgroup/outer/memory.current": str(3 * GIB),
            "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "10",
        },
    )
    machine = read_machine(root=root)
    assert machine.cores == 3  # 2.5, rounded
    assert machine.memory_total == 4 * GIB
    assert machine.memory_available == 2 * GIB  # reclaimable file pages count as free


def test_version_1_quota_and_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
        },
    )
    machine = read_machine(root=root)
    assert (machine.cores, machine.memory_total, machine.memory_available) == (2, 2 * GIB, GIB)


def test_no_quota_and_small_quota(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000"}
    assert read_machine(root=tree(tmp_path, files)).cores == 1
    files["sys/fs/cgroup/cpu.max"] = "max 100000"
    assert read_machine(root=tree(tmp_path, files)).cores == 8


def test_a_group_path_cannot_leave_its_hierarchy(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/../../..\nnonsense\n"}
    assert read_machine(root=tree(tmp_path, files)).memory_total == 16 * GIB


def test_usage_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"}
    files |= {"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "2000"}
    assert read_machine(root=tree(tmp_path, files)).memory_available == 0


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    machine = read_machine()
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert 0 < machine.memory_available <= machine.memory_total


@pytest.mark.skipif(sys.platform != "linux", reason="devices are looked for on Linux alone")
@pytest.mark.parametrize(
    ("file", "builds"),
    [("nvidia0", ("", "xpu", "rocm6.4")), ("kfd", ("", "xpu", "rocm6.4")), ("dri/renderD128", ("xpu",)), ("null", ())],
)
def test_devices_that_the_installed_torch_can_use(
    file: str, builds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path, {f"dev/{file}": ""})
    for build in ("", "cpu", "xpu", "rocm6.4"):
        monkeypatch.setattr(machine_module, "version", lambda _, build=build: f"2.13.0+{build}".rstrip("+"))
        assert has_accelerator_files(root) is (build in builds)
