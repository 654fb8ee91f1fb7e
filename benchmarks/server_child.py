"""A real `penstock serve` as a child process, for benchmarks that measure it from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import psutil


@dataclass(frozen=True, slots=True)
class ServerChild:
    """A server that answers.

    Attributes:
        url: its base URL.
        http: the process that speaks HTTP; its child runs the engine.
        ready_s: seconds from the start of the process to the first 200 of /readyz.
    """

    url: str
    http: psutil.Process
    ready_s: float

    def engine(self) -> psutil.Process:
        """The engine's process."""
        children = self.http.children(recursive=True)
        return next(child for child in children if "penstock.engine.process" in " ".join(child.cmdline()))

    def metric(self, name: str) -> float:
        """Sum over all labels of one metric of /metrics."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        if not found:
            raise LookupError(f"/metrics has no {name}")
        return sum(map(float, found))


def maps_torch(pid: int) -> bool:
    """Whether libtorch is mapped into a process's memory."""
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        return "libtorch" in maps.read()


@contextmanager
def serve(arguments: Sequence[str] = (), timeout: float = 120.0, counted: Path | None = None) -> Iterator[ServerChild]:
    """Starts `penstock serve` on a free port, waits until it is ready, and ends it with SIGTERM.

    Its memory in use is written to the file `counted`, as `benchmarks.counted_memory` does.
    """
    module = ["penstock.cli.main"] if counted is None else ["benchmarks.counted_memory", str(counted)]
    command = [sys.executable, "-m", *module, "serve", "--port", "0", *arguments]
    environment = os.environ | ({} if counted is None else {"PYTHONMALLOC": "malloc"})
    started = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        try:
            url = _url(process, log)
            with httpx.Client(trust_env=False, timeout=60) as client:
                while client.get(f"{url}/readyz").status_code != 200:
                    if process.poll() is not None or time.perf_counter() - started > timeout:
                        raise RuntimeError(f"the server did not become ready; exit code {process.poll()}")
                    time.sleep(0.01)
            yield ServerChild(url, psutil.Process(process.pid), time.perf_counter() - started)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _url(process: subprocess.Popen[str], log: IO[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.search(r"http://[^\s;]+", line)
    if match is None:
        log.seek(0)
        raise RuntimeError(f"the server said no address: {line!r} {log.read()}")
    return match.group()
