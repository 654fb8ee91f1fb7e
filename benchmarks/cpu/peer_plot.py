"""The figure of `peers measure`: one panel a work, one group of bars a model and format, one bar an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes medians, with least and most as whiskers, as PNG."""
    works = list(dict.fromkeys(row["work"] for row in rows))
    engines = list(dict.fromkeys(name for row in rows for name in row["engines"]))
    across = min(3, len(works))
    down = -(-len(works) // across)
    figure = Figure(figsize=(5.5 * across, 3.6 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False)
    for panel, work in zip(panels.flat, works, strict=False):
        _panel(panel, [row for row in rows if row["work"] == work], engines)
        panel.set_title(work)
    for panel in panels.flat[len(works) :]:
        panel.set_axis_off()
    panels.flat[0].legend(fontsize=7)
    figure.supylabel("tokens/s (median; whiskers: least and most)", fontsize=9)
    figure.savefig(path, dpi=120)


def _panel(panel: Any, rows: Sequence[Mapping[str, Any]], engines: Sequence[str]) -> None:
    width = 0.8 / len(engines)
    for index, name in enumerate(engines):
        places = [place for place, row in enumerate(rows) if name in row["engines"]]
        found = [rows[place]["engines"][name] for place in places]
        medians = [one["median"] for one in found]
        spread = [[one["median"] - one["least"] for one in found], [one["most"] - one["median"] for one in found]]
        left = [place + (index - (len(engines) - 1) / 2) * width for place in places]
        panel.bar(left, medians, width, label=name, yerr=spread if found else None, error_kw={"linewidth": 0.7})
    panel.set_xticks(range(len(rows)), [f"{row['model']}\n{row['format']}" for row in rows], fontsize=7)
    panel.tick_params(axis="y", labelsize=7)
