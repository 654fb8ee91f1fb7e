"""Which tiles are fastest: products and attention in other shapes than those that `penstock.kernels.triton` chooses.

    python -m benchmarks.gpu.tiles [--only int4,fp8_block,decode] [--seconds 150] [--out FOLDER]

Prints for each kind and number of rows the usual tile and the fastest ones, as times of the usual one's speed, and
writes them all to tiles.json. Several processes compile ahead, since that is what takes long.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.attention import CASES, LLAMA, Case, prepared
from benchmarks.gpu.linear import FIXED, LAYER, calls, matrix, repeated
from benchmarks.gpu.measure import Setting
from penstock.kernels.triton import attention_shapes, products

PRODUCTS = ("int4", "q4_k", "mxfp4", "fp8", "fp8_block", FIXED)
ATTENTION = {"decode": 0, "decode fp8": 1, "decode short": None, "prompt": 4, "latent": 9}
SHORT = ((1, 600),)
COMPILERS = 14
PROGRAMS = (264, 528, 1056)  # that a launch of one row should have at least; the first is the usual number
Candidate = tuple[str, Any]


def product_candidates(rows: int) -> Iterator[Candidate]:
    """Names and ProductTile fields; where rows are few, how many programs a launch should have too."""
    few = rows <= 64
    outputs, depths = ((32, 64, 128), (2, 4)) if few else ((64, 128, 256), (2, 3))
    for wide, warps, stages in itertools.product(outputs, (4, 8), depths):
        for programs in PROGRAMS if rows == 1 else PROGRAMS[:1]:
            tile = {"outputs": wide, "warps": warps, "stages": stages}
            yield f"{wide} outputs, {warps} warps, {stages} stages, {programs} programs", (tile, programs)


def attention_candidates(name: str) -> Iterator[Candidate]:
    """Tiles, and where few queries are attended how long parts are; 0 for as long as they are."""
    rows, keys, depths, parts = {
        "prompt": ((64, 128), (64, 128), (2, 3), (0,)),
        "latent": ((64,), (16, 32, 64), (1, 2), (0,)),
    }.get(name, ((64,), (32, 64, 128), (2, 3), (0, 128)))
    for *tile, part in itertools.product(rows, keys, (4, 8), depths, parts):
        yield (
            "{} rows, {} keys, {} warps, {} stages, parts of {}".format(*tile, part),
            (attention_shapes.Tile(*tile), part),
        )


@functools.lru_cache(maxsize=1)
def _layers(kind: str) -> tuple[Any, list[dict[str, Any]]]:
    """Ops, and a layer's weights as often as no cache holds them."""
    setting = Setting("cuda")
    ops = setting.kernels(batch_invariant=kind == FIXED)
    packed = {name: ops.pack_linear([matrix(setting, kind, shape)]) for name, shape in LAYER.items()}
    return ops, repeated(packed)


def product_runs(setting: Setting, kind: str, rows: int) -> Callable[[Any], float]:
    """Times a layer's products with a candidate, or with None as they are."""
    ops, layers = _layers(kind)
    layers = layers if rows <= 64 else layers[:1]
    usual = products._shape

    def timed(candidate: Any) -> float:
        tile, programs = candidate or ({}, products.PROGRAMS)
        shape = lambda part, count: replace(usual(part, count), **tile)  # noqa: E731
        with patch.object(products, "_shape", shape), patch.object(products, "PROGRAMS", programs):
            return setting.seconds([run for layer in layers for run in calls(setting, ops, layer, rows)]) / len(layers)

    return timed


def attention_runs(setting: Setting, name: str) -> Callable[[Any], float]:
    number = ATTENTION[name]
    case = Case(name, SHORT, *LLAMA) if number is None else CASES[number]
    made: list[Any] = []

    def timed(candidate: Any) -> float:
        tile, part = candidate or (None, 0)
        chosen = (lambda *_: tile) if tile else attention_shapes.fitted
        size = (lambda *_: part) if part else attention_shapes.part_size
        with patch.object(attention_shapes, "fitted", chosen), patch.object(attention_shapes, "part_size", size):
            if not made:
                made.append(prepared(setting, case))
            return setting.seconds([made[0]])

    return timed


def searches(only: list[str]) -> Iterator[tuple[str, Callable[[Setting], Callable[[Any], float]], list[Candidate]]]:
    for name in ATTENTION:
        if not only or name in only:
            yield name, lambda setting, name=name: attention_runs(setting, name), [*attention_candidates(name)]  # type: ignore[misc]
    for kind, rows in itertools.product(PRODUCTS, (1, 64, 4096)):
        if not only or kind in only:
            yield (
                f"{kind}, {rows} rows",
                lambda setting, kind=kind, rows=rows: product_runs(setting, kind, rows),  # type: ignore[misc]
                [*product_candidates(rows)],
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kinds, separated by commas")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"))
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    wanted = [*searches([name for name in options.only.split(",") if name])]
    if options.compile:
        mine, of = map(int, options.compile.split("/"))
        compile_some(wanted, mine, of)
        return
    started = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu.tiles", "--only", options.only, "--compile"]
    running = [
        subprocess.Popen([*command, f"{n}/{COMPILERS}"], env=environment, stderr=subprocess.DEVNULL)
        for n in range(COMPILERS)
    ]
    for process in running:
        try:
            process.wait(timeout=max(1.0, 0.5 * options.seconds - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    setting, found = Setting("cuda"), {}
    for name, make, candidates in wanted:
        if time.monotonic() > end:
            print(f"{name}: left out, the time is over")
            continue
        timed = make(setting)
        usual = timed(None)
        speeds: dict[str, float] = {}
        for text, candidate in candidates:
            if time.monotonic() > end:
                break
            try:
                speeds[text] = usual / timed(candidate)
            except Exception as error:  # a tile that the card cannot hold
                print(f"  {name}, {text}: {type(error).__name__} {str(error)[:80]}", flush=True)
        best = sorted(speeds.items(), key=lambda pair: -pair[1])[:4]
        found[name] = {"usual": usual, "speeds": speeds}
        print(f"{name}: usual {usual * 1e6:.1f} µs; " + "; ".join(f"{s:.2f} x {t}" for t, s in best), flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "tiles.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def compile_some(wanted: list[Any], mine: int, of: int) -> None:
    """Every `of`-th of all candidates, once; those that differ in programs alone are compiled together."""
    setting, number = Setting("cuda", compiling=True), 0
    for _, make, candidates in wanted:
        timed = None
        for _, candidate in [("", None), *candidates]:
            if candidate and candidate[1] in PROGRAMS[1:-1]:  # kernels are those of the most programs
                continue
            number += 1
            if number % of != mine:
                continue
            timed = timed or make(setting)
            try:
                timed(candidate)
            except Exception:  # the timing run tells of it
                continue


if __name__ == "__main__":
    main()
