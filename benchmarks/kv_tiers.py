"""What a lower tier of the KV cache is worth: for prefixes that left the pool, after a restart, and over a trace.

`--part evicted`: a prompt of so many tokens is computed, found in the pool, and found below once the pool is empty:
in memory, on disk with the file in the page cache, and on disk without. `--part restart`: the first answer of a new
engine beside a hit in the pool. `--part faults`: evicted prompts one after the other, of a disk that does a megabyte a
second, is gone, is empty, or has a wrong byte in each hundred; answers must be equal. `--part queue`: prompts that lie
on disk and wait for another's answer to end, loaded while they wait and once they are admitted. `--part overlap`: a
prefix's load, the step behind it, and both at once. `--part redis`, `--part objects`: what one engine has computed,
found by another that was there before, in Redis or in an object store (`redis-server` or moto's, started here). `--part
trace`: Mooncake's conversations, their lengths divided by `--scale`, `--rows` at a time, with a pool of so many
hundredths of what they need together, with and without a disk below it, beside a pool that holds all. All in turns, in
one process, with random weights of a model's shape or a real model.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice, product
from pathlib import Path
from threading import Thread
from typing import Any

from minio import Minio

from benchmarks.report import arguments, report
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine

SHAPES: Mapping[str, dict[str, int]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256},
}  # fmt: skip
_ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def dummy_model(folder: Path, shape: str) -> Path:
    """A configuration without weights: they are made up while it loads."""
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40_960,
              "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu",
              **SHAPES[shape]}  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def first_token(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds to a first token, and how many tokens of the prompt were found."""
    started = time.perf_counter()
    engine.add(EngineRequest(f"r{started}", prompt, _ONE))
    cached = 0
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            cached = output.cached_tokens if output.cached_tokens is not None else cached
    return time.perf_counter() - started, cached


def settle(engine: Engine) -> None:
    """All copies are below."""
    while engine.prepare():
        pass


def forget_pages(folder: Path) -> None:
    """Has the system read the files of a folder from the disk again."""
    for file in folder.rglob("blocks"):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def options(given: Any, model: Path, folder: Path, **more: Any) -> EngineOptions:
    longest = max(given.lengths) + 64
    return EngineOptions(
        model=str(model),
        max_model_len=longest,
        max_num_seqs=1,
        kv_blocks=2 * longest // 16 + 8,
        kv_disk_path=str(folder),
        quantize=given.quantize,
        load_format="dummy" if given.shape else "auto",
        **more,
    )


