"""Bars beside their targets, as SVG written here: the machine of a benchmark may have no library of plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from benchmarks.gpu.measure import Figure

ROW, LABEL, WIDTH = 22, 360, 420  # pixels: of a bar's row, of the labels, of the longest bar
_GOOD, _BAD, _PLAIN = "#2f855a", "#c53030", "#4a6fa5"


def bars(title: str, figures: Sequence[Figure], path: Path) -> None:
    """Draws shares of limits, one bar a figure; a mark is the target."""
    shown = [figure for figure in figures if figure.share is not None and figure.share == figure.share]
    if not shown:
        return
    most = max(1.0, *(max(figure.share or 0, figure.least or 0) for figure in shown))
    lines = [_text(LABEL, 18, title, weight="bold")]
    for number, figure in enumerate(shown):
        top = 34 + number * ROW
        length = WIDTH * (figure.share or 0) / most
        colour = _PLAIN if figure.met is None else _GOOD if figure.met else _BAD
        lines.append(_text(LABEL - 8, top + 13, figure.name, anchor="end"))
        lines.append(f'<rect x="{LABEL}" y="{top}" width="{length:.1f}" height="16" fill="{colour}"/>')
        lines.append(_text(LABEL + length + 6, top + 13, f"{figure.share:.0%}"))
        target = figure.least if figure.least is not None else figure.most
        if target is not None:
            place = LABEL + WIDTH * target / most
            lines.append(f'<path d="M{place:.1f} {top - 2}v20" stroke="#000" stroke-width="2"/>')
    height = 44 + len(shown) * ROW
    size = f'width="{LABEL + WIDTH + 70}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    path.write_text("\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *lines, "</svg>\n"]))


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
