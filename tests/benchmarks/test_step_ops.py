"""What is told of a step's ops adds up; never how long they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cpu.step_ops import OpTimes, by_kind, measure, programs_of
from penstock.config.options import EngineOptions
from penstock.engine.build import build_engine
from tests.models import tiny


def test_kinds_are_told_by_the_op_before() -> None:
    seconds = (("linear", 1.0), ("norm", 2.0), ("linear", 3.0), ("norm", 4.0), ("linear", 5.0))
    waited = (("linear", 0.5), ("norm", 0.0), ("linear", 0.25), ("norm", 0.0), ("linear", 0.5))
    assert by_kind(seconds, waited) == {
        "linear after the start": OpTimes(1, 1.0, 0.5),
        "norm after linear": OpTimes(2, 6.0, 0.0),
        "linear after norm": OpTimes(2, 8.0, 0.75),
    }
    with pytest.raises(ValueError, match="zip"):
        by_kind(seconds, waited[:2])


def test_every_op_of_a_step_is_counted(tmp_path: Path) -> None:
    tiny.save("qwen3", tmp_path)
    options = EngineOptions(
        model=str(tmp_path), threads=2, max_num_seqs=4, kv_blocks=40, max_num_batched_tokens=16, pack_cache="off"
    )
    engine, info = build_engine(options)
    try:
        programs = programs_of(engine)
        assert all(not program.seconds and not program.waited for program in programs.values()), "not unless asked"
        found = measure(engine, info.vocab_size, 2, 5, 3)
        for name, program in programs.items():
            ops = {kind: of for kind, of in found["ops"].items() if kind.startswith(f"{name}: ")}
            assert sum(of["count"] for of in ops.values()) == program.num_ops > 0
            assert all(of["ms"] > 0 and of["waited_ms"] >= 0 for of in ops.values())
        assert 0 <= found["waiting_share"] < 1
    finally:
        engine.close()
