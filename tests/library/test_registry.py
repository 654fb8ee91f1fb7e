"""OCI registries: a real one (Debian's docker-registry), and one that answers wrongly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from penstock.config.errors import CheckpointError, ConfigError, PenstockError
from penstock.library.make import add_path
from penstock.library.manifest import DOCKER
from penstock.library.names import RegistryName
from penstock.library.pull import pull
from penstock.library.push import push
from penstock.library.registry import docker_login
from penstock.library.store import Store
from penstock.library.transfer import Manner
from penstock.library.wish import Wish
from penstock.weights.open import open_checkpoint
from tests.library.servers import Files, Handler, running


@pytest.fixture
def other(store: Store, tmp_path: Path) -> Store:
    """Another machine's store."""
    from dataclasses import replace

    return Store(replace(store.places, store=tmp_path / "other", ollama=()))


def test_what_is_pushed_can_be_pulled(store: Store, other: Store, registry: str, quantised: Path) -> None:
    name = RegistryName("concierge", "q8", "me", registry)
    add_path(store, quantised, name)
    said: list[tuple[int, int]] = []
    push(store, str(name), Wish(progress=lambda done, total: said.append((done, total))))
    assert said[-1][0] == said[-1][1] > quantised.stat().st_size
    push(store, str(name), Wish())  # everything is there
    assert pull(other, str(name), Wish()) == str(name)
    entry = other.find(str(name))
    assert entry is not None and entry.path.read_bytes() == quantised.read_bytes()
    assert open_checkpoint(entry.path).config["model_type"] == "qwen3"


def test_a_name_that_is_not_there_is_told(store: Store, registry: str) -> None:
    with pytest.raises(ConfigError, match="has no model"):
        pull(store, f"{registry}/none:x", Wish())
    with pytest.raises(ConfigError, match="no model"):
        push(store, f"{registry}/none:x", Wish())


def test_an_image_that_is_no_model_is_refused(store: Store, registry: str) -> None:
    base = f"http://{registry}/v2/library/odd"
    blob = b"{}"
    digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    place = httpx2.post(f"{base}/blobs/uploads/").headers["location"]
    httpx2.put(place, params={**httpx2.URL(place).params, "digest": digest}, content=blob).raise_for_status()
    part = {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "digest": digest, "size": len(blob)}
    config = {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": digest, "size": len(blob)}
    manifest = {"schemaVersion": 2, "mediaType": DOCKER, "config": config, "layers": [part]}
    sent = httpx2.put(f"{base}/manifests/latest", content=json.dumps(manifest), headers={"Content-Type": DOCKER})
    sent.raise_for_status()
    with pytest.raises(CheckpointError, match="no weights"):
        pull(store, f"{registry}/odd", Wish())


class WrongRegistry(Files):
    """One that has a manifest to answer with, and may ask for a token."""

    manifest = b""
    stated = ""
    token = ""
    takes_none = False

    def answer(self, handler: Handler, path: str) -> bool:
        if path == "/token":
            handler.send_json({"token": self.token})
            return True
        if self.takes_none or (self.token and handler.headers.get("Authorization") != f"Bearer {self.token}"):
            challenge = f'Bearer realm="{self.url}/token",service="s",scope="repository:x:pull"'
            handler.send_json({}, 401, {"WWW-Authenticate": challenge})
            return True
        if handler.command in ("POST", "PUT"):
            self.write(handler, path, handler.body)
            return True
        if "/manifests/" in path:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(self.manifest)))
            if self.stated:
                handler.send_header("Docker-Content-Digest", self.stated)
            handler.end_headers()
            handler.wfile.write(self.manifest)
            return True
        return False

    def write(self, handler: Handler, path: str, data: bytes) -> None:
        """Takes nothing."""
        handler.send_json({}, 405)


def manifest_of(data: bytes, digest: str | None = None) -> bytes:
    found = digest or f"sha256:{hashlib.sha256(data).hexdigest()}"
    part = {"mediaType": "application/vnd.ollama.image.model", "digest": found, "size": len(data)}
    return json.dumps({"schemaVersion": 2, "mediaType": DOCKER, "config": part, "layers": [part]}).encode()


def test_wrong_registries_write_nothing(store: Store, tmp_path: Path) -> None:
    with running(WrongRegistry()) as server:
        host = server.url.removeprefix("http://")
        data = b"GGUF" * 1000
        digest = hashlib.sha256(data).hexdigest()
        server.files[f"/v2/library/m/blobs/sha256:{digest}"] = data[:-1] + b"x"
        for manifest in (
            manifest_of(data),
            manifest_of(data, "sha256:../../../../evil"),
            manifest_of(data, "sha256:" + "0" * 64),
            b"no json",
        ):
            server.manifest = manifest
            with pytest.raises(PenstockError):
                pull(store, f"{host}/m", Wish())
        server.manifest, server.stated = manifest_of(data), "sha256:" + "0" * 64
        with pytest.raises(CheckpointError, match="other bytes than its digest"):
            pull(store, f"{host}/m", Wish())
        assert [entry.name for entry in store.list()] == ["penstock-concierge"]
        assert not list(store.root.glob("blobs/*")) and not list(tmp_path.rglob("*evil*"))


