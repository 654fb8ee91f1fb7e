"""A server as people start it: a process of its own, the engine in another, the bundled model."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.server.support import until

SCRIPT = """
import sys
from penstock.config.options import EngineOptions, ServerOptions
from penstock.server.serve import serve
engine = EngineOptions(threads=1, max_model_len={max_model_len}, kv_blocks=400)
serve(engine, ServerOptions(port=0, drain_timeout={drain}))
print("torch" in sys.modules, flush=True)
"""


@dataclass
class Served:
    """A serving process."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    def wait_ready(self) -> None:
        until(lambda: httpx.get(f"{self.url}/readyz").status_code == 200, 90)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, seconds: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def start(drain: float = 20.0, max_model_len: int = 1024) -> Served:
    """A server that listens; its model may still be loading."""
    return listening("-c", SCRIPT.format(drain=drain, max_model_len=max_model_len))


def listening(*arguments: str) -> Served:
    """What `python ARGUMENTS` starts, once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-u", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        lines.extend(line.rstrip() for line in process.stdout)

    threading.Thread(target=read, daemon=True).start()
    until(lambda: any("Listening" in line for line in lines) or process.poll() is not None, 90)
    found = re.search(r"http://127\.0\.0\.1:\d+", "\n".join(lines))
    assert found, lines
    return Served(process, found[0], lines)
