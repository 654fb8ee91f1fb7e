"""Whole pulls in processes of their own: killed again and again, two at once, asked for at a terminal."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from penstock.library.manifest import CONFIG, DOCKER
from penstock.library.store import Store, open_store
from penstock.weights.open import bundled_model_path
from penstock.weights.readers.gguf_file import read_gguf_file
from penstock.weights.writers.gguf import RawValue, TensorToWrite, write_gguf
from tests.library.servers import Files, Hub, running

PART = 1 << 20
PULLER = """
import sys
from penstock.library.pull import pull
from penstock.library.store import open_store
from penstock.library.transfer import Manner
from penstock.library.wish import Wish
print(pull(open_store(), sys.argv[1], Wish(manner=Manner(streams=4, part=1 << 20), judge=lambda outlook: None)))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, quantised: Path) -> Path:
    """A GGUF file of 31 MiB: the bundled model, and 24 MiB more."""
    path = tmp_path_factory.mktemp("large") / "large-Q8_0.gguf"
    file, data = read_gguf_file(quantised), np.frombuffer(random.Random(5).randbytes(24 << 20), np.uint8)
    metadata = {key: RawValue(file.data[first:last].tobytes()) for key, (first, last) in file.spans.items()}
    known = [TensorToWrite(t.name, t.shape, t.format, partial(_piece, t.data)) for t in file.tensors.values()]
    write_gguf(path, metadata, [*known, TensorToWrite("more", (24, 1 << 20), "i8", partial(_piece, data))])
    return path


def _piece(data: Any) -> Iterator[Any]:
    yield data


def variables(tmp_path: Path, **more: str) -> dict[str, str]:
    places = {"PENSTOCK_MODELS": str(tmp_path / "store"), "HF_HOME": str(tmp_path / "hf")}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PENSTOCK_"))}
    return {**clean, **places, "OLLAMA_MODELS": str(tmp_path / "ollama"), **more}


