"""Two hundred thousand odd requests over all routes of a real server, while an operator's probe goes on.

Passes if no answer is a 5xx but the documented 501, every refusal has its dialect's shape of errors, none takes more
than `--cpu` seconds of the HTTP process's CPU, the 99th percentile of /livez stays within `--probe` seconds, and
its memory in use does not grow over the second half (`benchmarks.counted_memory`; resident memory is told beside it,
and grows without a leak, since what is free lies between what is used). The slowest requests, by the clock, and the
largest are sent again alone to measure their CPU, three times, of which the least counts: the machine may be shared.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from benchmarks.counted_memory import ENTRY
from benchmarks.hostile import HOLDING, Asked, Stranger
from benchmarks.report import arguments, report
from benchmarks.server_child import ServerChild, serve
from penstock.server.spoken import ALSO, Dialect, dialect_of

MIB = 2**20
_KEPT = 64  # slowest and largest requests, each of which is sent again
_SLOW_S = 0.1
_PROBE_EVERY_S = 0.02
_NOT_YET = 501
_PROBE = """
import http.client, sys, time
host, port, every = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
connection = http.client.HTTPConnection(host, port, timeout=60)
while True:
    started = time.perf_counter()
    connection.request("GET", "/livez")
    answer = connection.getresponse()
    answer.read()
    print(answer.status, time.perf_counter() - started, flush=True)
    time.sleep(every)
"""


@dataclass(slots=True)
class Seen:
    """What happened.

    Attributes:
        statuses: how often which came; 0 stands for a connection closed without an answer.
        failed: (number of the request, status) of each 5xx that is none of the documented.
        misshapen: (number of the request, status) of each error that is none of its dialect's.
        by_dialect: how often a request of each dialect was answered and how often refused.
        slow: (seconds, number of the request, status), the slowest.
        large: (bytes of the body, number of the request, status), the largest.
        memory: (seconds since the start, bytes resident of the HTTP process).
    """

    statuses: Counter[int] = field(default_factory=Counter)
    failed: list[tuple[int, int]] = field(default_factory=list)
    misshapen: list[tuple[int, int]] = field(default_factory=list)
    by_dialect: Counter[str] = field(default_factory=Counter)
    slow: list[tuple[float, int, int]] = field(default_factory=list)
    large: list[tuple[int, int, int]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, number: int, asked: Asked, status: int, told: bytes, seconds: float) -> None:
        size, path = len(asked.body), urlsplit(asked.target).path
        shaped = status < 400 or is_error_of(unquote(path), asked.method, told)
        with self.lock:
            self.statuses[status] += 1
            self.by_dialect[f"{dialect_of(path, asked.method).value} {'answered' if status < 400 else 'refused'}"] += 1
            aborted = status == 503 and b"An operator of this server ended" in told  # by one of the flood's own /pause
            if status and not shaped:
                self.misshapen.append((number, status))
            if (status >= 500 and status != _NOT_YET and not aborted) or status == 0:
                self.failed.append((number, status))
            if seconds > _SLOW_S:
                self.slow = sorted([*self.slow, (seconds, number, status)], reverse=True)[:_KEPT]
            if size > MIB:
                self.large = sorted([*self.large, (size, number, status)], reverse=True)[:_KEPT]


_RESUME = Asked("POST", "/resume", b"")


class Client:
    """One connection that is made anew when the server has closed it; engines it has told to hold still go on."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._connection: http.client.HTTPConnection | None = None

    def send(self, asked: Asked) -> int:
        """The status of the answer, which is read to its end; 0 where the connection ends without one."""
        return self.ask(asked)[0]

    def ask(self, asked: Asked) -> tuple[int, bytes]:
        """The same with the answer's body."""
        answer = self._ask(asked)
        if urlsplit(asked.target).path in HOLDING:
            self._ask(_RESUME)
        return answer

    def _ask(self, asked: Asked) -> tuple[int, bytes]:
        for fresh in (False, True):
            if self._connection is None or fresh:
                self.close()
                self._connection = http.client.HTTPConnection(
                    str(self._address.hostname), self._address.port, timeout=120
                )
            try:
                headers = {"Content-Type": asked.content_type} if asked.content_type else {}
                self._connection.request(asked.method, asked.target, asked.body or None, headers)
                answer = self._connection.getresponse()
                return answer.status, answer.read()
            except (http.client.HTTPException, OSError):
                continue
        return 0, b""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


