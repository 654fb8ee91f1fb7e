"""A GPU that is too small: the plan is shown with one remedy, which works; refusals of memory become such errors."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from penstock.config.errors import ConfigError, MemoryPlanError
from penstock.config.machine import Accelerator, Machine
from penstock.config.options import EngineOptions
from penstock.config.resolve import Decision, ModelFacts
from penstock.kernels.api import resolve_kernels
from penstock.kernels.devices import MemoryUse
from penstock.kernels.registry import KernelContext
from penstock.startup import build_runner
from penstock.startup.engine_spec import make_spec_on_cpu
from penstock.startup.gpu_memory import DeviceMemory, remedies, share, smaller_share, smaller_step, smaller_weights
from penstock.startup.memory_plan import MemoryLimits, MemoryPlan, plan_memory
from penstock.startup.resident import Packer, packer_of, resident_bytes
from tests.models import tiny
from tests.startup.test_memory_plan import model, planned_groups
from tests.startup.test_peak import tiny_spec
from tests.tracking import Tracker

MB = 10**6
OPTIONS = EngineOptions(device="cuda", dtype="bfloat16", max_num_seqs=8, max_num_batched_tokens=8192)


@pytest.fixture(scope="module")
def packer() -> Packer:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return packer_of(resolve_kernels(KernelContext("interpreter", "bfloat16")))


def floats(values: int) -> ModelFacts:
    """A model of that many bfloat16 values, all in matrices."""
    return replace(model(values), float_values=values, float_bytes=2 * values)


def planned(
    facts: ModelFacts,
    packer: Packer,
    options: EngineOptions,
    total: int,
    fixed: bool = False,
    step: int | None = None,
    machine: Machine | None = None,
) -> MemoryPlan:
    memory = DeviceMemory(total, total)
    limits = MemoryLimits(
        share(options, memory),
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=options.max_num_batched_tokens or 1,
        max_model_len_fixed=fixed,
        activation_bytes=step,
        attention_masks=False,
        where=", 90% of a GPU",
    )
    weights = resident_bytes(facts, packer, options)

    def quantized(name: str) -> int:
        return resident_bytes(facts, packer, replace(options, quantize=name))

    limits = replace(limits, remedies=remedies(facts, quantized, options, limits, memory, weights, machine))
    return plan_memory(model=facts, groups=planned_groups(facts), dtype_bytes=2, limits=limits, weights_bytes=weights)


@pytest.mark.parametrize(
    ("values", "total", "step", "flag"),
    [
        (10 * MB, 32 * MB, 20 * MB, "--max-num-batched-tokens 2048"),
        (27 * MB, 59 * MB, None, "--gpu-memory-utilization 0.97"),
        (50 * MB, 75 * MB, None, "--quantize fp8"),
        (50 * MB, 55 * MB, 12 * MB, "--quantize int4"),
        (50 * MB, 20 * MB, None, ""),
    ],
)
@pytest.mark.parametrize("fixed", [False, True])
def test_one_remedy_is_told_and_works(
    values: int, total: int, step: int | None, flag: str, fixed: bool, packer: Packer
) -> None:
    facts = floats(values)
    small = OPTIONS if "batched" in flag else replace(OPTIONS, max_num_batched_tokens=2048)
    with pytest.raises(MemoryPlanError) as caught:
        planned(facts, packer, small, total, fixed, step)
    text = str(caught.value)
    assert text.startswith("the model does not fit:\n  weights ")
    assert re.search(r"\n  available +[\d.]+ MiB  90% of a GPU\n", text)
    if not flag:
        assert "take a smaller model" in text
        return
    told = dict(re.findall(r"--([a-z-]+) ([\w.]+)", text.rsplit("start with", 1)[1].rstrip(".")))
    assert flag.removeprefix("--").split() == next([name, value] for name, value in told.items())
    kinds = {"gpu-memory-utilization": float, "quantize": str}
    changes = {name.replace("-", "_"): kinds.get(name, int)(value) for name, value in told.items()}
    length = changes.pop("max_model_len", None)
    step = None if "batched" in flag else step
    found = planned(facts, packer, replace(small, **changes), total, fixed and length is None, step)
    assert found.total_bytes <= found.available_bytes
    assert length is None or found.max_model_len >= length


class Full:
    """A meter of a GPU of 100 MB, of which others have come to use more than the plan thought."""

    def __init__(self, free: int, allocated: int) -> None:
        self.use = MemoryUse(allocated, allocated, allocated, free, 100 * MB)

    def reset(self) -> None:
        pass

    def read(self) -> MemoryUse:
        return self.use


def test_a_smaller_share_gives_up_what_is_missing() -> None:
    made = MemoryPlan(30 * MB, 30 * MB, 50 * MB, (10,), (5 * MB,), 10 * MB, 4096, 2.0, 90 * MB)
    assert smaller_share(OPTIONS, made, Full(free=30 * MB, allocated=50 * MB)) == "--gpu-memory-utilization 0.79"
    assert smaller_share(OPTIONS, made, Full(free=5 * MB, allocated=36 * MB)) == ""
    assert smaller_share(OPTIONS, made, None) == ""
    assert smaller_step(OPTIONS) == "--max-num-batched-tokens 4096"


def test_the_cpu_is_named_where_it_has_room_and_nothing_else_helps(packer: Packer) -> None:
    facts = floats(50 * MB)
    host = Machine(cores=2, memory_total=400 * MB, memory_available=300 * MB, isas=("avx2",))
    with pytest.raises(MemoryPlanError, match=r"start with --device cpu\.$"):
        planned(facts, packer, OPTIONS, 20 * MB, machine=host)
    for less in (replace(host, memory_available=90 * MB), replace(host, isas=())):
        with pytest.raises(MemoryPlanError, match="take a smaller model"):
            planned(facts, packer, OPTIONS, 20 * MB, machine=less)


def test_caches_that_are_refused_name_a_smaller_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    spec = tiny_spec(tmp_path)
    large = replace(spec.plan, weights_bytes=30 * MB, kv_bytes=50 * MB, activation_bytes=10 * MB)
    monkeypatch.setattr(build_runner, "make_parts", refuse)
    monkeypatch.setattr(build_runner, "memory_meter", lambda _: Full(free=30 * MB, allocated=50 * MB))
    with pytest.raises(MemoryPlanError, match=r"while the caches were made[\s\S]*--gpu-memory-utilization 0\.79\."):
        build_runner.make_runner(replace(spec, plan=large), ("float32",), 2)


@pytest.mark.parametrize(
    ("where", "remedy"),
    [("load_weights", "start with --quantize fp8"), ("measure", "start with --max-num-batched-tokens 3")],
)
def test_a_refusal_of_memory_shows_the_plan(
    where: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nA hint of many words")

    spec = tiny_spec(tmp_path)
    monkeypatch.setattr(build_runner, where, refuse)
    with pytest.raises(MemoryPlanError) as caught:
        build_runner.load(spec, meter=Tracker())
    text = str(caught.value)
    assert text.startswith("the GPU's memory ran out while ")
    assert all(f"\n  {what} " in text for what in ("weights", "KV cache", "activations", "total"))
    assert text.endswith(f"CUDA out of memory. Tried to allocate 2.00 MiB; {remedy}.")
    assert smaller_weights(spec.quantized_bytes, spec.options, spec.plan, Full(0, 10)) == ""


def test_foreign_code_stays_on_the_cpu(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path, num_hidden_layers=1)
    gpu = Accelerator("cuda", 0, "H", 80 * 2**30, 79 * 2**30)
    host = Machine(cores=2, memory_total=4 * 2**30, memory_available=3 * 2**30, accelerators=(gpu,))
    asked, runs = EngineOptions(model=str(tmp_path)), "transformers 5: X has no implementation of its own here"
    spec = make_spec_on_cpu(asked, host, runs)
    assert spec.options.device == "cpu"
    assert spec.settings[0] == Decision("device", "cpu", runs)
    with pytest.raises(ConfigError, match=r"--device cuda is not possible: transformers .* Take --device cpu"):
        make_spec_on_cpu(replace(asked, device="cuda"), host, runs)
