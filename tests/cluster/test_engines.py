"""The engines of one machine: what each of them gets of it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import zmq

from penstock.cluster.engines import cluster, make_engine, memory_of_one, weights_are_shared
from penstock.config.counting import of_all
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import MemoryPlanError
from penstock.config.options import EngineOptions
from penstock.core.kv.observer import Observer
from penstock.host.engine import hosted_options
from penstock.host.process_client import ProcessClient
from penstock.kernels.cpu import native
from penstock.transfer.prefix_names import Observers
from tests.engine.support import read, request, tokens_of

needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built")
SMALL = EngineOptions(data_parallel_size=2, threads=2, kv_blocks=64, max_model_len=256, max_num_seqs=4)


def test_one_engine_needs_no_cluster() -> None:
    assert isinstance(make_engine(EngineOptions(), None, None), ProcessClient)


@needs_native
def test_weights_count_once_and_the_rest_is_dealt(tmp_path: Path) -> None:
    asked = hosted_options(EngineOptions(memory=2 << 30, pack_cache=str(tmp_path)))
    assert weights_are_shared(asked)
    one, two, four = (memory_of_one(EngineOptions(**_of(asked), data_parallel_size=count)) for count in (1, 2, 4))
    assert one == 2 << 30
    weights = 2 * two - one
    assert 10 << 20 < weights < 40 << 20
    assert abs(4 * four - 3 * weights - one) < 8
    apart = EngineOptions(**{**_of(asked), "pack_cache": "off"}, data_parallel_size=2)
    assert not weights_are_shared(apart)
    assert memory_of_one(apart) == 1 << 30
    with pytest.raises(MemoryPlanError):
        memory_of_one(EngineOptions(**{**_of(asked), "memory": 9 << 20}, data_parallel_size=2))


def _of(options: EngineOptions) -> dict[str, object]:
    return {"model": options.model, "memory": options.memory, "pack_cache": options.pack_cache}


@needs_native
async def test_engines_map_one_file_and_publish_at_endpoints_of_their_own(tmp_path: Path) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    options = EngineOptions(
        data_parallel_size=2, threads=2, kv_blocks=64, max_model_len=256, max_num_seqs=4, pack_cache=str(tmp_path),
        kv_events_config=json.dumps(events), routing_policy="round-robin",
    )  # fmt: skip
    client = cluster(options)
    info = await client.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        assert ("engines", "2") in {(told.name, told.value) for told in info.settings}
        mapped = []
        for engine in client.engines:
            assert isinstance(engine, ProcessClient)
            maps = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
            mapped.append({line.split()[4] for line in maps if line.endswith(".packed")})  # by inode
        assert mapped[0] == mapped[1] and len(mapped[0]) == 1
        sockets = [context.socket(zmq.SUB) for _ in range(2)]
        for socket, place in zip(sockets, ("events", "events_dp1"), strict=True):
            socket.subscribe(b"")
            socket.set(zmq.RCVTIMEO, 20_000)
            socket.connect(f"ipc://{tmp_path}/{place}")
        for number in range(8):  # until subscriptions are there
            answer = await read(client.submit(request(40 + number, max_tokens=2)))
            assert len(tokens_of(answer)) == 2
        for number, socket in enumerate(sockets):
            assert msgspec.msgpack.decode(socket.recv_multipart()[2])[2] == number
        known = [len(one) for one in client._router._known]
        assert min(known) > 0  # both observers of a cache are told
    finally:
        context.destroy(0)
        await client.close()


def test_several_observers_are_all_told() -> None:
    told: list[tuple[str, str]] = []

    class Noting(Observer):
        def __init__(self, name: str) -> None:
            self._name = name

        def cleared(self) -> None:
            told.append((self._name, "cleared"))

        def figures(self) -> dict[str, object]:
            return {self._name: 1}

    both = Observers(Noting("a"), Noting("b"))
    both.cleared()
    assert told == [("a", "cleared"), ("b", "cleared")]
    assert both.figures() == {"a": 1, "b": 1}


def test_figures_of_several_engines() -> None:
    one = EngineStats(running=2, prompt_tokens=10, waiting_seconds=3.0, miss_reasons=(("new", 2),), accepted_now=0.5)
    two = EngineStats(running=1, prompt_tokens=5, waiting_seconds=1.0, miss_reasons=(("new", 1), ("old", 4)), paused=1)
    both = of_all([one, two])
    assert (both.running, both.prompt_tokens, both.waiting_seconds, both.accepted_now) == (3, 15, 3.0, 0.5)
    assert dict(both.miss_reasons) == {"new": 3, "old": 4}
    assert both.engines == (one, two)
    assert both.paused == 0
    for states, told in (((1, 1), 1), ((1, 3), 3), ((2, 1), 2), ((0, 2), 2), ((), 0)):
        assert of_all([EngineStats(paused=state) for state in states]).paused == told
