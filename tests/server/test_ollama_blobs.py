"""Files that clients send to make models of: to disk as they come, under their digest, never elsewhere."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config import limits
from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.library.digests import sha256
from penstock.library.store import Store, open_store
from penstock.library.uploads import sweep, there
from penstock.weights.open import bundled_model_path
from tests.host.support import Engines, source
from tests.server.hosted import Hosting, hosting
from tests.server.support import until

DATA = bytes(range(256)) * 9000  # more than a piece of 1 MiB
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name in ("PENSTOCK_MODELS", "HF_HOME", "OLLAMA_MODELS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return open_store()


@pytest.fixture
def server(store: Store, engines: Engines) -> Iterator[Hosting]:
    with hosting(engines, source("small")) as made:
        yield made


def send(server: Hosting, data: Any = DATA, digest: str = DIGEST, **headers: str) -> httpx.Response:
    given = {"Content-Type": "application/json", **headers}
    return httpx.post(f"{server.url}/api/blobs/{digest}", content=data, headers=given, timeout=60)


def create(server: Hosting, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/api/create", json={"model": "made", "stream": False, **body}, timeout=60)


def files(store: Store) -> list[str]:
    return sorted(path.name for path in store.root.rglob("*") if path.is_file())


def test_a_file_is_sent_once_and_found(server: Hosting, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 100_000)  # which holds for what is kept in memory
    url = f"{server.url}/api/blobs/{DIGEST}"
    assert httpx.head(url).status_code == 404
    assert send(server, iter([DATA[:7], DATA[7:]])).status_code == 201  # in chunks, as Go sends them
    assert httpx.head(url).status_code == 200
    assert send(server).status_code == 200  # it is there
    place = there(store, sha256(DIGEST))
    assert place is not None and place.read_bytes() == DATA
    assert files(store) == [DIGEST.replace(":", "-")]
    assert send(server, digest=f"sha256:{hashlib.sha256(b'').hexdigest()}", data=b"").status_code == 201
    with httpx.Client() as client:  # whose connection goes on after a file that was not read
        for _ in range(3):
            assert client.post(url, content=DATA).status_code == 200
            assert client.get(f"{server.url}/api/version").status_code == 200


def test_a_file_with_other_bytes_leaves_nothing(server: Hosting, store: Store) -> None:
    for data in (DATA[:-1], DATA + b"x", b""):
        refused = send(server, data)
        assert refused.status_code == 400
        assert refused.json()["error"].startswith(f"digest mismatch, expected {DIGEST}, got sha256:")
    assert files(store) == []


@pytest.mark.parametrize(
    "digest", ["sha256:..%2F..%2Fx", "..", "sha256:abc", f"SHA256:{'0' * 64}", f"sha256:{'g' * 64}", "md5:" + "0" * 32]
)
def test_what_is_no_digest_is_refused(server: Hosting, store: Store, digest: str) -> None:
    assert send(server, digest=digest).status_code in (400, 404, 405)
    assert httpx.head(f"{server.url}/api/blobs/{digest}").status_code in (400, 404, 405)
    assert files(store) == []


def test_a_file_that_is_too_long_or_finds_no_room_is_refused(
    server: Hosting, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(limits, "MAX_UPLOAD_BYTES", len(DATA) - 1)
        patch.setattr(limits, "MAX_BODY_BYTES", 1000)
        for data in (DATA, iter([DATA[:9], DATA[9:]])):
            assert send(server, data).status_code == 413
    with monkeypatch.context() as patch:
        patch.setattr("penstock.library.files.free_bytes", lambda folder: 1 << 20)
        full = send(server)
        assert full.status_code == 507 and "GiB are free; remove models" in full.json()["error"]
    assert files(store) == []
    assert send(server).status_code == 201


def test_a_client_that_leaves_leaves_nothing(server: Hosting, store: Store) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /api/blobs/{DIGEST} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(DATA)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + DATA[: 3 << 19])
        until(lambda: any(name.startswith("coming-") for name in files(store)))
    until(lambda: not files(store))


def test_only_administrators_send_files_and_no_page_of_another_origin(store: Store, text: TextPipeline) -> None:
    options = ServerOptions(api_keys=("user",), admin_keys=("admin",))
    with hosting(Engines(text), source("small"), options=options) as server:
        for key, status in ((None, 401), ("user", 403)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            assert send(server, **headers).status_code == status
            assert httpx.head(f"{server.url}/api/blobs/{DIGEST}", headers=headers).status_code == status
        own = {"Authorization": "Bearer admin"}
        page = {**own, "Origin": "http://localhost", "Content-Type": "text/plain"}
        assert send(server, **page).status_code == 415
        assert files(store) == []
        assert send(server, **own).status_code == 201


def test_a_model_is_made_of_what_was_sent(server: Hosting, store: Store) -> None:
    digests = {}
    for path in bundled_model_path().iterdir():
        data = path.read_bytes()
        digests[path.name] = f"sha256:{hashlib.sha256(data).hexdigest()}"
        assert send(server, data, digests[path.name]).status_code in (200, 201)
    store.prune(partials=False)  # what a removal does meanwhile takes nothing away
    assert create(server, files=digests, system="Be brief.").json() == {"status": "success"}
    entry = store.find("made")
    assert entry is not None
    assert (entry.path / "model.safetensors").read_bytes() == (bundled_model_path() / "model.safetensors").read_bytes()
    assert list(store.uploads.iterdir()) == []
    assert list((store.root / "partial").iterdir()) == []
    assert create(server, model="more", files=digests).status_code == 200  # without sending them again


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"files": {"../x": DIGEST}}, 400, "could lie anywhere"),
        ({"files": {"/etc/x": DIGEST}}, 400, "could lie anywhere"),
        ({"files": {"a/../b": DIGEST}}, 400, "could lie anywhere"),
        ({"files": {"model.gguf": f"sha256:{'0' * 64}"}}, 400, "is not here; send it to /api/blobs/sha256:000"),
        ({"files": {"model.gguf": "../x"}}, 400, "is no digest"),
        ({"files": {"model.gguf": DIGEST}}, 400, ""),
        ({"files": {}}, 400, "neither from nor files"),
        ({"from": "none", "quantize": "q4_k_m"}, 404, "no model 'none'"),
        ({"from": "penstock-concierge", "quantize": "q99"}, 400, "quantize"),
        ({"from": "penstock-concierge", "adapters": {"a.gguf": "GGUF"}}, 400, "is GGUF version 0"),
    ],
)
def test_what_no_model_can_be_made_of_says_why(
    server: Hosting, store: Store, body: dict[str, Any], status: int, said: str
) -> None:
    assert send(server).status_code == 201
    if "adapters" in body:
        data = b"GGUF" + bytes(100)
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        assert send(server, data, digest).status_code == 201
        body = {**body, "adapters": {"a.gguf": digest}}
    refused = create(server, **body)
    assert refused.status_code == status, refused.text
    assert said in refused.json()["error"]
    assert [entry.name for entry in store.list()] == ["penstock-concierge"]
    assert list((store.root / "partial").glob("*")) == []


def test_files_that_no_model_was_made_of_go_after_a_day(server: Hosting, store: Store) -> None:
    assert send(server).status_code == 201
    assert sweep(store, 24 * 3600) == 0
    assert sweep(store, 0) == len(DATA)
    assert send(server).status_code == 201
    (store.root / "partial" / "create-dead" / "deep").mkdir(parents=True)  # of a process that was killed
    (store.root / "partial" / "create-dead" / "deep" / "x").write_bytes(b"123")
    assert store.prune() == len(DATA) + 3
    assert files(store) == ["store.lock"]


def test_many_files_at_once_all_come(server: Hosting, store: Store) -> None:
    made = [bytes([number]) * (2 << 20) for number in range(12)]
    host, port = server.url.removeprefix("http://").split(":")
    connections = [http.client.HTTPConnection(host, int(port), timeout=60) for _ in made]
    for connection, data in zip(connections, made, strict=True):  # heads first: more than may be written at once
        connection.putrequest("POST", f"/api/blobs/sha256:{hashlib.sha256(data).hexdigest()}")
        connection.putheader("Content-Length", str(len(data)))
        connection.endheaders(data[:10])
    for connection, data in zip(connections, made, strict=True):
        connection.send(data[10:])
        assert connection.getresponse().status == 201
        connection.close()
    assert len(list(store.uploads.iterdir())) == 12
    assert json.loads(httpx.get(f"{server.url}/api/tags").text)["models"]
