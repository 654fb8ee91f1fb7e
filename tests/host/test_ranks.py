"""A model in several processes, served: when one of them dies the engine is started again, and answers go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest, FinishReason
from penstock.host import process_client as client_module
from penstock.host.process_client import ProcessClient
from tests.engine.support import read, tokens_of


def asked(name: str) -> EngineRequest:
    how = SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True)
    return EngineRequest(name, tuple(range(3, 40)), how, seed=5)


def processes(client: ProcessClient) -> list[psutil.Process]:
    return psutil.Process(client.pid).children()


@pytest.mark.parametrize("below", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_answers_go_on_where_a_rank_was_killed(
    below: bool, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what was computed lies on disk, each rank's share of it."""
    monkeypatch.setattr(client_module, "FIRST_RESTART_DELAY_S", 0.01)
    model = str(shared_data / "models" / "stories260K" / "hf")
    disk = {"kv_disk": 64 << 20, "kv_disk_path": str(tmp_path)} if below else {}
    client = ProcessClient(
        EngineOptions(model=model, tensor_parallel_size=2, threads=1, device="cpu", max_model_len=512, **disk)  # type: ignore[arg-type]
    )
    await client.start()
    try:
        expected = tokens_of(await read(client.submit(asked("before"))))
        (worker,) = processes(client)
        engine = psutil.Process(client.pid)
        streams = [client.submit(asked(name)) for name in "ab"]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        async with asyncio.timeout(60):
            while not all(stream.tokens > 20 for stream in streams):
                await asyncio.sleep(0)
        worker.kill()
        async with asyncio.timeout(120):
            outputs = await asyncio.gather(*readers)
        assert (await client.stats()).restarts == 1
        assert [tokens_of(one) for one in outputs] == [expected, expected]
        assert all(one[-1].finish_reason is FinishReason.LENGTH for one in outputs)
        assert not engine.is_running() and not worker.is_running()
        (second,) = processes(client)
        second.kill()  # while nothing is asked for: whoever asks next need not find it out
        async with asyncio.timeout(60):
            while (await client.stats()).restarts == 1 or not processes(client):
                await asyncio.sleep(0.01)
        assert tokens_of(await read(client.submit(asked("after")))) == expected
        (third,) = processes(client)
    finally:
        await client.close()
    assert not second.is_running() and not third.is_running()
