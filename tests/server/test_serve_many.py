"""`serve --models` as people run it: its own process, an engine in a process for each model, real signals."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from penstock.kernels.cpu import native
from penstock.weights.open import bundled_model_path
from tests.server.served import Served, listening
from tests.server.support import until

LIST = """
models:
  one: {model: penstock-concierge, options: {max_model_len: 256, threads: 1}}
  two: {model: FOLDER/two, options: {max_model_len: 256, threads: 1}}
  damaged: {model: FOLDER/damaged}
"""


@pytest.fixture(scope="module", params=[1, 2], ids=["one_http_process", "two"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("many")
    shutil.copytree(bundled_model_path(), folder / "two")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "config.json").write_text("{}")
    (folder / "models.yaml").write_text(LIST.replace("FOLDER", str(folder)))
    flags = ["--models", str(folder / "models.yaml"), "--port", "0", "--pack-cache", str(folder / "packed")]
    flags += ["--memory", "380MiB", "--api-server-count", str(request.param)]
    found = listening("-m", "penstock.cli.main", "serve", *flags)
    try:
        until(lambda: len(fronts(found)) == (0 if request.param == 1 else 2), 90)
        yield found
    finally:
        found.process.kill()
        found.process.wait()


def ask(served: Served, model: str, tokens: int = 3) -> httpx.Response:
    body = {"model": model, "prompt": "Hello", "max_tokens": tokens, "temperature": 0}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)


def running(served: Served, module: str) -> list[psutil.Process]:
    found = []
    for child in served.children():
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and module in " ".join(child.cmdline()):
                found.append(child)
    return found


def engines(served: Served) -> list[psutil.Process]:
    return running(served, "penstock.engine.process")


def fronts(served: Served) -> list[psutil.Process]:
    """HTTP processes, where there are several."""
    return running(served, "penstock.server.worker")


def counted(served: Served, name: str) -> dict[str, float]:
    text = httpx.get(f"{served.url}/metrics", timeout=60).text
    found = re.findall(rf'^{name}{{model_name="([^"]+)"}} (\S+)$', text, re.MULTILINE)
    return {model: float(value) for model, value in found}


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


def test_what_is_told_is_the_same_whoever_answers(served: Served) -> None:
    assert ask(served, "damaged").status_code == 503
    httpx.post(f"{served.url}/models/unload", json={"model": "two"}, timeout=60).raise_for_status()
    assert ask(served, "one").status_code == 200
    wanted = {"one": "ready", "two": "unloaded", "damaged": "failed"}

    def states() -> dict[str, str]:
        return {one["id"]: one["state"] for one in httpx.get(f"{served.url}/v1/models", timeout=60).json()["data"]}

    until(lambda: all(states() == wanted for _ in range(8)))
    (kept,) = httpx.get(f"{served.url}/api/ps", timeout=60).json()["models"]
    assert (kept["name"], kept["context_length"]) == ("one:latest", 256)
    stream = {"model": "two", "prompt": "Hello", "max_tokens": 3, "stream": True}
    assert httpx.post(f"{served.url}/v1/completions", json=stream, timeout=60).text.endswith("data: [DONE]\n\n")
    name = "penstock_generation_tokens_total"
    before = counted(served, name)
    assert before["one"] >= 3 and before["two"] >= 3
    httpx.post(f"{served.url}/models/unload", json={"model": "two"}, timeout=60).raise_for_status()
    for _ in range(8):  # counters of what has gone stay
        assert counted(served, name)["two"] >= before["two"]
    assert counted(served, "penstock_model_memory_bytes")["two"] == 0


class Holder(threading.Thread):
    """Reads a stream of a model: how many of its events came, and whether it came to its end."""

    def __init__(self, served: Served) -> None:
        super().__init__(daemon=True)
        self.url = f"{served.url}/v1/completions"
        self.events, self.ended = 0, False
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        body = {"model": "one", "prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "n": 4, "stream": True}
        with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", self.url, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                self.events += line.startswith("data: {")
                self.ended = self.ended or line == "data: [DONE]"
                self.begun.set()
        self.begun.set()


def held(served: Served, engine: psutil.Process) -> list[Holder]:
    """Streams that have begun and have not ended, of an engine that is stopped until it may go on."""
    while True:
        holders = [Holder(served) for _ in range(6)]
        assert all(holder.begun.wait(90) for holder in holders)
        engine.suspend()
        before: list[int] = []
        while before != (now := [holder.events for holder in holders]):  # what was said before that is read
            before = now
            time.sleep(1)
        if all(holder.events and not holder.ended for holder in holders):
            return holders
        engine.resume()  # it was faster than this thread: once more
        for holder in holders:
            holder.join(90)


def connections(front: psutil.Process, served: Served) -> int:
    """Those that clients have to a process."""
    port = int(served.url.rsplit(":", 1)[1])
    found = front.net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in found)


def test_an_http_process_that_dies_gives_back_what_it_used(served: Served) -> None:
    if not fronts(served):
        pytest.skip("it has the host in it")
    until(lambda: len(fronts(served)) == 2 and ask(served, "one").status_code == 200, 90)
    (engine,) = engines(served)
    holders = held(served, engine)
    victim = max(fronts(served), key=lambda front: connections(front, served))
    victim.kill()
    engine.resume()
    for holder in holders:
        holder.join(90)
    assert sum(not holder.ended for holder in holders) >= 3
    until(lambda: len(fronts(served)) == 2 and victim.pid not in [front.pid for front in fronts(served)], 90)
    unloaded = httpx.post(f"{served.url}/models/unload", json={"model": "one"}, timeout=60)  # nobody uses it any more
    assert unloaded.status_code == 200 and engines(served) == []
    assert ask(served, "one").status_code == 200


def test_sigterm_ends_all(served: Served) -> None:
    there = served.children()
    assert served.stop() == 0
    assert psutil.wait_procs(there, 60)[1] == []