def evicted(given: Any, model: Path, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds by what was done, by length."""
    rng = random.Random(5)
    found: dict[str, dict[str, list[float]]] = {str(length): defaultdict(list) for length in given.lengths}
    for turn in range(given.turns):
        for where in ("memory", "disk"):
            below = {"kv_ram": given.size} if where == "memory" else {"kv_disk": given.size}
            engine, _ = build_engine(options(given, model, folder, **below))
            for length in given.lengths:
                prompt = tuple(rng.randrange(10, 4_000) for _ in range(length))
                times = found[str(length)]
                first_token(engine, tuple(rng.randrange(10, 4_000) for _ in range(40)))
                times["computed"].append(first_token(engine, prompt)[0])
                settle(engine)
                times["in the pool"].append(first_token(engine, prompt)[0])
                for what in (where, *(("disk, pages forgotten",) if where == "disk" else ())):
                    engine.scheduler.cache.tree.clear()
                    if what.endswith("forgotten"):
                        forget_pages(folder)
                    seconds, cached = first_token(engine, prompt)
                    assert cached >= length - 17, (what, cached)
                    times[what].append(seconds)
            engine.close()
            print(
                turn,
                where,
                {key: {name: round(one[-1], 3) for name, one in times.items()} for key, times in found.items()},
                flush=True,
            )
    return {key: dict(times) for key, times in found.items()}


def restart(given: Any, model: Path, folder: Path) -> dict[str, dict[str, list[float]]]:
    """The first answer of each new engine, beside a hit in the pool of the same."""
    rng = random.Random(7)
    found: dict[str, dict[str, list[float]]] = {str(length): defaultdict(list) for length in given.lengths}
    prompts = {length: tuple(rng.randrange(10, 4_000) for _ in range(length)) for length in given.lengths}
    for turn in range(2 * given.turns + 1):
        for length, prompt in prompts.items():
            engine, _ = build_engine(options(given, model, folder, kv_disk=given.size))
            if turn % 2:
                settle(engine)
            seconds, cached = first_token(engine, prompt)
            assert bool(turn) == (cached >= length - 17)
            what = "first answer, asked at once" if turn % 2 == 0 else "first answer, after an idle moment"
            found[str(length)][what if turn else "computed"].append(seconds)
            settle(engine)
            found[str(length)]["in the pool"].append(first_token(engine, prompt)[0])
            engine.close()
    return {key: dict(times) for key, times in found.items()}


def queue(given: Any, model: Path, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds from the end of another's answer to a first token, of prompts that lie on disk and wait for that end."""
    rng = random.Random(11)
    found: dict[str, dict[str, list[float]]] = {str(length): defaultdict(list) for length in given.lengths}
    prompts = {length: tuple(rng.randrange(10, 4_000) for _ in range(length)) for length in given.lengths}
    engine, _ = build_engine(options(given, model, folder, kv_disk=given.size))
    tier = engine.scheduler.cache.transfers.tier
    ahead = tier.preloads
    for length, prompt in prompts.items():
        first_token(engine, prompt)
        settle(engine)
        for _ in range(given.turns):
            for preloads, pages in product((0, ahead), (True, False)):
                engine.scheduler.cache.tree.clear()
                if not pages:
                    forget_pages(folder)
                tier.preloads = preloads
                name = ("ahead" if preloads else "when admitted") + ("" if pages else ", pages forgotten")
                found[str(length)][name].append(_behind(engine, prompt))
    engine.close()
    print({key: {name: min(one) for name, one in times.items()} for key, times in found.items()}, flush=True)
    return {key: dict(times) for key, times in found.items()}


def _behind(engine: Engine, prompt: tuple[int, ...]) -> float:
    sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    now = time.perf_counter()
    engine.add(EngineRequest(f"first {now}", tuple(range(10, 40)), sampling))
    engine.add(EngineRequest(f"second {now}", prompt, _ONE))
    ended = 0.0
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            if output.request_id.startswith("first") and output.finish_reason:
                ended = time.perf_counter()
    return time.perf_counter() - ended


def overlap(given: Any, model: Path, folder: Path) -> dict[str, dict[str, list[float]]]:
    """What loading beside computing could gain: a prefix's blocks loaded, the step behind them, and both at once."""
    rng = random.Random(13)
    found: dict[str, dict[str, list[float]]] = {str(length): defaultdict(list) for length in given.lengths}
    engine, _ = build_engine(options(given, model, folder, kv_disk=given.size))
    for length in given.lengths:
        prompt = tuple(rng.randrange(10, 4_000) for _ in range(length))
        first_token(engine, prompt)
        settle(engine)
        first_token(engine, prompt)
        copies = [(node.blocks[0], place) for node, _, place in engine.scheduler.cache.tree.copies_below()]
        times = found[str(length)]
        for _ in range(given.turns):
            for pages in (True, False):
                if not pages:
                    forget_pages(folder)
                what = "load" + ("" if pages else ", pages forgotten")
                times[what].append(_timed(partial(_load_again, engine, copies)))
            times["step"].append(first_token(engine, prompt)[0])
            times["both"].append(_timed(partial(_beside, engine, copies, prompt)))
        engine.scheduler.cache.clear()
    engine.close()
    return {key: dict(times) for key, times in found.items()}


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _load_again(engine: Engine, copies: list[tuple[int, int]]) -> None:
    """Blocks get the bytes that they have, by two threads as the carrier's."""
    runner: Any = engine.runner
    carrier = runner.mover
    pieces, store = carrier._pieces, carrier._store

    def work(part: list[tuple[int, int]]) -> None:
        for block, place in part:
            pieces.write(0, block, store.read(place, store.entry(place)))

    threads = [Thread(target=work, args=(copies[number::2],)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _beside(engine: Engine, copies: list[tuple[int, int]], prompt: tuple[int, ...]) -> None:
    loading = Thread(target=_load_again, args=(engine, copies))
    loading.start()
    first_token(engine, prompt)
    loading.join()


class Slow:
    """A store that reads a megabyte a second."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, place: int, entry: Any) -> Any:
        data = self._store.read(place, entry)
        time.sleep(len(data) / 1e6)
        return data


@contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """A server in a process of its own, once it listens."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, command
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextmanager
def redis() -> Iterator[str]:
    """The address of a Redis server."""
    port = free_port()
    with running(["redis-server", "--port", str(port), "--save", ""], port):
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def objects() -> Iterator[str]:
    """The address of a bucket, whose endpoint the environment names."""
    port = free_port()
    host = f"127.0.0.1:{port}"
    with running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        Minio(host, access_key="k", secret_key="s", secure=False, region="us-east-1").make_bucket("blocks")
        os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
        yield "s3://blocks"


def shared(given: Any, model: Path, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds of one engine that computes, and of another that was there before and finds it."""
    rng = random.Random(11)
    found: dict[str, dict[str, list[float]]] = {str(length): defaultdict(list) for length in given.lengths}
    with {"redis": redis, "objects": objects}[given.part]() as address:
        first, second = (build_engine(options(given, model, folder, kv_store=address))[0] for _ in range(2))
        for engine in (first, second):
            first_token(engine, tuple(rng.randrange(10, 4_000) for _ in range(40)))
        for turn, length in ((turn, length) for turn in range(given.turns) for length in given.lengths):
            prompt = tuple(rng.randrange(10, 4_000) for _ in range(length))
            times = found[str(length)]
            times["computed"].append(first_token(first, prompt)[0])
            settle(first)
            while first.runner.mover._store.unsent:  # type: ignore[attr-defined]
                time.sleep(0.01)
            seconds, cached = first_token(second, prompt)
            assert cached >= length - 17, cached
            times["in the store"].append(seconds)
            second.scheduler.cache.tree.clear()
            times["in the store, known"].append(first_token(second, prompt)[0])
            print(turn, length, {name: round(one[-1], 3) for name, one in times.items()}, flush=True)
        first.close()
        second.close()
    return {key: dict(times) for key, times in found.items()}


def break_store(engine: Any, folder: Path, how: str) -> None:
    """What happens to a disk."""
    carrier = engine.runner.mover
    store = carrier._store
    (blocks,) = folder.rglob("blocks")
    if how == "slow":
        carrier._store = Slow(store)
    elif how == "killed":
        os.close(store._file._file)
    elif how == "lost":
        os.truncate(blocks, 0)
    elif how == "damaged":  # a byte of a hundred
        with blocks.open("r+b") as file:
            whole = bytearray(file.read())
            for at in range(0, len(whole), 100):
                whole[at] ^= 0x5A
            file.seek(0)
            file.write(whole)


def faults(given: Any, model: Path, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Times to a first token of one evicted prompt after the other; what they say must be equal."""
    rng = random.Random(9)
    length = given.lengths[0]
    prompts = [tuple(rng.randrange(10, 4_000) for _ in range(length)) for _ in range(given.turns)]
    found: dict[str, dict[str, list[float]]] = {str(length): {}}
    for how in ("nothing", "slow", "killed", "lost", "damaged"):
        place = folder / how
        engine, _ = build_engine(options(given, model, place, kv_disk=given.size))
        computed, said = [], []
        for prompt in prompts:
            computed.append(first_token(engine, prompt)[0])
            said.append(spoken(engine, prompt))
            settle(engine)
        engine.scheduler.cache.tree.clear()
        if how != "nothing":
            break_store(engine, place, how)
        times = []
        for prompt, true in zip(prompts, said, strict=True):
            times.append(first_token(engine, prompt)[0])
            assert spoken(engine, prompt) == true, how
        found[str(length)] |= {f"computed ({how})": computed, how: times}
        print(how, [round(one, 2) for one in computed], [round(one, 2) for one in times], flush=True)
        shutil.rmtree(place, ignore_errors=True)
    return found


def spoken(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    """Eight tokens that follow."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    engine.add(EngineRequest(f"s{time.perf_counter()}", prompt, sampling))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens += output.tokens
    return tokens


def conversations(given: Any) -> list[tuple[tuple[int, ...], int]]:
    """Prompts and lengths of answers of conversations with three turns or more, in the order in which they came; equal
    blocks of the trace have equal tokens.
    """
    found = []
    size = 512 // given.scale
    with (given.data / "trace" / "mooncake_conversation_trace.jsonl").open(encoding="utf-8") as lines:
        every = [json.loads(line) for line in islice(lines, 4000)]
    fitting = [one for one in every if one["input_length"] <= given.longest * given.scale and len(one["hash_ids"]) > 1]
    turns = Counter(one["hash_ids"][1] for one in fitting)
    for one in fitting:
        if turns[one["hash_ids"][1]] >= 3:
            length = max(2, one["input_length"] // given.scale)
            blocks = (random.Random(block) for block in one["hash_ids"])
            tokens = tuple(rng.randrange(10, 4_000) for rng in blocks for _ in range(size))[:length]
            found.append((tokens, max(1, one["output_length"] // given.scale)))
            if len(found) == given.requests:
                break
    return found


def served(engine: Engine, asked: list[tuple[tuple[int, ...], int]], rows: int) -> dict[str, float]:
    """Serves all, so many at a time; hits, times to a first token and the rate of tokens."""
    waiting = list(enumerate(asked))[::-1]
    begun: dict[str, float] = {}
    firsts: list[float] = []
    hits = live = tokens = 0
    started = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and live < rows:
            number, (prompt, most) = waiting.pop()
            begun[f"r{number}"] = time.perf_counter()
            sampling = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
            engine.add(EngineRequest(f"r{number}", prompt, sampling))
            live += 1
            tokens += len(prompt) + most
        for output in engine.step():
            assert output.error is None, output.error
            if output.cached_tokens is not None:
                hits += output.cached_tokens
            if output.tokens and output.request_id in begun:
                firsts.append(time.perf_counter() - begun.pop(output.request_id))
            live -= output.finish_reason is not None
    seconds = time.perf_counter() - started
    firsts.sort()
    return {
        "hits": hits,
        "ttft_p50": firsts[len(firsts) // 2],
        "ttft_p99": firsts[len(firsts) * 99 // 100],
        "tokens_per_s": tokens / seconds,
        "declined": dict(engine.stats().kv_below).get("declined", 0),
    }


def trace(given: Any, model: Path, folder: Path) -> dict[str, dict[str, float]]:
    """What was found and how fast, by pool and by what lies below it."""
    asked = conversations(given)
    size = 8
    longest = max(len(prompt) + most for prompt, most in asked) + size
    whole = sum(-(-(len(prompt) + most) // size) for prompt, most in asked) + 64
    found: dict[str, dict[str, float]] = {}
    needed = whole
    for share in (100, *given.shares):
        for below in (None,) if share == 100 else (None, given.size):
            blocks = max(needed * share // 100, given.rows * -(-longest // size) + 16)
            engine, _ = build_engine(
                EngineOptions(
                    model=str(model), load_format="dummy" if given.shape else "auto", quantize=given.quantize,
                    max_model_len=longest, max_num_seqs=given.rows, kv_blocks=blocks, block_size=size,
                    kv_disk=below, kv_disk_path=str(folder / f"{share}"),
                )
            )  # fmt: skip
            name = f"{share} %" + (" and disk" if below else "")
            found[name] = {"blocks": blocks, **served(engine, asked, given.rows)}
            if share == 100:
                usage = engine.scheduler.cache.pools[0]
                needed = usage.num_blocks - usage.num_free
            engine.close()
            print(name, found[name], flush=True)
    return found


def tell_trace(given: Any, found: dict[str, dict[str, float]]) -> None:
    """Prints and keeps what `trace` has found."""
    whole = found["100 %"]["hits"]
    rows = [
        (name, int(one["blocks"]), one["hits"] / whole, one["ttft_p50"], one["ttft_p99"], one["tokens_per_s"])
        for name, one in found.items()
    ]
    figures = {"scale": given.scale, "requests": given.requests, "rows": given.rows, "found": found}
    columns = ("pool", "blocks", "hits of all", "TTFT p50, s", "p99, s", "tokens/s")
    report(f"kv_tiers_trace_{given.shape or Path(given.model).stem}", given.results, figures, columns, rows)


def main() -> None:
    """Measures one part."""
    parser = arguments(__doc__)
    parts = {"evicted": evicted, "restart": restart, "faults": faults, "queue": queue, "overlap": overlap}
    parts |= {"redis": shared, "objects": shared}
    parser.add_argument("--part", choices=(*parts, "trace"), default="evicted")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights; else --model")
    parser.add_argument("--model", default="penstock-concierge")
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--scale", type=int, default=64, help="of the trace: lengths are divided by it")
    parser.add_argument("--longest", type=int, default=400, help="of the prompts; longer ones are left out")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--shares", type=int, nargs="+", default=[10, 25, 50])
    parser.add_argument("--size", type=int, default=4 << 30, help="bytes of the tier")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kv-tiers-"))
    try:
        model = dummy_model(folder / "model", given.shape) if given.shape else Path(given.model)
        if given.part == "trace":
            tell_trace(given, trace(given, model, folder / "kv"))
            return
        times = parts[given.part](given, model, folder / "kv")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for length, kinds in times.items():
        computed = statistics.median(next(iter(kinds.values())))
        rows += [
            (length, what, statistics.median(seconds), computed / statistics.median(seconds))
            for what, seconds in kinds.items()
        ]
    name = f"kv_tiers_{given.part}_{given.shape or Path(given.model).stem}"
    columns = ("tokens", "prefix", "TTFT, s", "computed over it")
    report(name, given.results, {"seconds": times, "quantize": given.quantize}, columns, rows)


if __name__ == "__main__":
    main()
