"""Workers on the nodes of a Ray cluster: one of this machine, started for these tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import LLM
from penstock.config.errors import ConfigError
from penstock.startup import ray_workers
from tests.startup.test_workers import SETTINGS, answers, wait_until

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock-llm[ray]'")
BY_RAY: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Of two processors."""
    words = ["start", "--head", "--block", "--num-cpus", "2", "--include-dashboard", "false", "--disable-usage-stats"]
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as head:

        def reached() -> bool:
            with suppress(ConnectionError):
                ray.init(address="auto", namespace="penstock", log_to_driver=False)
            return bool(ray.is_initialized())

        wait_until(reached)
        yield
        ray.shutdown()
        head.terminate()


@pytest.fixture(scope="module")
def model(shared_data: Path) -> str:
    return str(shared_data / "models" / "stories260K" / "hf")


def free() -> float:
    return float(ray.available_resources().get("CPU", 0))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_stage_on_a_node_answers_as_one_process_and_its_room_is_given_back(model: str) -> None:
    with LLM(model, **SETTINGS) as alone:
        expected = answers(alone)
    wait_until(lambda: free() == 2)
    with LLM(model, **BY_RAY, **SETTINGS) as llm:
        assert answers(llm) == expected
        assert free() == 1
    wait_until(lambda: free() == 2)
    assert not [
        one for one in psutil.process_iter(["cmdline"]) if "worker_process" in " ".join(one.info["cmdline"] or ())
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_room_that_there_is_not_is_told(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "ROOM_S", 0.5)
    with pytest.raises(ConfigError, match=r"no room for 1 workers of 3 processors each: 2 are free"):
        LLM(model, **BY_RAY, **{**SETTINGS, "threads": 3})
    wait_until(lambda: free() == 2)
