"""Facts of GPUs, from a stand-in for torch's module of a kind of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from penstock.config.machine import Accelerator
from penstock.kernels import devices

GIB = 1 << 30
CARDS = {
    "H": (9, 0, 132, 233472),
    "A": (8, 0, 108, 167936),
    "T": (7, 5, 40, 65536),
}


class Module:
    """As torch.cuda, of one card after the other."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.counts = {"allocated": 3, "peak": 5, "reserved": 7}

    def get_device_properties(self, index: int) -> SimpleNamespace:
        name, (major, minor, processors, shared) = list(CARDS.items())[index]
        return SimpleNamespace(
            name=name, total_memory=80 * GIB, major=major, minor=minor, multi_processor_count=processors,
            shared_memory_per_multiprocessor=shared,
        )  # fmt: skip

    def mem_get_info(self, index: object) -> tuple[int, int]:
        self.asked.append(index if isinstance(index, int) else 0)
        return 70, 100

    def synchronize(self, device: object) -> None: ...

    def empty_cache(self) -> None: ...

    def reset_peak_memory_stats(self, device: object) -> None:
        self.counts["peak"] = self.counts["allocated"]

    def memory_allocated(self, device: object) -> int:
        return self.counts["allocated"]

    def max_memory_allocated(self, device: object) -> int:
        return self.counts["peak"]

    def memory_reserved(self, device: object) -> int:
        return self.counts["reserved"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    found = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda *_: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: list(CARDS.values())[index or 0][:2])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(CARDS))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    devices.lacks_fp8.cache_clear()
    yield found
    devices.lacks_fp8.cache_clear()


def test_cards_are_described_and_only_one_is_measured(module: Module) -> None:
    first, second, third = devices.accelerators(lambda kind: None, measured=1)
    assert first == Accelerator("cuda", 0, "H", 80 * GIB, 80 * GIB, (9, 0), 132)
    assert (second.memory_free, module.asked) == (70 + 7 - 3, [1])
    assert second.no_fp8 == "this GPU, of compute capability 8.0, has no FP8; 8.9 and newer have"
    assert second.no_bfloat16 == ""
    assert "7.5, has no bfloat16; 8.0 and newer" in third.no_bfloat16
    assert devices.accelerators(lambda kind: f"no compiler for {kind}")[0].no_kernels == "no compiler for cuda"
    assert devices.lacks_fp8("interpreter") is None
    assert "not for rocm" in str(devices.lacks_fp8("rocm"))


def test_other_kinds_are_told_apart(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = devices.accelerators(lambda kind: None)[0]
    assert (found.kind, found.capability, found.no_bfloat16) == ("rocm", None, "")
    assert "NVIDIA" in found.no_fp8
    assert devices.home() == "cuda"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    assert devices.accelerators(lambda kind: None)[0].kind == devices.home() == "xpu"
    for device in (None, torch.device("cpu")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, it=device: it)
        assert devices.accelerators(lambda kind: None) == ()
        assert devices.home() == "cuda"


def test_memory_in_use(module: Module) -> None:
    assert devices.memory_meter("cpu") is None
    assert devices.memory_meter("mps") is None
    meter = devices.memory_meter("cuda:1")
    assert meter is not None
    assert meter.read() == devices.MemoryUse(allocated=3, peak=5, reserved=7, free=70, total=100)
    assert meter.read().others == 23
    meter.reset()
    assert meter.read().peak == 3


@pytest.mark.parametrize(("card", "most"), [("H", 232448), ("A", 166912), ("T", 65536)])
def test_shared_memory(card: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    index = list(CARDS).index(card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: index)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Module().get_device_properties)
    assert devices.shared_memory.__wrapped__("cuda") == most
    assert devices.shared_memory.__wrapped__("interpreter") == 0


def test_a_device_without_a_number_needs_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    for device in ("cpu", "cuda", "cuda:1"):
        devices.use(device)
    assert chosen == [1]


def test_products_on_gpus_are_exact_whatever_variables_say() -> None:
    code = """
import torch
from penstock.config.options import EngineOptions
from penstock.startup.claim import Claim
products = torch.backends.cuda.matmul
for device in "cpu", "cuda":
    options = EngineOptions(model="m", device=device)
    Claim(options).settle(options)
    reduced = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    print(products.fp32_precision, *reduced, products.allow_fp16_accumulation)
"""
    environment = dict(os.environ, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1")
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.splitlines() == ["tf32 True True False", "ieee False False False"]
