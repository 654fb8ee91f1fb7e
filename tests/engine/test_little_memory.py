"""Too little memory at start is told in one sentence with a remedy, wherever it is missed."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config.errors import CheckpointError, ConfigError, MemoryPlanError
from penstock.startup.shortage import shortage_as_plan_error

START = """
import resource, sys
import torch
from penstock.config.errors import PenstockError
from penstock.config.options import EngineOptions
from penstock.engine.build import build_engine
kind, extra, grammars = sys.argv[1], int(sys.argv[2]) * 2**20, sys.argv[3] == "True"
field = {"AS": "VmSize", "DATA": "VmData"}[kind] + ":"
used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))
resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (used + extra, used + extra))
try:
    build_engine(EngineOptions(threads=2), grammars=grammars)
    print("ready")
except PenstockError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("limit", "mebibytes", "grammars"),
    [("AS", 1, False), ("AS", 40, False), ("AS", 80, False), ("DATA", 1, False), ("DATA", 20, True)],
)
def test_a_limit_on_memory_ends_the_start_in_a_sentence(limit: str, mebibytes: int, grammars: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START, limit, str(mebibytes), str(grammars)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.startswith("MemoryPlanError memory ran out while the engine was made: "), (
        done.stdout,
        done.stderr,
    )
    assert "ulimit" in done.stdout and len(done.stdout.splitlines()) == 1
    assert "Traceback" not in done.stderr and "terminate" not in done.stderr and done.returncode == 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("Resource temporarily unavailable"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("can't start new thread"),
        ImportError("libtorch.so: failed to map segment from shared object"),
    ],
    ids=repr,
)
def test_libraries_have_many_words_for_it(error: Exception) -> None:
    found = shortage_as_plan_error(error)
    assert isinstance(found, MemoryPlanError) and "--quantize" in str(found)
    wrapped = CheckpointError("x cannot be opened: Cannot allocate memory.")
    wrapped.__cause__ = error
    assert isinstance(shortage_as_plan_error(wrapped), MemoryPlanError)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad_alloc"),
        ConfigError("threads is 0"),
        CheckpointError("cut"),
        RuntimeError("a bug"),
        OSError(2, ""),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert shortage_as_plan_error(error) is error
