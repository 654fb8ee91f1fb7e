"""Kernels compile for a GPU although there is none: the interpreter takes more than the compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_launches_compile_for_hopper(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.compile_launches"]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, check=False, timeout=110, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    count, *problems = done.stdout.strip().splitlines()
    assert problems == []
    assert int(count.split()[0]) > 20
