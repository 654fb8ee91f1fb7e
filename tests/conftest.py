"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpx._transports.default as httpx_transports
import httpx2._transports.default as httpx2_transports
import pytest
import torch
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis.internal.conjecture import providers

from penstock.config.environment import interpret_triton
from penstock.kernels.cpu import native
from tests.models.outcomes import pytest_runtest_logreport, pytest_sessionfinish

__all__ = ["pytest_runtest_logreport", "pytest_sessionfinish"]

torch.set_num_threads(1)  # several test processes share the cores: threads would wait for each other, not compute
if not torch.cuda.is_available():
    interpret_triton()  # before anything imports triton

# Else Hypothesis takes values from the modules that happen to be imported, which differ with the order of tests: what
# one run draws another would not.
assert hasattr(providers, "is_local_module_file")
setattr(providers, "is_local_module_file", lambda path: False)  # noqa: B010 - it offers no setting

# No test is decided by how long a busy machine takes: who asks without saying how long it waits, waits.
for _part in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _part, 60.0)

# A client reads the list of authorities when it is made, 26 ms each time, and tests make thousands.
for _transports in (httpx_transports, httpx2_transports):
    setattr(_transports, "create_ssl_context", cache(_transports.create_ssl_context))  # noqa: B010 - no public name

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real models, tokenizers, templates and traces beside the checkout; skips where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the shared test data is not at {SHARED_DATA}")
    return SHARED_DATA


def _selected(request: pytest.FixtureRequest) -> Iterator[str]:
    assert native.select_isa(request.param) == request.param
    yield request.param
    native.select_isa("auto")


# The sets that differ in products alone have the other ops of their base.
isa = pytest.fixture(
    _selected, params=[name for name in native.usable_isas() if not name.startswith("amx")], name="isa"
)
product_isa = pytest.fixture(_selected, params=native.usable_isas(), name="product_isa")
