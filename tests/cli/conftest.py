"""Runs the real command in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

Penstock = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def penstock() -> Penstock:
    """Calls `penstock` with these arguments; keywords: input (text on standard input), and environment variables."""

    def call(*arguments: str, input: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        environment = {**clean, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", **variables}
        command = [sys.executable, "-m", "penstock", *arguments]
        return subprocess.run(command, input=input, capture_output=True, text=True, env=environment, timeout=100)

    return call
