"""Which device gets kernels of Triton, and what is said where it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.kernels import triton
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from tests.kernels.declarations import OPS, keeps_declaration

CPU_ONLY = """
import sys
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
resolve_kernels(KernelContext("cpu", "float32"))
assert "triton" not in sys.modules
"""
WITHOUT = """
import sys
sys.modules["triton"] = None
import importlib.util
importlib.util.find_spec = lambda name: None
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
for device in ("interpreter", "cuda"):
    found = {choice.op: choice for choice in resolve_kernels(KernelContext(device, "float32")).choices}
    assert found["rms_norm"].chosen.name == "reference"
    assert any("pip install 'penstock-llm[gpu]'" in why for _, why in found["rms_norm"].refused)
"""
TOO_LATE = """
import triton
from penstock.kernels.triton import unavailable_reason
assert "before" in unavailable_reason("interpreter"), unavailable_reason("interpreter")
"""


# Of several processes, on CPUs.
OF_RANKS = {"shared_linear", "shared_experts", "gather_columns", "shared_embedding", "shared_attention"}


@pytest.mark.parametrize("code", [CPU_ONLY, WITHOUT, TOO_LATE])
def test_in_a_process_of_its_own(code, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_no_gpu_is_served_while_interpreting(device):
    reason = triton.unavailable_reason("cuda")
    assert reason is None if device == "cuda" else "unset it" in str(reason)


def test_the_reference_can_be_preferred(device):
    kernels = resolve_kernels(KernelContext(device, "float32", prefer_reference=True))
    assert {choice.chosen.name for choice in kernels.choices} == {"reference"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fixed", [False, True])
def test_every_op_is_served(device, dtype, fixed):
    kernels = resolve_kernels(KernelContext(device, dtype, kv_type=dtype, batch_invariant=fixed))
    assert {choice.op for choice in kernels.choices if not choice.chosen.name.startswith("triton")} == OF_RANKS


def test_ops_have_the_declared_parameters(device):
    names = [op for op in OPS if op != "sampling" and op not in OF_RANKS]
    offered = triton.implementations(device, names)
    assert {item.op for item in offered} == set(names)
    assert [item.op for item in offered if not keeps_declaration(item)] == []
