"""Fixtures of the cluster's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.support import null_process


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in interpreter lies; every process started in the test runs it."""
    monkeypatch.setattr("penstock.host.child.sys.executable", str(null_process(tmp_path)))
    monkeypatch.setattr("penstock.host.process_client.FIRST_RESTART_DELAY_S", 0.01)
    return tmp_path
