"""A picture of a load test: the distribution of each latency. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.cli.measure import RequestRecord
from penstock.config.errors import ConfigError

_KINDS = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raises ConfigError if a plot could not be written to `path`."""
    if path.suffix.lower() not in _KINDS:
        raise ConfigError(f"--plot is {str(path)!r}; allowed: a file that ends in {' or '.join(_KINDS)}.")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot names {path}, but there is no folder {path.parent}.")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'penstock-llm[bench]'.")


def plot_latencies(records: Sequence[RequestRecord], path: Path, *, title: str) -> None:
    """Draws cumulative distributions of TTFT, TPOT, ITL and E2EL (ms) of the completed requests."""
    check_plot(path)
    from matplotlib.figure import Figure

    done = [record for record in records if record.error is None]
    panels = (
        ("TTFT", [record.ttft for record in done]),
        ("TPOT", [record.tpot for record in done if record.tpot is not None]),
        ("ITL", [gap for record in done for gap in record.itl]),
        ("E2EL", [record.e2el for record in done]),
    )
    figure = Figure(figsize=(10, 6), layout="constrained")
    figure.suptitle(f"{title}: {len(done)} of {len(records)} requests completed")
    for axes, (name, seconds) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        values = sorted(1e3 * value for value in seconds)
        if values:
            axes.step(values, [(rank + 1) / len(values) for rank in range(len(values))], where="post")
        axes.set_xscale("log" if values and values[-1] > 10 * values[0] > 0 else "linear")
        axes.set_xlabel(f"{name}, ms")
        axes.set_ylabel("share of samples")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=144)


def plot_sweep(points: Sequence[tuple[float, dict[str, Any]]], path: Path, *, loads: str) -> None:
    """Draws (load, figures) of a sweep: throughput over the load, and latencies over throughput."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    figure.suptitle("penstock bench sweep")
    whole, *latencies = figure.subplots(2, 2).flat
    whole.plot([load for load, _ in points], [figures["output_tokens_per_s"] for _, figures in points], marker="o")
    whole.set_xlabel(loads)
    whole.set_ylabel("output tokens/s")
    whole.grid(alpha=0.3)
    for axes, name in zip(latencies, ("ttft_ms", "tpot_ms", "e2el_ms"), strict=True):
        known = [figures for _, figures in points if figures[name] is not None]
        for percent in ("p50", "p99"):
            throughputs = [figures["output_tokens_per_s"] for figures in known]
            axes.plot(throughputs, [figures[name][percent] for figures in known], marker="o", label=percent)
        axes.set_xlabel("output tokens/s")
        axes.set_ylabel(f"{name.removesuffix('_ms').upper()}, ms")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=144)