_ERRORS: Mapping[Dialect, Mapping[str, Any]] = {
    Dialect.OPENAI: {"error": {"message": str, "type": str, "param": (str, None), "code": (str, None)}},
    Dialect.ANTHROPIC: {"type": str, "error": {"type": str, "message": str}, "request_id": str},
    Dialect.OLLAMA: {"error": str},
    Dialect.LLAMA_SERVER: {"error": {"code": int, "message": str, "type": str}},
    Dialect.TGI: {"error": str, "error_type": str},
    Dialect.SGLANG: {"error": {"message": str, "type": str, "code": int, "retryable": bool}},
    Dialect.KSERVE: {"error": str},
    Dialect.KOBOLD: {"detail": {"msg": str, "type": str}},
}
"""What errors look like, by their dialects' own documents; further members may stand beside these."""


def _has(told: Any, shape: Any) -> bool:
    if isinstance(shape, Mapping):
        return isinstance(told, dict) and all(name in told and _has(told[name], inner) for name, inner in shape.items())
    if isinstance(shape, tuple):
        return told is None or _has(told, shape[0])
    return type(told) is shape


def is_error_of(path: str, method: str, told: bytes) -> bool:
    """Whether an error's body is one of a dialect that may be spoken at a path; an answer without a body is none."""
    if method == "HEAD":
        return True
    try:
        body = json.loads(told)
    except ValueError:
        return False
    return any(_has(body, _ERRORS[dialect]) for dialect in (dialect_of(path, method), *ALSO.get(path, ())))


def cpu_seconds(pid: int) -> float:
    """CPU that a process's living threads have used; of one that has ended, as an engine that is unloaded, none."""
    total = 0
    try:
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        return 0.0
    for task in tasks:
        try:
            total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
        except OSError:
            continue
    return total / 1e9


@contextmanager
def probed(url: str) -> Iterator[list[tuple[int, float]]]:
    """(status, seconds) of /livez, asked again and again by a process of its own."""
    address = urlsplit(url)
    command = [sys.executable, "-c", _PROBE, str(address.hostname), str(address.port), str(_PROBE_EVERY_S)]
    found: list[tuple[int, float]] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            status, seconds = line.split()
            found.append((int(status), float(seconds)))

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        reader = threading.Thread(target=read)
        reader.start()
        yield found
        process.terminate()
        reader.join()


def flood(server: ServerChild, stranger: Stranger, numbers: range, threads: int, until: float) -> Seen:
    """Sends requests from several threads until all are sent or the time is over."""
    seen, started = Seen(), time.perf_counter()
    waiting = iter(numbers)

    def work() -> None:
        client = Client(server.url)
        while time.perf_counter() < until:
            with seen.lock:
                number = next(waiting, None)
            if number is None:
                break
            asked = stranger.request(number)
            began = time.perf_counter()
            status, told = client.ask(asked)
            seen.add(number, asked, status, told, time.perf_counter() - began)
        client.close()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        seen.memory.append((time.perf_counter() - started, server.http.memory_info().rss))
        time.sleep(1.0)
    return seen


_LOADS = b'{"model": "penstock-concierge", "prompt": "a", "max_tokens": 1}'


def alone(server: ServerChild, stranger: Stranger, number: int) -> tuple[float, float]:
    """Least CPU seconds of three, of the HTTP process and of the engine, that a request takes without company."""
    client = Client(server.url)
    client.send(Asked("POST", "/v1/completions", _LOADS))  # who unloads models may have come before
    engine = server.engine().pid
    found: list[tuple[float, float]] = []
    for _ in range(3):
        asked = stranger.request(number)
        before = cpu_seconds(server.http.pid), cpu_seconds(engine)
        client.send(asked)
        found.append((cpu_seconds(server.http.pid) - before[0], cpu_seconds(engine) - before[1]))
    client.close()
    return min(own for own, _ in found), min(other for _, other in found)


def counted(file: Path, seconds: float) -> list[tuple[float, int]]:
    """(seconds, bytes in use) of the last so many seconds of a server that counts."""
    entries: list[tuple[float, int]] = list(ENTRY.iter_unpack(_whole(file.read_bytes())))
    end = entries[-1][0]
    return [(at, size) for at, size in entries if at >= end - seconds]


