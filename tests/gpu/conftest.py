"""Checks on a real GPU, in real sizes; the same comparisons as of tests/kernels/triton, which serve a GPU too.

    python -m pytest tests/gpu

needs torch, triton, numpy, safetensors, tokenizers, jinja2 and pytest, and no model. With --interpreted the checks run
in small sizes in Triton's interpreter, which shows that they are sound themselves.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.sizes import REAL, SMALL, Sizes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--interpreted", action="store_true", help="small sizes, in Triton's interpreter")


def _interpreted(config: pytest.Config) -> bool:
    return bool(config.getoption("--interpreted", default=False))


def pytest_configure(config: pytest.Config) -> None:
    if _interpreted(config):
        from penstock.config.environment import interpret_triton

        interpret_triton()  # before anything imports triton


@pytest.fixture(autouse=True, scope="session")
def _needs_a_gpu(pytestconfig: pytest.Config) -> None:
    if not _interpreted(pytestconfig) and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """As in KernelContext."""
    return "interpreter" if _interpreted(pytestconfig) else "cuda"


@pytest.fixture(scope="session")
def sizes(pytestconfig: pytest.Config) -> Sizes:
    return SMALL if _interpreted(pytestconfig) else REAL
