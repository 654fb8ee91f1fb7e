"""The benchmarks' arithmetic, and tiny runs of those that need no model: structure, never timings."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks import batching, kv_waste, overhead, prefix_hits, soak, traces
from benchmarks.report import markdown
from benchmarks.traces import Lengths


def test_the_expected_maximum_is_that_of_all_draws() -> None:
    values = [1, 2, 2, 5]
    draws = [max(a, b) for a in values for b in values]
    assert traces.expected_maximum(values, 2) == pytest.approx(sum(draws) / len(draws))
    assert traces.expected_maximum(values, 1) == pytest.approx(2.5)
    assert traces.expected_maximum([7] * 9, 32) == pytest.approx(7)


def test_the_traces_have_their_known_size_and_ceiling(shared_data: Path) -> None:
    conv = traces.azure(shared_data, "conv")
    assert len(conv) == 19_366
    assert traces.ceiling(conv, 32) == pytest.approx(2.68, abs=0.05)
    assert traces.ceiling(traces.azure(shared_data, "code"), 32) == pytest.approx(8.2, abs=0.15)
    assert len(traces.azure(shared_data, "code", 10)) == 10


def test_batching_counts_steps() -> None:
    equal = [Lengths(10, 6)] * 8
    assert batching.measure(equal, 4)["continuous_steps"] == batching.static_steps(equal, 4) == 12
    rng = random.Random(0)
    mixed = [Lengths(rng.randint(1, 40), rng.choice([1, 2, 30])) for _ in range(200)]
    found = batching.measure(mixed, 8)
    assert found["static_steps"] > found["continuous_steps"] >= sum(r.output for r in mixed) / 8
    assert 0.5 < found["share"] < 1.2
    assert found["ratio"] == found["static_steps"] / found["continuous_steps"]


def test_waste_is_what_the_last_block_leaves_free() -> None:
    found = kv_waste.measure([Lengths(15, 2)], 1, 16)
    assert found["steps"] == 1  # the last step frees the blocks
    assert found["mean"] == pytest.approx(1 / 16)
    many = kv_waste.measure([Lengths(100, 20)] * 20, 8, 16)
    assert 0 < many["mean"] <= many["p99"] <= many["max"] < 16 / 100


def test_possible_hits_are_counted_from_the_tokens_alone() -> None:
    seen: prefix_hits.Trie = {}
    assert prefix_hits.shared_prefix(seen, (1, 2)) == 0
    prefix_hits.remember(seen, (1, 2, 3))
    prefix_hits.remember(seen, (1, 9))
    assert prefix_hits.shared_prefix(seen, (1, 2, 4)) == 2
    assert prefix_hits.shared_prefix(seen, (1, 2, 3, 4)) == 3
    assert prefix_hits.shared_prefix(seen, (2,)) == 0


def test_nearly_all_possible_prefix_tokens_are_hit() -> None:
    shots = tuple(range(100))
    found = prefix_hits.serve_rounds([[(*shots, 1000 + i, 7, 8) for i in range(6)]], grow=False)
    assert found["possible"] == 5 * 100
    assert found["hits"] == found["possible"]
    turns = [[tuple(range(50 * turn + 1000 * i, 50 * turn + 1000 * i + 40)) for i in range(3)] for turn in range(3)]
    grown = prefix_hits.serve_rounds(turns, grow=True)
    assert grown["possible"] == 3 * (40 + prefix_hits.ANSWER_TOKENS - 1) + 3 * (80 + 2 * prefix_hits.ANSWER_TOKENS - 1)
    assert 0.9 < grown["share"] <= 1


def test_overhead_times_every_part() -> None:
    found = overhead.measure(context=40, batch=3, steps=5)
    assert found["context"] == 40
    assert all(found[key] > 0 for key in ("plan", "build", "commit", "median", "p99"))
    assert found["p99"] >= found["median"]


def test_a_benchmark_prints_a_table_and_writes_json(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["batching", "--requests", "40", "--results", str(tmp_path)])
    batching.main()
    assert "| conv | 40 |" in capsys.readouterr().out
    written = json.loads((tmp_path / "batching.json").read_text(encoding="utf-8"))
    assert set(written["traces"]) == {"conv", "code"}
    assert written["machine"]["cores"] >= 1
    assert markdown(("a", "b"), [("x", 0.12345)]) == "| a | b |\n|---|---|\n| x | 0.123 |"


def test_a_soak_passes_only_without_errors_leaks_or_growth() -> None:
    assert soak.slope([(0, 5.0), (1, 7.0), (2, 9.0)]) == pytest.approx(2.0)
    flat = [(float(second), 100 * soak.MIB, 500 * soak.MIB) for second in range(60)]
    good = soak.Tally(completed=9, disconnected=3, memory=flat)
    assert soak.verdict(good, 0.0, 1.0)["passed"]
    assert not soak.verdict(good, 0.1, 1.0)["passed"]
    assert not soak.verdict(soak.Tally(9, 3, ["lost"], flat), 0.0, 1.0)["passed"]
    assert not soak.verdict(soak.Tally(9, 0, [], flat), 0.0, 1.0)["passed"]
    leak = [(second, http, engine + int(second) * soak.MIB // 10) for second, http, engine in flat]
    found = soak.verdict(soak.Tally(9, 3, [], leak), 0.0, 1.0)
    assert not found["passed"]
    assert found["engine_growth_mib_per_minute"] == pytest.approx(6, rel=0.01)
