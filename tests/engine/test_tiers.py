"""What lies below the device: bits are those of computing, over evictions, restarts, damage and kinds of cache."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.policies.bounded_tier import BoundedTier
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from penstock.transfer import disk
from tests.models import tiny
from tests.startup.test_control_vectors import drawn, written

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
DEADLINE_S = 60.0
KINDS = ("qwen3", "gemma3", "deepseek-v2", "mamba2", "qwen3-next", "lfm2")  # full, sliding, latent, states, and both
OTHERS = tuple(family for family in tiny.FAMILIES if family not in KINDS)
SAMPLED = SamplingParams(max_tokens=6, temperature=0.8, seed=7, logprobs=2, ignore_eos=True)
STEM = tiny.prompt(60, 1)
PROMPTS = (STEM + tiny.prompt(9, 2), STEM[:40] + tiny.prompt(30, 3), tiny.prompt(50, 4), STEM + tiny.prompt(9, 2))


def options(model: Path, **others: Any) -> EngineOptions:
    given: dict[str, Any] = {
        "threads": 2, "max_num_seqs": 2, "kv_blocks": 60, "max_num_batched_tokens": 32, "max_model_len": 96,
        "block_size": 8, **others,
    }  # fmt: skip
    return EngineOptions(model=str(model), device="cpu", pack_cache="off", **given)


def asked(names: str, salt: str = "", owner: str = "") -> Iterator[EngineRequest]:
    for name, prompt in zip(names, PROMPTS, strict=False):
        yield EngineRequest(name, tuple(prompt), SAMPLED, cache_salt=salt, owner=owner)


def answers(engine: Engine, requests: Sequence[EngineRequest]) -> tuple[list[Any], list[int]]:
    """What is said of each request, one after the other, and how many tokens of its prompt were found."""
    said: list[Any] = []
    cached: list[int] = []
    for request in requests:
        engine.add(request)
        while engine.has_work:
            for output in engine.step():
                if output.request_id != request.request_id:
                    continue  # of what is loaded from before
                assert output.error is None
                said += zip(output.tokens, output.logprobs, strict=True)
                cached += [] if output.cached_tokens is None else [output.cached_tokens]
        if isinstance(engine.scheduler.cache.transfers.tier, BoundedTier):
            settled(engine)  # as while nothing is asked for
    return said, cached


def settled(engine: Engine) -> None:
    """Everything that is due has been copied."""
    until = time.monotonic() + DEADLINE_S
    while engine.prepare() and engine.scheduler.cache.transfers.owed:
        assert time.monotonic() < until
    engine.scheduler.check_integrity()
    tier_of(engine).check_integrity()


def idle(engine: Engine) -> None:
    """Nothing is asked for, for as long as there is something to prepare."""
    while engine.prepare() or engine.has_work:
        if engine.has_work:
            engine.step()


def tier_of(engine: Engine) -> BoundedTier:
    tier = engine.scheduler.cache.transfers.tier
    assert isinstance(tier, BoundedTier)
    return tier


def life(
    given: EngineOptions, *rounds: Sequence[EngineRequest]
) -> tuple[list[Any], list[list[int]], BoundedTier | None]:
    engine, _ = build_engine(given)
    try:
        said: list[Any] = []
        cached: list[list[int]] = []
        for requests in rounds:
            told, found = answers(engine, requests)
            said.append(told)
            cached.append(found)
        return said, cached, tier_of(engine) if given.kv_disk or given.kv_ram else None
    finally:
        engine.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    tiny.save("qwen3", place)
    return place


def restart(family: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tiny.save(family, model)
    (plain,), _, _ = life(options(model), list(asked("abcd")))
    given = options(model, kv_disk=64 << 20, kv_disk_path=str(tmp_path / "kv"))
    (first,), (cold,), _ = life(given, list(asked("abcd")))
    (second,), (warm,), tier = life(given, list(asked("abcd")))
    assert first == plain and second == plain
    assert tier is not None and not tier.counters.failed and tier.counters.loaded
    assert cold[0] == 0 and warm[0] >= 32 and warm[2] >= 32, (cold, warm)


@pytest.mark.parametrize("family", KINDS)
def test_a_restart_is_warm_and_changes_no_bit(family: str, tmp_path: Path) -> None:
    restart(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_a_restart_is_warm_for_every_family(family: str, tmp_path: Path) -> None:
    restart(family, tmp_path)


@pytest.mark.parametrize("where", ["kv_ram", "kv_disk"])
@pytest.mark.parametrize("family", KINDS)
def test_what_was_evicted_comes_back_with_the_same_bits(family: str, where: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tiny.save(family, model)
    (plain, _), _, _ = life(options(model), list(asked("abcd")), ())
    below = {where: 64 << 20, "kv_disk_path": str(tmp_path / "kv")}
    given = options(model, kv_blocks=14, **below)
    said, cached, tier = life(given, list(asked("abcd")), list(asked("efgh")))
    assert said == [plain, plain]
    assert tier is not None and tier.counters.loaded and not tier.counters.failed
    assert min(cached[1][:3]) >= 16, cached


def test_nobody_finds_what_another_has_sent(folder: Path, tmp_path: Path) -> None:
    given = options(folder, kv_disk=64 << 20, kv_disk_path=str(tmp_path / "kv"), kv_blocks=14)
    everybody = [("", ""), ("salt", ""), ("", "a" * 64), ("salt", "a" * 64), ("", "b" * 64)]
    for restarted in (False, True):
        rounds = [list(asked("x", *who)) for who in everybody]
        said, cached, _ = life(given, *rounds)
        assert all(one == said[0] for one in said)
        assert [found[0] > 0 for found in cached] == [restarted] * len(everybody)


@pytest.mark.parametrize(
    "other",
    [{"kv_cache_dtype": "float16"}, {"quantize": "int8"}, {"block_size": 16}, {"hf_overrides": {"rms_norm_eps": 0.01}}],
    ids=lambda other: next(iter(other)),
)
def test_other_numbers_are_not_taken(other: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    given = options(folder, kv_disk=64 << 20, kv_disk_path=str(tmp_path / "kv"))
    life(given, list(asked("abcd")))
    (said,), (cached,), _ = life(replace(given, **other), list(asked("abcd")))
    (plain,), _, _ = life(options(folder, **other), list(asked("abcd")))
    assert said == plain and cached[0] == 0


def test_a_changed_model_is_not_taken_for_what_it_was(folder: Path, tmp_path: Path) -> None:
    given = options(folder, kv_disk=64 << 20, kv_disk_path=str(tmp_path / "kv"))
    life(given, list(asked("abcd")))
    stat = (folder / "model.safetensors").stat()
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    os.utime(folder / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (said,), (cached,), _ = life(given, list(asked("abcd")))
    assert cached[0] == 0
    (plain,), _, _ = life(options(folder), list(asked("abcd")))
    assert said == plain


@pytest.mark.parametrize("given", ["~/vector:2", "{}/vector.of:mine", "{}/vector"])
def test_a_changed_control_vector_is_not_taken_for_what_it_was(
    given: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its file is called, and wherever a flag's path has it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ("vector.of:mine" if "of" in given else "vector")
    started = options(folder, control_vector=(given.format(tmp_path),))
    below = replace(started, kv_disk=64 << 20, kv_disk_path=str(tmp_path / "kv"))
    written(file, drawn(1))
    life(below, list(asked("abcd")))
    written(file, drawn(1, seed=2))
    (said,), (cached,), _ = life(below, list(asked("abcd")))
    assert cached[0] == 0
    assert said == life(started, list(asked("abcd")))[0][0]


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "cut":
        data = data[: len(data) // 2]
    elif how == "noise":
        for index in range(0, len(data), 100):
            data[index] ^= 0x55
    elif how == "moved":
        data = data[4096:] + data[:4096]
    elif how == "empty":
        data = bytearray()
    file.write_bytes(data)


@pytest.mark.parametrize("how", ["cut", "noise", "moved", "empty"])
@pytest.mark.parametrize("name", ["blocks", "index"])
def test_what_is_damaged_is_computed_again(name: str, how: str, folder: Path, tmp_path: Path) -> None:
    given = options(folder, kv_disk=64 << 20, kv_disk_path=str(tmp_path / "kv"))
    (plain,), _, _ = life(given, list(asked("abcd")))
    (kept,) = (tmp_path / "kv").glob("model-*")
    damage(kept / name, how)
    (said,), _, _ = life(given, list(asked("abcd")))
    assert said == plain
    (again,), (cached,), _ = life(given, list(asked("abcd")))
    assert again == plain and cached[0] > 0, "it was written anew"


def test_a_store_that_fails_costs_nothing_but_time(folder: Path, tmp_path: Path) -> None:
    given = options(folder, kv_disk=64 << 20, kv_disk_path=str(tmp_path / "kv"), kv_blocks=14)
    (plain,), _, _ = life(given, list(asked("abcd")))
    engine, _ = build_engine(given)
    try:
        store = vars(engine.runner.mover)["_store"]  # type: ignore[attr-defined]
        file = vars(vars(store)["_file"])
        os.close(file["_file"])
        said, cached = answers(engine, list(asked("abcd")))
        assert said == plain and cached[0] == 0, "it was found, and was not there"
        assert tier_of(engine).counters.failed and engine.stats().failed_loads
        file["_file"] = os.open(os.devnull, os.O_RDONLY)
        assert answers(engine, list(asked("efgh")))[0] == plain
    finally:
        engine.close()


def test_what_was_there_is_brought_back_while_nothing_is_asked_for(folder: Path, tmp_path: Path) -> None:
    """As who sent it would have it: others find nothing."""
    given = options(folder, kv_disk=64 << 20, kv_disk_path=str(tmp_path / "kv"))
    (plain,), _, _ = life(given, list(asked("abcd", "salt", "a" * 64)))
    engine, _ = build_engine(replace(given, kv_blocks=120))
    try:
        idle(engine)
        before = tier_of(engine).counters.loaded
        assert before
        stats = engine.stats()
        told = (stats.finished, stats.prompt_tokens, stats.generated_tokens, stats.prefix_queries, stats.prefix_hits)
        assert not any(told), "nobody asked for anything"
        said, cached = answers(engine, list(asked("abcd", "salt", "a" * 64)))
        assert said == plain and cached[0] >= 32 and cached[2] >= 32
        assert tier_of(engine).counters.loaded == before, "all of it was in the pool"
        assert answers(engine, list(asked("efgh")))[1][0] == 0
    finally:
        engine.close()


def test_what_is_sooner_computed_is_not_brought_back(folder: Path, tmp_path: Path) -> None:
    """One such prefix does not keep others from being brought back."""
    given = options(folder, kv_disk=64 << 20, kv_disk_path=str(tmp_path / "kv"))
    life(given, list(asked("abcd")))
    engine, _ = build_engine(replace(given, kv_blocks=120))
    try:
        tier = tier_of(engine)
        tier.worth = lambda start, nodes: nodes[-1].depth > 56  # type: ignore[method-assign]
        idle(engine)
        assert [node.filled for node in tier.ends(9)] == [node.depth > 56 for node in tier.ends(9)]
        assert {node.filled for node in tier.ends(9)} == {True, False}
    finally:
        engine.close()


def test_what_was_forgotten_or_cannot_be_loaded_is_not_brought_back(folder: Path, tmp_path: Path) -> None:
    """Nobody asked for it: computing it would take long."""
    given = options(folder, kv_disk=64 << 20, kv_disk_path=str(tmp_path / "kv"))
    life(given, list(asked("abcd")))
    engine, _ = build_engine(replace(given, kv_blocks=120))
    try:
        engine.scheduler.cache.clear()
        idle(engine)
        assert not engine.stats().blocks_cached and not engine.stats().steps
    finally:
        engine.close()
    life(given, list(asked("abcd")))
    (kept,) = (tmp_path / "kv").glob("model-*")
    damage(kept / "blocks", "noise")
    engine, _ = build_engine(replace(given, kv_blocks=120))
    try:
        assert engine.prepare() and engine.has_work, "who comes now does not wait"
        said, _ = answers(engine, list(asked("efgh")))
        idle(engine)
        assert len(said) == 4 * 6 and tier_of(engine).counters.failed
        asks = [work for work in engine.idle_work if "_asked" in vars(work)]
        assert len(asks) == 1 and not vars(asks[0])["_asked"]
    finally:
        engine.close()


def test_two_engines_do_not_share_a_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_LOCK_S", 0.0)
    given = options(folder, kv_disk=64 << 20, kv_disk_path=str(tmp_path / "kv"))
    engine, _ = build_engine(given)
    try:
        with pytest.raises(ConfigError, match="another engine keeps blocks in"):
            build_engine(given)
    finally:
        engine.close()
    life(given, list(asked("a")))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_disk": 1000}, "a block of 8 tokens takes"),
        ({"kv_ram": 1}, "--kv-ram is"),
        ({"kv_disk": 1 << 20, "enable_prefix_caching": False}, "this engine keeps none"),
        ({"kv_disk": 1 << 20, "kv_disk_path": "/dev/null/x"}, "--kv-disk has no folder"),
    ],
)
def test_a_tier_that_cannot_be_had_is_refused(given: dict[str, Any], said: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        build_engine(options(folder, **{"kv_disk_path": str(tmp_path / "kv"), **given}))


def test_what_lies_below_is_told(folder: Path, tmp_path: Path) -> None:
    engine, _ = build_engine(options(folder, kv_ram=64 << 20))
    try:
        answers(engine, list(asked("abc")))
        stats, tier = engine.stats(), tier_of(engine)
        assert stats.kv_below_blocks == tier.copies == dict(stats.kv_below)["saved"] > 0
        assert stats.kv_below_places == len(tier.places[0]) > stats.kv_below_blocks
    finally:
        engine.close()
    plain, _ = build_engine(options(folder))
    stats = plain.stats()
    assert (stats.kv_below, stats.kv_below_blocks, stats.kv_below_places) == ((), 0, 0)
    plain.close()


def test_only_this_user_may_read_what_is_kept(folder: Path, tmp_path: Path) -> None:
    life(options(folder, kv_disk=64 << 20, kv_disk_path=str(tmp_path / "kv")), list(asked("a")))
    (kept,) = (tmp_path / "kv").glob("model-*")
    assert kept.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in kept.iterdir()} == {0o600}
