"""`penstock serve` as people first give it: nothing pulled yet, and a client of Ollama's that pulls."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import ollama
import pytest

from penstock.weights.open import bundled_model_path
from tests.library.servers import Hub, running
from tests.server.served import Served, listening
from tests.server.support import until


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running(Hub()) as server:
        files = {path.name: path.read_bytes() for path in bundled_model_path().iterdir() if path.is_file()}
        server.put("me/concierge", files)
        yield server


@pytest.fixture(scope="module", params=["1", "2"], ids=["one_http_process", "two"])
def served(request: pytest.FixtureRequest, hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("empty")
    places = {
        "PENSTOCK_MODELS": folder / "store", "HF_HOME": folder / "hf", "OLLAMA_MODELS": folder / "ollama",
        "XDG_CACHE_HOME": folder / "cache", "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0",
    }  # fmt: skip
    flags = ["--port", "0", "--threads", "1", "--max-model-len", "512", "--api-server-count", request.param]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in places.items():
            patch.setenv(name, str(value))
        found = listening("-m", "penstock", "serve", *flags)
    try:
        until(lambda: any(line.startswith("Ready: penstock-concierge") for line in found.lines), 90)
        yield found
    finally:
        status = found.stop(60)
    assert (status, [line for line in found.lines if "Traceback" in line]) == (0, []), "\n".join(found.lines)


def test_an_empty_library_serves_what_ships_and_takes_what_is_pulled(served: Served) -> None:
    asked = {"prompt": "Hello", "max_tokens": 3}
    until(lambda: httpx.get(f"{served.url}/readyz", timeout=60).status_code == 200)
    first = httpx.post(f"{served.url}/v1/completions", json=asked, timeout=60)
    assert (first.status_code, first.json()["model"]) == (200, "penstock-concierge")
    with ollama.Client(host=served.url) as api:
        told = list(api.pull("me/concierge", stream=True))
        assert told[0].status == "pulling me/concierge" and told[-1].status == "success"
        assert any(line.total and line.completed is not None and line.digest for line in told)
        assert {model.model for model in api.list().models} == {"me/concierge:latest", "penstock-concierge:latest"}
        assert api.generate("me/concierge", "Hello", options={"num_predict": 3}).eval_count == 3
    for _ in range(6):  # whichever process answers
        listed = httpx.get(f"{served.url}/v1/models", timeout=60).json()["data"]
        assert {model["id"] for model in listed} == {"me/concierge", "penstock-concierge"}
    missing = httpx.post(f"{served.url}/api/pull", json={"model": "me/nothing"}, timeout=60)
    assert "error" in json.loads(missing.text.splitlines()[-1])


def test_a_server_of_one_model_says_how_to_pull() -> None:
    flags = ["--port", "0", "--threads", "1", "--max-model-len", "256"]
    found = listening("-m", "penstock", "serve", "penstock-concierge", *flags)
    try:
        refused = httpx.post(f"{found.url}/api/pull", json={"model": "me/concierge"}, timeout=60)
        assert refused.status_code == 501
        assert "start `penstock serve` without a model's name, which serves the library" in refused.json()["error"]
    finally:
        assert found.stop(60) == 0


def test_what_a_server_starts_with_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_MODELS", "HF_HOME", "OLLAMA_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for flags, said in ((["--memory", "1MiB"], "does not fit"), (["--max-num-seqs", "0"], "allowed")):
        command = [sys.executable, "-m", "penstock", "serve", "--port", "0", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode in (1, 2) and said in done.stderr, done.stderr
