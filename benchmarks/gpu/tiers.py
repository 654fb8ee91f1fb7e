"""What copies of the KV cache below the device are worth: a prompt that left the pool, loaded and computed."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.engines import ask, running
from benchmarks.gpu.measure import Figure, Setting
from benchmarks.gpu.shapes import config
from benchmarks.kv_tiers import first_token, settle

MODEL = "Llama-3.1-8B"
LENGTHS = (1024, 4096, 16_384)
SIZE = 16 << 30
TURNS = 3


def tiers(setting: Setting) -> Iterator[Figure]:
    """Seconds to a first token: computed, found in the pool, and loaded from the host's memory and from files."""
    vocabulary = config(MODEL, setting.tiny)["vocab_size"]
    lengths = (20,) if setting.tiny else LENGTHS[:1] if setting.compiling else LENGTHS
    for where in ("kv_ram", "kv_disk"):
        with tempfile.TemporaryDirectory() as folder:
            more: dict[str, Any] = {
                where: 1 << 24 if setting.tiny else SIZE,
                "kv_disk_path": folder,
                "enable_prefix_caching": True,
            }
            with running(setting, MODEL, 1, lengths[-1] + 64, **more) as engine:
                for length in lengths:
                    found: dict[str, list[float]] = {"computed": [], "in the pool": [], where: []}
                    for turn in range(1 if setting.tiny or setting.compiling else TURNS):
                        prompt = ask(f"{where} {length} {turn}", length, 1, vocabulary).prompt_ids
                        found["computed"].append(first_token(engine, prompt)[0])
                        settle(engine)
                        found["in the pool"].append(first_token(engine, prompt)[0])
                        engine.scheduler.cache.tree.clear()
                        seconds, cached = first_token(engine, prompt)
                        if cached < length - 17:
                            continue  # computing is sooner done
                        found[where].append(seconds)
                    yield from _figures(where, length, {name: statistics.median(f) for name, f in found.items() if f})


def _figures(where: str, length: int, seconds: dict[str, float]) -> Iterator[Figure]:
    for name in ("computed", "in the pool"):
        yield Figure(f"{length} tokens, {name}, with {where}", seconds[name] * 1e3, "ms")
    if where not in seconds:
        yield Figure(f"{length} tokens, loads from {where}", 0, "", note="declined: computing is sooner done")
        return
    yield Figure(f"{length} tokens, loaded from {where}", seconds[where] * 1e3, "ms")
    yield Figure(f"{length} tokens, computed over loaded", seconds["computed"] / seconds[where], "times", least=1.0)
