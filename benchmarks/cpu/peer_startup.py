"""Process start to the first token of a 64-token prompt, and the peak of resident memory, for each engine in turns.

Model files are in the page cache. Each of Penstock's first starts has an empty cache folder of its own
(XDG_CACHE_HOME), its second start the folder the first has filled; the peers start twice alike. llama.cpp's time is
that of a whole `llama-bench` process with one 64-token prompt and no warm-up.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu.peer_engines import (
    REPOSITORY,
    Run,
    llama_model,
    peer_folder,
    penstock_model,
    penstock_options,
    prompts,
    set_priority,
)
from benchmarks.cpu.peer_models import SHAPES
from benchmarks.cpu.peer_works import parse_work

PROMPT = 64
LENGTH = 1024
STARTS = ("first", "second")


def compare(run: Run, engines: Sequence[str], models: Sequence[str], kind: str, repeat: int) -> dict[str, Any]:
    """Both starts of every engine with every model, `repeat` times."""
    rows = []
    for model in models:
        commands = {name: start_command(run, name, model, kind) for name in engines}
        found: dict[str, dict[str, list[tuple[float, int]]]] = {
            name: {start: [] for start in STARTS} for name, command in commands.items() if command
        }
        for _ in range(repeat):
            for name in found:
                with tempfile.TemporaryDirectory() as cache:
                    for start in STARTS:
                        found[name][start].append(time_start(commands[name], run, cache))
                        print(f"{model} {name} {start}: {found[name][start][-1]}", flush=True)
        rows += [
            {
                "model": model,
                "engine": name,
                "start": start,
                "median_s": statistics.median(seconds for seconds, _ in runs),
                "median_peak_bytes": statistics.median(peak for _, peak in runs),
                "runs": runs,
            }
            for name, starts in found.items()
            for start, runs in starts.items()
        ]
    return {"format": kind, "prompt": PROMPT, "repeat": repeat, "threads": run.threads, "rows": rows}


def start_command(run: Run, name: str, model: str, kind: str) -> list[str]:
    """The command of one start; empty where there is no file or folder for it."""
    if name == "llama.cpp":
        file = llama_model(run, model, kind)
        sizes = ["-p", str(PROMPT), "-n", "0", "-r", "1", "--no-warmup", "-t", str(run.threads)]
        return [str(run.places.llama("llama-bench")), "-m", str(file), *sizes] if file.exists() else []
    asked = prompts(parse_work(f"prefill{PROMPT}"), SHAPES[model].vocab, 0)[0]
    setup: dict[str, Any] = {"threads": run.threads, "prompt": asked}
    if name in run.penstock:
        python, module, source = Path(sys.executable), "penstock", penstock_model(run, model, kind)
        setup["options"] = {"max_model_len": LENGTH, **penstock_options(run, name, kind)}
    else:
        python, module, source = run.places.python(name), name, peer_folder(run, name, model, kind)
        setup |= {"cache_gib": 1, "caching": False, "length": LENGTH, "sequences": 1}
    setup["model"] = str(source)
    command = [str(python), "-m", "benchmarks.cpu.workers.start", module, json.dumps(setup)]
    return command if source.exists() else []


def time_start(command: Sequence[str], run: Run, cache: str) -> tuple[float, int]:
    """Seconds until the first token, and the process's peak of resident memory (VmHWM), in bytes.

    Raises:
        RuntimeError: the process failed; the end of its log is in the message.
    """
    environment = {**run.environment(), "XDG_CACHE_HOME": cache}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, cwd=REPOSITORY, env=environment, start_new_session=True
        )
        set_priority(process.pid, run.priority)
        peaks: list[int] = [0]
        watcher = threading.Thread(target=_watch, args=(process, peaks))
        watcher.start()
        assert process.stdout is not None
        process.stdout.read()
        seconds = time.perf_counter() - started
        watcher.join()
        if process.returncode != 0:
            log.seek(0)
            raise RuntimeError(f"{command[0]} ended with {process.returncode}: {log.read()[-2000:]}")
    return seconds, max(peaks)


def _watch(process: subprocess.Popen[bytes], peaks: list[int]) -> None:
    """Notes the peak until the process ends. (The peak that waiting for it reports counts its parent's pages too.)"""
    while process.poll() is None:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
            peaks += [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
        time.sleep(0.005)


def columns_and_cells(figures: Mapping[str, Any]) -> tuple[list[str], list[list[object]]]:
    """The table of `compare`."""
    cells = [
        [row["model"], row["engine"], row["start"], row["median_s"], row["median_peak_bytes"] / 1e9]
        for row in figures["rows"]
    ]
    return ["model", "engine", "start", "first token, s", "peak memory, GB"], cells