class Front(threading.Thread):
    """Stands before a server and counts the bytes that come from it, slowly enough to be interrupted."""

    def __init__(self, host: str) -> None:
        super().__init__(daemon=True)
        self._to = (host.partition(":")[0], int(host.partition(":")[2]))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        self.host = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.sent = 0
        self.lock = threading.Lock()

    def run(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(self._to)
            threading.Thread(target=self._carry, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(server, client, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(16 << 10):
                target.sendall(data)
                if counted:
                    time.sleep(0.0005)
                    with self.lock:
                        self.sent += len(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()


@contextmanager
def fronted(host: str) -> Iterator[Front]:
    front = Front(host)
    front.start()
    try:
        yield front
    finally:
        front.close()


def put_in_registry(host: str, model: Path) -> None:
    """A model as Ollama's, by plain requests."""
    base = f"http://{host}/v2/library/large"
    data, config = model.read_bytes(), b"{}"
    parts = []
    for kind, blob in (("application/vnd.ollama.image.model", data), (CONFIG, config)):
        digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
        place = httpx2.URL(httpx2.post(f"{base}/blobs/uploads/").headers["location"])
        httpx2.put(place, params={**place.params, "digest": digest}, content=blob, timeout=60).raise_for_status()
        parts.append({"mediaType": kind, "digest": digest, "size": len(blob)})
    manifest = {"schemaVersion": 2, "mediaType": DOCKER, "config": parts[1], "layers": parts[:1]}
    headers = {"Content-Type": DOCKER}
    httpx2.put(f"{base}/manifests/latest", content=json.dumps(manifest), headers=headers).raise_for_status()


@contextmanager
def source(kind: str, model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Front, str, dict[str, str]]]:
    """A server before which bytes are counted, the name of its model, and variables that lead there."""
    if kind == "registry":
        host = request.getfixturevalue("registry")
        put_in_registry(host, model)
        with fronted(host) as front:
            yield front, f"{front.host}/large", {}
        return
    server = Hub() if kind == "hub" else Files()
    if isinstance(server, Hub):
        server.put("me/large", {model.name: model.read_bytes()})
    server.files[f"/{model.name}"] = model.read_bytes()
    with running(server), fronted(server.url.removeprefix("http://")) as front:
        name = "hf.co/me/large:Q8_0" if kind == "hub" else f"http://{front.host}/{model.name}"
        yield front, name, {"HF_ENDPOINT": f"http://{front.host}"}


def start(name: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", PULLER, name], text=True, env=environment, **pipes)


def found(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path | None:
    """Where the bytes of a pulled file are."""
    for variable, value in variables(tmp_path).items():
        monkeypatch.setenv(variable, value)
    store: Store = open_store()
    entry = store.find(name)
    if entry is None:
        return None
    blobs = [path for path in tmp_path.rglob("blobs/*") if path.stat().st_size > 2**20]
    assert len(blobs) == 1
    return blobs[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hub", "registry", "address"])
def test_a_pull_killed_at_twenty_moments(
    kind: str, large: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(6)
    with source(kind, large, request) as (front, name, more):
        environment = variables(tmp_path, **more)
        kills = 0
        for _ in range(20):
            process, moment = start(name, environment), front.sent + draw.randrange(PART)
            while front.sent <= moment and process.poll() is None:
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += process.returncode == -signal.SIGKILL
        process = start(name, environment)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        pulled = found(tmp_path, out.strip(), monkeypatch)
        assert pulled is not None and pulled.read_bytes() == large.read_bytes()
        size = large.stat().st_size
        assert kills >= 10 and size <= front.sent <= size + (kills + 1) * PART
        print(f"{kind}: {kills} kills, {front.sent - size} of {size} bytes more than once")


@pytest.mark.parametrize("kind", ["hub", "registry"])
def test_two_pulls_at_once_load_a_model_once(
    kind: str, large: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with source(kind, large, request) as (front, name, more):
        processes = [start(name, variables(tmp_path, **more)) for _ in range(2)]
        answers = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], answers
        pulled = found(tmp_path, answers[0][0].strip(), monkeypatch)
        assert pulled is not None and pulled.read_bytes() == large.read_bytes()
        assert front.sent <= large.stat().st_size + (1 << 18)  # twice what a server says of the model


def test_at_a_terminal_it_is_asked_whether_to_pull(hub: Hub, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in bundled_model_path().iterdir() if path.is_file()}
    hub.put("me/concierge", files)
    environment = variables(tmp_path, HF_ENDPOINT=hub.url, TERM="dumb", PENSTOCK_PACK_CACHE="off")
    command = [sys.executable, "-m", "penstock", "plan", "me/concierge"]
    said, status = at_terminal(command, environment, b"n\n")
    assert "me/concierge is not here. Pull it now? [Y/n]" in said and status == 1
    assert "To load it: penstock pull me/concierge" in said and not hub.sent
    said, status = at_terminal(command, environment, b"\n")
    assert status == 0 and "Memory for" in said and hub.sent["/me/concierge/model.safetensors"]


def test_proxies_of_the_environment_are_used(files: Files, tmp_path: Path, quantised: Path) -> None:
    files.files["/c-Q8_0.gguf"] = quantised.read_bytes()
    process = start("http://models.invalid/c-Q8_0.gguf", variables(tmp_path, HTTP_PROXY=files.url, NO_PROXY=""))
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("models.invalid/c-Q8_0:latest\n", 0), err
    assert files.sent["/c-Q8_0.gguf"] == quantised.stat().st_size + 1


def at_terminal(command: list[str], environment: dict[str, str], answer: bytes) -> tuple[str, int]:
    """What a command says on a terminal of 120 columns to somebody who answers its question."""
    ours, theirs = pty.openpty()
    environment = {**environment, "COLUMNS": "120"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    said, answered = b"", False
    while True:
        if not select.select([ours], [], [], 60)[0]:
            process.kill()
            break
        try:
            data = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        said += data
        if b"[Y/n]" in said and not answered:
            os.write(ours, answer)
            answered = True
    os.close(ours)
    return " ".join(said.decode("utf-8", "replace").split()), process.wait()
