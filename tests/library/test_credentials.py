"""Where credentials, and the bytes of a push, go: to the registry's own origin, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import pytest

from penstock.library.digests import digest_of
from penstock.library.manifest import layer, make_manifest
from penstock.library.names import RegistryName
from penstock.library.registry import Registry, push
from penstock.library.store import Store
from penstock.library.transfer import Manner
from penstock.library.web import Web, WebError

HOST = "registry.example.com"
DATA = b"weights"
Answers = Callable[[httpx2.Request], httpx2.Response]


class Network:
    """Every host, as `answers` has it; keeps what was asked."""

    def __init__(self, answers: Answers) -> None:
        self.asked: list[httpx2.Request] = []
        self._answers = answers
        client = httpx2.Client(transport=httpx2.MockTransport(self._answer), follow_redirects=True)
        self.web = Web(client, lambda seconds: None)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        request.read()
        self.asked.append(request)
        found = self._answers(request)
        return httpx2.Response(found.status_code, headers=found.headers, stream=httpx2.ByteStream(found.content))

    def registry(self, host: str = HOST, login: str = "dTpw", token: str = "") -> Registry:
        return Registry(self.web, RegistryName("m", host=host), login=login, token=token)


def pushed(store: Store, registry: Registry) -> None:
    part = layer("model", digest_of(DATA), len(DATA))
    path = store.root / "blobs" / part.digest.file_name
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    push(store, registry, make_manifest(part, [part]), Manner())


def upload(location: str, posted: int = 202) -> Answers:
    def answers(request: httpx2.Request) -> httpx2.Response:
        if request.method == "POST":
            return httpx2.Response(posted, headers={"location": location})
        return httpx2.Response({"HEAD": 404, "PUT": 201}[request.method])

    return answers


@pytest.mark.parametrize(
    ("location", "posted"),
    [
        ("https://evil.example/up", 202),
        ("https://evil.example/up", 307),
        (f"https://{HOST}:8443/up", 202),
        ("http://[bad", 202),
        ("http://[bad", 307),
    ],
)
def test_a_push_goes_to_no_other_origin(store: Store, location: str, posted: int) -> None:
    network = Network(upload(location, posted))
    with pytest.raises(WebError):
        pushed(store, network.registry(token="Bearer t"))
    assert {(request.url.scheme, request.url.netloc) for request in network.asked} == {("https", HOST.encode())}
    assert not any(DATA in request.content for request in network.asked)


@pytest.mark.parametrize("location", ["/up?a=1", f"https://{HOST}/up", f"http://{HOST}/up", f"https://u@{HOST}:443/up"])
def test_a_push_stays_in_https(store: Store, location: str) -> None:
    network = Network(upload(location))
    pushed(store, network.registry(token="Bearer t"))
    (sent,) = [request for request in network.asked if request.content == DATA]
    assert str(sent.url).startswith(f"https://{HOST}/up")
    assert sent.headers["authorization"] == "Bearer t"
