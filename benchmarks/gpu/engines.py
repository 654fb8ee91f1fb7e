"""Engines of random weights in published shapes, and what their steps take."""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measure import Setting
from benchmarks.gpu.shapes import config
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.layers.decoder import DecoderModel
from penstock.layers.weight import Weight
from penstock.runtime.drafters.drafter import Drafter

BLOCK = 16


def folder_of(model: str, setting: Setting, folder: Path) -> Path:
    """A folder with the model's config.json; where kernels are only compiled, of two layers."""
    layers = 2 if setting.compiling else None
    (folder / "config.json").write_text(json.dumps(config(model, setting.tiny, layers)))
    return folder


@contextmanager
def running(
    setting: Setting, model: str, rows: int, length: int, drafter: Drafter | None = None, **more: Any
) -> Iterator[Engine]:
    """An engine for so many rows of so many tokens."""
    if setting.tiny:
        rows, length = min(rows, 2), min(length, 32)
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "device": setting.device, "load_format": "dummy", "pack_cache": "off", "enable_prefix_caching": False,
            "max_num_seqs": rows, "max_model_len": length, "kv_blocks": 1 + rows * (-(-length // BLOCK) + 1),
            "dtype": str(setting.dtype).removeprefix("torch."), "block_size": BLOCK,
            "max_num_batched_tokens": 32 if setting.tiny else 8192,
        } | more  # fmt: skip
        engine, info = build_engine(
            EngineOptions(model=str(folder_of(model, setting, Path(folder))), **given), drafter=drafter
        )
        served = {decision.name: decision for decision in info.kernels}
        setting.note_chosen({name: (decision.value, decision.reason) for name, decision in served.items()})
        try:
            record(setting, engine)
            yield engine
        finally:
            engine.close()
            del engine
            gc.collect()
            if setting.on_gpu:
                torch.cuda.empty_cache()


def model_of(engine: Engine) -> DecoderModel:
    """The model that an engine's runner computes with."""
    seen: set[int] = set()
    near: list[object] = [engine.runner]
    for _ in range(5):
        further: list[object] = []
        for item in near:
            names = (*getattr(item, "__dict__", ()), *getattr(type(item), "__slots__", ()))
            for value in (getattr(item, name, None) for name in names):
                if isinstance(value, DecoderModel):
                    return value
                if id(value) not in seen and type(value).__module__.startswith("penstock"):
                    seen.add(id(value))
                    further.append(value)
        near = further
    raise LookupError("the runner has no model")


@dataclass(frozen=True, slots=True)
class Work:
    """What a token costs: bytes of weights that a step of one token reads, and operations of its products."""

    step_bytes: float
    products: float


def work_of(engine: Engine, settings: dict[str, Any]) -> Work:
    """Of experts those count that a token goes to; of the embedding nothing, unless it makes the logits too."""
    model = model_of(engine)
    table = model.embedding.weight
    chosen = settings.get("num_experts_per_tok", 0)
    read, operations = 0.0, 0.0
    for weight in model.weights():
        own = model.head is not None and weight is table and settings.get("tie_word_embeddings")
        if weight is table and not own:
            continue
        routed = "experts" in weight.parts[0].key and weight.experts > 1
        share = chosen / weight.experts if routed else 1.0
        read += share * weight.tensor.nbytes
        if weight.pack is not None and not _is_head(weight, settings):
            operations += share * 2 * math.prod(weight.shape)
    return Work(read, operations)


def _is_head(weight: Weight, settings: dict[str, Any]) -> bool:
    """A table's product is made for few tokens of a prompt."""
    return bool(weight.shape[0] == settings["vocab_size"])


def ask(name: str, length: int, tokens: int, vocabulary: int) -> EngineRequest:
    dice = random.Random(name)
    prompt = tuple(dice.randrange(vocabulary) for _ in range(length))
    return EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))


def stop_all(engine: Engine, names: list[str]) -> None:
    for name in names:
        engine.cancel(name)
    while engine.has_work:
        engine.step()


@contextmanager
def decoding(
    setting: Setting, engine: Engine, batch: int, vocabulary: int, prompt: int = 128, warm: float = 1.0
) -> Iterator[int]:
    """Rows that decode, as many as asked for, or two if tiny, after `warm` seconds of such steps; then ends them."""
    small = setting.tiny or setting.compiling
    prompt = 5 if setting.tiny else prompt
    names = [f"row {number}" for number in range(min(batch, 2) if setting.tiny else batch)]
    for name in names:
        engine.add(ask(name, prompt, engine.scheduler.options.max_model_len - prompt, vocabulary))
    until = None
    seen: set[str] = set()
    while engine.has_work and (until is None or time.monotonic() < until):
        seen |= {output.request_id for output in engine.step() if output.tokens}
        if until is None and len(seen) == len(names):
            until = time.monotonic() + (0.0 if small else warm)
    yield len(names)
    stop_all(engine, names)


def decode_seconds(setting: Setting, engine: Engine, batch: int, vocabulary: int, prompt: int = 128) -> float:
    """Seconds of a step in which each of `batch` rows gets a token."""
    with decoding(setting, engine, batch, vocabulary, prompt) as rows:
        return timed_steps(setting, engine, rows, 1 if setting.tiny else 4 if setting.compiling else 96)


def timed_steps(setting: Setting, engine: Engine, rows: int, steps: int) -> float:
    """Seconds of one of so many steps.

    Raises:
        RuntimeError: the rows ended before.
    """
    setting.synchronize()
    started, tokens = time.perf_counter(), 0
    while engine.has_work and tokens < steps * rows:
        tokens += sum(len(output.tokens) for output in engine.step())
    setting.synchronize()
    if tokens < steps * rows:
        raise RuntimeError(f"{rows} rows gave {tokens} tokens, fewer than {steps} steps have: ask for longer ones")
    return (time.perf_counter() - started) * rows / tokens


def record(setting: Setting, engine: Engine, seconds: float = 15.0) -> None:
    """Has an engine record its steps as graphs, which it does between requests once one is over."""
    if not setting.on_gpu or setting.compiling:
        return
    engine.add(ask("first", 8, 1, 100))
    while engine.has_work:
        engine.step()
    until = time.monotonic() + seconds
    while time.monotonic() < until and engine.runner.prepare():
        pass


def prompt_seconds(setting: Setting, engine: Engine, length: int, vocabulary: int) -> float:
    """Median seconds from a prompt's arrival to its first token."""
    found = []
    for number in range(1 if setting.tiny else 2 if setting.compiling else 6):
        engine.add(ask(f"prompt {number}", length, 1, vocabulary))
        setting.synchronize()
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:] or found)
