"""16 clients at once, a long prefix shared by all and a short end of their own: cold, then warm with new ends.

All are asked over HTTP by asynchronous clients: Penstock, llama-server and vLLM's server as they come, OpenVINO GenAI
behind a small server (`workers.openvino_server`), since its own is no Python package. With `--in-process` OpenVINO and
vLLM are given all requests in process, which spares them HTTP. One engine runs at a time: llama-server alone may keep
8 GiB of prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import httpx

from benchmarks.cpu.peer_engines import (
    REPOSITORY,
    Run,
    llama_model,
    open_worker,
    peer_folder,
    penstock_model,
    penstock_options,
    set_priority,
)
from benchmarks.cpu.peer_models import SHAPES

CLIENTS, PREFIX, OWN, NEW = 16, 1000, 50, 64
LENGTH = 1152
CACHE_GIB = 3  # of keys and values
READY_SECONDS = 600.0  # vLLM compiles the model first
CASES = ("cold", "warm")
Times = tuple[float, list[list[float]]]


class Server(Protocol):
    """What can be given all prompts at once."""

    def ask(self, asked: Sequence[Sequence[int]], new: int) -> Times:
        """The start and the arrivals of every prompt's tokens, in seconds."""

    def close(self) -> None:
        """Ends it."""


class HttpServer:
    """A server process that is asked over HTTP."""

    def __init__(
        self, run: Run, command: Sequence[str], ready: str, variables: Mapping[str, str] | None = None
    ) -> None:
        """`command` is given the port; `ready` is the path that answers 200 once requests are served.

        Raises:
            RuntimeError: it did not become ready; the end of its log is in the message.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=self._log,
            stderr=self._log,
            cwd=REPOSITORY,
            env=run.environment() | dict(variables or {}),
            start_new_session=True,
        )
        set_priority(self._process.pid, run.priority)
        deadline = time.monotonic() + READY_SECONDS
        with httpx.Client(trust_env=False) as client:
            while not self._is_ready(client, ready):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._log.seek(0)
                    words = self._log.read()[-2000:]
                    self.close()
                    raise RuntimeError(f"{command[0]} did not become ready: {words}")
                time.sleep(0.05)

    def ask(self, asked: Sequence[Sequence[int]], new: int) -> Times:
        """As Server; a token's arrival is that of the event which carries it."""
        return asyncio.run(self._every(asked, new))

    def close(self) -> None:
        """As Server."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def _is_ready(self, client: httpx.Client, path: str) -> bool:
        try:
            return client.get(self._url + path).status_code == 200
        except httpx.TransportError:
            return False

    async def _every(self, asked: Sequence[Sequence[int]], new: int) -> Times:
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=None) as client:
            started = time.perf_counter()
            return started, list(await asyncio.gather(*(self._one(client, prompt, new) for prompt in asked)))

    async def _one(self, client: httpx.AsyncClient, prompt: Sequence[int], new: int) -> list[float]:
        body = {"prompt": list(prompt), "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
        times = []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"the server answered {response.status_code}: {(await response.aread())[:400]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        return times


def compare(
    run: Run, engines: Sequence[str], model: str, kind: str, repeat: int, *, in_process: bool = False
) -> dict[str, Any]:
    """Every engine's figures of both cases, `repeat` rounds; engines in turns, started anew for each."""
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    for turn in range(repeat):
        for name in engines:
            server = open_server(run, name, model, kind, in_process=in_process)
            if server is None:
                continue
            with contextlib.closing(server):
                for case, found in _round(server, SHAPES[model].vocab, turn).items():
                    rounds.setdefault(name, {case: [] for case in CASES})[case].append(found)
                    print(f"{name} {case}: {found}", flush=True)
    medians = {
        name: {
            case: {what: statistics.median(one[what] for one in found) for what in found[0]}
            for case, found in cases.items()
        }
        for name, cases in rounds.items()
    }
    setup = {"clients": CLIENTS, "prefix": PREFIX, "own": OWN, "new": NEW, "repeat": repeat, "threads": run.threads}
    return {"model": model, "format": kind, **setup, "median": medians, "runs": rounds}


