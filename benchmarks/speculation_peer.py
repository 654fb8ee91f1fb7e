"""llama.cpp's speculation beside ours: the same two GGUF files, each engine's speed with drafts over without.

python -m benchmarks.speculation_peer MODEL.gguf DRAFT.gguf TOKENIZER_FOLDER --llama-server PROGRAM

Replies of dialogues, greedy, one at a time, prompts found cached: seconds a token as llama-server's `timings` tell
them, which both servers give. Servers run one after the other, each with as many threads as there are cores.
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


def measured(command: Sequence[str], prompts: Sequence[Sequence[int]], rounds: int) -> dict[str, float]:
    """Tokens a second by round, medians; drafts and those that were accepted."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        [*command, "--port", f"{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_STARTS)
            _await(client)
            speeds, drafted, accepted = [], 0, 0
            for turn in range(rounds + 1):  # the first is warm-up
                tokens, took = 0, 0.0
                for prompt in prompts:
                    said = _asked(client, prompt)
                    tokens, took = tokens + said["predicted_n"], took + said["predicted_ms"] / 1e3
                    drafted += said.get("draft_n", 0)
                    accepted += said.get("draft_n_accepted", 0)
                speeds += [tokens / took] if turn else []
        finally:
            server.terminate()
            server.wait()
    return {"tokens_per_s": statistics.median(speeds), "drafted": drafted, "accepted": accepted}


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
    for name, ways in commands(args, threads).items():
        found = {way: measured(command, prompts, args.rounds) for way, command in ways.items()}
        gain = found["on"]["tokens_per_s"] / found["off"]["tokens_per_s"]
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
