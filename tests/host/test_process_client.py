"""The real engine process around a null engine: life, death, silence, garbage, refusals, residue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from penstock.config.cores import PLACES, CoreBoard
from penstock.config.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    PenstockError,
    RequestError,
)
from penstock.config.options import EngineOptions
from penstock.core.request import FinishReason
from penstock.engine import messages
from penstock.engine.api import EngineState
from penstock.host import process_client as client_module
from penstock.host.process_client import ProcessClient
from penstock.kernels.cpu import native
from tests.engine.checks import check_refusal, check_residue, until_empty
from tests.engine.support import read, request, tokens_of


async def until(condition: object, seconds: float = 60) -> None:
    """Waits until the callable is true."""
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_round_trip_and_close(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    client = ProcessClient(EngineOptions(model="null"), on_progress=lambda done, total: seen.append((done, total)))
    assert client.state is EngineState.STARTING
    with pytest.raises(EngineDeadError):
        client.submit(request())
    info = await client.start()
    assert info.architecture == "Null"
    assert seen[-1] == (2, 2)
    assert client.state is EngineState.READY
    outputs = await read(client.submit(request(max_tokens=20, logprobs=2, prompt_logprobs=0, seed=2**64 - 1)))
    assert outputs[0].tokens == ()
    assert len(tokens_of(outputs)) == 20
    assert sum(len(output.logprobs) for output in outputs) == 20
    assert sum(len(output.prompt_logprobs) for output in outputs) == 4
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert (await client.stats()).generated_tokens == 20
    assert client._child is not None
    pid, directory = client.pid, client._child._directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    await client.close()
    assert not alive(pid)
    assert not directory.exists()
    assert client.state is EngineState.STOPPED
    await client.close()


async def test_refusal_carries_kind_param_and_code(client: ProcessClient) -> None:
    await check_refusal(client)


async def test_what_cannot_be_encoded_is_refused(client: ProcessClient) -> None:
    with pytest.raises(RequestError, match="cannot be sent"):
        client.submit(request(request_id="\ud800"))
    assert len(client._line.streams) == 0


async def test_counters_go_on_over_restarts(client: ProcessClient) -> None:
    await read(client.submit(request(prompt=40, max_tokens=20)))
    before = await client.stats()
    assert (before.generated_tokens, before.prompt_tokens, before.finished) == (20, 40, 1)
    assert dict(before.miss_reasons) == {"first_seen": 1}
    assert client.pid > 0
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: client.state is EngineState.RESTARTING)
    away = await client.stats()
    assert (away.generated_tokens, away.steps, away.miss_reasons) == (20, before.steps, before.miss_reasons)
    assert (away.running, away.blocks_cached, away.blocks_total) == (0, 0, 0)
    await until(lambda: client.state is EngineState.READY)
    await read(client.submit(request(prompt=40, max_tokens=20)))
    after = await client.stats()
    assert (after.generated_tokens, after.prompt_tokens, after.finished) == (40, 80, 2)
    assert after.forward_seconds >= before.forward_seconds
    assert dict(after.miss_reasons) == {"first_seen": 2}
    assert after.blocks_total == before.blocks_total


async def test_silence_flips_the_state(client: ProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HEARTBEAT_TIMEOUT_S", 1.0)
    os.kill(client.pid, signal.SIGSTOP)
    await until(lambda: client.state is not EngineState.READY)
    with pytest.raises(EngineDeadError):
        client.submit(request())
    await asyncio.wait_for(client.stats(), 60)  # of one that is silent, which is not asked
    monkeypatch.setattr(client_module, "HEARTBEAT_TIMEOUT_S", 60.0)
    os.kill(client.pid, signal.SIGCONT)
    await until(lambda: client.state is EngineState.READY)
    assert len(tokens_of(await read(client.submit(request())))) == 8


async def test_long_silence_is_death(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.host.child.UNRESPONSIVE_S", 8.0)
    client = ProcessClient(EngineOptions(model="null"))
    await client.start()
    (folder / "hold").touch()
    stopped, stream = client.pid, client.submit(request(max_tokens=1000))
    await anext(stream)
    os.kill(stopped, signal.SIGSTOP)
    (folder / "hold").unlink()
    outputs = await asyncio.wait_for(read(stream), 60)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert client.pid != stopped
    await client.close()


async def test_step_that_hangs_is_death(folder: Path) -> None:
    client = ProcessClient(EngineOptions(model="stuck"))
    await client.start()
    pid = client.pid
    outputs = await asyncio.wait_for(read(client.submit(request())), 60)
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert not alive(pid)
    await client.close()


@pytest.mark.skipif(not native.available(), reason="the threads are the native library's")
async def test_an_engine_notes_that_it_works_and_is_struck_off_when_it_dies(folder: Path) -> None:
    with contextlib.closing(CoreBoard()) as board:
        assert board.take() == 0  # somebody else's

        def working() -> bool:
            return os.pread(board.file, PLACES, 0).find(1) == 1

        client = ProcessClient(EngineOptions(model="busy"), cores=board)
        await client.start()
        assert not working()
        stream = client.submit(request(max_tokens=1000))
        await until(working)
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.state is EngineState.RESTARTING)
        await stream.aclose()
        await until(lambda: client.state is EngineState.READY)
        await until(lambda: not working())
        stream = client.submit(request(max_tokens=1000))
        await until(working)
        await client.close()
        assert not working() and board.take() == 1
        await stream.aclose()


def test_runs_under_uvloop(folder: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        client = ProcessClient(EngineOptions(model="null"))
        await client.start()
        assert all(await asyncio.gather(*(read(client.submit(request())) for _ in range(20))))
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.state is EngineState.RESTARTING)
        await until(lambda: client.state is EngineState.READY)
        assert len(tokens_of(await read(client.submit(request())))) == 8
        await client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_stopped_process_is_killed_at_close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.host.child.TERMINATE_S", 0.3)
    client = ProcessClient(EngineOptions(model="null"))
    await client.start()
    pid = client.pid
    os.kill(pid, signal.SIGSTOP)
    await client.close()
    assert not alive(pid)


async def test_cancel_frees(folder: Path, client: ProcessClient) -> None:
    (folder / "hold").touch()
    wanted = request(prompt=200, n=3, max_tokens=1500)
    stream = client.submit(wanted)
    await anext(stream)
    client.cancel(wanted.request_id)
    (folder / "hold").unlink()
    outputs = await read(stream)
    assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.CANCELLED] * 3
    dropped = client.submit(request(max_tokens=1500))
    await anext(dropped)
    await dropped.aclose()
    await until_empty(client)
    stats = await client.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


async def test_garbage_in_both_sockets_changes_nothing(client: ProcessClient) -> None:
    assert client._child is not None
    launch = client._child._launch
    context = zmq.Context()
    garbage = (
        b"", b"\x00", b"\xff" * 1000, b"\x80\x04\x95posix\nsystem\n", b"{}", os.urandom(5000), b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000, messages.encode(messages.Heartbeat()), messages.encode(messages.Cancel("nobody")),
        messages.encode(messages.Outputs([])), messages.encode(messages.Submit(request())).replace(b"\x08", b"\xa0"),
    )  # fmt: skip
    stream = client.submit(request(max_tokens=500))
    for endpoint in (launch.commands, launch.events):
        socket = context.socket(zmq.PUSH)
        socket.connect(endpoint)
        for frame in garbage:
            socket.send(frame)
        socket.send_multipart([b"a", b"b", b"c"])
        socket.close(1000)
    pid = client.pid
    assert len(tokens_of(await read(stream))) == 500
    assert len(tokens_of(await read(client.submit(request())))) == 8
    assert (client.pid, client.state) == (pid, EngineState.READY)
    context.term()


async def test_oversized_frames_are_dropped(client: ProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 4000)
    with pytest.raises(RequestError, match="4000 bytes"):
        client.submit(request(prompt=2000))
    assert len(tokens_of(await read(client.submit(request())))) == 8


async def test_a_thousand_requests_leave_no_residue(client: ProcessClient) -> None:
    await check_residue(client)


async def test_idle_costs_nothing(client: ProcessClient) -> None:
    def cpu(pid: int) -> int:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))

    await read(client.submit(request()))
    before = cpu(os.getpid()) + cpu(client.pid)
    await asyncio.sleep(1)
    assert cpu(os.getpid()) + cpu(client.pid) - before <= 50  # hundredths of a second


@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        ("missing", CheckpointError, "no model at missing; give a folder"),
        ("bug", EngineDeadError, "ZeroDivisionError"),
        ("crash", EngineDeadError, "signal 6"),
    ],
)
async def test_start_error_is_the_process_own(folder: Path, model: str, kind: type[PenstockError], text: str) -> None:
    client = ProcessClient(EngineOptions(model=model))
    with pytest.raises(kind, match=text):
        await client.start()
    assert client.state is EngineState.STOPPED
    with pytest.raises(EngineDeadError):
        _ = client.info


async def test_start_can_be_cancelled(folder: Path) -> None:
    client = ProcessClient(EngineOptions(model="loading"))
    starting = asyncio.create_task(client.start())
    await until(lambda: client.pid)
    pid = client.pid
    await asyncio.sleep(0.5)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not alive(pid)


@pytest.mark.parametrize("model", ["loading", "null"])
async def test_close_while_starting(folder: Path, model: str) -> None:
    client = ProcessClient(EngineOptions(model=model))
    starting = asyncio.create_task(client.start())
    await until(lambda: client.pid)
    pid = client.pid
    await client.close()
    with pytest.raises(EngineDeadError):
        await starting
    assert not alive(pid)
    assert client.state is EngineState.STOPPED


async def test_directory_with_too_long_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        await ProcessClient(EngineOptions(model="null")).start()
    assert not list(deep.iterdir())


async def test_interpreter_that_is_gone(folder: Path) -> None:
    (folder / "python").unlink()
    client = ProcessClient(EngineOptions(model="null"))
    with pytest.raises(EngineDeadError, match="cannot be started"):
        await client.start()


async def test_gives_up_after_failed_restarts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(client_module, "MAX_START_FAILURES", 2)
    client = ProcessClient(EngineOptions(model="null"))
    await client.start()
    (folder / "broken").touch()
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: client.state is EngineState.STOPPED)
    with pytest.raises(EngineDeadError, match="log says why") as refused:
        client.submit(request())
    assert "missing" not in str(refused.value)
    await client.close()


async def test_interrupt_is_ignored_and_sigterm_is_death(client: ProcessClient) -> None:
    pid = client.pid
    os.kill(pid, signal.SIGINT)
    assert len(tokens_of(await read(client.submit(request())))) == 8
    assert client.pid == pid
    os.kill(pid, signal.SIGTERM)
    await until(lambda: client.state is EngineState.RESTARTING)
    await until(lambda: client.state is EngineState.READY)


PARENT = """
import asyncio, os, sys
sys.executable = sys.argv[1]
from penstock.config.options import EngineOptions
from penstock.host.process_client import ProcessClient
async def main():
    client = ProcessClient(EngineOptions(model="null"))
    await client.start()
    print(client.pid, client._child._directory, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_process_dies_with_its_parent(folder: Path) -> None:
    parent = subprocess.Popen(
        [str(Path(sys.prefix) / "bin" / "python"), "-c", PARENT, str(folder / "python")],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert parent.stdout is not None
    first, directory = (await asyncio.to_thread(parent.stdout.readline)).split()
    pid = int(first)
    assert Path(directory).is_dir()
    assert alive(pid)
    parent.kill()
    await asyncio.to_thread(parent.wait)
    parent.stdout.close()
    await until(lambda: not alive(pid))
    assert not Path(directory).exists()