def _round(server: Server, vocab: int, seed: int) -> dict[str, dict[str, float]]:
    """First-use costs are paid with short prompts of other tokens; then both cases."""
    draw = random.Random(seed)
    server.ask([_tokens(draw, OWN, vocab) for _ in range(CLIENTS)], 8)
    prefix = _tokens(draw, PREFIX, vocab)
    return {
        case: figures(*server.ask([prefix + _tokens(draw, OWN, vocab) for _ in range(CLIENTS)], NEW)) for case in CASES
    }


def figures(started: float, tokens: Sequence[Sequence[float]]) -> dict[str, float]:
    """Output tokens a second over the whole time, and time to first token at the median and the 99th percentile."""
    firsts = sorted(times[0] - started for times in tokens)
    wall = max(times[-1] for times in tokens) - started
    p99 = firsts[min(len(firsts) - 1, round(0.99 * len(firsts)))]
    return {
        "output_tokens_per_s": NEW * len(tokens) / wall,
        "wall_s": wall,
        "ttft_p50_s": statistics.median(firsts),
        "ttft_p99_s": p99,
    }


def open_server(run: Run, name: str, model: str, kind: str, *, in_process: bool = False) -> Server | None:
    """Starts an engine's server, or loads a peer in process; None where there is no file or folder for it."""
    threads = str(run.threads)
    if name == "llama.cpp":
        file = llama_model(run, model, kind)
        program = str(run.places.llama("llama-server"))
        slots = ["-np", str(CLIENTS), "-cb", "-c", str(CLIENTS * LENGTH)]
        return HttpServer(run, [program, "-m", str(file), "-t", threads, *slots], "/health")
    if name in run.penstock:
        options: dict[str, Any] = {"max_model_len": LENGTH, "kv_cache_memory": CACHE_GIB << 30}
        options["max_queue_seconds"] = "inf"  # no engine here refuses what waits
        options |= penstock_options(run, name, kind)
        command = [sys.executable, "-m", "penstock.cli.main", "serve", str(penstock_model(run, model, kind))]
        return HttpServer(run, [*command, "--threads", threads, *flags(options)], "/readyz")
    if in_process:
        return open_worker(run, name, model, kind, caching=True, length=LENGTH, sequences=CLIENTS)
    folder = peer_folder(run, name, model, kind)
    return _peer_server(run, name, str(folder)) if folder.exists() else None


def _peer_server(run: Run, name: str, folder: str) -> HttpServer:
    """OpenVINO's or vLLM's; of a module's name, so that what it starts in turn finds it too."""
    command = [str(run.places.python(name)), "-m", f"benchmarks.cpu.workers.{name}_server", "--model", folder]
    if name == "openvino":
        return HttpServer(run, [*command, "--cache-gib", str(CACHE_GIB), "--threads", str(run.threads)], "/health")
    options = ["--dtype", "bfloat16", "--max-model-len", str(LENGTH), "--max-num-seqs", str(CLIENTS)]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{run.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return HttpServer(run, [*command, *options, "--enable-prefix-caching"], "/health", variables)


def flags(options: Mapping[str, Any]) -> list[str]:
    """Command-line options of `penstock serve` from names as in EngineOptions."""
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", str(value)]
    return found


def columns_and_cells(figures: Mapping[str, Any]) -> tuple[list[str], list[list[object]]]:
    """The table of `compare`: one line an engine and case."""
    measures = ("output_tokens_per_s", "wall_s", "ttft_p50_s", "ttft_p99_s")
    medians = figures["median"]
    cells = [[name, case, *(medians[name][case][what] for what in measures)] for case in CASES for name in medians]
    return ["engine", "case", "output tokens/s", "wall, s", "TTFT p50, s", "TTFT p99, s"], cells


def _tokens(draw: random.Random, count: int, vocab: int) -> list[int]:
    return [draw.randrange(1000, vocab - 300) for _ in range(count)]
