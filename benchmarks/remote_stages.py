"""Two stages in two network namespaces, the link between them shaped: python -m benchmarks.remote_stages --shape 0.6b

Needs root and `ip` (iproute2). One namespace has the engine that leads, the other `penstock worker`; what passes
between them goes through a relay that holds every byte back by `--delay-ms` each way and lets `--mbit` a second pass.
Beside it, taking turns: the same two stages on one machine, which pass the same bytes by sockets of their own.
"""

from __future__ import annotations

import os
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.kv_tiers import SHAPES
from benchmarks.ranks import WORKS, Engine, Taken, random_model, turns
from benchmarks.report import arguments, report

LEAD, WORKER, PORT = "10.207.0.1", "10.207.0.2", 7207
COLUMNS = [
    "work",
    "one machine, tokens/s",
    "over the link, tokens/s",
    "link over one machine",
    "stages wait, %",
    "there, %",
]


def relay(delay_s: float, bytes_a_second: float) -> None:
    """Passes connections to its own port 7207 on to the one that leads; each way is a queue of what arrived when."""
    with socket.create_server(("127.0.0.1", PORT)) as listening:
        print("ready", flush=True)
        while True:
            near, _ = listening.accept()
            try:
                far = socket.create_connection((LEAD, PORT))
            except OSError:  # nobody leads yet
                near.close()
                continue
            for source, target in ((near, far), (far, near)):
                target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=_arrive, args=(source, line), daemon=True).start()
                threading.Thread(target=_leave, args=(target, line, delay_s, bytes_a_second), daemon=True).start()


def _arrive(source: socket.socket, line: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    while data := _received(source):
        line.put((time.monotonic(), data))
    line.put((time.monotonic(), b""))


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except OSError:
        return b""


def _leave(target: socket.socket, line: queue.SimpleQueue[tuple[float, bytes]], delay_s: float, rate: float) -> None:
    free = 0.0  # when the link has passed all that came before
    while True:
        arrived, data = line.get()
        free = max(free, arrived) + len(data) / rate
        time.sleep(max(0.0, free + delay_s - time.monotonic()))
        try:
            target.sendall(data) if data else target.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        if not data:
            return


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two that a pair of interfaces joins."""
    names = [f"penstock-{os.getpid()}-{end}" for end in "ab"]
    with ExitStack() as stack:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        ends = [f"pst{os.getpid()}{end}" for end in "ab"]
        subprocess.run(
            [
                "ip",
                "link",
                "add",
                ends[0],
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                ends[1],
                "netns",
                names[1],
            ],
            check=True,
        )
        for name, end, address in zip(names, ends, (LEAD, WORKER), strict=True):
            inside = ["ip", "-n", name]
            subprocess.run([*inside, "addr", "add", f"{address}/30", "dev", end], check=True)
            for device in (end, "lo"):
                subprocess.run([*inside, "link", "set", device, "up"], check=True)
        yield names[0], names[1]


def ended(process: subprocess.Popen[Any]) -> None:
    """Kills it."""
    process.kill()
    process.wait()


def measure(given: Any) -> dict[str, Any]:
    """In the namespace of the one that leads: figures of each work, by engine and round."""
    settings: dict[str, Any] = {
        "model": given.model, "device": "cpu", "threads": 2, "max_model_len": 768, "max_num_seqs": 16, "kv_blocks": 400,
        "enable_prefix_caching": False, "pipeline_parallel_size": 2, "load_format": "dummy" if given.shape else "auto",
        "pack_cache": "off",
    }  # fmt: skip
    remote = {"remote_workers": 1, "workers_address": f"{LEAD}:{PORT}", "threads": 1}
    engines = {"near": Engine(**settings), "far": Engine(**{**settings, **remote})}
    seconds, waits = (defaultdict[str, Taken](lambda: defaultdict(list)) for _ in range(2))
    for name, which, took, figures in turns(engines, given.rounds, same=not given.shape):
        seconds[name][which].append(took)
        waits[name][which].append(1 - figures["stages_computed"] / figures["stages"])
    for engine in engines.values():
        engine.close()
    return {"seconds": seconds, "waits": waits}


def run_inside(given: Any, folder: Path) -> None:
    """Starts worker and relay in one namespace, and this module again in the other."""
    environment = {**os.environ, "PENSTOCK_WORKER_TOKEN": "of this benchmark alone"}
    with namespaces() as (lead, worker), ExitStack() as stack:
        there = ["ip", "netns", "exec", worker, sys.executable, "-m"]
        rate = [str(given.delay_ms), str(given.mbit)]
        relaying = subprocess.Popen([*there, "benchmarks.remote_stages", "--relay", *rate], stdout=subprocess.PIPE)
        stack.callback(ended, relaying)
        assert relaying.stdout is not None and relaying.stdout.readline()
        joined = subprocess.Popen(
            [*there, "penstock", "worker", "--join", f"127.0.0.1:{PORT}", "--threads", "1"], env=environment
        )
        stack.callback(ended, joined)
        here = ["ip", "netns", "exec", lead, sys.executable, "-m", "benchmarks.remote_stages", *sys.argv[1:]]
        subprocess.run([*here, "--inside", "--model", str(folder)], env=environment, check=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights; else --model")
    parser.add_argument("--model")
    parser.add_argument("--delay-ms", type=float, default=1.0)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help="(for its own processes)")
    parser.add_argument("--relay", nargs=2, type=float, help="(for its own processes)")
    given = parser.parse_args()
    if given.relay:
        relay(given.relay[0] / 1e3, given.relay[1] * 1e6 / 8)
    elif given.inside:
        tell(given, measure(given))
    else:
        with tempfile.TemporaryDirectory() as folder:
            model = random_model(Path(folder) / "model", given.shape) if given.shape else Path(given.model)
            run_inside(given, model)


def tell(given: Any, figures: dict[str, Any]) -> None:
    """Prints the table, and keeps what was measured."""
    rows = []
    for name, (count, length, tokens) in WORKS.items():
        taken, waited = figures["seconds"][name], figures["waits"][name]
        done = count * (length if tokens == 1 else tokens)
        speeds = [done / statistics.median(taken[which]) for which in ("near", "far")]
        ratio = statistics.median(near / far for near, far in zip(taken["near"], taken["far"], strict=True))
        rows.append([name, *speeds, ratio, *(100 * statistics.median(waited[which]) for which in ("near", "far"))])
    report(f"remote_stages_{given.shape or Path(given.model).name}", given.results, figures, COLUMNS, rows)


if __name__ == "__main__":
    main()
