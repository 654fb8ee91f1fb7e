"""Code blocks of README.md, CONTRIBUTING.md and docs/, and what stands after them as their output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SKIPPED = re.compile(r"<!-- not run: (.+?) -->\n*\Z")
_INDENTED = re.compile(r"(?:\A|\n\n)((?: {4}[^\n]*\n|\n(?= {4}))+)")


@dataclass(frozen=True, slots=True)
class Block:
    """A block between fences.

    Attributes:
        page, line: where it begins.
        language: what is written behind the fence.
        text: what it holds.
        printed: the block of text that follows it at once, where "…" stands for anything; None without one.
        not_run: why it is not run, as a comment before it says.
    """

    page: str
    line: int
    language: str
    text: str
    printed: str | None
    not_run: str | None

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page; those that are another's output are with that."""
    text = page.read_text(encoding="utf-8")
    found = list(_FENCE.finditer(text))
    used = set[int]()
    for index, match in enumerate(found):
        if index in used:
            continue
        after = found[index + 1] if index + 1 < len(found) else None
        printed = None
        if after is not None and after[1] == "text" and not text[match.end() : after.start()].strip():
            printed = after[2]
            used.add(index + 1)
        skipped = _SKIPPED.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page.name, line, match[1], match[2], printed, skipped[1] if skipped else None)


def indented(page: Path) -> Iterator[str]:
    """Blocks that are indented instead, outside of lists."""
    yield from (match[1] for match in _INDENTED.finditer(_FENCE.sub("", page.read_text(encoding="utf-8"))))


def agrees(said: str, printed: str) -> bool:
    """Whether what was said is what a page shows, whose "…" stands for anything."""
    pattern = ".*?".join(map(re.escape, printed.strip().split("…")))
    return re.fullmatch(pattern, said.strip(), re.DOTALL) is not None
