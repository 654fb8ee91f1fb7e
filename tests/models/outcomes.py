"""Collects what the tests of every family found, in build/families.json, for the table in docs/models.md.

A run that has only some of the tests adds to what earlier ones left.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "build" / "families.json"
COLUMNS: dict[str, re.Pattern[str]] = {  # name → the node ids of its tests, whose first group is a family of tiny.py
    "logits": re.compile(r"models/test_(?:families\.py::test_whole_prompt|encoders\.py::test_\w+)\[([\w-]+)\]"),
    "chunks": re.compile(r"models/test_families\.py::test_chunks\[([\w-]+)-\d+\]"),
    "batch": re.compile(r"models/test_families\.py::test_ragged_batch\[([\w-]+)\]"),
    "recorded": re.compile(r"runtime/test_executor\.py::test_\w+\[(?:True-|False-)?([\w-]+)\]"),
    "prefix hit": re.compile(r"engine/test_family_prefixes\.py::test_prefix_hits\[([\w-]+)\]"),
    "GGUF": re.compile(r"weights/test_gguf_\w+\.py::test_(?:logits|states|every)\w*\[([\w-]+?)(?:-tests[\w.]+)?\]"),
}
_found: dict[str, dict[str, bool]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes a test that ran, or failed before."""
    if report.when != "call" and not report.failed:
        return
    for column, pattern in COLUMNS.items():
        if match := pattern.search(report.nodeid):
            results = _found.setdefault(match[1], {})
            results[column] = results.get(column, True) and report.passed


def pytest_sessionfinish() -> None:
    """Writes the file, if any test of a family ran."""
    if not _found:
        return
    try:
        kept = json.loads(FILE.read_text())
    except (OSError, ValueError):
        kept = {}
    for family, results in _found.items():
        kept.setdefault(family, {}).update(results)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(kept, indent=1, sort_keys=True))
