"""What lies below the devices of several ranks: bits are those of one process, whatever becomes of a rank's share."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.core.protocol import CacheOpKind
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from penstock.runtime.runner import ModelRunner
from penstock.transfer import kept_blocks
from tests.engine.test_shared_store import patient
from tests.engine.test_tiers import answers, asked, folder, life, options, tier_of
from tests.models import tiny
from tests.startup.test_workers import worker_processes
from tests.transfer.stores import running_redis

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
__all__ = ["folder", "patient"]
DEGREES = {"tp2": (2, 1), "pp2": (1, 2), "tp2pp2": (2, 2)}
MORE = tuple(pytest.param(name, marks=pytest.mark.slow) for name in ("pp2", "tp2pp2"))


def of_ranks(given: EngineOptions, degree: str) -> EngineOptions:
    columns, stages = DEGREES[degree]
    return replace(given, tensor_parallel_size=columns, pipeline_parallel_size=stages)


def at(tmp_path: Path) -> dict[str, Any]:
    return {"kv_disk": 64 << 20, "kv_disk_path": str(tmp_path / "kv")}


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(one, marks=pytest.mark.slow) for one in (
    "gemma3", "deepseek-v2", "mamba2", "qwen3-next", "lfm2",
))])  # fmt: skip
@pytest.mark.parametrize("where", ["kv_ram", pytest.param("kv_disk", marks=pytest.mark.slow)])
@pytest.mark.parametrize("degree", DEGREES)
def test_what_was_evicted_comes_back_with_the_bits_of_one_process(
    degree: str, where: str, family: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tiny.save(family, model)
    (plain, _), _, _ = life(options(model), list(asked("abcd")), ())
    given = of_ranks(options(model, kv_blocks=14, **{**at(tmp_path), "kv_disk": None, where: 64 << 20}), degree)
    said, cached, tier = life(given, list(asked("abcd")), list(asked("efgh")))
    assert said == [plain, plain]
    assert tier is not None and tier.counters.loaded and not tier.counters.failed
    assert min(cached[1][:3]) >= 16, cached
    assert not worker_processes()


@pytest.mark.parametrize("degree", DEGREES)
def test_a_restart_finds_its_own_degree_and_no_other(degree: str, folder: Path, tmp_path: Path) -> None:
    (plain,), _, _ = life(options(folder), list(asked("abcd")))
    given = options(folder, **at(tmp_path))
    (first,), (cold,), _ = life(of_ranks(given, degree), list(asked("abcd")))
    (second,), (warm,), tier = life(of_ranks(given, degree), list(asked("abcd")))
    assert first == second == plain
    assert tier is not None and not tier.counters.failed and tier.counters.loaded
    assert cold[0] == 0 and warm[0] >= 32
    other = next(name for name in DEGREES if name != degree)
    (third,), (found,), _ = life(of_ranks(given, other), list(asked("abcd")))
    assert third == plain and found[0] == 0


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(64 + 40, len(data), 4096):
        data[place] ^= 1
    path.write_bytes(data)


def swapped(path: Path) -> None:
    """Whole copies, of other blocks."""
    data = path.read_bytes()
    half = len(data) // 4096 // 2 * 4096
    path.write_bytes(data[half:] + data[:half])


@pytest.mark.parametrize("degree", ["tp2", *MORE])
@pytest.mark.parametrize("harm", [damaged, swapped, Path.unlink, lambda path: os.truncate(path, 5000)])
def test_a_share_that_is_lost_is_computed_again(
    harm: Callable[[Path], None], degree: str, folder: Path, tmp_path: Path
) -> None:
    (plain,), _, _ = life(options(folder), list(asked("abcd")))
    given = of_ranks(options(folder, **at(tmp_path)), degree)
    life(given, list(asked("abcd")))
    (kept,) = kept_blocks.kept_blocks(tmp_path / "kv")
    shares = sorted(kept.folder.glob("blocks.rank*"))
    assert len(shares) == DEGREES[degree][0] * DEGREES[degree][1] - 1
    verdict = kept_blocks.verify(kept)
    assert verdict.whole == kept.blocks * (1 + len(shares)) and not verdict.wrong
    harm(shares[-1])
    if shares[-1].exists():
        assert kept_blocks.verify(kept).wrong
    (said,), _, tier = life(given, list(asked("abcd")))
    assert said == plain
    assert tier is not None and tier.counters.failed
    kept_blocks.remove(kept)
    assert not kept.folder.exists()


@pytest.mark.parametrize("degree", ["tp2", *MORE])
def test_shares_in_a_store_that_engines_share(
    degree: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,), _, _ = life(options(folder), list(asked("abcd")))
    with running_redis(tmp_path) as server:
        given = of_ranks(options(folder, kv_store=server.url), degree)
        for round_ in range(2):  # the second engine knows nothing but what is in the store
            engine, _ = build_engine(given)
            with closing(engine):
                said, cached = answers(engine, list(asked("abcd")))
                assert said == plain
                assert (cached[0] >= 32) == bool(round_), cached
                assert not tier_of(engine).counters.failed
        with closing(server.client()) as client:
            names = sorted(client.keys())
            stems = {name.split(b":")[1].rpartition(b".")[2] for name in names}
            assert stems == {b"%d" % rank for rank in range(DEGREES[degree][0] * DEGREES[degree][1])}
            client.delete(*(name for name in names if name.split(b":")[1].endswith(b".1")))
        (said,), (cached,), _ = life(given, list(asked("abcd")))
        assert said == plain and cached[0] == 0  # a block whose share is gone is not there


def begin_to_load(engine: Engine) -> None:
    """Begins the first step that has something loaded."""
    runner, scheduler = engine.runner, engine.scheduler
    assert isinstance(runner, ModelRunner)
    while (plan := scheduler.plan()) is not None:
        if any(op.kind is CacheOpKind.LOAD for op in plan.cache_ops):
            runner._begin(plan, None)
            return
        runner.submit(plan)
        scheduler.commit(runner.sample(plan.step))
    raise AssertionError("nothing is loaded")


def test_a_step_that_fails_leaves_no_transfer_behind(folder: Path, tmp_path: Path) -> None:
    (plain, _), _, _ = life(options(folder), list(asked("abcd")), ())
    for degree in ("tp2", "pp2"):
        engine, _ = build_engine(of_ranks(options(folder, kv_blocks=14, kv_ram=64 << 20), degree))
        with closing(engine):
            said, _ = answers(engine, list(asked("abcd")))
            for request in asked("efgh"):
                engine.add(request)
            begin_to_load(engine)
            engine.runner.abort()
            engine.scheduler.fail_outstanding("told to fail")
            while engine.has_work:
                engine.step()
            engine.scheduler.check_integrity()
            again, _ = answers(engine, list(asked("ijkl")))
            assert said == again == plain


def test_memory_below_is_that_of_all_ranks(folder: Path) -> None:
    engine, _ = build_engine(options(folder, kv_ram=1 << 20))
    with closing(engine):
        alone = len(tier_of(engine).places[0])
    for degree in ("tp2", "pp2"):
        engine, _ = build_engine(of_ranks(options(folder, kv_ram=1 << 20), degree))
        with closing(engine):
            places = len(tier_of(engine).places[0])
        # What both ranks of a layer keep counts twice.
        assert places == alone if degree == "pp2" else alone // 2 <= places <= alone


def test_a_rank_that_cannot_keep_its_share_is_named(folder: Path, tmp_path: Path) -> None:
    given = of_ranks(options(folder, **at(tmp_path)), "tp2")
    life(given, list(asked("a")))
    (share,) = (tmp_path / "kv").glob("*/blocks.rank1of2")
    share.unlink()
    share.mkdir()
    with pytest.raises(ConfigError, match=r"^rank 1 of 2: --kv-disk cannot keep blocks in "):
        build_engine(given)
    assert not worker_processes()
