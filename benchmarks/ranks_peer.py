"""Two processes of one thread beside transformers', same weights: python -m benchmarks.ranks_peer FOLDER

transformers runs under torchrun with `tp_plan="auto"` over gloo, greedy, with its own cache, in bfloat16 and in float32
(the faster one counts); Penstock with `-tp`. They take turns: transformers' processes are held (SIGSTOP) while Penstock
computes. Works are those of `benchmarks.ranks`; transformers' sequences are one batch of equal lengths.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.ranks import WORKS, Engine
from benchmarks.report import arguments, report

COLUMNS = ["work", "transformers, tokens/s", "as", "Penstock, tokens/s", "ratio"]


def peer(folder: str, kind: str) -> None:
    """A rank of transformers: does works that come by lines of JSON, told to all by the first."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(folder, dtype=getattr(torch, kind), tp_plan="auto")
    model.generation_config.eos_token_id = None
    while True:
        told = [sys.stdin.readline() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(told)
        if not told[0].strip():
            return
        prompts, tokens = json.loads(told[0])
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
            )
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"took {time.perf_counter() - started}", flush=True)


class Transformers:
    """Its ranks, under torchrun."""

    def __init__(self, folder: Path, kind: str, ranks: int) -> None:
        words = ["--standalone", f"--nproc-per-node={ranks}", "-m", "benchmarks.ranks_peer"]
        command = [sys.executable, "-m", "torch.distributed.run", *words, str(folder), "--peer", kind]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    def _tell(self, number: signal.Signals) -> None:
        torchrun = psutil.Process(self._process.pid)
        for process in (*torchrun.children(recursive=True), torchrun):  # ranks have sessions of their own
            process.send_signal(number)

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._tell(signal.SIGCONT)
        yield
        self._tell(signal.SIGSTOP)

    def run(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with self._running():
            stdin.write(json.dumps([prompts, tokens]) + "\n")
            stdin.flush()
            return _taken(stdout)

    def close(self) -> None:
        """Ends them."""
        self._tell(signal.SIGKILL)
        self._process.wait()


def _taken(stdout: IO[str]) -> float:
    for line in stdout:
        if line.startswith("took "):
            return float(line.split()[1])
    raise RuntimeError("transformers has ended")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path, help="a Hugging Face folder")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="(for its own processes)")
    given = parser.parse_args()
    if given.peer:
        peer(str(given.folder), given.peer)
        return
    peers = {kind: Transformers(given.folder, kind, given.ranks) for kind in ("bfloat16", "float32")}
    for one in peers.values():
        one.run([[7, 8, 9]], 2)
    ours = Engine(
        model=str(given.folder), device="cpu", threads=given.ranks, tensor_parallel_size=given.ranks, max_model_len=768,
        max_num_seqs=16, kv_blocks=400, enable_prefix_caching=False, pack_cache="off",
    )  # fmt: skip
    rng, seconds = random.Random(1), defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
    for turn in range(given.rounds + 1):
        for name, (count, length, tokens) in WORKS.items():
            prompts = [[rng.randrange(5, 30_000) for _ in range(length)] for _ in range(count)]
            took = {kind: one.run(prompts, tokens) for kind, one in peers.items()}
            (took["penstock"], _), _ = ours.run(prompts, tokens)
            for who, taken in took.items():
                if turn:  # the first warms up
                    seconds[name][who].append(taken)
    rows = []
    for name, (count, length, tokens) in WORKS.items():
        done = count * (length if tokens == 1 else tokens)
        speeds = {who: done / statistics.median(taken) for who, taken in seconds[name].items()}
        best = max(peers, key=speeds.__getitem__)
        rows.append([name, speeds[best], best, speeds["penstock"], speeds["penstock"] / speeds[best]])
    ours.close()
    for one in peers.values():
        one.close()
    report(f"ranks_peer_{given.folder.parent.name}", given.results, {"seconds": seconds}, COLUMNS, rows)


if __name__ == "__main__":
    main()
