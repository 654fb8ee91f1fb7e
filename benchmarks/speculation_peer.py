"""llama.cpp's speculation beside ours: the same two GGUF files, each engine's speed with drafts over without.

python -m benchmarks.speculation_peer MODEL.gguf DRAFT.gguf TOKENIZER_FOLDER --llama-server PROGRAM

Replies of dialogues, greedy, one at a time, prompts found cached: seconds a token as llama-server's `timings` tell
them, which both servers give. All servers are there at once, and take turns round by round; each has as many threads as
there are cores, and those that wait do nothing.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import arguments, report
from benchmarks.speculation_heads import ANSWER, LENGTH, turns
from penstock.engine.text_pipeline import TextPipeline

DRAFTS = 4
_STARTS = 120.0  # seconds a server may take


def commands(args: Any, threads: int) -> dict[str, dict[str, list[str]]]:
    """Of each engine, how it is started without drafts and with."""
    ours = [
        sys.executable, "-m", "penstock.cli.main", "serve", args.model, "--threads", f"{threads}",
        "--max-model-len", f"{LENGTH}", "--max-num-seqs", "1",
    ]  # fmt: skip
    config = {"method": "draft_model", "model": args.draft, "num_speculative_tokens": DRAFTS}
    theirs = [args.llama_server, "-m", args.model, "-t", f"{threads}", "-np", "1", "-c", f"{LENGTH}"]
    drafted = ["-md", args.draft, "--spec-type", "draft-simple", "--spec-draft-n-max", f"{DRAFTS}"]
    return {
        "Penstock": {"off": ours, "on": [*ours, "--speculative-config", json.dumps(config)]},
        "llama.cpp": {"off": theirs, "on": [*theirs, *drafted]},
    }


class Server:
    """One way of one engine.

    Attributes:
        speeds: tokens a second, by round.
        drafted, accepted: drafts, and those that were accepted.
    """

    def __init__(self, command: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen([*command, "--port", f"{port}"], stdout=null, stderr=null)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_STARTS)
        self.speeds: list[float] = []
        self.drafted = self.accepted = 0

    def ready(self) -> None:
        """Waits for it."""
        _await(self._client)

    def round(self, prompts: Sequence[Sequence[int]], *, counts: bool) -> None:
        """Asks all prompts one after the other."""
        tokens, took = 0, 0.0
        for prompt in prompts:
            said = _asked(self._client, prompt)
            tokens, took = tokens + said["predicted_n"], took + said["predicted_ms"] / 1e3
            self.drafted += said.get("draft_n", 0) * counts
            self.accepted += said.get("draft_n_accepted", 0) * counts
        self.speeds += [tokens / took] if counts else []

    def end(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait()

    @property
    def found(self) -> dict[str, Any]:
        """What is reported."""
        speed = statistics.median(self.speeds)
        return {"tokens_per_s": speed, "rounds": self.speeds, "drafted": self.drafted, "accepted": self.accepted}


def _await(client: httpx.Client) -> None:
    until = time.monotonic() + _STARTS
    while time.monotonic() < until:
        try:
            if client.get("/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("a server did not start")


def _asked(client: httpx.Client, prompt: Sequence[int]) -> dict[str, Any]:
    body = {"prompt": list(prompt), "n_predict": ANSWER, "temperature": 0.0, "cache_prompt": True}
    found: dict[str, Any] = client.post("/completion", json=body).raise_for_status().json()["timings"]
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", help="a .gguf file")
    parser.add_argument("draft", help="the .gguf file of its draft model")
    parser.add_argument("folder", help="where the model's tokenizer and template lie")
    parser.add_argument("--llama-server", required=True, help="llama.cpp's program")
    parser.add_argument("--dialogues", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    prompts = list(turns(TextPipeline.load(args.folder), args.data))[: args.dialogues]
    threads = len(os.sched_getaffinity(0))
    figures: dict[str, Any] = {"drafts": DRAFTS, "engines": {}}
    rows: list[list[object]] = []
    servers = {
        (name, way): Server(command) for name, ways in commands(args, threads).items() for way, command in ways.items()
    }
    try:
        for server in servers.values():
            server.ready()
        for turn in range(args.rounds + 1):  # the first is warm-up
            for server in servers.values() if turn % 2 else reversed(servers.values()):
                server.round(prompts, counts=turn > 0)
    finally:
        for server in servers.values():
            server.end()
    for name in ("Penstock", "llama.cpp"):
        found = {way: servers[name, way].found for way in ("off", "on")}
        gain = statistics.median(
            on / off for on, off in zip(found["on"]["rounds"], found["off"]["rounds"], strict=True)
        )
        right = found["on"]["accepted"] / max(1, found["on"]["drafted"])
        figures["engines"][name] = {**found, "gain": gain}
        rows.append([name, found["off"]["tokens_per_s"], found["on"]["tokens_per_s"], gain, right])
    columns = ["engine", "off, tokens/s", "on, tokens/s", "gain", "accepted of drafted"]
    report(
        f"speculation_peer_{Path(args.model).stem}",
        args.results,
        {"model": Path(args.model).stem, **figures},
        columns,
        rows,
    )


if __name__ == "__main__":
    main()
