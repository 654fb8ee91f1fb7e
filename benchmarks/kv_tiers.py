"""What a lower tier of the KV cache is worth: time to a first token of prefixes that left the pool, and after a restart.

`--part evicted`: a prompt of so many tokens is computed, found in the pool, and found below once the pool is empty:
in memory, on disk with the file in the page cache, and on disk without. `--part restart`: the first answer of a new
engine beside a hit in the pool. All in turns, in one process, with random weights of a model's shape or a real model.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    for turn in range(given.turns + 1):
        for length, prompt in prompts.items():
            engine, _ = build_engine(options(given, model, folder, kv_disk=given.size))
            seconds, cached = first_token(engine, prompt)
            assert bool(turn) == (cached >= length - 17)
            found[str(length)]["computed" if not turn else "first answer"].append(seconds)
            settle(engine)
            found[str(length)]["in the pool"].append(first_token(engine, prompt)[0])
            engine.close()
    return {key: dict(times) for key, times in found.items()}


def main() -> None:
    """Measures one part."""
    parser = arguments(__doc__)
    parser.add_argument("--part", choices=("evicted", "restart"), default="evicted")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights; else --model")
    parser.add_argument("--model", default="penstock-concierge")
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--size", type=int, default=4 << 30, help="bytes of the tier")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kv-tiers-"))
    try:
        model = dummy_model(folder / "model", given.shape) if given.shape else Path(given.model)
        times = (evicted if given.part == "evicted" else restart)(given, model, folder / "kv")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for length, kinds in times.items():
        computed = statistics.median(kinds["computed"])
        rows += [
            (length, what, statistics.median(seconds), computed / statistics.median(seconds))
            for what, seconds in kinds.items()
        ]
    name = f"kv_tiers_{given.part}_{given.shape or Path(given.model).stem}"
    columns = ("tokens", "prefix", "TTFT, s", "computed over it")
    report(name, given.results, {"seconds": times, "quantize": given.quantize}, columns, rows)


if __name__ == "__main__":
    main()
