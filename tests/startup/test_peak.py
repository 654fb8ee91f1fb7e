"""The KV pool from a measured peak: the step that is measured, the arithmetic, and an engine that keeps to it."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.config.errors import MemoryPlanError
from penstock.config.options import EngineOptions
from penstock.core.scheduler import Scheduler
from penstock.engine.loop import Engine
from penstock.startup.build_runner import load, make_runner
from penstock.startup.engine_spec import EngineSpec, make_engine_spec, plan_measured
from penstock.startup.gpu_memory import Measured
from penstock.startup.peak import largest_step
from penstock.startup.scheduling import scheduler_options
from tests.engine.test_equality import ask, finish
from tests.models import tiny
from tests.tracking import Tracker

ROWS, TOKENS = 2, 6
MIB = 1 << 20


@pytest.mark.parametrize(
    ("given", "queries", "contexts"),
    [
        ((3, 14, 100, 90), (1, 1, 12), (30, 30, 12)),
        ((3, 14, 8, 90), (1, 5, 8), (8, 5, 8)),
        ((3, 14, 100, 90, 6), (2, 6, 6), (2, 6, 6)),
        ((8, 4, 100, 4000), (1, 1, 1, 1), (100, 100, 100, 100)),
        ((3, 14, 4, 90), (4, 4, 4), (4, 4, 4)),
        ((3, 14, 100, 90, None, True), (1, 1, 12), (1, 1, 12)),
        ((3, 14, 100, 90, None, False, True), (1, 1, 12), (30, 30, 90)),
    ],
)
def test_the_largest_step(given: tuple[int, ...], queries: tuple[int, ...], contexts: tuple[int, ...]) -> None:
    shape = largest_step(*given)
    assert (shape.queries, shape.contexts) == (queries, contexts)


def tiny_spec(folder: Path, **options: object) -> EngineSpec:
    """A tiny model for interpreted kernels, as if on a GPU."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    tiny.save("llama", folder, num_hidden_layers=1)
    given = {
        "device": "interpreter",
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": TOKENS,
        "block_size": 8,
        **options,
    }
    found = make_engine_spec(EngineOptions(model=str(folder), **given))  # type: ignore[arg-type]
    rest = replace(found.limits, kv_cache_memory=None, most_sequences=None, attention_masks=False)
    return replace(found, limits=rest)


def test_what_is_measured_replaces_what_was_estimated(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path)
    types = ("float32",)
    block = spec.plan.kv_block_bytes[0]
    measured = Measured(weights=3 * MIB, step=2 * MIB, others=MIB, total=20 * MIB)
    plan = plan_measured(spec, types, measured)
    assert (plan.weights_bytes, plan.activation_bytes, plan.available_bytes) == (3 * MIB, 2 * MIB, 17 * MIB)
    assert plan.kv_blocks == (12 * MIB // block,)
    assert plan.total_bytes <= 0.9 * 20 * MIB - MIB < plan.total_bytes + block
    assert ("activations", "2.0 MiB", "largest step, measured") in plan.table()
    half = replace(spec, options=replace(spec.options, gpu_memory_utilization=0.45))
    assert plan_measured(half, types, measured).kv_blocks == (3 * MIB // block,)
    shrunk = plan_measured(spec, types, replace(measured, total=7 * MIB))  # 300 KiB are left
    assert shrunk.max_model_len == 128
    tight = replace(measured, total=int((6 * MIB + 9.5 * block) / 0.9))
    shrunk = plan_measured(spec, types, tight)
    assert (shrunk.max_model_len, shrunk.kv_blocks) == (64, (9,))
    assert "instead of the model's 128" in shrunk.notes[0]
    told = replace(spec, limits=replace(spec.limits, max_model_len_fixed=True))
    with pytest.raises(MemoryPlanError, match="start with --max-model-len 64"):
        plan_measured(told, types, tight)


def test_an_engine_stays_within_its_share(tmp_path: Path) -> None:
    """With recorded steps, once they are all made, too."""
    tracker = Tracker(total=2 * MIB, others=MIB // 2)
    with tracker:
        spec, kv_types, notes = load(tiny_spec(tmp_path, enforce_eager=False), meter=tracker)
        limits = scheduler_options(spec.options, spec.plan, whole_prompts=spec.model.whole_prompts)
        runner, _ = make_runner(spec, kv_types, limits.max_num_seqs)
        tracker.reset()
        plan, held = spec.plan, tracker.allocated
        budget = int(0.9 * tracker.total) - tracker.others
        assert budget - 1024 <= plan.available_bytes <= budget  # constants were there before
        assert plan.weights_bytes + plan.kv_bytes <= held <= budget - plan.activation_bytes
        engine = Engine(Scheduler(limits, spec.groups), runner)
        for number in range(ROWS):
            engine.add(ask(str(number), tuple(tiny.prompt(9, number)), 1))
        assert len(finish(engine, tracker.collect)) == ROWS
        while runner.prepare():
            pass
        tracker.collect()
    assert 0 < tracker.peak - held <= plan.activation_bytes
    assert tracker.peak <= budget
    named = {note.name: note for note in notes}
    assert "weights of" in named["largest step"].reason and named["recorded steps"].value.endswith("KiB")
    runner.close()
