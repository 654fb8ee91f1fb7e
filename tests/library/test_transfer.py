"""Files that are loaded in ranges: what comes is right, or it does not get its name; nothing is loaded twice."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config.errors import CheckpointError, ConfigError
from penstock.library import files as library_files
from penstock.library.digests import Digest
from penstock.library.transfer import Manner, Source, fetch, fetch_all, probe
from penstock.library.web import Web, WebError, open_web
from tests.library.servers import PIECE, Files, Handler, running

PART = 256 << 10
MANNER = Manner(streams=4, part=PART)


def source(server: Files, data: bytes, path: str = "/x") -> Source:
    server.files[path] = data
    return Source(server.url + path, len(data), Digest("sha256", hashlib.sha256(data).hexdigest()))


@pytest.fixture
def web() -> Iterator[Web]:
    with open_web(pause=lambda seconds: None) as opened:
        yield opened


def test_a_file_comes_in_ranges(files: Files, web: Web, tmp_path: Path, some_bytes: bytes) -> None:
    told: list[int] = []
    fetch(web, source(files, some_bytes), tmp_path / "x", replace(MANNER, told=told.append))
    assert (tmp_path / "x").read_bytes() == some_bytes
    assert sum(told) == len(some_bytes) == files.sent["/x"]
    assert len(files.asked) == -(-len(some_bytes) // PART)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.lock"]


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1])
def test_any_size_comes(files: Files, web: Web, tmp_path: Path, size: int) -> None:
    fetch(web, source(files, b"x" * size), tmp_path / "x", MANNER)
    assert (tmp_path / "x").stat().st_size == size


def test_a_server_without_ranges_is_read_from_the_start(
    files: Files, web: Web, tmp_path: Path, some_bytes: bytes
) -> None:
    files.ranges = False
    fetch(web, source(files, some_bytes), tmp_path / "x", MANNER)
    assert (tmp_path / "x").read_bytes() == some_bytes


def test_answers_that_break_off_are_continued(files: Files, web: Web, tmp_path: Path, some_bytes: bytes) -> None:
    files.cut["/x"] = 5 * PIECE
    fetch(web, source(files, some_bytes), tmp_path / "x", MANNER)
    assert (tmp_path / "x").read_bytes() == some_bytes
    assert files.sent["/x"] <= len(some_bytes) + PART


def test_what_passes_is_tried_again_and_what_does_not_is_told(
    files: Files, web: Web, tmp_path: Path, some_bytes: bytes
) -> None:
    wanted = source(files, some_bytes)
    files.refuse["/x"] = [503, 429, 500]
    fetch(web, wanted, tmp_path / "x", MANNER)
    files.refuse["/x"] = [403]
    with pytest.raises(WebError, match="403"):
        fetch(web, wanted, tmp_path / "y", MANNER)
    files.cut["/x"] = 0
    with pytest.raises(WebError):
        fetch(web, wanted, tmp_path / "z", MANNER)


def test_a_wrong_byte_never_gets_the_name(files: Files, web: Web, tmp_path: Path, some_bytes: bytes) -> None:
    wanted = source(files, some_bytes)
    files.corrupt.add("/x")
    with pytest.raises(CheckpointError, match="other bytes than its digest"):
        fetch(web, wanted, tmp_path / "x", MANNER)
    assert not list(tmp_path.glob("x*[!k]"))  # the lock alone stays
    files.corrupt.clear()
    fetch(web, wanted, tmp_path / "x", MANNER)
    assert (tmp_path / "x").read_bytes() == some_bytes


def test_other_bytes_than_were_asked_for_are_refused(files: Files, web: Web, tmp_path: Path, some_bytes: bytes) -> None:
    wanted = source(files, some_bytes)
    files.files["/x"] = some_bytes + b"more"
    with pytest.raises(WebError, match="sent others"):
        fetch(web, wanted, tmp_path / "x", MANNER)
    files.ranges = False
    with pytest.raises(WebError, match="more bytes"):
        fetch(web, wanted, tmp_path / "y", MANNER)
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


def test_a_file_without_a_digest_is_told_from_another_by_its_version(
    files: Files, web: Web, tmp_path: Path, some_bytes: bytes
) -> None:
    files.files["/x"] = some_bytes
    found = probe(web, files.url + "/x", {})
    assert (found.size, found.digest) == (len(some_bytes), None)
    files.files["/x"] = bytes(len(some_bytes))
    with pytest.raises(CheckpointError, match="has changed"):
        fetch(web, found, tmp_path / "x", MANNER)


LOADER = """
import sys
from pathlib import Path
from penstock.library.digests import Digest
from penstock.library.transfer import Manner, Source, fetch
from penstock.library.web import open_web
url, size, digest, target = sys.argv[1:]
with open_web() as web:
    print("ready", flush=True)
    fetch(web, Source(url, int(size), Digest("sha256", digest)), Path(target), Manner(streams=4, part=1 << 20))