def _whole(data: bytes) -> bytes:
    """Without an entry that is being written."""
    return data[: len(data) // ENTRY.size * ENTRY.size]


def slope(memory: Sequence[tuple[float, int]]) -> float:
    """MiB a minute over the second half."""
    half = memory[len(memory) // 2 :]
    if len(half) < 3:
        return 0.0
    return statistics.linear_regression([at for at, _ in half], [size / MIB for _, size in half]).slope * 60


def _told(stranger: Stranger, number: int) -> dict[str, Any]:
    asked = stranger.request(number)
    return {
        "number": number,
        "route": f"{asked.method} {asked.target[:200]}",
        "bytes": len(asked.body),
        "body": repr(asked.body[:300]),
    }


def measure(options: argparse.Namespace) -> Mapping[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        # Responses are kept in a file: in memory they would grow to their bound, which is no leak.
        serve(
            [
                *([options.model] if options.model else []),
                *("--threads", "1", "--max-model-len", "512", "--kv-blocks", "600"),
                *("--responses-store", f"{folder}/kept"),
            ],
            counted=Path(folder) / "memory",
        ) as server,
    ):
        client = http.client.HTTPConnection(urlsplit(server.url).netloc)
        client.request("GET", "/openapi.json")
        document = json.loads(client.getresponse().read())
        client.request("GET", "/v1/models")
        stranger = Stranger(document, json.loads(client.getresponse().read())["data"][0]["id"], options.seed)
        client.close()
        started = time.perf_counter()
        with probed(server.url) as probes:
            seen = flood(server, stranger, range(options.count), options.clients, started + options.seconds)
        seconds = time.perf_counter() - started
        in_use = counted(Path(folder) / "memory", seconds)
        suspects = dict.fromkeys((number, status) for _, number, status in [*seen.slow, *seen.large])
        slow = [(number, status, *alone(server, stranger, number)) for number, status in suspects]
    times = sorted(seconds for _, seconds in probes)
    return {
        "requests": sum(seen.statuses.values()),
        "seconds": seconds,
        "statuses": {str(status): count for status, count in sorted(seen.statuses.items())},
        "failed": [{"status": status, **_told(stranger, number)} for number, status in seen.failed[:50]],
        "failures": len(seen.failed),
        "misshapen": [{"status": status, **_told(stranger, number)} for number, status in seen.misshapen[:50]],
        "misshapen_count": len(seen.misshapen),
        "by_dialect": dict(sorted(seen.by_dialect.items())),
        "slowest": sorted(
            (
                {"cpu_s": own, "engine_cpu_s": other, "status": status, **_told(stranger, number)}
                for number, status, own, other in slow
            ),
            key=lambda entry: -float(entry["cpu_s"]),
        ),
        "livez": {
            "probes": len(times),
            "failed": sum(status != 200 for status, _ in probes),
            "p50_s": times[len(times) // 2],
            "p99_s": times[int(0.99 * len(times))],
            "max_s": times[-1],
        },
        "rss_mib": [[round(at), round(size / MIB, 1)] for at, size in seen.memory[:: max(1, len(seen.memory) // 60)]],
        "rss_slope_mib_a_minute": slope(seen.memory),
        "in_use_mib": [[round(at), round(size / MIB, 1)] for at, size in in_use[:: max(1, len(in_use) // 60)]],
        "in_use_slope_mib_a_minute": slope(in_use),
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=200_000, help="requests")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no more are sent")
    parser.add_argument("--clients", type=int, default=3, help="connections")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="serve this one alone: without it most of the time goes into loading models")
    parser.add_argument("--cpu", type=float, default=0.25, help="most CPU seconds of one request")
    parser.add_argument("--probe", type=float, default=0.05, help="most seconds of /livez, 99th percentile")
    parser.add_argument("--slope", type=float, default=1.0, help="most growth of memory in use, MiB a minute")
    options = parser.parse_args()
    found = measure(options)
    worst = max((entry["cpu_s"] for entry in found["slowest"]), default=0.0)
    checks = {
        "no 5xx": found["failures"] == 0,
        "every refusal in its dialect's shape": found["misshapen_count"] == 0,
        f"CPU of one request at most {options.cpu} s": worst <= options.cpu,
        f"/livez p99 at most {options.probe} s": found["livez"]["p99_s"] <= options.probe,
        f"memory in use grows at most {options.slope} MiB a minute": (
            found["in_use_slope_mib_a_minute"] <= options.slope
        ),
    }
    rows = [
        ("requests", found["requests"]),
        ("failures", found["failures"]),
        ("errors of another shape", found["misshapen_count"]),
        ("most CPU of one request (s)", worst),
        (
            "/livez p50, p99, max (ms)",
            ", ".join(f"{1000 * found['livez'][key]:.1f}" for key in ("p50_s", "p99_s", "max_s")),
        ),
        ("memory in use, slope (MiB a minute)", found["in_use_slope_mib_a_minute"]),
        ("resident memory, slope (MiB a minute)", found["rss_slope_mib_a_minute"]),
        *((name, "yes" if passed else "NO") for name, passed in checks.items()),
    ]
    report("hostile_bodies", options.results, {**found, "checks": checks}, ("figure", "value"), rows)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
