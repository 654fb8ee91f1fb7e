"""The formats as a table for docs/tools.md."""

from __future__ import annotations

from penstock.text.parsers.format import formats
from penstock.text.parsers.render import WrittenCall, render_calls


def table() -> str:
    """Markdown: one row a format, with what a call or reasoning looks like."""
    lines = ["| Format | `--tool-call-parser` | `--reasoning-parser` | Models | Looks like |", "|---|---|---|---|---|"]
    for name, entry in formats().items():
        shown = []
        if entry.reasoning is not None:
            shown.append(f"{entry.reasoning.begin.strip()}…{entry.reasoning.end}")
        if entry.calls is not None:
            shown.append(render_calls(entry.calls, [WrittenCall("f", {"a": "b"})]))
        columns = (
            name,
            ", ".join(f"`{alias}`" for alias in entry.tool_names),
            ", ".join(f"`{alias}`" for alias in entry.reasoning_names),
            entry.about,
            " ".join(f"`{_line(text)}`" for text in shown),
        )
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    """A text that stands in a cell."""
    return text.replace("\n", "⏎").replace("|", "\\|").replace("`", "'")


if __name__ == "__main__":
    print(table(), end="")
