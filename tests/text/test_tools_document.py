"""docs/tools.md lists the formats there are."""

from __future__ import annotations

from pathlib import Path

from penstock.text.parsers.document import table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tools.md"


def test_the_table_of_formats_is_true() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = page.split("<!-- formats: begin -->\n")[1].split("<!-- formats: end -->")[0]
    assert shown == table(), "write it anew: python -m penstock.text.parsers.document"
