"""Kernels compile for a GPU although there is none: the interpreter takes more than the compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {
    "_attend", "_convolve", "_delta", "_gated_rms_norm", "_join", "_join_in_order", "_keep_last", "_latent_write",
    "_layer_norm", "_look_up", "_mix", "_multiply", "_pointwise", "_quantize", "_rms_norm", "_rope", "_rope_tables",
    "_route", "_scan", "accept", "choose",
}  # fmt: skip


@pytest.mark.slow
def test_launches_compile_for_hopper(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.compile_launches"]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, check=False, timeout=110, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problems"] == []
    assert {name for name, *_ in found["made"]} >= KERNELS
    assert {units for name, _, units in found["made"] if name == "_attend"} == {"wgmma", "mma"}  # prompts, few queries
