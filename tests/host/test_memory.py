"""What a model will take, told before it is loaded, and what it takes then."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import CheckpointError, MemoryPlanError
from penstock.config.options import EngineOptions
from penstock.engine.api import EngineInfo
from penstock.host.engine import hosted_options
from penstock.host.memory import FIRST_PROCESS_BYTES, PROCESS_BYTES, MemoryBudget, plan_model
from penstock.host.process_client import ProcessClient
from penstock.kernels.cpu import native
from penstock.startup.engine_spec import make_engine_spec
from penstock.startup.header_plan import this_machine
from penstock.weights.open import bundled_model_path
from tests.models import tiny

MIB = 1 << 20
MODEL = EngineOptions(model=str(bundled_model_path()), max_model_len=1024, threads=1)


async def started(options: EngineOptions) -> EngineInfo:
    """What an engine tells of itself."""
    client = ProcessClient(options)
    try:
        return await client.start()
    finally:
        await client.close()


async def told_total(options: EngineOptions) -> float:
    """MiB that an engine says it takes in all."""
    info = await started(options)
    row = next(row for row in info.memory if row.name == "total")
    number, unit = row.value.split()
    return float(number) * {"KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}[unit]


@pytest.mark.skipif(not native.available(), reason="without the native library no start is kept")
@pytest.mark.parametrize("below", [{}, {"kv_ram": 300 * MIB, "kv_blocks": 200}, {"kv_disk": 64 * MIB}])
def test_an_engine_takes_what_was_planned_the_first_time_and_again(tmp_path: Path, below: dict[str, Any]) -> None:
    options = replace(MODEL, pack_cache=str(tmp_path), kv_disk_path=str(tmp_path / "kv"), **below)
    for exact in (False, True):
        plan = plan_model(options, 1 << 30)
        assert plan.exact is exact
        assert plan.process_bytes == (PROCESS_BYTES if exact else FIRST_PROCESS_BYTES)
        told = asyncio.run(told_total(replace(options, memory=plan.engine_bytes)))
        assert told * MIB <= plan.engine_bytes * 1.001  # as rounded for people
        assert told * MIB >= plan.engine_bytes * 0.95


@pytest.mark.skipif(not native.available(), reason="without the native library no start is kept")
def test_a_kept_start_knows_its_step_and_serves_what_it_served(tmp_path: Path) -> None:
    options = replace(MODEL, pack_cache=str(tmp_path), max_model_len=None)
    before = plan_model(options, 1 << 30)
    info = asyncio.run(started(replace(options, memory=before.engine_bytes)))
    told = next(setting.reason for setting in info.settings if setting.name == "step")
    arena = int(re.findall(r"arena of (\d+) MiB", told)[0])
    after = plan_model(options, 1 << 30)
    assert arena * MIB <= after.plan.activation_bytes < (arena + 2) * MIB < before.plan.activation_bytes
    assert after.plan.max_model_len == before.plan.max_model_len
    larger = plan_model(replace(options, max_num_batched_tokens=info.max_num_batched_tokens * 2), 1 << 30)
    assert larger.plan.activation_bytes > after.plan.activation_bytes


@pytest.mark.skipif(not native.available(), reason="without the native library no start is kept")
@pytest.mark.parametrize("change", [{"max_model_len": 256}, {"block_size": 32}])
def test_a_start_that_cannot_be_gone_on_from_is_planned_as_a_first_one(tmp_path: Path, change: dict[str, Any]) -> None:
    options = replace(MODEL, pack_cache=str(tmp_path))
    asyncio.run(started(options))
    assert plan_model(options, 1 << 30).exact
    other = replace(options, **change)
    plan = plan_model(other, 1 << 30)
    assert not plan.exact and plan.process_bytes == FIRST_PROCESS_BYTES
    assert asyncio.run(told_total(replace(other, memory=plan.engine_bytes))) * MIB <= plan.engine_bytes * 1.001


@pytest.fixture(autouse=True)
def _nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a start was kept of the model, by another test or a server of this user, changes what it takes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def drafting(draft: str, **more: Any) -> EngineOptions:
    return replace(MODEL, speculative_config=json.dumps({"method": "draft_model", "model": draft}), **more)


@pytest.mark.parametrize("changes", [{}, {"block_size": 4}, {"kv_cache_dtype": "bfloat16"}, {"quantize": "q8_0"}])
def test_a_draft_model_is_planned_as_its_engine_plans_it(changes: dict[str, Any]) -> None:
    """From headers alone; the model drafts for itself."""
    options = drafting(MODEL.model, **changes)
    told = plan_model(options, 4 << 30)
    exact = make_engine_spec(options, replace(this_machine(), memory_available=told.plan.available_bytes)).plan
    alone = plan_model(replace(options, speculative_config=None), 4 << 30).plan
    assert told.plan.kv_blocks == exact.kv_blocks
    assert told.plan.kv_block_bytes == exact.kv_block_bytes == tuple(2 * size for size in alone.kv_block_bytes)
    assert told.plan.drafter_bytes == pytest.approx(exact.drafter_bytes, rel=0.003)
    assert exact.total_bytes <= told.engine_bytes <= exact.total_bytes * 1.05


def test_a_smaller_model_that_drafts_takes_little(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path / "target")
    tiny.save("llama", tmp_path / "draft", num_hidden_layers=1)
    options = drafting(str(tmp_path / "draft"), model=str(tmp_path / "target"), max_model_len=120)
    told = plan_model(options, 4 << 30)
    exact = make_engine_spec(options, replace(this_machine(), memory_available=told.plan.available_bytes)).plan
    alone = plan_model(replace(options, speculative_config=None), 4 << 30)
    assert exact.total_bytes <= told.engine_bytes <= exact.total_bytes * 1.05
    assert alone.engine_bytes < told.engine_bytes < 2 * alone.engine_bytes


@pytest.mark.skipif(not native.available(), reason="without the native library no start is kept")
def test_a_start_with_a_draft_model_is_a_first_one(tmp_path: Path) -> None:
    """It does not go on from what was kept of one without, and takes what was planned."""
    options = drafting(MODEL.model, pack_cache=str(tmp_path))
    asyncio.run(started(replace(options, speculative_config=None)))
    plan = plan_model(options, 1 << 30)
    assert not plan.exact and plan.process_bytes == FIRST_PROCESS_BYTES
    told = asyncio.run(told_total(replace(options, memory=plan.engine_bytes))) * MIB
    assert plan.engine_bytes * 0.95 <= told <= plan.engine_bytes * 1.001


def test_a_draft_model_that_is_not_there_has_no_plan(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none"):
        plan_model(drafting(str(tmp_path / "none")), 1 << 30)


def test_a_smaller_room_makes_a_smaller_cache() -> None:
    wide, narrow = plan_model(MODEL, 1 << 30), plan_model(MODEL, FIRST_PROCESS_BYTES + 90 * MIB)
    assert narrow.total_bytes <= FIRST_PROCESS_BYTES + 90 * MIB < wide.total_bytes
    assert narrow.plan.kv_bytes < wide.plan.kv_bytes
    assert narrow.plan.weights_bytes == wide.plan.weights_bytes


def test_an_option_bounds_it_too() -> None:
    bounded = plan_model(replace(MODEL, memory=FIRST_PROCESS_BYTES + 90 * MIB), 1 << 30)
    assert bounded.total_bytes <= FIRST_PROCESS_BYTES + 90 * MIB


@pytest.mark.parametrize("room", [0, 100 * MIB, FIRST_PROCESS_BYTES + 20 * MIB])
def test_what_does_not_fit_is_refused(room: int) -> None:
    with pytest.raises(MemoryPlanError):
        plan_model(MODEL, room)


def test_a_model_that_is_not_there_has_no_plan(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        plan_model(replace(MODEL, model=str(tmp_path / "none")), 1 << 30)


def test_the_bundled_model_has_a_place_on_disk(tmp_path: Path) -> None:
    made = hosted_options(EngineOptions(pack_cache=str(tmp_path)))
    assert Path(made.model).is_dir()
    assert made.pack_cache == str(tmp_path)
    assert hosted_options(EngineOptions(pack_cache="off")).pack_cache == "off"


def test_a_budget_gives_no_more_than_it_has() -> None:
    budget = MemoryBudget(100)
    budget.take("a", 60)
    for name, count in (("b", 41), ("a", 10)):
        with pytest.raises(ValueError, match=f"{name} cannot take {count}"):
            budget.take(name, count)
    budget.take("b", 40)
    assert (budget.free, dict(budget.held)) == (0, {"a": 60, "b": 40})
    for _ in range(2):
        budget.give_back("a")
    assert budget.free == 60


def test_a_model_whose_layers_keep_no_keys_is_planned(tmp_path: Path) -> None:
    tiny.save("mamba", tmp_path)
    plan = plan_model(EngineOptions(str(tmp_path), pack_cache="off"), 1 << 30).plan
    assert plan.weights_bytes and not plan.kv_bytes
