"""Ollama's own command line against `penstock serve`: the program where it is installed, and the requests it makes.

The requests are those of its packages `cmd` and `api`: Go's encoder writes fields that are empty, every body says that
it is JSON, and files are sent in chunks, each whether it is there or not.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.weights.open import bundled_model_path
from tests.library.servers import Hub, running
from tests.server.served import Served, listening

FOOD, KIND = "I am looking for a place to eat.", "What kind of food do you like?"
pytestmark = pytest.mark.timeout(300)  # the first waits for a server, whose models load one after the other


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running(Hub()) as server:
        files = {path.name: path.read_bytes() for path in bundled_model_path().iterdir() if path.is_file()}
        server.put("me/concierge", files)
        yield server


@pytest.fixture(scope="module")
def served(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a library, in which one model is."""
    folder = tmp_path_factory.mktemp("ollama")
    places = {
        "PENSTOCK_MODELS": folder / "store", "HF_HOME": folder / "hf", "OLLAMA_MODELS": folder / "ollama",
        "XDG_CACHE_HOME": folder / "cache", "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in places.items():
            patch.setenv(name, str(value))
        copied = [sys.executable, "-m", "penstock", "cp", "penstock-concierge", "first"]
        subprocess.run(copied, check=True, stdout=subprocess.DEVNULL)
        found = listening("-m", "penstock", "serve", "--port", "0", "--threads", "1", "--max-model-len", "512")
    try:
        yield found
    finally:
        status = found.stop(30)
    assert (status, [line for line in found.lines if "Traceback" in line]) == (0, []), "\n".join(found.lines)


@dataclass(frozen=True)
class Commands:
    """Ollama's commands as it makes them of requests."""

    url: str

    def do(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """One request and its answer; raises httpx.HTTPStatusError as the client does StatusError."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "ollama/0.12.11"}
        content = body if body is None or not isinstance(body, Mapping) else json.dumps(body)
        answer = httpx.request(method, self.url + path, content=content, headers=headers, timeout=120)
        return answer.raise_for_status()

    def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The objects of an answer; an error among them ends the command."""
        headers = {"Content-Type": "application/json", "Accept": "application/x-ndjson"}
        with httpx.stream("POST", self.url + path, content=json.dumps(body), headers=headers, timeout=120) as answer:
            found = [json.loads(line) for line in answer.iter_lines()]
        assert answer.status_code == 200, found
        assert not [line for line in found if "error" in line], found
        for line in found:
            assert "digest" not in line or (line["digest"].startswith("sha256:") and len(line["digest"]) == 71)
        return found

    def pull(self, name: str) -> list[dict[str, Any]]:
        return self.stream("/api/pull", {"model": "", "username": "", "password": "", "name": name})

    def names(self) -> list[str]:
        """`ollama list`, whose table cuts digests and reads times."""
        self.do("HEAD", "/")
        listed = self.do("GET", "/api/tags").json()["models"]
        assert all(len(model["digest"]) >= 12 and model["modified_at"] and model["size"] > 0 for model in listed)
        return [model["name"] for model in listed]

    def running(self) -> list[str]:
        listed = self.do("GET", "/api/ps").json()["models"]
        assert all(len(model["digest"]) >= 12 and model["context_length"] and model["expires_at"] for model in listed)
        return [model["name"] for model in listed]

    def show(self, name: str) -> dict[str, Any]:
        empty = {"system": "", "template": "", "verbose": False, "options": None, "name": ""}
        told: dict[str, Any] = self.do("POST", "/api/show", {"model": name, **empty}).json()
        return told

    def run(self, name: str, prompt: str) -> str:
        """`ollama run NAME PROMPT`."""
        told = self.show(name)
        assert "completion" in told["capabilities"]
        empty = {"suffix": "", "system": "", "template": ""}
        body = {"model": name, "prompt": prompt, **empty, "options": {"temperature": 0}}
        pieces = self.stream("/api/generate", body)
        assert pieces[-1]["done"] and pieces[-1]["eval_count"] > 0
        return "".join(piece["response"] for piece in pieces)

    def stop(self, name: str) -> None:
        self.show(name)
        empty = {"prompt": "", "suffix": "", "system": "", "template": "", "options": None}
        self.stream("/api/generate", {"model": name, **empty, "keep_alive": "0s"})

    def remove(self, name: str) -> None:
        self.stop(name)
        self.do("DELETE", "/api/delete", {"model": "", "name": name})

    def create(self, name: str, files: Mapping[str, bytes], **more: Any) -> list[dict[str, Any]]:
        """`ollama create`: the files, then the request."""
        return self.stream("/api/create", {"model": name, "files": self.send(files), **more, "name": ""})

    def send(self, files: Mapping[str, bytes]) -> dict[str, str]:
        digests = {file: f"sha256:{hashlib.sha256(data).hexdigest()}" for file, data in files.items()}
        for file, data in files.items():
            self.do("POST", f"/api/blobs/{digests[file]}", iter([data[:1000], data[1000:]]))  # in chunks, unmeasured
        return digests


@pytest.fixture(scope="module")
def commands(served: Served) -> Commands:
    return Commands(served.url)


def bundled() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in bundled_model_path().iterdir() if path.is_file()}


def test_list_pull_show_run_ps_stop_cp_and_rm(commands: Commands) -> None:
    assert commands.names() == ["first:latest", "penstock-concierge:latest"]
    with pytest.raises(httpx.HTTPStatusError) as unknown:  # upon which `ollama run` pulls
        commands.show("me/concierge")
    assert unknown.value.response.status_code == 404
    assert isinstance(unknown.value.response.json()["error"], str)
    assert commands.pull("me/concierge")[-1] == {"status": "success"}
    assert commands.run("me/concierge", FOOD) == KIND
    assert [name.removesuffix(":latest") for name in commands.running()] == ["me/concierge"]
    commands.stop("me/concierge")
    assert commands.running() == []
    commands.do("POST", "/api/copy", {"source": "first", "destination": "second"})
    assert "second:latest" in commands.names()
    for name in ("me/concierge", "second"):
        commands.remove(name)
    assert commands.names() == ["first:latest", "penstock-concierge:latest"]


def test_a_model_is_created_of_a_folder(commands: Commands) -> None:
    files = bundled()
    told = commands.create("made", files, system="You are brief.", parameters={"temperature": 0, "stop": ["x"]})
    assert told[-1] == {"status": "success"}
    shown = commands.show("made")
    assert "You are brief." in shown["template"] and "temperature" in shown["parameters"]
    assert commands.run("made", FOOD)
    assert commands.create("again", files)[-1] == {"status": "success"}  # its files are blobs now
    for name in ("made", "again"):
        commands.remove(name)


def test_a_model_is_created_of_a_gguf_file_and_quantised(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    command = [sys.executable, "-m", "penstock", "convert", "penstock-concierge", "-o", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    commands.create("whole", {"anything": file.read_bytes()})
    assert commands.run("whole", FOOD) == KIND
    assert commands.stream("/api/create", {"model": "small", "from": "whole", "quantize": "q8_0", "name": ""})
    assert commands.run("small", FOOD).endswith("?")
    assert commands.show("small")["details"]["quantization_level"] == "Q8_0"
    sizes = {model["name"]: model["size"] for model in commands.do("GET", "/api/tags").json()["models"]}
    assert sizes["small:latest"] < 0.7 * sizes["whole:latest"]
    for name in ("whole", "small"):
        commands.remove(name)


def test_the_program_itself(served: Served, tmp_path: Path) -> None:
    program = shutil.which("ollama")
    if program is None:
        pytest.skip("ollama is not installed: no registry of packages has it; its requests are made above")

    def ollama(*arguments: str) -> str:
        environment = {**os.environ, "OLLAMA_HOST": served.url, "HOME": str(tmp_path)}
        command = [program, *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for name, data in bundled().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "Modelfile").write_text("FROM .\nPARAMETER temperature 0\n")
    ollama("create", "mine", "-f", str(tmp_path / "Modelfile"))
    ollama("pull", "me/concierge")
    assert "mine:latest" in ollama("list")
    assert KIND in ollama("run", "mine", FOOD)
    assert "mine" in ollama("ps")
    assert "temperature" in ollama("show", "mine")
    ollama("cp", "mine", "other")
    ollama("stop", "mine")
    ollama("rm", "mine", "other", "me/concierge")
    assert "mine" not in ollama("list")
