"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real models, tokenizers, templates and traces beside the checkout; skips where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the shared test data is not at {SHARED_DATA}")
    return SHARED_DATA
