"""Steps run ahead: which there are, that they leave caches alone, and when they run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.config.options import EngineOptions
from penstock.core.scheduler import Scheduler
from penstock.engine.loop import Engine
from penstock.startup import build_runner, warm_up
from penstock.startup.build_runner import load, make_runner
from penstock.startup.engine_spec import make_engine_spec
from penstock.startup.scheduling import scheduler_options
from tests.engine.test_equality import ask, finish
from tests.models import encoders, tiny
from tests.startup.test_peak import ROWS, tiny_spec


def test_steps_have_every_class_of_queries_and_every_tile_of_rows() -> None:
    found = warm_up.steps(48, 300, 5000)
    assert [shape.queries for shape in found[:5]] == [(1,), (16,), (2,), (4,), (8,)]
    assert [sum(shape.queries) for shape in found[5:]] == [32, 64, 128, 256]
    assert found[5].queries == (1,) * 32
    assert found[6].queries == (1,) * 47 + (17,)
    assert {min(shape.contexts) for shape in found} == {1024}


def test_steps_keep_to_limits() -> None:
    assert [shape.queries for shape in warm_up.steps(4, 6, 90)] == [(1,), (2,), (4,)]
    assert [shape.queries for shape in warm_up.steps(4, 64, 90, chunk=8)] == [(1,), (2,), (4,), (8,), (8, 8, 8, 8)]
    assert {shape.contexts for shape in warm_up.steps(4, 6, 3)} == {(3,)}
    assert all(shape.contexts == shape.queries for shape in warm_up.steps(4, 64, 90, whole=True))


def test_steps_run_ahead_and_between_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[warm_up.WarmUp] = []

    class Kept(warm_up.WarmUp):
        def ahead(self, seconds: float = 0.0) -> None:
            made.append(self)
            super().ahead(1e-9)

    monkeypatch.setattr(build_runner, "WarmUp", Kept)
    spec, kv_types, _ = load(tiny_spec(tmp_path))
    limits = scheduler_options(spec.options, spec.plan, whole_prompts=spec.model.whole_prompts)
    assert make_runner(spec, kv_types, ROWS)[0].prepare() is False and not made  # no GPU: nothing is compiled
    gpu = replace(spec, options=replace(spec.options, device="cuda"))
    monkeypatch.setattr(type(gpu.options), "torch_device", property(lambda _: "cpu"))
    runner, _ = make_runner(gpu, kv_types, ROWS)
    left = made[0]._left
    assert len(left) == 2  # of one, two and four tokens
    engine = Engine(Scheduler(limits, spec.groups), runner)
    runner.prepare()
    assert len(left) == 2  # there was no answer yet
    prompt = tuple(tiny.prompt(9, 1))
    engine.add(ask("cold", prompt, 3))
    first = finish(engine)["cold"].tokens
    before = [(cache.kv.key[1:].clone(), cache.kv.value[1:].clone()) for cache in runner.memory.caches]
    while left:
        assert runner.prepare() is True or not left
    after = [(cache.kv.key[1:], cache.kv.value[1:]) for cache in runner.memory.caches]
    for ours, theirs in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    engine.add(ask("warm", prompt, 3))
    assert finish(engine)["warm"].tokens == first
    runner.close()


def test_a_step_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    spec, kv_types, _ = load(tiny_spec(tmp_path))
    memory, _, _ = build_runner.make_parts(spec, kv_types, ROWS, ROWS)
    warm = warm_up.WarmUp(spec, memory)
    monkeypatch.setattr(spec.model, "forward", None)
    warm.ahead()
    assert not warm.run_next()
    assert "compiled ahead" in caplog.text
    memory.close()


@pytest.mark.parametrize("family", ["qwen3-next", "deepseek-v2", "bert", "modernbert"])
def test_models_of_every_kind_run_them(family: str, tmp_path: Path) -> None:
    """Recurrent layers, latent attention, encoders."""
    (encoders if "bert" in family else tiny).save(family, tmp_path, num_hidden_layers=1)
    given = {"device": "interpreter", "max_num_seqs": 3, "max_num_batched_tokens": 40, "block_size": 8}
    spec, kv_types, _ = load(make_engine_spec(EngineOptions(model=str(tmp_path), **given)))  # type: ignore[arg-type]
    memory, _, _ = build_runner.make_parts(spec, kv_types, 3, 3)
    warm = warm_up.WarmUp(spec, memory)
    for shape in warm_up.steps(3, 40, spec.plan.max_model_len, spec.model.whole_prompts)[::2]:
        warm._run(shape)
    memory.close()
