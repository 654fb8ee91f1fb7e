"""The page for browsers as a server sends it; what it does in one is in tests/browser."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator

import httpx
import pytest

from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.differences import DIFFERENCES
from penstock.server.meanings import MEANINGS, meaning
from penstock.server.web.routes import FOLDER, page_files
from tests.host.support import Engines, source
from tests.server.hosted import hosting
from tests.server.support import Running, running, until

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
LARGEST = 300_000  # bytes of all files, compressed
ADDRESS = re.compile(r"https?://[^\s\"'`)]+")


@pytest.fixture(scope="module")
def server(text: TextPipeline) -> Iterator[Running]:
    with running(text) as server:
        yield server


def test_browsers_get_the_page_and_ollamas_clients_their_text(server: Running) -> None:
    page = httpx.get(server.url, headers=HTML)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert "web/app.js" in page.text
    assert httpx.get(server.url).text == "Ollama is running"
    assert httpx.head(server.url, headers=HTML).headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize("path", ["/", "/docs", "/web/app.js"])
def test_no_page_runs_or_loads_what_is_not_its_own(server: Running, path: str) -> None:
    policy = httpx.get(f"{server.url}{path}", headers=HTML).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"


def test_every_file_is_sent_as_it_is(server: Running) -> None:
    for name, file in page_files().items():
        answer = httpx.get(f"{server.url}/web/{name}", headers={"Accept-Encoding": "gzip"})
        assert answer.content == file.plain == (FOLDER / name).read_bytes()
        assert answer.headers["content-encoding"] == "gzip"
        assert httpx.get(f"{server.url}/web/{name}", headers={"Accept-Encoding": "identity"}).content == file.plain
        again = httpx.get(f"{server.url}/web/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304 and again.content == b""


def test_the_page_is_small() -> None:
    files = page_files()
    assert sum(len(file.compressed) for file in files.values()) < LARGEST
    assert all(gzip.decompress(file.compressed) == file.plain for file in files.values())


def test_no_file_of_ours_names_another_host() -> None:
    for name, file in page_files().items():
        if not name.startswith("vendor/"):
            named = set(ADDRESS.findall(file.plain.decode())) - {"http://www.w3.org/2000/svg"}
            assert not named, (name, named)


def status_of(server: Running, target: str) -> int:
    """Of a target as it is written, which clients would put in order first."""
    return int(server.raw(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())[9:12])


@pytest.mark.parametrize(
    "name", ["nothing.js", "", "../routes.py", "..%2froutes.py", "vendor/../../app.py", "/etc/hosts"]
)
def test_nothing_else_is_sent(server: Running, name: str) -> None:
    assert status_of(server, f"/web/{name}") == 404


def test_the_page_can_be_switched_off(text: TextPipeline) -> None:
    with running(text, ServerOptions(page=False)) as server:
        assert httpx.get(server.url, headers=HTML).text == "Ollama is running"
        assert httpx.get(f"{server.url}/web/app.js").status_code == 404
        assert httpx.get(f"{server.url}/docs").status_code == 200
        assert httpx.get(f"{server.url}/web/docs.js").status_code == 200


def test_the_page_comes_without_a_key_and_what_it_shows_does_not(text: TextPipeline) -> None:
    with running(text, ServerOptions(api_keys=("secret",))) as server:
        for path in ("/", "/docs", "/web/app.js"):
            assert httpx.get(f"{server.url}{path}", headers=HTML).status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            assert status_of(server, path) == 401
        assert status_of(server, "/web/../v1/models") == 404


def test_every_field_of_the_description_is_described(server: Running, text: TextPipeline) -> None:
    engines = Engines(text)
    used: set[str] = set()
    different: set[tuple[str, str]] = set()
    with hosting(engines, source("small")) as many:
        for url in (server.url, many.url):
            document = httpx.get(f"{url}/openapi.json").json()
            for name, schema in document["components"]["schemas"].items():
                for field, about in schema.get("properties", {}).items():
                    assert about.get("description") == meaning(name, field), (name, field)
                    if field in DIFFERENCES.get(name, ()):
                        different.add((name, field))
                    else:
                        used.add(f"{name}.{field}" if f"{name}.{field}" in MEANINGS else field)
            operations = [operation for path in document["paths"].values() for operation in path.values()]
            assert all(operation["tags"] and operation["summary"] for operation in operations)
    until(lambda: not engines.live)
    assert set(MEANINGS) == used
    assert different == {(name, field) for name, fields in DIFFERENCES.items() for field in fields}
