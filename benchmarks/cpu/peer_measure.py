"""Measures every engine's work in turns, so that a busy moment of the machine meets all of them alike."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cpu.peer_engines import Engine, LlamaCpp, Run, open_engine
from benchmarks.cpu.peer_models import SHAPES, decode_bytes, gguf_path, parameters
from benchmarks.cpu.peer_works import CLASSES, Work, summary


def measure(
    run: Run, engines: Sequence[str], model: str, kind: str, works: Sequence[Work], repeat: int
) -> list[dict[str, Any]]:
    """One row a work: every engine's rates, `repeat` each after one that is dropped, and the ratios.

    Raises:
        RuntimeError: an engine died; its last words are in the message.
    """
    rows = []
    with contextlib.ExitStack() as stack:
        loaded: dict[str, Engine] = {}
        for name in engines:
            engine = open_engine(run, name, model, kind)
            if engine is not None:
                stack.callback(engine.close)
                loaded[name] = engine
        for work in works:
            rates = alternate(loaded, work, repeat)
            row = {"model": model, "format": kind, "work": work.name, **summary(rates)}
            weights = {name: CLASSES[kind].get(name, kind) for name in loaded}
            row |= {"weights": weights, "facts": {name: dict(engine.facts) for name, engine in loaded.items()}}
            row |= {"weight_bytes": decode_bytes(gguf_path(run.places, SHAPES[model], kind))}
            row |= {"parameters": parameters(SHAPES[model]), "threads": run.threads, "repeat": repeat}
            rows.append(row)
            print(f"{model} {kind} {work.name}: {_line(row['engines'])}", flush=True)
    return rows


def alternate(engines: Mapping[str, Engine], work: Work, repeat: int) -> dict[str, list[float]]:
    """Rates of `repeat` rounds. A round before them lets the workers meet the shape; llama.cpp warms up by itself."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(repeat + 1):
        for name, engine in engines.items():
            if turn == 0 and isinstance(engine, LlamaCpp):
                continue
            found = engine.measure(work, turn)
            if turn > 0:
                rates[name].append(found)
        time.sleep(0.1)
    return rates


def _line(engines: Mapping[str, Mapping[str, Any]]) -> str:
    found = (f"{name} {e['median']:.4g} [{e['least']:.4g}, {e['most']:.4g}]" for name, e in engines.items())
    return ", ".join(found)
