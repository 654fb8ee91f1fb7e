"""Grammars against the JSON-Schema-Test-Suite and random answers, over three tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.grammar.conformance import NAMES, growing, suite
from benchmarks.grammar.walks import Grammars, tokenizers

# Files of the suite that hold valid documents which are refused, see docs/structured-output.md.
STRICTER = {
    "allOf", "const", "enum", "format", "type", "float-overflow", "date-time", "email", "hostname", "ipv6", "time",
    "dependentRequired", "dependencies-compatibility", "ecmascript-regex", "idn-email", "iri", "iri-reference",
    "uri-template",
}  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def grammars(request: pytest.FixtureRequest, shared_data: Path) -> Grammars:
    return tokenizers(shared_data, [request.param])[request.param]


def test_the_suite_finds_no_wrong_accept_and_no_dead_end(grammars: Grammars, shared_data: Path) -> None:
    found = suite(grammars, shared_data)
    assert found.wrong_accepts == []
    assert found.dead_ends == [] == found.invalid
    assert found.met >= 299
    assert found.right >= 1540
    assert found.stricter.keys() <= STRICTER
    assert sum(found.stricter.values()) <= 100


def test_random_answers_to_growing_schemas_end_as_valid_documents(grammars: Grammars) -> None:
    found = growing(grammars, range(7, 2000, 40))
    assert found.dead_ends == [] == found.invalid
    assert found.walks == found.met
    assert found.met >= 48