"""


def load(wanted: Source, target: Path) -> subprocess.Popen[str]:
    """Loads a file in another process."""
    assert wanted.digest is not None
    arguments = [sys.executable, "-c", LOADER, wanted.url, str(wanted.size), wanted.digest.hex, str(target)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_again_and_again_it_loads_no_part_twice(tmp_path: Path) -> None:
    """Moments are counted in bytes sent: the process is killed when so many have left the server. For more kills, of
    whole pulls, see test_pulls.
    """
    data, draw = random.Random(2).randbytes(24 << 20), random.Random(3)
    with running(Files()) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        wanted = source(server, data)
        target = tmp_path / "x"
        for _ in range(7):
            moment, reached = server.sent["/x"] + draw.randrange(1 << 20), threading.Event()

            def tell(moment: int = moment, reached: threading.Event = reached) -> None:
                time.sleep(0.0005)  # so that what is in the sockets' buffers stays little
                if server.sent["/x"] > moment:
                    reached.set()

            server.on_piece = tell
            process = load(wanted, target)
            assert reached.wait(60)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            assert not target.exists()
        server.on_piece = lambda: None
        process = load(wanted, target)
        assert process.communicate(timeout=60)[1] == "" and process.returncode == 0
        assert target.read_bytes() == data
        # What a killed process had not taken from its sockets is loaded again: less than a part (1 MiB) for each kill.
        assert server.sent["/x"] <= len(data) + 7 * (1 << 20)


def test_two_at_once_load_it_once(tmp_path: Path) -> None:
    data = random.Random(4).randbytes(8 << 20)
    with running(Files()) as server:
        server.on_piece = lambda: time.sleep(0.0005)
        wanted = source(server, data)
        processes = [load(wanted, tmp_path / "x") for _ in range(2)]
        assert [process.communicate(timeout=60)[1] for process in processes] == ["", ""]
        assert (tmp_path / "x").read_bytes() == data
        assert server.sent["/x"] == len(data)


def test_a_full_disk_is_told_before_anything_is_loaded(
    files: Files, web: Web, tmp_path: Path, some_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = source(files, some_bytes)
    monkeypatch.setattr(library_files, "free_bytes", lambda folder: 1 << 20)
    with pytest.raises(ConfigError, match=r"GiB are free; remove models"):
        fetch_all(web, [(wanted, tmp_path / "x")], MANNER)
    assert files.sent["/x"] == 0


def test_a_disk_that_fills_up_keeps_what_came(
    files: Files, web: Web, tmp_path: Path, some_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, left, write = source(files, some_bytes), [1_000_000], os.pwrite

    def full(handle: int, data: memoryview, offset: int) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(ConfigError, match="is full"):
            fetch(web, wanted, tmp_path / "x", MANNER)
    before = files.sent["/x"]
    fetch(web, wanted, tmp_path / "x", MANNER)
    assert (tmp_path / "x").read_bytes() == some_bytes
    assert files.sent["/x"] - before <= len(some_bytes) - 1_000_000 + PART


def test_a_damaged_ledger_begins_anew(files: Files, web: Web, tmp_path: Path, some_bytes: bytes) -> None:
    wanted = source(files, some_bytes)
    for text in (b"", b"{}", b"\xff" * 5000, b"[" * 4096):
        (tmp_path / "x.partial").write_bytes(b"wrong")
        (tmp_path / "x.parts").write_bytes(text)
        fetch(web, wanted, tmp_path / "x", MANNER)
        assert (tmp_path / "x").read_bytes() == some_bytes
        (tmp_path / "x").unlink()


def test_a_link_in_the_place_of_a_file_under_way_is_not_followed(
    files: Files, web: Web, tmp_path: Path, some_bytes: bytes
) -> None:
    (tmp_path / "precious").write_bytes(b"keep me")
    (tmp_path / "store").mkdir()
    (tmp_path / "store/x.partial").symlink_to(tmp_path / "precious")
    fetch(web, source(files, some_bytes), tmp_path / "store/x", MANNER)
    assert (tmp_path / "precious").read_bytes() == b"keep me"
    assert (tmp_path / "store/x").read_bytes() == some_bytes


@contextmanager
def _redirecting(to: Files) -> Iterator[Files]:
    class Redirecting(Files):
        def answer(self, handler: Handler, path: str) -> bool:
            handler.send_json({}, 302, {"Location": to.url + path})
            return True

    with running(Redirecting()) as server:
        yield server


def test_credentials_do_not_follow_to_another_host(files: Files, web: Web, tmp_path: Path, some_bytes: bytes) -> None:
    wanted = source(files, some_bytes)
    with _redirecting(files) as front:
        given = replace(wanted, url=front.url + "/x", headers={"Authorization": "Bearer secret"})
        fetch(web, given, tmp_path / "x", MANNER)
        assert front.authorised["/x"] == "Bearer secret"
    assert files.authorised["/x"] is None


class Leading(Files):
    """Redirects, each with a long body."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self.to = to
        self.read = 0

    def answer(self, handler: Handler, path: str) -> bool:
        body = b"x" * (64 << 20)
        handler.send_response(302)
        handler.send_header("Location", self.to)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        with suppress(OSError):
            for start in range(0, len(body), PIECE):
                handler.wfile.write(body[start : start + PIECE])
                self.read += PIECE
        handler.close_connection = True
        return True


def test_the_body_of_a_redirect_is_not_read(files: Files, web: Web, tmp_path: Path) -> None:
    wanted = source(files, b"some bytes")
    with running(Leading(wanted.url)) as leading:
        away = replace(wanted, url=leading.url + "/x", headers={"authorization": "Bearer t"})
        fetch(web, away, tmp_path / "x", MANNER)
    assert (tmp_path / "x").read_bytes() == b"some bytes"
    assert leading.read < 32 << 20 and files.authorised["/x"] is None
    with running(Leading("/again")) as endless, pytest.raises(WebError, match="more than 10 times"):
        web.read(endless.url, {})
