"""docs/fields.md is what the API's own tables say, and what it says holds."""

from __future__ import annotations

import pytest

from penstock.config.errors import RequestError
from penstock.server.differences import DIFFERENCES, without_differences
from penstock.server.field_tables import document, page
from tests.docs.blocks import ROOT


def test_the_page_is_written_from_the_tables() -> None:
    """After a change: python -m penstock.server.field_tables > docs/fields.md."""
    assert (ROOT / "docs" / "fields.md").read_text(encoding="utf-8") == page(document())


def test_every_route_with_a_body_is_there() -> None:
    told = page(document())
    for path, operations in document()["paths"].items():
        for method, operation in operations.items():
            has_fields = "$ref" in str(operation.get("requestBody"))
            assert not has_fields or f"`{method.upper()} {path}`" in told


@pytest.mark.parametrize("body", DIFFERENCES)
def test_harmless_values_are_taken_and_others_refused(body: str) -> None:
    for name, difference in DIFFERENCES[body].items():
        for value in (*(("anything",) if difference.harmless is None else difference.harmless), None):
            assert without_differences(body, {name: value, "other": 1}) == {"other": 1}
        if difference.harmless is not None:
            with pytest.raises(RequestError, match=name):
                without_differences(body, {name: ["something"]})
