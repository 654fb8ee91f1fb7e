"""Other people's clients, each in its own way, against a real server with the bundled model.

They live in `.venv-clients` (make clients), since they pin older versions of what Penstock runs with.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.served import start

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-clients" / "bin" / "python"
SCRIPTS = sorted(path.stem for path in HERE.glob("use_*.py"))
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches a table of prices
    "LANGSMITH_TRACING": "false",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HTTPS_PROXY": "http://127.0.0.1:9",  # what would go elsewhere fails at once
    "NO_PROXY": "127.0.0.1,localhost",
}
pytestmark = pytest.mark.timeout(300)  # the first of a script waits for all of it
Results = Callable[[str], dict[str, str]]


def scenarios(script: str) -> list[str]:
    """The names a script passes to `main`."""
    tree = ast.parse((HERE / f"{script}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "main"]
    return [node.id for argument in calls[0].args for node in ast.walk(argument) if isinstance(node, ast.Name)]


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    """A script's results: what went wrong, by scenario. Each script runs once."""
    if not PYTHON.exists():
        reason = f"{PYTHON} is not there; make clients sets it up"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    served = start(max_model_len=2048)

    @functools.cache
    def run(script: str) -> dict[str, str]:
        done = subprocess.run(
            [str(PYTHON), str(HERE / f"{script}.py"), served.url],
            capture_output=True,
            text=True,
            timeout=240,
            env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **OFFLINE},
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    try:
        served.wait_ready()
        yield run
    finally:
        served.stop()


@pytest.mark.parametrize(("script", "scenario"), [(script, name) for script in SCRIPTS for name in scenarios(script)])
def test_clients(results: Results, script: str, scenario: str) -> None:
    problem = results(script)[scenario]
    assert not problem, problem
