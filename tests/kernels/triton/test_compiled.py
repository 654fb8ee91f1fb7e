"""Kernels compile for a Hopper GPU, where there is none, and multiply in its matrix units."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_kernels_compile(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.kernels.triton.compiled"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    attends = [line.split() for line in done.stdout.splitlines() if line.startswith("_attend ")]
    assert {line[2] for line in attends} == {"wgmma", "mma"}  # prompts, and rows of a few queries
