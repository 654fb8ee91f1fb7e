"""`serve --models` as people run it: its own process, an engine in a process for each model, real signals."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from penstock.kernels.cpu import native
from penstock.weights.open import bundled_model_path
from tests.server.served import Served, listening

LIST = """
models:
  one: {model: penstock-concierge, options: {max_model_len: 256, threads: 1}}
  two: {model: FOLDER/two, options: {max_model_len: 256, threads: 1}}
  damaged: {model: FOLDER/damaged}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("many")
    shutil.copytree(bundled_model_path(), folder / "two")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "config.json").write_text("{}")
    (folder / "models.yaml").write_text(LIST.replace("FOLDER", str(folder)))
    flags = ["--models", str(folder / "models.yaml"), "--port", "0", "--pack-cache", str(folder / "packed")]
    found = listening("-m", "penstock.cli.main", "serve", *flags, "--memory", "380MiB")
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()


def ask(served: Served, model: str, tokens: int = 3) -> httpx.Response:
    body = {"model": model, "prompt": "Hello", "max_tokens": tokens, "temperature": 0}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)


def engines(served: Served) -> list[psutil.Process]:
    return [child for child in served.children() if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.skipif(not native.available(), reason="a start is kept with the native library alone")
def test_models_take_turns_die_and_come_back(served: Served) -> None:
    assert engines(served) == []
    answers = [ask(served, model) for model in ("one", "two", "one", "two")]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1  # of copies of one model
    refused = ask(served, "damaged")
    assert refused.status_code == 503
    assert refused.json()["error"]["message"].startswith("The model damaged could not be loaded: ")
    for engine in engines(served):
        engine.send_signal(signal.SIGKILL)
    late = ask(served, "one")  # whose engine may die under it, if that has not been noticed yet
    assert late.status_code == 200 or (late.status_code, late.json()["error"]["code"]) == (503, "engine_unavailable")
    assert [ask(served, model).status_code for model in ("one", "two")] == [200, 200]
    assert 1 <= len(engines(served)) <= 2


def test_sigterm_ends_all(served: Served) -> None:
    there = served.children()
    assert served.stop() == 0
    assert psutil.wait_procs(there, 10)[1] == []
