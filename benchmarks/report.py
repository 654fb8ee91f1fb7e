"""How a benchmark reports: a markdown table for people, JSON for later comparison."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.cli.doctor import cpu_name
from penstock.config.machine import read_machine

RESULTS = Path(__file__).resolve().parent / "results"
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of traces, texts and models")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the JSON is written into")
    return parser


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table; floats get three significant digits."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(f"{c:.3g}" if isinstance(c, float) else str(c) for c in row) + " |" for row in rows]
    return "\n".join(lines)


def report(name: str, results: Path, figures: dict[str, Any], columns: Sequence[str], rows: Iterable[Any]) -> None:
    """Prints the table and writes `results`/`name`.json with the machine it was measured on."""
    machine = read_machine()
    setting = {
        "penstock": __version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": machine.cores,
        "memory_bytes": machine.memory_total,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    results.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"benchmark": name, "machine": setting, **figures}, indent=2)
    (results / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(markdown(columns, rows), flush=True)
