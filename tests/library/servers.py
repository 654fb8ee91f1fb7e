"""Servers on loopback to pull from: files with ranges and with faults, and one that speaks the hub's API.

They count the body bytes that they hand to the system for each file, so that tests can tell what was loaded twice.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

PIECE = 16 << 10


class Files(ThreadingHTTPServer):
    """Serves `files` (path → bytes).

    Attributes:
        sent: body bytes by path.
        asked: requests, as (method, path).
        authorised: credentials by path, as they came.
        ranges: whether parts are given.
        corrupt: paths of which one byte is changed.
        cut: bytes after which each answer of a path breaks off.
        budget: bytes of bodies until every connection is closed; None for no end.
        refuse: how many requests of a path are answered with a status before others are served.
        on_piece: called before every piece is sent.
        gates: files of which nothing is sent before their event is set.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.sent: Counter[str] = Counter()
        self.asked: list[tuple[str, str]] = []
        self.authorised: dict[str, str | None] = {}
        self.ranges = True
        self.corrupt: set[str] = set()
        self.cut: dict[str, int] = {}
        self.budget: int | None = None
        self.refuse: dict[str, list[int]] = {}
        self.on_piece: Callable[[], None] = lambda: None
        self.gates: dict[str, threading.Event] = {}
        self.headers_of: Callable[[str], dict[str, str]] = lambda path: {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, handler: Handler, path: str) -> bool:
        """Answers what is no file; False if there is nothing."""
        return False

    def locate(self, path: str) -> str:
        """The path of a file's bytes."""
        return path

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients are killed on purpose


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Files
    body = b""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._serve(body=True)

    def do_PUT(self) -> None:
        self.do_POST()

    def send_json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _serve(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        server = self.server
        server.asked.append((self.command, path))
        server.authorised[path] = self.headers.get("Authorization")
        if server.refuse.get(path):
            self.send_json({"error": "not now"}, server.refuse[path].pop(0), {"Retry-After": "0"})
            return
        if server.answer(self, path):
            return
        place = server.locate(path)
        data = server.files.get(place)
        if data is None:
            self.send_json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        if place in server.corrupt:
            data = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        first, last, status = 0, len(data) - 1, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        etag = f'"{hashlib.sha256(server.files[place]).hexdigest()[:16]}"'
        fresh = self.headers.get("If-Range", etag) == etag
        if asked and server.ranges and fresh:
            first, last, status = int(asked[1]), min(last, int(asked[2] or last)), 206
        self.send_response(status)
        headers = {"Content-Length": str(last - first + 1), "ETag": etag} | server.headers_of(path)
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if body:
            self._send(place, data[first : last + 1])

    def _send(self, place: str, data: bytes) -> None:
        server, sent = self.server, 0
        if place in server.gates:
            server.gates[place].wait(60)
        for start in range(0, len(data), PIECE):
            server.on_piece()
            piece = data[start : start + PIECE]
            with server.lock:
                over = server.budget is not None and server.budget < len(piece)
                if not over and server.budget is not None:
                    server.budget -= len(piece)
            if over or (place in server.cut and sent + len(piece) > server.cut[place]):
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(piece)
            sent += len(piece)
            with server.lock:
                server.sent[place] += len(piece)


class Hub(Files):
    """A stand-in for the hub: `models` holds repositories (owner/name → files by name)."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.license = "apache-2.0"
        self.headers_of = self._file_headers

    def put(self, repo: str, files: dict[str, bytes]) -> None:
        self.models[repo] = files
        for name, data in files.items():
            self.files[f"/{repo}/{name}"] = data

    def answer(self, handler: Handler, path: str) -> bool:
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        if match is None:
            return False
        repo, revision = match[1], match[3] or "main"
        if repo in self.gated and not handler.headers.get("Authorization"):
            handler.send_json({"error": "gated"}, 401, {"X-Error-Code": "GatedRepo"})
        elif repo not in self.models:
            handler.send_json({"error": "none"}, 401, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", self.COMMIT):
            handler.send_json({"error": "none"}, 404, {"X-Error-Code": "RevisionNotFound"})
        elif match[2] == "tree":
            handler.send_json([self._leaf(name, data) for name, data in self.models[repo].items()])
        else:
            handler.send_json(self._info(repo))
        return True

    def _leaf(self, name: str, data: bytes) -> dict[str, Any]:
        told = self.sibling(name, data)
        found = {"type": "file", "path": name, "size": len(data), "oid": told["blobId"]}
        if "lfs" in told:
            found["lfs"] = {"oid": told["lfs"]["sha256"], "size": len(data), "pointerSize": 134}
        return found

    def locate(self, path: str) -> str:
        return re.sub(r"^(/[^/]+/[^/]+)/resolve/[^/]+/", r"\1/", path)

    def _info(self, repo: str) -> dict[str, Any]:
        return {
            "_id": "1",
            "id": repo,
            "modelId": repo,
            "sha": self.COMMIT,
            "private": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "cardData": {"license": self.license},
            "siblings": [self.sibling(name, data) for name, data in self.models[repo].items()],
        }

    @staticmethod
    def sibling(name: str, data: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_digest(data)}
        if is_large(name):
            digest = hashlib.sha256(data).hexdigest()
            found["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
        return found

    def _file_headers(self, path: str) -> dict[str, str]:
        data = self.files.get(self.locate(path))
        if data is None or "/resolve/" not in path:
            return {}
        name = path.rpartition("/")[2]
        digest = hashlib.sha256(data).hexdigest() if is_large(name) else git_digest(data)
        return {"X-Repo-Commit": self.COMMIT, "ETag": f'"{digest}"', "X-Linked-Size": str(len(data))}


def is_large(name: str) -> bool:
    """Whether the hub keeps a file apart from git."""
    return name.endswith((".safetensors", ".gguf", ".bin", ".pth", "tokenizer.json"))


def git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def running(server: Files) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
