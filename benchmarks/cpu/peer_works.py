"""What is measured and how a figure comes from times: works, weight classes, medians and ratios. Pure."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BATCH_DEPTH = 64
WORKS = ("prefill512", "prefill2048", "decode64", "decode4096", "batch16", "batch32")

# What each peer is given for a format: the same file, or the nearest in bits it runs. vLLM's wheel is given bfloat16
# throughout: more bytes to read, but its products are often the fastest.
CLASSES = {
    kind: {"llama.cpp": llama, "openvino": openvino, "vllm": "bf16"}
    for kind, llama, openvino in (
        ("q4_k_m", "q4_k_m", "int4"),
        ("q4_0", "q4_0", "int4"),
        ("iq4_xs", "iq4_xs", "int4"),
        ("mxfp4", "mxfp4", "int4"),
        ("q5_k_m", "q5_k_m", "int8"),
        ("q6_k", "q6_k", "int8"),
        ("q8_0", "q8_0", "int8"),
        ("int8", "q8_0", "int8"),
        ("fp8", "q8_0", "int8"),
        ("bf16", "bf16", "fp16"),
    )
}
AT_LOAD = ("int8", "fp8")
"""Formats Penstock makes from the bfloat16 folder while loading."""


@dataclass(frozen=True, slots=True)
class Work:
    """`sequences` prompts of `prompt` random tokens, each continued by `new` tokens, greedily.

    prefillN: N tokens over the time to the first generated one. decodeD: tokens a second of one sequence after its
    first, from a context of D. batchN: the same summed over N sequences at a context of 64, once all have their first.
    """

    name: str
    kind: str
    prompt: int
    sequences: int
    new: int


def parse_work(name: str) -> Work:
    """A work from its name.

    Raises:
        ValueError: not prefillN, decodeN or batchN.
    """
    match = re.fullmatch(r"(prefill|decode|batch)([1-9][0-9]*)", name)
    if match is None:
        raise ValueError(f"unknown work {name!r}; known forms: prefillN, decodeN, batchN, for example {WORKS}.")
    kind, size = match[1], int(match[2])
    if kind == "prefill":
        return Work(name, kind, size, 1, 1)
    if kind == "batch":
        return Work(name, kind, BATCH_DEPTH, size, 33)
    return Work(name, kind, size, 1, 65 if size < 1024 else 33)


def rate(work: Work, started: float, tokens: Sequence[Sequence[float]]) -> float:
    """Tokens a second from the arrival times of each sequence's tokens, in seconds.

    Raises:
        ValueError: an engine gave another number of tokens than asked.
    """
    lengths = [len(times) for times in tokens]
    if lengths != [work.new] * work.sequences:
        raise ValueError(f"{work.name} asked for {work.sequences} x {work.new} tokens and got {lengths}.")
    first = max(times[0] for times in tokens)
    if work.kind == "prefill":
        return work.prompt * work.sequences / (first - started)
    last = min(times[-1] for times in tokens)
    between = sum(first < time <= last for times in tokens for time in times)
    return between / (last - first)


def llama_command(work: Work, model: str, threads: int) -> tuple[str, list[str]]:
    """llama.cpp's program and arguments for one repetition of a work."""
    common = ["-m", model, "-t", str(threads)]
    if work.kind == "batch":
        new = work.new - 1
        context = str((work.prompt + new) * work.sequences)
        sizes = ["-npp", str(work.prompt), "-ntg", str(new), "-npl", str(work.sequences)]
        return "llama-batched-bench", [*common, "-c", context, *sizes, "--output-format", "jsonl"]
    if work.kind == "prefill":
        return "llama-bench", [*common, "-p", str(work.prompt), "-n", "0", "-r", "1", "-o", "json"]
    depth = ["-p", "0", "-n", str(work.new - 1), "-d", str(work.prompt)]
    return "llama-bench", [*common, *depth, "-r", "1", "-o", "json"]


def llama_rate(work: Work, printed: str) -> float:
    """Tokens a second from what the program of `llama_command` printed.

    Raises:
        ValueError: it holds not exactly one result.
    """
    if work.kind == "batch":
        lines = [line for line in printed.splitlines() if line.startswith("{")]
        found = [float(json.loads(line)["speed_tg"]) for line in lines]
    else:
        found = [float(entry["avg_ts"]) for entry in json.loads(printed)]
    if len(found) != 1:
        raise ValueError(f"{work.name}: llama.cpp printed {len(found)} results instead of 1: {printed[-400:]!r}.")
    return found[0]


def summary(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Per engine the runs, their median and range, and the ratio of every Penstock engine to the best other's median.

    Engines whose name starts with "penstock" are Penstock's. Ratios are left out where either side is missing.
    """
    engines = {
        name: {"median": statistics.median(runs), "least": min(runs), "most": max(runs), "runs": list(runs)}
        for name, runs in rates.items()
        if runs
    }
    medians = {name: statistics.median(runs) for name, runs in rates.items() if runs}
    peers = {name: median for name, median in medians.items() if not name.startswith("penstock")}
    best = max(peers, key=peers.__getitem__, default=None)
    ours = {name: median for name, median in medians.items() if name.startswith("penstock")}
    ratios = {} if best is None else {name: median / peers[best] for name, median in ours.items()}
    return {"engines": engines, "best_peer": best, "ratios": ratios}


def merge(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of an earlier run, each replaced by a newer one of the same model, format and work."""

    def key(row: Mapping[str, Any]) -> tuple[str, str, str]:
        return row["model"], row["format"], row["work"]

    rows = {key(row): dict(row) for row in old} | {key(row): dict(row) for row in new}
    return list(rows.values())


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
    """Column names and cells: one line a row, a column an engine, then the best peer and Penstock's ratios to it.

    The last column is the rate at which Penstock read weights while one sequence decoded, where their size is known.
    """
    engines = list(dict.fromkeys(name for row in rows for name in row["engines"]))
    cells = []
    for row in rows:
        medians = [row["engines"][name]["median"] if name in row["engines"] else "-" for name in engines]
        ratios = ", ".join(f"{ratio:.2f}" for ratio in row["ratios"].values()) or "-"
        size = row.get("weight_bytes") if row["work"].startswith("decode") else None
        ours = [found["median"] for name, found in row["engines"].items() if name.startswith("penstock")]
        speeds = ", ".join(f"{median * size / 1e9:.1f}" for median in ours if size) or "-"
        others = ", ".join(f"{name} {kind}" for name, kind in row["weights"].items() if kind != row["format"])
        shown = f"{row['format']} ({others})" if others else row["format"]
        cells.append([row["model"], shown, row["work"], *medians, row["best_peer"] or "-", ratios, speeds])
    return ["model", "format", "work", *engines, "best peer", "Penstock / best", "weights, GB/s"], cells