@pytest.fixture
def asking(quantised: Path) -> Iterator[WrongRegistry]:
    """A registry that asks for a token, and has a model."""
    with running(WrongRegistry()) as server:
        server.token = "t0"
        data = quantised.read_bytes()
        server.files[f"/v2/library/m/blobs/sha256:{hashlib.sha256(data).hexdigest()}"] = data
        server.manifest = manifest_of(data)
        yield server


def model_at(server: WrongRegistry) -> str:
    return f"{server.url.removeprefix('http://')}/m"


def test_a_token_is_fetched_where_one_is_asked_for(store: Store, asking: WrongRegistry) -> None:
    pull(store, model_at(asking), Wish())
    assert store.find(model_at(asking)) is not None


def test_a_token_that_expires_is_renewed(store: Store, asking: WrongRegistry) -> None:
    def expire() -> None:
        asking.token = "t1"

    asking.on_piece = expire
    pull(store, model_at(asking), Wish(manner=Manner(streams=2, part=256 << 10)))
    assert store.find(model_at(asking)) is not None
    assert asking.asked.count(("GET", "/token")) == 2


class ForgetfulRegistry(WrongRegistry):
    """One that takes what is pushed, and forgets every token with the write that it allowed."""

    writes = 0

    def write(self, handler: Handler, path: str, data: bytes) -> None:
        self.writes += 1
        self.token = f"t{self.writes}"
        if handler.command == "POST":
            place = f"/v2/me/c/blobs/uploads/{self.writes}?state=x"
            handler.send_json({}, 202, {"Location": place})
            return
        if "/manifests/" in path:
            self.manifest = data
        else:
            self.files[f"/v2/me/c/blobs/sha256:{hashlib.sha256(data).hexdigest()}"] = data
        handler.send_json({}, 201)


def test_a_token_that_expires_between_the_parts_of_a_push_is_renewed(store: Store, quantised: Path) -> None:
    with running(ForgetfulRegistry()) as server:
        server.token = "t"
        name = RegistryName("c", "latest", "me", server.url.removeprefix("http://"))
        add_path(store, quantised, name)
        said: list[tuple[int, int]] = []
        push(store, str(name), Wish(progress=lambda done, total: said.append((done, total))))
        found = store.manifest(name)
        assert found is not None and server.manifest == found[0].data
        data = quantised.read_bytes()
        assert server.files[f"/v2/me/c/blobs/sha256:{hashlib.sha256(data).hexdigest()}"] == data
        assert said[-1][0] == said[-1][1] == found[0].size  # what was sent twice is counted once
        tokens = server.asked.count(("GET", "/token"))
        assert tokens == server.writes == 2 * len(list(found[0].blobs)) + 1


def test_a_registry_that_takes_no_token_is_asked_twice_and_no_more(store: Store, asking: WrongRegistry) -> None:
    asking.takes_none = True
    with pytest.raises(ConfigError, match="has no model"):
        pull(store, model_at(asking), Wish())
    assert asking.asked.count(("GET", "/token")) == 1
    assert len(asking.asked) == 3


def test_an_address_becomes_a_model(store: Store, files: Files, quantised: Path) -> None:
    files.files["/some/c-Q8_0.gguf"] = quantised.read_bytes()
    name = pull(store, f"{files.url}/some/c-Q8_0.gguf?x=1", Wish())
    assert name == f"{files.url.removeprefix('http://')}/c-Q8_0:latest"
    entry = store.find(name)
    assert entry is not None and open_checkpoint(entry.path).config["model_type"] == "qwen3"
    assert files.sent["/some/c-Q8_0.gguf"] == quantised.stat().st_size + 1  # the first byte was asked for alone
    assert not list((store.root / "partial").glob("url*.par*"))
    files.files["/bad.gguf"] = b"no gguf at all" * 10
    with pytest.raises(CheckpointError, match="no GGUF file"):
        pull(store, f"{files.url}/bad.gguf", Wish())
    with pytest.raises(ConfigError, match=r"no \.gguf file"):
        pull(store, f"{files.url}/model.zip", Wish())


def test_logins_of_docker_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert docker_login("h.example", path) == ""
    path.write_text('{"auths": {"h.example": {"auth": "dTpw"}, "odd": {"auth": 5}}, "credsStore": "x"}')
    assert docker_login("h.example", path) == "dTpw"
    assert docker_login("odd", path) == docker_login("none", path) == ""
