"""Patterns of bodies stand beside the words that a refusal says of them."""

from __future__ import annotations

import re

from penstock.server import shapes
from tests.architecture.source import PACKAGE

_PATTERN = re.compile(r"\bpattern=(\S+?)[,)]")


def test_every_pattern_of_a_body_has_words() -> None:
    held = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in (PACKAGE / "server").rglob("*.py")
        for name in _PATTERN.findall(path.read_text(encoding="utf-8"))
    }
    assert {path for path, _ in held} == {"server/shapes.py"}
    assert {getattr(shapes, name) for _, name in held} == shapes.PATTERNS.keys()
