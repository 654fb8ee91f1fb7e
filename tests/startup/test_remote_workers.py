"""Workers of other machines join by a token, compute what they are told, and are missed when they have gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.config.errors import CheckpointError, ConfigError, MemoryPlanError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.runtime.ranks import joining
from penstock.startup import door
from tests.models import tiny

TOKEN = "a token that is long enough"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("PENSTOCK_WORKER_TOKEN", TOKEN)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


Join = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def join(port: int) -> Iterator[Join]:
    """Starts `penstock worker`."""
    started: list[subprocess.Popen[str]] = []

    def start(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "penstock", "worker", "--join", f"127.0.0.1:{port}", "--threads", "1", *more]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def engine_of(model: str, port: int, **more: Any) -> Engine:
    options = EngineOptions(
        model=model, device="cpu", threads=1,
        **{"kv_blocks": 100, "max_model_len": 256, "pipeline_parallel_size": 2, **more},
        remote_workers=1, workers_address=f"127.0.0.1:{port}",
    )  # fmt: skip
    return build_engine(options)[0]


def answer(engine: Engine, tokens: int = 30) -> list[Any]:
    """Tokens, with what is known of their and the prompt's probabilities."""
    how = SamplingParams(temperature=0.9, max_tokens=tokens, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    engine.add(EngineRequest("a", tuple(range(3, 40)), how, seed=7))
    found: list[Any] = []
    while engine.has_work and engine.dead is None:
        for output in engine.step():
            found += (*zip(output.tokens, output.logprobs, strict=True), *output.prompt_logprobs)
    return found


def test_a_worker_joins_computes_and_is_missed(shared_data: Path, port: int, join: Join) -> None:
    model = str(shared_data / "models" / "stories260K" / "hf")
    alone = build_engine(EngineOptions(model=model, device="cpu", threads=1, max_model_len=256, kv_blocks=100))[0]
    expected = answer(alone)
    alone.close()
    supervisor = join()
    engine = engine_of(model, port)
    assert answer(engine) == expected and len(expected) == 30 + 36
    (worker,) = psutil.Process(supervisor.pid).children()
    worker.kill()
    engine.add(EngineRequest("b", (1, 2, 3), SamplingParams(max_tokens=200)))
    for _ in range(100_000):
        if engine.dead is not None:
            break
        engine.step()
    assert "rank 1 of 2, which is of another machine, has gone." in str(engine.dead)
    engine.close()
    again = engine_of(model, port)  # which the same `penstock worker` joins
    assert answer(again) == expected
    (second,) = psutil.Process(supervisor.pid).children()
    again.close()
    assert psutil.wait_procs([second], timeout=60)[0]


def test_the_head_is_with_the_one_that_leads(port: int, join: Join, tmp_path: Path) -> None:
    """It reads none of the last layers, and what joins nothing of a head that is no embedding."""
    tiny.save("llama-biases", tmp_path)
    alone = build_engine(EngineOptions(model=str(tmp_path), device="cpu", threads=1, kv_blocks=100))[0]
    expected = answer(alone)
    alone.close()
    join("--once")
    engine = engine_of(str(tmp_path), port, max_model_len=128)
    assert answer(engine) == expected
    engine.close()


def test_another_machines_memory_is_planned_with(port: int, join: Join, tmp_path: Path) -> None:
    """What fits into this one alone, and more than half of which the other one has no room for."""
    tiny.save("llama-biases", tmp_path)
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "kv_blocks": None,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 64,
    }
    join("--once", "--memory", "100KiB")
    with pytest.raises(MemoryPlanError, match=r"only .* are available"):
        engine_of(str(tmp_path), port, **settings)
    blocks = []
    for memory in ("600KiB", "4MiB"):
        join("--once", "--memory", memory)
        engine = engine_of(str(tmp_path), port, **settings)
        blocks.append(engine.stats().blocks_total)
        engine.close()
    assert 0 < blocks[0] < blocks[1]


def test_another_model_is_refused(shared_data: Path, port: int, join: Join) -> None:
    models = shared_data / "models"
    join("--model", str(models / "penstock-concierge"), "--once")
    with pytest.raises(ConfigError, match=r"^rank 1 of 2: .* is another model: its tensors take"):
        engine_of(str(models / "stories260K" / "hf"), port)


def test_a_model_that_is_not_there_is_named(shared_data: Path, port: int, join: Join, tmp_path: Path) -> None:
    join("--model", str(tmp_path / "nothing"), "--once")
    with pytest.raises((CheckpointError, ConfigError), match=r"^rank 1 of 2: .*nothing"):
        engine_of(str(shared_data / "models" / "stories260K" / "hf"), port)


def test_who_does_not_know_the_token_stays_outside() -> None:
    with joining.listen("127.0.0.1", 0) as listening:
        address = listening.getsockname()
        callers: list[joining.Caller | None] = []
        greeter = threading.Thread(target=lambda: callers.append(joining.admit(listening, TOKEN, 60)))
        greeter.start()
        with pytest.raises(ConfigError, match="does not know the token"):
            joining.call(address, "another token, as long")
        greeter.join()
        for sent in (b"", os.urandom(40), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + b"x" * 30):
            greeter = threading.Thread(target=lambda: callers.append(joining.admit(listening, TOKEN, 60)))
            greeter.start()
            with socket.create_connection(address) as stranger:
                stranger.sendall(sent + bytes(100))
                with suppress(OSError):  # where it has been shown out
                    stranger.shutdown(socket.SHUT_WR)
                greeter.join()
        assert callers == [None] * 4


def test_all_connections_of_a_worker_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two workers' come in turn."""
    listening = joining.listen("127.0.0.1", 0)
    monkeypatch.setattr(joining, "listen", lambda host, port: listening)
    found: list[dict[bytes, socket.socket]] = []
    with door.Door("127.0.0.1:0", TOKEN) as gathering:

        def gather() -> None:
            while len(found) < 2:
                if (joined := gathering.next(60)) is not None:
                    found.append(joined)

        greeter = threading.Thread(target=gather)
        greeter.start()
        called: list[dict[bytes, socket.socket]] = []
        callers = [
            threading.Thread(target=lambda: called.append(joining.call(listening.getsockname(), TOKEN))) for _ in "ab"
        ]
        for caller in callers:
            caller.start()
        for thread in (*callers, greeter):
            thread.join()
    ends = [{joined[kind].getpeername() for kind in joining.KINDS} for joined in found]
    assert sorted(map(sorted, ends)) == sorted(sorted(one.getsockname() for one in each.values()) for each in called)
    for each in (*found, *called):
        for one in each.values():
            one.close()


@pytest.mark.parametrize("text", ["", "host", ":7000", "host:", "host:port", "host:70000", "host:٣"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed: HOST:PORT"):
        joining.address_of(text, "--join")


def test_addresses_and_tokens() -> None:
    assert joining.address_of("[::1]:7000", "--join") == ("::1", 7000)
    with pytest.raises(ConfigError, match="16 characters or more"):
        joining.check_token("short")
