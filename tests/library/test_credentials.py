"""Where credentials, and the bytes of a push, go: to the registry's own origin, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import pytest

from penstock.library.digests import digest_of
from penstock.library.manifest import layer, make_manifest
from penstock.library.names import NoSuchModelError, RegistryName
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


def asking(realm: str, token: httpx2.Response | None = None) -> Answers:
    """A registry that sends to `realm` for a token."""

    def answers(request: httpx2.Request) -> httpx2.Response:
        if not request.url.path.startswith("/v2/"):
            return token or httpx2.Response(200, json={"token": "t"})
        if request.headers.get("authorization") == "Bearer t":
            return httpx2.Response(404)
        return httpx2.Response(401, headers={"www-authenticate": f'Bearer realm="{realm}",service="s"'})

    return answers


def logins(network: Network, host: str = HOST) -> list[tuple[str, bool]]:
    """Who was asked for a token, and whether with the login."""
    with pytest.raises(NoSuchModelError):
        network.registry(host).manifest()
    tokens = [request for request in network.asked if not request.url.path.startswith("/v2/")]
    return [(request.url.host, request.headers.get("authorization") == "Basic dTpw") for request in tokens]


@pytest.mark.parametrize(
    ("registry", "authority", "login"),
    [
        (HOST, HOST, True),
        (HOST, "auth.example.com", True),
        (HOST, "example.com", True),
        ("docker.io", "auth.docker.io", True),
        ("registry-1.docker.io", "auth.docker.io", True),
        (HOST, "evil.example", False),
        (HOST, "evilexample.com", False),
        ("example.co.uk", "evil.co.uk", False),
        ("example.com", "evil.com", False),
        ("1.2.3.4", "evil.2.3.4", False),
    ],
)
def test_a_login_goes_to_the_registrys_own_authority(registry: str, authority: str, login: bool) -> None:
    assert logins(Network(asking(f"https://{authority}/token")), registry) == [(authority, login)]


@pytest.mark.parametrize(
    "place",
    [
        f"http://{HOST}/token",
        "http://[bad",
        "https://u:p@auth.example.com/token",
        *(
            f"https://{host}/token"
            for host in (
                "127.0.0.1",
                "127.1",
                "localhost.",
                "10.0.0.1",
                "169.254.169.254",
                "[::1]",
                "[::ffff:10.0.0.1]",
            )
        ),
    ],
)
def test_nobody_else_is_asked_for_a_token(place: str) -> None:
    network = Network(asking(place))
    assert logins(network) == []


def test_the_request_for_a_token_is_led_nowhere() -> None:
    network = Network(
        asking(f"https://{HOST}/token", httpx2.Response(307, headers={"location": "https://evil.example"}))
    )
    with pytest.raises(WebError, match="leads to"):
        network.registry().manifest()
    assert {request.url.host for request in network.asked} == {HOST}


def test_a_registry_of_this_network_may_have_its_authority_there() -> None:
    assert logins(Network(asking("https://10.0.0.2/token")), "10.0.0.1:5000") == [("10.0.0.2", False)]
