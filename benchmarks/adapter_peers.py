"""One adapter in every answer, beside llama-server --lora: the same .gguf files, machine, instruction set and requests.

A random adapter of rank 16 on queries and values, as convert_lora_to_gguf writes one. `--clients` at a time ask
/completion for `--tokens` each behind a prompt of 64. Servers run one after the other, each with the adapter and
without, `--repeat` times; medians. llama.cpp is built by benchmarks.cpu.peers into `--root`.
python -m benchmarks.adapter_peers
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np

from benchmarks.cpu.peers import DEFAULT_ROOT
from benchmarks.report import arguments, report
from benchmarks.server_child import serve
from penstock.weights.open import open_checkpoint

RANK, PROMPT = 16, 64


def write_adapter(model: Path, path: Path) -> None:
    """An adapter of a model's queries and values."""
    checkpoint = open_checkpoint(model)
    writer = gguf.GGUFWriter(path, str(checkpoint.metadata["general.architecture"]))
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    drawn = np.random.default_rng(1)
    for name, info in checkpoint.tensors.items():
        match = re.search(r"layers\.(\d+)\.self_attn\.([qv])_proj\.weight", name)
        if match is None:
            continue
        stem, (outputs, inputs) = f"blk.{match[1]}.attn_{match[2]}.weight", info.shape
        writer.add_tensor(f"{stem}.lora_a", (drawn.standard_normal((RANK, inputs)) * 0.02).astype(np.float16))
        writer.add_tensor(f"{stem}.lora_b", (drawn.standard_normal((outputs, RANK)) * 0.02).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def penstock(model: Path, adapter: Path | None, clients: int, threads: int) -> Iterator[str]:
    """A server of this project; its address."""
    flags = ["--isa", "avx2", "--threads", str(threads), "--max-num-seqs", str(clients), "--max-model-len", "512"]
    with serve([str(model), *flags, *(["--lora", str(adapter)] if adapter else [])]) as child:
        yield child.url


@contextmanager
def llama(root: Path, model: Path, adapter: Path | None, clients: int, threads: int) -> Iterator[str]:
    """llama-server; its address."""
    port = str(20000 + os.getpid() % 20000)
    command = [
        str(root / "llama.cpp/build-avx2/bin/llama-server"),
        "-m",
        str(model),
        "--port",
        port,
        "-t",
        str(threads),
    ]
    command += ["-np", str(clients), "-c", str(512 * clients), "--no-webui"]
    command += ["--lora", str(adapter)] if adapter else []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(600):
                try:
                    if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                if process.poll() is not None:
                    raise RuntimeError("llama-server ended")
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait(60)


async def speed(url: str, clients: int, tokens: int, seed: int) -> float:
    """Generated tokens a second of so many requests at once."""
    drawn = np.random.default_rng(seed)
    bodies: list[Any] = [
        {
            "prompt": [int(token) for token in drawn.integers(1000, 50000, PROMPT)],
            "n_predict": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        for _ in range(clients)
    ]
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
        begun = time.perf_counter()
        answers = await asyncio.gather(*(client.post("/completion", json=body) for body in bodies))
        took = time.perf_counter() - begun
    counts = [int(answer.json()["tokens_predicted"]) for answer in answers]
    if counts != [tokens] * clients:
        raise RuntimeError(f"{url} generated {counts}")
    return sum(counts) / took


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--model", default="models/qwen3-0.6b/qwen3-0.6b-q4_k_m.gguf", help="below --root")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    model = given.root / given.model
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder, "lora.gguf")
        write_adapter(model, adapter)
        for turn in range(given.repeat):
            for own in (adapter, None):
                kind = "with" if own else "without"
                with penstock(model, own, given.clients, given.threads) as url:
                    asyncio.run(speed(url, 1, 4, 100))
                    ours = asyncio.run(speed(url, given.clients, given.tokens, turn))
                with llama(given.root, model, own, given.clients, given.threads) as url:
                    asyncio.run(speed(url, 1, 4, 100))
                    theirs = asyncio.run(speed(url, given.clients, given.tokens, turn))
                for name, value in (("penstock", ours), ("llama-server", theirs)):
                    found.setdefault(f"{name} {kind}", []).append(value)
                    print(f"{name} {kind} adapter: {value:.1f} tokens/s", flush=True)
    medians = {name: statistics.median(values) for name, values in found.items()}
    told = [(name, f"{value:.1f}") for name, value in medians.items()]
    told.append(("with it, over llama-server", f"{medians['penstock with'] / medians['llama-server with']:.2f}"))
    for name in ("penstock", "llama-server"):
        told.append((f"{name}, with over without", f"{medians[f'{name} with'] / medians[f'{name} without']:.2f}"))
    settings = {key: getattr(given, key) for key in ("model", "clients", "tokens", "repeat", "threads")}
    report("adapter_peers", given.results, {**settings, "rank": RANK, "runs": found}, ("what", "tokens/s"), told)


if __name__ == "__main__":
    main()
