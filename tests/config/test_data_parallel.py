"""Options of several engines: what is refused, and what each of them gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.config.data_parallel import check_data_parallel, check_one_engine, engine_options
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.resolve import validate


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data_parallel_size": 0}, "--data-parallel-size is 0; allowed: an integer from 1 to 64"),
        ({"data_parallel_size": True}, "--data-parallel-size is True"),
        ({"routing_policy": "luck"}, "--routing-policy is 'luck'; allowed: cost, cache-aware, session"),
        ({"data_parallel_size": 2, "device": "cuda"}, "start a server for each GPU"),
        ({"data_parallel_size": 2, "kv_disk": 2**30}, "belongs to one engine. Take --kv-ram"),
        (
            {"data_parallel_size": 2, "pipeline_parallel_size": 2, "remote_workers": 1, "workers_address": "h:1"},
            "join one engine",
        ),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(EngineOptions(**given))


def test_ports_of_events_may_not_meet() -> None:
    for replay, meets in ((5558, True), (5559, True), (5560, False), (5554, False)):
        config = json.dumps({"enable_kv_cache_events": True, "replay_endpoint": f"tcp://*:{replay}"})
        options = EngineOptions(data_parallel_size=3, kv_events_config=config)
        if meets:
            with pytest.raises(ConfigError, match="as far apart as there are engines"):
                check_data_parallel(options)
        else:
            check_data_parallel(options)


def test_where_one_engine_is_made_several_are_refused() -> None:
    check_one_engine(EngineOptions(), "here one engine is made")
    with pytest.raises(ConfigError, match="--data-parallel-size 2: here one engine is made"):
        check_one_engine(EngineOptions(data_parallel_size=2), "here one engine is made")


def test_each_engine_gets_a_part() -> None:
    asked = EngineOptions(data_parallel_size=3, threads=8, kv_cache_memory=900, kv_ram=300, seed=4)
    parts = [engine_options(asked, number, 5000) for number in range(3)]
    for part in parts:
        check_data_parallel(part)
        assert (part.data_parallel_size, part.memory, part.kv_cache_memory, part.kv_ram) == (1, 5000, 300, 100)
        assert (part.threads, part.seed, part.device) == (8, 4, "cpu")  # threads are shared out as engines work
    ranked = EngineOptions(data_parallel_size=3, threads=8, tensor_parallel_size=2)
    assert [engine_options(ranked, number, None).threads for number in range(3)] == [3, 3, 2]


def test_each_engine_publishes_at_endpoints_of_its_own() -> None:
    def endpoints(number: int, **given: str) -> list[str | None]:
        config = json.dumps({"enable_kv_cache_events": True, **given})
        options = EngineOptions(data_parallel_size=2, kv_events_config=config)
        own = json.loads(engine_options(options, number, None).kv_events_config or "")
        return [own.get("endpoint"), own.get("replay_endpoint")]

    assert endpoints(0) == ["tcp://*:5557", None]
    assert endpoints(1) == ["tcp://*:5558", None]
    assert endpoints(1, endpoint="ipc:///run/e", replay_endpoint="tcp://h:7") == ["ipc:///run/e_dp1", "tcp://h:8"]
    assert endpoints(1, endpoint="tcp://127.0.0.1:*") == ["tcp://127.0.0.1:*", None]
    silent = EngineOptions(data_parallel_size=2, kv_events_config='{"enable_kv_cache_events": false}')
    assert engine_options(silent, 1, None).kv_events_config == silent.kv_events_config
