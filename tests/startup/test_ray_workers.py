"""Workers on the nodes of a Ray cluster: one of this machine, started for these tests."""

from __future__ import annotations

from collections.abc import Iterator
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
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


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
